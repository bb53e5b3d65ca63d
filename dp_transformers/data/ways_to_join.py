"""Learns how a collator joins the rows of each column.

The collator gets two examples together, and its batch is compared with those of each example alone. The side and the
number that a column is padded with must be the same for two pairs without a common example, so that the number is the
collator's and no example's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from .columns import are_same, as_tensor, columns_of, inner, named, size_of


@dataclass
class Column:
    """How a collator joins one tensor of its batches.

    Attributes:
        rows_in: The dimension of the rows; None for one tensor of the whole batch.
        is_dropped: True if the collator leaves that dimension out for a single example, as ``squeeze()`` does.
        by_parts: True if an example has several rows, and the first ones of all examples come before the second ones.
        offsets_of: The column of ids that these numbers are offsets of.
        sides: The side on which each dimension is padded, with the rows in dimension 0.
        fill: The padding: one number, or one for each entry of a dimension that is not padded. None if nothing is
            padded, and all rows of a batch are the same (the numbers of positions).
        pairs: The pairs of examples that showed this.
    """

    rows_in: int | None = 0
    is_dropped: bool = False
    by_parts: bool = False
    offsets_of: str | None = None
    sides: dict[int, str] = field(default_factory=dict)
    fill: torch.Tensor | None = None
    pairs: list[frozenset[int]] = field(default_factory=list)

    def is_known(self, dim: int) -> bool:
        """Return True if the padding of this dimension is known. A number that may be an example's must be seen in two
        pairs without a common example."""
        if self.fill is not None and dim not in self.sides:
            return False
        is_usual = self.fill is not None and bool(((self.fill == 0) | (self.fill == -100)).all())
        return is_usual or any(x.isdisjoint(y) for x, y in itertools.combinations(self.pairs, 2))

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a single example with the rows first."""
        x = x.unsqueeze(self.rows_in or 0) if self.is_dropped else x
        return x.movedim(self.rows_in, 0) if self.rows_in else x


class _Place(NamedTuple):
    """A possible place of the rows of an example in padded ones."""

    sides: dict[int, str]
    fill: torch.Tensor | None
    is_exact: bool  # it has the numbers of the example


class WaysToJoin:
    """Holds what is known of the way in which a collator joins rows.

    Attributes:
        columns: The columns by the paths of their tensors.
        lists_of_rows: The paths of lists that have an entry for each row, and are no list of columns.
        largest: The paths of whole numbers for a batch that are the largest of those of its rows.
        is_longest_first: True if the collator sorts its rows.
    """

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self.lists_of_rows: set[str] = set()
        self.largest: set[str] = set()
        self.is_longest_first = False

    def learn(self, keys: frozenset[int], short: Any, long: Any, pair: Any) -> None:
        """Learn from the batch of two examples, the shorter one first, how the shorter one is padded in it."""
        triples = self._triples("", short, long, pair)
        found = {path: (a, b, p) for path, a, b, p in triples if a.layout is torch.strided}
        for path, (a, b, p) in found.items():
            if path not in self.columns:
                self.columns[path] = _kind_of(path, a, b, p, found)
        columns = {path: self.columns[path] for path in found}
        padded = {k: found[k] for k, c in columns.items() if c.rows_in is not None and c.offsets_of is None}
        places = [{k: _places(self.columns[k], a, b, p, i) for k, (a, b, p) in padded.items()} for i in (0, 1)]
        first, second = (sum(any(x.is_exact for x in found) for found, _ in each.values()) for each in places)
        self.is_longest_first |= second > first and size_of(short) < size_of(long)
        own_places = places[second > first]
        known_sides: dict[tuple[int, int], str] = {}  # of columns of these sizes
        for path in sorted(padded, key=lambda path: sum(x.is_exact for x in own_places[path][0]) != 1):
            column, (a, b, p), (found_places, are_apart) = self.columns[path], padded[path], own_places[path]
            column.by_parts |= are_apart
            sizes = [*zip(column.rows_of(a).shape, p.movedim(column.rows_in or 0, 0).shape, strict=True)]
            if (place := _chosen(found_places, sizes, known_sides)) is not None:
                _take(path, column, place, keys)
                if sum(x.is_exact for x in found_places) == 1:
                    column.sides |= place.sides
                known_sides |= {sizes[d]: side for d, side in place.sides.items() if sizes[d] not in known_sides}
            elif len(a) == len(b) == 1 and len(p) == 2 and column.fill is None and are_same(p[0], p[1]):
                column.pairs.append(keys)  # the numbers of positions

    def _triples(self, path: str, a: Any, b: Any, p: Any) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield the tensors that two examples have alone, and together."""
        if isinstance(a, torch.Tensor) and a.is_nested:
            raise ValueError(
                f"{named(path)} is a nested tensor, whose rows cannot be taken one by one. Pad the rows, and return a "
                "mask that says which positions are an example's own."
            )
        if isinstance(a, (torch.Tensor, np.ndarray)):
            tensors = [x for x in map(as_tensor, (a, b, p)) if x is not None]
            if len(tensors) == 3:
                yield path, tensors[0], tensors[1], tensors[2]
        elif isinstance(a, PackedSequence):
            self.is_longest_first |= a.sorted_indices is None
        elif isinstance(a, (list, tuple)) and isinstance(p, (list, tuple)) and len(p) == len(a) + len(b):
            self.lists_of_rows.add(path)
        elif type(a) is type(b) is type(p) is int:
            self.largest |= {path} if a != b and p == max(a, b) else set()
        else:
            columns = [columns_of(x) or {} for x in (a, b, p)]
            for k in columns[0]:
                if k in columns[1] and k in columns[2]:
                    yield from self._triples(inner(path, k), *(x[k] for x in columns))


def _kind_of(path: str, a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, found: Mapping[str, Any]) -> Column:
    """Return how a tensor of two examples, a and b alone and p together, is joined, without its padding."""
    if p.dim() == a.dim() + 1 and 2 in p.shape[:2]:
        return Column(int(p.shape[0] != 2), is_dropped=True)
    if not a.dim() or p.dim() != a.dim():
        return Column(None)
    if (ids := _ids_of_offsets(path, a, b, p, found)) is not None:
        return Column(offsets_of=ids)
    if len(p) == len(a) + len(b):
        return Column()
    if p.dim() > 1 and p.shape[1] == 2 and a.shape[1] == b.shape[1] == 1:
        return Column(1)
    if p.dim() > 1 and len(a) == len(b) == len(p) == 1 and p.shape[1] == a.shape[1] + b.shape[1] > 2:
        raise ValueError(
            f"the collator made one row of 2 examples ({named(path)}), so the norm of a row is not the norm of an "
            "example. Switch packing, padding_free and flattening collators off, and use one that pads "
            "(DataCollatorWithPadding, or that of your trainer without packing)."
        )
    return Column(None)


def _ids_of_offsets(
    path: str, a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, found: Mapping[str, Any]
) -> str | None:
    """Return the column that these are offsets of: the numbers of the second example continue at the end of the first
    one's ids."""
    if a.dim() != 1 or a.is_floating_point() or not len(b) or len(p) not in (2, 3) or bool(a[0] != 0):
        return None
    ends = b if len(p) == 2 else b[1:]
    for other, (ids, _, all_ids) in found.items():
        is_flat = other != path and ids.dim() == 1 and len(all_ids) > len(ids) > 0
        if is_flat and are_same(p, torch.cat([a, ends + len(ids)])):
            return other
    return None


# ---- how a column is padded ----


def _places(column: Column, a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, row: int) -> tuple[list[_Place], bool]:
    """Return the possible places of the first of two examples in a batch of both, as its first (``row`` 0) or second
    one; and True if its rows are apart there."""
    own, other, p = column.rows_of(a), column.rows_of(b), p.movedim(column.rows_in or 0, 0)
    places = _places_in(own, p[len(p) - len(own) :] if row else p[: len(own)])
    if len(own) == len(other) > 1 and not any(place.is_exact for place in places):
        apart = _places_in(own, p[row::2])
        if any(place.is_exact for place in apart):
            return apart, True
    return places, False


def _places_in(own: torch.Tensor, rows: torch.Tensor) -> list[_Place]:
    """Return the sides on which the rows may be padded: there the padding is constant along the padded dimensions."""
    dims = [d for d in range(1, own.dim()) if own.shape[d] != rows.shape[d]]
    if len(rows) != len(own) or any(own.shape[d] > rows.shape[d] for d in dims):
        return []
    if not dims or not rows.numel():
        return [_Place({}, None, are_same(rows, own))]
    found = []
    for sides in itertools.product(("right", "left"), repeat=len(dims)):
        block, corner = block_of(own.shape, rows.shape, dict(zip(dims, sides, strict=True))), rows[:1]
        for d, side in zip(dims, sides, strict=True):
            corner = corner.narrow(d, rows.shape[d] - 1 if side == "right" else 0, 1)
        made = corner.expand_as(rows).clone()
        made[block] = rows[block]
        if are_same(made, rows):
            fill = _constant(corner)
            found.append(_Place(dict(zip(dims, sides, strict=True)), fill, are_same(rows[block], own)))
    return found


def block_of(own: Sequence[int], padded: Sequence[int], sides: Mapping[int, str]) -> tuple[slice, ...]:
    """Return the part of padded rows that rows of one shape take."""
    sizes = enumerate(zip(own, padded, strict=True))
    return tuple(slice(m - n, m) if sides.get(d) == "left" else slice(n) for d, (n, m) in sizes)


def _constant(fill: torch.Tensor) -> torch.Tensor:
    """Return the fill without the dimensions along which it is constant."""
    for d in range(fill.dim()):
        first = fill.narrow(d, 0, 1)
        fill = first if are_same(first.expand_as(fill), fill) else fill
    return fill.clone()


def _chosen(places: Sequence[_Place], sizes: Sequence[tuple[int, int]], known_sides: Mapping) -> _Place | None:
    """Return the place that fits best to columns of the same sizes; one without the example's numbers (random ones
    differ in a pair) must fit to all of them."""

    def fits(place: _Place) -> int:
        return sum(known_sides.get(sizes[d]) == side for d, side in place.sides.items())

    exact = [place for place in places if place.is_exact]
    return max(exact or [place for place in places if fits(place) == len(place.sides)], key=fits, default=None)


def _take(path: str, column: Column, place: _Place, keys: frozenset[int]) -> None:
    """Record how a column is padded."""
    if place.fill is None:
        return
    if column.fill is None:
        column.fill, column.pairs = place.fill, []
    elif not are_same(column.fill, place.fill):
        raise ValueError(
            f"the collator pads {named(path)} with other numbers for other examples, so some of them would decide "
            "what others are padded with. Pad with one number."
        )
    column.pairs.append(keys)
    for d, side in place.sides.items():
        column.sides.setdefault(d, side)
