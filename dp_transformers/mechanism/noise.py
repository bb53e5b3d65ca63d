"""The noise that a step adds, as a value: how much, and how the noise of one step depends on that of others. Free of
torch.

Noise of your own is a frozen dataclass derived from :class:`Noise`: :meth:`Noise.independent_steps` says what it is
worth, and :meth:`Noise.source` draws it. ``generators`` and ``sharded`` draw the noise of :class:`IndependentNoise`,
``streams`` that of ``correlated``; ``add_noise`` adds what a source draws to the gradients of a step.
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
    """What draws the noise of one process. It holds secrets and is neither copied nor pickled.

    One that draws numbers as floats says so by an attribute ``is_dithered`` that is true, as the library's own do:
    what a step releases is then dithered beside them (:mod:`~dp_transformers.noise.digits`).
    """

    def add_(self, grads: Sequence[Tensor], /, std: float) -> None:
        """Add the noise of the next step, whose independent part has this standard deviation, in place. Gradients are
        in float32."""


class Noise(Value):
    """Gaussian noise on the sum of clipped gradients.

    Attributes:
        noise_multiplier: σ, its standard deviation over the sensitivity of the clipping.
        bands: How many steps apart an example's appearances have to be for :meth:`independent_steps` to hold; 1 where
            each step's noise is independent.
    """

    noise_multiplier: float
    bands: ClassVar[int] = 1

    def at(self, step: int) -> float:
        """The noise multiplier of a step, counted from 0; noise that changes on the way overrides this."""
        return self.noise_multiplier

    def relative_std(self, index: int) -> float:
        """The standard deviation of the noise on a coordinate in the step that a source serves as number ``index``
        from 0 on, over that of its independent part."""
        return 1.0

    def scaled_to(self: N, noise_multiplier: float) -> N:
        """The same noise at another level, for calibration."""
        return replace(self, noise_multiplier=noise_multiplier)

    def independent_steps(
        self, steps: Mapping[StepParameters, int], min_separation: int
    ) -> Iterable[tuple[StepParameters, int]]:
        """Steps with independent noise that release no less than these: parameters, and how many steps use them.

        Args:
            steps: The steps that one noise source served, at least one.
            min_separation: That of the sampling.
        """
        return steps.items()

    def source(self, clipper: Any, *, dp_seed: int | None = None, secure: bool = False) -> NoiseSource:
        """What draws the noise for the gradients of ``clipper.parameters``; all processes call this together.

        Args:
            dp_seed: Fixed seed for tests.
            secure: From a cryptographic generator.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class IndependentNoise(Noise):
    """N(0, (σ·C)²) on every coordinate of every step, independently. σ = 0 adds none, and nothing is private.

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
        """The standard deviation of the noise in the sum of the first t gradients, as its root mean square over
        t ≤ ``steps``, in units of the clipping bound."""
        return self.noise_multiplier * math.sqrt((steps + 1) / 2)

    def source(self, clipper: Any, *, dp_seed: int | None = None, secure: bool = False) -> NoiseSource:
        from ..noise.sharded import ShardedNoise

        return ShardedNoise(clipper, dp_seed=dp_seed, secure=secure, warn=False)


@dataclass(frozen=True)
class ScheduledNoise(IndependentNoise):
    """Independent noise of which the multiplier in each step is ``noise_multiplier`` times what the schedule says.
    Calibration scales the whole schedule.

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


from .correlated import BandedInverseNoise, BandedNoise, BufferedNoise  # noqa: E402, F401  (Noise.from_dict knows them)
