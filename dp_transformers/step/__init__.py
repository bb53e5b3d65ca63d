"""One private step, and what of it is kept on disk."""
