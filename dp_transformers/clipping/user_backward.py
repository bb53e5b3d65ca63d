"""Clipping inside a ``loss.backward()`` that the user calls.

That call's backward pass fills the probe. The parameters ask for no gradient while their modules run
(:class:`.hooks.HookedModel`), so autograd computes no unclipped weight gradient at all, and the clipped sum is in
``p.grad`` when ``backward`` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import torch

from .clipping_functions import ClippingFunction
from .coefficients import Coefficients, coefficients
from .conditions import Conditions
from .engine import ClippingEngine
from .graph import weights_in_means
from .precision import without_autocast
from .recorded_call import BackwardPass, ForwardPass, differentiable_leaves
from .tap import TAPS


class UserBackward:
    """Forms the clipped sum at the end of the user's backward pass.

    Args:
        engine: Records the calls.
        loss_reduction: "mean" or "sum": how the user's loss comes from the examples' losses.
        look: ``f(forward)``, after the clipped sum was formed and before it counts. May raise.

    Raises:
        ValueError: the mode goes back over the losses itself, or the model is sharded.
    """

    def __init__(self, engine: ClippingEngine, loss_reduction: str, look: Callable[[ForwardPass], None]):
        if not engine.mode.one_pass:
            raise ValueError(
                f"clipping mode '{engine.mode.name}' goes back over the losses a second time, so it needs them one "
                "for each example: hand over the criterion, call backward(losses) of the clipper yourself, or use "
                "clipping_mode='book_keeping'."
            )
        if engine.trainable.shards:
            raise ValueError(
                "the model is sharded (fully_shard), and there loss.backward() cannot be followed: hand over the "
                "criterion, or take "
                'loss_reduction="none" and call backward(losses) of the clipper yourself.'
            )
        self._engine, self._loss_reduction, self._look = engine, loss_reduction, look

    def refuse_means_over_the_batch(self, output: Any, forward: ForwardPass, *, at_once: bool) -> None:
        """Refuse the sum of ``loss.backward()`` where ``loss`` is one of the model's output, and a mean in which the
        examples' weights depend on each other: there, or without waiting for the device before it is released. Of a
        loss that the loop computes the graph is not known."""
        if self._loss_reduction != "mean":
            return
        for loss in differentiable_leaves(output):
            if loss.dim() or loss.grad_fn is None:
                continue
            for weights_b in weights_in_means(loss, TAPS, forward.batch_size):
                are_equal = torch.isclose(weights_b, weights_b[:1], rtol=1e-4).all()
                if at_once and not are_equal:
                    loss.register_hook(lambda gradient: _refuse_mean())
                elif not at_once:
                    loss.register_hook(partial(_expect, forward.conditions, are_equal))

    def begin(self, forward: ForwardPass) -> None:
        """The first tap was reached."""
        engine = self._engine
        begin_sum = cache(partial(engine.begin_sum, forward, None))  # once, when the mode first clips

        def clip(norm_sq_b: torch.Tensor, clipping: ClippingFunction | None) -> Coefficients:
            weights_b, reduce = begin_sum()
            scale = forward.batch_size if self._loss_reduction == "mean" else 1
            return coefficients(norm_sq_b, clipping=clipping, weights_b=weights_b, scale=scale, reduce=reduce)

        plan = engine.plan(forward, engine.groups)
        backward = engine.mode.begin(forward, engine.groups, clip, engine.sums, None, plan)
        engine.go_back(forward, backward)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, forward, backward))

    def _finish(self, forward: ForwardPass, backward: BackwardPass) -> None:
        """The end of ``loss.backward()``."""
        engine, device = self._engine, forward.probe.device
        try:
            if not forward.is_current:
                raise ValueError(
                    "the model was called again while loss.backward() was going on, so the first call's gradients "
                    "cannot be clipped. Call the model only before backward or after it, not in a gradient hook."
                )
            if forward.probe.grad is None:
                raise ValueError(
                    "the model's outputs were differentiated by something else than loss.backward() "
                    "(torch.autograd.grad, or inputs=...), so no gradient was clipped. Do that on a deepcopy of the "
                    "model, which has no clipper."
                )
            with without_autocast(device), torch.no_grad():
                engine.norms_b = backward.finish()
                self._look(forward)
        finally:
            engine.forget()
        engine.end_sum()


def _expect(conditions: Conditions, are_equal: torch.Tensor, gradient: torch.Tensor) -> None:
    conditions.expect(are_equal, _refuse_mean)


def _refuse_mean() -> NoReturn:
    raise ValueError(
        "the loss that the model returned is a mean over all targets of the batch, without those that are ignored, or "
        "weighted by their classes, so how much an example weighs depends on the others. Take one loss for each "
        "example: find_example_losses(model)(batch).mean() for a model of transformers; or keep the labels out of the "
        "model and hand make_private a criterion=; or call engine.clipper.backward(losses) with losses of shape (B,), "
        "and loss_reduction='none'."
    )
