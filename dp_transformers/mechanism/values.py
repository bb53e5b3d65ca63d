"""Frozen values that describe a training, are compared by their fields, and are written to JSON. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, TypeVar

V = TypeVar("V", bound="Value")

HOPELESS = 2.0  # nothing is learned if noise over signal, both summed over a whole training, exceeds this


class StepParameters(NamedTuple):
    """The parameters of one step, as its line in the ledger holds them.

    Attributes:
        sample_rate: The probability that the step contains a given example.
        expected_batch_size: The divisor of the noised sum.
        noise_multiplier: σ, the standard deviation of the gradient's noise over ``max_grad_norm``.
        max_grad_norm: The bound on the L2 norm of what one example adds to the sum.
    """

    sample_rate: float
    expected_batch_size: float
    noise_multiplier: float
    max_grad_norm: float

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.max_grad_norm


class Value:
    """Base of frozen dataclasses with fields that JSON can hold, or that are values themselves. ``kind`` is the name
    by which :meth:`from_dict` finds the class."""

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]  # of the subclasses, which are dataclasses

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **{f.name: _plain(getattr(self, f.name)) for f in fields(self)}}

    @classmethod
    def from_dict(cls: type[V], data: Mapping[str, Any]) -> V:
        """Return the value that :meth:`to_dict` wrote. Its class must be defined already.

        Raises:
            ValueError: no subclass is of this kind, or the fields do not fit it.
        """
        known = {c.kind: c for c in _subclasses(cls) if "kind" in vars(c)}
        values = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name != "kind"
        }
        if data.get("kind") not in known:
            raise ValueError(
                f"no {cls.__name__} of kind {data.get('kind')!r} is defined; there are {sorted(known)}. Import the "
                "module that defines it first."
            )
        try:
            return known[data["kind"]](**values)
        except TypeError as error:
            raise ValueError(
                f"{cls.__name__} of kind {data['kind']!r} cannot be made of the fields {sorted(values)} ({error}): "
                "give those that its to_dict() writes."
            ) from error


def equal_or_nan(x: Any, y: Any) -> Any:
    """Compare two tensors or arrays element by element; NaN equals NaN. Return bools of the broadcast shape."""
    return (x == y) | ((x != x) & (y != y))


def require_positive(owner: Any, *names: str, limit: float = math.inf) -> None:
    """Raise ValueError unless each named attribute is an int or float above 0 and below ``limit``."""
    for name in names:
        value = getattr(owner, name)
        if not (isinstance(value, (int, float)) and 0 < value < limit):
            bound = "finite" if limit == math.inf else f"below {limit:g}"
            raise ValueError(f"{name} of {type(owner).__name__} must be a number above 0 and {bound}, got {value!r}.")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.to_dict() if isinstance(value, Value) else value


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
