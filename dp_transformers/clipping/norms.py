"""Adds the norms of all parameters' per-example gradients to one squared norm for each example, with allowances for
rounding, so that no clipped gradient is longer than the bound.

Norms are computed in a different way for each parameter (:mod:`.terms`). The following operations on (B,) numbers are
the same, so they are done once for all parameters of a pass.

Shape legend: b example, t position, m parameter.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# A ghost norm is a difference of large numbers. Adding this fraction of its largest possible value keeps it from being
# too small (a clipped example would then be longer than C). It costs at most 4e-6 relative on ordinary data.
GHOST_SLACK = torch.finfo(torch.float32).eps / 16
# The rounding errors of inner products add up like random numbers, to a fraction of the positions' own squares: 1e-6
# relative on ordinary data, and more the fewer positions cancel. If positions cancel further than tolerated, the
# errors may all have one sign.
GHOST_ERROR, GHOST_ERROR_TOLERATED = 16 * torch.finfo(torch.float32).eps, 1e-2
# Smaller squared norms are only allowances, of an example without gradient. The smallest clipping bound is 1e-12.
NEGLIGIBLE = 1e-34
FP32_UNIT = torch.finfo(torch.float32).eps / 2
SPLIT_ROUNDING = 2.0**-17  # relative, of precision.split()


def squared_ghost_norm(value: torch.Tensor, max_value: torch.Tensor, unlike: torch.Tensor) -> torch.Tensor:
    """Return the square of a :class:`GhostNorm`, never negative and, with allowances, never too small."""
    norm_sq, largest = value.clamp(min=0), max_value.square()
    error = (GHOST_ERROR * largest).sub_(norm_sq, alpha=GHOST_ERROR_TOLERATED).clamp_(min=0)
    return error.addcmul_(unlike, unlike, value=GHOST_ERROR).add_(norm_sq).add_(largest, alpha=GHOST_SLACK)


@dataclass(frozen=True)
class RoundingAllowance:
    """Upper bound on the rounding error of a sum over positions that is computed separately from the measured norm.

    Rounding errors of different parts add up like random numbers; those of equal parts all have one sign. The second
    counts only beyond ``threshold`` · norm, so that norms of ordinary data, where positions do not cancel, do not
    change.

    Attributes:
        relative: Relative rounding error of each position's part; sums are in float32.
    """

    relative: float
    threshold: float

    def inflate(self, norm: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the norm (..., B), increased by the largest rounding error for positions of norms (..., B, T)."""
        number = lengths.shape[-1]
        unlike = torch.linalg.vector_norm(lengths, dim=-1) * (self.relative**2 + number * FP32_UNIT**2) ** 0.5
        alike = (lengths.sum(-1) * (self.relative + number * FP32_UNIT)).sub_(norm, alpha=self.threshold)
        return torch.maximum(unlike, alike).add_(norm)


FP32 = RoundingAllowance(0.0, 1e-3)
SPLIT = RoundingAllowance(SPLIT_ROUNDING, 1e-5)  # factors in bf16, times a coefficient


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
