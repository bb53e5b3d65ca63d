"""Hides what the last digits of a released float would reveal: dithering and rounding.

The Gaussian mechanism is proven private for real numbers. A float32 number has 24 binary digits, so noise z is a
multiple of 2⁻²³ of a power of two below |z|. A sum s + z may be much smaller than z. It then has finer digits than z,
which are digits of s: they reveal s whatever the noise is (Haney et al. 2022, arXiv 2207.13793). Two numbers made from
one radius and angle take only few of the possible pairs of values, which reveals s as well (Holohan and Braghin 2021,
arXiv 2107.10138). Two steps prevent both:

- The sum of all ranks with its noise is dithered: a uniform number u is added, of width ``DITHER`` times the standard
  deviation, in 2³² steps. Within this width lie 2¹⁵ of the values of z near one standard deviation, and 2¹² near
  eight, and the steps of u are much finer than the released digits. u adds 1.3 · 10⁻⁶ to the variance of z. All ranks
  draw the same u for the same sum, from a shared secret.
- The released number is rounded to multiples of ``step(std)``, the digits of a float32 as large as the noise. So a
  small sum has no finer digits, not even in float64.

Nothing is added to a sum afterwards. Adding independent numbers and rounding are post-processing of a sum with noise
z, and cost no privacy. This is not a proof for floats: at the rounded digits, z + u has the probabilities of real
noise to about 2⁻¹⁶."""

from __future__ import annotations

import math

import torch

DITHER = 2.0**-8  # width of the uniform numbers, over the standard deviation of the noise
_DIGITS = 24  # binary digits that are kept of the standard deviation of the noise
_SMALLEST = 2.0**-90  # smaller steps are not rounded to, because float32 could not hold the quotients


def step(std: float) -> float:
    """Return the distance between two released numbers with noise of this standard deviation: a power of two, so that
    division and multiplication are exact, between 2⁻²⁵ and 2⁻²⁴ of ``std``."""
    return 2.0 ** (math.frexp(std)[1] - 1 - _DIGITS)


def round_digits(tensors: list[torch.Tensor], std: float) -> None:
    """Round tensors in place to multiples of ``step(std)``. Nothing is rounded if ``std`` is 0 or below 10⁻²⁰."""
    if std and (power := step(std)) >= _SMALLEST:
        torch._foreach_div_(tensors, power)
        torch._foreach_round_(tensors)
        torch._foreach_mul_(tensors, power)
