"""Which stored row stands behind an index of a data set, told by where it lies and without making it.

Here a row has a name, a pair of numbers (base, row), which two indices share only if one stored row stands behind
both. Looked through are ``Subset`` and ``ConcatDataset`` of torch, lists and tuples of objects, and what ``select``,
``shuffle`` and ``concatenate_datasets`` make of a table of ``datasets``. In any other data set each index is a row of
its own, and so is what ``map``, or a view with other columns, made of a table. Of those that come together in a draw
it is seen when they are loaded that they are one row: :func:`refuse_rows_loaded_from_one`.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

_MAY_BE_SHARED = (str, bytes, Number, np.generic, Enum, type(None))  # Python may keep equal ones as one object


def most_frequent_row(dataset: Any) -> tuple[int, int]:
    """Return the first index of the stored row that is there most often, and how often that is; (0, 0) where the data
    set has no rows, or no length."""
    order, is_same = _sorted(_names(dataset, _bases()))
    if not len(order):
        return 0, 0
    starts = np.flatnonzero(~np.append(False, is_same))
    copies = np.diff(starts, append=len(order))
    return int(order[starts[copies == copies.max()]].min()), int(copies.max())


def have_rows_in_common(first: Any, second: Any) -> bool:
    """Return whether some stored row is in both data sets. One without a length has none."""
    bases = _bases()
    names, others = _names(first, bases), _names(second, bases)
    order, is_same = _sorted(np.concatenate([names, others], axis=1))
    is_other = order >= names.shape[1]
    return bool((is_same & (is_other[1:] != is_other[:-1])).any())


def refuse_rows_loaded_from_one(indices: Sequence[int], loaded: Sequence[Any], copies: int) -> None:
    """Raise ValueError if more than ``copies`` of the rows that were loaded for these indices are one object, or
    consist of tensors and arrays which all lie in the same memory.

    Equal rows are no proof, since two people may have them; nor is a tensor that rows share beside something else.
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
            f"rows {same[0]} and {same[1]} of the training data are one stored row ({len(same)} of this draw are): "
            "what is loaded for them is the same object, or lies in the same memory, but "
            f"max_examples_per_person={copies}, so epsilon would not hide all that is learned from it. Train on each "
            "row once (no index table that repeats rows, no i % n); where some shall count more, weight their losses; "
            "or say how often a row may come (max_examples_per_person, in a mechanism unit=PrivacyUnit), and epsilon "
            "is for all copies together. If they are rows of two people, let the data set return a copy of each."
        )


def _may_be_shared(x: Any) -> bool:
    return isinstance(x, _MAY_BE_SHARED) or (isinstance(x, tuple) and all(map(_may_be_shared, x)))


def _memory_of(x: Any) -> Hashable | None:
    """Return the memory that a tensor or an array begins in, and how many rows it has; None for anything else."""
    if type(x) is torch.Tensor:
        return (x.data_ptr(), len(x) if x.dim() else 1) if x.layout is torch.strided and x.numel() else None
    return (x.__array_interface__["data"][0], x.shape) if isinstance(x, np.ndarray) and x.size else None


# ---- names of rows ----


def _bases() -> defaultdict[Hashable, int]:
    return defaultdict(itertools.count().__next__)


def _sorted(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order that puts equal names side by side, the first index first, and whether each one but the first
    has the name of the one before."""
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
    """Return the indices of a Subset; none where they are something else, as keys are."""
    try:
        return np.array([operator.index(i) for i in getattr(indices, "tolist", lambda: indices)()], np.int64)
    except TypeError:
        return np.zeros(0, np.int64)


def _names_in_table(dataset: Any, bases: defaultdict[Hashable, int]) -> np.ndarray:
    """Return names of rows by where all columns of their part of the table lie in memory, and their place there.
    Selecting, shuffling, joining and slicing leave the memory as it is."""
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
