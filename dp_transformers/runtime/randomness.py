"""The global generators of Python, NumPy and torch, from which dropout, augmentation and random masking draw.

An example's random numbers depend on its position in the draw, so removing one example changes those of later ones. ε
covers this if the numbers are secret and no two examples share one: they then have the same distribution with and
without the example. A seed that a user, a callback, a model or a worker sets would make them known. So both loops seed
these generators from a secret before they load the examples of a draw and before every forward pass
(:class:`SecretSeeds`). Seeds set before that have no effect.
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
_TWISTER = slice(3, 3 + 624)  # words of torch's CPU generator (mt19937) in its state, in units of 64 bits
_BYTES = 32 + 32 + 8 + 4 * 624  # for Python, for NumPy, for torch's devices, and for torch's CPU generator


class SecretSeeds:
    """Seeds the global generators from a secret of this training's processes.

    Args:
        secret: At least 128 bits from the operating system, the same on all ranks
            (:func:`dp_transformers.runtime.distributed.shared_secret`).
        rank: A number for each group of examples: different on ranks with different examples, the same on the ranks
            of a tensor-parallel group.
    """

    def __init__(self, secret: int, rank: int = 0):
        self._key = hashlib.sha256(f"{secret}/{rank}".encode()).digest()
        self._secret = secret
        self._count = 0

    def of_all_ranks(self) -> SecretSeeds:
        """Return seeds that are the same on all ranks, and differ from each rank's own."""
        return SecretSeeds(self._secret, -1)

    def reseed(self, purpose: str | None = None, only: Collection[str] = GENERATORS) -> None:
        """Seed the generators named in ``only``. One purpose gives the same numbers each time; without a purpose,
        every call gives new numbers.

        The numbers come from SHAKE-256 of the secret, so the state of one generator reveals nothing of the others.
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


_UNSEEDED = torch.Generator().initial_seed()  # the seed recorded in the state that is written
_STATE = torch.Generator().get_state()
_WORDS = _STATE.view(torch.int64)[_TWISTER].numpy()  # in the memory of the state


def seed_worker(worker_id: int) -> None:
    """Seed a DataLoader's worker from all 64 bits that torch gave it (``worker_init_fn``)."""
    _seed_globally(_expanded([torch.initial_seed()]))


def _expanded(entropy: Sequence[int]) -> bytes:
    return hashlib.shake_256(repr(list(entropy)).encode()).digest(_BYTES)


def _seed_globally(numbers: bytes, only: Collection[str] = GENERATORS) -> None:
    if "python" in only:
        random.seed(numbers[:32])
    if "numpy" in only:
        np.random.seed(np.frombuffer(numbers, np.uint32, 8, offset=32))
    if "torch" in only:
        if torch.accelerator.is_available():
            torch.manual_seed(int.from_bytes(numbers[64:72], "little") >> 1)
        torch.set_rng_state(_twister(numbers))


def _twister(numbers: bytes) -> torch.Tensor:
    """Return a state of torch's CPU generator. Its words are set directly, because seeding keeps only 32 bits of a
    seed, few enough to try them all."""
    _WORDS[:] = np.frombuffer(numbers, np.uint32, offset=72)
    return _STATE


@contextmanager
def seeded_global_generators(entropy: Sequence[int], device: torch.device) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch inside the context, and restore them afterwards.

    The numbers are as public as ``entropy``.
    """
    before = random.getstate(), np.random.get_state()
    of_mps = torch.mps.get_rng_state() if device.type == "mps" else None  # fork_rng does not support MPS
    with forked_generators(device):
        _seed_globally(_expanded(entropy))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            if of_mps is not None:
                torch.mps.set_rng_state(of_mps)


# ---- saving and restoring states ----


def random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the states of torch's generators that a module on ``device`` draws from."""
    states = (torch.get_rng_state(),)
    return (*states, torch.get_device_module(device).get_rng_state(device)) if _has_generators(device) else states


def set_random_state(device: torch.device, state: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if _has_generators(device):
        torch.get_device_module(device).set_rng_state(state[1], device)


def _has_generators(device: torch.device) -> bool:
    """Return True if ``device`` has its own generators that are saved and restored here."""
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
    """Return the states of the global CPU generators of Python, NumPy and torch by name, for comparison."""
    states = random.getstate(), _words(np.random.get_state(legacy=False)), torch.get_rng_state().numpy().tobytes()
    return dict(zip(GENERATORS, states, strict=True))


def _words(state: Any) -> tuple[bytes, int]:
    """Return a NumPy state in a form that can be compared."""
    return state["state"]["key"].tobytes(), state["state"]["pos"]


@contextmanager
def replayed(state: tuple[torch.Tensor, ...] | None) -> Iterator[None]:
    """Set torch's generators to ``state`` inside the context, and restore them afterwards."""
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
    """Fork torch's generators of all devices, because manual_seed seeds all of them."""
    many = _has_generators(device)
    with torch.random.fork_rng(
        devices=range(torch.accelerator.device_count()) if many else (), device_type=device.type if many else "cuda"
    ):
        yield
