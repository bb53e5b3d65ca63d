"""Numbers that a step releases beside its gradient: the mean loss of a draw, and the share of its examples that the
clipping bound leaves as they are.

An example adds a bounded number to a sum of its own. This sum and that of the gradients are one Gaussian mechanism on
one draw, whose ε :class:`~dp_transformers.mechanism.mechanism.Mechanism` computes from the noise of both. Gradients,
and the noise on them, are the same with and without it.
"""

from __future__ import annotations

import math

import torch

from ..clipping import PerExampleClipper
from ..mechanism.clipping_functions import AdaptiveClipping
from ..mechanism.mechanism import Mechanism, Release
from ..noise.generators import Dither, GaussianNoise, round_digits
from ..runtime import distributed

LOSS = "loss"  # the name of the release


class NoisedSum:
    """Sums one number of each example of a draw, and adds noise.

    Args:
        clipper: The clipper of the model that is trained.
        stream: Tells the numbers of this noise from those of other noise where both have the same fixed seed.
        dtype: The dtype of the sum.
        dp_seed: Fixed seed for tests.
        secure: Whether noise comes from a cryptographic generator.
    """

    def __init__(
        self, clipper: PerExampleClipper, stream: int, dtype: torch.dtype, *, dp_seed: int | None, secure: bool
    ):
        # the ranks of a tensor-parallel group work on the same examples, of which one counts them
        self._counts = not clipper.parallel or clipper.parallel.mesh.get_local_rank() == 0
        self._noise = GaussianNoise(secure=secure, entropy=None if dp_seed is None else [dp_seed, stream])
        self._dither = Dither(secure=secure, entropy=[distributed.shared_secret(dp_seed), stream])
        self._sum = torch.zeros(1, dtype=dtype, device=clipper.device)

    def begin_draw(self) -> None:
        """Forget what was added of the draw before."""
        self._sum.zero_()

    def _noised(self, std: float) -> torch.Tensor:
        """Return the sum over all ranks with noise, of shape (1,), the same on every rank. All ranks call this after
        the step was counted."""
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
        dtype = torch.float32 if clipper.device.type == "mps" else torch.float64
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

    An example adds ½ if it is no longer than the bound and -½ if it is, so that it moves the sum by ½, whichever it
    is.
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
    """Return the release of the loss that a mechanism plans; None where it plans none."""
    return next((release for release in mechanism.releases if release.name == LOSS), None)
