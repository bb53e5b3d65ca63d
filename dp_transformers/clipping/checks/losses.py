"""The expectation that a criterion gives a row the loss that it has alone, and unpadded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...runtime.randomness import global_state, same_global_state, seeded_global_generators
from .comparison import NEGLIGIBLE, TOLERANCE
from .outputs import cut_to
from .rows import Rows, lengths_of
from .without_dropout import without_dropout

logger = logging.getLogger(__name__)


def expect_same_alone(losses_of: Callable[..., torch.Tensor], rows: Rows) -> None:
    """Raise ValueError if the loss of a row, or its gradient, is another one alone. A loss that draws random numbers
    other than torch's, or cannot be computed for one row, is not looked at.

    Args:
        losses_of: ``f(*args, **kwargs) -> (B,)``. It runs no model.
        rows: What it is called with.
    """
    device = next(x for x in rows.tensors if x.is_floating_point()).device
    try:
        with seeded_global_generators([0], device), without_dropout(), torch.enable_grad():
            before = global_state(device)
            losses_b, grads = _with_gradients(losses_of, rows)
            alone = [(i, *_with_gradients(losses_of, rows.alone(i))) for i in rows.spread()]
            if not same_global_state(before, global_state(device)):
                return
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.info("a row's loss was not computed alone: %s: %s", type(error).__name__, error)
        return
    sides = [next((side for side, _ in lengths_of(rows.sizes, i).values()), "right") for i, *_ in alone]
    for (i, loss, own), side in zip(alone, sides, strict=True):
        _refuse_unless_same(losses_b[i], loss[0], losses_b)
        for x, y in zip(grads, own, strict=True):
            kept = cut_to(x[i], y.shape[1:], side)
            _refuse_unless_same(kept, y[0], x)
            _refuse_unless_same(kept.norm(), x[i].norm(), x)


def _with_gradients(losses_of: Callable[..., torch.Tensor], rows: Rows) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the losses, and the gradients of their sum by what has a graph."""
    leaves: list[torch.Tensor] = []

    def detached(path: tuple, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.requires_grad:
            leaves.append(x.detach().clone().requires_grad_())
            return leaves[-1]
        return x.detach()

    losses = rows.changed(detached).call(losses_of)
    found = (
        torch.autograd.grad(losses.sum(), leaves, allow_unused=True) if losses.requires_grad else [None] * len(leaves)
    )
    return losses.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def _refuse_unless_same(x: torch.Tensor, y: torch.Tensor, of_all: torch.Tensor) -> None:
    rows = of_all.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).reshape(len(of_all), -1)
    scale = torch.maximum(y.float().norm(), 0.01 * rows.norm(dim=1).max()).clamp(min=NEGLIGIBLE)
    if not bool((x.float() - y.float()).norm() <= TOLERANCE[of_all.dtype] * scale) and bool(y.isfinite().all()):
        raise ValueError(
            "an example's loss, or its gradient, is another one when other examples share its batch, or when it is "
            "padded to the length of a longer one: the criterion compares rows (the hardest of a batch, ranks, batch "
            "statistics, their number), or counts padded positions. Pad targets with a number that it ignores "
            "(ignore_index), or compute losses of shape (B,), each from its own row and its own positions alone, and "
            "call engine.backward(losses)."
        )
