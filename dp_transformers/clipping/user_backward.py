"""Clipping inside a ``loss.backward()`` that the user calls.

That call's backward pass fills the probe. The parameters ask for no gradient while their modules run
(:class:`.hooks.HookedModel`), so autograd computes no unclipped weight gradient at all, and the clipped sum is in
``p.grad`` when ``backward`` returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from .coefficients import coefficients
from .engine import ClippingEngine
from .factors import Factor, FactorsOfDraws
from .graph import leaves_of_losses, low_precision_of_one_number, nodes_of_losses
from .means import LossMeans
from .precision import HALF, without_autocast
from .recorded_call import BackwardPass, ForwardPass, differentiable_leaves, is_differentiable
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
        self._is_going = False  # a backward pass that the user asked for
        self._factors = FactorsOfDraws(of_means=loss_reduction == "mean")

    def begin_draw(self) -> None:
        """A physical batch is the first of its draw."""
        self._factors.begin_draw()

    @contextlib.contextmanager
    def during_backward(self, roots: Sequence[Any], gradients: Sequence[Any]) -> Iterator[int | None]:
        """A backward pass of the user's, from ``roots``, which begins with these ``gradients``. That of a mean begins
        with B: 1/B is rounded wherever gradients have few digits, to another number for a batch of another size, and
        so would be the gradients of all examples. Gradients of what is no part of the model (its input, a temperature
        of the loop) are the mean's.

        Raises:
            ValueError: a mean was formed in low precision.
        """
        forward = self._engine.forward
        if self._is_going or forward is None or forward.on_backward is None:
            yield None
            return
        beginnings = [getattr(root, "grad_fn", None) for root in roots]
        nodes = nodes_of_losses(beginnings, TAPS)
        if not any(type(node) in TAPS and node.call.forward is forward for node in nodes):
            yield None
            return
        self._is_going = True
        try:
            if forward.batch_size:
                self._look_at_loss(nodes, beginnings, gradients, forward)
            if self._loss_reduction != "mean":
                yield 1
                return
            with _divided(leaves_of_losses(beginnings) - {forward.probe, *forward.earlier_probes}, forward.batch_size):
                yield forward.batch_size
        finally:
            self._is_going = False

    def _look_at_loss(
        self, nodes: list[Any], roots: list[Any], gradients: Sequence[Any], forward: ForwardPass
    ) -> None:
        """Refuse a loss in which the examples' weights depend on each other, before anything is released."""
        means = LossMeans(nodes, TAPS, forward.batch_size, 0 if self._engine.batch_first else 1)
        factors = [*means.factors(roots, gradients)]
        self._look_at_factors([each for each in factors if each is not None], forward)
        if forward.batch_size == 1:  # the weight of one example is no matter of others, and its 1/B is exact
            return
        refused = {_refuse_hidden: means.is_hidden, _refuse_nonlinear: None in factors}
        if self._loss_reduction == "mean":
            self._refuse_low_precision(nodes)
            refused[_refuse_mean] = any(number % forward.batch_size for number in means.numbers())
            refused[_refuse_sum] = any(each is not None and each.is_sum and each.is_none for each in factors)
            for weights_b in means.weights():
                are_equal = torch.isclose(weights_b, weights_b[:1], rtol=1e-4).all()
                forward.conditions.expect(are_equal, _refuse_mean)
        else:
            refused[_refuse_mean_as_sum] = any(True for _ in means.numbers())
        for refuse in (refuse for refuse, is_refused in refused.items() if is_refused):
            forward.conditions.expect(torch.zeros((), device=forward.probe.device), refuse)

    def _refuse_low_precision(self, nodes: list[Any]) -> None:
        if (dtype := low_precision_of_one_number(nodes)) is not None:
            self._engine.forget()
            raise ValueError(
                f"the mean over the batch is formed in {dtype}, where 1/B is rounded, so that the gradients of all "
                "examples would change with the number of others. Compute the loss in float32 "
                "(criterion(outputs.float(), targets)), hand make_private the criterion=, or take "
                'loss_reduction="sum" and sums.'
            )

    def _look_at_factors(self, factors: list[Factor], forward: ForwardPass) -> None:
        """Refuse other weights of examples than in another batch of the draw, and those that follow its size."""
        if self._factors.follow_size(factors, forward.batch_size):
            forward.conditions.expect(torch.zeros((), device=forward.probe.device), _refuse_factor_of_size)
        for same in self._factors.are_same(factors, forward.batch_size):
            if same.device == forward.probe.device or not same:  # what lies on the CPU is known without waiting
                forward.conditions.expect(same.to(forward.probe.device), _refuse_other_factor)

    def in_float32(self, output: Any) -> Any:
        """What the model returned, for a loop that forms a mean of it."""
        if self._loss_reduction != "mean" or not any(x.dtype in HALF for x in differentiable_leaves(output)):
            return None
        return tree_map(lambda x: x.float() if is_differentiable(x) and x.dtype in HALF else x, output)

    def begin(self, forward: ForwardPass) -> None:
        """The first tap was reached."""
        engine = self._engine
        if not self._is_going:
            engine.forget()
            _refuse_other_ways()
        assert engine.loop is not None, "a loop of the user's is followed for a training"
        weights_b, clipping, sums = engine.loop.begin_sum(forward.batch_size)
        clip = partial(coefficients, weights_b=None if weights_b is None else weights_b.to(forward.probe))
        groups = engine.groups_of(clipping)
        backward = engine.mode.begin(forward, groups, clip, sums, None, engine.plan(forward, groups))
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
                _refuse_other_ways()
            with without_autocast(device), torch.no_grad():
                engine.norms_b = backward.finish()
                self._look(forward)
        finally:
            engine.forget()
        engine.state.expect_unchanged()
        assert engine.loop is not None, "a loop of the user's is followed for a training"
        engine.loop.end_sum()


@contextlib.contextmanager
def _divided(leaves: Iterable[torch.Tensor], divisor: int) -> Iterator[None]:
    """Inside, autograd divides what it adds to the gradients of these leaves."""
    handles = [leaf.register_hook(lambda gradient: gradient / divisor) for leaf in leaves] if divisor > 1 else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_other_ways() -> NoReturn:
    raise ValueError(
        "the model's outputs were differentiated by something else than loss.backward() (torch.autograd.grad, or "
        "inputs=..., or a function that was there before the model was made private), so no gradient was clipped. Do "
        "that on a deepcopy of the model, which has no clipper."
    )


def _refuse_mean() -> NoReturn:
    raise ValueError(
        "the loss is a mean over all targets of the batch, without those that are ignored or left out, or weighted by "
        "their classes, so how much an example weighs depends on the others. Take one loss for each example: "
        "find_example_losses(model)(batch).mean() for a model of transformers, or hand make_private a criterion= and "
        "keep the labels out of the model, or call engine.clipper.backward(losses) with losses of shape (B,), and "
        "loss_reduction='none'."
    )


def _refuse_hidden() -> NoReturn:
    raise ValueError(
        "the loss is one number that a compiled function, or a torch.autograd.Function, makes of the whole batch, so "
        "whether it is a mean over examples, or a sum, cannot be seen. Leave the loss uncompiled, have the function "
        "return one loss for each example and reduce them outside of it, or hand make_private a criterion= or call "
        "engine.clipper.backward(losses) with losses of shape (B,), and loss_reduction='none'."
    )


def _refuse_sum() -> NoReturn:
    raise ValueError(
        "the loss is a sum over the batch and is divided by nothing, but loss_reduction is 'mean', so that the "
        "gradient of each example would grow with the number of others. Hand make_private loss_reduction='sum', or "
        "take the mean."
    )


def _refuse_mean_as_sum() -> NoReturn:
    raise ValueError(
        "the loss is a mean over the batch, but loss_reduction is 'sum', so that the gradient of each example would "
        "shrink with the number of others. Hand make_private loss_reduction='mean', which is the default, or take the "
        "sum."
    )


def _refuse_nonlinear() -> NoReturn:
    raise ValueError(
        "the loss is not a multiple of a mean, or of a sum, over examples, but another function of it (a root, a "
        "power, an exponential, a limit, a norm, a maximum), so that how much an example weighs depends on the losses "
        "of the others. Apply that to the loss of each example and take the mean afterwards, or leave it out of what "
        "goes backward; hand make_private a criterion=, or call engine.clipper.backward(losses) with losses of shape "
        "(B,), and loss_reduction='none'."
    )


def _refuse_factor_of_size() -> NoReturn:
    raise ValueError(
        "in three batches the weight of an example in the loss was as large as the number of examples, or its "
        "inverse: a sum under loss_reduction='mean', or a count of the loop (len(x)), so that the gradient of each "
        "example follows how many others are drawn. Take the mean under loss_reduction='mean' or the sum under 'sum', "
        "and leave out what corrects for the size of the batch: the sum of a draw is divided by its expected size. "
        "The steps until now had no valid epsilon: begin again from the original model."
    )


def _refuse_other_factor() -> NoReturn:
    raise ValueError(
        "the loss is multiplied, or divided, by another number than in another physical batch of the same draw, so "
        "that how much an example weighs depends on which others are beside it, or on how many. Leave out what "
        "corrects for the sizes of batches: the sum of a draw is divided by its expected size, whatever a physical "
        "batch holds."
    )
