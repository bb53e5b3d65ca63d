"""Every allowance for rounding: what is added to norms, and by how much coefficients shrink, so that no clipped
gradient comes out longer than the bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .precision import FULL_PRECISION, product_settings

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
SPLIT_ROUNDING = 2.0**-17  # relative, of precision.split()


def squared_ghost_norm(value: torch.Tensor, max_value: torch.Tensor, unlike: torch.Tensor) -> torch.Tensor:
    """The square of a :class:`.norms.GhostNorm`: a sum of squares cannot be negative, and must not come out too
    small."""
    norm_sq, largest = value.clamp(min=0), max_value.square()
    error = (GHOST_ERROR * largest).sub_(norm_sq, alpha=GHOST_ERROR_TOLERATED).clamp_(min=0)
    return error.addcmul_(unlike, unlike, value=GHOST_ERROR).add_(norm_sq).add_(largest, alpha=GHOST_SLACK)


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

# In the two-pass modes the gradient that is summed is not the one that was measured: the second pass rounds c·loss
# anew. The coefficient is shrunk by this much so that the sum still respects C.
SECOND_PASS_SLACK = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}
REDUCED_FP32_SLACK = 2.0**-7  # where fp32 products are allowed to run as TF32 or bf16


def second_pass_slack(device: torch.device, dtypes: Iterable[torch.dtype], *, convolves: bool) -> float:
    """Returns by how much the coefficients of the second pass are shrunk, where these dtypes were seen in the
    first."""
    matmul, conv = (setting.fp32_precision for setting in product_settings(device))
    used = {matmul, conv} if convolves else {matmul}  # cuDNN's convolutions use TF32 unless told otherwise
    return max(0.0 if used <= FULL_PRECISION else REDUCED_FP32_SLACK, *(SECOND_PASS_SLACK[dtype] for dtype in dtypes))


def may_differ(device: torch.device) -> bool:
    """Returns True if an operation on ``device`` may give other numbers when it runs again: kernels for accelerators
    add up in no fixed order unless they are told to."""
    return device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()
