"""What a loss of the user's is a mean over, as far as its graph shows.

A mean over the batch gives each of B examples the weight 1/B, so it is over B numbers, or over as many for each
example. In any other the gradients of all examples have a factor that follows what the others hold, or how many there
are. So they have where the loss is another function of a mean or of a sum than a multiple (its root, a power), or
another multiple in another physical batch, or one that follows the number of examples.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from .factors import Factor

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
# They may add up rows, with weights
_PRODUCTS_OF_ROWS = ("Dot", "Mv", "Mm", "Bmm", "Addmm", "Addmv", "Addbmm", "Baddbmm")


class _Before(NamedTuple):
    """An output of a node (the one of this number) that a factor reaches over, and whether it was added up later, for
    a sum or a mean."""

    output: tuple[Any, int]
    is_sum: bool | None
    factor: Any


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
        computed first, and at last that of losses of a row each, if it is one for all of several; None for a mean or a
        sum of which the loss is no multiple."""
        of_rows = dict[Any, list[Factor]]()
        for factor in self._reached(roots):
            if factor is None or not factor.of_row:
                yield factor
            else:
                of_rows.setdefault((factor.is_sum, _number_on_cpu(factor.by)), []).append(factor)
        if len(of_rows) == 1 and len(rows := next(iter(of_rows.values()))) > 1:
            yield rows[0]

    def _reached(self, roots: Sequence[Any]) -> Iterator[Factor | None]:
        """Yields the factors of all means and sums that the loss is made of."""
        factors, heap = dict[Any, Any](), list[tuple[int, int, Any]]()
        parts: list[_Before | Factor | None] = [_Before((root, 0), None, 1.0) for root in roots if root is not None]
        while parts or heap:
            for part in parts:
                if not isinstance(part, _Before):
                    yield part
                    continue
                key = part.output, part.is_sum
                if key in factors:
                    factors[key] = factors[key] + part.factor
                else:
                    factors[key] = part.factor
                    heapq.heappush(heap, (-part.output[0]._sequence_nr(), len(factors), key))
            parts = []
            if heap:
                *_, key = heapq.heappop(heap)  # after all that were computed from it
                of, is_sum = key
                parts = self._parts(of, is_sum, factors[key])

    def _parts(self, of: tuple[Any, int], is_sum: bool | None, factor: Any) -> list[_Before | Factor | None]:
        """What one number is made of (or several that are joined), or several that were added up (``is_sum``: for a
        sum; else for a mean), which have this factor: what the factor reaches over, or a mean or a sum that has it;
        None for one that something else is done with."""
        node, name = of[0], type(of[0]).__name__
        if type(node) in self._taps or isinstance(node, BackwardCFunction):
            return [] if is_sum is None else [Factor(is_sum, factor)]
        if self._row(*of) is not None:
            return [Factor(is_sum is not False, factor, of_row=True)]
        before = node.next_functions
        if is_sum is None and not all(self._is_of_one_numbers(each) for each, _ in before):
            if not self._is_of_examples(*of):
                return []
            if name.startswith(_COMPARING):
                return [None]
            if (is_sum := _adds(node)) is None:
                return []
        if is_sum is not None and _adds(node) is not None and (name not in _ADDED or self._is_over_rows(node)):
            is_sum = _adds(node)  # what adds up the examples is nearest to the model
        followed = [i for i, each in enumerate(before) if self._is_of_examples(*each) or self._row(*each) is not None]
        if name in _LINEAR:
            share = factor / _added_up(node) if is_sum is None and name in _MEANS else factor
            return [_Before(before[i], is_sum, share) for i in followed]
        if name in (*_PRODUCTS, *_QUOTIENTS) and len(followed) == 1 and (followed == [0] or name in _PRODUCTS):
            other = torch.as_tensor(node._saved_other if followed == [0] else node._saved_self).detach()
            if is_sum is not None and other.dim():  # each number has one of its own
                if self._batch_size == 1:  # or it is one number, of a dimension
                    return []
                other = 1.0
            return [_Before(before[followed[0]], is_sum, factor / other if name in _QUOTIENTS else factor * other)]
        if is_sum is None:
            return [None] if followed or self._is_of_examples(*of) else []
        return [] if is_sum and name.startswith(_PRODUCTS_OF_ROWS) else [Factor(is_sum, factor)]

    @cached_property
    def is_hidden(self) -> bool:
        """Whether a function that the graph does not show (a compiled one, a torch.autograd.Function) makes fewer
        numbers than rows of the batch."""
        return any(self._hides_numbers(node) for node in self._nodes)

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

    def _is_of_examples(self, node: Any, output: int = 0) -> bool:
        """Whether this output of a node has something from the model that is not of one row alone."""
        rows = self._rows(node, output)
        return rows is None or len(rows) > 1

    def _rows(self, node: Any, output: int = 0) -> set[int] | None:
        """The rows that this output of a node has something of, two of them if there are more; None for all."""
        todo, seen, rows = [(node, output)], set(), set[int]()
        while todo and len(rows) < 2:
            each = node, output = todo.pop()
            if node is None or each in seen:
                continue
            seen.add(each)
            if type(node) in self._taps:
                return None
            row = self._picked(node, output)
            if row is None or not self._is_of_model(node):
                todo += node.next_functions
            else:
                rows.add(row)
        return rows

    def _is_of_model(self, node: Any) -> bool:
        """Whether a tap is before a node."""
        todo, seen = [node], set()
        while todo:
            each = todo.pop()
            if type(each) in self._taps:
                return True
            if each is not None and each not in seen:
                seen.add(each)
                todo += [before for before, _ in each.next_functions]
        return False

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
        return any(type(before).__name__ in _ADDED and self._is_over_rows(before) for before in _in_a_row(node))

    def _is_over_rows(self, node: Any) -> bool:
        """Whether a sum or a mean over some dimensions is one over the examples."""
        sizes = node._saved_self_sym_sizes
        dims = [dim if dim < len(sizes) else dim - 2**64 + len(sizes) for dim in node._saved_dim]
        is_over = not dims or self._rows_in in dims
        return is_over and sizes[self._rows_in : self._rows_in + 1] == (self._batch_size,)

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


def _adds(node: Any) -> bool | None:
    """Whether a node makes a sum of several numbers (True) or their mean (False)."""
    name = type(node).__name__
    reduction = getattr(node, "_saved_reduction", _SUM if name in _ADDING else _MEAN if name in _MEANS else 0)
    return reduction == _SUM if reduction in (_SUM, _MEAN) else None


def _added_up(node: Any) -> float:
    """Of how many numbers each number of a mean is the mean."""
    return max(math.prod(node._saved_self_sym_sizes), 1) / max(math.prod(_outputs(node)[0].shape), 1)


def _number_on_cpu(by: Any) -> Any:
    """A factor as a number, where nobody has to wait for it."""
    is_there = not isinstance(by, torch.Tensor) or (by.device.type == "cpu" and by.numel() == 1)
    return float(by) if is_there else id(by)


def _is_one_number(node: Any) -> bool:
    return node is None or math.prod(_outputs(node)[0].shape) == 1


def _outputs(node: Any) -> Sequence[Any]:
    """What is known of each tensor that a node stands for: those that its gradient is of."""
    return node._input_metadata


def _inputs(node: Any) -> list[Any]:
    """The same of the tensors that it was computed from, where a gradient goes to them."""
    return [_outputs(before)[i] for before, i in node.next_functions if before is not None]
