"""The noise of a private training: its generators, and how it is drawn for gradients that lie over several processes."""
