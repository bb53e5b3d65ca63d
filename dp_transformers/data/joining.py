"""Rows that were collated alone, joined to a batch as their collator would have made it.

How the collator joins is learned from itself, once: it is given two examples together, and what it made of them is
compared with what it makes of each alone. On which side and with which number a column is padded must be the same for
two pairs of examples, so that the number is the collator's and no example's. A row of a batch then depends on its own
example and on the length of the batch alone.

Shape legend: B examples, R rows of a column, as many as examples where each has one.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ..mechanism.values import equal_or_nan

logger = logging.getLogger(__name__)

_IGNORED = -100  # the label that collators pad with
_PAIRS = 2  # of examples, which must agree on what a column is padded with
_TRIES = 16
Sizes = dict[str, dict[int, tuple[str, list[int]]]]  # by column and dimension: the side, and the own size of each row


@dataclass
class Column:
    """How a collator joins one tensor of its batches.

    Attributes:
        rows_in: The dimension of the rows; None where there is one tensor for the whole batch.
        is_dropped: Of a single example the collator leaves that dimension out, as ``squeeze()`` does.
        by_parts: An example has several rows, and the first ones of all examples come before the second ones.
        offsets_of: The column of ids that these numbers are offsets of.
        shifted_from: The labels that these decoder inputs are, one position later.
        sides: On which side each dimension is padded, with the rows in dimension 0.
        fill: What it is padded with: a number, or one for each entry of a dimension that is not padded.
        is_by_place: All rows of a batch are the same: the numbers of places.
        pairs: How many pairs of examples have told the fill.
    """

    rows_in: int | None = 0
    is_dropped: bool = False
    by_parts: bool = False
    offsets_of: str | None = None
    shifted_from: str | None = None
    sides: dict[int, str] = field(default_factory=dict)
    fill: torch.Tensor | None = None
    is_by_place: bool = False
    pairs: int = 0

    @property
    def is_padded(self) -> bool:
        """Whether its rows are joined as they are, with padding where they are shorter than others."""
        return self.rows_in is not None and self.offsets_of is None and self.shifted_from is None

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a single example with the rows first."""
        x = x.unsqueeze(self.rows_in or 0) if self.is_dropped else x
        return x.movedim(self.rows_in, 0) if self.rows_in else x


@dataclass(frozen=True)
class _Padded:
    """A way in which a single example may lie in a row of a batch."""

    sides: dict[int, str]
    fill: torch.Tensor | None
    is_exact: bool  # the numbers of the example are found again


class Joiner:
    """Joins rows that were collated alone.

    Args:
        together: ``together(keys, purpose)`` returns what the collator makes of the examples of these keys; for
            another purpose with other random numbers.
    """

    def __init__(self, together: Callable[[Sequence[Any], str], Any]):
        self._together = together
        self._columns: dict[str, Column] = {}
        self._lists_of_rows: set[str] = set()  # lists that have an entry for each row, and are no list of columns
        self._largest: set[str] = set()  # whole numbers for a batch that are the largest of its rows'
        self._has_learned = self._is_longest_first = False
        self._draws_lengths = False  # as crops at random do: then the first of two examples alone is as long as before
        self._singles: Sequence[Any] = ()  # of the draw
        self._keys: Sequence[Any] = ()
        self._asked: set[str] = set()  # the columns for which pairs of this draw were collated
        self._parts: Sequence[Any] = ()  # the rows that are joined
        self._sizes: Sizes = {}
        self._rows_per_example: list[set[int]] = []

    def begin(self, singles: Sequence[Any], keys: Sequence[Any]) -> None:
        """Take the rows of a draw, of which pairs may be collated together to learn how."""
        self._singles, self._keys, self._asked = singles, keys, set()
        if not self._has_learned and len(singles) > 1:
            self._learn(sorted(range(len(singles)), key=lambda i: size_of(singles[i])))
            self._has_learned = True
            self._say_what_is_done_across_rows()

    def join(self, singles: Sequence[Any]) -> tuple[Any, Sizes]:
        """Return the batch, and the own sizes of the rows in its padded columns.

        Raises:
            ValueError: the rows have no common columns, or sizes that the collator does not pad.
        """
        if self._is_longest_first:
            singles = sorted(singles, key=size_of, reverse=True)
        self._parts, self._sizes, self._rows_per_example = singles, {}, []
        if len(singles) == 1:
            return singles[0], {}
        batch = self._joined("", singles)
        counts = self._rows_per_example
        if counts and {1} not in counts:
            several = sorted(set.union(*counts))
            raise ValueError(
                f"the collator makes {several[-1] if several[0] else 'no'} rows of one example, but each example must "
                "be one row, which is clipped by itself. Cut examples into windows, or leave some out, before "
                "training, and say with max_examples_per_person how many rows one person may then have."
            )
        return batch, self._sizes

    # ---- joining ----

    def _joined(self, path: str, parts: Sequence[Any]) -> Any:
        first = parts[0]
        if len(kinds := {type(part) for part in parts}) > 1:
            raise ValueError(
                f"{_name(path)} of what the collator returns is a {' or a '.join(sorted(k.__name__ for k in kinds))}, "
                "depending on the example, so other examples would decide what a row is given. Let it return the same "
                "for every example, with a constant for one that has none."
            )
        if isinstance(first, torch.Tensor):
            return self._joined_tensors(path, parts)
        if isinstance(first, np.ndarray):
            if first.dtype.kind not in "biufc":
                return np.concatenate(parts)
            return self._joined_tensors(path, [cast(torch.Tensor, _tensor(x)) for x in parts]).numpy()
        if isinstance(first, PackedSequence):
            self._rows_per_example.append({int(x.batch_sizes[0]) for x in parts})
            return pack_sequence([x.data for x in parts], enforce_sorted=first.sorted_indices is None)
        counts = {len(part) for part in parts} if isinstance(first, (list, tuple)) else set()
        if path in self._lists_of_rows or len(counts) > 1:
            self._rows_per_example.append(counts)
            return type(first)(itertools.chain.from_iterable(parts))
        if _columns_of(first) is None:
            return self._the_same(path, parts)
        columns = [_columns_of(part) or {} for part in parts]
        for other in columns:
            if other.keys() != columns[0].keys():
                name = sorted(map(str, other.keys() ^ columns[0].keys()))[0]
                raise ValueError(
                    f"whether '{name}' is in a batch depends on what examples are in it: the collator returns it for "
                    "some examples only, so they would decide what is computed for the others. Return it for every "
                    "example, with a constant for one that has none, or take physical batches of one row."
                )
        return _filled(first, {k: self._joined(_inner(path, k), [x[k] for x in columns]) for k in columns[0]})

    def _the_same(self, path: str, parts: Sequence[Any]) -> Any:
        first = parts[0]
        if path in self._largest and all(map(_is_a_size, parts, self._parts)):
            return max(parts)
        if any(part is not first and part != first for part in parts):
            raise ValueError(
                f"{_name(path)}, which the collator gives for the whole batch and not for each row, is another for "
                "another example, so each example has a say in what is computed for the others. Return a tensor or a "
                "list with an entry for each row."
            )
        return first

    def _joined_tensors(self, path: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        column, parts = self._column(path, parts), _of_one_type(path, parts)
        if column.rows_in is None:
            return self._of_the_whole_batch(path, parts)
        if column.offsets_of is not None:
            return self._joined_offsets(column.offsets_of, parts)
        if column.shifted_from is not None:
            return self._shifted(path, column, parts)
        rows = [column.rows_of(x) for x in parts]
        count = {len(x) for x in rows}
        are_apart = column.by_parts and len(count) == 1
        self._rows_per_example.append({1} if are_apart else count)
        if len({x.shape[1:] for x in rows}) > 1:
            joined = self._padded(path, column, rows)
        else:
            joined = torch.cat(rows)
        if are_apart:
            joined = joined.unflatten(0, (len(parts), -1)).transpose(0, 1).flatten(0, 1)
        return joined.movedim(0, column.rows_in) if column.rows_in else joined

    def _column(self, path: str, parts: Sequence[torch.Tensor]) -> Column:
        """Return what is known of a column, after pairs of the draw were asked for what is not."""
        column = self._columns.get(path)
        if column is not None and not column.is_padded:
            return column
        shapes = {(column or Column()).rows_of(x).shape[1:] for x in parts}
        differing = [d for d, sizes in enumerate(zip(*shapes, strict=False), 1) if len(set(sizes)) > 1]
        unknown = [d for d in differing if column is None or d not in column.sides or column.pairs < _PAIRS]
        if (unknown or column is None) and path not in self._asked and len(self._singles) > 1:
            self._asked.add(path)
            own = {i: x for i, single in enumerate(self._singles) for name, x in tensors_of(single) if name == path}
            for d in unknown or [0]:
                order = sorted(own, key=lambda i: (own[i].shape[d : d + 1], own[i].numel()))
                self._learn(order, lambda d=d: not d or d in getattr(self._columns.get(path), "sides", ()))
        return self._columns.get(path) or Column()

    def _padded(self, path: str, column: Column, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = [max(sizes) for sizes in zip(*(x.shape[1:] for x in rows), strict=True)]
        padded = [d for d, n in enumerate(shape, 1) if any(x.shape[d] != n for x in rows)]
        if column.is_by_place and column.fill is None:
            self._sizes[path] = {d: ("right", [x.shape[d] for x in rows]) for d in padded}
            return self._of_the_whole_batch(path, rows).expand(len(rows), *shape).clone()
        if column.fill is None or any(d not in column.sides for d in padded):
            raise ValueError(
                f"{_name(path)} of single examples has shapes as {tuple(rows[0].shape[1:])} and "
                f"{tuple(rows[-1].shape[1:])}, and the collator does not pad them with a constant beside their own "
                "numbers: other examples would decide how a row is cut, resized or filled up. Give all examples one "
                "size before they are collated, or pad with one number."
            )
        joined = column.fill.to(rows[0]).expand(sum(map(len, rows)), *shape).clone()
        at = 0
        for x in rows:
            block = [slice(at, at := at + len(x)), *[slice(None)] * len(shape)]
            for d in padded:
                n, own = shape[d - 1], x.shape[d]
                block[d] = slice(own) if column.sides[d] == "right" else slice(n - own, n)
            joined[tuple(block)] = x
        if all(len(x) == 1 for x in rows):
            self._sizes[path] = {d: (column.sides[d], [x.shape[d] for x in rows]) for d in padded}
        return joined

    def _of_the_whole_batch(self, path: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor that all rows share: the largest, of which those of all rows are the beginning, or the
        end."""
        longest = max(parts, key=torch.Tensor.numel)
        for begins in (True, False):
            if all(are_same(x, longest[_block(longest.shape, x.shape, begins=begins)]) for x in parts):
                return longest
        raise ValueError(
            f"{_name(path)}, which the collator gives for the whole batch and not for each row, is another for "
            "another example, so each example has a say in what is computed for the others. Return a tensor with an "
            "entry for each row, computed from that row alone."
        )

    def _joined_offsets(self, ids: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        starts = np.cumsum([0, *(len(dict(tensors_of(single))[ids]) for single in self._parts)])
        self._rows_per_example.append({1})
        last = [parts[0].new_tensor(starts[-1:])] if len(parts[0]) > 1 else []  # where the end is among them
        return torch.cat([*(x[:1] + int(n) for x, n in zip(parts, starts, strict=False)), *last])

    def _shifted(self, path: str, column: Column, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        name = str(column.shifted_from)
        labels = self._joined_tensors(name, [dict(tensors_of(single))[name] for single in self._parts])
        if name in self._sizes:
            self._sizes[path] = self._sizes[name]
        return _shift(torch.cat([x[:, :1] for x in parts]), labels, column.fill)

    # ---- learning ----

    def _learn(self, order: Sequence[int], is_known: Callable[[], bool] = lambda: True) -> None:
        """Learn from pairs of the draw, given in the order of their sizes: the first with the last, and the second
        with the last but one. Where the collator draws the lengths of rows, several tries may be needed."""
        pairs = list(zip(order, reversed(order), strict=True))[: min(_PAIRS, max(1, len(order) // 2))]
        for number in range(_TRIES):
            purpose = f"pair {number}"
            alone = {i: self._together([self._keys[i]], purpose) for pair in pairs for i in pair}
            self._draws_lengths |= any(_shapes_of(self._singles[i]) != _shapes_of(x) for i, x in alone.items())
            for short, long in pairs:
                both = self._together([self._keys[short], self._keys[long]], purpose)
                self._compare(alone[short], alone[long], both)
            if is_known():
                return

    def _compare(self, short: Any, long: Any, pair: Any) -> None:
        """Learn from a batch of two examples how each of them lies in it."""
        found = {path: x for path, *x in self._triples("", short, long, pair) if x[0].layout is torch.strided}
        for path, (a, b, p) in found.items():
            if (known := self._columns.get(path)) is None or (known.is_padded and known.fill is None):
                self._columns[path] = _kind_of(path, a, b, p, found)
        lying = [(self._columns[path], path, *x) for path, x in found.items() if self._columns[path].is_padded]
        ways = [{path: _ways(column, a, b, p, at) for column, path, a, b, p in lying} for at in (0, 1)]
        exact = [sum(bool(_exact(of_a) and _exact(of_b)) for of_a, of_b, _ in each.values()) for each in ways]
        is_second = exact[1] > exact[0]  # the first example is the second row
        self._is_longest_first |= is_second and size_of(short) < size_of(long)
        votes: dict[tuple[int, int], str] = {}  # the sides on which columns of these sizes are surely padded
        for is_sure in (True, False):
            for column, path, *x, p in lying:
                *candidates, column.by_parts = ways[is_second][path]
                for own, of_own in zip(x, candidates, strict=True):
                    if self._draws_lengths:
                        of_own = _exact(of_own) if own is x[0] else []
                    of_own = _exact(of_own) or of_own
                    if of_own and is_sure == (len(of_own) == 1 and of_own[0].is_exact):
                        _take(path, column, own, p, of_own, votes)
        for column, path, a, b, p in lying:
            is_known = column.fill is not None or self._draws_lengths or all(map(bool, ways[is_second][path][:2]))
            column.is_by_place |= not is_known and len(a) == len(b) == 1 and len(p) == 2 and are_same(p[0], p[1])
            column.pairs += column.fill is not None and bool(_longer(column, a, p) or _longer(column, b, p))

    def _triples(self, path: str, a: Any, b: Any, p: Any) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield the tensors that two examples have alone, and together."""
        if isinstance(a, torch.Tensor) and a.is_nested:
            raise ValueError(
                f"{_name(path)} is a nested tensor, whose rows cannot be taken one by one. Pad the rows, and return a "
                "mask that says which positions are an example's own."
            )
        if isinstance(a, (torch.Tensor, np.ndarray)):
            tensors = [x for x in map(_tensor, (a, b, p)) if x is not None]
            if len(tensors) == 3:
                yield path, tensors[0], tensors[1], tensors[2]
        elif isinstance(a, PackedSequence):
            self._is_longest_first |= a.sorted_indices is None
        elif isinstance(a, (list, tuple)) and isinstance(p, (list, tuple)) and len(p) == len(a) + len(b):
            self._lists_of_rows.add(path)
        elif type(a) is type(b) is type(p) is int:
            self._largest |= {path} if a != b and p == max(a, b) else set()
        else:
            columns = [_columns_of(x) or {} for x in (a, b, p)]
            for k in columns[0]:
                if k in columns[1] and k in columns[2]:
                    yield from self._triples(_inner(path, k), *(x[k] for x in columns))

    def _say_what_is_done_across_rows(self) -> None:
        """Warn if the collator makes something else of two examples together than of each alone, and draws no numbers
        for one."""
        chosen = [0, len(self._singles) - 1]
        pair = self._together([self._keys[i] for i in chosen], "one")
        own = dict(tensors_of(pair))
        singles, again = ([self._together([self._keys[i]], purpose) for i in chosen] for purpose in ("one", "again"))
        joined = dict(tensors_of(self.join(singles)[0]))
        is_random = any(
            not _are_alike(dict(tensors_of(x)), dict(tensors_of(y))) for x, y in zip(singles, again, strict=True)
        )
        differing = [k for k, x in own.items() if k not in joined or not _are_alike({k: x}, {k: joined[k]})]
        worker = torch.utils.data.get_worker_info()
        if differing and not is_random and (worker is None or worker.id == 0):
            logger.warning(
                "the collator makes something else of two examples together than of each alone (%s differs), as "
                "MixUp, CutMix or a mean over the batch do. Here each example is collated alone, so that part of the "
                "collator does nothing. If the training needs it, compute it for each example by itself.",
                _name(differing[0]),
            )


def size_of(row: Any) -> int:
    """Return how many numbers, characters and other entries a row has."""
    if isinstance(row, torch.Tensor):
        return row.numel()
    if isinstance(row, PackedSequence):
        return row.data.numel()
    if isinstance(row, np.ndarray):
        return row.size
    if isinstance(row, (str, bytes)):
        return len(row)
    columns = _columns_of(row)
    return 1 if columns is None else sum(map(size_of, columns.values()))


# ---- containers ----


def _columns_of(x: Any) -> Mapping[Any, Any] | None:
    """Return what a container holds by name or place; None for what is none."""
    if isinstance(x, Mapping):
        return x
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    attributes = getattr(x, "__dict__", {})
    if dataclasses.is_dataclass(x) or any(isinstance(y, (torch.Tensor, np.ndarray)) for y in attributes.values()):
        return attributes  # of a class of the user's
    return None


def _filled(container: Any, columns: dict[Any, Any]) -> Any:
    """Return a container like this one with other columns."""
    if type(container) is dict:
        return columns
    if isinstance(container, Mapping):
        made: Any = copy.copy(container)
        for name, x in columns.items():
            made[name] = x
        return made
    if isinstance(container, (list, tuple)):
        kind = type(container)
        return kind(*columns.values()) if hasattr(kind, "_fields") else kind(columns.values())
    made = copy.copy(container)
    made.__dict__.update(columns)
    return made


def _inner(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _name(path: str) -> str:
    return f"'{path}'" if path else "the tensor"


def _tensor(x: Any) -> torch.Tensor | None:
    if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
        return torch.from_numpy(np.require(x, requirements="W"))
    return x if isinstance(x, torch.Tensor) else None


def leaves_of(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what the containers of a batch or an example hold, with their paths; arrays as tensors."""
    x = _tensor(batch)
    columns = None if x is not None or isinstance(batch, PackedSequence) else _columns_of(batch)
    if columns is None:
        yield path, batch if x is None else x
        return
    for key, inner in columns.items():
        yield from leaves_of(inner, _inner(path, key))


def tensors_of(batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors and arrays of a batch with their paths."""
    return ((path, x) for path, x in leaves_of(batch) if isinstance(x, torch.Tensor))


def _of_one_type(path: str, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors of a column, those without numbers in the type of the others."""
    types = {(x.dtype, x.dim()) for x in parts}
    if len(types) == 1:
        return parts
    types = {(x.dtype, x.dim()) for x in parts if x.numel()}
    if len(types) > 1 or len({x.dim() for x in parts}) > 1:
        raise ValueError(
            f"of what type {_name(path)} is in a batch depends on what examples are in it: the collator makes "
            f"{' or '.join(sorted(f'{dtype} of {dim} dimensions' for dtype, dim in types))} of one. Let it make one "
            "type of all (dtype=..., or the same type in every row of the data set)."
        )
    return [x.to(dtype) for x in parts for dtype, _ in types]


def _shapes_of(row: Any) -> dict[str, torch.Size]:
    return {path: x.shape for path, x in tensors_of(row) if not x.is_nested}


def _is_a_size(number: int, single: Any) -> bool:
    """Return whether a number is the length of something in a row, and so no content of it."""
    return any(number in x.shape for _, x in tensors_of(single))


def are_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and numbers; nan is one."""
    return x.shape == y.shape and bool(equal_or_nan(x, y).all())


def _are_alike(x: Mapping[str, torch.Tensor], y: Mapping[str, torch.Tensor]) -> bool:
    """Return whether tensors of these names are the same, but for rounding."""
    return x.keys() == y.keys() and all(
        a.shape == y[k].shape and a.dtype == y[k].dtype and torch.allclose(a.double(), y[k].double(), equal_nan=True)
        for k, a in x.items()
        if a.layout is torch.strided and not a.is_complex()
    )


# ---- how a column is joined ----


def _kind_of(path: str, a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, found: Mapping[str, Any]) -> Column:
    """Return how a tensor of two examples, a and b alone and p together, is joined, but for its padding."""
    if p.dim() == a.dim() + 1:
        rows_in = next((d for d in range(p.dim()) if p.shape[d] == 2 and _holds(p.movedim(d, 0)[0], a)), None)
        if rows_in is not None:
            return Column(rows_in, is_dropped=True)
    if not a.dim() or p.dim() != a.dim():
        return Column(None)
    if (offsets_of := _ids_of_offsets(path, a, b, p, found)) is not None:
        return Column(offsets_of=offsets_of)
    if (labels := _labels_of_inputs(path, a, b, p, found)) is not None:
        return Column(shifted_from=labels, fill=p[:, 1:][found[labels][2][:, :-1] == _IGNORED][0])
    if len(p) == len(a) + len(b):
        return Column()
    if p.dim() > 1 and p.shape[1] == 2 and a.shape[1] == b.shape[1] == 1:
        return Column(1)
    if p.dim() > 1 and len(a) == len(b) == len(p) == 1 and p.shape[1] == a.shape[1] + b.shape[1] > 2:
        raise ValueError(
            f"the collator made one row of 2 examples ({_name(path)}), and not one of each. Packing joins several "
            "examples in one row, so the norm of a row is not the norm of an example. Switch packing, padding_free "
            "and flattening collators off, and use one that pads (DataCollatorWithPadding, or that of your trainer "
            "without packing)."
        )
    return Column(None)


def _ids_of_offsets(
    path: str, a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, found: Mapping[str, Any]
) -> str | None:
    """Return the column that these are offsets of, if the numbers of the second example go on where the ids of the
    first one end."""
    if a.dim() != 1 or a.is_floating_point() or not len(b) or len(p) not in (2, 3) or bool(a[0] != 0):
        return None
    for other, (ids, _, all_ids) in found.items():
        ends = b if len(p) == 2 else b[1:]
        is_flat = other != path and ids.dim() == 1 and len(all_ids) > len(ids) > 0
        if is_flat and are_same(p, torch.cat([a, ends + len(ids)])):
            return other
    return None


def _labels_of_inputs(
    path: str, a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, found: Mapping[str, Any]
) -> str | None:
    """Return the labels that decoder inputs are made of."""
    labels = path.removesuffix("decoder_input_ids") + "labels"
    if not path.endswith("decoder_input_ids") or labels not in found:
        return None
    pairs = zip((a, b, p), found[labels], strict=True)
    padding = p[:, 1:][found[labels][2][:, :-1] == _IGNORED] if p.shape == found[labels][2].shape else p[:0]
    if not padding.numel():
        return None
    fill = padding[0]
    is_one = all(x.shape == y.shape and are_same(x, _shift(x[:, :1], y, fill)) for x, y in pairs)
    return labels if is_one else None


def _shift(first: torch.Tensor, labels: torch.Tensor, fill: Any) -> torch.Tensor:
    return torch.cat([first, labels[:, :-1].where(labels[:, :-1] != _IGNORED, fill)], 1)


def _holds(x: torch.Tensor, y: torch.Tensor) -> bool:
    return all(m >= n for m, n in zip(x.shape, y.shape, strict=True))


def _block(shape: Sequence[int], own: Sequence[int], *, begins: bool) -> tuple[slice, ...]:
    """Return where numbers of one shape lie at the beginning, or at the end, of those of another."""
    return tuple(slice(n) if begins else slice(m - n, m) for m, n in zip(shape, own, strict=True))


# ---- how it is padded ----


def _longer(column: Column, own: torch.Tensor, pair: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the dimensions in which an example is padded beside another one, with its own size and the padded one."""
    own, pair = column.rows_of(own), pair.movedim(column.rows_in or 0, 0)
    return [(d, n, m) for d, (n, m) in enumerate(zip(own.shape[1:], pair.shape[1:], strict=True), 1) if n != m]


def _ways(
    column: Column, a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, at: int
) -> tuple[list[_Padded], list[_Padded], bool]:
    """Return how two examples may lie in a batch of both where the first is the row ``at``; and whether the rows of an
    example are apart there."""
    a, b, p = column.rows_of(a), column.rows_of(b), p.movedim(column.rows_in or 0, 0)
    first, second = (a, b) if at == 0 else (b, a)
    found = []
    for by_parts in (True, False) if len(a) == len(b) > 1 else (False,):
        rows = (p[0::2], p[1::2]) if by_parts else (p[: len(first)], p[len(first) :])
        of_first, of_second = _lies(rows[0], first), _lies(rows[1], second)
        found.append((of_first, of_second, by_parts) if at == 0 else (of_second, of_first, by_parts))
    return max(found, key=lambda each: bool(_exact(each[0])) + bool(_exact(each[1])))


def _lies(row: torch.Tensor, own: torch.Tensor) -> list[_Padded]:
    """Return on which sides the row may be padded: what is not its own there is constant along what is padded."""
    dims = [d for d in range(1, own.dim()) if own.shape[d] != row.shape[d]]
    if len(row) != len(own) or any(own.shape[d] > row.shape[d] for d in dims):
        return []
    if not dims or not row.numel():
        return [_Padded({}, None, are_same(row, own))]
    found = []
    for sides in itertools.product(("right", "left"), repeat=len(dims)):
        block, corner = [slice(None)] * row.dim(), [slice(0, 1), *[slice(None)] * (row.dim() - 1)]
        for d, side in zip(dims, sides, strict=True):
            n, m = own.shape[d], row.shape[d]
            block[d] = slice(n) if side == "right" else slice(m - n, m)
            corner[d] = slice(-1, None) if side == "right" else slice(0, 1)
        fill = row[tuple(corner)]
        made = fill.expand_as(row).clone()
        made[tuple(block)] = row[tuple(block)]
        if are_same(made, row):
            is_exact = are_same(row[tuple(block)], own)
            found.append(_Padded(dict(zip(dims, sides, strict=True)), _constant(fill), is_exact))
    return found


def _constant(fill: torch.Tensor) -> torch.Tensor:
    """Return it without the dimensions along which it is constant."""
    for d in range(fill.dim()):
        first = fill.narrow(d, 0, 1)
        fill = first if are_same(first.expand_as(fill), fill) else fill
    return fill.clone()


def _exact(ways: Sequence[_Padded]) -> list[_Padded]:
    return [way for way in ways if way.is_exact]


def _take(
    path: str, column: Column, own: torch.Tensor, pair: torch.Tensor, ways: Sequence[_Padded], votes: dict
) -> None:
    """Note how a column is padded: in one of these ways, where several fit in that of other columns of its sizes."""
    sizes = {d: (n, m) for d, n, m in _longer(column, own, pair)}
    way = max(ways, key=lambda way: sum(votes.get(sizes[d]) == side for d, side in way.sides.items()))
    if way.fill is None:
        return
    if column.fill is not None and not are_same(column.fill, way.fill):
        raise ValueError(
            f"the collator pads {_name(path)} with other numbers for other examples, so some of them would decide "
            "what others are padded with. Pad with one number."
        )
    column.fill = way.fill
    for d, side in way.sides.items():
        column.sides.setdefault(d, side)
        votes.setdefault(sizes[d], side)
