"""What the last digits of a released float tell, and what keeps them from telling it.

The Gaussian mechanism is proven private for real numbers. A float32 number has 24 binary digits, so noise z is a
multiple of 2⁻²³ of a power of two below |z|. A sum s + z may be much smaller than z, and then it has finer digits, and
those are the digits of s: they tell s whatever the noise is (Haney et al. 2022, arXiv 2207.13793). Two numbers that
are made of one radius and angle take few of the pairs of values that there are, which tells s as well (Holohan and
Braghin 2021, arXiv 2107.10138). Both end with the two steps that are here:

- The sum of all ranks with its noise is dithered: a uniform number u is added, ``DITHER`` times as wide as the
  standard deviation is long, in 2³² steps. Within its width lie 2¹⁵ of the values that z takes where z is one standard
  deviation long, and 2¹² where it is eight, and its own steps are much finer than what is released. u adds
  1.3 · 10⁻⁶ to the variance of z. All ranks draw the same u for the same sum, from a secret that they share.
- What is released is rounded to multiples of ``step(std)``, which are as fine as the digits of a float32 as long as
  the noise, so that a sum that comes out small has no finer ones, in float64 neither.

Nothing is added to a sum afterwards. Adding independent numbers and rounding are functions of a sum with noise z, and
cost no privacy. This is no proof for floats: where a digit is rounded, z + u has the probabilities of real noise to
some 2⁻¹⁶.
"""

from __future__ import annotations

import math

import torch

DITHER = 2.0**-8  # the width of the uniform numbers, over the standard deviation of the noise
_DIGITS = 24  # binary, that are kept of the standard deviation of the noise
_SMALLEST = 2.0**-90  # step, below which nothing is rounded: float32 could not hold the quotients


def step(std: float) -> float:
    """The distance of two released numbers with noise of this standard deviation: a power of two, so that floats are
    divided by it and multiplied with it exactly, between 2⁻²⁵ and 2⁻²⁴ of ``std``."""
    return 2.0 ** (math.frexp(std)[1] - 1 - _DIGITS)


def round_digits(tensors: list[torch.Tensor], std: float) -> None:
    """Round tensors in place to multiples of the step for noise of this standard deviation; where that is 0, or less
    than 10⁻²⁰, leave them."""
    if std and (power := step(std)) >= _SMALLEST:
        torch._foreach_div_(tensors, power)
        torch._foreach_round_(tensors)
        torch._foreach_mul_(tensors, power)
