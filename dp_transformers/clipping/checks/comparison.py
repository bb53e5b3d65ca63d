"""Rows clipped together in their padded batch, compared with each alone and unpadded through plain autograd.

Gradients are compared by their lengths, and by random sums of each parameter's, so that never those of two rows, or of
a row and the sum, are held at once.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ...mechanism.clipping_functions import ClippingFunction
from ...mechanism.values import equal_or_nan
from ..engine import ClippingEngine
from ..errors import SelfCheckError
from ..loss_graph import dtypes_in_graph
from ..parallel.dtensor import is_dtensor, to_local
from ..precision import DTYPE_OF_PRODUCTS, HALF, product_settings, sum_dtype
from ..terms.arithmetic import flat_norm
from .rows import LossFunction, Rows, outputs_of, projected
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
        return self.sum <= TOLERANCE[self.low_precision] and not bool(self.wrong_b.any())

    @property
    def wrong_losses_b(self) -> torch.Tensor:
        return ~(self.loss_b <= TOLERANCE[self.low_precision])

    @property
    def wrong_b(self) -> torch.Tensor:
        """(k,) bool: rows with another norm or loss than alone."""
        return ~(self.norm_b <= TOLERANCE[self.low_precision]) | self.wrong_losses_b


@dataclass
class _AtTheMedian(ClippingFunction):
    """Clips to the median norm of the rows, so that some are clipped and some are not, and keeps that bound. For
    trials alone: each one's norm counts for all."""

    bound: float = 1.0
    sensitivity: float = math.inf

    def coefficients(self, norms_b: torch.Tensor) -> torch.Tensor:
        self.bound = float(norms_b.median()) or 1.0
        return (self.bound / norms_b).clamp(max=1.0)


class _Alone(NamedTuple):
    """One row's loss, and the (P,) length and the random sums of its gradient for each parameter."""

    loss: torch.Tensor
    lengths: torch.Tensor
    shadows: list[torch.Tensor]


class _Clipped(NamedTuple):
    """What clipping the rows together gives: losses, norms, the sum of each parameter, and the bound of each group."""

    losses_b: torch.Tensor
    norms_b: torch.Tensor
    total: list[torch.Tensor]
    bounds: list[float]


class Comparison:
    """Some rows of a batch together and alone.

    Args:
        engine: Clips. It is on trial (:meth:`.ClippingEngine.trial`).
        rows: The batch.
        chosen: The rows that are compared.
        losses_of: ``f(*args, **kwargs) -> (B,)``; None for a random linear function of each row's own outputs.

    Attributes:
        together: The chosen rows as they stand.
        is_reentrant: Whether a part of the model ran under reentrant checkpointing, which hides it from autograd.
        position_dims: In which dimension each of the model's outputs has padding, where these were compared. Nothing
            but zeros there is none: no gradient leads from there to a parameter.
    """

    def __init__(self, engine: ClippingEngine, rows: Rows, chosen: Sequence[int], losses_of: LossFunction | None):
        self._engine, self._rows, self._chosen, self._losses_of = engine, rows, list(chosen), losses_of
        # torch (2.13, on the CPU) computes another gradient behind batch normalization that evaluates for a batch of
        # one whose gradient comes transposed
        self._copies = 1 + any(isinstance(m, _BatchNorm) for m in engine.model.modules())
        self._shapes: list[list[torch.Size]] = []  # of the outputs of each row alone
        self._low_precision = engine.trainable.low_precision
        self.together, self.position_dims, self.is_reentrant = rows.only(chosen), dict[int, int](), False

    def run(self) -> Errors:
        """Compare in the mode that the model is in."""
        engine, self._shapes = self._engine, []
        with engine.suspended():
            alone = [self._alone(i) for i in self._chosen]
        found = self._clipped()
        tolerance = TOLERANCE[self._low_precision]
        _require_equal_replicas(engine, found.total, tolerance)
        lengths_kp = torch.stack([each.lengths for each in alone]).cpu()
        norm_error_b = _apart(found.norms_b, lengths_kp.norm(dim=1).to(found.norms_b))
        of_one_b = torch.stack([each.loss for each in alone]).float().to(found.losses_b.device)
        least = 1.0 if self._low_precision in HALF else 0.01  # a loss may be close to 0, and the rounding in it is not
        loss_error_b = _apart(found.losses_b.float(), of_one_b, least)
        errors = [self._error_of_sum(alone, lengths_kp, found)]
        del found
        if engine.memory is not None:  # a pass that may keep more forms the sum in another way
            errors.append(self._error_of_sum(alone, lengths_kp, self._clipped(math.inf)))
        result = Errors(norm_error_b, loss_error_b, max(errors), self._low_precision)
        is_wrong, trainable = not result.are_small, engine.trainable
        if trainable.shards.any_rank(is_wrong, trainable.device) and not is_wrong:  # so that all ranks decide alike
            result = result._replace(sum=math.inf)
        return result

    # ---- losses ----

    def loss_of_first(self) -> torch.Tensor:
        """(1,) or (2,): the loss of the first row alone."""
        return self._loss_alone(self._chosen[0])

    def losses_of_rows(self, rows: Rows) -> torch.Tensor:
        """(n,) losses of other rows, as they stand."""
        outputs = self._outputs(rows)
        return outputs[0] if self._losses_of is not None else projected(outputs)

    def _outputs(self, rows: Rows) -> list[torch.Tensor]:
        self._engine.state.restore()
        try:
            with without_dropout():
                return outputs_of(self._engine, rows, self._losses_of)
        except (RuntimeError, IndexError, AssertionError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError) or _is_of_the_library(error):
                raise
            outputs_of(self._engine, self._rows, self._losses_of)  # an ordinary fault is raised as it is
            raise SelfCheckError(
                f"the model or its loss raised {type(error).__name__} for some rows of a batch, or for one alone and "
                "unpadded. What takes statistics over the batch mixes examples (GroupNorm does not); otherwise give "
                "it tensors with one row for each example, make initial states inside of forward, pack with "
                "enforce_sorted=False, name the dimension of squeeze(-1), or pad to one length (padding='max_length')."
            ) from error

    def _loss_alone(self, row: int) -> torch.Tensor:
        outputs = self._outputs(self._rows.alone(row, self._copies))
        self._shapes.append([x.shape[1:] for x in outputs])
        return outputs[0] if self._losses_of is not None else projected(outputs)

    def _losses(self) -> torch.Tensor:
        """(k,) losses of the rows together, as they stand, each of its own positions."""
        outputs, losses = self._outputs(self.together), []
        if self._losses_of is not None:
            return outputs[0]
        for j, (row, shapes) in enumerate(zip(self._chosen, self._shapes, strict=True)):
            own = [self._rows.own_part(x, row, shape, j) for x, shape in zip(outputs, shapes, strict=True)]
            losses.append(projected([x[None] for x in own]))
            for i, (x, part) in enumerate(zip(outputs, own, strict=True)):
                if x[j].count_nonzero() > part.count_nonzero():
                    shorter = (d for d, n in enumerate(part.shape, 1) if n < x.shape[d])
                    self.position_dims.setdefault(i, next(shorter))
        return torch.cat(losses)

    # ---- gradients ----

    def _alone(self, row: int) -> _Alone:
        loss, trainable = self._loss_alone(row)[0], self._engine.trainable
        if not loss.requires_grad:
            raise SelfCheckError(
                "the loss of an example depends on no trainable parameter: adapters are disabled or merged, what is "
                "trained is not used, or reentrant activation checkpointing hides it (use_reentrant=False shows it)."
            )
        wholes = [trainable.shards.all_unsharded(p) for p in trainable.parameters]
        with without_dropout():  # of what runs again
            found = torch.autograd.grad(loss, [whole for its in wholes for whole in its], allow_unused=True)
        rest, shadows = list(reversed(found)), []
        lengths = torch.zeros(len(wholes), dtype=torch.float64, device=loss.device)
        del found
        for i, (p, its) in enumerate(zip(trainable.parameters, wholes, strict=True)):
            given = [g for g in [rest.pop() for _ in its] if g is not None]
            if not given:
                shadows.append(loss.new_zeros(()))
                continue
            g = trainable.parallel.native_gradient(p, sum(given[1:], given[0])).to(sum_dtype(p))
            lengths[i] = _length(g)
            shadows.append(_shadow(trainable.shards.summed(p, to_local(g)) if trainable.shards else g))
        return _Alone(loss.detach(), lengths, shadows)

    def _clipped(self, limit: float = 0.0) -> _Clipped:
        """Clip each of the engine's groups by itself, to the median of its norms. With a ``memory_budget``, keep at
        most ``limit`` bytes that the mode would not."""
        engine, parameters = self._engine, self._engine.trainable.parameters
        for p in parameters:
            p.grad = None
        losses_b, forward = self._losses(), engine.forward
        self.is_reentrant = forward is not None and forward.reentrant
        self._low_precision = coarsest(engine, [losses_b])
        functions = [_AtTheMedian() for _ in engine.groups]
        groups = [group._replace(clipping=each) for group, each in zip(engine.groups, functions, strict=True)]
        with without_dropout():  # of what runs again
            norms_b = engine.backward(losses_b, groups=groups, trial_limit=limit)
        total = [torch.zeros_like(p, dtype=sum_dtype(p)) if p.grad is None else p.grad for p in parameters]
        return _Clipped(losses_b.detach(), norms_b, total, [each.bound for each in functions])

    def _error_of_sum(self, alone: Sequence[_Alone], lengths_kp: torch.Tensor, found: _Clipped) -> float:
        """Return how far the clipped sum is from that of the rows alone, each clipped to these bounds, where it is
        farthest. It is relative to the length of the rows' parts of a parameter's sum, since rows may cancel each
        other, and to at least a hundredth of that of all parameters; in low precision to that of all."""
        parameters, shards = self._engine.trainable.parameters, self._engine.trainable.shards
        column, shares_kp = {p: i for i, p in enumerate(parameters)}, torch.zeros_like(lengths_kp)
        for group, bound in zip(self._engine.groups, found.bounds, strict=True):
            columns = [column[p] for p in group.parameters]
            norms_k = lengths_kp[:, columns].norm(dim=1)
            shares_k = (bound / norms_k.clamp(min=NEGLIGIBLE)).clamp(max=1.0)
            shares_kp[:, columns] = shares_k.where(norms_k.isfinite(), 0.0)[:, None]  # those take no part
        apart_p = torch.zeros(len(parameters), dtype=torch.float64)
        for i, x in enumerate(found.total):
            shares = zip(alone, shares_kp[:, i].tolist(), strict=True)
            apart_p[i] = (_shadow(x) - sum(share * each.shadows[i] for each, share in shares if share)).norm()
        ranks = shards.mesh.size() if shards.mesh is not None else 1  # all of them add the same rows
        scale_p = ranks * torch.where(shares_kp > 0, shares_kp * lengths_kp, 0.0).norm(dim=0)
        least = scale_p.norm() * (1.0 if self._low_precision in HALF else 0.01)
        return float((apart_p / scale_p.clamp(min=least.clamp(min=NEGLIGIBLE))).nan_to_num(nan=math.inf).max())


def _is_of_the_library(error: Exception) -> bool:
    """Return True if it has a message of its own; errors of tensors pass through ``without_dropout``, too."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ValueError) and innermost.f_globals.get("__name__", "").startswith("dp_transformers.")


def _require_equal_replicas(engine: ClippingEngine, total: list[torch.Tensor], tolerance: float) -> None:
    parameters = engine.trainable.parameters
    if differing := engine.trainable.parallel.differing(parameters, total, tolerance):
        name = engine.trainable.name_of(parameters[differing[0]])
        raise SelfCheckError(
            f"every process of the tensor-parallel group holds parameter '{name}', but their gradients differ, and "
            "nobody adds them up. Give its module the plan's style 'replicated_with_grad_allreduce', or freeze it."
        )


def _apart(found_b: torch.Tensor, own_b: torch.Tensor, least: float = 0.01) -> torch.Tensor:
    """(k,) how far two numbers of each row are apart, relative to the row's own, and to at least this share of the
    largest row's; 0 where neither is a number."""
    largest = own_b.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()
    apart_b = (found_b - own_b).abs() / own_b.abs().clamp(min=least * float(largest)).clamp(min=NEGLIGIBLE)
    return torch.where(torch.isfinite(found_b) | torch.isfinite(own_b), apart_b, 0.0)


def coarsest(engine: ClippingEngine, computed: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the least precise dtype in which these were computed. Their graphs show it, also under autocast. Frozen
    weights, and the setting for products of float32 (TF32 or bf16), which no graph shows, count as well."""
    trainable = engine.trainable
    settings = product_settings(trainable.device)[: 1 + trainable.convolves]
    seen = {trainable.low_precision, *(DTYPE_OF_PRODUCTS.get(each.fp32_precision, torch.float32) for each in settings)}
    return max(seen.union(*map(dtypes_in_graph, computed)) & TOLERANCE.keys(), key=TOLERANCE.__getitem__)


def differs(together: torch.Tensor, alone: torch.Tensor, of_all: torch.Tensor, tolerance: float) -> bool:
    """Return True if what a row has in a batch is another thing than what it has alone, relative to its length, and to
    at least a hundredth of that of the longest row; what is not a number in both is the same."""
    x, y = together.float(), alone.float()
    norms_b = of_all.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).unsqueeze(1).flatten(1).norm(dim=1)
    scale = (
        y.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).norm().clamp(min=max(NEGLIGIBLE, 0.01 * float(norms_b.max())))
    )
    return not bool(torch.where(equal_or_nan(x, y), 0.0, x - y).norm() <= tolerance * scale)


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


def _length(x: torch.Tensor) -> torch.Tensor:
    if is_dtensor(x):
        return torch.linalg.vector_norm(x.double()).full_tensor()
    return flat_norm(x.to(sum_dtype(x)).reshape(1, -1)).double().view(())


@contextlib.contextmanager
def perturbed(engine: ClippingEngine) -> Iterator[None]:
    """Inside, trainable parameters that hold nothing but zeros or very small numbers, as LoRA's B, are shifted: a rule
    behind one would see no gradient. It goes through ``.data``: versions tell what the model itself writes."""
    shards, generator = engine.trainable.shards, torch.Generator().manual_seed(0)
    shards.reshard()
    values = [(p, to_local(p.data)) for p in engine.trainable.parameters]
    kept = [(p, value.clone()) for p, value in values if not bool((value.abs() > _SMALL).any())]
    try:
        for p, value in kept:
            to_local(p.data).add_((0.02 * torch.randn(value.shape, generator=generator)).to(value))
        torch.clear_autocast_cache()  # it holds casts of the weights as they were
        yield
    finally:
        shards.reshard()
        for p, value in kept:
            to_local(p.data).copy_(value)
        torch.clear_autocast_cache()
