"""What the last digits of a released float tell, and what keeps them from telling it.

The Gaussian mechanism is proven private for real numbers. A float32 number has 24 binary digits, so noise z is a
multiple of 2⁻²³ of a power of two below |z|. A sum s + z may be much smaller than z, and then it has finer digits, and
those are the digits of s: they tell s whatever the noise is (Haney et al. 2022, arXiv 2207.13793). Two numbers that
are made of one radius and angle take few of the pairs of values that there are, which tells s as well (Holohan and
Braghin 2021, arXiv 2107.10138). Both end with the two steps that are here:

- Every source of noise adds a dither after it has added z: a uniform number u, ``DITHER`` times as wide as the
  standard deviation is long, of 16 bits, so that its last one is the last digit of a float of this length. Of the
  values that z takes 2¹⁵ lie within the width of u where z is one standard deviation long, and 2¹² where it is eight:
  z + u is as smooth as noise of real numbers to about this fineness. u adds 1.3 · 10⁻⁶ to the variance of z.
- What is released, after the sums of all ranks, is rounded to multiples of ``step(std)``, which are as fine as the
  digits of a float as long as the noise. So a sum that comes out small has no finer ones, in float64 neither.

Adding independent noise and rounding are functions of a sum with noise z, and cost no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

DITHER = 2.0**-8  # the width of the uniform numbers, over the standard deviation of the noise
_DIGITS = 24  # binary, that are kept of the standard deviation of the noise


def step(std: float) -> float:
    """The distance of two released numbers with noise of this standard deviation: a power of two, so that floats are
    divided by it and multiplied with it exactly, between 2⁻²⁵ and 2⁻²⁴ of ``std``."""
    return 2.0 ** (math.frexp(std)[1] - 1 - _DIGITS)


def round_digits(tensors: Sequence[torch.Tensor], stds: Sequence[float]) -> None:
    """Round each tensor in place to multiples of the step of its noise's standard deviation; where that is 0, leave
    it."""
    noised = [(tensor, step(std)) for tensor, std in zip(tensors, stds, strict=True) if std]
    if not noised:
        return
    rounded, steps = (list(x) for x in zip(*noised, strict=True))
    torch._foreach_div_(rounded, steps)
    torch._foreach_round_(rounded)
    torch._foreach_mul_(rounded, steps)
