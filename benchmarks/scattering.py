"""The scattering transform of images with fixed Morlet wavelets: features that are learnt from no data.

Bruna and Mallat 2012 (arXiv 1203.1513), with the filters of Kymatio (arXiv 1812.11214): two scales, eight angles.
"""

from __future__ import annotations

import math
from functools import cache

import torch

SCALES, ANGLES, CHANNELS = 2, 8, 81  # 1 + 16 + 64: the mean, one wavelet, and one wavelet after a finer one
STEP = 2**SCALES


def gabor(size: int, sigma: float, angle: float, frequency: float, slant: float) -> torch.Tensor:
    """A wave under a Gaussian window, (size, size) complex128 around its corner, periodic."""
    grid = torch.arange(-2 * size, 3 * size, dtype=torch.float64)
    r, c = torch.meshgrid(grid, grid, indexing="ij")
    along, across = r * math.cos(angle) + c * math.sin(angle), c * math.cos(angle) - r * math.sin(angle)
    window = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)) * slant / (2 * math.pi * sigma**2)
    return torch.polar(window, frequency * along).reshape(5, size, 5, size).sum((0, 2))


def morlet(size: int, scale: int, angle: float) -> torch.Tensor:
    """The Fourier transform of a wave whose sum is 0."""
    sigma, slant = 0.8 * 2**scale, 4 / ANGLES
    wave, window = (gabor(size, sigma, angle, f, slant) for f in (0.75 * math.pi / 2**scale, 0.0))
    return torch.fft.fft2(wave - window * wave.sum() / window.sum()).real.to(torch.float32)


@cache
def filters(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fine and coarse wavelets, (8, size, size), and the rows of the smoothing Gaussian at every fourth pixel."""
    angles = [(ANGLES // 2 - 1 - k) * math.pi / ANGLES for k in range(ANGLES)]
    fine, coarse = (torch.stack([morlet(size, scale, angle) for angle in angles]) for scale in range(SCALES))
    row = gabor(size, 0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0).real.sum(1)
    kept = range(1, size // STEP - 1)  # without the padding
    return fine, coarse, torch.stack([row.roll(STEP * i) for i in kept]).to(torch.float32) / row.sum()


def scattering(x: torch.Tensor) -> torch.Tensor:
    """Features of square images, (B, 1, H, H) to (B, 81, H/4, H/4)."""
    x = torch.nn.functional.pad(x, (STEP,) * 4, mode="reflect")[:, 0]
    size = x.shape[-1]
    fine, coarse, smooth = filters(size)

    def every_second(u: torch.Tensor) -> torch.Tensor:
        """What coarse wavelets leave, at every second pixel: frequencies fold."""
        folded, waves = (
            t.reshape(-1, 2, size // 2, 2, size // 2) for t in (torch.fft.fft2(u), coarse.to(torch.complex64))
        )
        return torch.fft.ifft2(torch.einsum("naibj,kaibj->nkij", folded, waves) / 4).abs()

    def smoothed(u: torch.Tensor) -> torch.Tensor:
        """The Gaussian is a product of one over rows and one over columns."""
        step = size // u.shape[-1]
        by = step * smooth[:, ::step]
        return (by @ u @ by.T).reshape(len(x), -1, len(by), len(by))

    first = torch.fft.ifft2(torch.fft.fft2(x)[:, None] * fine).abs()
    return torch.cat([smoothed(u) for u in (x[:, None], first, every_second(x), every_second(first))], 1)
