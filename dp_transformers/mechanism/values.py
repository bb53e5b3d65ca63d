"""Values that say what a training does: frozen, comparable, written to JSON under the name of their kind; and how
numbers are compared. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, TypeVar

V = TypeVar("V", bound="Value")

HOPELESS = 2.0  # noise over signal, both summed over a whole training, beyond which nothing is learned


class StepParameters(NamedTuple):
    """What one step uses, and what its line in the ledger says.

    Attributes:
        sample_rate: The probability with which an example takes part.
        expected_batch_size: What the noised sum is divided by.
        noise_multiplier: σ, the standard deviation of the gradient's noise over ``max_grad_norm``.
        max_grad_norm: The L2 bound on what one example adds to the sum.
    """

    sample_rate: float
    expected_batch_size: float
    noise_multiplier: float
    max_grad_norm: float

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.max_grad_norm


class Value:
    """A base of frozen dataclasses whose fields JSON can hold, or values, which a class reads from their dictionaries
    when it is made. ``kind`` is the name under which :meth:`from_dict` finds the class again."""

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]  # of the subclasses, which are dataclasses

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **{f.name: _plain(getattr(self, f.name)) for f in fields(self)}}

    @classmethod
    def from_dict(cls: type[V], data: Mapping[str, Any]) -> V:
        """The value that :meth:`to_dict` wrote. Its class, also one that a user wrote, must be defined by now.

        Raises:
            ValueError: no subclass is of this kind, or its fields are others.
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
    """Where two tensors or arrays, which broadcast, hold the same numbers: bool, of their common shape. nan is one."""
    return (x == y) | ((x != x) & (y != y))


def _plain(value: Any) -> Any:
    """For JSON, with the values that it holds."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.to_dict() if isinstance(value, Value) else value


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
