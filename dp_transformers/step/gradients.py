"""No optimizer steps with a gradient of a private parameter that was not released.

Clipped sums are never in ``p.grad`` (:class:`~dp_transformers.clipping.gradient_sums.GradientSums`); a release puts
noised gradients there, which say what noise they have. Whatever is done to those afterwards has no part in ε.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..clipping import PerExampleClipper
from ..noise.optimizers import is_noised


class ReleasedGradients:
    """Refuses every optimizer that would step with another gradient of the private parameters than a released one.

    Args:
        clipper: The clipper of the parameters.
        own_optimizer: The optimizer that releases when it steps (PrivacyEngine), after it was asked; None where the
            release comes before any optimizer steps (DPTrainer).
    """

    def __init__(self, clipper: PerExampleClipper, own_optimizer: torch.optim.Optimizer | None):
        self._clipper, self._own_optimizer = clipper, own_optimizer
        self._private = {id(p) for p in clipper.parameters}  # a set of tensors takes a call of Python for each
        self._handle = register_optimizer_step_pre_hook(partial(_before_any_step, weakref.ref(self)))

    def close(self) -> None:
        """Stop looking at optimizers."""
        self._handle.remove()

    def drop(self, *, released: bool = True) -> None:
        """Make the gradients of the private parameters None, which torch's optimizers leave as they are: all of them,
        or with ``released=False`` those without noise, as a release leaves them that was interrupted."""
        for p in self._clipper.parameters:
            if p.grad is not None and (released or not is_noised(p.grad)):
                p.grad = None

    def refuse_unreleased(self, optimizer: torch.optim.Optimizer, *, also_own: bool = False) -> None:
        """Raise ValueError if ``optimizer`` would step with a gradient of a private parameter that was not released.

        Args:
            also_own: Look at the optimizer that releases, too; its release came before.
        """
        if optimizer is self._own_optimizer and not also_own:
            return
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if id(p) in self._private and p.grad is not None and not is_noised(p.grad):
                name = next((name for name, q in self._clipper.model.named_parameters() if q is p), "?")
                raise ValueError(
                    f"{type(optimizer).__name__} would step with a gradient of '{name}' that has no noise: no private "
                    "step released it, or it is a copy. Change released gradients in place, put no others in "
                    "p.grad, and step in a loop of your own with the optimizer that make_private was given."
                )


def _before_any_step(
    reference: weakref.ref[ReleasedGradients], optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict
) -> None:
    """Hook of every optimizer: none steps with gradients that were not released."""
    gradients = reference()
    if gradients is not None:
        gradients.refuse_unreleased(optimizer)
