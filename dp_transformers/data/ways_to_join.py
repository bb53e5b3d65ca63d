"""Learns how a collator joins the rows of each column.

The collator gets two examples together, and its batch is compared with those of each example alone. The side and the
number that a column is padded with must be the same for two pairs without a common example, so that the number is the
collator's and no example's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from .columns import are_same, leaves_of, named, size_of

_Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of two examples alone, and of both together


def refusal(what: str) -> ValueError:
    """Return the error for rows that cannot be joined: what the collator does, and how it can be changed."""
    return ValueError(
        f"{what}, so examples would decide what others are given. Each must become one row by itself, with the same "
        "columns and types as the others, padded with one number: leave out packing, padding_free and flattening, and "
        "cut windows, masks of pairs of positions and random lengths before the collator (or in the model). A "
        "constant can stand for what an example does not have."
    )


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

    def take(self, path: str, place: _Place, keys: frozenset[int], *, is_certain: bool) -> None:
        """Record how a pair of examples was padded."""
        if place.fill is None:
            return
        if self.fill is None:
            self.fill, self.pairs = place.fill, []
        elif not are_same(self.fill, place.fill):
            raise refusal(f"the collator pads {named(path)} with other numbers for other examples")
        self.pairs.append(keys)
        self.sides = self.sides | place.sides if is_certain else place.sides | self.sides


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
        found = self._tensors(short, long, pair)
        for path in found.keys() - self.columns.keys():
            self.columns[path] = _kind_of(path, found)
        rows = {
            path: (column.rows_of(a), column.rows_of(b), p.movedim(column.rows_in or 0, 0))
            for path, (a, b, p) in found.items()
            if (column := self.columns[path]).rows_in is not None and column.offsets_of is None
        }
        as_first, as_second = ({path: _places(*x, n) for path, x in rows.items()} for n in (0, 1))
        first, second = (sum(any(y.is_exact for y in x) for x, _ in each.values()) for each in (as_first, as_second))
        self.is_longest_first |= second > first and size_of(short) < size_of(long)
        places = as_second if second > first else as_first
        certain = {path for path, (x, _) in places.items() if sum(place.is_exact for place in x) == 1}
        known_sides: dict[tuple[int, int], str] = {}  # of columns of these sizes
        for path in sorted(rows, key=lambda path: path not in certain):
            column, (a, b, p) = self.columns[path], rows[path]
            column.by_parts |= places[path][1]
            sizes = [*zip(a.shape, p.shape, strict=True)]
            if (place := _chosen(places[path][0], sizes, known_sides)) is not None:
                column.take(path, place, keys, is_certain=path in certain)
                known_sides = {sizes[d]: side for d, side in place.sides.items()} | known_sides
            elif len(a) == len(b) == 1 and len(p) == 2 and column.fill is None and are_same(p[0], p[1]):
                column.pairs.append(keys)  # the numbers of positions

    def _tensors(self, short: Any, long: Any, pair: Any) -> dict[str, _Triple]:
        """Return the tensors that two examples have alone, and together, by path. Learn of what is no tensor."""
        alone, other, both = (dict(leaves_of(x, with_lists=True)) for x in (short, long, pair))
        found = {}
        for path in (path for path in alone if path in other and path in both):
            a, b, p = alone[path], other[path], both[path]
            if isinstance(a, PackedSequence):
                self.is_longest_first |= a.sorted_indices is None
            elif type(a) is type(b) is type(p) is int:
                self.largest |= {path} if a != b and p == max(a, b) else set()
            elif isinstance(a, (list, tuple)):
                self.lists_of_rows |= {path} if len(p) == len(a) + len(b) else set()
            elif isinstance(a, torch.Tensor) and a.is_nested:
                raise refusal(f"{named(path)} is a nested tensor, whose rows have no mask that says what is padding")
            elif all(isinstance(x, torch.Tensor) and x.layout is torch.strided for x in (a, b, p)):
                found[path] = a, b, p
        return found


def _kind_of(path: str, found: Mapping[str, _Triple]) -> Column:
    """Return how a tensor of two examples, a and b alone and p together, is joined, without its padding."""
    a, b, p = found[path]
    if p.dim() == a.dim() + 1 and 2 in p.shape[:2]:
        return Column(int(p.shape[0] != 2), is_dropped=True)
    if not a.dim() or p.dim() != a.dim():
        return Column(None)
    for other, (ids, _, all_ids) in found.items():
        if ids.dim() == 1 and other != path and len(all_ids) > len(ids) > 0 and _are_offsets(a, b, p, len(ids)):
            return Column(offsets_of=other)
    if len(p) == len(a) + len(b):
        return Column()
    if p.dim() > 1 and p.shape[1] == 2 and a.shape[1] == b.shape[1] == 1:
        return Column(1)
    if p.dim() > 1 and len(a) == len(b) == len(p) == 1 and p.shape[1] == a.shape[1] + b.shape[1] > 2:
        raise refusal(f"the collator made one row of 2 examples ({named(path)})")
    return Column(None)


def _are_offsets(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, end: int) -> bool:
    """Return True if the numbers of the second example continue at the end of the first one's ids."""
    if a.dim() != 1 or a.is_floating_point() or not len(b) or len(p) not in (2, 3) or bool(a[0] != 0):
        return False
    return are_same(p, torch.cat([a, (b if len(p) == 2 else b[1:]) + end]))


# ---- how a column is padded ----


def _places(own: torch.Tensor, other: torch.Tensor, p: torch.Tensor, row: int) -> tuple[list[_Place], bool]:
    """Return the possible places of the first of two examples in a batch of both, as its first (``row`` 0) or second
    one; and True if its rows are apart there."""
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
    for chosen in itertools.product(("right", "left"), repeat=len(dims)):
        sides, corner = dict(zip(dims, chosen, strict=True)), rows[:1]
        for d, side in sides.items():
            corner = corner.narrow(d, rows.shape[d] - 1 if side == "right" else 0, 1)
        block, made = block_of(own.shape, rows.shape, sides), corner.expand_as(rows).clone()
        made[block] = rows[block]
        if are_same(made, rows):
            found.append(_Place(sides, _constant(corner), are_same(rows[block], own)))
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
