"""Finds the stored row behind an index of a data set: one row may have several indices, or another index on each rank.

A row gets a name without being loaded: a pair of numbers (base, row), which two indices share only if one stored row
stands behind both. Names are known for ``Subset`` and ``ConcatDataset`` of torch, lists and tuples of objects, and for
what ``select``, ``shuffle`` and ``concatenate_datasets`` make of a table of ``datasets``. In any other data set each
index has a name of its own, also in what ``map``, or a view with other columns, made of a table. Such rows are
compared when a draw loads them: :func:`refuse_rows_loaded_from_one`.

Each rank draws its part of the indices of a draw. If ranks hold the rows in different orders (shuffled without a seed,
listed as the file system likes), several of them may draw one row: :func:`require_same_rows`.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from ..runtime import distributed
from ..runtime.randomness import SecretSeeds
from .columns import leaves_of

_COMPARED = 16  # rows that all ranks must hold alike
_MAY_BE_SHARED = (str, bytes, Number, np.generic, Enum, type(None))  # Python may keep equal ones as one object


def most_frequent_row(dataset: Any) -> tuple[int, int]:
    """Return the first index of the stored row that has most indices, and how many; (0, 0) if the data set has no
    rows, or no length."""
    order, is_same = _sorted(_names(dataset, _bases()))
    if not len(order):
        return 0, 0
    starts = np.flatnonzero(~np.append(False, is_same))
    copies = np.diff(starts, append=len(order))
    return int(order[starts[copies == copies.max()]].min()), int(copies.max())


def have_rows_in_common(first: Any, second: Any) -> bool:
    """Return True if some stored row is in both data sets. One without a length has none."""
    bases = _bases()
    names, others = _names(first, bases), _names(second, bases)
    order, is_same = _sorted(np.concatenate([names, others], axis=1))
    is_other = order >= names.shape[1]
    return bool((is_same & (is_other[1:] != is_other[:-1])).any())


def refuse_rows_loaded_from_one(indices: Sequence[int], loaded: Sequence[Any], copies: int) -> None:
    """Raise ValueError if more than ``copies`` of the loaded rows are one object, or consist of tensors and arrays
    that all lie in the same memory.

    Equal rows are no proof, since two people may have them; nor is a single tensor that rows share.
    """
    found = defaultdict[Hashable, list[int]](list)
    for index, row in zip(indices, loaded, strict=True):
        parts = [*row.values()] if isinstance(row, Mapping) else [*row] if isinstance(row, (tuple, list)) else [row]
        places = tuple(map(_memory_of, parts))
        if places and None not in places:
            found[places].append(index)
        elif parts and _memory_of(row) is None:
            found[id(row)].append(index)
    rows = dict(zip(indices, loaded, strict=True))
    several = [same for same in found.values() if len(same) > copies and not _may_be_shared(rows[same[0]])]
    for same in several[:1]:
        raise ValueError(
            f"rows {same[0]} and {same[1]} of the training data are one stored row ({len(same)} of this draw are), "
            f"but max_examples_per_person={copies}, so epsilon would not hide all that is learned from it. Train on "
            "each row once (no index table that repeats rows, no i % n), and weight losses where some shall count "
            "more; if they are rows of two people, let the data set return a copy of each. Or say how often a row may "
            "come (max_examples_per_person, in a mechanism unit=PrivacyUnit), and epsilon is for all copies together."
        )


def _may_be_shared(x: Any) -> bool:
    return isinstance(x, _MAY_BE_SHARED) or (isinstance(x, tuple) and all(map(_may_be_shared, x)))


def _memory_of(x: Any) -> Hashable | None:
    """Return the memory that a tensor or an array begins in, and how many rows it has; None for anything else."""
    if type(x) is torch.Tensor:
        return (x.data_ptr(), len(x) if x.dim() else 1) if x.layout is torch.strided and x.numel() else None
    return (x.__array_interface__["data"][0], x.shape) if isinstance(x, np.ndarray) and x.size else None


# ---- the same rows on all ranks ----


def require_same_rows(size: int, load: Callable[[int], Any], seeds: SecretSeeds) -> None:
    """Raise ValueError on all ranks unless some of the ``size`` rows, chosen by a secret, are the same on each."""

    def digests() -> dict[int, str | None]:
        seeds.reseed("common rows")
        return {i: _digest_of(load, i, seeds) for i in random.sample(range(size), min(size, _COMPARED))}

    try:
        first, *others = distributed.gathered(distributed.made_on_all(digests))
    except Exception as error:
        raise ValueError(
            f"rows of the training data cannot be loaded on every rank ({type(error).__name__}: {error}). Every "
            "process draws its part from all examples: give each of them the whole data set, and correct such rows or "
            "leave them out."
        ) from error
    for rank, digests_there in enumerate(others, start=1):
        for i, digest in digests_there.items():
            if digest != first[i]:
                raise ValueError(
                    f"row {i} of the training data is another one on rank {rank} than on rank 0. Every process draws "
                    "its part of the examples by their indices, so several could draw one row. Let all processes make "
                    "the same rows in the same order: sort what is listed (os.listdir, glob, a set), and shuffle and "
                    "split with one seed (random.Random(0).shuffle, random_split(generator=...))."
                )


def _digest_of(load: Callable[[int], Any], i: int, seeds: SecretSeeds) -> str | None:
    """Return the digest of a row; None if it draws from generators of its own."""
    digests = set()
    for _ in range(2):
        seeds.reseed(f"common row {i}")
        digests.add(_digest(load(i)))
    return digests.pop() if len(digests) == 1 else None


def _digest(row: Any) -> str:
    """Return the digest of a row's tensors, numbers, words and images, but not of the paths of its files."""
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


# ---- names of rows ----


def _bases() -> defaultdict[Hashable, int]:
    return defaultdict(itertools.count().__next__)


def _sorted(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order in which equal names are neighbours, the smallest index first, and for each but the first
    whether it has the name of its predecessor."""
    order = np.lexsort(names[::-1])
    names = names[:, order]
    return order, (names[:, 1:] == names[:, :-1]).all(0)


def _names(dataset: Any, bases: defaultdict[Hashable, int]) -> np.ndarray:
    """Return the names of all rows, of shape (2, N)."""
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        length = 0
    own = np.stack([np.full(length, bases["data set", id(dataset)]), np.arange(length)])
    if not length:
        return own
    if isinstance(dataset, Subset):
        inner, chosen = _names(dataset.dataset, bases), _integers(dataset.indices)
        is_view = len(chosen) == length and bool((np.abs(chosen + 0.5) < inner.shape[1]).all())
        return inner[:, chosen] if is_view else own
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_names(part, bases) for part in dataset.datasets], axis=1)
    if isinstance(dataset, getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", ())):
        return _names_in_table(dataset, bases)
    if type(dataset) in (list, tuple):
        base = bases["objects"]
        pairs = [own[:, i] if isinstance(x, _MAY_BE_SHARED) else (base, id(x)) for i, x in enumerate(dataset)]
        return np.array(pairs, np.int64).T
    return own


def _integers(indices: Any) -> np.ndarray:
    """Return the indices of a Subset; none if they are something else, as keys are."""
    try:
        return np.array([operator.index(i) for i in getattr(indices, "tolist", lambda: indices)()], np.int64)
    except TypeError:
        return np.zeros(0, np.int64)


def _names_in_table(dataset: Any, bases: defaultdict[Hashable, int]) -> np.ndarray:
    """Return names of rows: the memory of all columns of their part of the table, and their place in it. Selecting,
    shuffling, joining and slicing leave that memory as it is."""
    names = []
    for batch in dataset.data.table.to_batches():
        buffers = [[x for x in column.buffers()[1:] if x is not None and x.size] for column in batch.columns]
        places = [[x.address for x in of_column] for of_column in buffers]
        offset = min((column.offset for column in batch.columns), default=0)
        if not any(any(place) for place in places):
            places = [["without memory", id(dataset), len(names)]]
        key = frozenset((*place, column.offset - offset) for place, column in zip(places, batch.columns, strict=False))
        names.append(np.stack([np.full(len(batch), bases[key]), np.arange(len(batch)) + offset]))
    made = np.concatenate(names, axis=1) if names else np.zeros((2, 0), np.int64)
    return made if dataset._indices is None else made[:, dataset._indices.column(0).to_numpy().astype(np.int64)]
