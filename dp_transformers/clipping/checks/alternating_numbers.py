"""Random numbers that do not depend on lengths, so that passes over inputs of different lengths can be compared in
training mode."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LEAST = 2**-24  # above 0 and below 1 in float32, since logarithms are taken of both ends
Pair = tuple[float, float]


def _of_uniform(tensor: Any, low: float = 0.0, high: float = 1.0) -> Pair:
    return low + (high - low) * (1 - _LEAST), low + (high - low) * _LEAST


def _of_normal(tensor: Any, mean: float = 0.0, std: float = 1.0) -> Pair:
    return mean + std, mean - std


def _of_exponential(tensor: Any, rate: float = 1.0) -> Pair:
    return 1 / rate, 2 / rate


# The two numbers that stand for all those of an operation, from its arguments. They are no means: around its mean
# noise is 0 whatever scales it. They differ, since a norm layer takes away what is added to all features.
_NUMBERS: dict[Any, Callable[..., Pair]] = {
    torch.ops.aten.bernoulli: lambda *args: (1.0, 1.0),
    torch.ops.aten.bernoulli_: lambda *args: (1.0, 1.0),
    torch.ops.aten.rand: lambda *args: _of_uniform(None),
    torch.ops.aten.rand_like: lambda *args: _of_uniform(None),
    torch.ops.aten.uniform: _of_uniform,
    torch.ops.aten.uniform_: _of_uniform,
    torch.ops.aten.randn: lambda *args: _of_normal(None),
    torch.ops.aten.randn_like: lambda *args: _of_normal(None),
    torch.ops.aten.normal_: _of_normal,
    torch.ops.aten.exponential: _of_exponential,
    torch.ops.aten.exponential_: _of_exponential,
}


class AlternatingNumbers(TorchDispatchMode):
    """Inside, torch's random operations give two numbers in turns along the last dimension, or one where that is as
    long as an input, and dropout keeps everything.

    Attributes:
        draws_others: Whether an operation ran that is not known here; it drew its numbers as usual.
    """

    def __init__(self, lengths: Collection[int]):
        super().__init__()
        self._lengths, self.draws_others = lengths, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, kind = dict(kwargs or {}), _kind(func)
        if kind == "attention":
            return func(*_without_dropout(func, args, kwargs), **kwargs)
        if kind == "dropout":
            x, p = args[0], float(args[1])
            return x / (1 - p) if p < 1 else torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool)
        drawn = func(*args, **kwargs)
        if kind == "numbers":
            one, other = _NUMBERS[func.overloadpacket](*args[:3])
            drawn.fill_(one)
            if drawn.dim() and drawn.shape[-1] not in self._lengths:
                drawn[..., 1::2] = other
        self.draws_others |= kind == "others"
        return drawn


@cache
def _kind(func: Any) -> str:
    if any(argument.name == "dropout_p" for argument in func._schema.arguments):
        return "attention"
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return "not random"
    if func is torch.ops.aten.native_dropout.default:
        return "dropout"
    return "numbers" if func.overloadpacket in _NUMBERS else "others"


def _without_dropout(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The positional arguments with ``dropout_p`` 0; it goes into ``kwargs`` where it is none of them."""
    place = [argument.name for argument in func._schema.arguments].index("dropout_p")
    if place < len(args):
        return [*args[:place], 0.0, *args[place + 1 :]]
    kwargs["dropout_p"] = 0.0
    return list(args)


@contextmanager
def alternating_numbers(lengths: Collection[int]) -> Iterator[Callable[[], bool]]:
    """Draw no random numbers that depend on which of these ``lengths`` an input has.

    Yields:
        A function that tells whether that is true until now: other operations, and the global generators of Python and
        NumPy, draw as usual.
    """

    def others() -> tuple[Any, ...]:
        _, words, position, *_ = np.random.get_state()
        return random.getstate(), words.tobytes(), position  # pyrefly: ignore[missing-attribute]  (it is no dict)

    before = others()
    with AlternatingNumbers(lengths) as mode:
        yield lambda: not mode.draws_others and others() == before
