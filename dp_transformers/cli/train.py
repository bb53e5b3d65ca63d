"""`dp-transformers train`: run a recipe."""

from __future__ import annotations


def train(recipe: str) -> None:
    """Train by RECIPE."""
    raise NotImplementedError
