"""Adds the norms of each parameter's per-example gradients to one squared norm of each example, with the allowances of
:mod:`.rounding`.

What a norm is computed from differs from parameter to parameter (:mod:`.terms`); what then happens to numbers of shape
(B,) does not, so that is done once for all parameters of a pass, however many they are.

Shape legend: b example, t position, m parameter.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch

from .rounding import NEGLIGIBLE, RoundingAllowance, squared_ghost_norm

# Numbers of one parameter's positions up to which they are held, to be looked at together with others'.
MAX_HELD_NUMEL = 2**14


class DirectNorm(NamedTuple):
    """The norm itself, (B,) or (M, B)."""

    norm: torch.Tensor

    def squared(self) -> torch.Tensor:
        return self.norm.square()


class GhostNorm(NamedTuple):
    """A squared norm that is a sum of positive and negative parts; (B,) or (M, B), as are these two of the lengths of
    its positions.

    ``max_value`` is their sum, the largest norm it could have been of; ``unlike`` is what they would come to if no two
    were alike.
    """

    value: torch.Tensor
    max_value: torch.Tensor
    unlike: torch.Tensor

    @classmethod
    def between(cls, value: torch.Tensor, lengths_bt: torch.Tensor) -> GhostNorm:
        return cls(value, lengths_bt.sum(1), torch.linalg.vector_norm(lengths_bt, dim=1))

    def squared(self) -> torch.Tensor:
        """A sum of squares cannot be negative, and must not come out too small."""
        return squared_ghost_norm(*self)


Measured = DirectNorm | GhostNorm


class NormAccumulator:
    """Squared norms of parameters, added up at the end."""

    def __init__(self) -> None:
        self._alike: dict[Any, list[tuple[Measured, torch.Tensor | None]]] = defaultdict(list)

    def add(
        self, measured: Measured, lengths_bt: torch.Tensor | None = None, rounding: RoundingAllowance | None = None
    ) -> None:
        """Add one parameter's norm. If its gradient is a sum over positions, whose norms are ``lengths_bt``,
        ``rounding`` says what rounding may remove."""
        if lengths_bt is not None and rounding is not None and lengths_bt.numel() > MAX_HELD_NUMEL:
            measured, lengths_bt = DirectNorm(rounding.inflate(measured.squared().sqrt(), lengths_bt)), None
        positions = None if lengths_bt is None else lengths_bt.shape[1]
        self._alike[type(measured), measured[0].device, positions, rounding].append((measured, lengths_bt))

    def total(self, device: torch.device) -> torch.Tensor | None:
        """(B,); None if nothing was added."""
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
    """(M, ...); of one, itself."""
    return members[0] if len(members) == 1 else torch.stack(members)
