"""Correlated noise on the tensors of one process, drawn step by step. See ``mechanism.correlated`` for the maths."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from .generators import GaussianNoise

Tensors = list[torch.Tensor]


class CorrelatedStream:
    """Adds the noise of one step after the other to tensors of the same shapes. It can be neither copied nor pickled.

    Args:
        secure, entropy: As in :class:`~dp_transformers.noise.generators.GaussianNoise`.
    """

    def __init__(self, *, secure: bool = False, entropy: Sequence[int] | None = None):
        self._normal = GaussianNoise(secure=secure, entropy=entropy)
        self._std: float | None = None

    def add_(self, tensors: Sequence[torch.Tensor], std: float) -> None:
        """Add the noise of the next step in place. ``std`` is the standard deviation of its independent part.

        Raises:
            ValueError: ``std`` changed since the first step.
        """
        if self._std not in (None, std):
            raise ValueError(
                f"noise was correlated at standard deviation {self._std:g}, and this step wants {std:g}: noise of "
                "earlier steps could not be cancelled. Keep noise multiplier and clipping bound over the run, or take "
                "IndependentNoise."
            )
        self._std = std
        self._add(list(tensors), std)

    def _add(self, tensors: Tensors, std: float) -> None:
        raise NotImplementedError

    def _fresh(self, tensors: Tensors, std: float) -> Tensors:
        """Draw z_t."""
        noise = [torch.zeros_like(tensor) for tensor in tensors]
        self._normal.add_(noise, std)
        return noise


class BandedStream(CorrelatedStream):
    """Adds x_t = (z_t - Σ_{j≥1} c_j x_{t-j}) / c_0, and keeps the last x."""

    def __init__(self, coefficients: Sequence[float], **options):
        super().__init__(**options)
        self._coefficients = coefficients
        self._past: deque[Tensors] = deque(maxlen=len(coefficients) - 1)

    def _add(self, tensors: Tensors, std: float) -> None:
        first, *later = self._coefficients
        noise = self._fresh(tensors, std / first)
        for c, past in zip(later, self._past, strict=False):
            torch._foreach_add_(noise, past, alpha=-c / first)
        self._past.appendleft(noise)
        torch._foreach_add_(tensors, noise)


class RegeneratedStream(CorrelatedStream):
    """Adds x_t = Σ_j m_j z_{t-j}. The z of each step has its own generator, and is drawn again when needed."""

    def __init__(self, coefficients: Sequence[float], **options):
        super().__init__(**options)
        self._coefficients, self._step = coefficients, 0

    def _add(self, tensors: Tensors, std: float) -> None:
        for back, m in enumerate(self._coefficients[: self._step + 1]):
            self._normal.of_step(self._step - back).add_(tensors, m * std)
        self._step += 1


class BufferedStream(CorrelatedStream):
    """Adds x_t = z_t - Σ_i w_i S_i, then sets S_i ← θ_i S_i + x_t."""

    def __init__(self, weights: Sequence[float], decays: Sequence[float], **options):
        super().__init__(**options)
        self._weights, self._decays = weights, decays
        self._buffers: list[Tensors] = []

    def _add(self, tensors: Tensors, std: float) -> None:
        noise = self._fresh(tensors, std)
        self._buffers = self._buffers or [[torch.zeros_like(x) for x in noise] for _ in self._weights]
        for weight, buffer in zip(self._weights, self._buffers, strict=True):
            torch._foreach_add_(noise, buffer, alpha=-weight)
        for decay, buffer in zip(self._decays, self._buffers, strict=True):
            torch._foreach_mul_(buffer, decay)
            torch._foreach_add_(buffer, noise)
        torch._foreach_add_(tensors, noise)
