"""Adds the norms of each parameter's per-example gradients to one squared norm of each example, with allowances for
rounding.

What a norm is computed from differs from parameter to parameter (:mod:`.terms`); what then happens to numbers of shape
(B,) does not, so that is done once for all parameters of a pass, however many they are.

Shape legend: b example, t position, m parameter.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .precision import SPLIT_ROUNDING

# A ghost norm is a difference of large numbers. Adding this fraction of the largest value it could have had keeps it
# from coming out too small (a clipped example would then be longer than C); it costs at most 4e-6 relative on ordinary
# data.
GHOST_SLACK = torch.finfo(torch.float32).eps / 16
# The roundings of inner products add up like random numbers, to a fraction of the positions' own squares: 1e-6
# relative on ordinary data, and the more the fewer positions cancel. Where they cancel further than tolerated, the
# roundings may all be alike.
GHOST_ERROR, GHOST_ERROR_TOLERATED = 16 * torch.finfo(torch.float32).eps, 1e-2
# Squared norms that are nothing but allowances of an example without gradient; the smallest bound that a clipper takes
# is 1e-12.
NEGLIGIBLE = 1e-34
FP32_UNIT = torch.finfo(torch.float32).eps / 2
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
        norm_sq, largest = self.value.clamp(min=0), self.max_value.square()
        error = (GHOST_ERROR * largest).sub_(norm_sq, alpha=GHOST_ERROR_TOLERATED).clamp_(min=0)
        return (
            error.addcmul_(self.unlike, self.unlike, value=GHOST_ERROR).add_(norm_sq).add_(largest, alpha=GHOST_SLACK)
        )


Measured = DirectNorm | GhostNorm


@dataclass(frozen=True)
class RoundingAllowance:
    """Upper bound on the rounding error of a sum over positions that is computed separately from the measured norm.

    ``relative`` is the relative rounding of each position's part; sums are in float32. Roundings of unlike parts add
    up like random numbers; those of equal parts all point the same way. The second counts only for what exceeds
    ``threshold`` · norm, so that norms of ordinary data, where positions do not cancel, stay what they are.
    """

    relative: float
    threshold: float

    def inflate(self, norm: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The norm (..., B), enlarged by what rounding may add where positions have these norms (..., B, T)."""
        number = lengths.shape[-1]
        unlike = torch.linalg.vector_norm(lengths, dim=-1) * (self.relative**2 + number * FP32_UNIT**2) ** 0.5
        alike = (lengths.sum(-1) * (self.relative + number * FP32_UNIT)).sub_(norm, alpha=self.threshold)
        return torch.maximum(unlike, alike).add_(norm)


FP32 = RoundingAllowance(0.0, 1e-3)
SPLIT = RoundingAllowance(SPLIT_ROUNDING, 1e-5)  # factors in bf16, times a coefficient
# a backward pass in bf16 or fp16, whose coefficients have slack
BF16 = RoundingAllowance(torch.finfo(torch.bfloat16).eps / 2, 2.0**-6)


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
