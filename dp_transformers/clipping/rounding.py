"""Allowances for rounding that are added to norms, so that no clipped gradient is longer than the bound."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Return the square of a :class:`.norms.GhostNorm`, never negative and, with allowances, never too small."""
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


def may_differ(device: torch.device) -> bool:
    """Return True if an operation on ``device`` may give different numbers when it runs again: kernels of accelerators
    add up in no fixed order by default."""
    return device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()
