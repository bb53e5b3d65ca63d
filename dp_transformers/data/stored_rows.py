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
_ROWS = 2**40  # the names that each base has for its rows
_MAY_BE_SHARED = (str, bytes, Number, np.generic, Enum, type(None))  # Python may keep equal ones as one object


def most_frequent_row(dataset: Any) -> tuple[int, int]:
    """Return the first index of the stored row that has most indices, and how many; (0, 0) if the data set has no
    rows, or no length."""
    _, first, copies = np.unique(_names(dataset, _bases()), return_index=True, return_counts=True)
    return (int(first[copies == copies.max()].min()), int(copies.max())) if len(copies) else (0, 0)


def have_rows_in_common(first: Any, second: Any) -> bool:
    """Return True if some stored row is in both data sets. One without a length has none."""
    bases = _bases()
    return bool(np.isin(_names(first, bases), _names(second, bases)).any())


def refuse_rows_loaded_from_one(indices: Sequence[int], loaded: Sequence[Any], copies: int) -> None:
    """Raise ValueError if more than ``copies`` of the loaded rows are one object, or consist of tensors and arrays
    that all lie in the same memory.

    Equal rows are no proof, since two people may have them; nor is a single tensor that rows share.
    """
    found = defaultdict[Hashable, list[int]](list)
    for n, row in enumerate(loaded):
        found[_place_of(row)].append(n)
    if len(found) == len(loaded):
        return
    for same in found.values():
        if len(same) > copies and not _may_be_shared(loaded[same[0]]):
            raise ValueError(
                f"rows {indices[same[0]]} and {indices[same[1]]} of the training data are one stored row ({len(same)} "
                f"of this draw are), but max_examples_per_person={copies}, so epsilon would not hide all that is "
                "learned from it. Train on each row once, and weight losses where some shall count more; if they are "
                "rows of two people, let the data set return a copy of each. Or say how often a row may come "
                "(max_examples_per_person, in a mechanism unit=PrivacyUnit), and epsilon is for all copies together."
            )


def _place_of(row: Any) -> Hashable:
    """Return the memory of all tensors and arrays of a row; of one with anything else, the object."""
    parts = row if isinstance(row, (tuple, list)) else row.values() if isinstance(row, Mapping) else (row,)
    places = tuple(map(_memory_of, parts))
    return id(row) if None in places else places or id(row)


def _memory_of(x: Any) -> Hashable | None:
    """Return where a tensor or an array begins, and how many numbers it has; None for anything else, and for an empty
    one."""
    if type(x) is torch.Tensor:
        return (x.data_ptr(), x.numel()) if x.layout is torch.strided and x.numel() else None
    return (x.__array_interface__["data"][0], x.size) if isinstance(x, np.ndarray) and x.size else None


def _may_be_shared(x: Any) -> bool:
    return isinstance(x, _MAY_BE_SHARED) or (isinstance(x, tuple) and all(map(_may_be_shared, x)))


# ---- the same rows on all ranks ----


def require_same_rows(size: int, load: Callable[[int], Any], seeds: SecretSeeds) -> None:
    """Raise ValueError on all ranks unless some of the ``size`` rows, chosen by a secret, are the same on each."""

    def digest_of(i: int) -> str:
        seeds.reseed(f"common row {i}")
        return _digest(load(i))

    def digests() -> dict[int, str | None]:
        """Return the digests by row; None for a row that draws from generators of its own."""
        seeds.reseed("common rows")
        rows = random.sample(range(size), min(size, _COMPARED))
        return {i: digest if (digest := digest_of(i)) == digest_of(i) else None for i in rows}

    try:
        first, *others = distributed.gathered(distributed.made_on_all(digests))
    except Exception as error:
        raise ValueError(
            f"rows of the training data cannot be loaded on every rank ({type(error).__name__}: {error}). Every "
            "process draws its part from all examples: give each of them the whole data set, and correct such rows or "
            "leave them out."
        ) from error
    for rank, there in enumerate(others, start=1):
        if differing := [i for i, digest in there.items() if digest != first[i]]:
            raise ValueError(
                f"row {differing[0]} of the training data is another one on rank {rank} than on rank 0. Every process "
                "draws its part of the examples by their indices, so several could draw one row. Let all processes "
                "make the same rows in the same order: sort what is listed (os.listdir, glob, a set), and shuffle and "
                "split with one seed (random.Random(0).shuffle, random_split(generator=...))."
            )


def _digest(row: Any) -> str:
    """Return the digest of a row's tensors, numbers, words and images, but not of the paths of its files."""
    found = hashlib.sha256()
    for name, x in leaves_of(row):
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested:
            found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
            x = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if hasattr(x, "tobytes"):  # also an image of PIL
            found.update(f"{name} ".encode() + x.tobytes())
        elif isinstance(x, (str, bytes, Number)) and not (isinstance(x, str) and os.path.isabs(x)):
            found.update(f"{name} {x!r}".encode())
    return found.hexdigest()


# ---- names of rows ----


def _bases() -> defaultdict[Hashable, int]:
    return defaultdict(itertools.count().__next__)


def _names(dataset: Any, bases: defaultdict[Hashable, int]) -> np.ndarray:
    """Return a whole number for each row; none for a data set without a length."""
    try:
        own = bases[id(dataset)] * _ROWS + np.arange(len(dataset))
    except (TypeError, NotImplementedError):
        return np.zeros(0, np.int64)
    if isinstance(dataset, Subset):
        return _chosen(_names(dataset.dataset, bases), dataset.indices, own)
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_names(part, bases) for part in dataset.datasets])
    if isinstance(dataset, getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", ())):
        return _names_in_table(dataset, bases)
    if type(dataset) in (list, tuple):
        pairs = zip(own, dataset, strict=True)
        return np.array([n if isinstance(x, _MAY_BE_SHARED) else -id(x) for n, x in pairs], np.int64)
    return own


def _chosen(names: np.ndarray, indices: Any, own: np.ndarray) -> np.ndarray:
    """Return the names of the rows of a Subset; its own ones if its indices are something else, as keys are."""
    try:
        chosen = names[[operator.index(i) for i in getattr(indices, "tolist", lambda: indices)()]]
    except (TypeError, IndexError):
        return own
    return chosen if len(chosen) == len(own) else own


def _names_in_table(dataset: Any, bases: defaultdict[Hashable, int]) -> np.ndarray:
    """Return names of rows: the memory of all columns of their part of the table, and their place in it. Selecting,
    shuffling, joining and slicing leave that memory as it is."""
    names = [np.zeros(0, np.int64)]
    for number, part in enumerate(dataset.data.table.to_batches()):
        memory = frozenset(x.address for column in part.columns for x in column.buffers()[1:] if x and x.size)
        start = min((column.offset for column in part.columns), default=0)
        names.append(bases[memory or (id(dataset), number)] * _ROWS + start + np.arange(len(part)))
    made = np.concatenate(names)
    return made if dataset._indices is None else made[dataset._indices.column(0).to_numpy()]
