"""The examples of draws, loaded, collated alone and joined.

A *logical batch* is the batch of one draw. It is one item of the dataloader, so that everything in Trainer that counts
batches counts private steps. It consists of *physical batches*, which are collated and of a size that fits the device.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path
from torch.utils.data import DataLoader, Dataset

from ..mechanism.sampling import Draw, DrawSampler
from ..runtime import distributed
from ..runtime.randomness import SecretSeeds
from .columns import are_same, size_of, tensors_of
from .examples import Examples
from .joining import Joiner, Sizes
from .known_collators import acts_on_rows_alone, kind_of, sizes_of
from .padding import refuse_packed, require_mask, sizes_by_mask
from .ranks import require_same_rows
from .stored_rows import refuse_rows_loaded_from_one

_Join = Callable[[Sequence[Any]], tuple[Any, Sizes]]


@dataclass
class PhysicalBatch:
    """A collated part of a draw.

    Attributes:
        rows: What the collator returned for single examples, joined.
        size: The number of rows in it.
        sizes: How rows are padded, by columns: in which dimensions, on which side, and how long each row is.
        came_padded: Whether they were padded before they were collated, as their mask says.
        fillers: How many of its rows, the last ones, have weight 0. They fill a batch up to a fixed size, keep ranks
            in step, or stand for an empty draw.
    """

    rows: Any
    size: int
    sizes: Sizes = field(default_factory=dict)
    came_padded: bool = False
    fillers: int = 0

    @property
    def examples(self) -> int:
        """How many of its rows, the first ones, are examples of the draw."""
        return self.size - self.fillers

    def sizes_of(self, args: tuple, kwargs: dict) -> Sizes:
        """Return how the arguments of a call are padded that are columns of this batch, by their paths
        (``torch.utils._pytree.keystr``); nothing in it for a column that is not padded."""
        columns, found = list(tensors_of(self.rows)), {}
        for path, x in tree_leaves_with_path((args, kwargs)):
            if not isinstance(x, torch.Tensor):
                continue
            own_name = str(getattr(path[-1], "key", ""))
            same = [(name, y) for name, y in columns if y.shape == x.shape]
            name = next((name for name, _ in same if name == own_name), None) or next(
                (name for name, y in same if y.dtype == x.dtype and are_same(x, y.to(x.device))), None
            )
            if name is None:  # a part of a column without padding has none
                parts = (
                    each for each, y in columns if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
                )
                name = next((each for each in parts if not self.sizes.get(each)), None)
            if name is not None:
                found[keystr(path)] = self.sizes.get(name, {})
            elif is_of_targets(own_name):  # made of them
                padded = any(map(is_of_targets, self.sizes))
                targets = next((self.sizes[each] for each in self.sizes if is_of_targets(each)), {})
                found[keystr(path)] = {1: targets[1]} if padded and 1 in targets else {}
        return found

    def pin_memory(self) -> PhysicalBatch:
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, rows=pin_memory(self.rows))


@dataclass
class LogicalBatch:
    """What one rank contributes to one step.

    Attributes:
        number, starts_pass, step: What :class:`.mechanism.sampling.Draw` says of the draw.
        batches: The physical batches. There are none if this rank has no example in the draw.
    """

    number: int
    batches: list[PhysicalBatch] = field(default_factory=list)
    starts_pass: bool = False
    step: int = 0

    def pin_memory(self) -> LogicalBatch:
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])

    @property
    def physical_batches(self) -> list[Any]:
        return [batch.rows for batch in self.batches]

    @property
    def sizes(self) -> list[int]:
        return [batch.size for batch in self.batches]


class LogicalBatches(Dataset):
    """A map-style dataset seen through draws: item ``draw`` is the :class:`LogicalBatch` of its examples.

    Examples are ordered by how many numbers the collator makes of them before they are cut into physical batches. They
    then need less padding, and no example's gradient changes.

    All ranks make theirs together.

    Args:
        dataset: A map-style data set.
        collate: It makes a batch of a list of examples. It is given one at a time.
        physical_batch_size: The largest number of examples in a physical batch.
        seeds: They seed the random generators; by default from a secret of their own.
        fill: Whether every physical batch has just as many rows as the largest. Those that are missing are copies of
            the shortest row, of weight 0, in the last places.
        largest_draw: The largest number of examples that a draw has on this rank; None where there is no bound.
        copies: How many indices may stand for one stored row (``max_examples_per_person``).

    Raises:
        ValueError: the ranks hold other rows.

    Attributes:
        batches_per_draw: How many physical batches a draw has at least. Where batches are filled and draws have a
            largest size, all draws have as many.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        physical_batch_size: int,
        seeds: SecretSeeds | None = None,
        *,
        fill: bool = False,
        largest_draw: int | None = None,
        copies: int = 1,
    ):
        seeds = seeds or SecretSeeds(secrets.randbits(128))
        self._examples, self._collate, self._seeds = Examples(dataset, collate, seeds), collate, seeds
        self._is_collator_known = acts_on_rows_alone(collate)
        self._joiner = Joiner(self._examples.together, len(dataset))
        self.physical_batch_size, self._fill, self._copies = physical_batch_size, fill, copies
        self.batches_per_draw = -(-largest_draw // physical_batch_size) if fill and largest_draw else 0
        self._own_columns: set[str] = set()  # of the examples as they are loaded
        self._filler: PhysicalBatch | None = None
        if distributed.world_size() > 1:
            require_same_rows(len(dataset), lambda i: self._examples.load([i])[0], seeds.of_all_ranks())

    @property
    def dataset(self) -> Any:
        return self._examples.dataset

    def __len__(self) -> int:
        return len(self.dataset)

    # pyrefly: ignore[bad-override-param-name]  (given by position, by torch's loader)
    def __getitem__(self, draw: Draw) -> LogicalBatch:
        indices, size = list(draw.indices), self.physical_batch_size
        rows, join = self._rows(indices, draw.number)
        rows = sorted(rows, key=size_of)
        batches = [self._physical_batch(rows[i : i + size], join) for i in range(0, len(rows), size)]
        return LogicalBatch(draw.number, batches, draw.starts_pass, draw.step)

    def filler(self) -> PhysicalBatch:
        """Return rows of weight 0 alone, for a rank that has no examples left, and for a draw that is empty."""
        if self._filler is None:
            size = self.physical_batch_size if self._fill else 1
            rows, join = self._rows([0], -1)
            self._filler = PhysicalBatch(join([*rows] * size)[0], size, fillers=size)
        return self._filler

    def _rows(self, indices: Sequence[int], draw: int) -> tuple[Sequence[Any], _Join]:
        """Return the rows of a draw, and the function that joins some of them."""
        loaded = self._examples.of_draw(indices, draw)
        refuse_rows_loaded_from_one(indices, loaded, self._copies)
        self._own_columns = {name for example in loaded[:1] if isinstance(example, Mapping) for name in example}
        kinds = {*map(kind_of, loaded)} if self._is_collator_known else set()
        if len(kinds) == 1 and None not in kinds:
            self._seeds.reseed(f"batches of draw {draw}")
            return loaded, self._collated_together
        rows = self._examples.collated(loaded, indices, draw)
        if self.physical_batch_size > 1:
            self._joiner.begin(rows, indices)
        return rows, self._joiner.join

    def _collated_together(self, examples: Sequence[Any]) -> tuple[Any, Sizes]:
        batch = self._collate(list(examples))
        return batch, sizes_of(self._collate, examples, batch)

    def has_one_longest(self) -> bool:
        """Return whether just one row of the data set comes without padding, so that it decided the length of the
        others."""
        full = 0
        for i in range(len(self.dataset)):
            row = self._examples.load([i])[0]
            mask = row.get("attention_mask") if isinstance(row, Mapping) else None
            full += mask is not None and bool(np.all(np.asarray(mask)))
            if full > 1:
                return False
        return full == 1

    def _physical_batch(self, rows: Sequence[Any], join: _Join) -> PhysicalBatch:
        """Join a part of a draw, filled up if batches have a fixed size. Fillers are copies of the shortest row, so
        that no row gets more padding than without them."""
        fillers = self.physical_batch_size - len(rows) if self._fill else 0
        batch, sizes = join([*rows, *[rows[0]] * fillers])
        refuse_packed(batch)
        require_mask(batch, sizes, self._own_columns)
        before = {} if sizes else sizes_by_mask(batch)
        return PhysicalBatch(batch, len(rows) + fillers, sizes or before, bool(before), fillers)


def is_of_targets(name: str) -> bool:
    """Whether an argument or a column is named like targets, or like what a decoder is given of them."""
    return "label" in name or name.startswith("decoder")


def _only_item(items: list[LogicalBatch]) -> LogicalBatch:
    return items[0]


def draws_dataloader(logical_batches: LogicalBatches, sampler: DrawSampler, **dataloader_options: Any) -> DataLoader:
    """Return a DataLoader whose items are :class:`LogicalBatch`. ``dataloader_options`` set its workers, pinning and
    the like."""
    return DataLoader(logical_batches, batch_sampler=sampler, collate_fn=_only_item, **dataloader_options)
