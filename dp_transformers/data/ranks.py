"""Whether an index stands for the same row on all ranks.

Each rank draws its part of the indices of a draw. Where ranks hold the rows in different orders (shuffled without a
seed, listed as the file system likes), one row may be drawn by several of them, and adds to a sum as often.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch

from ..runtime import distributed
from ..runtime.randomness import SecretSeeds
from .columns import leaves_of

_ROWS = 16


def require_same_rows(size: int, load: Callable[[int], Any], seeds: SecretSeeds) -> None:
    """Raise ValueError on all ranks unless all have ``size`` rows, and some that a secret chooses are the same on each
    of them."""
    seeds.reseed("common rows")
    digests, error = dict[int, str | None](), None
    for i in random.sample(range(size), min(size, _ROWS)):
        try:
            digests[i] = _digest_of(load, i, seeds)
        except Exception as raised:
            error = error or f"row {i} cannot be loaded: {type(raised).__name__}: {raised}"
    said = distributed.gathered((size, digests, error))
    for rank, (size_there, digests_there, error_there) in enumerate(said):
        if error_there is not None:
            raise ValueError(
                f"on rank {rank} {error_there}. Every process draws its part from all examples: give each of them the "
                "whole data set, and correct the row or leave it out."
            )
        if size_there != said[0][0]:
            raise ValueError(
                f"the training data have {said[0][0]} rows on rank 0, and {size_there} on rank {rank}. Every process "
                "draws its part from all examples: give each of them the same data set, and do not split it among "
                "them."
            )
        for i, digest in digests_there.items():
            if digest != said[0][1][i]:
                raise ValueError(
                    f"row {i} of the training data is another one on rank {rank} than on rank 0. Every process draws "
                    "its part of the examples by their indices, so one of them could be drawn by several processes, "
                    "and would add more than the noise is made for. Let all processes make the same rows in the same "
                    "order: sort what is listed (os.listdir, glob, a set), and shuffle and split with one seed "
                    "(random.Random(0).shuffle, random_split(generator=...))."
                )


def _digest_of(load: Callable[[int], Any], i: int, seeds: SecretSeeds) -> str | None:
    """Return what tells a row from others; None for one that draws from generators of its own."""
    digests = set()
    for _ in range(2):
        seeds.reseed(f"common row {i}")
        digests.add(_digest(load(i)))
    return digests.pop() if len(digests) == 1 else None


def _digest(row: Any) -> str:
    """Return the digest of a row's tensors, numbers, words and images. Where its files lie may differ."""
    found = hashlib.sha256()
    for name, x in leaves_of(row):
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested:
            x = x.detach().cpu().contiguous()
            found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
            found.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, (str, bytes, Number)) and not (isinstance(x, str) and os.path.isabs(x)):
            found.update(f"{name} {x!r}".encode())
        elif hasattr(x, "tobytes"):  # an image of PIL
            found.update(f"{name} ".encode() + x.tobytes())
    return found.hexdigest()
