"""Draws and their batches.

One *logical batch* is one draw; it is one item of the dataloader, so that everything in Trainer that counts batches
counts privacy-relevant steps. It carries its *physical batches*, of the size that fits the device, already collated.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from . import rows
from .mixing import LoadedRows, refuse_mixed
from .randomness import SecretSeeds, require_unseeded
from .rows import Padding
from .sampling import Draw, DrawSampler


@dataclass
class PhysicalBatch:
    """A collated part of a draw.

    Attributes:
        rows: What the collator returned.
        size: How many examples it holds.
        padding: How one of its rows was padded; None where none was.
        traits: See :func:`dp_transformers.rows.traits_of`.
        weight: 0 for a row that only keeps ranks in step, or stands for an empty draw.
    """

    rows: Any
    size: int
    padding: Padding | None = None
    traits: frozenset = frozenset()
    weight: float = 1.0

    def pin_memory(self) -> PhysicalBatch:
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, rows=pin_memory(self.rows))


@dataclass
class LogicalBatch:
    """What one rank contributes to one step: collated physical batches, possibly none. The rest is as in
    :class:`Draw`."""

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

    Examples are ordered by length before they are cut into physical batches, where they have a length (texts and
    sounds): less padding, and no influence on anybody's gradient. Before they are loaded the global random generators,
    and those that the data set and the collator keep, are seeded from ``seeds``, so that augmentation and random
    masking follow no seed that somebody set.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        physical_batch_size: int,
        seeds: SecretSeeds | None = None,
    ):
        self.dataset, self.collate, self.physical_batch_size = dataset, collate, physical_batch_size
        self._seeds = seeds or SecretSeeds(secrets.randbits(128))
        self._collated_alone: set[tuple[int, int]] = set()  # by lengths, to within a factor of two
        # the collator, or the data set, pads rows to the longest of those it is asked for together
        self._pads_draws = False
        self._filler: PhysicalBatch | None = None
        self._parts: list[Any] = []  # of the data set and the collator, as they are for the draw that is loaded

    def __len__(self) -> int:
        return len(self.dataset)

    # pyrefly: ignore[bad-override-param-name]  (given by position, by torch's loader)
    def __getitem__(self, draw: Draw) -> LogicalBatch:
        self._parts = list(rows.parts_of((self.collate, self.dataset)))
        rows.require_known_to_nobody(self._parts)
        self._reseed(f"rows of draw {draw.number}")
        loaded = self._load(draw.indices)
        examples = sorted(loaded, key=_length)
        collating = f"batches of draw {draw.number}"
        size = self.physical_batch_size
        parts = [examples[i : i + size] for i in range(0, len(examples), size)]
        if draw.number & (draw.number - 1) == 0 and len(examples) > 1:  # the first draws, and ever more rarely
            refuse_mixed(self.collate, examples[-16:], self._reseed)
            self._refuse_mixed_loading(draw)
            self._pads_draws |= self._is_padded_by_others(draw.indices, loaded)
        self._reseed(collating)  # a data set may have set seeds, each example's own
        return LogicalBatch(draw.number, [self._collated(part) for part in parts], draw.starts_pass, draw.step)

    def filler(self) -> PhysicalBatch:
        """A row of weight 0 that any rank can run where it has no examples left, or none was drawn."""
        if self._filler is None:
            self._filler = PhysicalBatch(self.collate(self._load([0])), 1, weight=0.0)
        return self._filler

    def has_one_longest(self) -> bool:
        """Whether just one row of the data set comes without padding, so that it gave the others their length."""
        full = 0
        for i in range(len(self.dataset)):
            row = self._load([i])[0]
            mask = row.get("attention_mask") if isinstance(row, Mapping) else None
            full += mask is not None and bool(np.all(np.asarray(mask)))
            if full > 1:
                return False
        return full == 1

    def _reseed(self, purpose: str) -> None:
        self._seeds.reseed(purpose)
        for generator in rows.generators(self._parts):
            self._seeds.reseed_generator(generator, purpose)

    def _load(self, indices: Sequence[int]) -> list[Any]:
        if not hasattr(self.dataset, "__getitems__"):
            return [self.dataset[i] for i in indices]
        examples = list(self.dataset.__getitems__(list(indices))) if len(indices) else []
        rows.require_one_each(indices, examples, self.dataset)
        return examples

    def _is_padded_by_others(self, indices: Sequence[int], examples: Sequence[Any]) -> bool:
        """Whether the row with most padding has less when it is loaded alone, as transforms of a data set may make
        it."""
        if not hasattr(self.dataset, "__getitems__") or not (
            isinstance(examples[0], Mapping) and "attention_mask" in examples[0]
        ):
            return False
        row = min(range(len(examples)), key=lambda i: int(np.sum(np.asarray(examples[i]["attention_mask"]))))
        return rows.size_of(self._load([indices[row]])[0]) < rows.size_of(examples[row])

    def _refuse_mixed_loading(self, draw: Draw) -> None:
        """The same of a data set that loads a draw's rows together."""
        if hasattr(self.dataset, "__getitems__"):
            indices = list(draw.indices)[-16:]
            refuse_mixed(self._load, indices, self._reseed, who="data set")

    def _collated(self, examples: list[Any]) -> PhysicalBatch:
        sizes = [rows.size_of(example) for example in examples]
        row = sizes.index(min(sizes))
        kind = (min(sizes).bit_length(), max(sizes).bit_length())
        is_ragged = min(sizes) < max(sizes)
        alone = (
            copy.deepcopy(examples[row]) if is_ragged and kind not in self._collated_alone else None
        )  # collators may change what they get
        name, loaded = rows.main_input(examples[0]), LoadedRows.of_examples(examples)
        batch = self.collate(examples)
        require_unseeded("the collator")
        loaded.refuse_mixed(batch, "collator")
        rows.refuse_packed(batch, examples)
        padding = None
        if alone is not None:
            padding = rows.padding_by_others(batch, len(examples), row, alone, self.collate)
            self._collated_alone.add(kind)
        if (
            name is not None
            and isinstance(batch, Mapping)
            and name in batch
            and padding is not None
            and "attention_mask" not in batch
        ):
            raise ValueError(
                f"examples of different lengths ('{name}') were padded without an attention_mask, so how much padding "
                "an example sees depends on the others. Use a collator that returns the attention_mask "
                "(DataCollatorWithPadding does if the tokenizer's output has it), or pad all to one length "
                "(padding='max_length')."
            )
        self._pads_draws |= padding is not None
        padding = padding or rows.padding_before(batch)
        if padding is not None and self._pads_draws:
            padding = replace(padding, by_others=True)
        return PhysicalBatch(batch, len(examples), padding, rows.traits_of(batch, len(examples)))


def _length(example: Any) -> int:
    """Positions; of several texts (multiple choice) those of the longest."""
    name = rows.main_input(example)
    if name is None:
        return 0
    x = example[name]
    if name == "input_ids" and getattr(x, "ndim", 1) > 1:
        return x.shape[-1]
    if name == "input_ids" and isinstance(x, Sequence) and len(x) and hasattr(x[0], "__len__"):
        return max(map(len, x))
    return len(x) if hasattr(x, "__len__") else 0


def _only_item(items: list[LogicalBatch]) -> LogicalBatch:
    return items[0]


def draws_dataloader(logical_batches: LogicalBatches, sampler: DrawSampler, **dataloader_options: Any) -> DataLoader:
    """A DataLoader whose items are :class:`LogicalBatch`; ``dataloader_options`` are workers, pinning and the like."""
    return DataLoader(logical_batches, batch_sampler=sampler, collate_fn=_only_item, **dataloader_options)
