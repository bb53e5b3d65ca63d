"""Loads each example under random numbers of its own, and collates it alone.

Nothing of one example can get into the row of another, since the collator never gets two examples of a draw.
:mod:`.joining` makes a batch of the rows.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..clipping.errors import warn_once
from ..runtime.randomness import SecretSeeds, generators_apart, require_unseeded

logger = logging.getLogger(__name__)


class Examples:
    """Loads examples and collates each by itself. The row of an index depends only on that index, the draw and a
    secret.

    Args:
        dataset: A map-style data set.
        collate: The collator, which makes a batch of a list of examples.
        seeds: The seeds of the global generators of Python, NumPy and torch.
        views: The number of times that each index comes, one after the other, under different random numbers.

    Raises:
        ValueError: the collator draws from a seed of its own.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seeds: SecretSeeds, *, views: int = 1):
        _refuse_known_seed(collate)
        _say_what_is_left_out(dataset)
        self.dataset, self._collate, self._seeds, self._views = dataset, collate, seeds, views
        self._drawn: dict[str, set[str]] = {"example": set(), "row": set()}  # the generators that were drawn from

    def of_draw(self, indices: Sequence[int], draw: int) -> list[Any]:
        """Return the examples of a draw."""
        if _is_table(self.dataset, with_transform=False):  # they come faster together
            return self.dataset.__getitems__(list(indices)) if indices else []
        return self._each("example", indices, draw, lambda n: self.dataset[indices[n]])

    def collated(self, examples: Sequence[Any], indices: Sequence[int], draw: int) -> list[Any]:
        """Return the examples of a draw, each collated alone.

        Raises:
            ValueError: the collator fails for one example, or sets a seed.
        """
        return self._each("row", indices, draw, lambda n: self._alone(indices[n], examples[n]))

    def _each(self, what: str, indices: Sequence[int], draw: int, make: Callable[[int], Any]) -> list[Any]:
        """Return ``make(n)`` for the n-th index, each under random numbers of its own.

        Only generators that were seen to be used are seeded for each index. If another one is used, all are made
        again.
        """
        drawn, before, made = self._drawn[what], generators_apart(), list[Any]()
        for n, i in enumerate(indices):
            if drawn:
                view = f"view {n % self._views} of " if self._views > 1 else ""
                self._seeds.reseed(f"{view}{what} {i} of draw {draw}", drawn)
            made.append(make(n))
        now = generators_apart()
        if not (new := {k for k, state in before.items() if state != now[k]} - drawn):
            if self._views > 1 and what == "row" and not any(self._drawn.values()):
                warn_once(
                    logger, "views", "all views of a row are equal: neither data set nor collator draws randomly."
                )
            return made
        drawn |= new
        return self._each(what, indices, draw, make)

    def together(self, indices: Sequence[int], purpose: str) -> Any:
        """Collate several examples in one call, as a plain DataLoader would.

        Args:
            purpose: Seeds the random numbers, which are the same for each call with this text, and are not those of
                any draw."""
        examples = []
        for i in indices:
            self._seeds.reseed(f"example {i} for {purpose}")
            examples.append(self.dataset[i])
        self._seeds.reseed(f"a batch for {purpose}")
        return self._collate([_copied(example) for example in examples])

    def _alone(self, index: int, example: Any) -> Any:
        try:
            row = self._collate([_copied(example)])
        except Exception as error:
            raise ValueError(
                f"the collator raised {type(error).__name__} for row {index} of the training data alone: {error}. "
                "Each example is collated by itself, so the collator must make one row of a list of one example. If "
                "it needs two of them, or leaves some out, compute that before training, or in the data set."
            ) from error
        if "torch" in self._drawn["row"]:  # and was seeded for this row
            require_unseeded("the collator")
        return row


def _copied(example: Any) -> Any:
    """Return a copy of an example in a dict, so that the collator may take columns out of it."""
    return dict(example) if type(example) is dict else example


def _is_table(dataset: Any, *, with_transform: bool) -> bool:
    """Return True for a ``datasets.Dataset`` with or without a transform."""
    table = getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)
    return table is not None and type(dataset) is table and (dataset.format["type"] == "custom") == with_transform


def _say_what_is_left_out(dataset: Any) -> None:
    """Warn of a transform that cuts a row into several, as windows of a long text."""
    first = range(min(8, len(dataset)) if _is_table(dataset, with_transform=True) else 0)
    if (made := max((len(next(iter(dataset[[i]].values()))) for i in first), default=1)) > 1:
        logger.warning(
            "the transform of the training data makes up to %d rows of one, of which the first is trained and the "
            "others are left out: cut rows with dataset.map(..., batched=True), and give max_examples_per_person.",
            made,
        )


def _refuse_known_seed(collate: Any) -> None:
    """Raise ValueError if a collator, or one that Trainer wraps, has a seed, which is known to whoever reads it."""
    collate = getattr(collate, "data_collator", collate)
    if isinstance(seed := getattr(collate, "seed", None), int):
        raise ValueError(
            f"the collator {type(collate).__name__} has seed={seed}, and whoever knows its random numbers can tell "
            "more than epsilon allows. Leave it out (seed=None): it then draws from secret numbers."
        )
