"""Mechanisms as values: the releases of a run, and their privacy cost. Free of torch."""
