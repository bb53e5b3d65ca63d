"""Examples are loaded and collated one at a time, each under random numbers of its own."""

import random

import datasets
import numpy as np
import pytest
import torch

from dp_transformers.data.draws import LogicalBatches
from dp_transformers.data.examples import Examples
from dp_transformers.mechanism.sampling import Draw
from dp_transformers.runtime.randomness import SecretSeeds

DRAW = {"python": random.random, "numpy": np.random.random, "torch": lambda: float(torch.rand(()))}


class Rows:
    """Rows that draw numbers where ``draws(i)``."""

    def __init__(self, draw, draws=lambda i: True):
        self.draw, self.draws = draw, draws

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return {"x": torch.tensor([i, self.draw() if self.draws(i) else 0.0])}


def stacked(rows):
    return torch.stack([row["x"] for row in rows])


def collated(examples, indices, draw=3):
    return examples.collated(examples.of_draw(indices, draw), indices, draw)


def numbers(dataset, collate, indices, secret=1):
    return dict(zip(indices, collated(Examples(dataset, collate, SecretSeeds(secret)), indices), strict=True))


@pytest.mark.parametrize("where", ["data set", "collator"])
@pytest.mark.parametrize("draws", [lambda i: True, lambda i: i > 7], ids=["all", "some"])
@pytest.mark.parametrize("draw", DRAW)
def test_what_an_example_draws_depends_on_it_and_a_secret_alone(draw, draws, where):
    data = Rows(DRAW[draw], draws if where == "data set" else lambda i: False)

    def collate(rows):
        batch = stacked(rows)
        return batch + (DRAW[draw]() if where == "collator" and draws(int(batch[0, 0])) else 0)

    some, all_of_them, others = (
        numbers(data, collate, indices, secret)
        for indices, secret in (([9, 3, 12], 1), (range(20), 1), (range(20), 2))
    )
    assert all(torch.equal(row, all_of_them[i]) for i, row in some.items())
    drawn = [i for i in range(20) if draws(i)]
    assert len({float(all_of_them[i][0, 1]) for i in drawn}) == len(drawn), "no two share a number"
    assert not any(torch.equal(all_of_them[i], others[i]) for i in drawn)


def test_rows_are_loaded_once_where_nothing_is_drawn():
    read = []

    class Read(Rows):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)

    examples = Examples(Read(None, lambda i: False), stacked, SecretSeeds(1))
    examples.of_draw(range(5), 0)
    examples.of_draw(range(5, 9), 1)
    assert read == [*range(9)]


def test_a_collator_draws_from_the_secret_behind_a_data_set_that_sets_a_seed():
    class Seeded(Rows):
        def __getitem__(self, i):
            torch.manual_seed(0)
            np.random.seed(0)
            return super().__getitem__(i)

    data = Seeded(DRAW["torch"])
    made = numbers(data, lambda rows: stacked(rows) + np.random.random(), range(20))
    assert len({float(x[0, 1]) for x in made.values()}) == 20
    with pytest.raises(ValueError, match="torch's seed was set in the collator"):
        numbers(data, lambda rows: torch.manual_seed(0) and stacked(rows), range(20))


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: type("Wrapped", (), {"__init__": lambda s: setattr(s, "data_collator", c), "__call__": lambda s, rows: c(rows)})()])  # fmt: skip
def test_a_collator_with_a_seed(wrap):
    class Seeded:
        seed = None

        def __init__(self, seed):
            self.seed = seed

        def __call__(self, rows):
            return stacked(rows)

    with pytest.raises(ValueError, match=r"Seeded has seed=42.*seed=None"):
        Examples(Rows(None), wrap(Seeded(42)), SecretSeeds(1))
    Examples(Rows(None), wrap(Seeded(None)), SecretSeeds(1))


@pytest.mark.parametrize(("size", "said"), [(3, "up to 3 rows of one"), (9, "")])
def test_a_transform_that_cuts_rows_is_said(size, said, caplog):
    """Row 0 is too short to be cut: whether one is shows in any of the first."""
    texts = [list(range(2 + i)) for i in range(6)]
    cut = lambda table: {"x": [text[i : i + size] for text in table["x"] for i in range(0, len(text), size)]}  # noqa: E731
    data = datasets.Dataset.from_dict({"x": texts}).with_transform(cut)
    Examples(data, stacked, SecretSeeds(1))
    assert (said in caplog.text) and bool(said) == bool(caplog.text)


def test_a_collator_that_needs_two_examples():
    def pairs(rows):
        return torch.stack([rows[0]["x"], rows[1]["x"]])

    with pytest.raises(ValueError, match="IndexError for row 3 of the training data alone.*collated by itself"):
        collated(Examples(Rows(DRAW["torch"]), pairs, SecretSeeds(1)), [3])


def test_a_collator_may_take_columns_out_of_stored_rows():
    rows = [{"x": torch.ones(2), "y": i} for i in range(9)]

    def popping(examples):
        return {"y": torch.tensor([example.pop("y") for example in examples]), "x": stacked(examples)}

    batches = LogicalBatches(rows, popping, 4, SecretSeeds(1))
    for number in range(2):
        assert [len(batch.rows) for batch in batches[Draw(number, range(9))].batches] == [2, 2, 2]


TABLE = datasets.Dataset.from_list([{"x": [float(i)] * (1 + i % 3)} for i in range(12)])
TABLES = {
    "plain": TABLE,
    "shuffled": TABLE.shuffle(seed=1),
    "torch": TABLE.with_format("torch"),
    "transformed": TABLE.with_transform(lambda batch: {"x": [[2 * x for x in row] for row in batch["x"]]}),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_read_as_row_by_row(kind):
    table = TABLES[kind]
    rows = Examples(table, None, SecretSeeds(1)).of_draw([5, 2, 7], 0)
    assert [torch.as_tensor(row["x"]).tolist() for row in rows] == [
        torch.as_tensor(table[i]["x"]).tolist() for i in (5, 2, 7)
    ]
