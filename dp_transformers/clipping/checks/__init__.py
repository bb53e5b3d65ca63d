"""Checks before anything is trained, all on made-up or public input."""
