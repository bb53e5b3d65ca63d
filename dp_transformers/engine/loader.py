"""The private loader that make_private returns, and what is refused in the place of the loop's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from ..data.draws import LogicalBatches
from ..mechanism.sampling import DrawSampler
from ..step.step import PrivateStep


class PrivateLoader:
    """Yields the batches of the draws, collated as by your DataLoader. Under Poisson sampling their size is random.

    A draw of more than ``max_physical_batch_size`` examples comes in several batches. An empty draw comes as a single
    row of weight zero, so that every draw is stepped. With ``fill_physical_batches`` all batches have one size, and
    their last rows may have weight zero.

    Args:
        draws: The loader of the draws (:func:`.draws_dataloader`).
        step: The private step, which hands out their physical batches.
        given: The DataLoader of ``make_private``.
        max_physical_batch_size: The size of the largest physical batch; None for no limit.
        is_one_pass: Whether iteration ends when the budget is spent.

    Attributes:
        given: The DataLoader of ``make_private``.
        sample_rate: q, the probability of each example to be in a draw.
        expected_batch_size: The average number of examples in a draw, q · N.
        steps_per_epoch: The number of draws in one pass, ``round(1 / q)``.
    """

    def __init__(
        self,
        draws: DataLoader,
        step: PrivateStep,
        given: DataLoader,
        max_physical_batch_size: int | None,
        is_one_pass: bool = False,
    ):
        self._is_one_pass = is_one_pass
        self._draws, self._step, self._sampler = draws, step, cast(DrawSampler, draws.batch_sampler)
        sampling = self._sampler.sampling
        self.given, self.dataset, self.collate_fn = given, given.dataset, given.collate_fn
        self.max_physical_batch_size = max_physical_batch_size
        self.batch_size = self.expected_batch_size = sampling.expected_batch_size
        self.sample_rate, self.steps_per_epoch = sampling.sample_rate, self._sampler.steps_per_epoch

    def start_at(self, step: int) -> None:
        """Make the next draw that of this step of the plan, counted from 0."""
        self._sampler.start_at(step)

    @property
    def batch_sampler(self) -> Any:
        raise AttributeError(
            "the private loader has no batch_sampler for a BatchMemoryManager to split: leave that out, and give "
            "make_private max_physical_batch_size=, which splits large draws."
        )

    def __len__(self) -> int:
        batches_per_draw = cast(LogicalBatches, self._draws.dataset).batches_per_draw
        if self.max_physical_batch_size is not None and not batches_per_draw:
            raise TypeError(
                "the number of physical batches of a pass is random with max_physical_batch_size; "
                "loader.steps_per_epoch is the number of optimizer steps."
            )
        return self.steps_per_epoch * max(1, batches_per_draw)

    def __iter__(self) -> Iterator[Any]:
        for draw in self._draws:
            if self._is_one_pass and self._step.run.steps_left < 1:
                return  # a run that was resumed has fewer steps left
            for given in self._step.physical_batches(draw):
                yield given.batch.rows


def check_loader(loader: Any) -> None:
    """Raise ValueError for a loader whose batches Poisson sampling cannot draw."""
    if not isinstance(loader, DataLoader):
        raise ValueError(f"data_loader must be a torch DataLoader, not {type(loader).__name__}.")
    if loader.batch_size is None:
        raise ValueError(
            "data_loader has no batch_size (batch_sampler= or batch_size=None): give it one, the expected size of a "
            "draw. With accelerate call make_private before accelerator.prepare."
        )
    sampler = loader.sampler
    if not isinstance(sampler, (RandomSampler, SequentialSampler, torch.utils.data.DistributedSampler)):
        raise ValueError(
            f"data_loader has a {type(sampler).__name__}: private training draws every example with the same "
            "probability. Build the DataLoader without sampler=; for a part of a data set give it "
            "torch.utils.data.Subset(dataset, indices)."
        )
