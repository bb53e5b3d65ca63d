"""`dp-transformers check`: whether a model can be trained privately, and what that takes."""

from __future__ import annotations


def check(model: str) -> None:
    """Say whether MODEL, a folder or the name of a model on the Hub, can be trained privately."""
    raise NotImplementedError
