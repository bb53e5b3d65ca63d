"""Noise that is correlated over steps, so that later noise cancels some of the earlier noise. Free of torch.

After t steps the weights carry the sum of t noises. Correlated noise keeps that sum small
(:meth:`ToeplitzNoise.prefix_error`), which pays off where the gain in ``strategies.prefix_error`` is larger than the
cost of an example's repeated appearances. Three families differ in the state that they keep between steps:

=========================  =====================================================  =============================
class                      noise x_t of a step, from independent z_t              kept, in copies of the gradient
=========================  =====================================================  =============================
:class:`BandedNoise`       x_t = (z_t - Σ_{j≥1} c_j x_{t-j}) / c_0                one less than there are bands
:class:`BandedInverseNoise`  x_t = Σ_j m_j z_{t-j}                                none: z is drawn again from seeds
:class:`BufferedNoise`     x_t = z_t - Σ_i w_i S_i; S_i ← θ_i S_i + x_t           one for each buffer
=========================  =====================================================  =============================

The first keeps amplification by sampling, if no example may take part twice within the bands
(:class:`~dp_transformers.mechanism.sampling.CyclicPoissonSampling`). The two others have no amplification, so they fit
:class:`~dp_transformers.mechanism.sampling.FixedOrderSampling`: a step is accounted for as if every eligible example
took part.

**Resuming.** The state of a noise source, its seed or its earlier noise, would remove the noise from the gradients. It
is never written, and ends with the process. A resumed run has a new source, and its steps are a new segment: ε is that
of both segments composed (``Mechanism.event``). An engine that returns to a checkpoint while it trains would keep its
source, so this is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from . import strategies
from .noise import Noise, NoiseSource
from .values import StepParameters


class ToeplitzNoise(Noise):
    """Noise C⁻¹z, with independent z of standard deviation σ times the sensitivity of the clipping, and C a lower
    triangular Toeplitz matrix with positive first coefficient. σ and the clipping bound are constant over the run."""

    bands: ClassVar[int] = 2  # any separation of more than one step is enough

    def strategy(self, steps: int) -> np.ndarray:
        """Return the first ``steps`` coefficients of C."""
        raise NotImplementedError

    def relative_std(self, index: int) -> float:
        """Return the norm of row ``index`` of C⁻¹."""
        return float(np.linalg.norm(strategies.inverse(self.strategy(index + 1), index + 1)))

    def prefix_error(self, steps: int) -> float:
        """Return the standard deviation of the noise in the sum of the first t gradients, as its root mean square
        over t ≤ ``steps``, in units of the clipping bound."""
        return self.noise_multiplier * strategies.prefix_error(strategies.inverse(self.strategy(steps), steps))

    def independent_steps(
        self, steps: Mapping[StepParameters, int], min_separation: int
    ) -> Iterable[tuple[StepParameters, int]]:
        """Return as many full steps, with noise such that the appearances of one example cost the same in total: C
        moves by ``sensitivity`` in one Gaussian mechanism."""
        taken = sum(steps.values())
        moved = strategies.sensitivity(self.strategy(taken), taken, min_separation)
        return _worth(steps, math.sqrt(math.ceil(taken / min_separation)) / moved, sample_rate=1.0)

    def source(self, clipper: Any, *, dp_seed: int | None = None, secure: bool = False) -> NoiseSource:
        from ..noise.generators import ShardedNoise

        return ShardedNoise(clipper, dp_seed=dp_seed, secure=secure, warn=False, stream=self._stream())

    def _stream(self) -> Callable[..., NoiseSource]:
        """Return a class or partial that makes the source of one random stream from ``secure`` and ``entropy``."""
        raise NotImplementedError


@dataclass(frozen=True)
class BandedNoise(ToeplitzNoise):
    """Noise whose C has few bands (Choquette-Choo et al. 2023, arXiv 2306.08153). Columns of steps that are further
    apart than the bands are orthogonal, so sampling amplifies as it does with independent noise of σ over the norm of
    a column.

    Attributes:
        coefficients: The first column of C. With norm 1, σ means the same as for independent noise.

    Example::

        >>> from dp_transformers import BandedNoise
        >>> noise = BandedNoise.optimal(1.1, steps=1000, bands=16)
        >>> round(noise.prefix_error(1000), 2), round(1.1 * ((1000 + 1) / 2) ** 0.5, 2)  # and of independent noise
        (6.91, 24.61)
    """

    kind: ClassVar[str] = "banded_toeplitz"
    noise_multiplier: float  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to it in the base)
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        _check(self)
        if not self.coefficients[:1] > (0,):
            raise ValueError(
                f"the first of the coefficients of BandedNoise must be positive, got {self.coefficients!r}; "
                "BandedNoise.optimal finds good ones."
            )

    @classmethod
    def optimal(cls, noise_multiplier: float, *, steps: int, bands: int) -> BandedNoise:
        """Return the noise with the smallest :meth:`prefix_error` among coefficients of norm 1."""
        return cls(noise_multiplier, tuple(strategies.optimal_bands(steps, bands).tolist()))

    @property
    def bands(self) -> int:  # pyrefly: ignore[bad-override]  (as above)
        return len(self.coefficients)

    def strategy(self, steps: int) -> np.ndarray:
        return np.pad(self.coefficients[:steps], (0, max(0, steps - self.bands)))

    def independent_steps(
        self, steps: Mapping[StepParameters, int], min_separation: int
    ) -> Iterable[tuple[StepParameters, int]]:
        return _worth(steps, 1 / float(np.linalg.norm(self.coefficients)))

    def _stream(self) -> Callable[..., NoiseSource]:
        from ..noise.streams import BandedStream

        return partial(BandedStream, self.coefficients)


@dataclass(frozen=True)
class BandedInverseNoise(ToeplitzNoise):
    """Noise whose C⁻¹ has few bands, so that the noise of a step is a sum of few independent noises. These are drawn
    again when they are needed: nothing is kept, and a step draws once for each coefficient.

    Attributes:
        coefficients: The first column of C⁻¹; the first coefficient is 1.

    Example::

        >>> from dp_transformers import BandedInverseNoise
        >>> BandedInverseNoise.square_root(1.0, bands=4).coefficients
        (1.0, -0.5, -0.125, -0.0625)
        >>> BandedInverseNoise.optimal_decay(1.0, steps=1000, min_separation=1000).coefficients
        (1.0, -0.95625)
    """

    kind: ClassVar[str] = "banded_inverse"
    noise_multiplier: float  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to it in the base)
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        _check(self)
        if self.coefficients[:1] != (1,):
            raise ValueError(
                f"the first of the coefficients of BandedInverseNoise must be 1, got {self.coefficients!r}; "
                "BandedInverseNoise.square_root and optimal_decay find good ones."
            )

    @classmethod
    def square_root(cls, noise_multiplier: float, *, bands: int) -> BandedInverseNoise:
        """Return the noise with the first coefficients of the inverse of ``strategies.square_root`` (BISR; Kalinin et
        al. 2025, arXiv 2505.12128)."""
        return cls(noise_multiplier, tuple(strategies.inverse(strategies.square_root(bands), bands).tolist()))

    @classmethod
    def optimal_decay(cls, noise_multiplier: float, *, steps: int, min_separation: int) -> BandedInverseNoise:
        """Return the noise z_t - λ·z_(t-1) with the best λ (arXiv 2601.22334), to five digits."""
        return cls(noise_multiplier, (1.0, -round(strategies.optimal_decay(steps, min_separation), 5)))

    def strategy(self, steps: int) -> np.ndarray:
        return strategies.inverse(self.coefficients, steps)

    def _stream(self) -> Callable[..., NoiseSource]:
        from ..noise.streams import RegeneratedStream

        return partial(RegeneratedStream, self.coefficients)


@dataclass(frozen=True)
class BufferedNoise(ToeplitzNoise):
    """Noise whose C is a buffered linear Toeplitz matrix (BLT; McMahan et al. 2024, arXiv 2404.16706 and 2408.08868):
    its coefficients are 1, and then Σ weight · decay^(k-1).

    Example::

        >>> from dp_transformers import BufferedNoise
        >>> BufferedNoise(1.0, weights=(0.3, 0.1), decays=(0.9, 0.5)).strategy(5).round(4).tolist()
        [1.0, 0.4, 0.32, 0.268, 0.2312]
    """

    kind: ClassVar[str] = "buffered_toeplitz"
    noise_multiplier: float  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to it in the base)
    weights: tuple[float, ...]
    decays: tuple[float, ...]

    def __post_init__(self) -> None:
        _check(self)
        if len(self.weights) != len(self.decays) or not all(0 <= decay < 1 for decay in self.decays):
            raise ValueError(
                "BufferedNoise must have as many decays as weights, each decay in [0, 1); got "
                f"weights={self.weights!r} and decays={self.decays!r}. BufferedNoise.optimal finds good ones."
            )

    @classmethod
    def optimal(cls, noise_multiplier: float, *, steps: int, min_separation: int, buffers: int = 3) -> BufferedNoise:
        """Return the noise with a small :meth:`prefix_error` at the same ε, found by a local search."""
        weights, decays = strategies.optimal_buffers(steps, min_separation, buffers)
        return cls(noise_multiplier, tuple(weights.tolist()), tuple(decays.tolist()))

    def strategy(self, steps: int) -> np.ndarray:
        return strategies.buffered(self.weights, self.decays, steps)

    def _stream(self) -> Callable[..., NoiseSource]:
        from ..noise.streams import BufferedStream

        return partial(BufferedStream, self.weights, self.decays)


def _worth(steps: Mapping[StepParameters, int], factor: float, **changes: float) -> list[tuple[StepParameters, int]]:
    """Multiply the noise of the steps by ``factor``, and apply further ``changes``."""
    return [
        (step._replace(noise_multiplier=factor * step.noise_multiplier, **changes), count)
        for step, count in steps.items()
    ]


def _check(noise: Any) -> None:
    numbers = [x for value in vars(noise).values() for x in (value if isinstance(value, tuple) else [value])]
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers) or noise.noise_multiplier < 0:
        raise ValueError(
            "noise_multiplier must be an int or float of at least 0, and every other field a tuple of finite ints or "
            f"floats; got {noise!r}."
        )
