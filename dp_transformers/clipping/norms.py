"""From what was measured of every parameter's per-example gradients to their squared norm over all parameters together.

What a norm is computed from differs from parameter to parameter (:mod:`.terms`); what then happens to numbers of shape (B,) does not, so
that is done once for all parameters of a pass, however many they are.

Shape legend: b example, t position, m parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .precision import SPLIT_ROUNDING

# A ghost norm is a difference of large numbers. Adding this fraction of the largest value it could have had keeps it from
# coming out too small (a clipped example would then be longer than C); it costs at most 4e-6 relative on ordinary data.
GHOST_SLACK = torch.finfo(torch.float32).eps / 16
# The roundings of inner products add up like random numbers, to a fraction of the positions' own squares: 1e-6 relative on ordinary
# data, and the more the fewer positions cancel. Where they cancel further than tolerated, the roundings may all be alike.
GHOST_ERROR, GHOST_ERROR_TOLERATED = 16 * torch.finfo(torch.float32).eps, 1e-2
# Squared norms that are nothing but allowances of an example without gradient; the smallest bound that a clipper takes is 1e-12.
NEGLIGIBLE = 1e-34
FP32_UNIT = torch.finfo(torch.float32).eps / 2
# Numbers of one parameter's positions up to which they are held, to be looked at together with others'.
HELD = 2**14


class Length(NamedTuple):
    """The norm itself, (B,) or (M, B)."""

    norm: torch.Tensor

    def squared(self) -> torch.Tensor:
        return self.norm.square()


class InnerProduct(NamedTuple):
    """A squared norm that is a sum of positive and negative parts; (B,) or (M, B), as are these two of the lengths of its positions.

    ``reach`` is their sum, the largest norm it could have been of; ``unlike`` is what they would come to if no two were alike.
    """

    value: torch.Tensor
    reach: torch.Tensor
    unlike: torch.Tensor

    @classmethod
    def between(cls, value: torch.Tensor, lengths_bt: torch.Tensor) -> InnerProduct:
        return cls(value, lengths_bt.sum(1), torch.linalg.vector_norm(lengths_bt, dim=1))

    def squared(self) -> torch.Tensor:
        """A sum of squares cannot be negative, and must not come out too small."""
        norm_sq, largest = self.value.clamp(min=0), self.reach.square()
        error = (GHOST_ERROR * largest).sub_(norm_sq, alpha=GHOST_ERROR_TOLERATED).clamp_(min=0)
        return error.addcmul_(self.unlike, self.unlike, value=GHOST_ERROR).add_(norm_sq).add_(largest, alpha=GHOST_SLACK)


Measured = Length | InnerProduct


@dataclass(frozen=True)
class Rounding:
    """What a sum over positions may be off by that is not the one that was measured.

    ``part`` is the relative rounding of each position's part; sums are in float32. Roundings of unlike parts add up like random numbers;
    those of equal parts all point the same way. The second counts only for what exceeds ``tolerated`` · norm, so that norms of ordinary
    data, where positions do not cancel, stay what they are.
    """

    part: float
    tolerated: float

    def lengthened(self, norm: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The norm (..., B), with what positions' parts of these lengths (..., B, T) may add to it."""
        number = lengths.shape[-1]
        unlike = torch.linalg.vector_norm(lengths, dim=-1) * (self.part**2 + number * FP32_UNIT**2) ** 0.5
        alike = (lengths.sum(-1) * (self.part + number * FP32_UNIT)).sub_(norm, alpha=self.tolerated)
        return torch.maximum(unlike, alike).add_(norm)


FP32 = Rounding(0.0, 1e-3)
SPLIT = Rounding(SPLIT_ROUNDING, 1e-5)  # factors in bf16, times a coefficient
BF16 = Rounding(torch.finfo(torch.bfloat16).eps / 2, 2.0**-6)  # a backward pass in bf16 or fp16, whose coefficients have slack


class Norms:
    """Squared norms of parameters, added up at the end."""

    def __init__(self) -> None:
        self._alike: dict[Any, list[tuple[Measured, torch.Tensor | None]]] = defaultdict(list)

    def add(self, measured: Measured, lengths_bt: torch.Tensor | None = None, rounding: Rounding | None = None) -> None:
        """Of one parameter; of a sum over positions whose parts have these lengths, from which ``rounding`` may have taken something."""
        if lengths_bt is not None and lengths_bt.numel() > HELD:
            measured, lengths_bt = Length(rounding.lengthened(measured.squared().sqrt(), lengths_bt)), None
        positions = None if lengths_bt is None else lengths_bt.shape[1]
        self._alike[type(measured), measured[0].device, positions, rounding].append((measured, lengths_bt))

    def total(self, device: torch.device) -> torch.Tensor | None:
        """(B,); None if nothing was added."""
        totals = []
        for (kind, _, positions, rounding), members in self._alike.items():
            measured, lengths = zip(*members, strict=True)
            norm_sq = kind(*map(_stacked, zip(*measured, strict=True))).squared()
            if positions is not None:
                norm_sq = rounding.lengthened(norm_sq.sqrt(), _stacked(lengths)).square()
            totals.append((norm_sq.sum(0) if len(members) > 1 else norm_sq).to(device))
        if not totals:
            return None
        total_b = sum(totals[1:], totals[0])
        return total_b.masked_fill(total_b < NEGLIGIBLE, 0.0)


def _stacked(members: Sequence[torch.Tensor]) -> torch.Tensor:
    """(M, ...); of one, itself."""
    return members[0] if len(members) == 1 else torch.stack(members)
