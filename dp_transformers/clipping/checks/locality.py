"""The checks that no example's content moves another example's gradient, or anything that the model keeps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ...mechanism.values import equal_or_nan
from ...runtime.randomness import forked_generators, global_state, same_global_state, set_global_state
from ..engine import ClippingEngine
from ..errors import SelfCheckError
from ..ragged import is_ragged
from ..recorded_call import ForwardPass
from .case import Case
from .reference import (
    TOLERANCE,
    ClippedSum,
    change_of_gradient,
    error_against_autograd,
    gradient_norm,
    measure,
    unclipped,
)
from .shared_numbers import dropouts_for_all_rows, watched_draws
from .spread_numbers import spread_numbers
from .synthetic import by_example, has_batch, kept_buffers, projected

logger = logging.getLogger(__name__)


def locality_as_trained(case: Case) -> tuple[float, float]:
    """Locality in the training mode the model is in, every pass with the same random numbers, and nothing frozen may
    change; and how much (relative) the sum of all gradients differs from autograd's there.

    The dropout inside torch's recurrent layers draws for the rows of a packed sequence in the order of their lengths,
    so that other lengths give a row other numbers. It takes part in the sum alone.
    """
    engine = case.engine
    recurrent = (m for m in engine.model.modules() if isinstance(m, nn.RNNBase) and m.training)
    drops = [m for m in recurrent if isinstance(m.dropout, (int, float)) and m.dropout]
    with _without_dropout(drops), engine.state.during_check(anew=True):
        error, sum_error = _locality(case)
    if not drops:
        return error, sum_error
    with forked_generators(engine.trainable.device), kept_buffers(engine.model):
        torch.manual_seed(0)
        numbers = global_state(engine.trainable.device)
        summed = unclipped(engine, case.losses)
        set_global_state(engine.trainable.device, numbers)
        return error, max(sum_error, _error_of_sum(case, summed, numbers))


@contextlib.contextmanager
def _without_dropout(modules: Sequence[nn.RNNBase]) -> Iterator[None]:
    rates = [m.dropout for m in modules]
    try:
        for m in modules:
            m.dropout = 0.0
        yield
    finally:
        for m, rate in zip(modules, rates, strict=True):
            m.dropout = rate


def _locality(case: Case) -> tuple[float, float]:
    engine = case.engine
    engine.trainable.shards.reshard()

    def replayed(*args: Any, **kwargs: Any) -> torch.Tensor:
        set_global_state(engine.trainable.device, numbers)
        return case.losses_of(*args, **kwargs)

    again = replace(case, losses_of=replayed)
    with forked_generators(engine.trainable.device), kept_buffers(engine.model):
        torch.manual_seed(0)
        numbers = global_state(engine.trainable.device)
        summed = unclipped(engine, again.losses)
        losses_b, tolerance = summed.losses_b, TOLERANCE[summed.low_precision]
        changes = [*_changes_beside_a_copy(again, summed)]
        if any(owner.runs_by_example for owner in engine.owners):  # there it draws in another order, and cannot mix
            with engine.suspended():
                losses_b = again.losses().detach()
        for kept, beside in _beside_others(again):
            moved = _loss_of(beside, kept)
            changes.append(_change(moved.detach(), losses_b[kept], _largest(losses_b)))
        # of the last ones, which are large and negated, the gradient is compared too
        sum_error, change = _errors_of_gradients(again, summed, beside, kept, moved, numbers)
        changes.append(torch.tensor(change))
        error = float(torch.stack([change.cpu() for change in changes]).max())
        engine.trainable.shards.reshard()
    require_locality(error, tolerance)
    elsewhere = _change_in_another_place(case, summed)
    require_locality(elsewhere, tolerance, "was left out, or others had its place in the batch")
    return error, sum_error


def _error_of_sum(case: Case, summed: ClippedSum, numbers: Any) -> float:
    """How much (relative) the sum of all gradients differs from autograd's, in the mode that the model is in, which
    may do something in training alone. Where modules run one example at a time random numbers are drawn in another
    order, so that a model which draws some is not looked at."""
    engine = case.engine
    if not engine.model.training or summed.reentrant:
        return 0.0
    with engine.suspended(), torch.enable_grad():
        losses = case.losses()
        draws = not same_global_state(global_state(engine.trainable.device), numbers)
        if draws and any(owner.runs_by_example for owner in engine.owners):
            return 0.0
        return error_against_autograd(engine, losses, summed)


def _changes_beside_a_copy(case: Case, summed: ClippedSum) -> Iterator[torch.Tensor]:
    """How much (relative) the other examples' losses and norms move when the last example is replaced, and when the
    first one is."""
    losses_b, norms_b, last = summed.losses_b, summed.norms_b, case.batch - 1
    for replaced, source in ((last, 0), (0, last)):  # a model may look back only, or ahead only
        moved_losses_b, moved_norms_b = measure(case.engine, case.with_copy(replaced, source).losses)
        others = torch.arange(case.batch, device=norms_b.device) != replaced
        yield _change(moved_norms_b, norms_b, norms_b)[others].max()
        yield _change(moved_losses_b, losses_b, _largest(losses_b))[others].max()


# Losses have weights from 2 to the power of minus this on; two examples of a small batch have never the same.
_POWERS = 4
# The smallest bound that a clipper takes: shorter gradients are never clipped.
_NEGLIGIBLE = 1e-12
# What the other examples' numbers are multiplied with when an example's loss is looked at: new ones, or where it is
# negative their own. Beside a copy they keep their size.
_FACTORS = (100.0, -0.1, -100.0)


def _beside_others(case: Case) -> Iterator[tuple[int, Case]]:
    """One example after the other, by its number, with all others replaced, also by large numbers."""
    for number, factor in enumerate(_FACTORS, start=1):
        kept, others = number % case.batch, case.others(case.batch)

        def beside(x: Any, other: Any, kept: int = kept, factor: float = factor) -> Any:
            if not has_batch(x, case.batch) or x.shape != other.shape:
                return x
            if x.is_floating_point():  # what is not made up anew (masks, positions) stays as it is
                other = torch.where(other == x, x, (x if factor < 0 else other) * factor)
            return torch.cat([other[:kept], x[kept : kept + 1], other[kept + 1 :]])

        inputs = tree_map(beside, (case.args, case.kwargs), (others.args, others.kwargs), is_leaf=is_ragged)
        yield kept, case.on(inputs)


def _loss_of(case: Case, example: int) -> torch.Tensor:
    """One example's loss. A sign, or a threshold over the batch, may move it and no norms."""
    with case.engine.suspended():
        return case.losses()[example]


def _errors_of_gradients(
    case: Case, summed: ClippedSum, beside: Case, kept: int, moved: torch.Tensor, numbers: Any
) -> tuple[float, float]:
    """How much (relative) the sum of all gradients differs from autograd's, and how much the gradient of the ``kept``
    example moves ``beside`` others, where its loss is ``moved``.

    One backward pass shows both where they are right: that of all losses, with this one in its place. Otherwise each
    is looked at by itself.
    """
    engine, reentrant = case.engine, summed.reentrant  # nobody may ask autograd for gradients there
    replay = partial(set_global_state, engine.trainable.device, numbers)
    if engine.model.training and not reentrant and not any(owner.runs_by_example for owner in engine.owners):
        with engine.suspended():
            losses = case.losses()
            losses = torch.cat([losses[:kept], moved.view(1), losses[kept + 1 :]])
            replay()
            error = error_against_autograd(engine, losses, summed, largest_scale=summed.norms_b[kept])
        if error <= TOLERANCE[summed.low_precision]:
            return error, error
        summed = unclipped(engine, case.losses)  # the sum was used up, and so was the graph
        moved = _loss_of(beside, kept)
    sum_error = _error_of_sum(case, summed, numbers)
    if reentrant:
        return sum_error, 0.0
    with engine.suspended():
        return sum_error, change_of_gradient(engine, moved, lambda: case.losses()[kept], replay)


def _change_in_another_place(case: Case, summed: ClippedSum) -> float:
    """How much (relative to the largest) losses, and the gradient of all of them, move when the examples come in the
    opposite order and without the last one, with random numbers that do not depend on how many there are; 0 where some
    are drawn of which that is not known. In evaluation a part of exactness is that an example is the same alone.
    Dropout modules whose masks all rows share are noted.

    Under ``reentrant`` activation checkpointing nobody may ask autograd for gradients.
    """
    engine, batch = case.engine, case.batch
    if not engine.model.training:
        return 0.0
    order = [*reversed(range(batch - 1))]
    fewer = case.only(order)
    try:
        with (
            forked_generators(engine.trainable.device),
            kept_buffers(engine.model),
            engine.suspended(),
            spread_numbers({batch, batch - 1}, reordered=True) as draws_no_others,
        ):
            with watched_draws(keeps_inputs=True) as drawn:
                own_b = case.losses()[order]
                of_all = drawn()
            with watched_draws(keeps_inputs=True) as drawn:
                moved_b = fewer.losses()
                engine.share_dropouts(dropouts_for_all_rows(of_all, drawn()))
            weights_b = torch.arange(1, batch).to(own_b)  # so that no two of them cancel out
            norm = 0.0 if summed.reentrant else gradient_norm(engine, own_b @ weights_b - moved_b @ weights_b)
            is_known = draws_no_others()
    except (SelfCheckError, torch.OutOfMemoryError):
        raise
    except (
        Exception
    ) as error:  # what is compiled for a call (flex_attention) does not run where operations are replaced
        engine.trainable.shards.recover()
        logger.info("the examples were not reordered in training mode: %s: %s", type(error).__name__, error)
        return 0.0
    own_b, moved_b = own_b.detach(), moved_b.detach()
    norms_b = (summed.norms_b[order] * weights_b.to(summed.norms_b)).nan_to_num(nan=0.0, posinf=0.0)
    change = norm / float(norms_b.max().clamp(min=1e-12))
    return max(change, float(_change(moved_b, own_b, _largest(own_b)).max())) if is_known else 0.0


def _largest(losses_b: torch.Tensor) -> torch.Tensor:
    return losses_b.abs().nan_to_num(nan=0.0).max()


def _change(moved_b: torch.Tensor, given_b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(B,) by how much ``given_b`` has moved, over ``scale``; 0 where both are not numbers."""
    same_b = equal_or_nan(moved_b, given_b)
    change_b = (moved_b.float() - given_b.float()).abs() / scale.float().clamp(min=1e-12)
    return torch.where(same_b, 0.0, change_b)


def require_locality(error: float, tolerance: float, what: str = "changed") -> None:
    if not error <= tolerance:
        raise SelfCheckError(
            f"an example's gradient or loss moved by {error:.1e} (relative) when only another example of its batch "
            f"{what}: the model or its loss mixes examples (batch statistics, a loss averaged over the batch's "
            "tokens, a load-balancing loss, ...), or draws random numbers that are other ones when it runs again. "
            "ModuleValidator.find_mixing(model, batch), on public examples, names the module that mixes: replace it "
            "(GroupNorm in the place of BatchNorm). Average the loss within each example alone, and draw random "
            "numbers from torch's global generator, in training mode alone."
        )


def require_own_rows(engine: ClippingEngine, losses: torch.Tensor, number: int) -> None:
    """Go back over a real batch's ``losses``, which can be gone back over again, twice: with weights that are powers
    of two, and as they are. Of an example's gradient nothing but the length may be another one, by exactly its weight.

    The self-check sees made-up batches. A model that sorts, packs or routes the positions of its batch may treat a
    real one in another way. Then what is taken for one example's gradient has the weights of others. Both passes
    measure alike, so that even a gradient which is nothing but rounding (of a pair of equal texts) has its weight.

    Args:
        number: Chooses the weights, and is the same on all ranks.

    Raises:
        SelfCheckError: on some rank an example's gradient has another weight than its own.
    """
    trainable, forward = engine.trainable, engine.require_forward(losses)
    order_b = torch.randperm(len(losses), generator=torch.Generator().manual_seed(number))
    weights_b = (order_b % (2 * _POWERS + 1) - _POWERS).float().exp2().to(losses.device)
    norms_b = engine.norms_of_weighted(losses, weights_b)
    expected_b = weights_b * engine.norms_of_weighted(losses, torch.ones_like(losses))
    tolerance = max(TOLERANCE[dtype] for dtype in (losses.dtype, trainable.low_precision, forward.low_precision))
    same_b = (norms_b - expected_b).abs() <= tolerance * torch.maximum(norms_b, expected_b) + _NEGLIGIBLE
    differs = bool((~same_b & torch.isfinite(norms_b) & torch.isfinite(expected_b)).any())
    if trainable.shards.any_rank(differs, norms_b.device):
        trainable.drop_gradients()
        engine.forget()
        raise SelfCheckError(
            "the losses of some examples of this batch have a gradient in rows that are taken for other examples. "
            "The model, or the loss, mixes examples, or puts their positions in an order of its own (sequences "
            "sorted or packed by their lengths, positions of all examples in one row), which the self-check's "
            "made-up batch did not show; or a backward pass gives something else when it runs again. "
            "ModuleValidator.find_mixing(model, batch), on public examples, names a module that mixes. Keep the "
            "examples in the order of the batch, one row for each: pack_padded_sequence with enforce_sorted=False "
            "sorts by itself, and its rows are known."
        )


def require_own_rows_of_outputs(engine: ClippingEngine, output: Any, number: int) -> None:
    """The same for a loop whose losses are not known: with a random linear function of what the model returned."""
    batch = cast(ForwardPass, engine.forward).batch_size
    try:
        losses = projected(by_example(engine.model, output, batch, batch_first=engine.batch_first))
    except SelfCheckError:  # it is not known which of the numbers are whose
        return
    if losses.requires_grad:
        require_own_rows(engine, losses, number)
