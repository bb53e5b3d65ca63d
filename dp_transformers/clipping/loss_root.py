"""The part of the autograd graph that a plain loop builds, from the loss to the outputs of the model, and the rule for
``loss.backward()`` there: the loss must be a plain mean over the rows (or a sum, by ``loss_reduction``) of equally
many numbers for each row, times Python numbers, or a sum of such means.

In any other loss, the weight of a row may depend on other rows or on their number. The rule reads the operations
between the loss and its reductions, and the number of numbers in each reduction.

Each output of the model passes through an :class:`End`, which marks the start of the model's part. A tensor that a
module stores in an attribute has none; there the walk ends at a tap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.graph import get_gradient_edge

from .loss_graph import LEAF
from .precision import HALF
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
        todo = [(*edge, None) for edge in _edges(roots)]
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
                todo += [(*edge, None) for edge in _edges(node.call.inputs)]
            elif type(node) not in ENDS:
                todo += [(*edge, node) for edge in node.next_functions]
        self.leads = set[Any]()
        reached = [node for node, _ in self.ends]
        while reached:
            node = reached.pop()
            if node is not None and node not in self.leads:
                self.leads.add(node)
                reached += after[node]

    def sizes_before(self, node: Any) -> list[tuple[int, ...]]:
        """Return the shapes of a node's inputs that come from the model."""
        return [shape_of(*edge) for edge in node.next_functions if edge[0] in self.leads]

    def pairs_rows(self, node: Any, size: int) -> bool:
        """Return True if a node makes an entry for each pair of ``size`` rows from inputs with one for each row."""
        made, before = shape_of(node), self.sizes_before(node)
        is_larger = math.prod(made) == size * max(map(math.prod, before), default=0)
        return is_larger and made.count(size) > max((shape.count(size) for shape in before), default=size)


def _edges(tensors: Sequence[Any]) -> list[tuple[Any, int]]:
    found = [get_gradient_edge(x) for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]
    return [(edge.node, edge.output_nr) for edge in found]


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


_SUMS_OF_LOSSES = {"Add", "Sub", "Rsub", "Neg", "Clone", "Alias", "ToCopy", "Squeeze", "View"}
_REDUCTIONS = {"Mean", "Sum", "NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy"}
_REDUCTIONS |= {"BinaryCrossEntropyWithLogits"}
_MEAN, _SUM = 1, 2  # as torch saves them


class LossRoot:
    """The root of the graph of a loss.

    Args:
        graph: The graph of the loss.
        forward: Its forward pass. DeferredChecks on ignored targets are added to it.
        loss_reduction: "mean" or "sum".
        batch_first: True if rows are the first dimension of targets.
    """

    def __init__(self, graph: LoopGraph, forward: ForwardPass, loss_reduction: str, *, batch_first: bool):
        self._graph, self._forward, self._size = graph, forward, forward.batch_size
        self._reduction, self._batch_first = loss_reduction, batch_first
        self._refuse: Callable[[str], NoReturn] = partial(_refuse, loss_reduction)

    def require_plain(self, root: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Raise ValueError unless the loss is such a mean or sum. The loss of a single row may be any.

        Args:
            gradient: The gradient at which backward starts; None for 1.
        """
        size = max(self._size, 1)
        returned = [shape_of(*end) for end in self._graph.ends if type(end[0]) is _END]
        if any(size not in shape and (not shape or shape[0] % size) for shape in returned):
            self._refuse("the model returned it without rows, which find_example_losses(model)(batch) may have")
        if size == 1:
            return
        if root.numel() != 1 or gradient is not None:
            self._refuse("it is several numbers, or begins with a gradient of its own")
        todo: list[tuple[Any, tuple[float, ...]]] = [(root.grad_fn, ())]  # nodes, and their divisors
        while todo:
            node, divisors = todo.pop()
            if node not in self._graph.leads:
                continue
            before = [earlier for earlier, _ in node.next_functions]
            if kind(node) in _SUMS_OF_LOSSES or (kind(node) in ("Mean", "Sum") and self._numbers_in(node) == 1):
                todo += [(each, divisors) for each in before]
            elif kind(node) in ("Mul", "Div"):
                todo.append((before[0], (*divisors, self._divisor(node))))
            elif kind(node) in _REDUCTIONS and getattr(node, "_saved_reduction", _MEAN):
                self._require_reduction(node, divisors)
            else:
                self._refuse(f"it is a function of several rows, by {type(node).__name__}")

    def _divisor(self, node: Any) -> float:
        """Return the divisor of a product or quotient: a Python number, or the number of targets in a cross-entropy
        with label smoothing."""
        first, *others = [earlier for earlier, _ in node.next_functions]
        other = node._saved_other if first in self._graph.leads and not any(others) else None
        if other is not None and (not isinstance(other, torch.Tensor) or _is_of_python(other)):
            return float(other) if kind(node) == "Div" else 1 / float(other) if other else 0.0
        kinds = kind(node), kind(first), *(kind(earlier) for earlier, _ in getattr(first, "next_functions", ()))
        if other is None or kinds != ("Div", "Sum", "MaskedFill"):
            self._refuse("it is multiplied with, or divided by, a tensor")
        self._expect((other == self._numbers_in(first)).all(), "some of its targets are ignored")
        return self._numbers_in(first)

    def _require_reduction(self, node: Any, divisors: tuple[float, ...]) -> None:
        """Raise ValueError unless a node is the right reduction, over equally many numbers for each row."""
        numbers = node._saved_target.numel() if kind(node).startswith("NllLoss") else self._numbers_in(node)
        each, rest = divmod(numbers, self._size)
        is_sum = kind(node) == "Sum" or getattr(node, "_saved_reduction", _MEAN) == _SUM
        is_divided = any(by and by % self._size == 0 and each % (by / self._size) == 0 for by in divisors)
        if is_sum != (self._reduction == "sum") and not (is_sum and is_divided):
            self._refuse(f"it is a {'sum' if is_sum else 'mean'}, and loss_reduction is '{self._reduction}'")
        if rest or self._leaves_out(node):
            self._refuse(f"it is over {numbers} numbers for {self._size} rows, or over some of what these have")
        if each % self._size == 0 and any(self._graph.pairs_rows(made, self._size) for made in self._graph.leads):
            self._refuse(
                f"it is over {numbers} numbers, as outputs (B, 1) and targets (B,) make them for {self._size} rows"
            )
        if self._reduction == "mean" and (dtype := node._input_metadata[0].dtype) in HALF:
            self._refuse(f"it is formed in {dtype}, where 1/B is rounded (outputs.float() before it helps)")
        if kind(node).startswith("NllLoss") and not is_sum:
            self._require_equal_targets(node)

    def _require_equal_targets(self, node: Any) -> None:
        """Expect that equally many targets of each row count in a mean of negative log-likelihoods."""
        target = node._saved_target
        if node._saved_weight is not None:
            self._refuse("it is weighted by class, so that the mean divides by the weights of all rows' targets")
        counts = target != (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # saved without its sign
        is_second = not self._batch_first and (target.dim() < 2 or target.shape[0] != self._size)
        counts_b = counts.reshape(-1, self._size).sum(0) if is_second else counts.reshape(self._size, -1).sum(1)
        self._expect((counts_b == counts_b[0]).all(), "of some rows more targets are ignored than of others")

    def _numbers_in(self, node: Any) -> int:
        return max(map(math.prod, self._graph.sizes_before(node)), default=0)

    def _leaves_out(self, reduction: Any) -> bool:
        """Return True if a selection left out numbers, so that the rest are not ordered by rows."""
        if any(self._size in shape for shape in self._graph.sizes_before(reduction)):
            return False
        picks = (node for node in self._graph.leads if kind(node) in ("Index", "MaskedSelect"))
        return any(math.prod(shape_of(node)) != self._numbers_in(node) for node in picks)

    def _expect(self, holds: torch.Tensor, reason: str) -> None:
        self._forward.deferred_checks.expect(holds, partial(_refuse, self._reduction, reason))


def _refuse(reduction: str, reason: str) -> NoReturn:
    raise ValueError(
        f"loss.backward() of a private loop needs a plain {reduction} over the rows of the batch, of one number or as "
        f"many for each, and this loss is none: {reason}; call engine.backward(losses) with one loss for each row, of "
        "shape (B,), in its place."
    )


def _is_of_python(number: torch.Tensor) -> bool:
    """Return True if autograd saved a Python number: unlike a tensor's, its dtype never changes that of a result."""
    narrow = (torch.float16, torch.bfloat16) if number.is_floating_point() else (torch.int8, torch.uint8)
    return all(torch.result_type(torch.zeros((), dtype=dtype), number) == dtype for dtype in narrow)
