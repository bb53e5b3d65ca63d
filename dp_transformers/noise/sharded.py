"""Noise for gradients that may be DTensors: one generator for each device mesh and its placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..clipping import PerExampleClipper
from ..clipping.parallel.dtensor import is_dtensor, to_local
from ..mechanism.noise import NoiseSource
from ..runtime import distributed
from .generators import GaussianNoise, check_noise_source


class ShardedNoise:
    """:class:`~dp_transformers.noise.generators.GaussianNoise`, or another ``stream``, for the gradients of
    ``clipper.parameters``, which may be DTensors.

    Parameters with the same device mesh and placements share one random stream. Ranks that hold different shards of a
    parameter add independent noise to them; ranks that hold replicas of a shard add the same noise. All ranks must
    construct it together.

    Args:
        clipper: The clipper of the model on this rank.
        dp_seed, secure: As in ``GaussianNoise``.
        warn: Warn that noise with a ``dp_seed`` is not private; False if the caller has warned already.
        stream: Makes the source of one random stream from ``secure`` and ``entropy``.
        same: Add the same numbers on ranks that each hold a whole sum.
    """

    is_dithered = True  # see NoiseSource

    def __init__(
        self,
        clipper: PerExampleClipper,
        *,
        dp_seed: int | None = None,
        secure: bool = False,
        warn: bool = True,
        stream: Callable[..., NoiseSource] = GaussianNoise,
        same: bool = False,
    ):
        if warn:
            check_noise_source(dp_seed=dp_seed, secure=secure)
        self._streams: dict[object, NoiseSource] = {}
        self._placements = [(p.device_mesh, p.placements) if is_dtensor(p) else None for p in clipper.parameters]
        for p, key in zip(clipper.parameters, self._placements, strict=True):
            if key not in self._streams:
                replicas = None if is_dtensor(clipper.shards.unsharded(p)) else clipper.parallel.group
                entropy = distributed.noise_entropy(p, dp_seed, layout=len(self._streams), replicas=replicas)
                if entropy is None and (same or dp_seed is not None):
                    entropy = [distributed.shared_secret(dp_seed)]
                self._streams[key] = stream(secure=secure, entropy=entropy)

    def add_(self, grads: Sequence[torch.Tensor], std: float) -> None:
        """Add noise of standard deviation ``std`` to this rank's shards of the gradients, in the order of the
        parameters."""
        for key, stream in self._streams.items():
            shards = [to_local(grad) for grad, at in zip(grads, self._placements, strict=True) if at == key]
            stream.add_(shards, std)
