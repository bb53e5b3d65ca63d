"""The examples of draws, loaded and collated.

A *logical batch* is the batch of one draw. It is one item of the dataloader, so that everything in Trainer that counts
batches counts private steps. It consists of *physical batches*, which are collated and of a size that fits the device.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path
from torch.utils.data import DataLoader, Dataset

from . import distributed, rows
from .clipping.checks.padding import is_of_targets
from .common_rows import CommonRows
from .first_use import Memory
from .loaded_rows import LoadedRows
from .mixing import refuse_first_use, refuse_mixed, refuse_reordered, refuse_state
from .randomness import SecretSeeds, require_unseeded
from .rows import Padding
from .sampling import Draw, DrawSampler
from .stored_rows import refuse_rows_loaded_from_one


@dataclass
class PhysicalBatch:
    """A collated part of a draw.

    Attributes:
        rows: What the collator returned.
        size: The number of rows in it.
        paddings: How some of its rows were padded, by columns; empty where none was.
        traits: The kinds of masks and counts in it (:func:`dp_transformers.rows.traits_of`).
        fillers: How many of its rows, the last ones, have weight 0. They fill a batch up to a fixed size, keep ranks
            in step, or stand for an empty draw.
    """

    rows: Any
    size: int
    paddings: tuple[Padding, ...] = ()
    traits: frozenset = frozenset()
    fillers: int = 0

    @property
    def examples(self) -> int:
        """How many of its rows, the first ones, are examples of the draw."""
        return self.size - self.fillers

    def padded_arguments(self, padding: Padding, args: tuple, kwargs: dict) -> dict[str, bool] | None:
        """Return by path whether an argument of the model, or of a loss, is a column that is padded so. Arguments that
        are no columns are left out. None where one of those might be, and might be one that is padded otherwise to the
        same length."""
        if padding.columns is None:
            return {}
        columns = [(name, x) for name, x in rows.leaves(self.rows) if isinstance(x, torch.Tensor)]
        found, others = {}, False
        for path, x in tree_leaves_with_path((args, kwargs)):
            if not isinstance(x, torch.Tensor):
                continue
            own_name = str(getattr(path[-1], "key", ""))
            same = [(name, y) for name, y in columns if y.shape == x.shape]
            name = next((name for name, _ in same if name == own_name), None) or next(
                (name for name, y in same if y.dtype == x.dtype and rows.same_numbers(x, y.to(x.device))), None
            )
            if name is not None:
                found[keystr(path)] = name in padding.columns
            elif is_of_targets(own_name):  # made of them
                found[keystr(path)] = any(map(is_of_targets, padding.columns))
            else:
                others |= padding.length in x.shape[1:]
        is_one_of_two = sum(each.length == padding.length for each in self.paddings) > 1
        return None if others and is_one_of_two else found

    def pin_memory(self) -> PhysicalBatch:
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, rows=pin_memory(self.rows))


@dataclass
class LogicalBatch:
    """What one rank contributes to one step.

    Attributes:
        number, starts_pass, step: What :class:`.sampling.Draw` says of the draw.
        batches: The physical batches. There are none if this rank has no example in the draw.
        common: Rows that all ranks are to have alike; None where they are not looked at.
    """

    number: int
    batches: list[PhysicalBatch] = field(default_factory=list)
    starts_pass: bool = False
    step: int = 0
    common: CommonRows | None = None

    def pin_memory(self) -> LogicalBatch:
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])

    @property
    def physical_batches(self) -> list[Any]:
        return [batch.rows for batch in self.batches]

    @property
    def sizes(self) -> list[int]:
        return [batch.size for batch in self.batches]


_FEW = 8  # examples that are made once more, each as the first of its draw


class LogicalBatches(Dataset):
    """A map-style dataset seen through draws: item ``draw`` is the :class:`LogicalBatch` of its examples.

    Examples that have a length (texts and sounds) are ordered by it before they are cut into physical batches. They
    then need less padding, and no example's gradient changes. Before the examples of a draw are loaded, the global
    random generators, and those that the data set and the collator keep, are seeded from ``seeds``, so that
    augmentation and random masking follow no seed that somebody set.

    Args:
        dataset: A map-style data set.
        collate: It makes a batch of a list of examples.
        physical_batch_size: The largest number of examples in a physical batch.
        seeds: They seed the random generators; by default from a secret of their own.
        fill: Whether every physical batch has just as many rows as the largest. Those that are missing are copies of
            other rows, of weight 0.
        largest_draw: The largest number of examples that a draw has on this rank; None where there is no bound.
        copies: How many indices may stand for one stored row (``max_examples_per_person``).

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
        self.dataset, self.collate, self.physical_batch_size = dataset, collate, physical_batch_size
        self._fill, self._copies = fill, copies
        self.batches_per_draw = -(-largest_draw // physical_batch_size) if fill and largest_draw else 0
        self._seeds = seeds or SecretSeeds(secrets.randbits(128))
        # columns with their shortest and longest lengths, to within a factor of two, of which a row was collated alone
        self._collated_alone: set[tuple[Any, int, int]] = set()
        self._columns_of_mask: frozenset[str] | None = None  # those that are padded like it, once that is known
        # whether the collator, or the data set, pads rows to the longest of those it is asked for together
        self._pads_draws = False
        self._filler: PhysicalBatch | None = None
        self._has_ranks = distributed.world_size() > 1  # of which a worker knows nothing
        self._parts: list[Any] = []  # the objects that the data set and the collator consist of in the current draw

    def __len__(self) -> int:
        return len(self.dataset)

    # pyrefly: ignore[bad-override-param-name]  (given by position, by torch's loader)
    def __getitem__(self, draw: Draw) -> LogicalBatch:
        self._parts = list(rows.parts_of((self.collate, self.dataset)))
        rows.require_known_to_nobody(self._parts)
        is_looked_at = draw.number & (draw.number - 1) == 0  # draws 0, 1, 2, 4, 8, ...
        memory, common = Memory((self.collate, self.dataset)) if is_looked_at else None, None
        if memory is not None and self._has_ranks:
            common = self.common_rows(draw.number)
            memory.put_back()
            if common.error is not None:
                return LogicalBatch(draw.number, [], draw.starts_pass, draw.step, common)
        is_looked_at = is_looked_at and len(draw.indices) > 1
        some = list(draw.indices)[:16] if is_looked_at else []
        before = self._load_alone(some, draw)
        self._reseed(f"rows of draw {draw.number}")
        loaded = self._load(draw.indices)
        refuse_rows_loaded_from_one(draw.indices, loaded, self._copies)
        refuse_state(self.dataset, before[::2], self._load_alone(some[::2][::-1], draw)[::-1])
        examples = sorted(loaded, key=_length)
        size = self.physical_batch_size
        parts = [examples[i : i + size] for i in range(0, len(examples), size)]
        if is_looked_at:
            refuse_mixed(self.collate, examples[-16:], self._reseed)
            self._refuse_mixed_loading(draw)
            self._pads_draws |= self._is_padded_by_others(draw.indices, loaded)
        few = rows.copied(_sample(examples)) if is_looked_at else []
        self._reseed(f"batches of draw {draw.number}")  # loading an example may have set a seed
        batches = [self._physical_batch(part, f"filled batch of draw {draw.number}") for part in parts]
        if memory is not None:
            self._refuse_first_use(memory, dict(zip(some, before, strict=True)), few, draw)
        return LogicalBatch(draw.number, batches, draw.starts_pass, draw.step, common)

    def _refuse_first_use(self, memory: Memory, known: Mapping[int, Any], few: Sequence[Any], draw: Draw) -> None:
        """Raise ValueError if a row, or what the collator makes of one, is another one where it is the first that is
        made since the draw began.

        Args:
            known: Rows by their index, loaded alone.
            few: Rows for the collator.
        """
        if not (kept := memory.changed()):
            return

        def made(example: Any) -> Any:
            self._reseed(f"an example twice, beside draw {draw.number}")
            return self.collate([rows.copied(example), rows.copied(example)])  # some collators cannot do with one

        for i, row in _sample(list(known.items())):
            for first in memory.as_first(lambda i=i: self._load_alone([i], draw)[0]):
                refuse_first_use(row, first, f"data set ({type(self.dataset).__name__})", kept)
        for example in few:
            for first in memory.as_first(lambda example=example: made(example)):
                refuse_first_use(made(example), first, "collator", kept)

    def common_rows(self, number: int) -> CommonRows:
        """Load some rows that all ranks have alike, beside draw ``number``."""
        self._parts = list(rows.parts_of((self.collate, self.dataset)))
        seeds = self._seeds.of_all_ranks()

        def reseed(purpose: str) -> None:
            self._reseed(purpose, seeds)

        return CommonRows.of(self.dataset, lambda i: self._load([i])[0], seeds, reseed, number)

    def filler(self) -> PhysicalBatch:
        """Return rows of weight 0 alone, for a rank that has no examples left, and for a draw that is empty."""
        if self._filler is None:
            size = self.physical_batch_size if self._fill else 1
            self._filler = PhysicalBatch(self.collate(_copies(self._load([0])[0], size)), size, fillers=size)
        return self._filler

    def has_one_longest(self) -> bool:
        """Return whether just one row of the data set comes without padding, so that it decided the length of the
        others."""
        full = 0
        for i in range(len(self.dataset)):
            row = self._load([i])[0]
            mask = row.get("attention_mask") if isinstance(row, Mapping) else None
            full += mask is not None and bool(np.all(np.asarray(mask)))
            if full > 1:
                return False
        return full == 1

    def _reseed(self, purpose: str, seeds: SecretSeeds | None = None) -> None:
        seeds = seeds or self._seeds
        seeds.reseed(purpose)
        for generator in rows.generators(self._parts):
            seeds.reseed_generator(generator, purpose)

    def _load(self, indices: Sequence[int]) -> list[Any]:
        if not hasattr(self.dataset, "__getitems__"):
            return [self.dataset[i] for i in indices]
        examples = list(self.dataset.__getitems__(list(indices))) if len(indices) else []
        rows.require_one_each(indices, examples, self.dataset)
        return examples

    def _load_alone(self, indices: Sequence[int], draw: Draw) -> list[Any]:
        """Load rows one after the other, each with random numbers that do not depend on those before it."""
        loaded = []
        for i in indices:
            self._reseed(f"row {i} by itself, beside draw {draw.number}")
            loaded += rows.copied(self._load([i]))  # the data set may keep what it returns, and change it
        return loaded

    def _is_padded_by_others(self, indices: Sequence[int], examples: Sequence[Any]) -> bool:
        """Return whether the row with most padding has less when it is loaded alone. A data set may have a
        transform that pads the rows which are loaded together."""
        if not hasattr(self.dataset, "__getitems__") or not (
            isinstance(examples[0], Mapping) and "attention_mask" in examples[0]
        ):
            return False
        row = min(range(len(examples)), key=lambda i: int(np.sum(np.asarray(examples[i]["attention_mask"]))))
        return rows.size_of(self._load([indices[row]])[0]) < rows.size_of(examples[row])

    def _refuse_mixed_loading(self, draw: Draw) -> None:
        """Raise ValueError if a data set that loads the rows of a draw together mixes them."""
        if hasattr(self.dataset, "__getitems__"):
            indices = list(draw.indices)[-16:]
            refuse_mixed(self._load, indices, self._reseed, who="data set")

    def _physical_batch(self, examples: list[Any], purpose: str) -> PhysicalBatch:
        """Collate a part of a draw, filled up if batches have a fixed size.

        Fillers are copies of the shortest example, so that no row gets more padding than without them. Which rows are
        fillers is known by their place alone. The batch must therefore have the same rows before them with copies of
        another example in their place, one whose rows are seen to be other ones, the longest if they are. Where no
        example's are, all rows are alike.
        """
        fillers = self.physical_batch_size - len(examples) if self._fill else 0
        if not fillers:
            return self._collated(examples)
        kept = rows.copied(examples)
        self._reseed(purpose)
        batch = self._collated([*examples, *_copies(kept[0], fillers)])
        for other in reversed(kept):
            self._reseed(purpose)
            made = self.collate([*rows.copied(kept), *_copies(other, fillers)])
            if refuse_reordered(batch.rows, made, len(kept), batch.size):
                break
        return replace(batch, fillers=fillers)

    def _collated(self, examples: list[Any]) -> PhysicalBatch:
        alone = {row: rows.copied(examples[row]) for row in self._rows_to_collate_alone(examples)}
        name, loaded = rows.main_input(examples[0]), LoadedRows.of_examples(examples)
        batch = self.collate(examples)
        require_unseeded("the collator")
        loaded.refuse_mixed(batch, "collator")
        rows.refuse_packed(batch, examples)
        paddings = [
            padding
            for row, example in alone.items()
            for padding in rows.paddings_by_others(batch, len(examples), row, example, self.collate)
        ]
        if (
            name is not None
            and isinstance(batch, Mapping)
            and "attention_mask" not in batch
            and any(name in (padding.columns or ()) for padding in paddings)
        ):
            raise ValueError(
                f"examples of different lengths ('{name}') were padded without an attention_mask, so how much padding "
                "an example sees depends on the others. Use a collator that returns the attention_mask "
                "(DataCollatorWithPadding does if the tokenizer's output has it), or pad all to one length "
                "(padding='max_length')."
            )
        self._pads_draws |= bool(paddings)
        masked = (padding.columns for padding in paddings if "attention_mask" in (padding.columns or ()))
        self._columns_of_mask = next(masked, self._columns_of_mask)
        if not paddings and (before := rows.padding_before(batch)) is not None:
            paddings = [replace(before, by_others=self._pads_draws, columns=self._columns_of_mask)]
        return PhysicalBatch(batch, len(examples), tuple(paddings), rows.traits_of(batch, len(examples)))

    def _rows_to_collate_alone(self, examples: Sequence[Any]) -> list[int]:
        """Return the shortest rows of the columns in which examples have other lengths than any before."""
        sizes = [rows.sizes_of(example) for example in examples]
        found: dict[int, None] = {}
        for column in sizes[0]:
            of_column = [each.get(column, 0) for each in sizes]
            shortest, longest = min(of_column), max(of_column)
            kind = (column, shortest.bit_length(), longest.bit_length())
            if shortest < longest and kind not in self._collated_alone:
                self._collated_alone.add(kind)
                found[min(range(len(sizes)), key=lambda row: (of_column[row], sum(sizes[row].values())))] = None
        return list(found)


def _sample(things: Sequence[Any]) -> list[Any]:
    return random.sample(things, min(_FEW, len(things)))


def _copies(example: Any, count: int) -> list[Any]:
    return [rows.copied(example) for _ in range(count)]


def _length(example: Any) -> int:
    """Return the number of positions, for several texts (multiple choice) that of the longest, for texts in parts
    (columns such as `prompt_ids` and `chosen_ids`) that of all; 0 without a length."""
    name = rows.main_input(example)
    if name is None:
        columns = example.items() if isinstance(example, Mapping) else ()
        return sum(len(x) for column, x in columns if str(column).endswith("_ids") and hasattr(x, "__len__"))
    x = example[name]
    if name == "input_ids" and getattr(x, "ndim", 1) > 1:
        return x.shape[-1]
    if name == "input_ids" and isinstance(x, Sequence) and len(x) and hasattr(x[0], "__len__"):
        return max(map(len, x))
    return len(x) if hasattr(x, "__len__") else 0


def _only_item(items: list[LogicalBatch]) -> LogicalBatch:
    return items[0]


def draws_dataloader(logical_batches: LogicalBatches, sampler: DrawSampler, **dataloader_options: Any) -> DataLoader:
    """Return a DataLoader whose items are :class:`LogicalBatch`. ``dataloader_options`` set its workers, pinning and
    the like."""
    return DataLoader(logical_batches, batch_sampler=sampler, collate_fn=_only_item, **dataloader_options)
