"""The examples of draws, loaded, collated alone and joined.

A *logical batch* is the batch of one draw. It is one item of the dataloader, so that everything in Trainer that counts
batches counts private steps. It consists of *physical batches*, which are collated and of a size that fits the device.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import itemgetter
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
from .known_collators import acts_on_rows_alone, are_of_one_kind, draws_numbers, sizes_of
from .refused import refuse_packed
from .stored_rows import refuse_rows_loaded_from_one, require_same_rows
from .units import Units, cut

_Join = Callable[[Sequence[Any]], tuple[Any, Sizes]]


@dataclass
class PhysicalBatch:
    """A collated part of a draw.

    Attributes:
        rows: What the collator returned for single examples, joined.
        size: The number of rows in it.
        sizes: How rows are padded, by columns: in which dimensions, on which side, and how long each row is.
        came_padded: True if they were padded before they were collated, as their mask says.
        fillers: The number of rows of weight 0, which are the last ones. They fill a batch up to a fixed size, keep
            ranks in step, or stand for an empty draw.
        unit_sizes: The number of rows of each unit, which lie one after the other; None where each row is a unit.
    """

    rows: Any
    size: int
    sizes: Sizes = field(default_factory=dict)
    came_padded: bool = False
    fillers: int = 0
    unit_sizes: Sequence[int] | None = None

    @property
    def examples(self) -> int:
        """The number of rows that are examples of the draw, which are the first ones."""
        return self.size - self.fillers

    def sizes_of(self, args: tuple, kwargs: dict) -> Sizes:
        """Return how those arguments of a call are padded that are columns of this batch, by their paths
        (``torch.utils._pytree.keystr``); ``{}`` for a column that is not padded."""
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
                targets = next((of for each, of in self.sizes.items() if is_of_targets(each)), {})
                found[keystr(path)] = {1: targets[1]} if 1 in targets else {}
        return found


@dataclass
class LogicalBatch:
    """What one rank contributes to one step.

    Attributes:
        number, starts_pass, step: Those of the :class:`.mechanism.sampling.Draw`.
        batches: The physical batches; none if this rank has no example in the draw.
    """

    number: int
    batches: list[PhysicalBatch] = field(default_factory=list)
    starts_pass: bool = False
    step: int = 0

    def pin_memory(self) -> LogicalBatch:
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, batches=[replace(batch, rows=pin_memory(batch.rows)) for batch in self.batches])


class LogicalBatches(Dataset):
    """A data set with draws as indices: item ``draw`` is the :class:`LogicalBatch` of the draw's examples.

    Examples are sorted by the number of numbers that the collator makes of them, and then cut into physical batches.
    They need less padding so, and no example's gradient changes.

    All ranks construct it at the same time.

    Args:
        dataset: A map-style data set.
        collate: The collator. It gets one example at a time.
        physical_batch_size: The largest number of examples in a physical batch.
        seeds: The seeds of the random generators; by default from a secret of their own.
        fill: True to give every physical batch ``physical_batch_size`` rows. Copies of the shortest row, of weight 0,
            are put last.
        largest_draw: The largest number of examples that a draw has on this rank; None if there is no bound.
        copies: The number of indices that may stand for one stored row (``max_examples_per_person``).
        units: What an index of a draw stands for, if not for one row. Physical batches are of whole units.

    Raises:
        ValueError: the ranks hold different rows or units, or a unit may be larger than a physical batch.

    Attributes:
        dataset: The data set.
        batches_per_draw: The smallest number of physical batches of a draw. If batches are filled and draws have a
            largest size, it is the number of every draw.
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
        units: Units | None = None,
    ):
        seeds = seeds or SecretSeeds(secrets.randbits(128))
        self.dataset, self._collate, self._seeds = dataset, collate, seeds
        self.units, largest_unit = units, 1 if units is None else units.largest
        if largest_unit > physical_batch_size:
            raise ValueError(
                f"a unit may have {largest_unit} rows (rows_per_unit times augmentation_multiplicity), which are "
                f"clipped together, and a physical batch has {physical_batch_size}: raise per_device_train_batch_size "
                "(in a loop max_physical_batch_size), or take fewer rows of a unit."
            )
        self._examples = Examples(dataset, collate, seeds, views=1 if units is None else units.views)
        self._is_collator_known = acts_on_rows_alone(collate)
        self._joiner = Joiner(self._examples.together, len(dataset))
        self.physical_batch_size, self._fill, self._copies = physical_batch_size, fill, copies * largest_unit
        units_per_batch = physical_batch_size // largest_unit
        self.batches_per_draw = -(-largest_draw // units_per_batch) if fill and largest_draw else 0
        self._filler: PhysicalBatch | None = None
        if distributed.world_size() > 1:
            require_same_rows(len(dataset), dataset.__getitem__, seeds.of_all_ranks())
            distributed.require_same({"the checksum of units": None if units is None else units.checksum})

    def __len__(self) -> int:
        return len(self.dataset)

    # pyrefly: ignore[bad-override-param-name]  (given by position, by torch's loader)
    def __getitem__(self, draw: Draw) -> LogicalBatch:
        indices, size = list(draw.indices), self.physical_batch_size
        if self.units is None:
            rows, join = self._rows(indices, draw.number)
            rows = sorted(rows, key=size_of)
            batches = [self._physical_batch(rows[i : i + size], join) for i in range(0, len(rows), size)]
        else:
            taken = self.units.taken(indices, draw.number, self._seeds.of_all_ranks())
            rows, join = self._rows([i for unit in taken for i in unit], draw.number)
            parts = cut(rows, [*map(len, taken)], size)
            batches = [self._physical_batch([*chain(*part)], join, [*map(len, part)]) for part in parts]
        return LogicalBatch(draw.number, batches, draw.starts_pass, draw.step)

    def filler(self) -> PhysicalBatch:
        """Return a batch of rows of weight 0, for a rank that has no examples left, and for an empty draw."""
        if self._filler is None:
            size = self.physical_batch_size if self._fill else 1
            rows, join = self._rows([0], -1)
            self._filler = PhysicalBatch(join([*rows] * size)[0], size, fillers=size)
        return self._filler

    def _rows(self, indices: Sequence[int], draw: int) -> tuple[Sequence[Any], _Join]:
        """Return the rows of a draw, and the function that joins some of them."""
        loaded = self._examples.of_draw(indices, draw)
        refuse_rows_loaded_from_one(indices, loaded, self._copies)
        if self._is_collator_known and are_of_one_kind(loaded):
            if draws_numbers(self._collate):
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
        """Return True if exactly one row of the data set comes without padding: it decided the length of the others.
        Loads rows until it knows."""
        rows = (self.dataset[i] for i in range(len(self)))
        masks = (row.get("attention_mask") for row in rows if isinstance(row, Mapping))
        return len(list(islice((1 for mask in masks if mask is not None and np.all(np.asarray(mask))), 2))) == 1

    def _physical_batch(
        self, rows: Sequence[Any], join: _Join, unit_sizes: Sequence[int] | None = None
    ) -> PhysicalBatch:
        """Join a part of a draw, filled up if batches have a fixed size. The shortest row fills it, so that no row
        gets more padding than without fillers."""
        fillers = self.physical_batch_size - len(rows) if self._fill else 0
        batch, sizes = join([*rows, *[rows[0]] * fillers])
        refuse_packed(batch)
        before = {} if sizes else sizes_by_mask(batch)
        return PhysicalBatch(batch, len(rows) + fillers, sizes or before, bool(before), fillers, unit_sizes)


def is_of_targets(name: str) -> bool:
    """Return True for the name of a column of targets, or of decoder inputs, which are made of targets."""
    return "label" in name or name.startswith("decoder")


def sizes_by_mask(batch: Any) -> Sizes:
    """Return how the rows of a batch were padded before they were collated, by its mask; ``{}`` if none was, if no row
    fills the mask, or if a row has padding that is not on one side."""
    columns = dict(tensors_of(batch)) if isinstance(batch, Mapping) else {}
    mask = columns.get("attention_mask")
    if mask is None or mask.dim() != 2 or mask.is_floating_point() or bool((mask != 0).all()):
        return {}
    own_bt, longest = (mask != 0).int(), mask.shape[1]
    own = [n or longest for n in own_bt.sum(1).tolist()]
    sides = {side: own_bt.sort(1, descending=side == "right")[0] for side in ("right", "left")}
    side = next((side for side, ordered_bt in sides.items() if torch.equal(ordered_bt, own_bt)), None)
    if side is None or max(own) < longest:
        return {}
    of_positions = {name: x for name, x in columns.items() if x.shape[:2] == mask.shape}
    # classes may be as many as positions
    return {name: {1: (side, own)} for name, x in of_positions.items() if x.dim() != 2 or not x.is_floating_point()}


def draws_dataloader(logical_batches: LogicalBatches, sampler: DrawSampler, **dataloader_options: Any) -> DataLoader:
    """Return a DataLoader that yields one :class:`LogicalBatch` after the other.

    Args:
        dataloader_options: Options of the DataLoader, as its workers and pinning.
    """
    return DataLoader(logical_batches, batch_sampler=sampler, collate_fn=itemgetter(0), **dataloader_options)
