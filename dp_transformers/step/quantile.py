"""The share of examples that a clipping bound leaves as they are, released with noise in each step, for clipping that
follows a quantile of the norms (:class:`~dp_transformers.mechanism.clipping_functions.AdaptiveClipping`)."""

from __future__ import annotations

import torch

from ..clipping import PerExampleClipper
from ..mechanism.clipping_functions import AdaptiveClipping
from ..mechanism.mechanism import Mechanism
from ..noise.digits import round_digits
from ..noise.generators import Dither, GaussianNoise
from ..runtime import distributed

_STREAM = 0x5A4E5A4E  # tells its numbers from those of gradients where both have the same fixed seed


class NoisedShare:
    """Counts the examples of one draw after the other.

    An example adds ½ if it is no longer than the bound and -½ if it is, so that it moves the sum by ½, whichever it
    is.

    Args:
        clipper: The clipper of the model that is trained.
        dp_seed: Fixed seed for tests.
        secure: Whether noise comes from a cryptographic generator.
    """

    def __init__(self, clipper: PerExampleClipper, *, dp_seed: int | None = None, secure: bool = False):
        # the ranks of a tensor-parallel group work on the same examples, of which one counts them
        self._counts = not clipper.parallel or clipper.parallel.mesh.get_local_rank() == 0
        self._noise = GaussianNoise(secure=secure, entropy=None if dp_seed is None else [dp_seed, _STREAM])
        self._dither = Dither(secure=secure, entropy=[distributed.shared_secret(dp_seed), _STREAM])
        self._sum = torch.zeros(1, dtype=torch.float32, device=clipper.device)

    def begin_draw(self) -> None:
        """Forget what was counted of the draw before."""
        self._sum.zero_()

    def add(self, norms_b: torch.Tensor, bound: float) -> None:
        """Count the examples of a physical batch. One whose norm is not finite is longer than any bound."""
        if self._counts:
            self._sum += ((norms_b <= bound).to(self._sum) - 0.5).sum()

    def release(self, clipping: AdaptiveClipping, divisor: float) -> float:
        """Return the noised share, the same on every rank. All ranks call this after the step was counted."""
        if distributed.rank() == 0:
            self._noise.add_([self._sum], std=clipping.count_noise)
        distributed.sum_over_ranks([self._sum])
        self._dither.add_([self._sum], std=clipping.count_noise)
        round_digits([self._sum], clipping.count_noise)
        return 0.5 + float(self._sum) / divisor


def noised_share_of(
    mechanism: Mechanism, clipper: PerExampleClipper, *, dp_seed: int | None, secure: bool
) -> NoisedShare | None:
    """What releases the share that clipping follows; None where it follows none."""
    if not isinstance(mechanism.clipping, AdaptiveClipping):
        return None
    return NoisedShare(clipper, dp_seed=dp_seed, secure=secure)
