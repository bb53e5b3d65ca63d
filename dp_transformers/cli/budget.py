"""`dp-transformers budget`: what a private training costs, before it is trained. Free of torch."""

from __future__ import annotations


def budget() -> None:
    """Say what epsilon, noise, batch size, number of steps or of epochs a training needs, given the others."""
    raise NotImplementedError
