"""Of which examples the numbers are that a loop's loss is computed from, and in which dimension these lie."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

MEANS, SUMS = ("MeanBackward0", "MeanBackward1"), ("SumBackward0", "SumBackward1", "NansumBackward0")
COMPARING = ("Amax", "Amin", "LinalgVectorNorm", "Logsumexp", "Max", "Median", "Min", "Norm", "Prod", "Std", "Var")
FLATTENED = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
NLL, MEAN, SUM = ("NllLossBackward0", "NllLoss2DBackward0"), 1, 2
PICKS = ("SelectBackward0", "SliceBackward0")
PARTS = ("UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0")
_ALONG = ("MeanBackward1", "SumBackward1")
ALL = "all"


class Place(NamedTuple):
    """What is known of an output of a node.

    Attributes:
        row: The row that all is of which it has from the model; "all" for several, None for none.
        dim: The dimension in which the examples lie, where it is known.
        is_added: Whether the examples were added up, so that no dimension of theirs is left.
        mixes: Whether it has numbers of each example, and in them something that was added up.
    """

    row: Any = None
    dim: int | None = None
    is_added: bool = False
    mixes: bool = False

    @property
    def is_one_row(self) -> bool:
        return self.row is not None and self.row != ALL


_NOTHING = Place()


class LossRows:
    """The places of all outputs in the graph of a loss.

    Args:
        nodes: Those of the graph, as far as the first taps on each way, these among them.
        taps: The types of the taps' nodes.
        batch_size: B, at least 1.
        rows_in: The dimension of the examples in what the model returns.
    """

    def __init__(self, nodes: Collection[Any], taps: Collection[type], batch_size: int, rows_in: int):
        self._taps, self._batch_size, self._rows_in = taps, batch_size, rows_in
        self._places = dict[Any, list[Place]]()
        for node in _in_order(nodes, taps):
            self._places[node] = [self._place(node, i) for i in range(len(outputs(node)))]

    def at(self, node: Any, output: int = 0) -> Place:
        """The place of an output; of nothing from the model, where it is not in the graph."""
        places = self._places.get(node)
        return _NOTHING if places is None else places[output]

    def adds_examples(self, node: Any) -> bool:
        """Whether a node makes a sum or a mean, or another number, over the examples of what it is given."""
        name, compares = type(node).__name__, type(node).__name__.startswith(COMPARING)
        is_one = self._is_one(shape_of(outputs(node)[0]))
        if is_one or not (name in _ALONG or (compares and hasattr(node, "_saved_dim"))):
            return adds(node) is not None or (compares and is_one)
        shape, dims = shape_of(inputs(node)[0]), node._saved_dim
        if dims is None:
            return True
        dims = [_signed(dim, len(shape)) for dim in (dims if isinstance(dims, (tuple, list)) else [dims])]
        return not dims or self.at(*node.next_functions[0]).dim in dims

    def _place(self, node: Any, output: int) -> Place:
        shape = tuple(shape_of(outputs(node)[output]))
        if type(node) in self._taps:
            return Place(ALL, self._dim_of_output(shape))
        given = [(self.at(*each), each) for each in node.next_functions if each[0] is not None]
        given = [(place, each) for place, each in given if place.row is not None]
        if not given:
            return _NOTHING
        rows = {place.row for place, _ in given}
        if len(rows) == 1 and rows != {ALL}:
            return Place(next(iter(rows)))
        picked = self._picked(node, output)
        if picked is not None:
            return Place(picked)
        if self._is_one(shape) or self.adds_examples(node) or all(place.is_added for place, _ in given):
            return Place(ALL, is_added=True)
        of_inputs = [(place.dim, shape_of(outputs(n)[i])) for place, (n, i) in given if place.dim is not None]
        dims = {self._dim(node, shape, *each) for each in of_inputs}
        dim = next(iter(dims)) if len(dims) == 1 else None
        if not dims and type(node).__name__ in FLATTENED and self._dim_of_output(shape) == self._rows_in:
            dim = self._rows_in
        return Place(ALL, dim, mixes=any(place.is_added or place.mixes for place, _ in given))

    def _is_one(self, shape: Sequence[int]) -> bool:
        """Whether it is one number of all examples. What is (1,) in a batch of one has a number for each."""
        return math.prod(shape) == 1 and (self._batch_size > 1 or not shape)

    def _dim_of_output(self, shape: tuple[int, ...]) -> int | None:
        return next((dim for dim in (self._rows_in, 0) if shape[dim : dim + 1] == (self._batch_size,)), None)

    def _dim(self, node: Any, made: tuple[int, ...], dim: int, given: Sequence[int]) -> int | None:
        """The dimension of the examples in the output of these sizes, for one input where it was ``dim``."""
        found, name = _moved(node, len(made), dim, given), type(node).__name__
        if name in FLATTENED:
            before = math.prod(given[:dim])
            found = next(
                (i for i in range(len(made)) if math.prod(made[:i]) == before and made[i] == given[dim]), None
            )
        return found if found is not None and 0 <= found < len(made) and made[found] == given[dim] else None

    def _picked(self, node: Any, output: int) -> Any:
        """The row that this output of a node is, where the node takes the batch apart."""
        name = type(node).__name__
        if name not in (*PICKS, *PARTS):
            return None
        place, shape = self.at(*node.next_functions[0]), shape_of(inputs(node)[0])
        dim = _signed(node._saved_dim, len(shape))
        if place.dim is None and name in PARTS and len(outputs(node)) == self._batch_size:  # of flattened rows
            return output
        if place.dim != dim:
            return None
        if name == "UnbindBackward0":
            return output
        if name in PARTS:
            sizes = [shape_of(each)[dim] for each in outputs(node)]
            return sum(sizes[:output]) if sizes[output] == 1 else None
        if name == "SelectBackward0":
            return _signed(node._saved_index, self._batch_size)
        start, end = (_signed(each, self._batch_size) for each in (node._saved_start, node._saved_end))
        taken = range(self._batch_size)[start : end : node._saved_step]
        return taken[0] if len(taken) == 1 else None


def _in_order(nodes: Collection[Any], taps: Collection[type]) -> Iterator[Any]:
    """Yields nodes, each after those that it was computed from."""
    known, todo, done = set(nodes), [(node, False) for node in nodes], set()
    while todo:
        node, is_ready = todo.pop()
        if node in done:
            continue
        if is_ready or type(node) in taps:
            done.add(node)
            yield node
            continue
        todo.append((node, True))
        todo += [(before, False) for before, _ in node.next_functions if before in known and before not in done]


def _moved(node: Any, made: int, dim: int, given: Sequence[int]) -> int | None:
    """Where a dimension is in an output of so many, by what the node does."""
    name = type(node).__name__
    if name == "TransposeBackward0":
        swapped = [_signed(node._saved_dim0, made), _signed(node._saved_dim1, made)]
        return swapped[1 - swapped.index(dim)] if dim in swapped else dim
    if name == "PermuteBackward0":
        return [_signed(each, made) for each in node._saved_dims].index(dim)
    if name == "TBackward0":
        return made - 1 - dim
    if name in ("SelectBackward0", "UnbindBackward0", "SqueezeBackward1"):
        removed = _signed(node._saved_dim, len(given))
        return None if removed == dim else dim - (removed < dim)
    if name in ("UnsqueezeBackward0", "StackBackward0"):
        return dim + (_signed(node._saved_dim, made) <= dim)
    if name == "SqueezeBackward0":
        return dim - sum(size == 1 for size in given[:dim])
    if name == "SqueezeBackward2" or name in _ALONG:
        removed = {_signed(each, len(given)) for each in node._saved_dim}
        return dim if made == len(given) else dim - sum(each < dim for each in removed)
    if name in NLL:
        return dim - (dim > 1)
    return dim + max(made - len(given), 0)  # aligned at the right


def adds(node: Any) -> bool | None:
    """Whether a node makes a sum of several numbers (True) or their mean (False)."""
    name = type(node).__name__
    reduction = getattr(node, "_saved_reduction", SUM if name in SUMS else MEAN if name in MEANS else 0)
    return reduction == SUM if reduction in (SUM, MEAN) else None


def is_hidden(node: Any) -> bool:
    """Whether it is a function that the graph does not show."""
    return isinstance(node, BackwardCFunction)


def is_one_number(node: Any) -> bool:
    return node is None or math.prod(shape_of(outputs(node)[0])) == 1


def outputs(node: Any) -> Sequence[Any]:
    """What is known of each tensor that a node stands for: those that its gradient is of."""
    return node._input_metadata


def inputs(node: Any) -> list[Any]:
    """The same of the tensors that it was computed from, where a gradient goes to them."""
    return [outputs(before)[i] for before, i in node.next_functions if before is not None]


def shape_of(metadata: Any) -> Sequence[int]:
    """The sizes of what a node's gradient is of; of a nested tensor that has none, sizes that fit nothing."""
    try:
        return metadata.shape
    except RuntimeError:
        return torch.Size([0, 0])


def _signed(saved: int, of: int) -> int:
    """A dimension or an index that was saved, without its sign, from 0."""
    number = (saved + 2**63) % 2**64 - 2**63
    return number + of if number < 0 else number
