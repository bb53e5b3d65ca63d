"""What ``p.grad`` of the private parameters holds in the course of a draw: clipped sums first, then what was released.

Noise is added to what was clipped, and optimizers step with what was released. A loop can reach ``p.grad`` in between,
so :class:`PrivateGradients` compares both times.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..clipping import PerExampleClipper
from ..clipping.parallel.dtensor import to_local
from ..clipping.precision import set_gradient


class PrivateGradients:
    """Keeps the clipped sum of a draw between its batches, and refuses every optimizer that would step with a gradient
    that was not released.

    Args:
        clipper: It adds the clipped sum of each batch to ``p.grad`` of its parameters.
        own_optimizer: The optimizer that releases when it steps (PrivacyEngine). It is looked at after that; None
            where the release comes before any optimizer steps (DPTrainer).
    """

    def __init__(self, clipper: PerExampleClipper, own_optimizer: torch.optim.Optimizer | None):
        self._clipper, self._own_optimizer = clipper, own_optimizer
        self._private = frozenset(clipper.parameters)
        self._sums: dict[nn.Parameter, torch.Tensor] = {}  # the clipped sum of the draw so far
        self._are_shown = False  # whether a loop of the user's sees the sums in p.grad
        self._checksums: torch.Tensor | None = None  # of the sums, while they are shown
        self._released: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}  # what was released, with its version
        self._handle = register_optimizer_step_pre_hook(partial(_before_any_step, weakref.ref(self)))

    def close(self) -> None:
        """Stop looking at optimizers."""
        self._handle.remove()

    def begin_draw(self) -> None:
        """Forget the draw before: its sums, and what was released of it."""
        self._forget_sums()
        self._released = {}

    def drop(self) -> None:
        """Drop the sums of the draw so far, so that nobody steps with them."""
        for p in self._clipper.parameters:
            if p.grad is not None and not self._is_released(p, p.grad):
                p.grad = None
        self._forget_sums()

    def _forget_sums(self) -> None:
        self._sums, self._are_shown, self._checksums = {}, False, None

    # ---- clipped sums ----

    def restore_sums(self) -> None:
        """Put the sum so far in ``p.grad``, and expect that it is what was clipped."""
        if self._checksums is not None:
            same = (self._checksums == _checksums(self._sums.values())).all()
            self._clipper.conditions.expect(same, _refuse_overwritten_sum)
        for p in self._clipper.parameters:
            set_gradient(p, self._sums.get(p))

    def keep_sums(self, *, show: bool) -> None:
        """Keep the sum that was added to ``p.grad``, and leave it there only if ``show`` is set."""
        self._sums = {p: p.grad for p in self._clipper.parameters if p.grad is not None}
        self._are_shown = show
        if show:
            self._checksums = _checksums(self._sums.values())
        else:
            for p in self._clipper.parameters:
                p.grad = None  # torch's optimizers leave such parameters, and their state, as they are

    def require_not_replaced(self) -> None:
        """Raise ValueError if ``p.grad`` is not what :meth:`keep_sums` left there."""
        if any(p.grad is not (self._sums.get(p) if self._are_shown else None) for p in self._clipper.parameters):
            raise ValueError(
                "a gradient was replaced between backward() and optimizer.step(). Noise is added in step() to the sum "
                "that was clipped: call zero_grad() before backward(), and drop further clipping, scaling or "
                "averaging of gradients."
            )

    # ---- released gradients ----

    def mark_released(self) -> None:
        """Remember that ``p.grad`` now holds what was released."""
        gradients = {p: p.grad for p in self._clipper.parameters if p.grad is not None}
        self._released = {p: (grad, to_local(grad)._version) for p, grad in gradients.items()}
        self._forget_sums()

    def _is_released(self, p: nn.Parameter, grad: torch.Tensor) -> bool:
        released, version = self._released.get(p, (None, None))
        return grad is released and to_local(grad)._version == version

    def refuse_unreleased(self, optimizer: torch.optim.Optimizer, *, also_own: bool = False) -> None:
        """Raise ValueError if ``optimizer`` would step with a gradient of a private parameter that was not released.

        Args:
            also_own: Look at the optimizer that releases, too; its release came before.
        """
        if optimizer is self._own_optimizer and not also_own:
            return
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p in self._private and p.grad is not None and not self._is_released(p, p.grad):
                name = next((name for name, q in self._clipper.model.named_parameters() if q is p), "?")
                raise ValueError(
                    f"{type(optimizer).__name__} would step with a gradient of '{name}' that has no noise yet, or was "
                    "changed after it got it. It must come from this training's private step: leave gradients alone "
                    "between training_step and optimizer.step(); in a loop of your own, step with the optimizer that "
                    "make_private was given."
                )


def _refuse_overwritten_sum() -> None:
    raise ValueError(
        "the gradient sum of an unfinished draw was overwritten in place, but noise must be added to the sum that was "
        "clipped. Clear gradients with optimizer.zero_grad(set_to_none=True), and let nothing write to p.grad before "
        "optimizer.step(): no clip_grad_norm_, no GradScaler (bf16 needs none), nor .data, .numpy() or a view. If a "
        "backward pass or a step was interrupted, call engine.drop_draw(), which counts the draw as a step, and take "
        "the next batch."
    )


def _before_any_step(
    reference: weakref.ref[PrivateGradients], optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict
) -> None:
    """Hook of every optimizer: none steps with gradients that were not released."""
    gradients = reference()
    if gradients is not None:
        gradients.refuse_unreleased(optimizer)


def _checksums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a number for each tensor that changes when its content does, whatever was used to write it."""
    sums = [_sum_of_bits(to_local(x.detach())) for x in tensors]
    return torch.stack([each.to(sums[0].device) for each in sums]) if sums else torch.empty(0)


def _sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Add up the bits, read as whole numbers: eight bytes at a time where their alignment allows it, which is seven
    times as fast."""
    x = x.reshape(-1)
    if x.dtype == torch.float32 and (x.numel() % 2 or x.storage_offset() % 2):
        return x.view(torch.int32).sum()
    return x.view(torch.int64).sum()
