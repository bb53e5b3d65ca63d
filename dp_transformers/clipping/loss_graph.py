"""The backward passes that clipping runs over per-example losses."""

from __future__ import annotations

import torch
from torch import nn

from .graph import parameter_outside_calls
from .precision import set_gradient
from .recorded_call import ForwardPass
from .tap import TAPS


class LossGraph:
    """Losses (B,) with the graph that leads back to the calls of ``forward``."""

    def __init__(self, losses: torch.Tensor, forward: ForwardPass):
        self.losses, self.forward, self.device = losses, forward, losses.device

    def go_back(self, *, retain_graph: bool, weights_b: torch.Tensor | None = None) -> None:
        """Reach all taps, by a backward pass that computes no weight gradient, over the losses times ``weights_b``
        (None: ones)."""
        forward, trainable = self.forward, self.forward.trainable
        if forward.reentrant and (trainable.shards or trainable.parallel):
            raise ValueError(
                "reentrant activation checkpointing does not go with parameters that are sharded (FSDP2) or "
                "tensor-parallel: use use_reentrant=False."
            )
        weights_b = torch.ones_like(self.losses) if weights_b is None else weights_b.to(self.losses)
        if forward.reentrant:
            reached = self._gradient_of_probe(weights_b, retain_graph=retain_graph)
        else:
            probes = [forward.probe, *forward.earlier_probes]
            reached = torch.autograd.grad(
                self.losses, probes, weights_b, retain_graph=retain_graph, allow_unused=True
            )[0]
        if reached is None:
            raise ValueError(
                "the losses do not come from a forward pass through the attached model: it ran before attach(), under "
                "no_grad(), or through a submodule instead of the model given to PerExampleClipper; or they depend on "
                "none of its trainable parameters. Call that model after attach(), with gradients, and compute the "
                "losses from what it returns."
            )

    def _gradient_of_probe(self, weights_b: torch.Tensor, *, retain_graph: bool) -> torch.Tensor | None:
        """Returns what autograd.grad would, where reentrant checkpointing allows only a backward that fills every
        ``grad``."""
        parameters, probe = self.forward.trainable.parameters, self.forward.probe
        before = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            self.losses.backward(weights_b, retain_graph=retain_graph)
            reached, probe.grad = probe.grad, None
            return reached
        finally:
            for p, grad in zip(parameters, before, strict=True):
                set_gradient(p, grad)  # what backward left there is not clipped

    def find_escape(self) -> nn.Parameter | None:
        """A trainable parameter that reaches the losses past the taps, if there is one."""
        return parameter_outside_calls(self.losses, TAPS, self.forward.trainable.parameter_of)
