"""The part of a loss's autograd graph that a plain loop made itself: from the loss to what the model returned.

Behind everything that the model returns stands an :class:`End`, by which a walk knows that the model's part begins.
What a module keeps in an attribute has none; there the walk ends at a tap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .escape import LEAF
from .recorded_call import ForwardPass
from .tap import TAPS


class ModelCall(NamedTuple):
    """The pass that a call of the model belongs to, and the tensors it was given that ask for a gradient."""

    forward: ForwardPass
    inputs: Sequence[torch.Tensor]


class End(torch.autograd.Function):
    """An identity on what the model returned, in the same memory: a write in place that matters to the backward pass
    of the model is noticed by autograd, as it is without it."""

    @staticmethod
    def forward(ctx: Any, call: ModelCall, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads)


class LoopGraph:
    """The graph from some roots to the model.

    Args:
        roots: Losses.
        forward: The pass of the model that the graph ends at. It ends at those of other models, too.

    Attributes:
        ends: The outputs (node, number) of ends, and of taps, of the pass that the roots come from.
        leads: All nodes between the roots and those, with both.
        inputs: Tensors that ask for a gradient and that models were given.
        leaves: Tensors that ask for a gradient and that the roots come from, outside of models.
    """

    def __init__(self, roots: Sequence[Any], forward: ForwardPass):
        self.ends: dict[tuple[Any, int], None] = {}
        self.inputs: list[torch.Tensor] = []
        self.leaves: dict[torch.Tensor, None] = {}
        after: dict[Any, list[Any]] = {}  # for each node, those that were computed from it
        todo = [(*edge, None) for edge in map(_edge, roots)]
        while todo:
            node, number, later = todo.pop()
            if node is None:
                continue
            is_new = node not in after
            after.setdefault(node, []).append(later)
            if type(node) in ENDS and node.call.forward is forward:
                self.ends[node, number] = None
            if not is_new:
                continue
            if type(node) is LEAF:
                self.leaves[node.variable] = None
            elif type(node) is _END:
                self.inputs += node.call.inputs
                self.leaves |= dict.fromkeys(x for x in node.call.inputs if x.grad_fn is None)
                todo += [(*_edge(x), None) for x in node.call.inputs]
            elif type(node) not in ENDS:
                todo += [(*edge, node) for edge in node.next_functions]
        self.leads = set[Any]()
        reached = [node for node, _ in self.ends]
        while reached:
            node = reached.pop()
            if node is not None and node not in self.leads:
                self.leads.add(node)
                reached += after[node]

    @property
    def returned(self) -> list[tuple[int, ...]]:
        """The sizes of the outputs of the model that the roots come from."""
        return [shape_of(*end) for end in self.ends if type(end[0]) is _END]

    def sizes_before(self, node: Any) -> list[tuple[int, ...]]:
        """The sizes of what a node was computed from, as far as that comes from the model."""
        return [shape_of(*edge) for edge in node.next_functions if edge[0] in self.leads]

    def pairs_rows(self, node: Any, size: int) -> bool:
        """Whether what each of ``size`` rows has once is there for each pair of rows behind this node."""
        made, before = shape_of(node), self.sizes_before(node)
        is_larger = math.prod(made) == size * max(map(math.prod, before), default=0)
        return is_larger and made.count(size) > max((shape.count(size) for shape in before), default=size)


def _edge(x: Any) -> tuple[Any, int]:
    return getattr(x, "grad_fn", None), getattr(x, "output_nr", 0)


def shape_of(node: Any, number: int = 0) -> tuple[int, ...]:
    """The sizes of an output of a node; of a nested tensor that has none, sizes that fit nothing."""
    try:
        return tuple(node._input_metadata[number].shape)
    except RuntimeError:
        return (0, 0)


def rows_dims(shape: Sequence[int], size: int) -> list[int]:
    """The dimensions that may be that of the rows: those of ``size`` entries; the first, where none has and it may
    hold all positions of all rows."""
    found = [dim for dim, entries in enumerate(shape) if entries == size]
    is_flat = not found and bool(shape) and shape[0] % size == 0
    return [0] if is_flat else found


def kind(node: Any) -> str:
    """The operation that a node is of, as ``Mean`` or ``NllLoss``."""
    return type(node).__name__.partition("Backward")[0]


_END = End._backward_cls
ENDS = (_END, *TAPS)
