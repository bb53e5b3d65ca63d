"""Whether an index stands for the same row on all ranks.

Each rank draws its part of the indices of a draw. Where ranks hold the rows in different orders (shuffled without a
seed, listed as the file system likes), one row may be drawn by several of them, and adds to a sum as often.
"""

from __future__ import annotations

import hashlib
import numbers
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..runtime import distributed
from ..runtime.randomness import SecretSeeds
from .rows import leaves

_FIRST, _LATER = 16, 4  # rows that are looked at in the first draw, and in later ones


@dataclass(frozen=True)
class CommonRows:
    """Some rows of the data set of one rank.

    Attributes:
        size: How many rows it has.
        digests: Those of the rows that were loaded, by their index.
        error: Why one of them could not be loaded.
    """

    size: int
    digests: dict[int, str]
    error: str | None = None

    @classmethod
    def of(
        cls, dataset: Any, load: Callable[[int], Any], seeds: SecretSeeds, reseed: Callable[[str], None], number: int
    ) -> CommonRows:
        """Load the rows that all ranks look at beside draw ``number``, with the same random numbers."""
        size, digests = len(dataset), dict[int, str]()
        seeds.reseed(f"common rows beside draw {number}")
        wanted = min(size, _LATER if number else _FIRST)
        for i in random.sample(range(size), wanted):
            reseed(f"common row {i} beside draw {number}")
            try:
                digests[i] = digest_of(load(i))
            except Exception as error:
                return cls(size, digests, f"row {i} cannot be loaded: {type(error).__name__}: {error}")
        return cls(size, digests)

    def require_same(self) -> None:
        """Raise ValueError on all ranks unless these rows are the same on each of them."""
        said = distributed.gathered(self)
        for rank, theirs in enumerate(said):
            if theirs.error is not None:
                raise ValueError(
                    f"on rank {rank} {theirs.error}. Every process draws its part from all examples: give each of "
                    "them the whole data set, and correct the row or leave it out."
                )
            if theirs.size != said[0].size:
                raise ValueError(
                    f"the training data have {said[0].size} rows on rank 0, and {theirs.size} on rank {rank}. Every "
                    "process draws its part from all examples: give each of them the same data set, and do not split "
                    "it among them."
                )
            for i, digest in theirs.digests.items():
                if digest != said[0].digests[i]:
                    raise ValueError(
                        f"row {i} of the training data is another one on rank {rank} than on rank 0. Every process "
                        "draws its part of the examples by their indices, so one of them could be drawn by several "
                        "processes, and would add more than the noise is made for. Let all processes make the same "
                        "rows in the same order: sort what is listed (os.listdir, glob, a set), and shuffle and split "
                        "with one seed (random.Random(0).shuffle, random_split(generator=...)), or write the data "
                        "set on rank 0 and load it on all."
                    )


def digest_of(row: Any) -> str:
    """What tells a row from others: its tensors, numbers, words and images. Where its files lie may differ."""
    found = hashlib.sha256()
    for name, x in leaves(row):
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested:
            x = x.detach().cpu().contiguous()
            found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
            found.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, (str, bytes, numbers.Number)) and not (isinstance(x, str) and os.path.isabs(x)):
            found.update(f"{name} {x!r}".encode())
        elif hasattr(x, "tobytes") and not isinstance(x, np.ndarray):  # an image of PIL
            found.update(f"{name} ".encode() + x.tobytes())
    return found.hexdigest()
