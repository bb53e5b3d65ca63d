"""Schedules of noise, clipping bound or batch size. Free of torch.

A schedule is public, because it depends on the number of the step alone. To write your own, derive a frozen dataclass
from :class:`Schedule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .values import Value, require_positive


class Schedule(Value):
    """A factor for each step."""

    def at(self, step: int) -> float:
        """Return the factor of a step, counted from 0."""
        raise NotImplementedError

    @classmethod
    def read(cls, given: Any) -> Schedule:
        """Return a schedule, given itself or the dictionary that ``to_dict`` wrote.

        Raises:
            ValueError: it is neither.
        """
        schedule = cls.from_dict(given) if isinstance(given, Mapping) else given
        if not isinstance(schedule, Schedule):
            raise ValueError(
                f"schedule must be a Schedule (ConstantSchedule, LinearSchedule, ExponentialSchedule, StepSchedule or "
                f"one of your own), got {given!r}."
            )
        return schedule


@dataclass(frozen=True)
class ConstantSchedule(Schedule):
    """The factor 1 in every step.

    Example::

        >>> from dp_transformers import ConstantSchedule
        >>> ConstantSchedule().at(1000)
        1.0
    """

    kind: ClassVar[str] = "constant"

    def at(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """A linear change from 1 in step 0 to ``end`` in step ``steps``, and constant after it.

    Example::

        >>> from dp_transformers import LinearSchedule
        >>> [LinearSchedule(0.5, steps=10).at(step) for step in (0, 5, 10, 20)]
        [1.0, 0.75, 0.5, 0.5]
    """

    kind: ClassVar[str] = "linear"
    end: float
    steps: int

    def __post_init__(self) -> None:
        require_positive(self, "end", "steps")

    def at(self, step: int) -> float:
        share = min(step / self.steps, 1.0)
        return 1.0 - share + share * self.end


@dataclass(frozen=True)
class ExponentialSchedule(Schedule):
    """An exponential change from 1 in step 0 to ``end`` in step ``steps``, and constant after it.

    Example::

        >>> from dp_transformers import ExponentialSchedule
        >>> [ExponentialSchedule(0.25, steps=10).at(step) for step in (0, 5, 10, 20)]
        [1.0, 0.5, 0.25, 0.25]
    """

    kind: ClassVar[str] = "exponential"
    end: float
    steps: int

    def __post_init__(self) -> None:
        require_positive(self, "end", "steps")

    def at(self, step: int) -> float:
        return float(self.end ** min(step / self.steps, 1.0))


@dataclass(frozen=True)
class StepSchedule(Schedule):
    """A change by ``factor`` after every ``every`` steps.

    Example::

        >>> from dp_transformers import StepSchedule
        >>> [StepSchedule(0.5, every=10).at(step) for step in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
    """

    kind: ClassVar[str] = "step"
    factor: float
    every: int

    def __post_init__(self) -> None:
        require_positive(self, "factor", "every")

    def at(self, step: int) -> float:
        try:
            return float(self.factor ** (step // self.every))
        except OverflowError:
            raise ValueError(
                f"{self} is larger than any number at step {step}: lower the factor, or raise 'every'."
            ) from None
