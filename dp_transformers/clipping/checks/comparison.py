"""Rows clipped together in their padded batch, compared with each alone and unpadded through plain autograd.

Gradients are compared by their lengths, and by random sums of each parameter's, so that never those of two rows, or of
a row and the sum, are held at once.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...mechanism.clipping_functions import ClippingFunction
from ...mechanism.values import equal_or_nan
from ..engine import ClippingEngine
from ..errors import SelfCheckError
from ..parallel.dtensor import is_dtensor, to_local
from ..precision import HALF, sum_dtype
from ..terms.arithmetic import flat_norm
from .rows import LossFunction, Rows, by_example, projected
from .without_dropout import without_dropout

HOW_TO_FIND = "ModuleValidator.find_mixing(model, batch), on public examples, names the module that mixes"

# Largest relative error accepted, by the lowest precision seen in the forward pass. A rule that is wrong by 1% is
# caught in fp32, which is where exactness and locality are decided: in bf16 a model may attend over the whole batch
# and stay below the error of its rounding.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 3e-2}
NEGLIGIBLE = 1e-12  # the smallest bound that a clipper takes: shorter gradients are never clipped
_SMALL = 1e-3  # weights that are all smaller, as LoRA's B is at first, let no gradient through
_NUMBERS, _PARTS = 1024, 4  # random sums that stand for a gradient, and parts of it with weights of their own


class Errors(NamedTuple):
    """Worst relative errors: of norms and losses by row, and of the clipped sum over all parameters."""

    norm_b: torch.Tensor
    loss_b: torch.Tensor
    sum: float
    low_precision: torch.dtype

    @property
    def are_small(self) -> bool:
        tolerance = TOLERANCE[self.low_precision]
        return self.sum <= tolerance and not bool(self.wrong_b.any())

    @property
    def wrong_b(self) -> torch.Tensor:
        """(k,) bool: whose norm or loss is another one alone."""
        tolerance = TOLERANCE[self.low_precision]
        return ~(self.norm_b <= tolerance) | ~(self.loss_b <= tolerance)


@dataclass
class _AtTheMedian(ClippingFunction):
    """Clips to the median norm of the rows, so that some are clipped and some are not, and keeps that bound. For
    trials alone: each one's norm counts for all."""

    bound: float = 1.0
    sensitivity: float = math.inf

    def coefficients(self, norms_b: torch.Tensor) -> torch.Tensor:
        self.bound = float(norms_b.median()) or 1.0
        return (self.bound / norms_b).clamp(max=1.0)


class Clipped(NamedTuple):
    """What clipping the rows together gives: their losses and norms, the sum of each parameter, the bound of each
    group, the lowest precision seen, and whether a part of the model ran under reentrant checkpointing, which hides it
    from autograd."""

    losses_b: torch.Tensor
    norms_b: torch.Tensor
    total: list[torch.Tensor]
    bounds: list[float]
    low_precision: torch.dtype
    is_reentrant: bool


class _Alone(NamedTuple):
    """One row's loss, and the length and the random sums of its gradient for each parameter that has one."""

    loss: torch.Tensor
    lengths: dict[nn.Parameter, torch.Tensor]
    shadows: dict[nn.Parameter, torch.Tensor]
    shapes: list[torch.Size]


class Comparison:
    """Some rows of a batch together and alone.

    Args:
        engine: Clips. It is on trial (:meth:`.ClippingEngine.trial`).
        rows: The batch.
        chosen: The rows that are compared.
        losses_of: ``f(*args, **kwargs) -> (B,)``; None for a random linear function of each row's own outputs.

    Attributes:
        together: The chosen rows as they stand.
        position_dims: In which dimension each of the model's outputs has padding, where these were compared.
        is_reentrant: Whether a part of the model ran under reentrant checkpointing, which hides it from autograd.
    """

    position_dims: Sequence[int | None] = ()
    is_reentrant = False

    def __init__(self, engine: ClippingEngine, rows: Rows, chosen: Sequence[int], losses_of: LossFunction | None):
        self._engine, self._rows, self._chosen, self._losses_of = engine, rows, list(chosen), losses_of
        # torch (2.13, on the CPU) computes another gradient behind batch normalization that evaluates for a batch of
        # one whose gradient comes transposed
        self._copies = 1 + any(isinstance(m, _BatchNorm) for m in engine.model.modules())
        self._shapes: list[list[torch.Size]] = []  # of the outputs of each row alone
        self._scales: list[torch.Tensor] = []  # of each parameter, the length that the rows' parts of its sum have
        self.together = rows.only(chosen)

    def loss_of_first(self) -> torch.Tensor:
        """(1,) or (2,): the loss of the first row alone."""
        return self._loss_alone(self._chosen[0])[0]

    def losses_of_rows(self, rows: Rows) -> torch.Tensor:
        """(n,) losses of other rows, as they stand."""
        if self._losses_of is None:
            return projected(self._outputs(rows))
        self._engine.state.restore()
        with without_dropout():
            return rows.call(self._losses_of)

    def losses(self) -> torch.Tensor:
        """(k,) losses of the rows together, as they stand, each of its own positions."""
        if self._losses_of is not None:
            return self.losses_of_rows(self.together)
        outputs, losses = self._outputs(self.together), []
        self.position_dims = [self._padded_dim(x, [of[i] for of in self._shapes]) for i, x in enumerate(outputs)]
        for j, (row, shapes) in enumerate(zip(self._chosen, self._shapes, strict=True)):
            own = [self._rows.own_part(x, row, shape, j)[None] for x, shape in zip(outputs, shapes, strict=True)]
            losses.append(projected(own))
        return torch.cat(losses)

    @staticmethod
    def _padded_dim(x: torch.Tensor, shapes: Sequence[torch.Size]) -> int | None:
        """Return in which dimension an output has padding. Nothing but zeros there is none: no gradient leads from
        there to a parameter."""
        for row, shape in zip(x, shapes, strict=True):
            for d, (n, own) in enumerate(zip(row.shape, shape, strict=False)):
                if n > own and bool(row.narrow(d, own, n - own).any()) and bool(row.narrow(d, 0, n - own).any()):
                    return d + 1
        return None

    def run(self) -> Errors:
        """Compare in the mode that the model is in."""
        self._shapes = []
        with self._engine.suspended():
            alone = [self._alone(i) for i in self._chosen]
        self._shapes = [each.shapes for each in alone] if self._losses_of is None else []
        found = clipped(self._engine, self.losses)
        self.is_reentrant = found.is_reentrant
        _require_equal_replicas(self._engine, found.total, TOLERANCE[found.low_precision])
        own_b = torch.stack([_together(each.lengths.values()) for each in alone]).to(found.norms_b.device)
        of_one_b = torch.stack([each.loss for each in alone]).float().to(found.losses_b.device)
        error = self._error_of_sum(alone, own_b, found)
        least = 1.0 if found.low_precision in HALF else 0.01  # a loss may be close to 0, and the rounding in it is not
        loss_error_b = _apart(found.losses_b.float(), of_one_b, least)
        return Errors(_apart(found.norms_b, own_b), loss_error_b, error, found.low_precision)

    def error_with_all_kept(self) -> float:
        """Return how far (relative) the sum is from that of a pass that keeps all that a ``memory_budget`` may let it
        keep, and so is formed in another way."""
        shadows = list(map(_shadow, clipped(self._engine, self.losses).total))
        with self._engine.keeping_all():
            kept = clipped(self._engine, self.losses)
        pairs = list(zip(map(_shadow, kept.total), shadows, strict=True))
        return self._agreed(_distance(pairs, self._scales, kept.low_precision), kept.low_precision)

    # ---- one row ----

    @property
    def _parameters(self) -> Sequence[nn.Parameter]:
        return self._engine.trainable.parameters

    def _outputs(self, rows: Rows) -> list[torch.Tensor]:
        model = self._engine.model
        self._engine.state.restore()
        with without_dropout():
            output = rows.call(model)
        return by_example(model, output, rows.size, batch_first=rows.batch_first)

    def _loss_alone(self, row: int) -> tuple[torch.Tensor, list[torch.Size]]:
        """The losses of a row alone, and the shapes of its outputs where these are what is compared."""
        single = self._rows.alone(row, self._copies)
        try:
            if self._losses_of is not None:
                return self.losses_of_rows(single), []
            outputs = self._outputs(single)
        except (RuntimeError, IndexError, AssertionError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError) or not _is_of_the_user(error):
                raise
            raise SelfCheckError(
                f"a row of a batch cannot be computed alone, without padding and other rows ({type(error).__name__}), "
                "so nobody knows what those do to its gradient. What takes statistics over the batch mixes examples "
                "(GroupNorm does not); otherwise every tensor that the model is given must have the examples in its "
                "first dimension: make initial states of a recurrent layer inside of forward, pack sequences with "
                "enforce_sorted=False, name the dimension of squeeze(-1), and stack lists of tensors. Leave out "
                "examples that are too short, or pad all to one length (padding='max_length')."
            ) from error
        return projected(outputs), [x.shape[1:] for x in outputs]

    def _alone(self, row: int) -> _Alone:
        losses, shapes = self._loss_alone(row)
        shards, lengths, shadows = self._engine.trainable.shards, {}, {}
        for p, g in self._gradient(losses[0]):
            lengths[p] = _length(g)
            shadows[p] = _shadow(shards.summed(p, to_local(g)) if shards else g)
        return _Alone(losses[0].detach(), lengths, shadows, shapes)

    def _gradient(self, loss: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the parameters that the loss depends on, with its gradient."""
        trainable = self._engine.trainable
        wholes = [trainable.shards.all_unsharded(p) for p in self._parameters]
        asked = [whole for its in wholes for whole in its]
        if not loss.requires_grad:
            raise SelfCheckError(
                "the loss of an example depends on no trainable parameter: adapters are disabled or merged, or what "
                "is trained takes no part in the model's forward pass. Enable them (or train something that is used). "
                "Or it runs under reentrant activation checkpointing, which hides it: use use_reentrant=False."
            )
        with without_dropout():  # of what runs again
            found = list(reversed(torch.autograd.grad(loss, asked, allow_unused=True)))
        for p, its in zip(self._parameters, wholes, strict=True):
            given = [g for g in [found.pop() for _ in its] if g is not None]
            if given:
                yield p, trainable.parallel.native_gradient(p, sum(given[1:], given[0])).to(sum_dtype(p))

    # ---- their sum ----

    def _error_of_sum(self, alone: Sequence[_Alone], own_b: torch.Tensor, found: Clipped) -> float:
        """Return how far the clipped sum is from that of the rows alone, each clipped to these bounds, relative to the
        length of the rows' parts of it: rows may cancel each other."""
        expected: dict[nn.Parameter, Any] = {}
        squares: dict[nn.Parameter, Any] = {}
        for each, norm in zip(alone, own_b, strict=True):
            if not bool(torch.isfinite(norm)):
                continue  # it takes no part
            for group, bound in zip(self._engine.groups, found.bounds, strict=True):
                if own := [each.lengths[p] for p in group.parameters if p in each.lengths]:
                    share = float((bound / _together(own).clamp(min=NEGLIGIBLE)).clamp(max=1.0))
                    for p in (p for p in group.parameters if p in each.lengths):
                        expected[p] = expected.get(p, 0.0) + share * each.shadows[p]
                        squares[p] = squares.get(p, 0.0) + (share * each.lengths[p]).square()
        pairs = [(_shadow(x), expected.get(p, 0.0)) for p, x in zip(self._parameters, found.total, strict=True)]
        zero, shards = own_b.new_zeros((), dtype=torch.float64), self._engine.trainable.shards
        ranks = shards.mesh.size() if shards.mesh is not None else 1  # all of them add the same rows
        self._scales = [ranks * squares.get(p, zero).to(zero.device).sqrt() for p in self._parameters]
        return self._agreed(_distance(pairs, self._scales, found.low_precision), found.low_precision)

    def _agreed(self, error: float, low_precision: torch.dtype) -> float:
        """Return infinity where another process finds its shard of the sum wrong, so that all decide alike."""
        is_wrong, trainable = not error <= TOLERANCE[low_precision], self._engine.trainable
        return math.inf if trainable.shards.any_rank(is_wrong, trainable.device) and not is_wrong else error


def clipped(engine: ClippingEngine, losses: Callable[[], torch.Tensor]) -> Clipped:
    """Clip each of the engine's groups by itself, to the median of its norms."""
    parameters = engine.trainable.parameters
    for p in parameters:
        p.grad = None
    losses_b, forward = losses(), engine.forward
    low = [losses_b.dtype, engine.trainable.low_precision, *([forward.low_precision] if forward else [])]
    functions = [_AtTheMedian() for _ in engine.groups]
    groups = [group._replace(clipping=each) for group, each in zip(engine.groups, functions, strict=True)]
    with without_dropout():  # of what runs again
        norms_b = engine.backward(losses_b, groups=groups)
    total = [torch.zeros_like(p, dtype=sum_dtype(p)) if p.grad is None else p.grad for p in parameters]
    bounds, is_reentrant = [each.bound for each in functions], forward is not None and forward.reentrant
    return Clipped(losses_b.detach(), norms_b, total, bounds, max(low, key=TOLERANCE.__getitem__), is_reentrant)


def _is_of_the_user(error: Exception) -> bool:
    """Whether an error was raised in the code of a model, of a loss or of torch."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return not innermost.f_globals.get("__name__", "").startswith("dp_transformers.")


def _require_equal_replicas(engine: ClippingEngine, total: list[torch.Tensor], tolerance: float) -> None:
    parameters = engine.trainable.parameters
    if differing := engine.trainable.parallel.differing(parameters, total, tolerance):
        name = engine.trainable.name_of(parameters[differing[0]])
        raise SelfCheckError(
            f"every process of the tensor-parallel group holds parameter '{name}', but their gradients differ: each "
            "sees a part of what it is used on, and nobody adds them up. Give its module the plan's style "
            "'replicated_with_grad_allreduce', or freeze it."
        )


def _apart(found_b: torch.Tensor, own_b: torch.Tensor, least: float = 0.01) -> torch.Tensor:
    """(k,) how far two numbers of each row are apart, relative to the row's own, and to at least this share of the
    largest row's; 0 where neither is a number."""
    largest = own_b.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()
    apart_b = (found_b - own_b).abs() / own_b.abs().clamp(min=least * float(largest)).clamp(min=NEGLIGIBLE)
    return torch.where(torch.isfinite(found_b) | torch.isfinite(own_b), apart_b, 0.0)


def differs(together: torch.Tensor, alone: torch.Tensor, of_all: torch.Tensor, tolerance: float) -> bool:
    """Whether what a row has in a batch is another thing than what it has alone, relative to its length, and to at
    least a hundredth of that of the longest row; what is not a number in both is the same."""
    x, y = together.float(), alone.float()
    rows = of_all.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).unsqueeze(1).flatten(1)
    least = max(NEGLIGIBLE, 0.01 * float(rows.norm(dim=1).max()))
    scale = y.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).norm().clamp(min=least)
    return not bool(torch.where(equal_or_nan(x, y), 0.0, x - y).norm() <= tolerance * scale)


def _distance(
    pairs: Sequence[tuple[torch.Tensor, Any]], scales: Sequence[torch.Tensor], low_precision: torch.dtype
) -> float:
    """Return how far apart clipped sums are, of which these pairs stand for each parameter's, relative to the
    parameter's scale where that is more than a hundredth of all, and in low precision to that of all."""
    apart = torch.stack([(x - y).norm() for x, y in pairs])
    own = torch.stack(list(scales)).to(apart)
    least = own.norm() * (1.0 if low_precision in HALF else 0.01)
    return float((apart / own.clamp(min=float(least)).clamp(min=NEGLIGIBLE)).max())


@torch.no_grad()
def _shadow(x: torch.Tensor) -> torch.Tensor:
    """Return at most ``2 * _NUMBERS`` numbers for a tensor: its own, or random sums of them. Their squares add up, on
    average, to the square of its length."""
    flat = to_local(x).reshape(-1)
    summands = len(flat) // _NUMBERS
    if summands < 2:
        return flat.clone()
    whole = summands * _NUMBERS
    weights = torch.randn(_PARTS, 1, summands, generator=torch.Generator().manual_seed(0)).to(flat)
    sums = torch.bmm(weights, flat[:whole].view(_PARTS, summands, -1))
    return torch.cat([sums.flatten(), flat[whole:]])


def _together(lengths: Iterable[torch.Tensor]) -> torch.Tensor:
    found = list(lengths)
    return torch.stack(found).norm().float() if found else torch.zeros(())


def _length(x: torch.Tensor) -> torch.Tensor:
    if is_dtensor(x):
        return torch.linalg.vector_norm(x.double()).full_tensor()
    return flat_norm(x.to(sum_dtype(x)).reshape(1, -1)).double().view(())


@contextlib.contextmanager
def perturbed(engine: ClippingEngine) -> Iterator[None]:
    """Inside, trainable parameters that hold nothing but zeros or very small numbers, as LoRA's B, are shifted: a rule
    behind one would see no gradient. It goes through ``.data``: versions tell what the model itself writes."""
    trainable = engine.trainable
    trainable.shards.reshard()
    small = [p for p in trainable.parameters if not bool((to_local(p.detach()).abs() > _SMALL).any())]
    kept = [(p, to_local(p.detach()).clone()) for p in small]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in map(to_local, small):
                p.data.add_((0.02 * torch.randn(p.shape, generator=generator)).to(p))
        torch.clear_autocast_cache()  # it holds casts of the weights as they were
        yield
    finally:
        trainable.shards.reshard()
        with torch.no_grad():
            for p, value in kept:
                to_local(p.data).copy_(value)
        torch.clear_autocast_cache()
