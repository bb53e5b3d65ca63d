"""Noise for gradients that may lie over several processes, and the noised mean that an optimizer steps with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .. import distributed
from ..clipping import PerExampleClipper
from ..clipping.parallel.dtensor import is_dtensor, to_local
from ..clipping.precision import set_gradient, sum_dtype
from . import NoiseSource
from .generators import GaussianNoise, check_noise_source


class ShardedNoise:
    """:class:`~dp_transformers.noise.generators.GaussianNoise` for the gradients of ``clipper.parameters``, as they lie over processes.

    Every way to lie (device mesh and placements) has a stream of its own. Processes that hold different parts of a parameter add
    independent noise to them; processes that hold the same part add the same. All processes must construct it together.

    Args:
        clipper: What clips the model on this process.
        dp_seed, secure: As of ``GaussianNoise``.
        warn: Whether to say that noise with a ``dp_seed`` is not private; False for who has said so.
    """

    def __init__(self, clipper: PerExampleClipper, *, dp_seed: int | None = None, secure: bool = False, warn: bool = True):
        if warn:
            check_noise_source(dp_seed=dp_seed, secure=secure)
        self._streams: dict[object, GaussianNoise] = {}
        self._layouts = [(p.device_mesh, p.placements) if is_dtensor(p) else None for p in clipper.parameters]
        for p, layout in zip(clipper.parameters, self._layouts, strict=True):
            if layout not in self._streams:
                replicas = None if is_dtensor(clipper.shards.unsharded(p)) else clipper.parallel.group
                entropy = distributed.noise_entropy(p, dp_seed, layout=len(self._streams), replicas=replicas)
                if entropy is None and dp_seed is not None:
                    entropy = [dp_seed]
                self._streams[layout] = GaussianNoise(secure=secure, entropy=entropy)

    def add_(self, grads: Sequence[torch.Tensor], std: float) -> None:
        """Add noise of standard deviation ``std`` to what this process holds of the gradients, in the order of the parameters."""
        for layout, stream in self._streams.items():
            stream.add_([to_local(grad) for grad, its in zip(grads, self._layouts, strict=True) if its == layout], std)


def add_noise_and_divide(
    parameters: Sequence[nn.Parameter], noise: NoiseSource, *, std: float, divisor: float, sharded: bool = False
) -> None:
    """``p.grad = (sum over ranks of p.grad + N(0, std²)) / divisor`` for every parameter; no gradient counts as zero.

    Noise and sums are in float32; the result is cast to the parameter's dtype last. ``sharded``: gradients are DTensors, summed already.
    The step must be accounted for before this is called. Per-example gradients (``p.grad_sample``) are gone afterwards.
    """
    for p in parameters:
        if p.grad is None:
            set_gradient(p, torch.zeros_like(p, dtype=sum_dtype(p)))
    grads = [to_local(p.grad) for p in parameters]
    if sharded or distributed.rank() == 0:  # shards: to each its own; else once, on the way into the sum
        noise.add_(grads, std=std)
    if not sharded:
        distributed.sum_over_ranks(grads)
    torch._foreach_div_(grads, divisor)
    for p in parameters:
        set_gradient(p, p.grad.to(p.dtype))
        vars(p).pop("grad_sample", None)  # torch.save(model) would write it
