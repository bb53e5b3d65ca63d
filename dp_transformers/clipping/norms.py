"""Adds the norms of all parameters' per-example gradients to one squared norm for each example, with the allowances of
:mod:`.rounding`.

Norms are computed in a different way for each parameter (:mod:`.terms`). The following operations on (B,) numbers are
the same, so they are done once for all parameters of a pass.

Shape legend: b example, t position, m parameter.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch

from .rounding import NEGLIGIBLE, RoundingAllowance, squared_ghost_norm

# Position norms of one parameter up to this size are kept, and processed together with those of other parameters.
MAX_HELD_NUMEL = 2**14


class DirectNorm(NamedTuple):
    """A norm, (B,) or (M, B)."""

    norm: torch.Tensor

    def squared(self) -> torch.Tensor:
        return self.norm.square()


class GhostNorm(NamedTuple):
    """A squared norm computed as a sum of positive and negative parts, (B,) or (M, B).

    Attributes:
        max_value: Sum of the lengths of its positions, an upper bound of the norm.
        unlike: Root of the sum of their squares, the norm if all positions were orthogonal.
    """

    value: torch.Tensor
    max_value: torch.Tensor
    unlike: torch.Tensor

    @classmethod
    def between(cls, value: torch.Tensor, lengths_bt: torch.Tensor) -> GhostNorm:
        return cls(value, lengths_bt.sum(1), torch.linalg.vector_norm(lengths_bt, dim=1))

    def squared(self) -> torch.Tensor:
        return squared_ghost_norm(*self)


Measured = DirectNorm | GhostNorm


class NormAccumulator:
    """Collects the norms of parameters, and adds up their squares at the end."""

    def __init__(self) -> None:
        self._alike: dict[Any, list[tuple[Measured, torch.Tensor | None]]] = defaultdict(list)

    def add(
        self, measured: Measured, lengths_bt: torch.Tensor | None = None, rounding: RoundingAllowance | None = None
    ) -> None:
        """Add one parameter's norm. If its gradient is a sum over positions with norms ``lengths_bt``, ``rounding`` is
        the allowance for the rounding of this sum."""
        if lengths_bt is not None and rounding is not None and lengths_bt.numel() > MAX_HELD_NUMEL:
            measured, lengths_bt = DirectNorm(rounding.inflate(measured.squared().sqrt(), lengths_bt)), None
        positions = None if lengths_bt is None else lengths_bt.shape[1]
        self._alike[type(measured), measured[0].device, positions, rounding].append((measured, lengths_bt))

    def total(self, device: torch.device) -> torch.Tensor | None:
        """Return the (B,) total of the squared norms; None if nothing was added."""
        totals = []
        for (kind, _, positions, rounding), members in self._alike.items():
            measured, lengths = zip(*members, strict=True)
            norm_sq = kind(*map(_stacked, zip(*measured, strict=True))).squared()
            if positions is not None:
                norm_sq = rounding.inflate(norm_sq.sqrt(), _stacked(lengths)).square()
            totals.append((norm_sq.sum(0) if len(members) > 1 else norm_sq).to(device))
        if not totals:
            return None
        total_b = sum(totals[1:], totals[0])
        return total_b.masked_fill(total_b < NEGLIGIBLE, 0.0)


def _stacked(members: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Stack into (M, ...); return a single member itself."""
    return members[0] if len(members) == 1 else torch.stack(members)
