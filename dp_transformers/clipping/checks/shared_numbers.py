"""Random numbers that a model draws for all rows of a batch together: a coin that leaves a layer out (LayerDrop), one
dropout mask for every row, noise on a weight.

Each row's numbers may be anything as long as they are its own. A number that rows share ties their gradients together,
and where a draw has several physical batches, which rows share one depends on how many other examples there are: the
gradients of all of them would have another joint distribution with one example more, which clipping does not bound.

Such numbers are refused there, but for those of torch's dropout modules: the self-check finds the modules that draw
nothing else, and they draw the same mask in all physical batches of a draw.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...runtime.randomness import generators_apart

_ATTENTION = "dropout_p"  # the argument of operations that draw for every row, and return no numbers


Call = tuple[str, str, tuple[int, ...]]


class Drawn(NamedTuple):
    """What was drawn in a forward pass.

    Attributes:
        by_torch: The shapes of random numbers, each with the modules that drew some; None outside of all modules.
        by_others: By name the states of the generators of Python and NumPy afterwards, of those that drew.
        calls: How often a function of Python's or NumPy's generator was called, by generator, function and the shape
            of what it gave.
        inputs: What torch's dropout modules were given, if it was asked for.
    """

    by_torch: dict[tuple[int, ...], list[nn.Module | None]]
    by_others: dict[str, Any]
    calls: Mapping[Call, int]
    inputs: dict[nn.Module, list[torch.Tensor]]

    @property
    def shapes(self) -> dict[nn.Module | None, set[tuple[int, ...]]]:
        """The shapes that each module drew."""
        shapes = defaultdict(set)
        for shape, modules in self.by_torch.items():
            for module in modules:
                shapes[module].add(shape)
        return shapes


def dropouts_for_all_rows(drawn: Drawn, of_fewer: Drawn) -> list[nn.Module]:
    """Return the dropout modules that drew as many numbers for a batch as for fewer of its rows, in another order, and
    were given the same numbers: their masks are of something that all rows share, a table of relative positions."""
    all_shapes, shapes_of_fewer = drawn.shapes, of_fewer.shapes
    return [
        module
        for module, inputs in drawn.inputs.items()
        if inputs
        and all_shapes[module]
        and all_shapes[module] == shapes_of_fewer[module]
        and len(inputs) == len(others := of_fewer.inputs[module])
        and all(map(torch.equal, inputs, others))
    ]


_OF_TORCH = nn.Dropout.__module__  # where its dropout modules are


def for_all_rows(
    draw: Callable[[slice, int], Drawn],
    size: int,
    known: Collection[nn.Module] = (),
    matter: Callable[[Collection[tuple[int, ...]]], bool] = lambda shapes: True,
) -> list[nn.Module | str | None]:
    """Return who draws numbers that all ``size`` rows share: modules, or generators by their name.

    They are drawn alike for all rows, for the first half of them, and for the second half: the numbers of rows would
    be as many as there are in both halves.

    Args:
        draw: ``f(rows, seed)`` runs the model on some rows.
        known: Modules whose numbers are the same in all batches of a draw. They may draw none that rows have apart.
        matter: Whether numbers of torch of these shapes have an effect.
    """
    whole = draw(slice(size), 0)
    if not whole.by_others and not whole.by_torch:
        return []  # a shape that has as many numbers as there are rows may be that of a weight
    half = size // 2
    parts = [draw(slice(half), 0)]
    if not whole.by_others and parts[0].by_torch.keys().isdisjoint(whole.by_torch):
        return []
    parts.append(draw(slice(half, size), 0))
    # some models seed a generator themselves, and draw nothing unknown
    again = draw(slice(size), 1) if whole.by_others else whole
    shared = [
        shape
        for shape, drew in whole.by_torch.items()
        if all(shape in part.by_torch for part in parts)
        and len(drew) != sum(len(part.by_torch[shape]) for part in parts)  # drawn for one row after the other
    ]
    found = [module for shape in shared for module in whole.by_torch[shape]]
    shapes = whole.shapes
    found = [m for m in found if m not in known or not shapes[m] <= {*shared}]
    found = found if found and matter(shared) else []
    states = {name: [each.by_others.get(name) for each in (*parts, again)] for name in whole.by_others}
    alike = [name for name, (a, b, other) in states.items() if whole.by_others[name] == a == b != other]
    is_seeded = [name for name, (_, _, other) in states.items() if whole.by_others[name] == other]

    def calls_of(drawn: Drawn) -> dict[Call, int]:
        return {call: n for call, n in drawn.calls.items() if call[0] not in (*alike, *is_seeded)}

    called = called_alike(draw, size, [calls_of(each) for each in (whole, *parts)], calls_of)
    return [*dict.fromkeys([*found, *alike, *(name for name, *_ in called)])]


def called_alike(
    draw: Callable[[slice, int], Drawn],
    size: int,
    first: Sequence[Mapping[Call, int]] | None,
    calls_of: Callable[[Drawn], Mapping[Call, int]],
) -> list[Call]:
    """Return what is called as often for all ``size`` rows as for either half of them, or always as many times less
    for all than for both halves, beside what is called for each row. Where that is so it is looked at with other
    numbers too, since what few rows are to call may be called in one half alone.

    Args:
        draw: As of :func:`for_all_rows`.
        first: The calls for all rows, and for both halves, where they are known.
        calls_of: Which calls of those that were drawn are looked at.
    """
    half, numbers, found = size // 2, defaultdict[Call, list[tuple[int, ...]]](list), list[Call]()
    for seed in _SEEDS:
        calls = (
            first
            if first is not None and seed == _SEEDS[0]
            else [calls_of(draw(rows, seed)) for rows in (slice(size), slice(half), slice(half, size))]
        )
        for call in calls[0]:
            numbers[call].append(tuple(each.get(call, 0) for each in calls))
        found = [call for call, counts in numbers.items() if len(counts) == seed + 1 and _are_of_all(counts)]
        if not found:
            return []
    return sorted(found)


def _are_of_all(counts: list[tuple[int, ...]]) -> bool:
    """Whether numbers of calls for all rows, and for both halves, are the same, or less than those of the halves by as
    many each time."""
    are_same = all(len({*count}) == 1 for count in counts)
    return are_same or (len({*counts}) == 1 and counts[0][0] < sum(counts[0][1:]))


_SEEDS = range(4)


@contextmanager
def watched_draws(*, keeps_inputs: bool = False) -> Iterator[Callable[[], Drawn]]:
    """Yield a function that tells what was drawn inside until now. ``keeps_inputs`` asks for those of dropout modules,
    which stay in memory."""
    inputs: dict[nn.Module, list[torch.Tensor]] = defaultdict(list)
    before = _states()

    def enter(module: nn.Module, args: tuple) -> None:
        if keeps_inputs and type(module).__module__ == _OF_TORCH:
            inputs[module] += args

    with entered_modules(enter) as modules, _Draws(modules) as mode, _counted_calls() as calls:
        yield lambda: Drawn(
            mode.shapes, {name: x for name, x in _states().items() if x != before[name]}, dict(calls), inputs
        )


@contextmanager
def entered_modules(enter: Callable[[nn.Module, tuple], None] | None = None) -> Iterator[Sequence[nn.Module]]:
    """Yield the modules whose forward passes are going on, the innermost last. ``enter`` is called with each, and with
    what it is given."""
    modules: list[nn.Module] = []

    def note(module: nn.Module, args: tuple) -> None:
        modules.append(module)
        if enter is not None:
            enter(module, args)

    handles = [
        torch_module.register_module_forward_pre_hook(note),
        torch_module.register_module_forward_hook(lambda module, args, output: _pop(modules), always_call=True),
    ]
    try:
        yield modules
    finally:
        for handle in handles:
            handle.remove()


def _pop(modules: list[nn.Module]) -> None:
    modules.pop()


_PYTHON, _NUMPY = "Python's random", "numpy.random"


def _states() -> dict[str, Any]:
    of_python, of_numpy, _ = generators_apart().values()
    return {_PYTHON: of_python, _NUMPY: of_numpy}


@contextmanager
def _counted_calls() -> Iterator[Counter[Call]]:
    """Inside, the functions of the modules ``random`` and ``numpy.random`` that draw from their generators count how
    often they are called."""
    calls = Counter[Call]()

    def counted(generator: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = function(*args, **kwargs)
            calls[generator, name, np.shape(given) if isinstance(given, (np.ndarray, list)) else ()] += 1
            return given

        return call

    replaced = [
        (module, name, function, counted(generator, name, function))
        for generator, module, owner in ((_PYTHON, random, random.random), (_NUMPY, np.random, np.random.rand))
        for name, function in vars(module).items()
        if getattr(function, "__self__", None) is owner.__self__ and not name.endswith(_NO_DRAWS)
    ]
    try:
        for module, name, _, counting in replaced:
            setattr(module, name, counting)
        yield calls
    finally:
        for module, name, function, _ in replaced:
            setattr(module, name, function)


_NO_DRAWS = ("seed", "state")


class _Draws(TorchDispatchMode):
    """Notes the shapes of random numbers, and the innermost of ``modules`` that draws them."""

    supports_higher_order_operators = True

    def __init__(self, modules: Sequence[nn.Module]):
        super().__init__()
        self._modules, self.shapes = modules, dict[tuple[int, ...], list[nn.Module | None]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output) if returns_random_numbers(func) else ():
            if isinstance(x, torch.Tensor) and x.numel():
                self.shapes.setdefault(tuple(x.shape), []).append(self._modules[-1] if self._modules else None)
        return output


@cache
def returns_random_numbers(func: Any) -> bool:
    """Whether an operation of torch gives random numbers, and not what it has computed with some."""
    if isinstance(func, HigherOrderOperator) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return all(argument.name != _ATTENTION for argument in func._schema.arguments)
