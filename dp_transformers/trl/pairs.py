"""A preference is one example: its chosen and its rejected text are clipped together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .base import TRLMixin


class PairsAsRows:
    """Gives the batches of a collator for preferences one row for each pair.

    TRL's collators return (2B, T) tensors, all chosen texts before all rejected ones. Here they are (B, 2, T), so that
    whatever looks at rows looks at examples.

    Args:
        collate: It makes a batch of a list of preferences.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]):
        self.collate = collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        size = len(examples)
        batch = self.collate(examples)
        return {name: torch.stack(x.chunk(2), 1) if len(x) == 2 * size else x for name, x in batch.items()}


class PairsMixin(TRLMixin):
    """Private training for a trainer whose rows are preferences."""

    def training_collator(self) -> Callable[[list[Any]], Any]:
        """Return the collator of the class, with a row for each pair."""
        return PairsAsRows(super().training_collator())


def sides(inputs: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of the chosen texts, (B, T) each, and those of the rejected ones."""
    chosen, rejected = ({name: inputs[name][:, side] for name in names} for side in (0, 1))
    return chosen, rejected
