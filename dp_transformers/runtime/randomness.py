"""The global generators of Python, NumPy and torch, from which dropout, augmentation and random masking draw.

An example's random numbers depend on where in the draw it lies, so taking out one example changes those of others. ε
covers that as long as nobody knows the numbers, and no two examples share one (``shared_numbers``): they then have the
same distribution with and without the example. A seed that a user, a callback, a model or a worker sets would make
them known. So both loops seed these generators anew from a secret before the examples of every draw are loaded and
before every forward pass on them (:class:`SecretSeeds`); what was set before does not matter.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GENERATORS = ("python", "numpy", "torch")
_TWISTER = slice(3, 3 + 624)  # where torch keeps the words of its generator for the CPU (mt19937), counted in 64 bits
_BYTES = 32 + 32 + 8 + 4 * 624  # for Python, for NumPy, for torch's devices, and for its CPU generator


class SecretSeeds:
    """Seeds the global generators from a secret that only this training's processes hold.

    Args:
        secret: At least 128 bits from the operating system, the same on all ranks
            (:func:`dp_transformers.runtime.distributed.shared_secret`).
        rank: Ranks with different examples draw apart; the ranks of a tensor-parallel group, which work on the same
            ones, alike.
    """

    def __init__(self, secret: int, rank: int = 0):
        self._key = hashlib.sha256(f"{secret}/{rank}".encode()).digest()
        self._secret = secret
        self._count = 0

    def of_all_ranks(self) -> SecretSeeds:
        """Return seeds that are the same on all ranks, and none of theirs."""
        return SecretSeeds(self._secret, -1)

    def reseed(self, purpose: str | None = None, only: Collection[str] = GENERATORS) -> None:
        """Seed the generators anew: for a purpose, the same numbers each time, or as in no earlier call.

        The numbers come from SHAKE-256 of the secret, so whoever learns the state of a generator learns nothing of the
        others'.
        """
        if purpose is None:
            self._count += 1
            purpose = f"forward {self._count}"
        if only:
            length = _BYTES if "torch" in only else 64
            _seed_globally(hashlib.shake_256(self._key + purpose.encode()).digest(length), only)

    def number(self, purpose: str) -> int:
        """Return 256 random bits for a purpose, the same each time."""
        return int.from_bytes(hashlib.shake_256(self._key + f"number for {purpose}".encode()).digest(32), "little")


def require_unseeded(what: str) -> None:
    """Raise ValueError if torch's seed was set since the generators were seeded from the secret."""
    if torch.initial_seed() != _UNSEEDED:
        raise ValueError(
            f"torch's seed was set in {what} (torch.manual_seed, set_seed), so whoever knows it could reproduce "
            "dropout and augmentation, and epsilon would be too small. Remove that call: private training seeds the "
            "generators from a secret before every batch."
        )


_UNSEEDED = torch.Generator().initial_seed()  # what the state that is written says
_STATE = torch.Generator().get_state()
_WORDS = _STATE.view(torch.int64)[_TWISTER].numpy()  # in the same memory


def seed_worker(worker_id: int) -> None:
    """A DataLoader's ``worker_init_fn``: seeds the worker from all 64 bits that torch gave it."""
    _seed_globally(_expanded([torch.initial_seed()]))


def _expanded(entropy: Sequence[int]) -> bytes:
    return hashlib.shake_256(repr(list(entropy)).encode()).digest(_BYTES)


def _seed_globally(numbers: bytes, only: Collection[str] = GENERATORS) -> None:
    if "python" in only:
        random.seed(numbers[:32])
    if "numpy" in only:
        np.random.seed(_numpy_seed(numbers))
    if "torch" in only:
        if torch.accelerator.is_available():
            torch.manual_seed(_device_seed(numbers))
        torch.set_rng_state(_twister(numbers))


def _numpy_seed(numbers: bytes) -> np.ndarray:
    return np.frombuffer(numbers, np.uint32, 8, offset=32)


def _device_seed(numbers: bytes) -> int:
    return int.from_bytes(numbers[64:72], "little") >> 1


def _twister(numbers: bytes) -> torch.Tensor:
    """The state of torch's generator for the CPU. Its own seeding keeps 32 bits of a seed, few enough to try them all,
    so its words are written."""
    _WORDS[:] = np.frombuffer(numbers, np.uint32, offset=72)
    return _STATE


@contextmanager
def seeded_global_generators(entropy: Sequence[int], device: torch.device) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch; afterwards they are as they were.

    ``entropy`` tells them; :class:`SecretSeeds` makes them secret inside.
    """
    before = random.getstate(), np.random.get_state()
    of_mps = torch.mps.get_rng_state() if device.type == "mps" else None  # which fork_rng does not know
    with forked_generators(device):
        _seed_globally(_expanded(entropy))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            if of_mps is not None:
                torch.mps.set_rng_state(of_mps)


# ---- states that are kept, and put back ----


def random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the states of torch's generators that a module on ``device`` draws from."""
    states = (torch.get_rng_state(),)
    return (*states, torch.get_device_module(device).get_rng_state(device)) if _has_generators(device) else states


def set_random_state(device: torch.device, state: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if _has_generators(device):
        torch.get_device_module(device).set_rng_state(state[1], device)


def _has_generators(device: torch.device) -> bool:
    """Whether modules on ``device`` draw from a generator that is kept and put back here."""
    return device.type not in ("cpu", "mps", "meta")


def same_state(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def global_state(device: torch.device) -> tuple[Any, ...]:
    """Return the states of all global generators: Python's, NumPy's and torch's."""
    return (random.getstate(), np.random.get_state(legacy=False), *random_state(device))


def set_global_state(device: torch.device, state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    set_random_state(device, state[2:])


def same_global_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[0] == b[0] and _words(a[1]) == _words(b[1]) and same_state(a[2:], b[2:])


def generators_apart() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch on the CPU, to be compared one by one."""
    states = random.getstate(), _words(np.random.get_state(legacy=False)), torch.get_rng_state().numpy().tobytes()
    return dict(zip(GENERATORS, states, strict=True))


def _words(state: Any) -> tuple[bytes, int]:
    """NumPy's, which does not compare arrays."""
    return state["state"]["key"].tobytes(), state["state"]["pos"]


@contextmanager
def replayed(state: tuple[torch.Tensor, ...] | None) -> Iterator[None]:
    """Draw inside the random numbers that followed ``state``, and restore the generators afterwards."""
    if state is None:
        yield
        return
    accelerator = torch.accelerator.current_accelerator() if len(state) > 1 else None
    with forked_generators(accelerator or torch.device("cpu")):
        torch.set_rng_state(state[0])
        if accelerator is not None:
            torch.get_device_module(accelerator).set_rng_state(state[1])
        yield


@contextmanager
def forked_generators(device: torch.device) -> Iterator[None]:
    """Fork the generators of all devices: manual_seed seeds all of them, and what one of them drew afterwards would be
    known."""
    many = _has_generators(device)
    with torch.random.fork_rng(
        devices=range(torch.accelerator.device_count()) if many else (), device_type=device.type if many else "cuda"
    ):
        yield
