"""What is looked at in draws 0, 1, 2, 4, 8, ...: whether rows are made of their own examples alone, and are the same
on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves

from ..mechanism.sampling import Draw
from . import rows
from .common_rows import CommonRows
from .first_use import Memory
from .mixing import drawn_for_all_rows, refuse_collected, refuse_counted, refuse_first_use, refuse_mixed, refuse_state
from .row_source import RowSource

_SEVERAL = 16  # rows that are loaded again, or made beside another one
_FEW = 8  # examples that are made once more, each as the first of its draw


def is_looked_at(draw: Draw) -> bool:
    """Return whether the draw is one of those whose rows are made again."""
    return draw.number & (draw.number - 1) == 0


def common_rows(source: RowSource, number: int) -> CommonRows:
    """Load some rows that all ranks are to have alike, beside draw ``number``. Data set and collator then keep what
    they kept before."""
    memory, seeds = Memory((source.collate, source.dataset)), source.seeds.of_all_ranks()

    def reseed(purpose: str) -> None:
        source.reseed(purpose, seeds)

    try:
        return CommonRows.of(source.dataset, lambda i: source.load([i])[0], seeds, reseed, number)
    finally:
        memory.put_back()


class DrawLook:
    """Looks at how the rows of a draw are made, step by step. It is made before they are loaded."""

    def __init__(self, source: RowSource, draw: Draw):
        self._source, self._draw = source, draw
        self._memory = Memory((source.collate, source.dataset))
        self._has_others = len(draw.indices) > 1
        self._indices = list(draw.indices)[:_SEVERAL] if self._has_others else []
        self._before = source.load_alone(self._indices, draw.number)
        self._examples: list[Any] = []
        self.drawn_for_all_rows: str | None = None  # a column of batches whose rows share random numbers

    def at_rows(self) -> None:
        """The rows were loaded: raise ValueError unless the data set gives some of them again as it gave them
        before, in the opposite order."""
        again = self._source.load_alone(self._indices[::2][::-1], self._draw.number)[::-1]
        refuse_state(self._source.dataset, self._before[::2], again)

    def at_examples(self, examples: Sequence[Any]) -> None:
        """Raise ValueError if the collator mixes ``examples``, or a data set that loads rows together mixes them."""
        if not self._has_others:
            return
        source = self._source
        if refuse_mixed(source.collate, examples[-_SEVERAL:], source.reseed):
            self.drawn_for_all_rows = drawn_for_all_rows(source.collate, examples[-1], source.reseed)
        if source.loads_together:
            refuse_mixed(source.load, list(self._draw.indices)[-_SEVERAL:], source.reseed, who="data set")
        self._examples = rows.copied(_sample(examples))

    def is_padded_by_others(self, loaded: Sequence[Any]) -> bool:
        """Return whether the row with most padding has less when it is loaded alone. A data set may have a transform
        that pads the rows which are loaded together."""
        has_masks = self._has_others and isinstance(loaded[0], Mapping) and "attention_mask" in loaded[0]
        if not (self._source.loads_together and has_masks):
            return False
        row = min(range(len(loaded)), key=lambda i: _number_of_ones(loaded[i]["attention_mask"]))
        return rows.size_of(self._source.load([self._draw.indices[row]])[0]) < rows.size_of(loaded[row])

    def at_end(self) -> None:
        """The draw was collated: raise ValueError if a row, or what the collator makes of one, is another one where it
        is the first that is made since the draw began, or comes after a million others; or if numbers were collected
        that later rows may be made with."""
        memory, kept = self._memory, self._memory.changed()
        collected, further = memory.collected(), memory.counted_further()
        for who, made, make in self._made_again() if kept else ():
            for first in memory.as_first(make):
                refuse_first_use(made, first, who, kept)
        refuse_collected(collected)
        for who, made, make in self._made_again() if further else ():
            for later in memory.made_with(further, make):
                refuse_counted(made, later, who, kept)

    def _made_again(self) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
        """For some rows, and batches of one example: who makes them, what was made, and how to make it again."""
        source = self._source
        for i, row in _sample(list(zip(self._indices, self._before, strict=True))):
            who = f"data set ({type(source.dataset).__name__})"
            yield who, row, lambda i=i: source.load_alone([i], self._draw.number)[0]
        for example in self._examples:
            yield "collator", self._collated(example), lambda example=example: self._collated(example)

    def _collated(self, example: Any) -> Any:
        self._source.reseed(f"an example twice, beside draw {self._draw.number}")
        return self._source.collate([rows.copied(example), rows.copied(example)])  # some cannot do with one


def _number_of_ones(mask: Any) -> int:
    """In a mask, or in lists of masks that are not equally long (of the choices of an example)."""
    return sum(int(np.sum(np.asarray(x))) for x in tree_leaves(mask))


def _sample(things: Sequence[Any]) -> list[Any]:
    return random.sample(things, min(_FEW, len(things)))
