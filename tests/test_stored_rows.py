"""Which stored row stands behind an index, and what is refused for it in both loops."""

import re
import time

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets, interleave_datasets
from models import build
from test_trainer import collate, trainer_for
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torch.utils.data import Dataset as TorchDataset

from dp_transformers import IndependentNoise, Mechanism, PoissonSampling, PrivacyEngine, PrivacyUnit
from dp_transformers.data.stored_rows import have_rows_in_common, most_frequent_row
from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.trainer.mixin import _evaluates_on


def rows(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(1, 1000, (6,), generator=generator).tolist(), "labels": i % 3} for i in range(n)
    ]


def table(n, seed=0):
    return Dataset.from_list(rows(n, seed))


class Computed(TorchDataset):
    """Nothing is known of where its rows are stored."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if not 0 <= i < self.n:
            raise IndexError(i)
        return {"input_ids": [1 + i] * 6, "labels": 0}


class Named(Subset):
    pass


class Halves(Subset):
    """Two rows of each row of the subset, which it makes itself."""

    def __len__(self):
        return 2 * len(self.indices)

    def __getitem__(self, i):
        return {**self.dataset[self.indices[i // 2]], "labels": i % 2}

    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Lazy(list):
    def __getitem__(self, i):
        raise AssertionError("no row is to be read")


def beside(*tables):
    return concatenate_datasets(list(tables), axis=1)


def of_arrow(**columns):
    return Dataset(pa.table(columns))


def chunks(*lengths):
    """Return a column of arrow, each chunk in memory of its own."""
    return pa.chunked_array([pa.array([f"{n} {i}" for i in range(length)]) for n, length in enumerate(lengths)])


BIG, SMALL, LIST = table(30), table(4, 1), rows(20)
INDEXED = Dataset.from_list([{"idx": i, **row} for i, row in enumerate(rows(30, 3))])
A, B, C = (of_arrow(**{name: pa.array([f"{name} {i}" for i in range(6)])}) for name in "abc")
NOTHING = np.full(6, np.nan)
REPEATED = {  # a data set, an index of the row that is there most often, and how often
    "interleaved": (
        lambda: interleave_datasets([BIG, SMALL], stopping_strategy="all_exhausted"),
        lambda i: i % 2 == 1 and (i // 2) % 4 == 0,
        8,
    ),
    "concatenated": (lambda: concatenate_datasets([BIG] + [SMALL] * 5), 30, 5),
    "of slices": (lambda: concatenate_datasets([BIG, BIG.select(range(3, 9)), SMALL]), 3, 2),
    "of a shuffle": (lambda: concatenate_datasets([SMALL, BIG.shuffle(seed=1), SMALL.select([2])]), 2, 2),
    "renamed": (
        lambda: concatenate_datasets([SMALL.rename_column("labels", "y"), SMALL.rename_column("labels", "y")]),
        0,
        2,
    ),
    "formatted": (lambda: concatenate_datasets([BIG, BIG.with_format("torch")]).with_transform(lambda b: b), 0, 2),
    "selected": (lambda: BIG.select([5, 6, 7, 5, 8, 5]), 0, 3),
    "in another order": (
        lambda: ConcatDataset(
            [BIG, *(SMALL.select_columns(c) for c in (["input_ids", "labels"], ["labels", "input_ids"]))]
        ),
        30,
        2,
    ),
    "Subset": (lambda: Subset(LIST, [*range(20), 7, 7]), 7, 3),
    "Subset of strings": (lambda: Subset(["a"] * 9, [*range(9), 8]), 8, 2),
    "Subset by an array": (lambda: Subset(BIG, np.array([3, 4, 3])), 0, 2),
    "Subset by a tensor": (lambda: Named(Named(BIG, torch.tensor([3, 4, 5, 3])), torch.tensor([0, 1, 3])), 0, 2),
    "negative indices": (lambda: Subset(LIST, [0, 19, -1, -20, -20]), 0, 3),
    "Subset of what is computed": (lambda: Subset(Computed(8), [2, 3, 4, -5]), 1, 2),
    "ConcatDataset": (lambda: ConcatDataset([LIST] + [SMALL] * 5), 20, 5),
    "of several kinds": (
        lambda: ConcatDataset([BIG.shuffle(seed=2), Subset(BIG, [4, 5]), BIG.select([5])]),
        lambda i: i < 30,
        3,
    ),
    "ConcatDataset of strings": (lambda: ConcatDataset([["a", "b"]] * 3), 0, 3),
    "list": (lambda: LIST + LIST[5:7] * 4, 5, 5),
    "tuple of tensors": (lambda: (torch.ones(2), x := torch.ones(2), torch.ones(2), x), 1, 2),
    "list of both": (lambda: ["a", x := ("a", []), "a", x, 1, 1], 1, 2),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_the_row_that_is_there_most_often(kind):
    make, expected, copies = REPEATED[kind]
    index, found = most_frequent_row(make())
    assert found == copies
    assert expected(index) if callable(expected) else index == expected


EVERY_ROW_ONCE = {
    "equal rows": lambda: [dict(row) for _ in range(3) for row in LIST],
    "equal tables": lambda: concatenate_datasets([table(9), table(9)]),
    "shuffled": lambda: BIG.shuffle(seed=0),
    "mapped": lambda: concatenate_datasets([BIG, BIG.map(lambda row: row)]),
    "filtered": lambda: BIG.filter(lambda row: row["labels"] > 0).rename_column("labels", "y"),
    "transformed": lambda: BIG.with_transform(lambda batch: batch),
    "disjoint slices": lambda: concatenate_datasets([BIG.select(range(9, 30)), BIG.select(range(9))]),
    "filled with None": lambda: concatenate_datasets([BIG, SMALL.remove_columns("input_ids"), table(4, 2).remove_columns("input_ids")]),
    "columns without memory": lambda: Dataset.from_dict({"x": [None] * 5}),
    "equal rows with fewer columns": lambda: ConcatDataset([INDEXED, table(30, 3)]),
    "disjoint slices with other columns": lambda: concatenate_datasets(
        [INDEXED.select(range(9)), INDEXED.remove_columns("idx").select(range(9, 30))]
    ),
    "columns of their own beside": lambda: beside(A, B, C),
    "NaN in two tables": lambda: concatenate_datasets([A.add_column("w", NOTHING), B.add_column("w", NOTHING)]),
    "one chunk of 1 again and again": lambda: of_arrow(x=chunks(*[3] * 4), w=pa.chunked_array([pa.array([1] * 3)] * 4)),
    "words of a dictionary": lambda: of_arrow(x=chunks(3, 3), y=pa.chunked_array([pa.array(["a", "b", "a"])] * 2).dictionary_encode()),
    "words of no letters": lambda: of_arrow(x=pa.chunked_array([pa.array([""] * 3), pa.array([""] * 3)]), y=chunks(3, 3)),
    "bytes of no length alone": lambda: of_arrow(x=pa.chunked_array([pa.array([b""] * 3, pa.binary(0))] * 2)),
    "strings": lambda: ["a"] * 9,
    "numbers": lambda: [1, 1, 2.5, 2.5, True, True, None, None, np.bool_(1), np.bool_(1)],
    "strings in Subsets": lambda: ConcatDataset([Subset(["a"] * 9, range(4)), Subset(["a"] * 9, range(4))]),
    "computed": lambda: Computed(9),
    "with rows of its own": lambda: Halves(BIG, range(4)),
    "keys": lambda: Subset({"a": 1, "b": 2}, ["a", "b", "a"]),
    "ragged keys": lambda: Subset({(1,): 1, (1, 2): 2}, [(1,), (1, 2)]),
    "indices that are not there": lambda: Subset(LIST, [0, 99]),
    "read when asked": lambda: Lazy([[], []]),
    "split": lambda: ConcatDataset(list(BIG.train_test_split(0.3, seed=0).values())),
}  # fmt: skip


@pytest.mark.parametrize("kind", EVERY_ROW_ONCE)
def test_every_row_is_there_once(kind):
    data = EVERY_ROW_ONCE[kind]()
    assert most_frequent_row(data)[1] == 1
    assert have_rows_in_common(data, data)


def test_without_rows_or_length():
    for data in (None, [], Dataset.from_list([]), BIG.select([]), BIG.to_iterable_dataset(), torch.tensor(1)):
        assert most_frequent_row(data) == (0, 0) and not have_rows_in_common(data, BIG)


IN_COMMON = {
    "select": lambda h, _: (h, h.select(range(20, 29))),
    "shuffle": lambda h, _: (h, h.shuffle(seed=0)),
    "overlap": lambda h, _: (h.select(range(20)), h.select(range(19, 30))),
    "overlap of shuffled": lambda h, _: (h.shuffle(seed=0).select(range(20)), h.shuffle(seed=3).select(range(20))),
    "one of several": lambda h, _: (h.select(range(20)), {"a": SMALL, "b": h.select(range(19, 30))}),
    "DatasetDict": lambda h, _: (h, DatasetDict({"a": SMALL, "b": h.select([3])})),
    "joined": lambda h, _: (concatenate_datasets([SMALL, h.select(range(20))]), h.select([19, 25])),
    "renamed": lambda _h, _: (INDEXED, INDEXED.rename_column("idx", "i").rename_column("labels", "label")),
    "Subset of a view": lambda h, _: (Subset(h, range(12)), h.select([9, 20])),
    "slice of a list": lambda _, rows: (rows, rows[:5]),
    "copy of a list": lambda _, rows: (rows, list(reversed(rows))),
    "ConcatDataset": lambda _, rows: (rows, ConcatDataset([SMALL, Subset(rows, range(5))])),
}  # fmt: skip
APART = {
    "split": lambda h, _: tuple(h.train_test_split(0.3, seed=0).values()),
    "selects": lambda h, _: (h.select(range(20)), h.select(range(20, 30))),
    "shuffled": lambda h, _: ((s := h.shuffle(seed=1)).select(range(20)), s.select(range(20, 30))),
    "equal": lambda h, _: (h, table(30)),
    "equal with a column less": lambda _h, _: (INDEXED, table(30, 3)),
    "weights of 1 in both": lambda h, _: (h.add_column("w", w := np.ones(30)), table(30).add_column("w", w)),
    "slices of a list": lambda _, rows: (rows[:15], rows[15:]),
    "copies of rows": lambda _, rows: (rows, [dict(row) for row in rows]),
    "without length": lambda h, _: (h, h.to_iterable_dataset()),
}


@pytest.mark.parametrize("kind", [*IN_COMMON, *APART])
def test_rows_of_any_view_are_known_again(kind):
    """Where training rows are among those of evaluation, these choose nothing."""
    assert _evaluates_on(*(IN_COMMON | APART)[kind](BIG, LIST)) == (kind in IN_COMMON)


def test_a_million_rows_take_a_second_or_two():
    n = 1_000_000
    data = concatenate_datasets([Dataset.from_dict({"x": np.arange(n // 2), "y": ["a"] * (n // 2)})] * 2)
    begun = time.process_time()
    assert most_frequent_row(data.shuffle(seed=0).with_transform(lambda batch: 1 / 0))[1] == 2
    assert time.process_time() - begun < 10, "it took 0.5 s on one core"


def in_trainer(folder, data, **unit):
    trainer_for(folder, data=data, noise_multiplier=1.0, **unit)


def in_plain_loop(folder, data, *, how="make_private", max_examples_per_person=1):
    model = nn.Linear(3, 2)
    given = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    given["data_loader"] = DataLoader(data, batch_size=6, collate_fn=collate)
    if how == "mechanism":
        given["mechanism"] = Mechanism(
            sampling=PoissonSampling(len(data), 6), clipping=FlatClipping(1.0), noise=IndependentNoise(1.0),
            unit=PrivacyUnit(max_examples_per_person),
        )  # fmt: skip
        return PrivacyEngine().make_private(**given)
    given |= {"max_grad_norm": 1.0, "max_examples_per_person": max_examples_per_person}
    if how == "make_private":
        return PrivacyEngine().make_private(noise_multiplier=1.0, **given)
    return PrivacyEngine().make_private_with_epsilon(target_epsilon=9.0, target_delta=1e-4, epochs=1, **given)


LOOPS = {
    "trainer": in_trainer,
    "make_private": in_plain_loop,
    "make_private_with_epsilon": lambda *a, **k: in_plain_loop(*a, how="with_epsilon", **k),
    "mechanism": lambda *a, **k: in_plain_loop(*a, how="mechanism", **k),
}


@pytest.mark.table
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "kind", ["interleaved", "concatenated", "Subset", "ConcatDataset", "list", "of several kinds"]
)
def test_a_stored_row_comes_no_more_often_than_is_said(kind, loop, tmp_path):
    make, _, copies = REPEATED[kind]
    data = make()
    for said in {1, copies - 1}:
        message = rf"row \d+ of the training data is stored once and comes {copies} times.*max_examples_per_person={said}.*weight.*max_examples_per_person={copies}"
        with pytest.raises(ValueError, match=message) as error:
            LOOPS[loop](tmp_path, data, max_examples_per_person=said)
        assert not re.search(r"[\[{]", str(error.value)), "no row is quoted"
    LOOPS[loop](tmp_path, data, max_examples_per_person=copies)


@pytest.mark.parametrize("loop", ["make_private", "make_private_with_epsilon"])
@pytest.mark.parametrize("number", [0, 1.5])
def test_a_number_of_rows_that_is_none(loop, number, tmp_path):
    with pytest.raises(ValueError, match=r"max_examples_per_person must be an int of at least 1"):
        LOOPS[loop](tmp_path, BIG, max_examples_per_person=number)


def test_rows_that_are_set_after_the_trainer_was_made(tmp_path):
    trainer = trainer_for(tmp_path, model=build("bert"), data=BIG, noise_multiplier=1.0)
    trainer.train_dataset = BIG.select([0, *range(29)])
    with pytest.raises(ValueError, match="row 0 of the training data is stored once and comes 2 times"):
        trainer.train()
