"""Schedules: by which factor noise, clipping bound or batch size change on the way. Free of torch.

A schedule is public: it depends on the number of the step alone. One of your own is a frozen dataclass derived from
:class:`Schedule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .values import Value


class Schedule(Value):
    """A factor for each step."""

    def at(self, step: int) -> float:
        """The factor of a step, counted from 0."""
        raise NotImplementedError

    @classmethod
    def read(cls, given: Any) -> Schedule:
        """The schedule that ``to_dict`` wrote, or itself.

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
    """1 in each step.

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
    """From 1 in step 0 in a line to ``end`` in step ``steps``, where it stays.

    Example::

        >>> from dp_transformers import LinearSchedule
        >>> [LinearSchedule(0.5, steps=10).at(step) for step in (0, 5, 10, 20)]
        [1.0, 0.75, 0.5, 0.5]
    """

    kind: ClassVar[str] = "linear"
    end: float
    steps: int

    def __post_init__(self) -> None:
        _require_positive(self, "end", "steps")

    def at(self, step: int) -> float:
        share = min(step / self.steps, 1.0)
        return 1.0 - share + share * self.end


@dataclass(frozen=True)
class ExponentialSchedule(Schedule):
    """From 1 in step 0 by equal factors to ``end`` in step ``steps``, where it stays.

    Example::

        >>> from dp_transformers import ExponentialSchedule
        >>> [ExponentialSchedule(0.25, steps=10).at(step) for step in (0, 5, 10, 20)]
        [1.0, 0.5, 0.25, 0.25]
    """

    kind: ClassVar[str] = "exponential"
    end: float
    steps: int

    def __post_init__(self) -> None:
        _require_positive(self, "end", "steps")

    def at(self, step: int) -> float:
        return float(self.end ** min(step / self.steps, 1.0))


@dataclass(frozen=True)
class StepSchedule(Schedule):
    """``factor`` once more after every ``every`` steps.

    Example::

        >>> from dp_transformers import StepSchedule
        >>> [StepSchedule(0.5, every=10).at(step) for step in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
    """

    kind: ClassVar[str] = "step"
    factor: float
    every: int

    def __post_init__(self) -> None:
        _require_positive(self, "factor", "every")

    def at(self, step: int) -> float:
        try:
            return float(self.factor ** (step // self.every))
        except OverflowError:
            raise ValueError(
                f"{self} is larger than any number at step {step}: lower the factor, or raise 'every'."
            ) from None


def _require_positive(schedule: Schedule, *names: str) -> None:
    for name in names:
        value = getattr(schedule, name)
        if not (isinstance(value, (int, float)) and 0 < value < float("inf")):
            raise ValueError(
                f"{name} of a {type(schedule).__name__} must be a positive, finite int or float, got {value!r}."
            )
