"""A row is a row: what is refused when a draw is loaded and collated, and how padding is told."""

import functools
import random
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from dp_transformers.data.draws import Draw, LogicalBatches, rows
from dp_transformers.runtime.randomness import SecretSeeds


def batches(dataset, collate, size=8):
    return LogicalBatches(dataset, collate, size, SecretSeeds(1))


class Windows(list):
    """A data set that makes several rows of one example."""

    def __getitems__(self, indices):
        return [self[i] for i in indices for _ in range(3)]


class Filtered(list):
    """A data set that leaves examples out."""

    def __getitems__(self, indices):
        return [self[indices[0]]]


@pytest.mark.parametrize(("kind", "count"), [(Windows, 6), (Filtered, 1)])
def test_other_rows_than_one_for_each_index(kind, count):
    with pytest.raises(
        ValueError,
        match=rf"returned {count} rows instead of 2,.*one row.*windows.*leaves some out.*max_examples_per_person",
    ):
        batches(kind([{"x": torch.ones(2)} for _ in range(4)]), list)[Draw(3, [0, 1])]


PACKED = {
    "seq_lengths": {"input_ids": torch.ones(2, 6, dtype=torch.long), "seq_lengths": [[3, 3], [6]]},
    "positions": {
        "input_ids": torch.ones(2, 6, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]),
    },
    "flattened": {"input_ids": torch.ones(1, 12, dtype=torch.long)},
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("mapping", [dict, UserDict])
def test_packed_rows(kind, mapping):
    data = [{"input_ids": [1] * 6} for _ in range(4)]
    with pytest.raises(ValueError, match=r"Packing joins several examples.*uses? one that pads|Packing joins"):
        batches(data, lambda rows: mapping(PACKED[kind]))[Draw(3, [0, 1])]


def test_positions_that_begin_behind_padding_are_not_packed():
    positions = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    batch = {
        "input_ids": torch.ones(2, 6, dtype=torch.long),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]),
        "position_ids": positions,
    }
    assert len(batches([{"input_ids": [1] * 6} for _ in range(4)], lambda rows: batch)[Draw(3, [0, 1])].batches) == 1


def stack(rows):
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def mix_up(rows):
    x, y = stack(rows)
    share = np.random.beta(1, 1)
    return share * x + (1 - share) * x.roll(1, 0), y


def cut_mix_of_labels(rows):
    x, y = stack(rows)
    return x, (y + y.flip(0)) / 2


def normalised(rows):
    x, y = stack(rows)
    return x - x.mean(0), y


def augmented(rows):
    x, y = stack(rows)
    return x + torch.randn_like(x), y


IMAGES = [(torch.randn(3, 4), torch.rand(2)) for _ in range(12)]


@pytest.mark.parametrize("collate", [mix_up, cut_mix_of_labels, normalised])
def test_rows_mixed_of_several_examples(collate):
    with pytest.raises(ValueError, match=r"mixes examples.*MixUp.*augment each example by itself"):
        batches(IMAGES, collate)[Draw(4, [0, 1, 2, 3])]


def test_rows_that_are_augmented_by_themselves():
    first, second = (batches(IMAGES, augmented)[Draw(4, [0, 1, 2, 3])].batches[0].rows[0] for _ in range(2))
    assert torch.equal(first, second), "one secret and one draw, so the same numbers"
    assert not torch.equal(first, batches(IMAGES, augmented)[Draw(8, [0, 1, 2, 3])].batches[0].rows[0])


class Seeded:
    def __init__(self, seed):
        self.seed = seed

    def __call__(self, rows):
        return stack(rows)


def test_a_collator_with_a_seed():
    with pytest.raises(ValueError, match=r"uses Seeded with seed=42.*\(seed=None\)"):
        batches(IMAGES, Seeded(42))[Draw(0, [0, 1])]
    with pytest.raises(ValueError, match=r"uses stack with seed=7"):
        batches(IMAGES, functools.partial(stack, seed=7))[Draw(0, [0, 1])]
    assert batches(IMAGES, Seeded(None))[Draw(0, [0, 1])].batches


@dataclass
class Settings:
    length: int = 8
    seed: int = 42


def test_a_collator_that_reads_settings_with_a_seed():
    """Nobody calls them to collate: neither the settings nor their class draw anything."""
    settings = Settings()
    assert batches(IMAGES, lambda rows: stack(rows[: settings.length]))[Draw(0, [0, 1])].batches


class Summary:
    """As W&B's: it looks every attribute up in a dictionary."""

    def __getattr__(self, name):
        return {}[name]


def test_a_collator_near_an_object_without_attributes():
    summary = Summary()
    assert batches(IMAGES, lambda rows: stack(rows) if summary else None)[Draw(0, [0, 1])].batches


def test_one_row_of_all_examples():
    with pytest.raises(ValueError, match="made one row of 2 examples.*pads"):
        data = [{"input_ids": torch.ones(3)} for _ in range(4)]
        batches(data, lambda rows: {"input_ids": torch.ones(1, 6)})[Draw(3, [0, 1])]


class Noisy:
    """A data set with a generator of its own, of each kind, with a seed that everybody can read."""

    def __init__(self, kind):
        self.generator = {
            "numpy": np.random.default_rng, "legacy": np.random.RandomState, "python": random.Random, "torch": lambda s: torch.Generator().manual_seed(s),
        }[kind](0)  # fmt: skip
        self.kind = kind

    def __len__(self):
        return 8

    def __getitem__(self, i):
        draw = {"numpy": lambda g: g.random(), "legacy": lambda g: g.rand(), "python": lambda g: g.random(),
                "torch": lambda g: float(torch.rand((), generator=g))}[self.kind]  # fmt: skip
        return torch.full((2,), draw(self.generator)), torch.zeros(1)


@pytest.mark.parametrize("kind", ["numpy", "legacy", "python", "torch"])
def test_generators_of_a_data_set_follow_the_secret(kind):
    drawn = [
        LogicalBatches(Noisy(kind), stack, 8, SecretSeeds(secret))[Draw(5, [0, 1])].batches[0].rows[0]
        for secret in (1, 2, 1)
    ]
    assert not torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_that_no_mask_shows_is_told_by_a_row_alone(side):
    def collate(rows):
        ids = pad_sequence([x for x, _ in rows], batch_first=True, padding_side=side)
        return ids, torch.stack([y for _, y in rows])

    data = [(torch.arange(1, 3 + i % 4), torch.zeros(1)) for i in range(12)]
    (padding,) = batches(data, collate)[Draw(3, [0, 1, 3])].batches[0].paddings
    assert padding.by_others and padding.length == 5 and int(padding.own_t.sum()) == 2
    assert bool(padding.own_t[0]) == (side == "right")
    assert batches(data, collate)[Draw(3, [0, 4, 8])].batches[0].paddings == ()


def test_masks_and_counts_of_a_batch():
    def collate(rows):
        mask = torch.ones(len(rows), 4, dtype=torch.long)
        mask[0, -1] = rows[0]["n"] < 4
        return {
            "input_ids": mask,
            "attention_mask": mask,
            "n": torch.tensor([row["n"] for row in rows]),
            "labels": torch.tensor([0, 1][: len(rows)]),
        }

    data = [{"input_ids": [1] * 4, "n": n} for n in (4, 4, 3)]
    assert batches(data, collate)[Draw(3, [2, 1])].batches[0].traits >= {("n", "varies")}
    assert batches(data, collate)[Draw(3, [0, 1])].batches[0].traits == {("attention_mask", "right")}


class Holder:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    ("made_of", "of"),
    [
        (lambda x: x, lambda row: row),
        (Holder, lambda row: row.x),
        (lambda x: UserDict(x=[x]), lambda row: row["x"][0]),
    ],
)
def test_a_copy_of_a_row_has_its_numbers_alone(made_of, of):
    """Rows may be views of the tensor of a whole data set, which torch would copy with each of them."""
    row = torch.randn(1000, 8)[3].requires_grad_()
    copy = of(rows.copied(made_of(row)))
    assert torch.equal(copy, row) and copy.requires_grad and copy.data_ptr() != row.data_ptr()
    assert copy.untyped_storage().nbytes() == 8 * 4


@pytest.mark.parametrize("fill", [False, True])
def test_no_draw_copies_the_data_set(fill, monkeypatch):
    data = TensorDataset(torch.randn(1000, 8), torch.arange(1000))
    monkeypatch.setattr(torch.UntypedStorage, "__deepcopy__", lambda *args: pytest.fail("a whole storage was copied"))
    draws = LogicalBatches(data, torch.utils.data.default_collate, 8, SecretSeeds(1), fill=fill)
    for number in range(4):
        assert draws[Draw(number, [3, 500, 7])].batches[0].examples == 3
