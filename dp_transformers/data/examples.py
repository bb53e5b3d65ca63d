"""Single examples: each is loaded under random numbers of its own, and collated alone.

No collator is ever given two examples of a draw, so nothing of one can get into the row of another.
:mod:`.joining` makes a batch of the rows.
"""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime.randomness import SecretSeeds, generators_apart, require_unseeded


class Examples:
    """Loads examples and collates each by itself. What it returns for an index depends on that index, the draw and a
    secret alone.

    Args:
        dataset: A map-style data set.
        collate: It makes a batch of a list of examples.
        seeds: They seed the global generators of Python, NumPy and torch.

    Raises:
        ValueError: the collator draws from a seed of its own.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seeds: SecretSeeds):
        _refuse_known_seed(collate)
        self.dataset, self._collate, self._seeds = dataset, collate, seeds
        self._drawn: dict[str, set[str]] = {"example": set(), "row": set()}  # the generators that were drawn from

    def of_draw(self, indices: Sequence[int], draw: int) -> list[Any]:
        """Return the examples of a draw.

        Raises:
            ValueError: the data set gives more or fewer rows than one.
        """
        if _is_plain_table(self.dataset):
            return self.load(indices)
        return self._each("example", indices, draw, lambda n: self.load([indices[n]])[0])

    def collated(self, examples: Sequence[Any], indices: Sequence[int], draw: int) -> list[Any]:
        """Return the examples of a draw, each collated alone.

        Raises:
            ValueError: the collator cannot do with one example, or sets a seed.
        """
        return self._each("row", indices, draw, lambda n: self._alone(indices[n], examples[n]))

    def _each(self, what: str, indices: Sequence[int], draw: int, make: Callable[[int], Any]) -> list[Any]:
        """Return what is made for each index under random numbers of its own.

        Only those generators are seeded for each that were seen to be drawn from, or seeded; where another one is
        drawn from, all are made again.
        """
        drawn, made = self._drawn[what], list[Any]()
        self._seeds.reseed(f"{what}s of draw {draw}")
        before = generators_apart()
        for n, i in enumerate(indices):
            self._seeds.reseed(f"{what} {i} of draw {draw}", drawn)
            made.append(make(n))
            if n in (0, len(indices) - 1):
                now = generators_apart()
                if new := {k for k, state in before.items() if state != now[k]} - drawn:
                    drawn |= new
                    return self._each(what, indices, draw, make)
        return made

    def together(self, indices: Sequence[int], purpose: str) -> Any:
        """Return what the collator itself makes of several examples. For one purpose an example is loaded, and the
        first one collated, under the same random numbers, and under others than those of any draw."""
        examples = []
        for i in indices:
            self._seeds.reseed(f"example {i} for {purpose}")
            examples += self.load([i])
        self._seeds.reseed(f"a batch for {purpose}")
        return self._collate([_copied(example) for example in examples])

    def load(self, indices: Sequence[int]) -> list[Any]:
        """Load rows: one at a time, but for a table without a transform, which makes no row by another."""
        if not hasattr(self.dataset, "__getitems__"):
            return [self.dataset[i] for i in indices]
        if not len(indices):
            return []
        parts = [list(indices)] if _is_plain_table(self.dataset) else [[i] for i in indices]
        loaded = [(part, list(self.dataset.__getitems__(part))) for part in parts]
        for part, examples in loaded:
            self._require_one_each(part, examples)
        return [example for _, examples in loaded for example in examples]

    def _alone(self, index: int, example: Any) -> Any:
        try:
            row = self._collate([_copied(example)])
        except Exception as error:
            raise ValueError(
                f"the collator raised {type(error).__name__} for row {index} of the training data alone: {error}. "
                "Each example is collated by itself, and the library joins the rows, so that no example gets into the "
                "row of another: the collator must make one row of a list of one example. If it needs two of them, or "
                "leaves some out, compute that before training, or in the data set for each example."
            ) from error
        if "torch" in self._drawn["row"]:  # and was seeded for this row
            require_unseeded("the collator")
        return row

    def _require_one_each(self, indices: Sequence[int], examples: Sequence[Any]) -> None:
        if len(examples) != len(indices):
            raise ValueError(
                f"the data set ({type(self.dataset).__name__}) returned {len(examples)} rows instead of "
                f"{len(indices)}, but each example must be one row, which is clipped by itself. If a transform cuts "
                "examples into windows (return_overflowing_tokens, stride) or leaves some out, do that before "
                "training (datasets.map, datasets.filter), and say with max_examples_per_person how many rows one "
                "person may then have."
            )


def _copied(example: Any) -> Any:
    """Return what a collator may take columns out of."""
    return dict(example) if type(example) is dict else example


def _is_plain_table(dataset: Any) -> bool:
    """Return whether it is a ``datasets.Dataset`` without a function that makes its rows."""
    table = getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)
    return table is not None and type(dataset) is table and dataset.format["type"] != "custom"


def _refuse_known_seed(collate: Any) -> None:
    """Raise ValueError for a collator, or one that is wrapped by Trainer, with a seed that its reader knows."""
    while collate is not None:
        options = collate.keywords if isinstance(collate, functools.partial) else getattr(collate, "__dict__", {})
        if isinstance(options, Mapping) and isinstance(seed := options.get("seed"), numbers.Integral):
            raise ValueError(
                f"the collator {type(collate).__name__} has seed={seed}. If it draws random numbers from that seed, "
                "whoever knows it can tell more than epsilon allows. Leave it out (seed=None): it then draws from "
                "secret numbers."
            )
        inner = [options[name] for name in ("data_collator", "collate") if name in options]
        collate = collate.func if isinstance(collate, functools.partial) else next(iter(inner), None)
