"""The two ways that the self-check compares: clipping, and one example at a time through plain autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from ..clipping_functions import ClippingFunction
from ..engine import ClippingEngine
from ..parallel.dtensor import as_dtensor_like, full_tensors, is_dtensor, to_local
from ..precision import sum_dtype
from ..terms.arithmetic import flat_norm
from .synthetic import LossFunction, has_batch

# Largest relative error accepted, by the lowest precision seen in the forward pass. A rule that is wrong by 1% is
# caught in fp32, which is where exactness and locality are decided: in bf16 a model may attend over the whole batch
# and stay below the error of its rounding.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


def clip(
    engine: ClippingEngine,
    losses_of: LossFunction,
    args: tuple,
    kwargs: dict,
    *,
    clipping: ClippingFunction | None = None,
):
    """(B,) norms, the sum of each parameter, clipped where ``clipping`` is given (each of the engine's groups by
    itself), and the lowest precision seen."""
    losses, low_precision = _forward(engine, losses_of, args, kwargs)
    groups = [group._replace(clipping=clipping) for group in engine.groups]
    norms_b = engine.backward(losses, groups=groups)
    return (
        norms_b,
        [torch.zeros_like(p, dtype=sum_dtype(p)) if p.grad is None else p.grad for p in engine.trainable.parameters],
        low_precision,
    )


def measure(
    engine: ClippingEngine, losses_of: LossFunction, args: tuple, kwargs: dict
) -> tuple[torch.Tensor, torch.dtype]:
    """(B,) norms, and the lowest precision seen. Nothing is summed."""
    losses, low_precision = _forward(engine, losses_of, args, kwargs)
    return engine.backward(losses, norms_only=True), low_precision


def _forward(engine: ClippingEngine, losses_of: LossFunction, args: tuple, kwargs: dict):
    for p in engine.trainable.parameters:
        p.grad = None
    losses = losses_of(*args, **kwargs)
    seen = (
        losses.dtype,
        engine.trainable.low_precision,
        engine.forward.low_precision if engine.forward else torch.float32,
    )
    return losses, max(seen, key=TOLERANCE.__getitem__)


def one_at_a_time(
    engine: ClippingEngine,
    losses_of: LossFunction,
    args: tuple,
    kwargs: dict,
    batch: int,
    samples: list,
    *,
    bound: float,
):
    """(B,) norms, the sum with each of the engine's groups clipped to ``bound``, and the worst relative error of
    ``samples``, gradients with a batch (or None) for each parameter.

    Where batch normalization evaluates, an example stands beside its own copy, and the loss is that of one of them:
    torch (2.13, on the CPU) computes another gradient behind such a layer for a batch of one whose gradient comes
    transposed.
    """
    copies = 1 + any(isinstance(m, _BatchNorm) for m in engine.model.modules())
    norms, total, worst, shards = (
        [],
        [torch.zeros_like(p, dtype=sum_dtype(p)) for p in engine.trainable.parameters],
        0.0,
        engine.trainable.shards,
    )
    wholes = [shards.all_unsharded(p) for p in engine.trainable.parameters]
    with engine.suspended():
        for i in range(batch):
            rows = [i] * copies
            one_args, one_kwargs = tree_map(lambda x, rows=rows: x[rows] if has_batch(x, batch) else x, (args, kwargs))
            loss = losses_of(*one_args, **one_kwargs)[0]
            found = iter(torch.autograd.grad(loss, [whole for its in wholes for whole in its], allow_unused=True))
            grads = [_sum([next(found) for _ in its]) for its in wholes]
            grads = [
                None if g is None else engine.trainable.parallel.native_gradient(p, g)
                for p, g in zip(engine.trainable.parameters, grads, strict=True)
            ]
            norm = length_of([g for g in grads if g is not None])
            coefficients = _coefficients(engine, grads, bound)
            for p, running, g in zip(engine.trainable.parameters, total, grads, strict=True):
                if g is not None:
                    g = to_local(g).to(sum_dtype(p)) * coefficients[p]
                    running.add_(shards.summed(p, g) if shards else as_dtensor_like(g, p))
            norms.append(norm)
            given = [
                (s[i], torch.zeros_like(s[i]) if g is None else g)
                for s, g in zip(samples, grads, strict=True)
                if s is not None
            ]
            if given:
                worst = max(worst, float(distance(*map(list, zip(*given, strict=True))) / norm.clamp(min=1e-12)))
    return torch.stack(norms), total, worst


def _coefficients(engine: ClippingEngine, grads: list[torch.Tensor | None], bound: float) -> dict[nn.Parameter, float]:
    """What one example's gradient of each parameter is multiplied with."""
    of = {p: g for p, g in zip(engine.trainable.parameters, grads, strict=True) if g is not None}
    coefficients = {}
    for group in engine.groups:
        if own := [of[p] for p in group.parameters if p in of]:
            coefficient = float((bound / length_of(own)).clamp(max=1.0))
            coefficients |= dict.fromkeys(group.parameters, coefficient)
    return coefficients


def _sum(grads: list[torch.Tensor | None]) -> torch.Tensor | None:
    given = [g for g in grads if g is not None]
    return sum(given[1:], given[0]) if given else None


def length_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    norms = [norm.to(tensors[0].device).view(()) for norm in full_tensors(map(_length, tensors))]
    return torch.stack(norms).norm().float()


def _length(x: torch.Tensor) -> torch.Tensor:
    if is_dtensor(x):
        return torch.linalg.vector_norm(x.double())
    return flat_norm(x.to(sum_dtype(x)).reshape(1, -1)).double()


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    return length_of([x - y for x, y in zip(a, b, strict=True)])


@contextlib.contextmanager
def perturbed(engine: ClippingEngine) -> Iterator[None]:
    """Inside, the trainable parameters are shifted a little."""
    values = [p.detach().clone() for p in engine.trainable.parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in map(to_local, engine.trainable.parameters):
                p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=0.02)
        torch.clear_autocast_cache()  # it holds casts of the weights as they were
        yield
    finally:
        engine.trainable.shards.reshard()
        with torch.no_grad():
            for p, value in zip(engine.trainable.parameters, values, strict=True):
                p.copy_(value)
        torch.clear_autocast_cache()
