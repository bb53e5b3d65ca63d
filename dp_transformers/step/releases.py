"""What a step releases: gradients with noise, the mean loss of a draw, and the share of its examples that the clipping
bound does not shorten.

Clipped sums are never in ``p.grad`` (:class:`~dp_transformers.clipping.gradient_sums.GradientSums`). A release puts
noised gradients there, marked with the variance of their noise, and no optimizer steps with others. Whatever is done
to released gradients afterwards has no part in ε.

To the further sums an example adds a bounded number. They and the sum of gradients are one Gaussian mechanism on one
draw, whose ε :class:`~dp_transformers.mechanism.mechanism.Mechanism` computes from the noise of all. Gradients, and
the noise on them, are the same with and without them.
"""

from __future__ import annotations

import math
import weakref
from functools import partial

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..clipping import PerExampleClipper
from ..mechanism.clipping_functions import AdaptiveClipping
from ..mechanism.mechanism import Mechanism, Release
from ..noise.generators import Dither, GaussianNoise, round_digits
from ..noise.optimizers import is_noised
from ..runtime import distributed

LOSS = "loss"  # the name of its release


class NoisedSum:
    """Sums one number of each example of a draw, and adds noise.

    Args:
        clipper: The clipper of the model that is trained.
        stream: A number that makes this noise differ from other noise of the same fixed seed.
        dtype: The dtype of the sum.
        dp_seed: Fixed seed for tests.
        secure: True to draw noise from a cryptographic generator.
    """

    def __init__(
        self, clipper: PerExampleClipper, stream: int, dtype: torch.dtype, *, dp_seed: int | None, secure: bool
    ):
        # the ranks of a tensor-parallel group work on the same examples, of which one counts them
        self._counts = not clipper.trainable.parallel or clipper.trainable.parallel.mesh.get_local_rank() == 0
        self._noise = GaussianNoise(secure=secure, entropy=None if dp_seed is None else [dp_seed, stream])
        self._dither = Dither(secure=secure, entropy=[distributed.shared_secret(dp_seed), stream])
        self._sum = torch.zeros(1, dtype=dtype, device=clipper.trainable.device)

    def begin_draw(self) -> None:
        """Begin with a sum of 0."""
        self._sum.zero_()

    def _noised(self, std: float) -> torch.Tensor:
        """Return the noised sum over all ranks, of shape (1,), the same on every rank. All ranks call this after the
        step was counted."""
        if distributed.rank() == 0:
            self._noise.add_([self._sum], std=std)
        distributed.sum_over_ranks([self._sum])
        self._dither.add_([self._sum], std=std)
        round_digits([self._sum], std)
        return self._sum


class PrivateLoss(NoisedSum):
    """Adds up the bounded losses of a draw, and releases their noised mean.

    Args:
        release: The bound on a loss, and the noise.

    Example::

        >>> import torch
        >>> from dp_transformers import PerExampleClipper, Release
        >>> from dp_transformers.step.releases import PrivateLoss
        >>> clipper = PerExampleClipper(torch.nn.Linear(3, 2), 1.0)
        >>> loss = PrivateLoss(Release.within("loss", 0.0, 4.0, noise_multiplier=5.0), clipper, dp_seed=None)
        >>> loss.add(torch.tensor([0.5, 0.7, 9.0]))  # the last counts as 4
        >>> loss.release(divisor=3.0).shape  # (0.5 + 0.7 + 4) / 3, and noise of 5 · 2 / 3
        torch.Size([])
    """

    def __init__(
        self, release: Release, clipper: PerExampleClipper, *, dp_seed: int | None = None, secure: bool = False
    ):
        self._release = release
        dtype = torch.float32 if clipper.trainable.device.type == "mps" else torch.float64
        super().__init__(clipper, 0x10551055, dtype, dp_seed=dp_seed, secure=secure)

    def add(self, losses_b: torch.Tensor, weights_b: torch.Tensor | None = None) -> None:
        """Add the losses of a physical batch, times their weights in [0, 1]. One that is not a number adds nothing."""
        if not self._counts:
            return
        center, bound = self._release.center, self._release.bound
        added_b = torch.nan_to_num(losses_b.to(self._sum) - center, 0.0, math.inf, -math.inf).clamp(-bound, bound)
        self._sum += (added_b if weights_b is None else added_b * weights_b.to(added_b)).sum()

    def release(self, divisor: float) -> torch.Tensor:
        """Return the noised mean, of shape (), the same on every rank."""
        return (self._noised(self._release.noise_std)[0] / divisor + self._release.center).float()


class NoisedShare(NoisedSum):
    """Counts the examples that a clipping bound leaves as they are, for clipping that follows a quantile of the norms
    (:class:`~dp_transformers.mechanism.clipping_functions.AdaptiveClipping`).

    An example adds ½ if its norm is within the bound and -½ if not, so that it moves the sum by ½ in both cases.
    """

    def __init__(self, clipper: PerExampleClipper, *, dp_seed: int | None = None, secure: bool = False):
        super().__init__(clipper, 0x5A4E5A4E, torch.float32, dp_seed=dp_seed, secure=secure)

    def add(self, norms_b: torch.Tensor, bound: float) -> None:
        """Count the examples of a physical batch. One whose norm is not finite is longer than any bound."""
        if self._counts:
            self._sum += ((norms_b <= bound).to(self._sum) - 0.5).sum()

    def release(self, clipping: AdaptiveClipping, divisor: float) -> float:
        """Return the noised share, the same on every rank."""
        return 0.5 + float(self._noised(clipping.count_noise)) / divisor


def loss_release(mechanism: Mechanism) -> Release | None:
    """Return the release of the loss that a mechanism plans; None if it plans none.

    Raises:
        ValueError: the mechanism plans releases that no step does.
    """
    if [release.name for release in mechanism.releases] not in ([], [LOSS]):
        raise ValueError(
            f"besides the gradient a step releases {LOSS!r} and nothing else, each once, but the mechanism plans "
            f"{[release.name for release in mechanism.releases]}: take these out of releases."
        )
    return next(iter(mechanism.releases), None)


class ReleasedGradients:
    """Refuses every optimizer that would step with another gradient of the private parameters than a released one.

    Args:
        clipper: The clipper of the parameters.
        own_optimizer: The optimizer that releases when it steps (PrivacyEngine); None if the release comes before any
            optimizer steps (DPTrainer).
    """

    def __init__(self, clipper: PerExampleClipper, own_optimizer: torch.optim.Optimizer | None):
        self._clipper, self._own_optimizer = clipper, own_optimizer
        self._private = {id(p) for p in clipper.parameters}  # a set of tensors takes a call of Python for each
        self._handle = register_optimizer_step_pre_hook(partial(_before_any_step, weakref.ref(self)))

    def close(self) -> None:
        """Let optimizers step with any gradients again."""
        self._handle.remove()

    def drop(self, *, released: bool = True) -> None:
        """Set the gradients of the private parameters to None: all of them, or with ``released=False`` those without
        noise, which an interrupted release leaves."""
        for p in self._clipper.parameters:
            if p.grad is not None and (released or not is_noised(p.grad)):
                p.grad = None

    def refuse_unreleased(self, optimizer: torch.optim.Optimizer, *, also_own: bool = False) -> None:
        """Raise ValueError if ``optimizer`` would step with a gradient of a private parameter that was not released.

        Args:
            also_own: True to refuse the optimizer that releases, too, after its release.
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
    """Run before every step of every optimizer."""
    gradients = reference()
    if gradients is not None:
        gradients.refuse_unreleased(optimizer)
