"""What a step releases is rounded to a grid, fine beside the noise and coarse beside the last digits of a float.

The Gaussian mechanism is proven private for real numbers. A float32 number has 24 binary digits, so noise z is a
multiple of 2⁻²³ of a power of two below |z|. A sum s + z may be much smaller than z, and then it has finer digits, and
those are the digits of s: they tell s whatever the noise is (Haney et al. 2022, arXiv 2207.13793). Multiples of
``step(std)`` have none of them. Between two of them the noise takes 2¹⁵ values where it is one standard deviation
long, and 2¹² where it is eight, so that each multiple is about as likely as with noise of real numbers. Rounding is a
function of what would be released anyway: it costs no privacy, and at most 1.3 · 10⁻⁶ of the noise's variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

DIGITS = 8  # binary, that are kept of the standard deviation of the noise


def step(std: float) -> float:
    """The distance of two numbers of the grid for noise of this standard deviation: a power of two, so that floats
    are divided by it and multiplied with it exactly, between 2⁻⁹ and 2⁻⁸ of ``std``."""
    return 2.0 ** (math.frexp(std)[1] - 1 - DIGITS)


def round_to_grid(tensors: Sequence[torch.Tensor], stds: Sequence[float]) -> None:
    """Round each tensor in place to the grid for noise of its standard deviation; where that is 0, leave it."""
    noised = [(tensor, step(std)) for tensor, std in zip(tensors, stds, strict=True) if std]
    if not noised:
        return
    rounded, steps = (list(x) for x in zip(*noised, strict=True))
    torch._foreach_div_(rounded, steps)
    torch._foreach_round_(rounded)
    torch._foreach_mul_(rounded, steps)
