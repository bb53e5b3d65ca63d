"""What a loss of the user's is a mean over, as far as its graph shows.

A mean over the batch gives each of B examples the weight 1/B, so it is over B numbers, or over as many for each
example. In any other the gradients of all examples have a factor that follows what the others hold, or how many there
are. So they have where the loss is another function of a mean or of a sum than a multiple (its root, a power), or
another multiple in another physical batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

_MEANS, _SUMS = ("MeanBackward0", "MeanBackward1"), ("SumBackward0", "SumBackward1")
_ADDED, _JOINED, _FEW = ("MeanBackward1", "SumBackward1"), ("StackBackward0", "CatBackward0"), 8
_NLL, _MEAN, _SUM = ("NllLossBackward0", "NllLoss2DBackward0"), 1, 2
_DIFFERENCES = (
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
_PICKS = ("SelectBackward0", "SliceBackward0")
_PARTS = ("UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0")
_FLATTENED = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
# What makes numbers of one number each, or adds up some, and changes nothing but their factors
_LINEAR = (
    *_MEANS,
    *_SUMS,
    *_JOINED,
    *_PICKS,
    *_PARTS,
    *_FLATTENED,
    "AddBackward0",
    "AddBackward1",
    "AliasBackward0",
    "CloneBackward0",
    "ExpandBackward0",
    "NegBackward0",
    "RsubBackward0",
    "RsubBackward1",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SubBackward0",
    "SubBackward1",
    "ToCopyBackward0",
    "UnsqueezeBackward0",
)
_COMPARING = ("Amax", "Amin", "LinalgVectorNorm", "Logsumexp", "Max", "Median", "Min", "Norm", "Prod", "Std", "Var")
_PRODUCTS, _QUOTIENTS = ("MulBackward0", "MulBackward1"), ("DivBackward0", "DivBackward1")
_ADDING = (*_SUMS, "NansumBackward0")
_DIVIDED = ("Div", "Mul", "Mean", "Dot", "Mv", "Mm", "Bmm", "Addmm", "Addmv", "Baddbmm", "Addcdiv", "Addcmul", "Lerp")


class Factor(NamedTuple):
    """What a mean, or a sum, over examples is multiplied with in a loss.

    Attributes:
        is_sum: Whether it is a sum.
        by: The factor; a number, or a tensor: of one number, or of as many as were joined before.
    """

    is_sum: bool
    by: Any

    def is_that_of(self, other: Factor, sizes: tuple[int, int], *, may_be_means: bool) -> torch.Tensor:
        """Whether both give examples the same weight, in batches of these sizes, as a tensor of one number: a sum may
        be divided by the size where a mean is expected."""
        mine, others = (torch.as_tensor(each.by).float().flatten() for each in (self, other))
        if mine.shape != others.shape:
            return torch.zeros((), dtype=torch.bool)
        same = torch.isclose(mine, others, rtol=1e-4).all()
        if self.is_sum and may_be_means:
            same = same | torch.isclose(mine * sizes[0], others * sizes[1], rtol=1e-4).all()
        return same


class LossMeans:
    """The means in a loss.

    Args:
        nodes: Those of its graph, as far as the first taps on each way, these among them.
        taps: The types of the taps' nodes.
        batch_size: B, at least 1.
        rows_in: The dimension of the examples in what the model returns.
    """

    def __init__(self, nodes: Collection[Any], taps: Collection[type], batch_size: int, rows_in: int):
        self._nodes, self._taps, self._batch_size, self._rows_in = nodes, taps, batch_size, rows_in

    def weights(self) -> Iterator[torch.Tensor]:
        """Yields, for each mean of a negative log-likelihood, (B,) the weights in it of each example's targets
        together: ones, or those of their classes, and 0 where they are ignored."""
        for node in self._nodes:
            if type(node).__name__ not in _NLL or node._saved_reduction != _MEAN:
                continue
            target, weight = node._saved_target, node._saved_weight
            if target.numel() % self._batch_size or self._row(node) is not None:  # which are whose is not known
                continue
            counts = target != (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # saved without its sign
            own = counts.float() if weight is None else weight[target.where(counts, 0)].float() * counts
            yield self._rows_first(own, _sizes_of_targets(node, target)).sum(1)

    def numbers(self) -> Iterator[int]:
        """Yields of how many numbers, or targets, each mean is that is one number. That of a few losses, each of the
        whole batch, is none over examples, nor is one of columns whose rows were added up before, nor one within a
        single row; that of losses of a row each is one of as many as they are."""
        for node in self._nodes:
            number = self._number(node) if _is_one_number(node) else None
            if number is not None and self._row(node) is None:
                yield number

    def factors(self, roots: Sequence[Any]) -> Iterator[Factor | None]:
        """Yields what the loss multiplies each mean and sum over examples with (signs left out), the last one that was
        computed first; None for one of which it is no multiple."""
        factors, heap = dict.fromkeys((root for root in roots if root is not None), 1.0), list[tuple[int, int, Any]]()
        for number, root in enumerate(factors):
            heapq.heappush(heap, (-root._sequence_nr(), number, root))
        while heap:  # a node comes after all that were computed from it
            *_, node = heapq.heappop(heap)
            parts = self._parts(node, factors[node])
            for before, factor in parts if isinstance(parts, list) else ():
                if before in factors:
                    factors[before] = factors[before] + factor
                elif before is not None:
                    factors[before] = factor
                    heapq.heappush(heap, (-before._sequence_nr(), len(factors), before))
            if not isinstance(parts, list):
                yield parts

    def _parts(self, node: Any, factor: Any) -> list[tuple[Any, Any]] | Factor | None:
        """The numbers that one, or several that are joined, is made of, with their factors where it has this one; or
        the factor of a mean or of a sum over examples; None for another function of these."""
        name = type(node).__name__
        if type(node) in self._taps or isinstance(node, BackwardCFunction):
            return []
        before = [each for each, _ in node.next_functions]
        if not all(map(self._is_of_one_numbers, before)):  # it is of several numbers
            is_compared, is_added = name.startswith(_COMPARING), name in _ADDING
            if not (is_compared or is_added or self._number(node) is not None) or not self._is_of_examples(node):
                return []
            return None if is_compared else Factor(is_added, factor)
        if name in _LINEAR:
            return [(each, factor) for each in before]
        of_examples = [i for i, each in enumerate(before) if self._is_of_examples(each)]
        if of_examples == [0] and name in (*_PRODUCTS, *_QUOTIENTS):
            other = torch.as_tensor(node._saved_other).detach()
            return [(before[0], factor * other if name in _PRODUCTS else factor / other)]
        if of_examples == [1] and name in _PRODUCTS:
            return [(before[1], factor * node._saved_self.detach())]
        return None if of_examples or self._is_of_examples(node) else []

    @cached_property
    def is_hidden(self) -> bool:
        """Whether a function that the graph does not show (a compiled one, a torch.autograd.Function) makes fewer
        numbers than rows of the batch."""
        return any(self._hides_numbers(node) for node in self._nodes)

    @cached_property
    def is_sum(self) -> bool:
        """Whether examples are added up, and nothing is divided by anything."""
        names = [type(node).__name__ for node in self._nodes]
        divided = any(
            name.startswith(_DIVIDED) or isinstance(node, BackwardCFunction) or ("Loss" in name and not _is_sum(node))
            for name, node in zip(names, self._nodes, strict=True)
            if type(node) not in self._taps
        )
        return not divided and any(_is_sum(node) and self._row(node) is None for node in self._nodes)

    def _number(self, node: Any) -> int | None:
        name = type(node).__name__
        if name in _NLL and node._saved_reduction == _MEAN:
            return node._saved_target.numel()
        if name in _DIFFERENCES and node._saved_reduction == _MEAN:
            return node._saved_self.numel()
        if name not in _MEANS or not node._saved_self_sym_sizes:
            return None
        before = node.next_functions[0][0]
        if type(before).__name__ in _JOINED and all(_is_one_number(x) for x, _ in before.next_functions):
            of_rows = all(self._row(*loss) is not None for loss in before.next_functions)
            return len(before.next_functions) if of_rows else None
        return None if self._adds_rows(before) else node._saved_self_sym_numel

    def _hides_numbers(self, node: Any) -> bool:
        if not isinstance(node, BackwardCFunction) or type(node) in self._taps:
            return False
        made, given = (
            [math.prod(x.shape) < self._batch_size for x in each] for each in (_outputs(node), _inputs(node))
        )
        return sum(made) > sum(given) and not all(given) and self._row(node) is None

    def _row(self, node: Any, output: int = 0) -> int | None:
        """The row, if it is one, that all is of which this output of a node has from the model."""
        rows = self._rows(node, output)
        return next(iter(rows)) if rows is not None and len(rows) == 1 else None

    def _is_of_one_numbers(self, node: Any) -> bool:
        """Whether a node gives one number, or joins numbers each of which is one. What is (1,) in a batch of one has a
        number for each example."""
        given = [each for each, _ in node.next_functions] if type(node).__name__ in _JOINED else [node]
        if self._batch_size == 1:
            return all(each is None or not _outputs(each)[0].shape for each in given)
        return all(map(_is_one_number, given))

    def _is_of_examples(self, node: Any) -> bool:
        """Whether a node has something from the model that is not of one row alone."""
        rows = self._rows(node)
        return rows is None or len(rows) > 1

    def _rows(self, node: Any, output: int = 0) -> set[int] | None:
        """The rows that this output of a node has something of; None for all."""
        todo, seen, rows = [(node, output)], set(), set[int]()
        while todo:
            each = node, output = todo.pop()
            if node is None or each in seen:
                continue
            seen.add(each)
            if type(node) in self._taps:
                return None
            row = self._picked(node, output)
            if row is None:
                todo += node.next_functions
            else:
                rows.add(row)
        return rows

    def _picked(self, node: Any, output: int) -> int | None:
        """The row that this output of a node is, where the node takes the batch apart."""
        name = type(node).__name__
        if name not in (*_PICKS, *_PARTS):
            return None
        sizes = _inputs(node)[0].shape
        if (node._saved_dim + 2**63) % 2**64 - 2**63 not in (self._rows_in, self._rows_in - len(sizes)):
            return None
        if name in _PARTS:
            return output if len(_outputs(node)) == self._batch_size else None
        if sizes[self._rows_in] != self._batch_size:
            return None
        if name == "SelectBackward0":
            return node._saved_index % 2**64 % self._batch_size
        taken = range(self._batch_size)[node._saved_start : node._saved_end : node._saved_step]
        return taken[0] if len(taken) == 1 else None

    def _adds_rows(self, node: Any) -> bool:
        """Whether a few nodes before a mean, in a row, there is a sum or a mean over the examples."""
        for before in _in_a_row(node):
            if type(before).__name__ in _ADDED:
                sizes = before._saved_self_sym_sizes
                dims = [dim if dim < len(sizes) else dim - 2**64 + len(sizes) for dim in before._saved_dim]
                if (not dims or self._rows_in in dims) and sizes[self._rows_in : self._rows_in + 1] == (
                    self._batch_size,
                ):
                    return True
        return False

    def _rows_first(self, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """(B, -1) numbers that had these sizes, one of which is that of the examples: that in the dimension that they
        have in what the model returns, if it can be."""
        dims = (self._rows_in, *range(len(sizes)))
        rows = next((dim for dim in dims if sizes[dim : dim + 1] == (self._batch_size,)), None)
        if rows is not None:
            return x.reshape(sizes).movedim(rows, 0).reshape(self._batch_size, -1)
        # flattened where the graph does not show it
        return x.reshape(self._batch_size, -1) if self._rows_in == 0 else x.reshape(-1, self._batch_size).T


def _sizes_of_targets(node: Any, target: torch.Tensor) -> tuple[int, ...]:
    """Returns the sizes that the targets of a likelihood had before they, as the scores, were flattened."""
    if target.dim() == 1:
        for before in _in_a_row(node):
            sizes = tuple(before._saved_self_sym_sizes) if type(before).__name__ in _FLATTENED else ()
            if len(sizes) > 2 and math.prod(sizes[:-1]) == target.numel():
                return sizes[:-1]
    return tuple(size for size in target.shape if size > 1)


def _in_a_row(node: Any) -> Iterator[Any]:
    """This node and a few before it, each the first that the one after it comes from."""
    for _ in range(_FEW):
        if node is None:
            return
        yield node
        node = next((before for before, _ in node.next_functions if before is not None), None)


def _is_sum(node: Any) -> bool:
    """Whether it makes one number of several by adding them."""
    name = type(node).__name__
    if name in (*_NLL, *_DIFFERENCES):
        return node._saved_reduction == _SUM
    return name in _SUMS and _is_one_number(node) and math.prod(node._saved_self_sym_sizes) > 1


def _is_one_number(node: Any) -> bool:
    return node is None or math.prod(_outputs(node)[0].shape) == 1


def _outputs(node: Any) -> Sequence[Any]:
    """What is known of each tensor that a node stands for: those that its gradient is of."""
    return node._input_metadata


def _inputs(node: Any) -> list[Any]:
    """The same of the tensors that it was computed from, where a gradient goes to them."""
    return [_outputs(before)[i] for before, i in node.next_functions if before is not None]
