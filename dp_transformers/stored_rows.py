"""Which stored row stands behind an index of a data set, told by where it lies and without reading it.

Data sets are often views: one index after another may stand for a row of another data set, or for the same row again.
Here a row has a name, a pair of numbers (base, row), which two indices share if and only if one stored row stands
behind both. Looked through are ``Subset`` and ``ConcatDataset`` of torch, lists and tuples of objects, and
``datasets.Dataset``, whose rows are named by where the memory, or the file, of their table holds them. In any other
data set each index is a row of its own, and so is what ``map`` or a copy wrote anew. Of those that come together in a
draw it is seen when they are loaded that they are one row: :func:`refuse_rows_loaded_from_one`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import count
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

Bases = defaultdict[Hashable, int]  # the number of each base, given when it is first asked for
_MAY_BE_SHARED = (str, bytes, Number, np.generic, Enum, type(None))  # Python may keep equal ones as one object


def most_frequent_row(dataset: Any) -> tuple[int, int]:
    """Return the first index of the stored row that is there most often, and how often that is; (0, 0) where the data
    set has no rows, or no length."""
    names = _names(dataset, _bases())
    order, is_same = _sorted(names)
    if not len(order):
        return 0, 0
    starts = np.flatnonzero(~np.append(False, is_same))
    copies = np.diff(starts, append=len(order))
    return int(order[starts[copies == copies.max()]].min()), int(copies.max())


def have_rows_in_common(first: Any, second: Any) -> bool:
    """Whether some stored row is in both data sets. One without a length has none."""
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
    if len(loaded) <= copies:
        return
    found = defaultdict(list)
    for index, row in zip(indices, loaded, strict=True):
        if (name := _memory_of(row)) is not None:
            found[name].append(index)
    same = max(found.values(), key=len, default=[])
    if len(same) > copies:
        _refuse_copies(
            same,
            copies,
            "what is loaded for them is the same object, or lies in the same memory",
            "If they are rows of two people, let the data set return a copy of each.",
        )


def refuse_rows_chosen_again(dataset: Any, indices: Sequence[int], copies: int) -> None:
    """Raise ValueError if a ``Subset`` stands for one row with more than ``copies`` of these indices. Its table may be
    written to between two draws."""
    chosen = list(indices)
    while type(dataset) is Subset:
        chosen, dataset = [int(dataset.indices[i]) for i in chosen], dataset.dataset
    found = defaultdict(list)
    for index, row in zip(indices, chosen, strict=True):
        found[row].append(index)
    same = max(found.values(), key=len, default=[])
    if len(same) > copies:
        _refuse_copies(same, copies, "a Subset has the same index for them", "Its indices must stay as they are.")


def _refuse_copies(same: Sequence[int], copies: int, why: str, way_out: str) -> None:
    raise ValueError(
        f"rows {same[0]} and {same[1]} of the training data are one stored row ({len(same)} of this draw are): {why}, "
        f"but max_examples_per_person={copies}, so epsilon would not hide all that is learned from it. Train on each "
        "row once (no index table that repeats rows, no i % n); where some shall count more, weight their losses; "
        "or say how often a row may come (max_examples_per_person, in a mechanism unit=PrivacyUnit), and epsilon "
        f"is for all copies together. {way_out}"
    )


def _memory_of(row: Any) -> Hashable | None:
    """Return where a loaded row lies, by its identity where it holds more than tensors and arrays; None where nothing
    is known of it, as of numbers and words, which Python may keep as one object."""
    parts = [*row.values()] if isinstance(row, Mapping) else [*row] if isinstance(row, (tuple, list)) else [row]
    places = [_place_of_numbers(part) for part in parts]
    if places and None not in places:
        return tuple(places)
    is_shared = isinstance(row, (*_MAY_BE_SHARED, tuple)) or _place_of_numbers(row) is not None
    return None if is_shared or not parts else id(row)


def _place_of_numbers(x: Any) -> Hashable | None:
    """Return the memory that a tensor or an array begins in, and how many numbers it has; None for anything else, and
    without any."""
    if type(x) is torch.Tensor:
        return (x.data_ptr(), len(x) if x.dim() else 1) if x.layout is torch.strided and x.numel() else None
    return (x.__array_interface__["data"][0], x.shape) if isinstance(x, np.ndarray) and x.size else None


def _bases() -> Bases:
    return defaultdict(count().__next__)


def _sorted(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order that puts equal names side by side, the first index first, and whether each one but the first
    has the name of the one before."""
    order = np.lexsort(names[::-1])
    names = names[:, order]
    return order, (names[:, 1:] == names[:, :-1]).all(0)


def _names(dataset: Any, bases: Bases) -> np.ndarray:
    """Return the names of all rows, of shape (2, N)."""
    index = np.arange(_length(dataset) or 0)
    try:
        return _names_of(dataset, index, bases)
    except IndexError:  # a Subset with indices beyond its data set, which reading its rows will tell
        return _own(dataset, index, bases)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _names_of(dataset: Any, index: np.ndarray, bases: Bases) -> np.ndarray:
    """Return the names, (2, B), of the rows behind the indices of shape (B,).

    Raises:
        IndexError: there is no such index.
    """
    length = _length(dataset)
    if length is not None:
        index = np.where(index < 0, index + length, index)
    # a subclass with another length has rows of its own
    if isinstance(dataset, Subset) and (indices := _integers(dataset.indices, length)) is not None:
        return _names_of(dataset.dataset, indices[index], bases)
    if isinstance(dataset, ConcatDataset) and length == dataset.cumulative_sizes[-1]:
        return np.concatenate([_names(part, bases) for part in dataset.datasets], axis=1)[:, index]
    if isinstance(dataset, _table_class()):
        return _names_in_table(dataset, index, bases)
    if isinstance(dataset, (list, tuple)) and type(dataset).__getitem__ in (list.__getitem__, tuple.__getitem__):
        return _names_of_objects(dataset, index, bases)
    return _own(dataset, index, bases)


def _integers(indices: Any, length: int | None) -> np.ndarray | None:
    """Return the indices of a Subset as an array of shape (length,); None where they are something else."""
    try:
        array = np.asarray(indices)
    except (TypeError, ValueError):  # on a device, or ragged
        return None
    return array.astype(np.int64) if array.shape == (length,) and array.dtype.kind in "iub" else None


def _own(dataset: Any, index: np.ndarray, bases: Bases) -> np.ndarray:
    return np.stack([np.full_like(index, bases["data set", id(dataset)]), index])


def _names_of_objects(objects: Sequence[Any], index: np.ndarray, bases: Bases) -> np.ndarray:
    """Name objects by their identity, but those which may be shared by accident by their place."""
    chosen = [objects[i] for i in index.tolist()]
    names = np.stack([np.full_like(index, bases["objects"]), np.fromiter(map(id, chosen), np.int64, len(chosen))])
    kinds = {kind for kind in set(map(type, chosen)) if issubclass(kind, _MAY_BE_SHARED)}
    if kinds:
        is_shared = np.fromiter((type(each) in kinds for each in chosen), bool, len(chosen))
        names[:, is_shared] = _own(objects, index, bases)[:, is_shared]
    return names


# ---- tables of datasets.Dataset ----


def _table_class() -> Any:
    """Return ``datasets.Dataset``. There is no object of it before its module was imported."""
    return getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", ())


def _names_in_table(dataset: Any, index: np.ndarray, bases: Bases) -> np.ndarray:
    """Name rows by the memory of the first column that holds something there, and their place in it.

    Selecting, shuffling, joining and slicing leave that memory as it is.
    """
    if dataset._indices is not None:  # what select and shuffle leave of the table, and in which order
        index = dataset._indices.column(0).to_numpy()[index].astype(np.int64)
    files, batches = _files(dataset.data), dataset.data.table.to_batches()
    base, offset = np.zeros(len(batches), np.int64), np.zeros(len(batches), np.int64)
    for i, batch in enumerate(batches):
        column = next((each for each in batch.columns if each.null_count < len(each)), None)
        if column is None:
            base[i] = bases["empty batch", id(dataset), i]
        else:
            base[i] = bases[tuple(_place(buffer, files) for buffer in column.buffers())]
            offset[i] = column.offset
    starts = np.cumsum([0, *map(len, batches)])
    at = np.searchsorted(starts, index, side="right") - 1
    return np.stack([base[at], index - starts[at] + offset[at]])


def _files(table: Any) -> dict[int, str]:
    """Return which files of a table of ``datasets`` lie in memory, and at which address."""
    files = {}
    for block in (block for row in getattr(table, "blocks", [[table]]) for block in row):
        buffer = next(_buffers(block), None)
        if buffer is None or not hasattr(block, "path"):
            continue
        whole = _whole(buffer)
        with contextlib.suppress(OSError):
            if whole.size == os.path.getsize(block.path):  # a cast column, say, no longer lies in the file
                files[whole.address] = os.path.realpath(block.path)
    return files


def _buffers(table: Any) -> Iterator[Any]:
    arrays = (array for column in table.table.columns for array in column.chunks)
    return (buffer for array in arrays for buffer in array.buffers() if buffer is not None)


def _whole(buffer: Any) -> Any:
    """Return the buffer of which this one is a part."""
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer


def _place(buffer: Any, files: dict[int, str]) -> tuple[int | str, int] | None:
    """Return the file or the memory that a buffer of arrow lies in, and where in it, in bytes."""
    if buffer is None:
        return None
    start = _whole(buffer).address
    return files.get(start, start), buffer.address - start
