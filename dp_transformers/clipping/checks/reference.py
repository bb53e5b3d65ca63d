"""The two ways that the self-check compares: clipping, and one example at a time through plain autograd."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...mechanism.clipping_functions import ClippingFunction
from ..engine import ClippingEngine
from ..errors import SelfCheckError
from ..groups import ParameterGroup
from ..parallel.dtensor import as_dtensor_like, full_tensors, is_dtensor, to_local
from ..precision import sum_dtype
from ..terms.arithmetic import flat_norm
from .case import Case

# Largest relative error accepted, by the lowest precision seen in the forward pass. A rule that is wrong by 1% is
# caught in fp32, which is where exactness and locality are decided: in bf16 a model may attend over the whole batch
# and stay below the error of its rounding.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}

# So many random numbers shift the parameters, over and over. It is a prime, so that the rows of a weight begin at
# different ones of them.
_SHIFTS = 65537


@dataclass
class _AtTheMedian(ClippingFunction):
    """Clips to the median norm of the batch, so that some examples are clipped and some are not. It keeps that bound
    for the other way of computing the sum, and is for made-up examples alone: each one's norm counts for all."""

    bound: float = 1.0
    sensitivity: float = math.inf

    def coefficients(self, norms_b: torch.Tensor) -> torch.Tensor:
        self.bound = float(norms_b.median()) or 1.0
        return (self.bound / norms_b).clamp(max=1.0)


class ClippedSum(NamedTuple):
    """What one pass of clipping gives.

    Attributes:
        losses_b: (B,) losses.
        norms_b: (B,) norms.
        total: The sum of each parameter.
        bounds: What each of the engine's groups was clipped to.
        samples: The examples' gradients of each parameter, None where the mode hands none out.
        low_precision: The lowest precision seen.
        reentrant: Whether some module ran under reentrant activation checkpointing, where nobody may ask autograd for
            gradients.
    """

    losses_b: torch.Tensor
    norms_b: torch.Tensor
    total: list[torch.Tensor]
    bounds: list[float]
    samples: list[torch.Tensor | None]
    low_precision: torch.dtype
    reentrant: bool = False


def clip(engine: ClippingEngine, losses: Callable[[], torch.Tensor]) -> ClippedSum:
    """Clip each of the engine's groups by itself, to the median of its norms, which leaves one example as it is."""
    losses_b, low_precision = _forward(engine, losses)
    functions = [_AtTheMedian() for _ in engine.groups]
    groups = [group._replace(clipping=each) for group, each in zip(engine.groups, functions, strict=True)]
    norms_b = engine.backward(losses_b, groups=groups)
    parameters = engine.trainable.parameters
    return ClippedSum(
        losses_b.detach(),
        norms_b,
        [torch.zeros_like(p, dtype=sum_dtype(p)) if p.grad is None else p.grad for p in parameters],
        [each.bound for each in functions],
        [getattr(p, "grad_sample", None) for p in parameters],
        low_precision,
    )


def unclipped(engine: ClippingEngine, losses: Callable[[], torch.Tensor]) -> ClippedSum:
    """The same with every example's gradient as it is, all parameters together."""
    losses_b, low_precision = _forward(engine, losses)
    parameters, reentrant = engine.trainable.parameters, engine.forward is not None and engine.forward.reentrant
    norms_b = engine.backward(losses_b, groups=[ParameterGroup(parameters)])
    total = [torch.zeros_like(p, dtype=sum_dtype(p)) if p.grad is None else p.grad for p in parameters]
    bounds = [math.inf] * len(engine.groups)
    return ClippedSum(losses_b.detach(), norms_b, total, bounds, [None] * len(parameters), low_precision, reentrant)


def error_against_autograd(
    engine: ClippingEngine, losses: torch.Tensor, summed: ClippedSum, largest_scale: torch.Tensor | None = None
) -> float:
    """Error of a sum that was not clipped, against that of autograd for these losses, which have a graph without taps:
    relative to the longer of the two, or to ``largest_scale`` where that is less. The sum is used up."""
    rest, length = dict(zip(engine.trainable.parameters, summed.total, strict=True)), length_of(summed.total)
    norm, _ = _take_away(engine, losses.sum(), 0, summed, rest)
    scale = torch.maximum(norm.to(length.device), length)
    if largest_scale is not None:
        scale = torch.minimum(scale, largest_scale.to(scale))
    return float(length_of(rest.values()) / scale.clamp(min=1e-12))


def change_of_gradient(
    engine: ClippingEngine, loss: torch.Tensor, other: Callable[[], torch.Tensor], replay: Callable[[], None]
) -> float:
    """How far apart (relative) autograd's gradients of two scalar losses are, which have graphs without taps. 0 where
    that is no number: beside large rows those of others may be none.

    The other loss is asked for when the first one has been gone back over. ``replay()`` is called before a backward
    pass, where activation checkpointing may draw random numbers again.
    """
    trainable = engine.trainable
    zero_b, bounds = torch.zeros(1), [math.inf] * len(engine.groups)
    nothing = ClippedSum(zero_b, zero_b, [], bounds, [None] * len(trainable.parameters), torch.float32)
    rest = {p: torch.zeros_like(p, dtype=sum_dtype(p)) for p in trainable.parameters}
    norms = []
    for each in (lambda: loss, lambda: -other()):
        given = each()
        replay()
        norms.append(_take_away(engine, given, 0, nothing, rest)[0].cpu())
    change = length_of(rest.values()).cpu() / torch.stack(norms).max().clamp(min=1e-12)
    return float(change.nan_to_num(nan=0.0, posinf=0.0))


def gradient_norm(engine: ClippingEngine, loss: torch.Tensor) -> float:
    """The norm of autograd's gradient of a scalar loss, which has a graph without taps; 0 where that is no number."""
    norm = _together(_lengths(g for _, g in _gradient(engine, loss)))
    return float(norm.nan_to_num(nan=0.0, posinf=0.0))


def measure(engine: ClippingEngine, losses: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) losses and (B,) norms. Nothing is summed."""
    losses_b, _ = _forward(engine, losses)
    return losses_b.detach(), engine.backward(losses_b, norms_only=True)


def _forward(engine: ClippingEngine, losses: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.dtype]:
    """(B,) losses with their graph, and the lowest precision seen."""
    for p in engine.trainable.parameters:
        p.grad = None
    engine.state.restore()
    losses_b = losses()
    seen = (
        losses_b.dtype,
        engine.trainable.low_precision,
        engine.forward.low_precision if engine.forward else torch.float32,
    )
    return losses_b, max(seen, key=TOLERANCE.__getitem__)


def errors_against_one_at_a_time(case: Case, clipped: ClippedSum) -> tuple[float, float, float]:
    """Worst relative errors of the norms, of the sum and of the samples in ``clipped``, of which each group is clipped
    to the bound that it has there.

    The sum is used up: what each example adds to it is taken away again, so that no second one has to be kept.

    Where batch normalization evaluates, an example stands beside its own copy, and the loss is that of one of them:
    torch (2.13, on the CPU) computes another gradient behind such a layer for a batch of one whose gradient comes
    transposed.
    """
    engine = case.engine
    copies = 1 + any(isinstance(m, _BatchNorm) for m in engine.model.modules())
    parameters = engine.trainable.parameters
    rest, length = dict(zip(parameters, clipped.total, strict=True)), length_of(clipped.total)
    norms, errors = [], [torch.zeros(())]
    with engine.suspended():
        for i in range(case.batch):
            norm, error = _take_away(engine, case.only([i] * copies).losses()[0], i, clipped, rest)
            norms.append(norm)
            errors += error
    single_b, missing = torch.stack(norms), length_of(rest.values())
    norm_error = ((clipped.norms_b - single_b).abs() / single_b.clamp(min=1e-12)).max()
    # the sum of one at a time is at least as long as this
    sum_error = missing / (length - missing).clamp(min=1e-12)
    return float(norm_error), float(sum_error), float(torch.stack([e.cpu() for e in errors]).max())


def _take_away(
    engine: ClippingEngine,
    loss: torch.Tensor,
    example: int,
    clipped: ClippedSum,
    rest: dict[nn.Parameter, torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The norm of this example's gradient, which is clipped and taken away from ``rest``, and the relative error of
    its samples, if there are any.

    No gradient outlives this call, so that there never are those of two examples.
    """
    parameters, shards = engine.trainable.parameters, engine.trainable.shards
    used = _gradient(engine, loss)
    lengths = dict(zip((p for p, _ in used), _lengths(g for _, g in used), strict=True))
    norm = _together(lengths.values())
    coefficients = _coefficients(engine, lengths, clipped.bounds)
    for p, g in used:
        g = to_local(g).to(sum_dtype(p))
        rest[p].sub_(shards.summed(p, g) if shards else as_dtensor_like(g, p), alpha=coefficients[p])
    of = dict(used)
    given = [
        (s[example], of[p] if p in of else torch.zeros_like(s[example]))
        for p, s in zip(parameters, clipped.samples, strict=True)
        if s is not None
    ]
    return norm, [distance(*map(list, zip(*given, strict=True))) / norm.clamp(min=1e-12)] if given else []


def _gradient(engine: ClippingEngine, loss: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """The parameters that the loss depends on, with its gradient."""
    parameters, shards = engine.trainable.parameters, engine.trainable.shards
    wholes = [shards.all_unsharded(p) for p in parameters]
    asked = [whole for its in wholes for whole in its]
    found = iter(torch.autograd.grad(loss, asked, allow_unused=True) if loss.requires_grad else [None] * len(asked))
    grads = [_sum([next(found) for _ in its]) for its in wholes]
    grads = [
        None if g is None else engine.trainable.parallel.native_gradient(p, g)
        for p, g in zip(parameters, grads, strict=True)
    ]
    used = [(p, g) for p, g in zip(parameters, grads, strict=True) if g is not None]
    if not used:
        raise SelfCheckError(
            "the loss of an example depends on no trainable parameter: adapters are disabled or merged, or what is "
            "trained takes no part in the model's forward pass. Enable them (or train something that is used). Or it "
            "runs under reentrant activation checkpointing, which hides it: use use_reentrant=False."
        )
    return used


def _coefficients(
    engine: ClippingEngine, lengths: dict[nn.Parameter, torch.Tensor], bounds: list[float]
) -> dict[nn.Parameter, float]:
    """What one example's gradient of each parameter is multiplied with."""
    coefficients = {}
    for group, bound in zip(engine.groups, bounds, strict=True):
        if own := [lengths[p] for p in group.parameters if p in lengths]:
            coefficients |= dict.fromkeys(group.parameters, float((bound / _together(own)).clamp(max=1.0)))
    return coefficients


def _sum(grads: list[torch.Tensor | None]) -> torch.Tensor | None:
    given = [g for g in grads if g is not None]
    return sum(given[1:], given[0]) if given else None


def length_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return _together(_lengths(tensors))


def _lengths(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The length of each, on the device of the first."""
    lengths = full_tensors(map(_length, tensors))
    return [x.to(lengths[0].device).view(()) for x in lengths]


def _together(lengths: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(lengths)).norm().float()


def _length(x: torch.Tensor) -> torch.Tensor:
    if is_dtensor(x):
        return torch.linalg.vector_norm(x.double())
    return flat_norm(x.to(sum_dtype(x)).reshape(1, -1)).double()


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    return length_of(x - y for x, y in zip(a, b, strict=True))


@contextlib.contextmanager
def perturbed(engine: ClippingEngine) -> Iterator[None]:
    """Inside, the trainable parameters are shifted a little, through ``.data``: their versions tell what the model
    itself writes to them."""
    values = [p.detach().clone() for p in engine.trainable.parameters]
    numbers = 0.02 * torch.randn(_SHIFTS, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            for p in map(to_local, engine.trainable.parameters):
                _shift(p.data, numbers.to(p))
                numbers = numbers.roll(-p.numel())  # goes on where this one ended
        torch.clear_autocast_cache()  # it holds casts of the weights as they were
        yield
    finally:
        engine.trainable.shards.reshard()
        with torch.no_grad():
            for p, value in zip(engine.trainable.parameters, values, strict=True):
                p.data.copy_(value)
        torch.clear_autocast_cache()


def _shift(x: torch.Tensor, numbers: torch.Tensor) -> None:
    """Add these numbers to ``x``, over and over."""
    if not x.is_contiguous():
        x.add_(numbers.repeat(-(-x.numel() // len(numbers)))[: x.numel()].view(x.shape))
        return
    flat = x.view(-1)
    whole = len(flat) // len(numbers) * len(numbers)
    flat[:whole].view(-1, len(numbers)).add_(numbers)
    flat[whole:].add_(numbers[: len(flat) - whole])
