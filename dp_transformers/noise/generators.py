"""The Gaussian mechanism: noise in fp32, from a generator that only the operating system seeds; its last digits; and
noise for gradients that are DTensors.

``args.seed`` seeds initialisation and is written into every run's configuration. Knowing it must not help to draw the
noise again and subtract it. So noise never comes from the global generators of torch or numpy.

**Digits.** The Gaussian mechanism is proven private for real numbers. A float32 number has 24 binary digits, so noise
z is a multiple of 2⁻²³ of a power of two below |z|. A sum s + z may be much smaller than z. It then has finer digits
than z, which are digits of s: they reveal s whatever the noise is (Haney et al. 2022, arXiv 2207.13793). Two numbers
made from one radius and angle take only few of the possible pairs of values, which reveals s as well (Holohan and
Braghin 2021, arXiv 2107.10138). Two steps prevent both:

- The sum of all ranks with its noise is dithered: a uniform number u is added, of width ``DITHER`` times the standard
  deviation, in 2³² steps. Within this width lie 2¹⁵ of the values of z near one standard deviation, and 2¹² near
  eight, and the steps of u are much finer than the released digits. u adds 1.3 · 10⁻⁶ to the variance of z. All ranks
  draw the same u for the same sum, from a shared secret.
- The released number is rounded to multiples of ``step(std)``, the digits of a float32 as large as the noise. So a
  small sum has no finer digits, not even in float64.

Nothing is added to a sum afterwards. Adding independent numbers and rounding are post-processing of a sum with noise
z, and cost no privacy. This is not a proof for floats: at the rounded digits, z + u has the probabilities of real
noise to about 2⁻¹⁶.
"""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from ..clipping import PerExampleClipper
from ..clipping.parallel.dtensor import is_dtensor, to_local
from ..mechanism.keystream import chacha20
from ..mechanism.noise import NoiseSource
from ..runtime import distributed

DITHER = 2.0**-8  # width of the uniform numbers, over the standard deviation of the noise
_DIGITS = 24  # binary digits that are kept of the standard deviation of the noise
_SMALLEST = 2.0**-90  # smaller steps are not rounded to, because float32 could not hold the quotients


def step(std: float) -> float:
    """Return the distance between two released numbers with noise of this standard deviation: a power of two, so that
    division and multiplication are exact, between 2⁻²⁵ and 2⁻²⁴ of ``std``."""
    return 2.0 ** (math.frexp(std)[1] - 1 - _DIGITS)


def round_digits(tensors: list[torch.Tensor], std: float) -> None:
    """Round tensors in place to multiples of ``step(std)``. Nothing is rounded if ``std`` is 0 or below 10⁻²⁰."""
    if std and (power := step(std)) >= _SMALLEST:
        torch._foreach_div_(tensors, power)
        torch._foreach_round_(tensors)
        torch._foreach_mul_(tensors, power)


Bits = Callable[[int], torch.Tensor]  # (count,) random int64 numbers
_CHUNK = 2**16  # numbers computed at once, and drawn at once for several tensors
_PIECE = 2**22  # numbers drawn for a tensor before they are added, a multiple of _CHUNK
_DITHER_STREAM = 2**63 + 1  # separates dither from normal numbers of the same entropy; not the number of a step
_SUMMED = 4  # draws that are summed to one number of secure noise


class GaussianNoise:
    """Independent N(0, std²) noise for tensors on any device.

    On the CPU, numbers come from numpy's PCG64 with 128 bits from the operating system (torch's CPU generator keeps
    only 32 bits of its seed, few enough to try them all). On other devices they come from torch's counter-based
    generator with a 64-bit key from the operating system. With ``secure`` they come from the keystream of ChaCha20
    (extra ``secure``) on every device, and each is the sum of four draws, halved.

    ``secure`` claims that the random bits cannot be predicted, or distinguished from uniform bits, without the key, as
    far as ChaCha20 holds. It does not claim that sums of floating-point numbers with this noise are as private as sums
    of real numbers. A number has 24 bits, as have its radius and angle before, so a single draw can be recognised by
    the values that it takes (Mironov 2012; Jin et al. 2021, arXiv 2112.05307). Summing four makes it costly to find
    the draws of a number (Holohan and Braghin 2021, arXiv 2107.10138, with n = 2), which is not a proof. For the last
    digits of results see :mod:`~dp_transformers.noise.generators`.

    Args:
        dp_seed: Fixed seed for tests. Anyone who knows it can subtract the noise, so the run is not private.
        secure: Use the cryptographic generator.
        entropy: Seeds the generators instead of the operating system, for ranks that must add equal noise
            (:func:`dp_transformers.runtime.distributed.noise_entropy`). It is as secret as the noise.

    Raises:
        ImportError: ``secure`` without the ``cryptography`` package.
        ValueError: ``secure`` with ``dp_seed``.
    """

    def __init__(self, *, dp_seed: int | None = None, secure: bool = False, entropy: Sequence[int] | None = None):
        check_noise_source(dp_seed=dp_seed, secure=secure)
        if entropy is None:
            entropy = [secrets.randbits(256) if dp_seed is None else dp_seed]
        self._entropy = list(entropy)
        self._generators: dict[torch.device, torch.Generator] = {}
        self._is_secure, self._process = secure, os.getpid()
        self._bits = (_chacha20 if secure else _pcg64)(self._entropy)

    def __getstate__(self) -> None:
        raise TypeError(
            "GaussianNoise can be neither copied nor pickled: its state would allow to subtract the noise, and a copy "
            "would add the same noise twice. Make a new one where it is needed; to save a training, use "
            "save_checkpoint of PrivacyEngine or the checkpoints of DPTrainer."
        )

    def add_(self, tensors: Iterable[torch.Tensor], std: float) -> None:
        """Add independent noise of standard deviation ``std`` to float32 or float64 tensors in place. ``std`` 0 draws
        nothing.

        Raises:
            RuntimeError: this process was forked from the one that made the object.
            TypeError: a tensor has lower precision.
        """
        if std == 0:
            return
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked from the one that made the noise, and would draw the same numbers: call "
                "train() or make_private (or make GaussianNoise) in the process that trains."
            )
        tensors = list(tensors)
        for tensor in tensors:
            if tensor.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"noise is added in float32 before any cast to a lower precision, not to {tensor.dtype}: give "
                    "float32 sums."
                )
        for group in _groups(piece for tensor in tensors for piece in _pieces(tensor)):
            numbers = self._numbers(sum(map(torch.numel, group)), group[0].device).to(group[0].dtype)
            torch._foreach_add_(group, torch._utils._unflatten_dense_tensors(numbers, group), alpha=std)
            del numbers  # frees memory for the next group

    def of_step(self, step: int) -> GaussianNoise:
        """Return a source with the same secret for one step, so that its numbers can be drawn again."""
        # step + 1, since a 0 at the end of the entropy has no effect
        again = GaussianNoise(secure=self._is_secure, entropy=[*self._entropy, step + 1])
        again._process = self._process
        return again

    def _numbers(self, count: int, device: torch.device) -> torch.Tensor:
        """Return (count,) numbers, which are multiplied by a standard deviation and added."""
        if self._is_secure:
            return summed_normal(self._bits, count).to(device)
        if device.type == "cpu":
            return standard_normal(self._bits, count)
        return torch.randn(count, generator=self._generator(device), device=device, dtype=torch.float32)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            # the number differs between devices of one process, and is equal on ranks that must add equal noise
            state = np.random.SeedSequence([*self._entropy, len(self._generators)]).generate_state(1, np.uint64)
            self._generators[device] = torch.Generator(device).manual_seed(int(state[0] >> np.uint64(1)))
        return self._generators[device]


class Dither(GaussianNoise):
    """Independent uniform numbers of width :data:`DITHER` · ``std``, instead of normal numbers. Ranks that
    dither the same sum are given the same entropy, which is never that of noise."""

    def __init__(self, *, secure: bool = False, entropy: Sequence[int]):
        super().__init__(secure=secure, entropy=[*entropy, _DITHER_STREAM])

    def add_(self, tensors: Iterable[torch.Tensor], std: float) -> None:
        super().add_(tensors, DITHER * 2.0**-32 * std)

    def _numbers(self, count: int, device: torch.device) -> torch.Tensor:
        """Return (count,) uniform int32 numbers."""
        if self._is_secure or device.type == "cpu":
            return self._bits((count + 1) // 2).view(torch.int32)[:count].to(device)
        generator = self._generator(device)
        return torch.randint(-(2**31), 2**31, (count,), generator=generator, device=device, dtype=torch.int32)


def check_noise_source(*, dp_seed: int | None, secure: bool) -> None:
    """Warn of a fixed seed. Raise ImportError or ValueError if noise cannot be drawn with these settings."""
    if secure and dp_seed is not None:
        raise ValueError(
            "secure_rng=True and dp_seed contradict each other: a known seed is not secure. Drop one of them."
        )
    if dp_seed is not None:
        warnings.warn(
            f"dp_seed={dp_seed}: draws and noise can be reproduced, so this run is NOT private. For tests only.",
            stacklevel=3,
        )
    if secure:
        _chacha20([0])


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a large tensor into views, so that its noise is never in memory as a whole."""
    return tensor.view(-1).split(_PIECE) if tensor.numel() > _PIECE and tensor.is_contiguous() else [tensor]


def _groups(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group small consecutive tensors of one device and dtype: a draw costs at least 0.1 ms, however few numbers it
    has."""
    group: list[torch.Tensor] = []
    count = 0
    for tensor in tensors:
        is_other = group and (tensor.device, tensor.dtype) != (group[0].device, group[0].dtype)
        if group and (is_other or count + tensor.numel() > _CHUNK):
            yield group
            group, count = [], 0
        group.append(tensor)
        count += tensor.numel()
    if group:
        yield group


def standard_normal(bits: Bits, count: int) -> torch.Tensor:
    """Return (count,) independent N(0, 1) float32 numbers on the CPU, by the transform of Box and Muller (1958).

    A pair, r·cos θ and r·sin θ, takes r = √(-2 log u) from 64 random bits, so tails reach to 9.4, and θ from another
    32. Both are rounded to the 24 bits of float32. Chunks fit into the processor's cache.
    """
    numbers = torch.empty(count, dtype=torch.float32)
    for chunk in numbers.split(_CHUNK) if count else ():
        pairs = (len(chunk) + 1) // 2
        random = bits(pairs + (pairs + 1) // 2)
        r = random[:pairs].float().abs_().add_(0.5).mul_(2.0**-63).log_().mul_(-2.0).sqrt_()
        angle = random[pairs:].view(torch.int32)[:pairs].float().mul_(math.pi * 2.0**-31)
        torch.mul(r, angle.cos(), out=chunk[:pairs])
        torch.mul(r[: len(chunk) - pairs], angle.sin_()[: len(chunk) - pairs], out=chunk[pairs:])
    return numbers


def summed_normal(bits: Bits, count: int) -> torch.Tensor:
    """Return (count,) independent N(0, 1) float32 numbers, each a sum of several draws of :func:`standard_normal`."""
    numbers = torch.zeros(count, dtype=torch.float32)
    for chunk in numbers.split(_CHUNK) if count else ():
        for _ in range(_SUMMED):
            chunk += standard_normal(bits, len(chunk))
    return numbers.mul_(_SUMMED**-0.5)


def _pcg64(entropy: Sequence[int]) -> Bits:
    generator, limits = np.random.default_rng(entropy), np.iinfo(np.int64)
    return lambda count: torch.from_numpy(
        generator.integers(limits.min, limits.max, count, dtype=np.int64, endpoint=True)
    )


def _chacha20(entropy: Sequence[int]) -> Bits:
    keystream = chacha20(entropy)
    return lambda count: torch.frombuffer(bytearray(keystream(bytes(8 * count))), dtype=torch.int64)


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
                replicas = (
                    None if is_dtensor(clipper.trainable.shards.unsharded(p)) else clipper.trainable.parallel.group
                )
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
