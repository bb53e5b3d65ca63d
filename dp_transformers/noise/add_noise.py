"""Adds the noise of a step: turns the sum of clipped gradients into the noised mean for the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ..clipping.parallel.dtensor import to_local
from ..clipping.precision import set_gradient, sum_dtype
from ..mechanism.noise import NoiseSource
from ..runtime import distributed
from .generators import round_digits


def add_noise_and_divide(
    parameters: Sequence[nn.Parameter],
    noise: NoiseSource,
    *,
    dither: NoiseSource | None = None,
    std: float,
    divisor: float,
    relative_std: float = 1.0,
    scales: Sequence[float] = (),
    sharded: bool = False,
) -> None:
    """Set ``p.grad = (sum over ranks of p.grad + N(0, (scale · std)²)) / divisor`` for every parameter.

    A missing gradient is zero, so an empty draw becomes a step of pure noise.

    Noise and sums are in float32, the noised sum is rounded to digits that the noise has too
    (:mod:`~dp_transformers.noise.generators`), and the result is cast to the parameter's dtype last. The step must be
    in the ledger before this is called. Per-example gradients (``p.grad_sample``) are deleted.

    Args:
        parameters: The trainable parameters.
        noise: Draws the noise.
        dither: Adds the same numbers on all ranks that hold the same sum.
        std: Standard deviation of the independent part of the noise.
        divisor: The expected batch size.
        relative_std: :meth:`Noise.relative_std <dp_transformers.mechanism.noise.Noise.relative_std>` of this step.
        scales: Noise scale of each parameter, default 1. The sum is divided by it before noise is added and multiplied
            by it afterwards, so that the noise source, which may be correlated, draws one standard deviation for all.
        sharded: True if gradients are DTensors that are summed already.
    """
    for p in parameters:
        if p.grad is None:
            set_gradient(p, torch.zeros_like(p, dtype=sum_dtype(p)))
    wholes = [cast(torch.Tensor, p.grad) for p in parameters]
    grads = [to_local(grad) for grad in wholes]
    if is_scaled := any(scale != 1 for scale in scales):
        torch._foreach_div_(grads, list(scales))
    # every rank adds noise to its own shards; to replicas only rank 0 does, before they are summed
    if sharded or distributed.rank() == 0:
        noise.add_(grads, std=std)
    if not sharded:
        distributed.sum_over_ranks(grads)
    if dither is not None:
        dither.add_(grads, std=relative_std * std)
    round_digits(grads, relative_std * std)
    if is_scaled:
        torch._foreach_mul_(grads, list(scales))
    torch._foreach_div_(grads, divisor)
    for p, grad in zip(parameters, wholes, strict=True):
        set_gradient(p, grad.to(p.dtype))
        vars(p).pop("grad_sample", None)  # torch.save(model) would write it
