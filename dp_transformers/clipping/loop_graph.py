"""The part of the autograd graph that a plain loop builds: from the loss to the outputs of the model.

Each output of the model passes through an :class:`End`, which marks the start of the model's part. A tensor that a
module stores in an attribute has none; there the walk ends at a tap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .escape import LEAF
from .recorded_call import ForwardPass
from .tap import TAPS


class ModelCall(NamedTuple):
    """A call of the model: its forward pass, and its inputs that require a gradient."""

    forward: ForwardPass
    inputs: Sequence[torch.Tensor]


class End(torch.autograd.Function):
    """Identity on the outputs of the model, in the same memory, so that autograd still detects in-place writes which
    would change the backward pass of the model."""

    @staticmethod
    def forward(ctx: Any, call: ModelCall, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads)


class LoopGraph:
    """The graph from the losses to the model.

    Args:
        roots: The losses.
        forward: The forward pass of the model. The graph ends at outputs of other models, too.

    Attributes:
        ends: Outputs (node, number) of the ends, and of taps, of this forward pass.
        leads: All nodes on paths from the roots to these, with both.
        inputs: Inputs of models that require a gradient.
        leaves: Leaves outside of models that require a gradient.
    """

    def __init__(self, roots: Sequence[Any], forward: ForwardPass):
        self.ends: dict[tuple[Any, int], None] = {}
        self.inputs: list[torch.Tensor] = []
        self.leaves: dict[torch.Tensor, None] = {}
        after: dict[Any, list[Any]] = {}  # for each node, the nodes that were computed from it
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
        """Shapes of the outputs of the model that the roots depend on."""
        return [shape_of(*end) for end in self.ends if type(end[0]) is _END]

    def sizes_before(self, node: Any) -> list[tuple[int, ...]]:
        """Return the shapes of a node's inputs that come from the model."""
        return [shape_of(*edge) for edge in node.next_functions if edge[0] in self.leads]

    def pairs_rows(self, node: Any, size: int) -> bool:
        """Return True if a node makes an entry for each pair of ``size`` rows from inputs with one for each row."""
        made, before = shape_of(node), self.sizes_before(node)
        is_larger = math.prod(made) == size * max(map(math.prod, before), default=0)
        return is_larger and made.count(size) > max((shape.count(size) for shape in before), default=size)


def _edge(x: Any) -> tuple[Any, int]:
    return getattr(x, "grad_fn", None), getattr(x, "output_nr", 0)


def shape_of(node: Any, number: int = 0) -> tuple[int, ...]:
    """Return the shape of an output of a node; for a nested tensor, which has none, (0, 0)."""
    try:
        return tuple(node._input_metadata[number].shape)
    except RuntimeError:
        return (0, 0)


def rows_dims(shape: Sequence[int], size: int) -> list[int]:
    """Return the possible batch dimensions: those with ``size`` entries, or else the first, if it may hold all
    positions of all rows."""
    found = [dim for dim, entries in enumerate(shape) if entries == size]
    is_flat = not found and bool(shape) and shape[0] % size == 0
    return [0] if is_flat else found


def kind(node: Any) -> str:
    """Return the name of a node's operation, such as ``Mean`` or ``NllLoss``."""
    return type(node).__name__.partition("Backward")[0]


_END = End._backward_cls
ENDS = (_END, *TAPS)
