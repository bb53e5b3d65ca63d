"""Backward passes of clipping over per-example losses, or over the loss of a whole batch; and a search of their graph,
before every clipped sum, for parameters that reach the losses past the taps.

The checks of :mod:`.checks` run the model as it is called first. A later branch of its forward may use a weight
outside of all rules, or take an activation out of a module before its tap, and this gradient would not be measured.
The graph shows it: a walk from the losses to the inputs may reach a trainable parameter only inside a call of its
owner. Autograd numbers its nodes in the order of their creation. A node before a tap was computed inside the call of
the tap's module if it is not older than the start of this call.

Reentrant activation checkpointing builds its graph only in backward, and so hides it from this walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node

from .recorded_call import ForwardPass, RecordedCall
from .tap import TAPS

LEAF = torch._C._functions.AccumulateGrad  # pyrefly: ignore[missing-attribute]  (torch's types leave it out)
_CAST = "ToCopyBackward0"


class BatchLoss(NamedTuple):
    """The loss of a whole batch, scaled so that the gradient at each row is the gradient of that row's loss.

    Attributes:
        roots: The tensors at which backward starts.
        gradients: The gradients of the roots.
        leaves: Tensors outside of the model that get their gradient too.
        retain_graph: True if there will be another backward pass.
    """

    roots: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    leaves: Sequence[torch.Tensor] = ()
    retain_graph: bool = False


class LossGraph:
    """The graph from (B,) losses, or the loss of a batch, back to the calls of ``forward``."""

    def __init__(self, losses: torch.Tensor | BatchLoss, forward: ForwardPass):
        of_rows = not isinstance(losses, BatchLoss)
        self._loss = BatchLoss([losses], [torch.ones_like(losses)]) if of_rows else losses
        self.forward, self.device = forward, self._loss.roots[0].device

    def go_back(self, *, retain_graph: bool) -> None:
        """Run a backward pass without weight gradients, which reaches all taps. The last pass, which does not retain
        the graph, also fills the gradients of the leaves."""
        forward, trainable = self.forward, self.forward.trainable
        if forward.reentrant and (trainable.shards or trainable.parallel):
            raise ValueError(
                "reentrant activation checkpointing does not go with parameters that are sharded (FSDP2) or "
                "tensor-parallel: use use_reentrant=False."
            )
        roots, gradients, leaves, retains = self._loss
        leaves, retains = () if retain_graph else leaves, retain_graph or retains
        probes = [forward.probe, *forward.earlier_probes]
        if forward.reentrant or leaves:  # reentrant checkpointing needs a backward pass that fills every gradient
            inputs = None if forward.reentrant else [*probes, *leaves]
            try:
                torch.autograd.backward(roots, gradients, retain_graph=retains, inputs=inputs)
            finally:
                if forward.reentrant:
                    trainable.drop_gradients()  # they are not clipped
            reached, forward.probe.grad = forward.probe.grad, None
        else:
            reached = torch.autograd.grad(roots, probes, gradients, retain_graph=retains, allow_unused=True)[0]
        if reached is None:
            raise ValueError(
                "the losses do not come from a forward pass through the attached model: it ran before attach(), under "
                "no_grad(), or through a submodule instead of the model given to PerExampleClipper; or they depend on "
                "none of its trainable parameters. Call that model after attach(), with gradients, and compute the "
                "losses from its output."
            )

    def find_escape(self) -> nn.Parameter | None:
        """Return a trainable parameter that reaches the losses past the taps; None if there is none."""
        parameter_of = self.forward.trainable.parameter_of
        # nodes, and the calls inside which they were computed
        todo: list[tuple[Any, tuple[RecordedCall, ...]]] = [(x.grad_fn, ()) for x in self._loss.roots if x.grad_fn]
        seen = set()
        while todo:
            entry = node, inside = todo.pop()
            if entry in seen:
                continue
            seen.add(entry)
            if type(node) in TAPS:
                inside = (*inside, node.call)
            for before, _ in node.next_functions:
                if before is None:
                    continue
                end = before.next_functions[0][0] if type(before).__name__ == _CAST else before  # of autocast
                if type(end) is LEAF:
                    parameter = parameter_of.get(end.variable)
                    if parameter is not None and not any(parameter in call.parameters for call in inside):
                        return parameter
                elif inside:
                    number = before._sequence_nr()
                    todo.append((before, tuple([call for call in inside if call.first_node <= number])))
                else:
                    todo.append((before, inside))
        return None


def dtypes_in_graph(losses: torch.Tensor) -> set[torch.dtype]:
    """Return the dtypes of all nodes in the graph of the losses."""
    todo, seen, found = [losses.grad_fn], set[Node](), {losses.dtype}
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found |= {metadata.dtype for metadata in node._input_metadata}
            todo += [before for before, _ in node.next_functions]
    return found
