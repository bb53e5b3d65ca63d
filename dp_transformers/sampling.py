"""Poisson sampling: every step takes every example independently with probability q, whatever was taken before.

One *logical batch* is one draw; it is one item of the dataloader, so that everything in Trainer that counts batches counts
privacy-relevant steps. It carries its *physical batches*, of the size that fits the device, already collated.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

_MAIN_INPUTS = ("input_ids", "input_values", "input_features", "inputs_embeds")  # as models of transformers call texts and sounds


@dataclass(frozen=True)
class Draw:
    """The examples one rank has to process in one step. ``number`` grows with every draw of a sampler and never repeats."""

    number: int
    indices: Sequence[int]


@dataclass
class LogicalBatch:
    """What one rank contributes to one step: collated physical batches, possibly none.

    Of each, how many examples it holds, and whether some were padded to the length of others.
    """

    number: int
    physical_batches: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    padded: list[bool] = field(default_factory=list)

    def pin_memory(self) -> LogicalBatch:
        from torch.utils.data._utils.pin_memory import pin_memory

        return LogicalBatch(self.number, [pin_memory(b) for b in self.physical_batches], self.sizes, self.padded)


class PoissonSampler:
    """A batch sampler: each iteration yields ``steps_per_epoch`` fresh draws, one-item batches of type :class:`Draw`.

    All ranks hold the same ``secret`` and draw the same global sample; each takes every ``world_size``-th index of it, so counts
    differ by at most one and no communication is needed. Draws of one sampler never repeat, over epochs too: a sample size from
    Binomial(N, q), then that many distinct indices, which is how independent coins fall.

    Args:
        num_examples: N.
        sample_rate: q in (0, 1].
        steps_per_epoch: How many draws count as an epoch (round(1/q) is usual).
        secret: Seed of the draws, from :func:`dp_transformers.distributed.shared_secret`; never written anywhere.
        rank, world_size: This process among those that share the secret.
    """

    def __init__(self, num_examples: int, sample_rate: float, steps_per_epoch: int, secret: int, rank: int = 0, world_size: int = 1):
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}.")
        self.num_examples, self.sample_rate, self.steps_per_epoch = num_examples, sample_rate, steps_per_epoch
        self.rank, self.world_size = rank, world_size
        self._generator = np.random.Generator(np.random.PCG64DXSM(secret))
        self._number = itertools.count()

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[list[Draw]]:
        for _ in range(self.steps_per_epoch):
            yield [self.draw()]

    def draw(self) -> Draw:
        size = int(self._generator.binomial(self.num_examples, self.sample_rate))
        chosen = self._generator.choice(self.num_examples, size, replace=False, shuffle=False)
        return Draw(next(self._number), chosen[self.rank :: self.world_size].tolist())


class LogicalBatches(Dataset):
    """A map-style dataset seen through draws: item ``draw`` is the :class:`LogicalBatch` of its examples.

    Examples are ordered by length before they are cut into physical batches, where they have a length (texts and sounds): less padding,
    and no influence on anybody's gradient.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], physical_batch_size: int):
        self.dataset, self.collate, self.physical_batch_size = dataset, collate, physical_batch_size
        self._pads_by_others = False  # seen to, and not to a length of its own

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, draw: Draw) -> LogicalBatch:
        if hasattr(self.dataset, "__getitems__"):
            examples = list(self.dataset.__getitems__(list(draw.indices))) if len(draw.indices) else []
        else:
            examples = [self.dataset[i] for i in draw.indices]
        examples.sort(key=_length)
        size = self.physical_batch_size
        parts = [examples[i : i + size] for i in range(0, len(examples), size)]
        batches = [self._collated(part) for part in parts]
        return LogicalBatch(draw.number, [b for b, _ in batches], [len(part) for part in parts], [is_padded for _, is_padded in batches])

    def _collated(self, examples: list[Any]) -> tuple[Any, bool]:
        is_ragged = _length(examples[0]) != _length(examples[-1])
        shortest = copy.copy(examples[0]) if is_ragged else None  # collators may change what they are given
        name = _main_input(examples[0])
        batch = self.collate(examples)
        if not (is_ragged and isinstance(batch, Mapping) and name in batch):
            return batch, False  # no texts or sounds, or nothing was padded
        self._pads_by_others = self._pads_by_others or self.collate([shortest])[name].shape[1:] != batch[name].shape[1:]
        if self._pads_by_others and "attention_mask" not in batch:
            raise ValueError(
                f"examples of different lengths ('{name}') were padded without an attention_mask, so how much padding an example sees depends on the "
                "others. Use a collator that returns the attention_mask (DataCollatorWithPadding does if the tokenizer's output has it), or pad "
                "all to one length (padding='max_length')."
            )
        return batch, self._pads_by_others and name == "input_ids"


def _main_input(example: Any) -> str | None:
    return next((name for name in _MAIN_INPUTS if name in example), None) if isinstance(example, Mapping) else None


def _length(example: Any) -> int:
    """Positions; of several texts (multiple choice) those of the longest."""
    name = _main_input(example)
    x = None if name is None else example[name]
    if name == "input_ids" and getattr(x, "ndim", 1) > 1:
        return x.shape[-1]
    if name == "input_ids" and isinstance(x, Sequence) and len(x) and hasattr(x[0], "__len__"):
        return max(map(len, x))
    return len(x) if hasattr(x, "__len__") else 0


def _only_item(items: list[LogicalBatch]) -> LogicalBatch:
    return items[0]


def poisson_dataloader(
    dataset: Any, collate: Callable[[list[Any]], Any], physical_batch_size: int, sampler: PoissonSampler, **dataloader_options: Any
) -> DataLoader:
    """A DataLoader whose items are :class:`LogicalBatch`; ``dataloader_options`` are workers, pinning and the like."""
    logical = LogicalBatches(dataset, collate, physical_batch_size)
    return DataLoader(logical, batch_sampler=sampler, collate_fn=_only_item, **dataloader_options)
