"""The examples of draws, loaded and collated.

A *logical batch* is the batch of one draw. It is one item of the dataloader, so that everything in Trainer that counts
batches counts private steps. It consists of *physical batches*, which are collated and of a size that fits the device.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path
from torch.utils.data import DataLoader, Dataset

from ..clipping.checks.padding import is_of_targets
from ..mechanism.sampling import Draw, DrawSampler
from ..runtime import distributed
from ..runtime.randomness import SecretSeeds, require_unseeded
from . import rows
from .common_rows import CommonRows
from .draw_looks import DrawLook, common_rows, is_looked_at
from .loaded_rows import LoadedRows
from .mixing import refuse_drawn_for_all_rows, refuse_reordered
from .row_source import RowSource
from .rows import Padding
from .stored_rows import refuse_rows_chosen_again, refuse_rows_loaded_from_one


@dataclass
class PhysicalBatch:
    """A collated part of a draw.

    Attributes:
        rows: What the collator returned.
        size: The number of rows in it.
        paddings: How some of its rows were padded, by columns; empty where none was.
        traits: The kinds of masks and counts in it (:func:`dp_transformers.data.rows.traits_of`).
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

    def padded_arguments(self, padding: Padding, args: tuple, kwargs: dict) -> dict[str, tuple[int, ...]] | None:
        """Return by path in which dimensions an argument of the model, or of a loss, is a column that is padded so;
        none where it is another column. Arguments that are no columns are left out. None where one of those might be,
        and might be one that is padded otherwise to the same length."""
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
                found[keystr(path)] = padding.columns.get(name, ())
            elif is_of_targets(own_name):  # made of them
                found[keystr(path)] = (1,) if any(map(is_of_targets, padding.columns)) else ()
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
        number, starts_pass, step: What :class:`.mechanism.sampling.Draw` says of the draw.
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


class LogicalBatches(Dataset):
    """A map-style dataset seen through draws: item ``draw`` is the :class:`LogicalBatch` of its examples.

    Examples that have a length (texts and sounds) are ordered by it before they are cut into physical batches. They
    then need less padding, and no example's gradient changes.

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
        self._source = RowSource(dataset, collate, seeds or SecretSeeds(secrets.randbits(128)))
        self.physical_batch_size, self._fill, self._copies = physical_batch_size, fill, copies
        self.batches_per_draw = -(-largest_draw // physical_batch_size) if fill and largest_draw else 0
        # columns with their shortest and longest lengths, to within a factor of two, of which a row was collated alone
        self._collated_alone: set[tuple[Any, int, int]] = set()
        # the columns of batches by those of their examples that hold something; some were then collated alone
        self._columns: dict[frozenset, Mapping[str, str] | None] = {}
        self._columns_of_mask: Mapping[str, tuple[int, ...]] | None = (
            None  # that are padded like it, once that is known
        )
        # whether the collator, or the data set, pads rows to the longest of those it is asked for together
        self._pads_draws = False
        self._drawn_for_all_rows: str | None = None  # a column of batches whose rows share random numbers
        self._filler: PhysicalBatch | None = None
        self._has_ranks = distributed.world_size() > 1  # of which a worker knows nothing

    @property
    def dataset(self) -> Any:
        return self._source.dataset

    def __len__(self) -> int:
        return len(self.dataset)

    # pyrefly: ignore[bad-override-param-name]  (given by position, by torch's loader)
    def __getitem__(self, draw: Draw) -> LogicalBatch:
        source, common = self._source, None
        source.begin_draw()
        if self._has_ranks and is_looked_at(draw):
            common = common_rows(source, draw.number)
            if common.error is not None:
                return LogicalBatch(draw.number, [], draw.starts_pass, draw.step, common)
        look = DrawLook(source, draw) if is_looked_at(draw) else None
        source.reseed(f"rows of draw {draw.number}")
        loaded = source.load(draw.indices)
        refuse_rows_chosen_again(source.dataset, draw.indices, self._copies)
        refuse_rows_loaded_from_one(draw.indices, loaded, self._copies)
        examples = sorted(loaded, key=_length)
        if look is not None:
            look.at_rows()
            look.at_examples(examples)
            self._drawn_for_all_rows = self._drawn_for_all_rows or look.drawn_for_all_rows
            self._pads_draws |= look.is_padded_by_others(loaded)
        source.reseed(f"batches of draw {draw.number}")  # loading an example may have set a seed
        batches = [
            self._physical_batch(examples[i : i + self.physical_batch_size], f"filled batch of draw {draw.number}")
            for i in range(0, len(examples), self.physical_batch_size)
        ]
        if self._drawn_for_all_rows is not None and (len(batches) > 1 or self._has_ranks):
            refuse_drawn_for_all_rows(self._drawn_for_all_rows)
        if look is not None:
            look.at_end()
        return LogicalBatch(draw.number, batches, draw.starts_pass, draw.step, common)

    def common_rows(self, number: int) -> CommonRows:
        """Load some rows that all ranks are to have alike, beside draw ``number``."""
        self._source.begin_draw()
        return common_rows(self._source, number)

    def filler(self) -> PhysicalBatch:
        """Return rows of weight 0 alone, for a rank that has no examples left, and for a draw that is empty."""
        if self._filler is None:
            size = self.physical_batch_size if self._fill else 1
            self._filler = PhysicalBatch(
                self._source.collate(_copies(self._source.load([0])[0], size)), size, fillers=size
            )
        return self._filler

    def has_one_longest(self) -> bool:
        """Return whether just one row of the data set comes without padding, so that it decided the length of the
        others."""
        full = 0
        for i in range(len(self.dataset)):
            row = self._source.load([i])[0]
            mask = row.get("attention_mask") if isinstance(row, Mapping) else None
            full += mask is not None and bool(np.all(np.asarray(mask)))
            if full > 1:
                return False
        return full == 1

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
        self._source.reseed(purpose)
        batch = self._collated([*examples, *_copies(kept[0], fillers)])
        for other in reversed(kept):
            self._source.reseed(purpose)
            made = self._source.collate([*rows.copied(kept), *_copies(other, fillers)])
            if refuse_reordered(batch.rows, made, len(kept), batch.size):
                break
        return replace(batch, fillers=fillers)

    def _collated(self, examples: list[Any]) -> PhysicalBatch:
        alone = {row: rows.copied(examples[row]) for row in self._rows_to_collate_alone(examples)}
        of_kinds = _by_filled_columns(examples) if len(examples) > 1 else {}  # one row has columns of its own
        new = {kind: rows.copied(of_kind[:_ALONE]) for kind, of_kind in of_kinds.items() if kind not in self._columns}
        name, loaded = rows.main_input(examples[0]), LoadedRows.of_examples(examples)
        batch = self._source.collate(examples)
        require_unseeded("the collator")
        loaded.refuse_mixed(batch, "collator")
        rows.refuse_packed(batch, examples)
        self._require_same_columns(rows.columns_of(batch, len(examples)), of_kinds, new)
        paddings = [
            padding
            for row, example in alone.items()
            for padding in rows.paddings_by_others(batch, len(examples), row, example, self._source.collate)
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
            paddings = [replace(before, by_others=self._pads_draws, columns=self._columns_like_mask(batch, before))]
        return PhysicalBatch(batch, len(examples), tuple(paddings), rows.traits_of(batch, len(examples)))

    def _require_same_columns(
        self,
        columns: Mapping[str, str] | None,
        kinds: Collection[frozenset],
        new: Mapping[frozenset, Sequence[Any]],
    ) -> None:
        """Raise ValueError unless each example of a batch brings all its columns: some of a ``new`` kind are collated
        without others, and batches of a kind that is known have the columns that they had before."""
        for kind, examples in new.items():
            for example in examples:
                rows.refuse_other_columns(columns, rows.columns_of(self._source.collate(_copies(example, 2)), 2))
            self._columns[kind] = columns
        for kind in kinds:
            rows.refuse_other_columns(columns, self._columns[kind])

    def _columns_like_mask(self, batch: Any, padding: Padding) -> Mapping[str, tuple[int, ...]] | None:
        """Return the columns that are padded where the mask says so. Targets that go on there happen to be as long."""
        columns = self._columns_of_mask or {}
        if any(is_of_targets(name) and rows.goes_on(batch, name, padding) for name in columns):
            return {name: dims for name, dims in columns.items() if not is_of_targets(name)}
        return self._columns_of_mask

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


def _by_filled_columns(examples: Sequence[Any]) -> dict[frozenset, list[Any]]:
    kinds: dict[frozenset, list[Any]] = {}
    for example in examples:
        kinds.setdefault(rows.filled_columns(example), []).append(example)
    return kinds


_ALONE = 16  # examples of a new kind that are collated without others


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
