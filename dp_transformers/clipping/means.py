"""What a loss of the user's is a mean over, as far as its graph shows.

A mean over the batch gives each of B examples the weight 1/B, so it is over B numbers, or over as many for each
example. In any other the gradients of all examples have a factor that follows what the others hold, or how many there
are. So they have where the loss is another function of a mean or of a sum than a multiple (its root, a power), or
another multiple in another physical batch, or one that follows the number of examples.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .factors import Factor
from .loss_rows import (
    ALL,
    COMPARING,
    FLATTENED,
    MEAN,
    MEANS,
    NLL,
    PARTS,
    PICKS,
    SUMS,
    LossRows,
    adds,
    inputs,
    is_hidden,
    is_one_number,
    outputs,
    shape_of,
)

_FEW = 8
_DIFFERENCES = (
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
_JOINED, _ADDITIONS = ("StackBackward0", "CatBackward0"), ("AddBackward0", "SubBackward0")
# What gives each number of what it is given, or adds up some, and changes nothing but their factors
_LINEAR = (
    *MEANS,
    *SUMS,
    *PICKS,
    *PARTS,
    *FLATTENED,
    *_JOINED,
    *_ADDITIONS,
    "AddBackward1",
    "AliasBackward0",
    "CloneBackward0",
    "CopySlices",
    "ExpandBackward0",
    "NegBackward0",
    "PermuteBackward0",
    "RsubBackward0",
    "RsubBackward1",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "SubBackward1",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnsqueezeBackward0",
)
_PRODUCTS, _QUOTIENTS = ("MulBackward0", "MulBackward1"), ("DivBackward0", "DivBackward1")
_DOT = "DotBackward0"
# They may add up rows, with weights
_PRODUCTS_OF_ROWS = (_DOT, "Mv", "Mm", "Bmm", "Addmm", "Addmv", "Addbmm", "Baddbmm")


class _Before(NamedTuple):
    """An output of a node (the one of this number) that a factor reaches over, whether it was added up later, for a
    sum or a mean, and the node that multiplied each of its numbers with one of its own."""

    output: tuple[Any, int]
    is_sum: bool | None
    by: Any
    own: float
    via: Any = None


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
        self._rows = LossRows(nodes, taps, batch_size, rows_in)

    def weights(self) -> Iterator[torch.Tensor]:
        """Yields, for each mean of a negative log-likelihood, (B,) the weights in it of each example's targets
        together: ones, or those of their classes, and 0 where they are ignored."""
        for node in self._nodes:
            if type(node).__name__ not in NLL or node._saved_reduction != MEAN:
                continue
            target, weight = node._saved_target, node._saved_weight
            if target.numel() % self._batch_size or self._rows.at(node).row != ALL:  # which are whose is not known
                continue
            counts = target != (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # saved without its sign
            own = counts.float() if weight is None else weight[target.where(counts, 0)].float() * counts
            yield self._rows_first(own, _sizes_of_targets(node, target)).sum(1)

    def numbers(self) -> Iterator[int]:
        """Yields of how many numbers, or targets, each mean is that is one number. That of a few losses, each of the
        whole batch, is none over examples, nor is one of columns whose rows were added up before, nor one within a
        single row; that of losses of a row each is one of as many as they are."""
        for node in self._nodes:
            if is_one_number(node) and self._rows.at(node).row == ALL and (number := self._number(node)) is not None:
                yield number

    def _number(self, node: Any) -> int | None:
        name = type(node).__name__
        if name in NLL and node._saved_reduction == MEAN:
            return node._saved_target.numel()
        if name in _DIFFERENCES and node._saved_reduction == MEAN:
            return node._saved_self.numel()
        if name not in MEANS or not node._saved_self_sym_sizes or self._rows.at(*node.next_functions[0]).is_added:
            return None
        return node._saved_self_sym_numel

    def factors(self, roots: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> Iterator[Factor | None]:
        """Yields what the loss multiplies each mean and sum over examples with (signs left out), the last one that was
        computed first, and at last that of losses of a row each, if it is one for all of several; None for a mean or a
        sum of which the loss is no multiple.

        Args:
            gradients: What going back from each root begins with; None for 1.
        """
        of_rows = list[Factor]()
        for factor in self._reached(roots, gradients):
            if factor is None or not factor.of_row:
                yield factor
            else:
                of_rows.append(factor)
        if len(of_rows) > 1 and len({(each.is_sum, _number_on_cpu(each.by)) for each in of_rows}) == 1:
            owns = {each.own for each in of_rows}
            yield of_rows[0]._replace(own=owns.pop() if len(owns) == 1 else 1.0)

    def _reached(self, roots: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> Iterator[Factor | None]:
        """Yields the factors of all means and sums that the loss is made of."""
        found, heap = dict[Any, tuple[Any, float]](), list[tuple[int, int, Any]]()
        parts: list[_Before | Factor | None] = [
            begun for each in zip(roots, gradients, strict=True) if (begun := self._begun(*each)) is not None
        ]
        while parts or heap:
            for part in parts:
                if not isinstance(part, _Before):
                    yield part
                    continue
                key = part.output, part.is_sum, part.via
                if key in found:
                    by, own = found[key]
                    found[key] = _together(operator.add, by, part.by), own if own == part.own else 1.0
                else:
                    found[key] = part.by, part.own
                    heapq.heappush(heap, (-part.output[0]._sequence_nr(), len(found), key))
            parts = []
            if heap:
                *_, key = heapq.heappop(heap)  # after all that were computed from it
                of, is_sum, via = key
                parts = [
                    part._replace(via=part.via or via) if isinstance(part, _Before) else part
                    for part in self._parts(of, is_sum, *found[key])
                ]

    def _begun(self, root: Any, gradient: torch.Tensor | None) -> _Before | None:
        if root is None:
            return None
        if is_one_number(root):
            is_one = gradient is None or _number_on_cpu(gradient) == 1
            return _Before((root, 0), None, 1.0 if is_one else gradient.detach(), 1.0)
        own = None if gradient is None else _constant(gradient)  # losses are added up
        return None if own is None else _Before((root, 0), True, 1.0, own)

    def _parts(self, of: tuple[Any, int], is_sum: bool | None, by: Any, own: float) -> list[_Before | Factor | None]:
        """What a number is made of, or several that were added up (``is_sum``: for a sum; else for a mean), which have
        this factor: what the factor reaches over, or a mean or a sum that has it; None for one that something else is
        done with."""
        node, name, place = of[0], type(of[0]).__name__, self._rows.at(*of)
        if type(node) in self._taps or is_hidden(node):
            return [] if is_sum is None else [Factor(is_sum, by, own)]
        if place.is_one_row:
            return [Factor(is_sum is not False, by, own * self._own_of_row(node), of_row=True)]
        given = [(i, self._rows.at(*each)) for i, each in enumerate(node.next_functions)]
        given = [(i, each) for i, each in given if each.row is not None]
        if is_sum is None and any(each.row == ALL and not each.is_added for _, each in given):
            if name.startswith(COMPARING) and place.is_added:
                return [None]
            if name == _DOT:
                is_sum = True
            elif not self._rows.adds_examples(node):
                is_known = not place.is_added or name.startswith(_PRODUCTS_OF_ROWS) or self._batch_size == 1
                return [] if is_known else [None]
            else:
                is_sum = adds(node)
        if is_sum is None:
            return self._parts_of_number(node, given, by, own)
        return self._parts_of_several(node, given, is_sum, by, own)

    def _parts_of_number(
        self, node: Any, given: list[tuple[int, Any]], by: Any, own: float
    ) -> list[_Before | Factor | None]:
        """Where all that a node is given was added up, or is of a row each."""
        name, before = type(node).__name__, node.next_functions
        if name in _LINEAR:
            if name in (*MEANS, "ExpandBackward0"):
                by = by / _ratio(node)
            return [_Before(before[i], None, _of_joined(node, i, by), own) for i, _ in given]
        if (other := _constant_factor(node, [i for i, _ in given])) is not None:
            by = _together(operator.truediv if name in _QUOTIENTS else operator.mul, by, other)
            return [_Before(before[given[0][0]], None, by, own)]
        if name.startswith(_PRODUCTS_OF_ROWS) and len(given) == 1:  # weights that are not known
            return [_Before(before[given[0][0]], None, by, own)]
        return [None] if given else []

    def _parts_of_several(
        self, node: Any, given: list[tuple[int, Any]], is_sum: bool, by: Any, own: float
    ) -> list[_Before | Factor | None]:
        """Where a node is given numbers of each example."""
        name, before = type(node).__name__, node.next_functions
        if name in _LINEAR:
            return [self._before_several(node, i, is_sum, by, own) for i, _ in given]
        if (other := _constant_factor(node, [i for i, _ in given])) is not None:
            do = operator.truediv if name in _QUOTIENTS else operator.mul
            if not other.dim():
                return [_Before(before[given[0][0]], is_sum, do(by, other), own)]
            if self._batch_size == 1:  # it is that of an example, or one number, of a dimension
                return []
            return [_Before(before[given[0][0]], is_sum, by, do(own, _constant(other) or 1.0), via=node)]
        if any(each.is_added or each.mixes for _, each in given):  # a number of all examples in that of each
            return [None]
        return [] if is_sum and name.startswith(_PRODUCTS_OF_ROWS) else [Factor(is_sum, by, own)]

    def _before_several(self, node: Any, i: int, is_sum: bool, by: Any, own: float) -> _Before:
        before, by = node.next_functions[i], _of_joined(node, i, by)
        if not self._rows.at(*before).is_added:
            return _Before(before, is_sum, by, own)
        copies = math.prod(shape_of(outputs(node)[0])) / max(math.prod(shape_of(outputs(before[0])[before[1]])), 1)
        return _Before(before, None, by * copies if is_sum else by, own)

    def _own_of_row(self, node: Any) -> float:
        """What a loss of one row is multiplied with by itself."""
        own = 1.0
        while node is not None and type(node) not in self._taps:
            name, before = type(node).__name__, node.next_functions
            given = [i for i, each in enumerate(before) if self._rows.at(*each).row is not None]
            if len(given) != 1 or not is_one_number(before[given[0]][0]):
                break
            if name not in _LINEAR:
                other = _constant_factor(node, given)
                if other is None or not isinstance(number := _number_on_cpu(other), float):
                    break
                own = own / number if name in _QUOTIENTS else own * number
            node = before[given[0]][0]
        return own

    @cached_property
    def is_hidden(self) -> bool:
        """Whether a function that the graph does not show (a compiled one, a torch.autograd.Function) makes fewer
        numbers than rows of the batch."""
        used = {each for node in self._nodes for each in node.next_functions}
        return any(self._hides_numbers(node, used) for node in self._nodes)

    def _hides_numbers(self, node: Any, used: set[Any]) -> bool:
        if not is_hidden(node) or type(node) in self._taps or self._rows.at(node).is_one_row:
            return False
        made = [x for i, x in enumerate(outputs(node)) if (node, i) in used] or outputs(node)[:1]
        are_fewer, were_fewer = (
            [math.prod(shape_of(x)) < self._batch_size for x in each] for each in (made, inputs(node))
        )
        return sum(are_fewer) > sum(were_fewer) and not all(were_fewer)

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
            sizes = tuple(before._saved_self_sym_sizes) if type(before).__name__ in FLATTENED else ()
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


def _constant_factor(node: Any, given: list[int]) -> torch.Tensor | None:
    """What a node multiplies, or divides, the only input with that has something of the model."""
    name = type(node).__name__
    if given == [0] and name in (*_PRODUCTS, *_QUOTIENTS):
        return torch.as_tensor(node._saved_other).detach()
    if given == [1] and name in _PRODUCTS:
        return torch.as_tensor(node._saved_self).detach()
    if name == _DOT and len(given) == 1:
        return (node._saved_tensor if given == [0] else node._saved_self).detach()
    return None


def _of_joined(node: Any, i: int, by: Any) -> Any:
    """The factor of the i-th input, where the node only joins, or adds, its inputs."""
    name = type(node).__name__
    if name == "StackBackward0" and isinstance(by, torch.Tensor) and by.shape == (len(node.next_functions),):
        return by[i]
    if i == 1 and name in _ADDITIONS and node._saved_alpha != 1:
        return by * torch.as_tensor(node._saved_alpha)
    return by


def _together(do: Callable[[Any, Any], Any], by: Any, other: Any) -> Any:
    """A factor with another one; alone, where both are vectors whose sizes do not go together."""
    vectors = {x.shape for x in (by, other) if isinstance(x, torch.Tensor) and x.dim()}
    return do(by, other) if len(vectors) < 2 else by


def _ratio(node: Any) -> float:
    """Of how many numbers each number of a mean is the mean; less than 1 where numbers are copied."""
    return max(math.prod(node._saved_self_sym_sizes), 1) / max(math.prod(shape_of(outputs(node)[0])), 1)


def _constant(x: torch.Tensor) -> float | None:
    """The number that all numbers of a tensor on the CPU are which are not 0, if it is one."""
    if x.device.type != "cpu" or not x.numel():
        return None
    used = x[x != 0]
    return float(used[0]) if len(used) and bool((used == used[0]).all()) else None


def _number_on_cpu(by: Any) -> Any:
    """A factor as a number, where nobody has to wait for it."""
    is_there = not isinstance(by, torch.Tensor) or (by.device.type == "cpu" and by.numel() == 1)
    return float(by) if is_there else id(by)
