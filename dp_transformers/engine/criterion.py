"""The private criterion: a loss module with a backward pass that clips per example."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn

from ..clipping.checks.losses import expect_same_alone
from ..clipping.checks.rows import Rows, transposed
from ..clipping.errors import warn_once
from ..step.step import PrivateStep

logger = logging.getLogger(__name__)

REDUCTIONS = ("mean", "sum")


class PrivateCriterion:
    """Takes the place of the loss module given to ``make_private``. ``backward`` on its result clips per example.
    Under ``no_grad`` its result is an ordinary loss.

    If the criterion has losses of positions, "mean" is the mean over the examples of the mean over each one's own
    positions, without those of ``ignore_index``: for one example the loss of torch's criterion. torch divides by the
    positions of the whole batch instead, so that each example would change the weight of the others. Class weights
    multiply the losses, and divide nothing.

    It is of the given criterion's class, and both have the same attributes: they may be set there or here, for the
    next loss. A loss leaves them as they were.

    Attributes:
        given: The criterion that it was made of.
    """

    given: nn.Module
    reduction: str
    _step: PrivateStep

    @staticmethod
    def of(criterion: nn.Module, step: PrivateStep, loss_reduction: str) -> PrivateCriterion:
        """Return the private criterion in the place of ``criterion``.

        Args:
            criterion: A loss module with the attribute ``reduction``.
            step: The private step, which adds its losses to the sums of the draw.
            loss_reduction: "mean" or "sum", as the criterion's.
        """
        reduction, kind = getattr(criterion, "reduction", None), type(criterion)
        if reduction not in REDUCTIONS or reduction != loss_reduction:
            raise ValueError(
                f"criterion {kind.__name__} has reduction={reduction!r} and loss_reduction is "
                f"{loss_reduction!r}: both must be 'mean', or both 'sum'. Compute other losses per example and call "
                "engine.backward(losses), without criterion."
            )
        step.clipper.watch("criterion", criterion)
        private = type(kind.__name__, (PrivateCriterion, kind), {"given": criterion, "_step": step})
        made: Any = object.__new__(private)
        object.__setattr__(made, "__dict__", vars(criterion))
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        losses_b = self._by_example(self._each(args, kwargs), args, kwargs)
        loss = getattr(losses_b, self.reduction)(0)
        if not loss.requires_grad:
            return loss
        self._compare(args, kwargs, losses_b)
        return _ClippedBackward.apply(
            torch.zeros((), device=loss.device, requires_grad=True), loss.detach(), [losses_b], self._step
        )

    def _each(self, args: tuple, kwargs: dict) -> torch.Tensor:
        """Return the losses without a reduction, by a copy of the criterion."""
        given: Any = self.given
        criterion, reduction = copy.copy(given), self.reduction
        criterion.reduction = "none"
        try:
            return criterion(*args, **kwargs)
        finally:
            given.reduction = reduction  # a compiled one shares it with its copy

    def _by_example(self, each: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
        """Return (B,) losses from those of the criterion."""
        if each.dim() == 1:
            return each
        counted = self._counted(each, args, kwargs)
        if not self._step.clipper.engine.batch_first:
            each, counted = each.movedim(1, 0), counted.movedim(1, 0)
        losses_b = each.flatten(1).sum(1)
        if self.reduction == "sum":
            return losses_b
        warn_once(
            logger,
            type(self.given),
            "%s gives losses of positions: those of an example are averaged by themselves, and then the examples. "
            "torch's mean over all positions of a batch would let a long example weigh more than others.",
            type(self.given).__name__,
        )
        return losses_b / counted.flatten(1).sum(1).clamp(min=1)

    def _compare(self, args: tuple, kwargs: dict, losses_b: torch.Tensor) -> None:
        """If rows of this batch were compared, raise ValueError if the loss of an example, or its gradient, is another
        one alone and unpadded."""
        given, clipper = self._step.current_batch(), self._step.clipper
        if not clipper.compares_rows:
            return

        def losses_of(*args: Any, **kwargs: Any) -> torch.Tensor:
            with clipper.engine.state.during_check():
                return self._by_example(self._each(args, kwargs), args, kwargs)

        sizes = {} if given is None else given.batch.sizes_of(args, kwargs)
        args, kwargs = (args, kwargs) if clipper.engine.batch_first else transposed((args, kwargs))
        rows = Rows(args, kwargs, len(losses_b), sizes, batch_first=clipper.engine.batch_first)
        if not rows.are_ambiguous:
            expect_same_alone(losses_of, rows)

    def _counted(self, each: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
        """Return True for each loss that counts in a mean: all without those of the criterion's ``ignore_index``."""
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        ignored = getattr(self.given, "ignore_index", None)
        if ignored is None or not isinstance(target, torch.Tensor) or target.shape != each.shape:
            return torch.ones_like(each, dtype=torch.bool)
        return target != ignored


class _ClippedBackward(torch.autograd.Function):
    """Returns the value of a loss. Its backward hands the losses of the examples to the private step."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, losses: list[torch.Tensor], step: PrivateStep
    ) -> torch.Tensor:
        # autograd does not see tensors in a list, and does not go back to them by itself
        ctx.losses, ctx.step = losses, step
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None, None]:
        if not ctx.losses:
            raise ValueError(
                "backward was called twice on one loss of the private criterion. Call it once, and compute a new loss "
                "from the next batch of the loader."
            )
        ctx.step.clipper.engine.deferred_checks.expect(grad_outputs[0] == 1, _refuse_scaled_loss)
        with torch.enable_grad():
            ctx.step.add(ctx.losses.pop())
        return None, None, None, None


def _refuse_scaled_loss() -> None:
    raise ValueError(
        "the loss of a private criterion was scaled or combined with another before backward. Call backward on the "
        "loss itself, without GradScaler and without dividing by accumulation steps, or compute losses of shape (B,) "
        "and call engine.backward(losses), without criterion."
    )
