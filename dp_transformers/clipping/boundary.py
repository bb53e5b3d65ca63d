"""``loss.backward()`` of a plain loop: the clipper goes back from the loss itself, in every mode.

What the model returns is handed out with an end behind it (:class:`.loss_root.End`). When the loop goes backward, the
part of the graph up to there is looked at (:mod:`.loss_root`, :mod:`.compared_rows`), and then the clipped sum is
formed as for (B,) losses: from one loss, with the gradient B, or 1 where losses are added up.

``torch.Tensor.backward`` calls ``torch.autograd.backward``, so while somebody follows such calls a function stands in
its place.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .compared_rows import expect_own_rows
from .engine import ClippingEngine
from .loss_graph import BatchLoss
from .loss_root import End, LoopGraph, LossRoot, ModelCall
from .precision import HALF
from .recorded_call import is_differentiable


class Boundary:
    """Hands out what the model returns, and clips where a loop goes back from it.

    Args:
        engine: Records the calls of the model.
        loss_reduction: "mean" or "sum": how a loss comes from the rows' losses; "none" where ``loss.backward()`` is
            not followed.
        add: Clips and sums, given the loss of a batch.

    Attributes:
        follows: True if ``loss.backward()`` clips.
    """

    def __init__(self, engine: ClippingEngine, loss_reduction: str, add: Callable[[BatchLoss], Any]):
        self._engine, self._reduction, self._add = engine, loss_reduction, add
        self.follows = loss_reduction != "none"
        self._batches, self._next = 0, 1  # that were counted, and the next that is looked at

    def hand_out(self, args: tuple, kwargs: dict, output: Any) -> Any:
        """Return ``output`` with the end of the model behind each tensor that has a graph. What a mean may be formed
        of is in float32, since 1/B is rounded in half precision."""
        forward, found = self._engine.forward, dict[int, torch.Tensor]()
        _mapped(lambda x: found.setdefault(id(x), x), output)
        if forward is None or not found:
            return output
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        half = HALF if self._reduction == "mean" else ()
        outputs = [x.float() if x.dtype in half else x for x in found.values()]
        given = End.apply(ModelCall(forward, inputs), *outputs)
        shown = dict(zip(found, given, strict=True))
        return _mapped(lambda x: shown[id(x)], output)

    def look_at(self, losses: torch.Tensor) -> None:
        """Expect at first, and then ever more rarely, that (B,) losses do not compare rows."""
        if (forward := self._engine.forward) is not None and self._is_due() and losses.requires_grad:
            expect_own_rows(LoopGraph([losses], forward), [losses], forward, self._batches)

    def _is_due(self) -> bool:
        """Count a batch, and return True in 1, 2, 4, 9, 19, 39, ...: powers of two would be the same one of each draw
        that has as many."""
        self._batches += 1
        if self._batches < self._next:
            return False
        self._next += self._next + (self._next > 2)
        return True

    # ---- called in the place of torch.autograd.backward ----

    def graph_of(self, roots: Sequence[Any]) -> LoopGraph | None:
        """Return the loop's part of the graph, if these roots come from the pass that is to be clipped."""
        forward = self._engine.forward
        if not self.follows or forward is None or forward.backward is not None:
            return None
        graph = LoopGraph(roots, forward)
        return graph if graph.ends else None

    def go_back(
        self, graph: LoopGraph, roots: Sequence[Any], gradients: Sequence[Any], *, retain_graph: bool, is_last: bool
    ) -> None:
        """Run the backward pass of these losses: clip each example's gradient of the model's parameters and add them
        up. Tensors outside of the model (its input, a temperature of the loop) get their ordinary gradients.

        Args:
            gradients: Gradients of the losses to begin with; None for 1.
            is_last: No other private model takes part in these losses after this one.

        Raises:
            ValueError: a loss is no plain mean (or sum) over the rows.
        """
        engine, forward = self._engine, self._engine.forward
        assert forward is not None, "graph_of found it"
        root = LossRoot(graph, forward, self._reduction, batch_first=engine.batch_first)
        for each in zip(roots, gradients, strict=True):
            root.require_plain(*each)
        if self._is_due() and not graph.inputs:
            expect_own_rows(graph, roots, forward, self._batches)
        factor = forward.batch_size if self._reduction == "mean" else 1
        begins = [
            torch.full_like(root, factor) if gradient is None else gradient * factor
            for root, gradient in zip(roots, gradients, strict=True)
        ]
        leaves = [leaf for leaf in graph.leaves if leaf not in engine.trainable.parameter_of] if is_last else []
        handles = [leaf.register_hook(lambda gradient: gradient / factor) for leaf in leaves if factor > 1]
        try:
            self._add(BatchLoss(roots, begins, leaves, retain_graph or not is_last))
        finally:
            for handle in handles:
                handle.remove()


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], structure: Any) -> Any:
    """Return ``structure`` with each tensor changed that has a graph; also in mappings and dataclasses that torch does
    not know. Those of other objects stay as they are."""

    def changed(x: Any) -> Any:
        if is_differentiable(x):
            return change(x) if x.requires_grad and not x.is_nested else x
        if isinstance(x, Mapping):
            new: Any = copy.copy(x)
            for name in x:
                new[name] = _mapped(change, x[name])
            return new
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            new = copy.copy(x)
            for name in (field.name for field in dataclasses.fields(x) if hasattr(x, field.name)):
                object.__setattr__(new, name, _mapped(change, getattr(x, name)))
            return new
        return x

    return tree_map(changed, structure)


_followers = WeakSet[Boundary]()
_replaced: Callable[..., None] | None = None  # torch's own function, while it is replaced


def follow(follower: Boundary) -> None:
    """Pass every backward pass over a forward pass of the follower's model to it, until :func:`unfollow`."""
    global _replaced
    _followers.add(follower)
    if _replaced is None:
        _replaced = torch.autograd.backward
        torch.autograd.backward = functools.wraps(_replaced)(_backward)


def unfollow(follower: Boundary) -> None:
    """Restore torch's own function if this was the last follower, and other code has not replaced it since."""
    global _replaced
    _followers.discard(follower)
    if not _followers and _replaced is not None and torch.autograd.backward is _backward:
        torch.autograd.backward, _replaced = _replaced, None


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    assert _replaced is not None
    roots = _sequence(tensors)
    graphs = [(follower, graph) for follower in _followers if (graph := follower.graph_of(roots)) is not None]
    if not graphs or create_graph or inputs is not None:  # the model's taps refuse the latter two
        _replaced(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        return
    gradients = [None] * len(roots) if grad_tensors is None else _sequence(grad_tensors)
    for follower, graph in graphs:
        is_last = follower is graphs[-1][0]
        follower.go_back(graph, roots, gradients, retain_graph=bool(retain_graph), is_last=is_last)


def _sequence(tensors: Any) -> Sequence[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors
