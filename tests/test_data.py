"""Poisson draws: the right distribution, never repeated, split over ranks; logical and physical batches."""

import datasets
import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader

from dp_transformers.data.draws import LogicalBatches, draws_dataloader
from dp_transformers.mechanism.sampling import Draw, DrawSampler, PoissonSampling


def poisson(n, q, steps, **options):
    return DrawSampler(PoissonSampling(n, q * n), steps, **options)


def draws(sampler, epochs=1):
    return [batch[0] for _ in range(epochs) for batch in sampler]


def test_every_index_is_an_independent_coin():
    n, q, steps = 60, 0.15, 4000
    taken = np.zeros((steps, n), dtype=int)
    for t, draw in enumerate(draws(poisson(n, q, steps, secret=1))):
        assert len(set(draw.indices)) == len(draw.indices)
        taken[t, list(draw.indices)] = 1
    p = 1e-4  # of a false alarm, per line
    assert stats.chi2.sf(((taken.sum(0) - steps * q) ** 2 / (steps * q * (1 - q))).sum(), n) > p
    sizes = taken.sum(1)
    assert abs(sizes.mean() - n * q) < 4 * np.sqrt(n * q * (1 - q) / steps)
    assert (
        stats.chi2.sf((steps - 1) * sizes.var(ddof=1) / (n * q * (1 - q)), steps - 1) > p
    )  # as many surprises as coins have
    assert stats.chi2.cdf((steps - 1) * sizes.var(ddof=1) / (n * q * (1 - q)), steps - 1) > p
    correlation = np.corrcoef(taken.T)[np.triu_indices(n, 1)] * np.sqrt(steps)
    assert stats.kstest(correlation, "norm").pvalue > p
    serial = np.corrcoef(taken[:-1].ravel() - q, taken[1:].ravel() - q)[0, 1]
    assert abs(serial) < 4 / np.sqrt(taken.size)


def test_draws_never_repeat_over_epochs_and_secrets():
    sampler = poisson(500, 0.1, 5, secret=1)
    first = draws(sampler, epochs=3)
    assert [d.number for d in first] == list(range(15))
    assert len({tuple(d.indices) for d in first}) == 15
    other = draws(poisson(500, 0.1, 5, secret=2))
    assert not {tuple(d.indices) for d in other} & {tuple(d.indices) for d in first}
    assert [d.indices for d in draws(poisson(500, 0.1, 5, secret=1), epochs=3)] == [d.indices for d in first]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_one_draw(world):
    whole = draws(poisson(100, 0.2, 30, secret=7))
    parts = [draws(poisson(100, 0.2, 30, secret=7, rank=r, world_size=world)) for r in range(world)]
    for t, draw in enumerate(whole):
        shares = [part[t].indices for part in parts]
        assert sorted(i for share in shares for i in share) == sorted(draw.indices)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_everybody_every_time_at_q_one_and_empty_draws_at_small_q():
    assert all(len(d.indices) == 9 for d in draws(poisson(9, 1.0, 5, secret=0)))
    assert any(not d.indices for d in draws(poisson(10, 0.01, 50, secret=0)))
    with pytest.raises(ValueError, match="sample_rate"):
        poisson(9, 1.1, 5, secret=0)


class Rows:
    """A map-style dataset without __getitems__."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"input_ids": [i] * (1 + i % 7), "i": i}


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_carries_whole_draws(workers):
    sampler = poisson(40, 0.3, 6, secret=3)
    expected = [sorted(d.indices) for d in draws(poisson(40, 0.3, 6, secret=3), epochs=2)]
    loader = draws_dataloader(LogicalBatches(Rows(), list, 5), sampler, num_workers=workers)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 6
    got = [batch for _ in range(2) for batch in loader]
    for batch, indices in zip(got, expected, strict=True):
        rows = [row["i"] for physical in batch.batches for row in physical.rows]
        assert sorted(rows) == indices
        assert all(physical.size == 5 for physical in batch.batches[:-1])
        lengths = [len(row["input_ids"]) for physical in batch.batches for row in physical.rows]
        assert lengths == sorted(lengths)
    assert [b.number for b in got] == list(range(12))


def test_empty_draw_is_an_empty_logical_batch():
    batch = LogicalBatches(Rows(), list, 5)[Draw(4, [])]
    assert batch.number == 4
    assert batch.batches == []
    assert batch.pin_memory().batches == []


@pytest.mark.parametrize("fixed", [False, True])
def test_batches_say_whether_examples_are_padded_to_the_length_of_others(fixed):
    def collate(rows):
        longest = 9 if fixed else max(len(row["input_ids"]) for row in rows)
        ids = np.array([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        for row in rows:
            row["input_ids"] = None  # some collators change what they are given
        return {"input_ids": ids, "attention_mask": ids > 0}

    batches = LogicalBatches(Rows(), collate, 2)

    def by_others(draw):
        return [bool(batch.sizes) and not batch.came_padded for batch in batches[draw].batches]

    assert by_others(Draw(0, [0, 7, 14, 3])) == [False, not fixed]  # lengths 1, 1 and 1, 4
    assert by_others(Draw(1, [1])) == [False]


def test_examples_are_ordered_by_their_lengths_in_time():
    batches = LogicalBatches([{"input_features": np.ones((9 - i, 2))} for i in range(9)], list, 2)
    made = batches[Draw(0, range(9))].batches
    assert [[len(row["input_features"]) for row in batch.rows] for batch in made] == [
        [1, 2],
        [3, 4],
        [5, 6],
        [7, 8],
        [9],
    ]


def test_preferences_are_ordered_by_the_lengths_of_their_texts_together():
    preferences = [
        {"prompt_ids": [1] * prompt, "chosen_ids": [1] * chosen, "rejected_ids": [1], "ref_chosen_logps": -9.0}
        for prompt, chosen in [(5, 5), (1, 2), (4, 3), (1, 8)]
    ]
    made = LogicalBatches(preferences, list, 2)[Draw(0, range(4))].batches
    assert [[len(row["prompt_ids"]) + len(row["chosen_ids"]) for row in batch.rows] for batch in made] == [
        [3, 7],
        [9, 10],
    ]


def test_choices_of_different_lengths_in_a_table():
    """A column of lists of lists, of which no array can be made."""
    rows = [
        {"input_ids": [[1] * (2 + i % 3), [1] * 4], "attention_mask": [[1] * (2 + i % 3), [1] * 4]} for i in range(8)
    ]

    def collate(examples):
        choices = [torch.tensor(x) for e in examples for x in e["input_ids"]]
        ids = torch.nn.utils.rnn.pad_sequence(choices, batch_first=True).unflatten(0, (len(examples), -1))
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    batches = LogicalBatches(datasets.Dataset.from_list(rows), collate, 4)
    assert sum(batch.size for batch in batches[Draw(0, range(8), True)].batches) == 8
