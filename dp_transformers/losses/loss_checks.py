"""Checks of losses on the outputs and targets of real batches: they do not compare examples, and leave padding out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map, tree_map_with_path

from ..clipping.checks.redrawn_numbers import drawn_for_rows, refuse_numbers_of_some_rows
from ..clipping.checks.shared_numbers import Drawn, watched_draws
from ..data.draws import PhysicalBatch
from ..data.padding import Padding
from ..runtime.randomness import seeded_global_generators

logger = logging.getLogger(__name__)

# Losses alone are looked at for all of this many physical batches, then ever more rarely, down to this rate.
OFTEN, RATE = 8, 1 / 64
RATE_OF_MODELS = 1 / 128  # where the model must run for it
_FEW = 2  # rows that are compared with as many more beside them


def refuse_losses_of_other_rows(
    loss: Callable[..., torch.Tensor],
    given: tuple[Any, ...],
    losses: torch.Tensor,
    seed: int,
    *,
    goes_back: bool = True,
) -> None:
    """Raise ValueError if the losses of half of the rows change when these rows replace all others, for either half;
    or if the losses or gradients of a few rows are others when fewer of them are given.

    Args:
        loss: Returns the losses, whose first dimension is that of the rows, from what is ``given``.
        losses: What it returned.
        seed: Seeds the random numbers that a loss may draw, so that all computations draw the same.
        goes_back: Whether gradients are looked at, those of the numbers that are given. False where a model runs.
    """
    size = len(losses)
    if size < 2:
        return

    def computed(rows: tuple[Any, ...], seed: int = seed) -> torch.Tensor:
        with seeded_global_generators([seed], losses.device):
            return loss(*rows)

    with_rows = partial(_with_rows, given, size)
    half = (size + 1) // 2
    first, last, rest = slice(half), slice(size - half, size), size - half
    with torch.no_grad():
        own = computed(given).float()
        for kept, parts in ((first, (first, slice(rest))), (last, (slice(size - rest, size), last))):
            moved = computed(with_rows(*parts)).float()[kept]
            _refuse_unless(torch.allclose(moved, own[kept], rtol=1e-3, atol=1e-6, equal_nan=True))
    if not goes_back or size < 2 * _FEW or not _can_be_fewer(given, size):
        return
    have_rows = [len(x) == size for x in _numbers(given)]
    together, parts = slice(2 * _FEW), (slice(_FEW), slice(_FEW, 2 * _FEW))
    try:
        few = _with_gradients(computed, with_rows(together), have_rows)
        fewer = [_with_gradients(computed, with_rows(part), have_rows) for part in parts]
        with torch.no_grad():
            again = computed(with_rows(together), seed + 1)
            draws = not torch.equal(few[0], again.view_as(few[0]))  # for the rows that it is given
    except Exception as error:
        logger.info("the losses of fewer rows were not looked at: %s: %s", type(error).__name__, error)
        return
    if draws or any(len(each[0]) != _FEW for each in fewer):
        return
    for part, each in zip(parts, fewer, strict=True):
        for own, alone in zip(few, each, strict=True):
            moved_b = (alone.float() - own[part].float()).flatten(1).norm(dim=1)
            longest = own.float().flatten(1).norm(dim=1).max()
            _refuse_unless(bool((moved_b <= 1e-2 * longest + 1e-6).all()) or not bool(torch.isfinite(longest)))


def drawn_for_all_rows(
    loss: Callable[..., torch.Tensor],
    given: tuple[Any, ...],
    losses: torch.Tensor,
    seed: int,
    known: Collection[nn.Module] = (),
) -> list[str]:
    """Who draws random numbers that all rows share (:mod:`.clipping.checks.shared_numbers`) while losses are computed:
    the loss, modules by their classes, generators by their names. None where it cannot be computed of fewer rows.

    Args:
        loss, given, losses, seed: As in :func:`refuse_losses_of_other_rows`.
        known: Modules whose numbers are the same in all batches of a draw.

    Raises:
        SelfCheckError: some rows share numbers, and others do not.
    """
    size = len(losses)

    def draw(rows: slice, number: int) -> Drawn:
        with torch.no_grad(), seeded_global_generators([seed, number], losses.device), watched_draws() as drawn:
            loss(*_with_rows(given, size, rows))
            return drawn()

    def run() -> list[torch.Tensor]:
        with torch.no_grad(), seeded_global_generators([seed, 0], losses.device):
            return [loss(*_with_rows(given, size, slice(size)))]

    def moved(own: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
        return ~torch.isclose(own[0], others[0], rtol=1e-3, atol=1e-6, equal_nan=True).view(size, -1).all(1).cpu()

    found, are_some = [], False
    try:
        if size > 1:
            found, are_some = drawn_for_rows(draw, run, moved, size, known)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.info("whose numbers a loss draws was not looked at: %s: %s", type(error).__name__, error)
        return []
    if are_some:
        refuse_numbers_of_some_rows("the loss")
    names = (x if isinstance(x, str) else "the loss" if x is None else type(x).__name__ for x in found)
    return [*dict.fromkeys(names)]


def _with_rows(given: tuple[Any, ...], size: int, *parts: slice) -> tuple[Any, ...]:
    """What is given, with these rows of all that has ``size`` rows."""

    def taken(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        has_rows = x.dim() and len(x) == size
        return torch.cat([x[part] for part in parts]).detach() if has_rows else x.detach()

    return tree_map(taken, given)


def refuse_losses_of_padding(
    loss: Callable[..., torch.Tensor], args: tuple, kwargs: dict, batch: PhysicalBatch, padding: Padding, seed: int
) -> bool:
    """Raise ValueError if a row's loss, or its gradient, is another one with its padding than without. Whether that is
    known: some of what the loss is given is a column that is padded so, and all else with as many positions is cut
    like it.

    Args:
        loss: Returns the (B,) losses of what is given.
        seed: Seeds the random numbers that it may draw.
    """
    padded_dims = batch.padded_arguments(padding, args, kwargs)
    if not padded_dims or not any(padded_dims.values()):
        return False
    given = tree_leaves_with_path((args, kwargs))
    dims = {
        keystr(path): [d for d in padded_dims.get(keystr(path), range(1, x.dim())) if x.shape[d] == padding.length]
        for path, x in given
        if isinstance(x, torch.Tensor) and x.dim() > 1 and len(x) == batch.size
    }
    if any(len(each) > 1 for path, each in dims.items() if path not in padded_dims):
        return False  # several classes happen to be as many as positions
    own_k = padding.own_t.nonzero().flatten()
    have_graph = [x.requires_grad for x in _numbers((args, kwargs))]  # what the model put out, no targets and no masks

    def row_of(path: tuple, x: Any, *, is_cut: bool) -> Any:
        """The row twice, since some losses cannot do with one."""
        if not (isinstance(x, torch.Tensor) and x.dim() and len(x) == batch.size):
            return x
        row = x.detach()[[padding.row] * 2]
        if not is_cut:
            return row
        if x.dim() == 1 and not x.is_floating_point():  # a length of all positions
            return row.where(row != padding.length, len(own_k))
        for dim in dims.get(keystr(path), ()):
            row = row.index_select(dim, own_k.to(row.device))
        return row

    def computed(seed: int, *, is_cut: bool) -> list[torch.Tensor]:
        rows = tree_map_with_path(partial(row_of, is_cut=is_cut), (args, kwargs))
        with seeded_global_generators([seed], tree_leaves(rows)[0].device):
            return _with_gradients(lambda rows: loss(*rows[0], **rows[1]), rows, have_graph)

    try:
        padded, alone, again = (
            computed(seed, is_cut=False),
            computed(seed, is_cut=True),
            computed(seed + 1, is_cut=False),
        )
    except Exception as error:
        logger.info("a row's loss was not computed without padding: %s: %s", type(error).__name__, error)
        return True
    if torch.equal(padded[0], again[0]):  # it draws no random numbers
        _refuse_unless_as_long(padded, alone)
    return True


def _refuse_unless_as_long(padded: list[torch.Tensor], alone: list[torch.Tensor]) -> None:
    """Raise ValueError unless losses and gradients are the same, but for zeros."""
    for x, y in zip(padded, alone, strict=True):
        precise = torch.float32 if x.dtype in (torch.float32, torch.float64) else x.dtype
        (own, _), (others, _) = (each.double().abs().flatten().sort(descending=True) for each in (x, y))
        missing = max(0, len(own) - len(others))
        moved = (own - F.pad(others, (0, missing)))[: len(own)].norm()
        if not moved <= 16 * torch.finfo(precise).eps * own.norm() and bool(own.isfinite().all()):
            raise ValueError(
                "an example's loss, or its gradient, is another one when it is padded to the length of a longer one "
                "of its batch, so every example has a say in the gradients of others, beyond the clipping bound: the "
                "criterion is a mean over padded positions, or adds them up. Pad targets with a number that it "
                "ignores (ignore_index), or leave padding out in a criterion of your own; or compute losses of shape "
                "(B,), each of its own positions, and call engine.backward(losses)."
            )


def _can_be_fewer(given: tuple[Any, ...], size: int) -> bool:
    """Whether it is known how to take fewer rows: all that has any are tensors whose first dimension they are."""

    def is_long(x: Any) -> bool:
        return isinstance(x, (list, tuple)) and len(x) == size

    for x in tree_leaves(given, is_leaf=is_long):
        if isinstance(x, torch.Tensor):
            if x.dim() and len(x) != size and {size, 2 * size} & {*x.shape}:
                return False
        elif not (x is None or isinstance(x, (bool, int, float, str))):
            return False
    return True


def _numbers(given: tuple[Any, ...]) -> list[torch.Tensor]:
    return [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim()]


def _with_gradients(
    computed: Callable[[tuple], torch.Tensor], rows: tuple[Any, ...], have_rows: list[bool]
) -> list[torch.Tensor]:
    """The losses, and the gradients of their sum by the tensors that have rows (0 where there is none), of shape
    (B, numbers of a row)."""
    leaves = [x.requires_grad_() for x, has_rows in zip(_numbers(rows), have_rows, strict=True) if has_rows]
    with torch.enable_grad():
        losses = computed(rows)
    differentiable = losses.requires_grad and bool(leaves)
    found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True) if differentiable else [None] * len(leaves)
    gradients = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))
    return [x.reshape(len(x), -1) for x in (losses.detach(), *gradients)]


def _refuse_unless(same: bool) -> None:
    if not same:
        raise ValueError(
            "an example's loss, or its gradient, is another one when other examples share its batch: the loss "
            "compares them (the hardest of a batch, ranks, batch statistics, their number). Let "
            "per_example_loss_func, or the criterion, compute each loss from its own row of the outputs and labels, "
            "or of the inputs, alone."
        )
