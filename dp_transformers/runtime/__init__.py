"""The runtime of a training: its processes and its random generators."""
