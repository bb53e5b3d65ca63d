"""Random numbers that do not depend on lengths, so that passes over inputs of different lengths can be compared in
training mode."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

_LEAST = 2**-24  # above 0 and below 1 in float32, since logarithms are taken of both ends
_NEAR = 2  # tokens that a model may put around its input


def _of_uniform(u: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return low + (high - low) * u


def _of_normal(u: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return mean + std * torch.special.ndtri(u)


def _of_exponential(u: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return -torch.log1p(-u) / rate


# How an operation makes its numbers of evenly distributed ones, and whether it takes arguments besides a tensor
_NUMBERS: dict[Any, tuple[Callable[..., torch.Tensor], bool]] = {
    torch.ops.aten.rand: (_of_uniform, False),
    torch.ops.aten.rand_like: (_of_uniform, False),
    torch.ops.aten.uniform: (_of_uniform, True),
    torch.ops.aten.uniform_: (_of_uniform, True),
    torch.ops.aten.randn: (_of_normal, False),
    torch.ops.aten.randn_like: (_of_normal, False),
    torch.ops.aten.normal_: (_of_normal, True),
    torch.ops.aten.exponential: (_of_exponential, True),
    torch.ops.aten.exponential_: (_of_exponential, True),
}
_IN_PLACE = (torch.ops.aten.bernoulli_,)
_BERNOULLI = (torch.ops.aten.bernoulli, *_IN_PLACE)


class SpreadNumbers(TorchDispatchMode):
    """Inside, torch's random operations give the same numbers along the last dimension wherever they are drawn, spread
    over all that they may give, or one number where that dimension is about as long as an input, or the only one while
    examples are ``reordered``: it may be that of all positions of a batch. What is drawn with a
    probability is its square (dropout divides by it once), and dropout in one operation keeps everything.

    Neither a scale, nor a threshold, nor a probability that depends on the lengths is hidden so.

    Attributes:
        draws_others: Whether an operation ran that is not known here; it drew its numbers as usual.
        traces: Whether an operation ran that lets the compiler trace what it is given.
    """

    def __init__(self, lengths: Collection[int], *, reordered: bool):
        super().__init__()
        self._lengths, self._reordered, self.draws_others, self.traces = lengths, reordered, False, False

    supports_higher_order_operators = True  # torch.cond, flex_attention

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, kind = dict(kwargs or {}), _kind(func)
        self.traces |= isinstance(func, HigherOrderOperator)
        if kind == "attention":
            return func(*_without_dropout(func, args, kwargs), **kwargs)
        if kind == "dropout":
            x, p = args[0], float(args[1])
            return x / (1 - p) if p < 1 else torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool)
        drawn = func(*args, **kwargs)
        if kind == "numbers":
            made_of, takes_arguments = _NUMBERS[func.overloadpacket]
            numbers = made_of(self._evenly(drawn), *(args[1:3] if takes_arguments else ()))
            # a DTensor takes no plain tensor, and one number no vector
            is_filled = type(drawn) is not torch.Tensor or not drawn.dim()
            drawn.fill_(float(numbers[0])) if is_filled else drawn.copy_(numbers)
        if kind == "probability":
            given = [x for x in [*args[1:], kwargs.get("p")] if isinstance(x, (int, float, torch.Tensor))]
            probability = given[0] if given else 0.5 if func.overloadpacket in _IN_PLACE else args[0]
            drawn.copy_(probability**2) if isinstance(probability, torch.Tensor) else drawn.fill_(probability**2)
        self.draws_others |= kind == "others"
        return drawn

    def _evenly(self, drawn: torch.Tensor) -> torch.Tensor:
        """Numbers between 0 and 1 for the last dimension."""
        length = drawn.shape[-1] if drawn.dim() > self._reordered else 1
        if any(abs(length - other) <= _NEAR for other in self._lengths):
            length = 1
        steps = torch.arange(1, length + 1, device=drawn.device, dtype=torch.float64)
        return (steps * _GOLDEN).frac().clamp(_LEAST, 1 - _LEAST).float()


_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, lie evenly, however many there are


@cache
def _kind(func: Any) -> str:
    if isinstance(func, HigherOrderOperator):
        return "others"  # what it runs is not seen here
    if any(argument.name == "dropout_p" for argument in func._schema.arguments):
        return "attention"
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return "not random"
    if func is torch.ops.aten.native_dropout.default:
        return "dropout"
    if func.overloadpacket in _BERNOULLI:
        return "probability"
    return "numbers" if func.overloadpacket in _NUMBERS else "others"


def _without_dropout(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The positional arguments with ``dropout_p`` 0; it goes into ``kwargs`` where it is none of them."""
    place = [argument.name for argument in func._schema.arguments].index("dropout_p")
    if place < len(args):
        return [*args[:place], 0.0, *args[place + 1 :]]
    kwargs["dropout_p"] = 0.0
    return list(args)


@contextmanager
def spread_numbers(lengths: Collection[int], *, reordered: bool = False) -> Iterator[Callable[[], bool]]:
    """Draw no random numbers that depend on which of these ``lengths`` an input has, or on how its examples are
    ``reordered``.

    Yields:
        A function that tells whether that is true until now: other operations, and the global generators of Python and
        NumPy, draw as usual.
    """

    def others() -> tuple[Any, ...]:
        _, words, position, *_ = np.random.get_state()
        return random.getstate(), words.tobytes(), position  # pyrefly: ignore[missing-attribute]  (it is no dict)

    before = others()
    traced = False
    try:
        with SpreadNumbers(lengths, reordered=reordered) as mode:
            yield lambda: not mode.draws_others and others() == before
            traced = mode.traces
    except BaseException:
        traced = "torch._dynamo" in sys.modules
        raise
    finally:
        if traced:
            torch._dynamo.reset()  # what it traced here it could not trace again without the mode
