"""The noise of a step as a value: its level, and its correlation with the noise of other steps. Free of torch.

To write noise of your own, derive a frozen dataclass from :class:`Noise`: :meth:`Noise.independent_steps` gives its
worth in independent noise, and :meth:`Noise.source` draws it. ``generators`` and ``sharded`` draw the noise of
:class:`IndependentNoise`, ``streams`` that of ``correlated``; ``add_noise`` adds it to the gradients of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from .schedules import Schedule
from .values import StepParameters, Value

if TYPE_CHECKING:
    from torch import Tensor

N = TypeVar("N", bound="Noise")


class NoiseSource(Protocol):
    """Draws the noise of one process. It holds secrets, and can be neither copied nor pickled.

    A source that draws floating-point numbers sets the attribute ``is_dithered`` to True, as the library's sources do.
    The released sum is then dithered too (:mod:`~dp_transformers.noise.generators`).
    """

    def add_(self, grads: Sequence[Tensor], /, std: float) -> None:
        """Add the noise of the next step to float32 gradients in place. ``std`` is the standard deviation of its
        independent part."""


class Noise(Value):
    """Gaussian noise on the sum of clipped gradients.

    Attributes:
        noise_multiplier: σ, its standard deviation over the sensitivity of the clipping.
        bands: Least number of steps between an example's appearances that :meth:`independent_steps` requires; 1 if
            the noise of each step is independent.
    """

    noise_multiplier: float
    bands: ClassVar[int] = 1

    def at(self, step: int) -> float:
        """Return the noise multiplier of a step, counted from 0. Noise that changes over the steps overrides this."""
        return self.noise_multiplier

    def relative_std(self, index: int) -> float:
        """Return the standard deviation of the noise on a coordinate, over that of its independent part, in step
        number ``index`` of a source, counted from 0."""
        return 1.0

    def scaled_to(self: N, noise_multiplier: float) -> N:
        """Return the same noise at another level, for calibration."""
        return replace(self, noise_multiplier=noise_multiplier)

    def independent_steps(
        self, steps: Mapping[StepParameters, int], min_separation: int
    ) -> Iterable[tuple[StepParameters, int]]:
        """Return steps with independent noise that cost at least as much, as (parameters, number of such steps).

        Args:
            steps: The steps that one noise source served, at least one.
            min_separation: ``min_separation`` of the sampling.
        """
        return steps.items()

    def source(self, clipper: Any, *, dp_seed: int | None = None, secure: bool = False) -> NoiseSource:
        """Return a new source of noise for the gradients of ``clipper.parameters``. All processes call this together.

        Args:
            dp_seed: Fixed seed for tests.
            secure: Draw from a cryptographic generator.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class IndependentNoise(Noise):
    """Independent noise N(0, (σ·C)²) on every coordinate in every step. With σ = 0 nothing is private.

    Example::

        >>> from dp_transformers import IndependentNoise
        >>> IndependentNoise(1.1).to_dict()
        {'kind': 'independent', 'noise_multiplier': 1.1}
    """

    kind: ClassVar[str] = "independent"
    noise_multiplier: float  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to it in the base)

    def __post_init__(self) -> None:
        if not (isinstance(self.noise_multiplier, (int, float)) and 0 <= self.noise_multiplier < float("inf")):
            raise ValueError(f"noise_multiplier must be a finite int or float >= 0, got {self.noise_multiplier!r}.")

    def prefix_error(self, steps: int) -> float:
        """Return the standard deviation of the noise in the sum of the first t gradients, as its root mean square
        over t ≤ ``steps``, in units of the clipping bound."""
        return self.noise_multiplier * math.sqrt((steps + 1) / 2)

    def source(self, clipper: Any, *, dp_seed: int | None = None, secure: bool = False) -> NoiseSource:
        from ..noise.generators import ShardedNoise

        return ShardedNoise(clipper, dp_seed=dp_seed, secure=secure, warn=False)


@dataclass(frozen=True)
class ScheduledNoise(IndependentNoise):
    """Independent noise with multiplier ``noise_multiplier * schedule.at(t)`` in step t. Calibration scales the whole
    schedule.

    Example::

        >>> from dp_transformers import LinearSchedule, ScheduledNoise
        >>> noise = ScheduledNoise(1.2, LinearSchedule(0.5, steps=100))
        >>> noise.at(0), noise.at(100)
        (1.2, 0.6)
    """

    kind: ClassVar[str] = "scheduled"
    schedule: Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "schedule", Schedule.read(self.schedule))

    def at(self, step: int) -> float:
        return self.noise_multiplier * self.schedule.at(step)


from .correlated import BandedInverseNoise, BandedNoise, BufferedNoise  # noqa: E402, F401  (so that from_dict knows them)
