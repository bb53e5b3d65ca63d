"""Rows of a data set, and batches that a collator makes of them, with random numbers from a secret."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..runtime.randomness import SecretSeeds
from . import rows


class RowSource:
    """Loads rows. The global random generators, and those that the data set and the collator keep, are seeded from
    ``seeds``, so that augmentation and random masking follow no seed that somebody set.

    Args:
        dataset: A map-style data set.
        collate: It makes a batch of a list of examples.
        seeds: They seed the random generators.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seeds: SecretSeeds):
        self.dataset, self.collate, self.seeds = dataset, collate, seeds
        self._generators: list[Any] = []  # those that the data set and the collator have in the current draw

    @property
    def loads_together(self) -> bool:
        """Whether the data set loads several rows at once, and may make one of them by another."""
        return hasattr(self.dataset, "__getitems__")

    def begin_draw(self) -> None:
        """Look for the generators that data set and collator have by now.

        Raises:
            ValueError: one of their parts has a seed of its own.
        """
        parts = list(rows.parts_of((self.collate, self.dataset)))
        rows.require_known_to_nobody(parts)
        self._generators = rows.generators(parts)

    def reseed(self, purpose: str, seeds: SecretSeeds | None = None) -> None:
        """Seed all generators for a purpose, which gives the same numbers each time."""
        seeds = seeds or self.seeds
        seeds.reseed(purpose)
        for generator in self._generators:
            seeds.reseed_generator(generator, purpose)

    def load(self, indices: Sequence[int]) -> list[Any]:
        """Load the rows of a draw, together where the data set does that."""
        if not self.loads_together:
            return [self.dataset[i] for i in indices]
        examples = list(self.dataset.__getitems__(list(indices))) if len(indices) else []
        rows.require_one_each(indices, examples, self.dataset)
        return examples

    def load_alone(self, indices: Sequence[int], draw: int) -> list[Any]:
        """Load rows one after the other, each with random numbers that do not depend on those before it."""
        loaded = []
        for i in indices:
            self.reseed(f"row {i} by itself, beside draw {draw}")
            loaded += rows.copied(self.load([i]))  # the data set may keep what it returns, and change it
        return loaded
