"""The private step: from clipped sums to the gradient that an optimizer steps with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from . import distributed
from .clipping.precision import set_gradient, sum_dtype
from .clipping.shards import local
from .noise import GaussianNoise


def privatise(parameters: Sequence[nn.Parameter], noise: GaussianNoise, *, std: float, divisor: float, sharded: bool = False) -> None:
    """``p.grad = (sum over ranks of p.grad + N(0, std²)) / divisor`` for every parameter; no gradient counts as zero.

    Noise and sums are in float32; the result is cast to the parameter's dtype last. ``sharded``: gradients are DTensors, summed already.
    The step must be accounted for before this is called.
    """
    for p in parameters:
        if p.grad is None:
            set_gradient(p, torch.zeros_like(p, dtype=sum_dtype(p)))
    grads = [local(p.grad) for p in parameters]
    if sharded or distributed.rank() == 0:  # shards: to each its own; else once, on the way into the sum
        noise.add_(grads, std=std)
    if not sharded:
        distributed.sum_over_ranks(grads)
    torch._foreach_div_(grads, divisor)
    for p in parameters:
        set_gradient(p, p.grad.to(p.dtype))
