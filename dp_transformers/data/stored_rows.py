"""Which stored row stands behind an index of a data set, told by where it lies and without making it.

Data sets are often views: one index after another may stand for a row of another data set, or for the same row again.
Here a row has a name, a pair of numbers (base, row), which two indices share if and only if one stored row stands
behind both. Looked through are ``Subset``, ``ConcatDataset`` and ``StackDataset`` of torch, lists and tuples of
objects, and ``datasets.Dataset``, whose rows are named by where the memory, or the file, of their table holds their
columns: any of them tells the row, so a view with fewer columns, or with new ones beside them, has the same rows. In
any other data set each index is a row of its own, and so is what ``map`` or a copy wrote anew. Of those that come
together in a draw it is seen when they are loaded that they are one row: :func:`refuse_rows_loaded_from_one`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset

_MAY_BE_SHARED = (str, bytes, Number, np.generic, Enum, type(None))  # Python may keep equal ones as one object


class Bases(defaultdict[Hashable, int]):
    """The number of each base, given when it is first asked for, and what is known of the memory of tables.

    Attributes:
        columns: the pieces of memory, by their numbers, that the columns of each base lie in, and by how many rows the
            row of a piece is behind the row of a name.
        parts: the arrays that lie in each piece of memory, by their offset and length.
    """

    def __init__(self) -> None:
        super().__init__(itertools.count().__next__)
        self.columns: dict[int, dict[int, int]] = {}
        self.parts: defaultdict[int, dict[tuple[int, int], Any]] = defaultdict(dict)


def most_frequent_row(dataset: Any) -> tuple[int, int]:
    """Return the first index of the stored row that is there most often, and how often that is; (0, 0) where the data
    set has no rows, or no length."""
    bases = Bases()
    order, is_same = _sorted(_joined(_names(dataset, bases), bases))
    if not len(order):
        return 0, 0
    starts = np.flatnonzero(~np.append(False, is_same))
    copies = np.diff(starts, append=len(order))
    return int(order[starts[copies == copies.max()]].min()), int(copies.max())


def have_rows_in_common(first: Any, second: Any) -> bool:
    """Whether some stored row is in both data sets. One without a length has none."""
    bases = Bases()
    names, others = _names(first, bases), _names(second, bases)
    order, is_same = _sorted(_joined(np.concatenate([names, others], axis=1), bases))
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
    is_shared = _may_be_shared(row) or _place_of_numbers(row) is not None
    return None if is_shared or not parts else id(row)


def _may_be_shared(x: Any) -> bool:
    """Return whether Python may keep equal ones as one object: a number, a word, a tuple of these."""
    return isinstance(x, _MAY_BE_SHARED) or (isinstance(x, tuple) and all(map(_may_be_shared, x)))


def _place_of_numbers(x: Any) -> Hashable | None:
    """Return the memory that a tensor or an array begins in, and how many numbers it has; None for anything else, and
    without any."""
    if type(x) is torch.Tensor:
        return (x.data_ptr(), len(x) if x.dim() else 1) if x.layout is torch.strided and x.numel() else None
    return (x.__array_interface__["data"][0], x.shape) if isinstance(x, np.ndarray) and x.size else None


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
    if isinstance(dataset, StackDataset):
        parts = [*dataset.datasets.values()] if isinstance(dataset.datasets, dict) else dataset.datasets
        return _names_in_stack(parts, index, bases) if length == len(parts[0]) else _own(dataset, index, bases)
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


def _names_in_stack(parts: Sequence[Any], index: np.ndarray, bases: Bases) -> np.ndarray:
    """Name a row that has an entry of each part by all of these together."""
    (base, row), *others = (_names_of(part, index, bases) for part in parts)
    columns = np.stack([base, *(x for other in others for x in (other[0], other[1] - row))])
    kinds, kind = np.unique(columns, axis=1, return_inverse=True)
    numbers = np.array([bases["stacked", tuple(its)] for its in kinds.T.tolist()], np.int64)
    return np.stack([numbers[kind.reshape(-1)], row])


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
    """Name rows by the memory of all columns together that hold something there, and their place in it.

    :func:`_joined` then finds the rows that have only some of these columns in common.

    Selecting, shuffling, joining and slicing leave that memory as it is.
    """
    if dataset._indices is not None:  # what select and shuffle leave of the table, and in which order
        index = dataset._indices.column(0).to_numpy()[index].astype(np.int64)
    files, batches = _files(dataset.data), dataset.data.table.to_batches()
    base, offset = np.zeros(len(batches), np.int64), np.zeros(len(batches), np.int64)
    for i, batch in enumerate(batches):
        pieces = _pieces(batch, files, bases)
        if pieces:
            _, offset[i] = pieces[0]
            shifts = tuple((piece, at - int(offset[i])) for piece, at in pieces)
            base[i] = bases["columns", shifts]
            bases.columns[int(base[i])] = dict(shifts)
        else:
            base[i] = bases["empty batch", id(dataset), i]
    starts = np.cumsum([0, *map(len, batches)])
    at = np.searchsorted(starts, index, side="right") - 1
    return np.stack([base[at], index - starts[at] + offset[at]])


def _pieces(batch: Any, files: dict[int, str], bases: Bases) -> list[tuple[int, int]]:
    """Return the pieces of memory that the columns of a batch lie in, by their numbers, and which row of the piece is
    the first row of the batch. Of columns in one piece (x[:-1] beside x[1:]) the one that begins first counts."""
    offsets: dict[int, int] = {}
    for column in itertools.chain.from_iterable(map(_unpacked, batch.columns)):
        if (memory := _memory_of_column(column, files)) is not None:
            piece = bases[memory]
            offsets[piece] = min(column.offset, offsets.get(piece, column.offset))
            bases.parts[piece][column.offset, len(column)] = column
    return sorted(offsets.items())


def _unpacked(column: Any) -> Iterator[Any]:
    """Return the columns that a column of structs consists of, or itself; none where all of its rows are null.

    Of a dictionary the indices count, since the words belong to many rows.
    """
    import pyarrow as pa

    if column.null_count == len(column):
        return
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    if isinstance(column, pa.StructArray):
        for i in range(column.type.num_fields):
            yield from _unpacked(column.field(i))
    else:
        yield column.indices if isinstance(column, pa.DictionaryArray) else column


def _memory_of_column(column: Any, files: dict[int, str]) -> Hashable | None:
    """Return where the values of a column lie; None where they take no memory, as those without a length.

    What columns of other rows may share does not count: here the bits that say which rows are null.
    """
    buffers = column.buffers()[1:]
    if not any(buffer is not None and buffer.size for buffer in buffers):
        return None
    begins, inner = [], column
    while (inner := getattr(inner, "values", None)) is not None:  # of lists, which may begin anywhere in their memory
        begins.append(inner.offset)
    return (*(_place(buffer, files) for buffer in buffers), *begins)


def _joined(names: np.ndarray, bases: Bases) -> np.ndarray:
    """Return names which are equal, too, where the rows of tables have only some columns in the same memory, or are
    both in this way one row with a third."""
    pieces = _joining_pieces(bases)
    joined, others = names.copy(), []
    for layer in range(max(map(len, pieces.values()), default=0)):
        piece, shift = np.full(len(bases), -1), np.zeros(len(bases), np.int64)
        for base, its in pieces.items():
            if layer < len(its):
                piece[base], shift[base] = its[layer], bases.columns[base][its[layer]]
        rows = np.flatnonzero(piece[names[0]] >= 0)
        base, row = names[:, rows]
        place = np.stack([piece[base], row + shift[base]])
        if layer:
            others.append((rows, place))
        else:
            joined[:, rows] = place
    return _linked(joined, others) if others else joined


def _joining_pieces(bases: Bases) -> dict[int, list[int]]:
    """Return for the bases which have a column in the same memory as others the pieces of memory that join their rows,
    without those that join no more than another one."""
    found: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for base, columns in bases.columns.items():
        for piece, shift in columns.items():
            found[piece][base] = shift
    kept: defaultdict[int, list[int]] = defaultdict(list)
    for piece, shifts in sorted(found.items(), key=lambda each: -len(each[1])):
        some = next(iter(shifts))
        is_known = len(shifts) == 1 or any(_is_within(shifts, found[other], some) for other in kept[some])
        if not is_known and _tells_rows(piece, shifts, bases):
            for base in shifts:
                kept[base].append(piece)
    return kept


def _tells_rows(piece: int, shifts: dict[int, int], bases: Bases) -> bool:
    """Whether those are one row which have this piece of memory in common.

    They are not where all values of the piece are equal, as weights of 1 that two data sets were given, and each has
    columns which the other has not. Only then values are looked at.
    """
    columns = [bases.columns[base] for base in shifts]
    most = max(columns, key=len)
    if all(_is_within(each, most, piece) for each in columns):
        return True
    parts = [_bits(part) for part in bases.parts[piece].values()]
    value = parts[0][0]
    return not all(part[0].equals(value) and part[1:].equals(part[:-1]) for part in parts)


def _bits(column: Any) -> Any:
    """Return a column of floats as integers, of which NaN is equal to itself."""
    import pyarrow as pa

    return column.view(f"int{column.type.bit_width}") if pa.types.is_floating(column.type) else column


def _is_within(some: dict[int, int], more: dict[int, int], start: int) -> bool:
    """Whether all keys of one dict are in the other, with values as far from that of ``start``."""
    return all(key in more and more[key] - more[start] == value - some[start] for key, value in some.items())


def _linked(names: np.ndarray, others: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return names of rows, some of which have other names, too: two rows with one name get the same."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = names.shape[1]
    rows = np.concatenate([np.arange(count), *(rows for rows, _ in others)])
    order, is_same = _sorted(np.concatenate([names, *(place for _, place in others)], axis=1))
    links = rows[order[:-1][is_same]], rows[order[1:][is_same]]
    _, linked = connected_components(coo_array((np.ones(len(links[0]), bool), links), (count, count)), directed=False)
    return np.stack([np.zeros_like(linked), linked])


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
