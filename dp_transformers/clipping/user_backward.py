"""Clipping inside a ``loss.backward()`` that the user calls.

That call's backward pass fills the probe. The parameters ask for no gradient while their modules run
(:class:`.hooks.HookedModel`), so autograd computes no unclipped weight gradient at all, and the clipped sum is in
``p.grad`` when ``backward`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import cast

import torch
from torch import nn

from .clipping_functions import ClippingFunction
from .coefficients import Coefficients, coefficients
from .engine import ClippingEngine
from .modes import KeptTerms
from .precision import exact_arithmetic, without_autocast
from .recorded_call import BackwardPass, ForwardPass

Sums = Mapping[nn.Parameter, torch.Tensor]
FindEscape = Callable[[Sums, Sums, ForwardPass], nn.Parameter | None]


class UserBackward:
    """Forms the clipped sum at the end of the user's backward pass.

    Args:
        engine: Records the calls.
        loss_reduction: "mean" or "sum": how the user's loss comes from the examples' losses.
        find_escape: ``f(native, own, forward)``, from the sums of gradients that autograd formed and those of the
            terms that taps saw, by parameter: one whose sums differ, or None.

    Raises:
        ValueError: the mode goes back over the losses itself, or the model is sharded.
    """

    def __init__(self, engine: ClippingEngine, loss_reduction: str, find_escape: FindEscape):
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
        self._engine, self._loss_reduction, self._find_escape = engine, loss_reduction, find_escape

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
        grads = [(p, p.grad) for p in engine.trainable.parameters] if forward.shows_parameters else []
        for p, _ in grads:
            p.grad = None
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, forward, backward, grads))

    def _finish(
        self, forward: ForwardPass, backward: BackwardPass, grads: Sequence[tuple[nn.Parameter, torch.Tensor | None]]
    ) -> None:
        """The end of ``loss.backward()``."""
        engine, device = self._engine, forward.probe.device
        native = {p: p.grad for p, _ in grads if p.grad is not None}
        for p, grad in grads:
            p.grad = grad
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
                if native:
                    self._refuse_escapes(forward, cast(KeptTerms, backward), native)
                engine.norms_b = backward.finish()
        finally:
            engine.forget()
        engine.end_sum()

    def _refuse_escapes(self, forward: ForwardPass, backward: KeptTerms, native: Sums) -> None:
        """Compare with what autograd summed. A parameter that it gave none has all its gradient from taps: the rule
        spared autograd the way, or copies of the parameter were tapped.

        Raises:
            ValueError: a part of a gradient left its module another way than by what the module returned.
        """
        backward.close_all()
        with exact_arithmetic(forward.probe.device):
            own = {p: total for p in native if (total := backward.unclipped_sum(p)) is not None}
        if (parameter := self._find_escape(native, own, forward)) is not None:
            self._engine.refuse_escape(parameter)
