"""Joins rows that were collated alone to a batch as their collator would have made it.

Its way to join rows is learned once (:mod:`.ways_to_join`). A row of a batch then depends on its own example and on
the length of the batch alone.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from .columns import are_alike, are_same, as_tensor, columns_of, filled, inner, named, size_of, tensors_of
from .ways_to_join import Column, WaysToJoin, block_of, refusal

logger = logging.getLogger(__name__)

_TRIES = 16  # pairs that are collated until the padding of a column is known
_ROWS_TO_LEARN_FROM = (0, 16, 64, 256, 1024)  # of the data set, beside those of the draw, until they are enough
Sizes = dict[str, dict[int, tuple[str, list[int]]]]  # by column and dimension: the side, and the own size of each row


class Joiner:
    """Joins rows that were collated alone.

    Args:
        together: ``together(keys, purpose)`` returns the collator's own batch of the examples of these keys. Each
            purpose has random numbers of its own.
        rows: The number of rows of the data set, which have the keys 0, 1, 2, ...
    """

    def __init__(self, together: Callable[[Sequence[int], str], Any], rows: int):
        self._together, self._rows = together, rows
        self._ways = WaysToJoin()
        self._singles: dict[int, Any] = {}  # of the draw, by their keys
        self._has_learned = False
        self._parts: Sequence[Any] = ()  # the rows that are joined
        self._sizes: Sizes = {}
        self._rows_per_example: list[set[int]] = []

    def begin(self, singles: Sequence[Any], keys: Sequence[int]) -> None:
        """Take the rows of a draw. In the first draw, learn how the collator joins them."""
        self._singles = dict(zip(keys, singles, strict=True))
        if not self._has_learned and singles:
            self._learn()
            self._has_learned = True
            self._warn_of_what_is_done_across_rows()

    def join(self, singles: Sequence[Any]) -> tuple[Any, Sizes]:
        """Return the batch, and the own sizes of the rows in its padded columns.

        Raises:
            ValueError: the rows have different columns, or sizes that the collator does not pad.
        """
        if self._ways.is_longest_first:
            singles = sorted(singles, key=size_of, reverse=True)
        self._parts, self._sizes, self._rows_per_example = singles, {}, []
        if len(singles) == 1:
            return singles[0], {}
        batch = self._joined("", singles)
        counts = self._rows_per_example
        if counts and {1} not in counts:
            several = sorted(set.union(*counts))
            raise refusal(f"the collator makes {several[-1] if several[0] else 'no'} rows of one example")
        return batch, self._sizes

    def _joined(self, path: str, parts: Sequence[Any]) -> Any:
        first = parts[0]
        if len(kinds := {*map(type, parts)}) > 1:
            names = " or a ".join(sorted(kind.__name__ for kind in kinds))
            raise refusal(f"{named(path)} that the collator returns is a {names}, depending on the example")
        if isinstance(first, torch.Tensor):
            return self._joined_tensors(path, parts)
        if isinstance(first, np.ndarray):
            if first.dtype.kind not in "biufc":
                return np.concatenate(parts)
            return self._joined_tensors(path, [cast(torch.Tensor, as_tensor(x)) for x in parts]).numpy()
        if isinstance(first, PackedSequence):
            self._rows_per_example.append({int(x.batch_sizes[0]) for x in parts})
            return pack_sequence([x.data for x in parts], enforce_sorted=first.sorted_indices is None)
        counts = {*map(len, parts)} if isinstance(first, (list, tuple)) else set()
        if path in self._ways.lists_of_rows or len(counts) > 1:
            self._rows_per_example.append(counts)
            return type(first)(itertools.chain.from_iterable(parts))
        if columns_of(first) is None:
            return self._of_the_whole_batch(path, parts)
        columns = [columns_of(part) or {} for part in parts]
        for other in columns:
            if differing := other.keys() ^ columns[0].keys():
                raise refusal(f"whether '{min(map(str, differing))}' is in a batch depends on what examples are in it")
        return filled(first, {k: self._joined(inner(path, k), [x[k] for x in columns]) for k in columns[0]})

    def _of_the_whole_batch(self, path: str, parts: Sequence[Any]) -> Any:
        """Return what all rows share: a number that is the same in all, or their largest size; the largest tensor,
        which begins, or ends, with those of all rows."""
        if not isinstance(parts[0], torch.Tensor):
            of_a_size = path in self._ways.largest and all(map(_is_a_size, parts, self._parts))
            found = max(parts) if of_a_size else parts[0]
            if of_a_size or all(part is found or part == found for part in parts):
                return found
        else:
            found = max(parts, key=torch.Tensor.numel)
            for side in ("right", "left"):
                sides = dict.fromkeys(range(found.dim()), side)
                if all(are_same(x, found[block_of(x.shape, found.shape, sides)]) for x in parts):
                    return found
        raise refusal(
            f"{named(path)}, which is for the whole batch and not for each row, differs between examples (as in "
            "joined graphs: pad nodes and edges to one size, with a mask)"
        )

    def _joined_tensors(self, path: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        column, shapes = self._ways.columns.setdefault(path, Column()), {(x.dtype, x.shape) for x in parts}
        if len({(dtype, len(shape)) for dtype, shape in shapes}) > 1:
            parts = _of_one_type(path, parts)
        if column.rows_in is None:
            return self._of_the_whole_batch(path, parts)
        if column.offsets_of is not None:
            return self._joined_offsets(column.offsets_of, parts)
        rows = [column.rows_of(x) for x in parts]
        is_padded = len(shapes) > 1 and len({x.shape[1:] for x in rows}) > 1
        joined, counts = self._padded(path, column, rows) if is_padded else torch.cat(rows), {x.shape[0] for x in rows}
        if column.by_parts and len(counts) == 1:
            joined, counts = joined.unflatten(0, (len(parts), -1)).transpose(0, 1).flatten(0, 1), {1}
        self._rows_per_example.append(counts)
        return joined.movedim(0, column.rows_in)

    def _padded(self, path: str, column: Column, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = [max(sizes) for sizes in zip(*(x.shape[1:] for x in rows), strict=True)]
        padded = [d for d, n in enumerate(shape, 1) if any(x.shape[d] != n for x in rows)]
        for d in padded:
            if not column.is_known(d):
                self._learn(path, d)
            if not column.is_known(d):
                raise refusal(
                    f"{named(path)} of single examples has shapes as {tuple(rows[0].shape[1:])} and "
                    f"{tuple(rows[-1].shape[1:])}, and the collator does not pad them with a constant, or it is not "
                    "seen in two pairs of other rows of the data set"
                )
        if all(x.shape[0] == 1 for x in rows):
            self._sizes[path] = {d: (column.sides.get(d, "right"), [x.shape[d] for x in rows]) for d in padded}
        if column.fill is None:  # by place
            return self._of_the_whole_batch(path, rows).expand(len(rows), *shape).clone()
        joined, at = column.fill.to(rows[0]).expand(sum(x.shape[0] for x in rows), *shape).clone(), 0
        for x in rows:
            _, *block = block_of(x.shape, joined.shape, column.sides)
            joined[(slice(at, at + x.shape[0]), *block)] = x
            at += x.shape[0]
        return joined

    def _joined_offsets(self, ids: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        starts = np.cumsum([0, *(len(dict(tensors_of(single))[ids]) for single in self._parts)])
        self._rows_per_example.append({1})
        last = [parts[0].new_tensor(starts[-1:])] if len(parts[0]) > 1 else []  # the end, if it is among them
        return torch.cat([*(x[:1] + int(n) for x, n in zip(parts, starts, strict=False)), *last])

    # ---- learning ----

    def _learn(self, path: str = "", dim: int = 0) -> None:
        """Collate pairs of a short and a long row, all of them different, first of the draw and then of the data set;
        for a dimension of a column, until its padding is known."""
        column = self._ways.columns.get(path)

        def size(row: Any) -> int:
            x = dict(tensors_of(row)).get(path) if dim else None
            return size_of(row) if column is None or x is None else column.rows_of(x).shape[dim]

        sizes = {key: size(row) for key, row in self._singles.items()}
        for count in _ROWS_TO_LEARN_FROM:
            count = min(count, self._rows)
            keys = {k * self._rows // count for k in range(count)} - sizes.keys()
            sizes |= {key: size(self._together([key], "sizes")) for key in keys}
            order = sorted(sizes, key=sizes.__getitem__)
            pairs = list(zip(order, reversed(order), strict=True))[: len(order) // 2]
            pairs = [pair for pair in pairs if not dim or sizes[pair[0]] < sizes[pair[1]]]
            for number, pair in zip(range(_TRIES if dim else 2), itertools.cycle(pairs), strict=False):
                short, long, both = (self._together(k, f"pair {number}") for k in (pair[:1], pair[1:], pair))
                self._ways.learn(frozenset(pair), short, long, both)
                if column is not None and column.is_known(dim):
                    return
            if pairs and not dim:
                return

    def _warn_of_what_is_done_across_rows(self) -> None:
        """Warn if the collator makes a different batch of two examples than the joined one, and draws no numbers."""
        keys = [next(iter(self._singles)), next(reversed(self._singles))]
        singles, again = ([self._together([key], purpose) for key in keys] for purpose in ("one", "again"))
        if not all(map(are_alike, singles, again)):
            return
        own, joined = dict(tensors_of(self._together(keys, "one"))), dict(tensors_of(self.join(singles)[0]))
        differing = [k for k, x in own.items() if k not in joined or not are_alike(x, joined[k])]
        worker = torch.utils.data.get_worker_info()
        if differing and (worker is None or worker.id == 0):
            logger.warning(
                "the collator makes something else of two examples together than of each alone (%s differs), as "
                "MixUp, CutMix or a mean over the batch do. Here each example is collated alone, so that part of the "
                "collator does nothing. If the training needs it, compute it for each example by itself.",
                named(differing[0]),
            )


def _is_a_size(number: int, single: Any) -> bool:
    """Return True if a number is the length of a tensor in a row."""
    return any(number in x.shape for _, x in tensors_of(single))


def _of_one_type(path: str, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors of a column, empty ones in the type of the others."""
    types = {(x.dtype, x.dim()) for x in parts if x.numel()}
    if len(types) > 1 or len({x.dim() for x in parts}) > 1:
        names = " or ".join(sorted(f"{dtype} of {dim} dimensions" for dtype, dim in types))
        raise refusal(f"of what type {named(path)} is in a batch depends on what examples are in it: {names}")
    return [x.to(dtype) for x in parts for dtype, _ in types]
