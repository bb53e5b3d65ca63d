"""The loss of a draw, released with noise of its own beside the gradient of the same draw.

An example adds its loss, clipped to a public range, to one more sum of the step. This sum and that of the gradients
are one Gaussian mechanism on one draw, whose ε :class:`~dp_transformers.mechanism.mechanism.Mechanism` computes from
the noise of both. Gradients, and the noise on them, are the same with and without it.
"""

from __future__ import annotations

import math

import torch

from ..clipping import PerExampleClipper
from ..mechanism.mechanism import Mechanism, Release
from ..noise.digits import round_digits
from ..noise.generators import Dither, GaussianNoise
from ..runtime import distributed

LOSS = "loss"  # the name of the release
_STREAM = 0x10551055  # tells its numbers from those of gradients where both have the same fixed seed


class PrivateLoss:
    """Adds up the bounded losses of a draw, and releases their noised mean.

    Args:
        release: The bound on a loss, and the noise.
        clipper: The clipper of the model that is trained.
        dp_seed: Fixed seed for tests.
        secure: Whether noise comes from a cryptographic generator.

    Example::

        >>> import torch
        >>> from dp_transformers import PerExampleClipper, Release
        >>> from dp_transformers.step.private_loss import PrivateLoss
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
        # the ranks of a tensor-parallel group work on the same examples, of which one counts them
        self._counts = not clipper.parallel or clipper.parallel.mesh.get_local_rank() == 0
        self._noise = GaussianNoise(secure=secure, entropy=None if dp_seed is None else [dp_seed, _STREAM])
        self._dither = Dither(secure=secure, entropy=[distributed.shared_secret(dp_seed), _STREAM])
        dtype = torch.float32 if clipper.device.type == "mps" else torch.float64
        self._sum = torch.zeros(1, dtype=dtype, device=clipper.device)

    def begin_draw(self) -> None:
        """Forget what was added of the draw before."""
        self._sum.zero_()

    def add(self, losses_b: torch.Tensor, weights_b: torch.Tensor | None = None) -> None:
        """Add the losses of a physical batch, times their weights in [0, 1]. One that is not a number adds nothing."""
        if not self._counts:
            return
        center, bound = self._release.center, self._release.bound
        added_b = torch.nan_to_num(losses_b.to(self._sum) - center, 0.0, math.inf, -math.inf).clamp(-bound, bound)
        self._sum += (added_b if weights_b is None else added_b * weights_b.to(added_b)).sum()

    def release(self, divisor: float) -> torch.Tensor:
        """Return the noised mean, of shape (), the same on every rank. All ranks call this after the step was
        counted."""
        if distributed.rank() == 0:
            self._noise.add_([self._sum], std=self._release.noise_std)
        distributed.sum_over_ranks([self._sum])
        self._dither.add_([self._sum], std=self._release.noise_std)
        round_digits([self._sum], self._release.noise_std)
        return (self._sum[0] / divisor + self._release.center).float()


def loss_release(mechanism: Mechanism) -> Release | None:
    """The release of the loss that a mechanism plans, if it plans one."""
    return next((release for release in mechanism.releases if release.name == LOSS), None)


def private_loss_of(
    mechanism: Mechanism, clipper: PerExampleClipper, *, dp_seed: int | None, secure: bool
) -> PrivateLoss | None:
    """What releases the loss as a mechanism plans it; None where it does not."""
    release = loss_release(mechanism)
    return None if release is None else PrivateLoss(release, clipper, dp_seed=dp_seed, secure=secure)
