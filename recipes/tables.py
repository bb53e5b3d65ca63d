"""Tables under a public schema: rows as tokens, one for each value, and back; and how far two tables lie apart.

A schema says of each column which values there are, before anybody looks at the rows:

    {"sex": {"type": "category", "values": ["female", "male"], "missing": true},
     "age": {"type": "integer", "min": 18, "max": 99},
     "income": {"type": "number", "edges": [0, 1000, 2000, 5000, 20000], "decimals": 2},
     "seen": {"type": "date", "min": "2020-01-01", "max": "2024-12-31", "bins": 20}}

Integers, numbers and dates are cut into bins: at "edges", the last of which is the greatest value, or from "min" to
"max" into "bins" equal ones, 32 at most unless the schema says how many. A number is drawn from within its bin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

FLAGS = {"category": {"values"}, "integer": {"min", "max", "bins", "edges"}}
FLAGS |= {"date": FLAGS["integer"], "number": {*FLAGS["integer"], "decimals"}}
OTHER = "other"
UNREVIEWED = "_not_private"
WARNING = "Read off private rows. Replace what no outsider could have known (rare values, extremes), drop this line."


@dataclass(frozen=True)
class Column:
    """One column: the values that it may have.

    Attributes:
        values: Of a category.
        edges: Of the other kinds, in units of the last decimal, or days: bin i holds edges[i] <= value < edges[i + 1].
        missing: Whether a value may be missing, which is the last of the column's codes.
    """

    name: str
    kind: str
    values: tuple[str, ...] = ()
    edges: tuple[int, ...] = ()
    decimals: int = 0
    missing: bool = False

    @classmethod
    def of(cls, name: str, spec: Mapping[str, Any]) -> Column:
        """Read the line of a schema.

        Raises:
            ValueError: it describes no column.
        """
        kind = spec.get("type")
        if kind not in FLAGS:
            raise ValueError(f"column '{name}' of the schema has the type {kind!r}: it must be one of {list(FLAGS)}.")
        if unknown := spec.keys() - FLAGS[kind] - {"type", "missing"}:
            raise ValueError(f"column '{name}' of the schema: a {kind} has no {sorted(unknown)}.")
        column = cls(name, kind, decimals=spec.get("decimals", 2 if kind == "number" else 0))
        try:
            if kind == "category":
                values, edges = tuple(map(as_text, spec["values"])), ()
            else:
                values, edges = (
                    (),
                    column._edges(**{k: v for k, v in spec.items() if k in ("min", "max", "bins", "edges")}),
                )
        except (KeyError, TypeError) as error:
            needed = "values" if kind == "category" else "edges, or min and max"
            raise ValueError(f"column '{name}' of the schema, a {kind}, needs {needed}: {error}.") from None
        if len(set(values)) != len(values) or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"column '{name}' of the schema: values must differ, and edges must increase.")
        if len(values) + len(edges) < 2 - bool(values):
            raise ValueError(f"column '{name}' of the schema has no values.")
        return cls(name, kind, values, edges, column.decimals, bool(spec.get("missing", False)))

    def _edges(self, min: Any = None, max: Any = None, bins: int = 32, edges: Any = None) -> tuple[int, ...]:
        units = self._units(pd.Series([min, max] if edges is None else edges).map(as_text))
        if np.isnan(units).any():
            raise TypeError("cannot read them")
        *inner, last = map(int, units)
        if edges is None:  # one bin for each value, if there are so few
            last += 1
            inner = np.round(np.linspace(inner[0], last, np.clip(last - inner[0], 0, bins) + 1)).astype(int).tolist()
            return tuple(inner)
        return (*inner, last + 1)  # the greatest value is in the last bin

    def _units(self, texts: pd.Series) -> np.ndarray:
        """Return integers as floats, NaN where a text says none."""
        if self.kind == "date":
            days = pd.to_datetime(texts, errors="coerce", format="ISO8601", utc=True)
            return (days - pd.Timestamp(0, tz="UTC")).dt.days.to_numpy(float)
        return np.round(pd.to_numeric(texts, errors="coerce").to_numpy(float) * 10**self.decimals)

    @property
    def size(self) -> int:
        return len(self.values) + max(0, len(self.edges) - 1) + self.missing

    def encode(self, texts: pd.Series) -> tuple[np.ndarray, dict[str, int]]:
        """Return the codes, -1 where there is none, and how many values were clipped, called other, or have none."""
        if self.kind == "category":
            codes = np.array(texts.map({value: i for i, value in enumerate(self.values)}).fillna(-1), dtype=int)
            other = (codes < 0) & (texts != "").to_numpy() & (OTHER in self.values)
            codes[other] = self.values.index(OTHER) if other.any() else -1
            moved = {"called other": int(other.sum())}
        else:
            units = self._units(texts)
            clipped = np.clip(units, self.edges[0], self.edges[-1] - 1)
            codes = np.searchsorted(self.edges[1:-1], clipped, side="right")
            codes[np.isnan(units)] = -1
            moved = {"clipped": int(((clipped != units) & ~np.isnan(units)).sum())}
        if self.missing:
            codes[(texts == "").to_numpy()] = self.size - 1
        return codes, {**moved, "left out": int((codes < 0).sum())}

    def decode(self, codes: np.ndarray, draw: np.random.Generator) -> list[str]:
        """Return a value for each code, which is drawn from its bin."""
        there = codes < self.size - self.missing
        if self.kind == "category":
            texts = np.array([*self.values, ""], dtype=object)[np.where(there, codes, len(self.values))]
            return texts.tolist()
        edges, bins = np.array(self.edges), np.where(there, codes, 0)
        units = draw.integers(edges[bins], edges[bins + 1])
        if self.kind == "date":
            texts = np.datetime_as_string(units.astype("datetime64[D]"))
        else:
            texts = [f"{unit / 10**self.decimals:.{self.decimals}f}" for unit in units]
        return np.where(there, texts, "").tolist()

    def distances(self) -> np.ndarray:
        """(size, size) distances of codes: 0 or 1, or of bins the share of the column that lies between them."""
        codes = np.arange(self.size)
        if self.kind == "category":
            return (codes[:, None] != codes).astype(np.float32)
        most = max(1, self.size - 1 - self.missing)
        between = np.abs(codes[:, None] - codes).astype(np.float32) / most
        if self.missing:
            between[-1, :-1] = between[:-1, -1] = 1
        return between


@dataclass(frozen=True)
class Schema:
    """The columns, in the order in which a row is written."""

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, specs: Mapping[str, Mapping[str, Any]]) -> Schema:
        if UNREVIEWED in specs:
            raise ValueError(f"the schema is a draft: {specs[UNREVIEWED]}")
        return cls(tuple(Column.of(name, spec) for name, spec in specs.items()))

    @property
    def sizes(self) -> list[int]:
        return [column.size for column in self.columns]

    @property
    def first_tokens(self) -> np.ndarray:
        """The token of each column's code 0. Token 0 begins a row."""
        return 1 + np.cumsum([0, *self.sizes[:-1]])

    def allowed(self) -> torch.Tensor:
        """(columns, tokens): which tokens a column may have."""
        ends, tokens = self.first_tokens + self.sizes, np.arange(1 + sum(self.sizes))
        return torch.from_numpy((tokens >= self.first_tokens[:, None]) & (tokens < ends[:, None]))

    def encode(self, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, dict[str, dict[str, int]]]:
        """Return the codes (N, columns) of the rows that have a place in the schema, which rows these are, and what
        was done to values that have none. A row is judged by itself alone."""
        if absent := [column.name for column in self.columns if column.name not in rows]:
            raise ValueError(f"the table has no column {absent}, only {list(rows)}: set the schema right.")
        encoded = [column.encode(rows[column.name].map(as_text)) for column in self.columns]
        codes = np.stack([codes for codes, _ in encoded], 1)
        kept = (codes >= 0).all(1)
        return codes[kept], kept, {c.name: moved for c, (_, moved) in zip(self.columns, encoded, strict=True)}

    def decode(self, codes: np.ndarray, draw: np.random.Generator) -> pd.DataFrame:
        return pd.DataFrame({c.name: c.decode(codes[:, i], draw) for i, c in enumerate(self.columns)})


def as_text(value: Any) -> str:
    """Return how a value is written, with no difference between 1 and 1.0; missing: the empty text."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def draft(rows: pd.DataFrame, file: str, leave_out: str | None) -> None:
    """Write a schema that is read off the rows, and is therefore not private, to be set right by a person."""
    specs: dict[str, Any] = {UNREVIEWED: WARNING}
    for name in (name for name in rows if name != leave_out):
        texts = rows[name].map(as_text)
        there = texts[texts != ""]
        numbers, values = pd.to_numeric(there, errors="coerce"), sorted(set(there))
        dates = pd.to_datetime(there, errors="coerce", format="ISO8601", utc=True)
        if len(values) <= 12 or (numbers.isna().any() and dates.isna().any()):
            spec = {"type": "category", "values": values}
        elif not numbers.isna().any():
            kind = "integer" if (numbers % 1 == 0).all() else "number"
            spec = {"type": kind, "min": numbers.min().item(), "max": numbers.max().item()}
        else:
            spec = {"type": "date", "min": str(dates.min().date()), "max": str(dates.max().date())}
        specs[name] = spec | ({"missing": True} if len(there) < len(texts) else {})
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(spec)}" for name, spec in specs.items())
    Path(file).write_text("{\n" + lines + "\n}\n")


# ---- how far two tables lie apart; none of it is private ----


def variation(a: np.ndarray, b: np.ndarray, size: int) -> float:
    """Return the total variation distance of two columns of codes."""
    shares = [np.bincount(codes, minlength=size) / len(codes) for codes in (a, b)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def marginals(a: np.ndarray, b: np.ndarray, schema: Schema) -> dict[str, float]:
    """Return the total variation distance of each column."""
    return {c.name: variation(a[:, i], b[:, i], c.size) for i, c in enumerate(schema.columns)}


def pairs(a: np.ndarray, b: np.ndarray, schema: Schema, most: int = 8) -> list[float]:
    """Return the total variation distance of each pair of columns, codes of which are put into ``most`` groups."""
    sizes = np.minimum(schema.sizes, most)
    a, b = (codes * sizes // schema.sizes for codes in (a, b))
    return [
        variation(a[:, i] * sizes[j] + a[:, j], b[:, i] * sizes[j] + b[:, j], int(sizes[i] * sizes[j]))
        for i, j in combinations(range(len(sizes)), 2)
    ]


def accuracy(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> float:
    """Return the share of rows that a network of one hidden layer, trained on other rows, classifies rightly.

    Args:
        x: (N, columns) tokens.
        y: (N,) classes, from 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = [1 + int(max(a.max(), b.max())) for a, b in ((x, x_test), (y, y_test))]
        model = nn.Sequential(nn.EmbeddingBag(sizes[0], 64), nn.ReLU(), nn.Linear(64, sizes[1]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train, labels, test = torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(x_test)
        for _ in range(6):
            for rows in torch.randperm(len(train)).split(256):
                loss = nn.functional.cross_entropy(model(train[rows]), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            return float(np.mean(model(test).argmax(1).numpy() == y_test))


def told_apart(a: np.ndarray, b: np.ndarray, schema: Schema) -> float:
    """Return the accuracy with which a classifier that saw every second row tells which of two tables, as long as each
    other, the rest is from: 0.5 if they are alike."""
    halves = []
    for part in (0, 1):
        x = np.concatenate([a[part::2], b[part::2]]) + schema.first_tokens
        halves += [x, np.repeat([0, 1], [len(a[part::2]), len(b[part::2])])]
    return accuracy(*halves)


def nearest(rows: np.ndarray, others: np.ndarray, schema: Schema) -> np.ndarray:
    """Return for each row the distance of the nearest of the ``others``: the mean over the columns (Gower, 1971)."""
    tables = [torch.from_numpy(c.distances()) / len(schema.columns) for c in schema.columns]
    rows, others = torch.from_numpy(rows), torch.from_numpy(others)
    found = []
    for part in rows.split(128):
        apart = sum(table[part[:, i]][:, others[:, i]] for i, table in enumerate(tables))
        found.append(apart.min(1).values)
    return torch.cat(found).numpy()
