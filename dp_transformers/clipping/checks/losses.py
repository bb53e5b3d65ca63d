"""Expectations of a loop's losses: a row's loss is the one that it has alone, and padding has no gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from ...runtime.randomness import global_state, same_global_state, seeded_global_generators
from ..engine import ClippingEngine
from ..errors import SelfCheckError
from .comparison import TOLERANCE, differs
from .rows import Rows, Sizes, columns_of, floating_tensors, lengths_of, with_rows
from .without_dropout import without_dropout

logger = logging.getLogger(__name__)


def expect_same_alone(losses_of: Callable[..., torch.Tensor], rows: Rows) -> None:
    """Raise ValueError if the loss of a row, or its gradient, is another one alone. A loss that draws random numbers
    other than torch's, or cannot be computed for one row, is not compared.

    Args:
        losses_of: ``f(*args, **kwargs) -> (B,)``. It runs no model.
        rows: What it is called with.
    """
    device = next(x for x in rows.tensors if x.is_floating_point()).device
    try:
        with seeded_global_generators([0], device), without_dropout(), torch.enable_grad():
            before = global_state(device)
            together = _with_gradients(losses_of, rows)
            alone = {row: _with_gradients(losses_of, rows.alone(row)) for row in rows.spread()}
            if not same_global_state(before, global_state(device)):
                return
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.info("a row's loss was not computed alone: %s: %s", type(error).__name__, error)
        return
    for row, found in alone.items():
        for x, (own, *_) in zip(together, found, strict=True):
            kept, tolerance = rows.own_part(x, row, own.shape), TOLERANCE[x.dtype]
            if differs(kept, own, x, tolerance) or differs(kept.norm(), x[row].norm(), x, tolerance):
                raise ValueError(
                    "an example's loss, or its gradient, is another one when other examples share its batch, or when "
                    "it is padded: the criterion compares rows, or counts padded positions. Pad targets with its "
                    "ignore_index, or call engine.backward(losses), each of (B,) from its own row and positions alone."
                )


def _with_gradients(losses_of: Callable[..., torch.Tensor], rows: Rows) -> list[torch.Tensor]:
    """Return the losses, and the gradients of their sum by what has a graph."""
    leaves: list[torch.Tensor] = []

    def detached(path: tuple, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return x
        leaves.append(x.detach().clone().requires_grad_())
        return leaves[-1]

    losses = rows.changed(detached).call(losses_of)
    total = losses.sum() + sum(0.0 * x.sum() for x in leaves)  # of which each has a gradient
    return [losses.detach(), *(torch.autograd.grad(total, leaves) if leaves else ())]


def expect_no_gradient_at_padding(
    engine: ClippingEngine, output: Any, lengths: Sizes, dims: Mapping[int, int]
) -> None:
    """Expect that a loss of what the model returned has no gradient where its shortest row is padding.

    Args:
        output: What the model returned for a batch.
        lengths: How the rows of the batch are padded, by columns.
        dims: In which dimension outputs have padding, as :class:`.comparison.Comparison` has seen.
    """
    if not (lengths and dims and engine.forward is not None and engine.batch_first):
        return
    own = [own for _, own in columns_of(lengths)]
    row = min(range(len(own[0])), key=lambda i: sum(each[i] for each in own))
    padded = lengths_of(lengths, row)

    def expect(gradient: torch.Tensor | None, at: tuple) -> None:
        if gradient is not None:  # else the loss does not read this output
            engine.deferred_checks.expect(~(gradient[at].abs().max() > 0), _refuse_gradient)

    for i, x in enumerate(x for x in floating_tensors(with_rows(output)) if x.dim()):
        d = dims.get(i, x.dim())
        if not x.requires_grad or d >= x.dim() or len(x) != engine.forward.batch_size or x.shape[d] not in padded:
            continue
        side, n = padded[x.shape[d]]
        if n < x.shape[d]:
            positions = slice(n, None) if side == "right" else slice(x.shape[d] - n)
            x.register_hook(partial(expect, at=(row, *[slice(None)] * (d - 1), positions)))


def _refuse_gradient() -> NoReturn:
    raise SelfCheckError(
        "the loss has a gradient at outputs for positions that are padding, so the longest example has a say in the "
        "gradients of others, beyond the clipping bound. Leave these positions out of the loss (ignore_index, or a "
        "mask, in the mean too), or pad all examples to one length (padding='max_length')."
    )
