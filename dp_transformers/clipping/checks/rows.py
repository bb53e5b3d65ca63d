"""The rows of a batch: of what a model is called with, some of them as they stand, or one alone without its padding;
and of what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_leaves, tree_map, tree_map_with_path

from ..batch_dims import batch_size_of
from ..engine import ClippingEngine
from ..errors import SelfCheckError
from ..parallel.dtensor import is_dtensor
from ..ragged import Ragged, is_ragged, packed, unpacked, unpacked_sequence

LossFunction = Callable[..., torch.Tensor]  # (*args, **kwargs of the model) -> (B,) losses
# By the path of a tensor in (args, kwargs) (``torch.utils._pytree.keystr``), and by dimension: on which side it is
# padded, and the size that each row has without padding. Rows are in dimension 0.
Sizes = Mapping[str, Mapping[int, tuple[str, Sequence[int]]]]
MOST = 8  # rows that are compared at once


@dataclass(frozen=True)
class Rows:
    """The arguments of one call of a model, with the rows in the first dimension.

    Attributes:
        args, kwargs: Positional and keyword arguments. Rows without padding between them are
            :class:`.clipping.ragged.Ragged`.
        size: How many rows there are.
        sizes: How tensors are padded, as far as that is known. Those that are not named are cut where they are as long
            as a padded one.
        names: The names of the positional arguments.
        batch_first: Whether the model takes the rows in the first dimension.
    """

    args: tuple
    kwargs: dict[str, Any]
    size: int
    sizes: Sizes = field(default_factory=dict)
    names: Sequence[str] = ()
    batch_first: bool = True

    @classmethod
    def of(
        cls, model: nn.Module, args: tuple, kwargs: dict, sizes: Sizes | None = None, *, batch_first: bool = True
    ) -> Rows:
        """Make them of what ``model`` is called with."""
        size = batch_size_of(model, args, kwargs, batch_first)
        names = list(inspect.signature(model.forward).parameters)
        given = unpacked(model, args, kwargs)
        return cls(*(given if batch_first else transposed(given)), size, sizes or {}, names, batch_first)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a model, or a loss of what it is called with."""
        given = packed((self.args, self.kwargs))
        args, kwargs = given if self.batch_first else transposed(given)
        return function(*args, **kwargs)

    def changed(self, change: Callable[[tuple, Any], Any]) -> Rows:
        """Return the same with ``change(path, x)`` in the place of each argument."""
        args, kwargs = tree_map_with_path(change, (self.args, self.kwargs), is_leaf=is_ragged)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    @property
    def are_ambiguous(self) -> bool:
        """True if they are not in the first dimension of the model's inputs, and nobody could tell them from
        positions, of which there are as many."""
        return not self.batch_first and any(self.size in x.shape[1:] for x in self.tensors)

    def only(self, rows: Sequence[int]) -> Rows:
        """Return these rows as they stand, in this order."""
        chosen = list(rows)

        def take(path: tuple, x: Any) -> Any:
            if isinstance(x, Ragged):
                return replace(x, padded=x.padded[chosen], lengths=x.lengths[chosen])
            return x[chosen] if has_batch(x, self.size) else x

        return replace(self.changed(take), size=len(chosen), sizes={})

    def alone(self, row: int, copies: int = 1) -> Rows:
        """Return one row without its padding, ``copies`` times."""
        lengths = lengths_of(self.sizes, row)

        def cut(path: tuple, x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            known, first = self.sizes.get(keystr(path)), has_batch(x, self.size)
            if known is not None:
                cuts = [(d, side, own[row]) for d, (side, own) in known.items() if x.shape[d] == max(own)]
            else:
                dims = [d for d in range(first, x.dim()) if x.shape[d] in lengths]
                dims = dims if "mask" in self.name_of(path) or x.dtype == torch.bool else dims[:1]
                cuts = [(d, *lengths[x.shape[d]]) for d in dims]
            for d, side, own in cuts:
                x = _narrowed(x, d, own, side)
            return x

        return self.changed(cut).only([row] * copies)

    def name_of(self, path: tuple) -> str:
        """Return the name of an argument; "" if it has none."""
        if path[0].idx == 0:
            return self.names[path[1].idx] if path[1].idx < len(self.names) else ""
        return str(getattr(path[-1], "key", ""))

    def own_part(self, x: torch.Tensor, row: int, shape: Sequence[int], place: int | None = None) -> torch.Tensor:
        """Return what a row has of an output with all rows, without the positions that it has for padding.

        Args:
            shape: What it has alone.
            place: Where in the tensor the row is, if not where it is among all rows.
        """
        side = next((side for side, _ in lengths_of(self.sizes, row).values()), "right")
        x = x[row if place is None else place]
        if x.dim() != len(shape) or any(n < m for n, m in zip(x.shape, shape, strict=True)):
            raise SelfCheckError(
                f"the model's output has {x.dim() + 1} dimensions for several examples, and another shape for one "
                "alone: squeeze() takes the dimension of the batch too where it is 1. Name it, as in squeeze(-1)."
            )
        for d, own in enumerate(shape):
            x = _narrowed(x, d, own, side)
        return x

    # ---- which rows ----

    def spread(self, most: int = MOST) -> list[int]:
        """Return the shortest row, the longest and some between them, at most ``most``, in the order of the batch."""
        own = [own for _, own in columns_of(self.sizes)]
        length = [sum(each[i] for each in own) for i in range(self.size)]
        order = [i for i in sorted(range(self.size), key=length.__getitem__) if all(each[i] for each in own)]
        count = min(most, len(order))
        return sorted({order[round(j * (len(order) - 1) / max(1, count - 1))] for j in range(count)})

    def is_padded(self, row: int) -> bool:
        """Return True if a row is shorter than another one."""
        return any(own[row] < max(own) for _, own in columns_of(self.sizes))


def columns_of(sizes: Sizes) -> Iterator[tuple[tuple[str, int], Sequence[int]]]:
    """Yield every padded dimension, with the rows' own sizes in it."""
    return (((name, d), own) for name, of in sizes.items() for d, (_, own) in of.items())


def lengths_of(sizes: Sizes, row: int) -> dict[int, tuple[str, int]]:
    """Return by the padded length on which side a row is padded, and its own length, where rows are padded to a length
    in one way alone."""
    found: dict[int, set[tuple[str, int]]] = {}
    for of in sizes.values():
        for side, own in of.values():
            found.setdefault(max(own), set()).add((side, own[row]))
    return {longest: next(iter(ways)) for longest, ways in found.items() if len(ways) == 1}


def _narrowed(x: torch.Tensor, dim: int, own: int, side: str) -> torch.Tensor:
    return x.narrow(dim, 0 if side == "right" else x.shape[dim] - own, own)


def has_batch(x: Any, batch: int) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0 and len(x) == batch


def arguments_of(batch: Any) -> tuple[tuple, dict]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) and not is_ragged(batch) else (batch,)), {}


def transposed(given: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """Return arguments with their first two dimensions in the other order."""
    return tree_map(
        lambda x: x.transpose(0, 1) if isinstance(x, torch.Tensor) and x.dim() > 1 else x, given, is_leaf=is_ragged
    )


# ---- what a model returns ----


def outputs_of(engine: ClippingEngine, rows: Rows, losses_of: LossFunction | None) -> list[torch.Tensor]:
    """Run the model. Return the tensors of numbers that it returns, rows first; or the losses, (B,)."""
    return by_example(engine, rows.call(engine.model), rows) if losses_of is None else [rows.call(losses_of)]


def by_example(engine: ClippingEngine, output: Any, rows: Rows) -> list[torch.Tensor]:
    """Return every tensor of numbers in what the model returned for these rows, rows first. One that had them in the
    second dimension (after layers, heads or quantiles) has them there too where there are as many in the first."""
    batch, tensors, second = rows.size, [x for x in floating_tensors(with_rows(output)) if x.dim()], engine.rows_second
    second |= {i for i, x in enumerate(tensors) if is_batch_second(x, batch, batch_first=rows.batch_first)}
    found = [x.transpose(0, 1) if i in second and x.dim() > 1 else x for i, x in enumerate(tensors)]
    is_split = any(is_dtensor(x) for x in tensors)
    if is_split or not found or any(len(x) != batch for x in found):
        what = "a DTensor" if is_split else type(output).__name__
        raise SelfCheckError(
            f"{type(engine.model).__name__} returns {what}, and which of its numbers are whose is not known: take the "
            "batch, and return it, in the first dimension of tensors (or say batch_first=False, if it is the second), "
            "in a tuple, dict or dataclass if need be, and of a loss one for each row (reduction='none'). The last "
            "module of a tensor-parallel plan gathers its output (output_layouts=Replicate())."
        )
    return found


def is_batch_second(x: torch.Tensor, batch: int, *, batch_first: bool) -> bool:
    """Return True if an output has its examples in the second dimension, as the states of a recurrent layer have them,
    whatever comes first in its outputs."""
    return x.dim() > 1 and x.shape[1] == batch and (len(x) != batch or (not batch_first and x.dim() > 2))


def with_rows(output: Any) -> Any:
    """Return (B, ...) in the place of every PackedSequence: for each example a sum over its positions, each with a
    weight of its own."""

    def weighted(x: Any) -> Any:
        if not is_ragged(x):
            return x
        padded = unpacked_sequence(x).padded
        return torch.tensordot(torch.arange(1, padded.shape[1] + 1).sin().to(padded), padded, dims=([0], [1]))

    return tree_map(weighted, output, is_leaf=is_ragged)


def floating_tensors(structure: Any) -> list[torch.Tensor]:
    """Return the tensors of numbers in it, also in mappings and dataclasses that torch does not know."""
    found: list[torch.Tensor] = []
    for x in tree_leaves(structure):
        if isinstance(x, torch.Tensor):
            found += [x] if x.is_floating_point() else []
        elif isinstance(x, Mapping):
            found += floating_tensors(list(x.values()))
        elif is_dataclass(x) and not isinstance(x, type):
            found += floating_tensors([getattr(x, each.name, None) for each in fields(x)])
    return found


def projected(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return (B,), a fixed random linear function of each row of the tensors."""
    losses = []
    for x in tensors:
        numbers = x.float().unsqueeze(1).flatten(1)
        n = numbers.shape[1]
        weight = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(x.device)
        losses.append(numbers @ (weight / max(1, n) ** 0.5))
    return torch.stack(losses).sum(0)
