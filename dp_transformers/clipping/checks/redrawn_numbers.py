"""Random numbers that torch draws with the shape of a batch, and that are still not each row's own: one of them is
taken for all rows, or for two (antithetic time steps).

The model runs on the same rows again with the numbers of all rows but one drawn anew. What it gives for that row must
stay. Where numbers have no dimension for the rows, one of them is drawn anew, and what it changes must be one row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import SelfCheckError
from .shared_numbers import Drawn, entered_modules, for_all_rows, returns_random_numbers

_ALONE = 2  # shapes without rows of which single numbers are drawn anew, in two places each

Outputs = list[torch.Tensor]


class _Redrawn(TorchDispatchMode):
    """Inside, every operation that returns random numbers draws them twice, and gives the first ones; in ``chosen``
    rows the second ones, or in one ``place`` of the numbers that one operation draws.

    Attributes:
        unknown: By shape the first operation, by its number, that drew numbers without one dimension for the rows.
        drew: The modules that drew numbers with one.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        size: int,
        of_half: Collection[tuple[int, ...]],
        modules: Sequence[nn.Module],
        known: Collection[nn.Module],
        chosen: torch.Tensor | None = None,
        place: tuple[int, int] | None = None,
    ):
        super().__init__()
        self._size, self._of_half, self._modules, self._known = size, of_half, modules, known
        self._chosen, self._place, self._number = chosen, place, 0
        self.unknown, self.drew = dict[tuple[int, ...], int](), list[nn.Module | None]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        module = self._modules[-1] if self._modules else None
        if not returns_random_numbers(func) or module in self._known:
            return func(*args, **kwargs)
        first = func(*args, **kwargs)
        in_place = any(x is each for x in tree_leaves(first) for each in args if isinstance(x, torch.Tensor))
        kept = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, first) if in_place else first
        second = func(*args, **kwargs)
        self._number += 1
        given = tree_map(lambda a, b: self._mixed(a, b, module) if isinstance(a, torch.Tensor) else a, kept, second)
        return args[0].copy_(given) if in_place else given

    def _mixed(self, first: torch.Tensor, second: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
        dims = [dim for dim, n in enumerate(first.shape) if n == self._size and self._are_rows(first.shape, dim)]
        if len(dims) != 1:
            self.unknown.setdefault(tuple(first.shape), self._number)
            if self._place is None or self._place[0] != self._number:
                return first
            index = self._place[1] % max(1, first.numel())
            chosen = (torch.arange(first.numel(), device=first.device) == index).view(first.shape)
            return torch.where(chosen, second, first)
        self.drew.append(module)
        if self._chosen is None:
            return first
        rows = self._chosen.to(first.device).view([-1 if dim == dims[0] else 1 for dim in range(first.dim())])
        return torch.where(rows, second, first)

    def _are_rows(self, shape: tuple[int, ...], dim: int) -> bool:
        """Whether there are half as many in this dimension for half of the rows."""
        return (*shape[:dim], self._size // 2, *shape[dim + 1 :]) in self._of_half


class _AllThisNumber(TorchDispatchMode):
    """Inside, uniform random numbers of some shapes are all this one.

    Attributes:
        draws_others: Whether some of these shapes are of other numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, shapes: Collection[tuple[int, ...]], number: float):
        super().__init__()
        self._shapes, self._number, self.draws_others = shapes, number, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        drawn = func(*args, **(kwargs or {}))
        for x in tree_leaves(drawn) if returns_random_numbers(func) else ():
            if isinstance(x, torch.Tensor) and tuple(x.shape) in self._shapes:
                is_uniform = getattr(func, "overloadpacket", None) in _UNIFORM
                self.draws_others |= not is_uniform
                if is_uniform:
                    x.fill_(self._number)
        return drawn


_UNIFORM = (torch.ops.aten.rand, torch.ops.aten.rand_like)


def drawn_for_rows(
    draw: Callable[[slice, int], Drawn],
    run: Callable[[], Outputs],
    moved: Callable[[Outputs, Outputs], torch.Tensor],
    size: int,
    known: Collection[nn.Module] = (),
) -> tuple[list[nn.Module | str | None], bool]:
    """Return who draws numbers that all rows share: modules, or generators by their name; and whether one number is
    taken for some rows and not for others.

    Args:
        draw, size, known: As in :func:`~.shared_numbers.for_all_rows`.
        run: Computes what there is for each row, from the same seed each time.
        moved: ``f(outputs, others) -> (B,)`` bool, for which rows they differ.
    """
    drawn_for = dict[int | None, Drawn]()

    def noted(rows: slice, seed: int) -> Drawn:
        drawn = draw(rows, seed)
        drawn_for.setdefault(rows.stop if rows.start is None else None, drawn)
        return drawn

    found = for_all_rows(noted, size, known, partial(_change_something, run, moved))
    of_half = drawn_for.get(size // 2)
    return (found, False) if found or of_half is None else _shares_numbers(run, moved, size, of_half.by_torch, known)


def _change_something(
    run: Callable[[], Outputs], moved: Callable[[Outputs, Outputs], torch.Tensor], shapes: Collection[tuple[int, ...]]
) -> bool:
    """Return whether numbers of these shapes have an effect: False where all are uniform and none has, at either end
    or between (a coin for a layer that is left out with probability 0). The arguments are those of
    :func:`drawn_for_rows`."""
    first = None
    for number in (2.0**-24, 0.25, 0.5, 0.75, 1 - 2.0**-24):
        with _AllThisNumber(shapes, number) as mode:
            found = run()
        if mode.draws_others or (first is not None and bool(moved(first, found).any())):
            return True
        first = found if first is None else first
    return False


def refuse_numbers_of_some_rows(who: str) -> None:
    """Raise SelfCheckError for random numbers of which one is taken for several rows."""
    raise SelfCheckError(
        f"{who} draws random numbers of which one is taken for several rows of the batch, and not for all (antithetic "
        "time steps, pairs that share a mask): which rows share one depends on how many there are, and on their "
        "order, so that the other examples have a say in an example's gradient, beyond the clipping bound. Draw them "
        "for each row by itself (torch.rand(len(x)))."
    )


def _shares_numbers(
    run: Callable[[], Outputs],
    moved: Callable[[Outputs, Outputs], torch.Tensor],
    size: int,
    of_half: Collection[tuple[int, ...]],
    known: Collection[nn.Module],
) -> tuple[list[nn.Module | str | None], bool]:
    """As :func:`drawn_for_rows`, of numbers with a place for each row that other rows are computed with, too.
    ``of_half``: the shapes that are drawn for the first half of the rows."""

    def outputs(chosen: torch.Tensor | None = None, place: tuple[int, int] | None = None) -> tuple[Outputs, _Redrawn]:
        with entered_modules() as modules, _Redrawn(size, of_half, modules, known, chosen, place) as mode:
            return run(), mode

    def repeats_itself() -> bool:
        return not bool(moved(own, outputs()[0]).any())

    own, mode = outputs()
    kept = torch.arange(size) == size - 1
    if mode.drew and bool(moved(own, outputs(~kept)[0])[kept].any()) and repeats_itself():
        return list(dict.fromkeys(mode.drew)), False
    places = [(number, index) for number in list(mode.unknown.values())[:_ALONE] for index in (0, 2**31 - 1)]
    counts = [int(moved(own, outputs(place=place)[0]).sum()) for place in places]
    return [], any(1 < count < size for count in counts) and repeats_itself()
