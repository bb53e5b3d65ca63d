"""Units of privacy: the rows of a person, or the views of a row, that a draw takes and clips together."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Subset

from ..mechanism.mechanism import PrivacyUnit
from ..runtime.randomness import SecretSeeds
from .columns import size_of
from .documents import first_rows_of_each, owners_of_rows


@dataclass(frozen=True)
class Units:
    """The units of a data set, and what a draw takes of them. A draw chooses units.

    Attributes:
        rows: The indices of each unit's rows.
        most_rows: The number of rows that a draw takes of a unit at most; of more, a fresh random part.
        views: The number of times that a row is loaded, each time under random numbers of its own.
    """

    rows: Sequence[Sequence[int]]
    most_rows: int = 1
    views: int = 1

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def largest(self) -> int:
        """The number of rows that a unit has in a draw at most, with all views."""
        return self.most_rows * self.views

    @property
    def checksum(self) -> int:
        """A number that is the same on ranks with the same units."""
        return zlib.crc32(np.concatenate([*map(np.asarray, self.rows), list(map(len, self.rows))]).tobytes())

    def taken(self, units: Sequence[int], draw: int, seeds: SecretSeeds) -> list[list[int]]:
        """Return the indices that a draw loads of each unit, once for each view."""
        return [[i for i in self._rows(u, draw, seeds) for _ in range(self.views)] for u in units]

    def _rows(self, unit: int, draw: int, seeds: SecretSeeds) -> Sequence[int]:
        rows = self.rows[unit]
        if len(rows) <= self.most_rows:
            return rows
        return random.Random(seeds.number(f"rows of unit {unit} in draw {draw}")).sample(rows, self.most_rows)


def cut(rows: Sequence[Any], sizes: Sequence[int], most: int) -> list[list[list[Any]]]:
    """Cut a draw's rows into physical batches of ``most`` rows at most, each of whole units, which lie one after the
    other. Units are sorted by their longest row."""
    remaining, batches = iter(rows), list[list[list[Any]]]()
    units = sorted(([*islice(remaining, size)] for size in sizes), key=lambda unit: max(map(size_of, unit)))
    for unit in units:
        if not batches or sum(map(len, batches[-1])) + len(unit) > most:
            batches.append([])
        batches[-1].append(unit)
    return batches


def units_of(
    dataset: Any, unit: PrivacyUnit, owners: str | Sequence[Any] | None = None, views: int = 1
) -> tuple[Any, Units | None]:
    """Return a data set without the rows that ``unit`` leaves out, and its units; None where each row is one.

    Args:
        owners: The column of owners, or the owner of each row.

    Raises:
        ValueError: rows have no owner, or owners that are not comparable.
    """
    if owners is not None and hasattr(dataset, "__len__") and len(dataset):  # others are refused later
        of_rows = owners_in(dataset, owners)
        if unit.is_person:
            return dataset, Units(_rows_of_each(of_rows), unit.rows_per_step, views)
        kept = first_rows_of_each(of_rows, unit.max_examples_per_person)
        if len(kept) < len(dataset):
            dataset = dataset.select(kept) if hasattr(dataset, "select") else Subset(dataset, kept)
    return dataset, None if views == 1 else Units([(i,) for i in range(len(dataset))], 1, views)


def _rows_of_each(owners: Sequence[Any]) -> list[list[int]]:
    """Return the indices of each owner's rows."""
    rows = defaultdict[Any, list[int]](list)
    for i, owner in enumerate(owners_of_rows(owners)):
        if isinstance(owner, frozenset):
            raise ValueError(
                f"row {i} has several owners, and a draw of persons could choose it for each. Let draws choose rows, "
                "and bound how many a person has, by max_examples_per_person above 1; or give rows one owner."
            )
        rows[owner].append(i)
    return [*rows.values()]


def owners_in(dataset: Any, owners: str | Sequence[Any]) -> Sequence[Any]:
    """Return the owner of each row."""
    if not isinstance(owners, str):
        if len(owners) != len(dataset):
            raise ValueError(f"there are {len(owners)} owners and {len(dataset)} rows: give one owner for each row.")
        return owners
    names = getattr(dataset, "column_names", None)
    if names is None:  # rows are dictionaries, then
        names = list(dataset[0]) if isinstance(dataset[0], Mapping) else []
    if owners not in names:
        raise ValueError(
            f"the training data have no column '{owners}' of owners; the columns are {names}. Name the column whose "
            "value is the same in all rows of a person; make_private also takes the owner of each row (unit_column=)."
        )
    return dataset[owners] if hasattr(dataset, "column_names") else [dataset[i][owners] for i in range(len(dataset))]
