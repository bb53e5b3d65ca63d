"""Backward passes of clipping over per-example losses, or over the loss of a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from .escape import parameter_outside_calls
from .precision import set_gradient
from .recorded_call import ForwardPass
from .tap import TAPS


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

    def go_back(self, *, retain_graph: bool, weights_b: torch.Tensor | None = None) -> None:
        """Run a backward pass without weight gradients over the losses times ``weights_b`` (None: ones), which reaches
        all taps. The last pass, which does not retain the graph, also fills the gradients of the leaves.
        """
        forward, trainable = self.forward, self.forward.trainable
        if forward.reentrant and (trainable.shards or trainable.parallel):
            raise ValueError(
                "reentrant activation checkpointing does not go with parameters that are sharded (FSDP2) or "
                "tensor-parallel: use use_reentrant=False."
            )
        roots, gradients, leaves, retains = self._loss
        gradients = gradients if weights_b is None else [weights_b.to(root) for root in roots]
        leaves, retains = () if retain_graph else leaves, retain_graph or retains
        probes = [forward.probe, *forward.earlier_probes]
        if forward.reentrant:
            reached = self._gradient_of_probe(gradients, retain_graph=retains)
        elif leaves:
            torch.autograd.backward(roots, gradients, retain_graph=retains, inputs=[*probes, *leaves])
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

    def _gradient_of_probe(self, gradients: Sequence[torch.Tensor], *, retain_graph: bool) -> torch.Tensor | None:
        """Return the gradient of the probe under reentrant checkpointing, which needs a backward that fills every
        ``grad``."""
        parameters, probe = self.forward.trainable.parameters, self.forward.probe
        before = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            torch.autograd.backward(self._loss.roots, gradients, retain_graph=retain_graph)
            reached, probe.grad = probe.grad, None
            return reached
        finally:
            for p, grad in zip(parameters, before, strict=True):
                set_gradient(p, grad)  # drops the unclipped gradient

    def find_escape(self) -> nn.Parameter | None:
        """Return a trainable parameter that reaches the losses past the taps; None if there is none."""
        return parameter_outside_calls(self._loss.roots, TAPS, self.forward.trainable.parameter_of)
