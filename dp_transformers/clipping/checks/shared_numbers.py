"""Random numbers that a model draws for all rows of a batch together: a coin that leaves a layer out (LayerDrop), one
dropout mask for every row, noise on a weight.

Each row's numbers may be anything as long as they are its own. A number that rows share ties their gradients together,
and where a draw has several physical batches, which rows share one depends on how many other examples there are: the
gradients of all of them would have another joint distribution with one example more, which clipping does not bound.

Such numbers are refused there, but for those of torch's dropout modules: the self-check finds the modules that draw
nothing else, and they draw the same mask in all physical batches of a draw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...randomness import generators_apart

_ATTENTION = "dropout_p"  # the argument of operations that draw for every row, and return no numbers


class Drawn(NamedTuple):
    """What was drawn in a forward pass.

    Attributes:
        by_torch: The shapes of random numbers, each with the modules that drew some; None outside of all modules.
        by_others: By name the states of the generators of Python and NumPy afterwards, of those that drew.
        inputs: What torch's dropout modules were given, if it was asked for.
    """

    by_torch: dict[tuple[int, ...], list[nn.Module | None]]
    by_others: dict[str, Any]
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
    draw: Callable[[slice, int], Drawn], size: int, known: Collection[nn.Module] = ()
) -> list[nn.Module | str | None]:
    """Return who draws numbers that all ``size`` rows share: modules, or generators by their name.

    They are drawn alike for all rows, for the first half of them, and for the second half: the numbers of rows would
    be as many as there are in both halves.

    Args:
        draw: ``f(rows, seed)`` runs the model on some rows.
        known: Modules whose numbers are the same in all batches of a draw. They may draw none that rows have apart.
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
    shared = [shape for shape in whole.by_torch if all(shape in part.by_torch for part in parts)]
    found = [module for shape in shared for module in whole.by_torch[shape]]
    shapes = whole.shapes
    found = [m for m in found if m not in known or not shapes[m] <= {*shared}]
    states = {name: [each.by_others.get(name) for each in (*parts, again)] for name in whole.by_others}
    alike = [name for name, (a, b, other) in states.items() if whole.by_others[name] == a == b != other]
    return [*dict.fromkeys(found), *alike]


@contextmanager
def watched_draws(*, keeps_inputs: bool = False) -> Iterator[Callable[[], Drawn]]:
    """Yield a function that tells what was drawn inside until now. ``keeps_inputs`` asks for those of dropout modules,
    which stay in memory."""
    modules: list[nn.Module] = []
    inputs: dict[nn.Module, list[torch.Tensor]] = defaultdict(list)
    before = _states()

    def enter(module: nn.Module, args: tuple) -> None:
        modules.append(module)
        if keeps_inputs and type(module).__module__ == _OF_TORCH:
            inputs[module] += args

    handles = [
        torch_module.register_module_forward_pre_hook(enter),
        torch_module.register_module_forward_hook(lambda module, args, output: _pop(modules), always_call=True),
    ]
    try:
        with _Draws(modules) as mode:
            yield lambda: Drawn(mode.shapes, {name: x for name, x in _states().items() if x != before[name]}, inputs)
    finally:
        for handle in handles:
            handle.remove()


def _pop(modules: list[nn.Module]) -> None:
    modules.pop()


def _states() -> dict[str, Any]:
    of_python, of_numpy, _ = generators_apart()
    return {"Python's random": of_python, "numpy.random": of_numpy}


class _Draws(TorchDispatchMode):
    """Notes the shapes of random numbers, and the innermost of ``modules`` that draws them."""

    supports_higher_order_operators = True

    def __init__(self, modules: list[nn.Module]):
        super().__init__()
        self._modules, self.shapes = modules, dict[tuple[int, ...], list[nn.Module | None]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output) if _returns_random_numbers(func) else ():
            if isinstance(x, torch.Tensor) and x.numel():
                self.shapes.setdefault(tuple(x.shape), []).append(self._modules[-1] if self._modules else None)
        return output


@cache
def _returns_random_numbers(func: Any) -> bool:
    if isinstance(func, HigherOrderOperator) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return all(argument.name != _ATTENTION for argument in func._schema.arguments)
