"""Columns, their types and numbers for a whole batch that are there because of what is in some of its rows: refused in
both loops."""

import pytest
import torch
import torch.nn.functional as F
from neighbours import LOOPS, Task, padded, points, texts, train
from torch import nn
from transformers import default_data_collator

from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.data.draws import Draw, LogicalBatches
from dp_transformers.data.rows import columns_of, filled_columns, refuse_other_columns

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")


class Pictures(nn.Module):
    """Vectors, and pictures for some of them, whose projection has a bias."""

    def __init__(self):
        super().__init__()
        self.first, self.picture, self.last = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        nn.init.normal_(self.picture.bias)

    def forward(self, x, pixel_values=None):
        hidden = self.first(x)
        if pixel_values is not None:
            hidden = hidden + self.picture(pixel_values)
        return self.last(hidden.tanh())


def losses_of(scores, labels):
    return F.cross_entropy(scores, labels, reduction="none")


def stacked(rows, *names):
    return {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels", *names)}


def with_pictures(has_picture, size=12):
    return [{**row, "pixel_values": torch.randn(4) if has_picture(i) else None} for i, row in enumerate(points(size))]


def if_some_has_one(rows):
    """As processors do."""
    batch = stacked(rows)
    if any(row["pixel_values"] is not None for row in rows):
        batch["pixel_values"] = torch.stack(
            [torch.zeros(4) if row["pixel_values"] is None else row["pixel_values"] for row in rows]
        )
    return batch


def if_some_path_is_given(rows):
    """Whether there is a picture is seen in no column of an example."""
    return if_some_has_one([{**row, "pixel_values": torch.ones(4) if row["x"][0] > 1 else None} for row in rows])


def always(rows):
    pictures = [torch.zeros(4) if row["pixel_values"] is None else row["pixel_values"] for row in rows]
    return {**stacked(rows), "pixel_values": torch.stack(pictures)}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("physical", [3, 16])
@pytest.mark.parametrize("collate", [if_some_has_one, if_some_path_is_given])
def test_a_column_that_is_there_for_some_row_is_refused(collate, physical, loop):
    task = Task(Pictures, with_pictures(lambda i: i == 5), collate, losses_of, physical=physical)
    with pytest.raises(ValueError, match="whether 'pixel_values' is in a batch depends on what examples are in it"):
        train(loop, task)


@pytest.mark.parametrize("loop", LOOPS)
def test_columns_that_every_batch_has_are_taken(loop):
    train(loop, Task(Pictures, with_pictures(lambda i: i == 5), always, losses_of, steps=2))
    train(loop, Task(Pictures, with_pictures(lambda i: True), if_some_has_one, losses_of, steps=2))
    train(loop, Task(Pictures, with_pictures(lambda i: False), if_some_has_one, losses_of, steps=2))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_of_one_row_has_columns_of_its_own(loop):
    train(loop, Task(Pictures, with_pictures(lambda i: i % 3 == 0, 6), if_some_has_one, losses_of, physical=1))


def test_the_first_row_decides_over_no_columns():
    """default_data_collator takes its columns, and the type of labels, from the first row."""
    rows = [{**row, "extra": None if i == 0 else 1.0} for i, row in enumerate(points(6))]
    for row in rows:
        row["labels"] = 0 if row["extra"] is None else 1.5
    with pytest.raises(ValueError, match="'(extra|labels)' is in a batch depends"):
        LogicalBatches(rows, default_data_collator, 6)[Draw(0, list(range(6)))]
    rows = [{**row, "extra": 1.0, "labels": 0 if i == 0 else 1.5} for i, row in enumerate(points(6))]
    with pytest.raises(ValueError, match="of what type 'labels' is in a batch depends"):
        LogicalBatches(rows, default_data_collator, 6)[Draw(0, list(range(6)))]


def test_names_and_types_of_columns():
    batch = {"x": torch.zeros(2, 3), "texts": ["a", "b"], "none": None, "empty": torch.zeros(2, 0), "n": 3,
             "of rows": [{"a": torch.zeros(1)}, {"b": torch.zeros(1).long()}], "nested": {"y": torch.zeros(2).long()}}  # fmt: skip
    names = {"x": "torch.float32", "texts": "", "empty": "", "n": "", "of rows": "", "nested/y": "torch.int64"}
    assert columns_of(batch, 2) == names
    assert columns_of([torch.zeros(3, 1), torch.zeros(3).long()], 3) == {"0": "torch.float32", "1": "torch.int64"}
    assert columns_of((torch.zeros(3, 1), [1, 2, 3]), 3) == {"0": "torch.float32", "1": ""}
    assert columns_of([{"x": torch.zeros(1)}] * 2, 2) is None
    assert filled_columns({"x": [], "y": None, "z": 0, "t": "", "u": torch.zeros(())}) == {"z", "u"}
    refuse_other_columns(names, {**names, "empty": "torch.int64"})
    refuse_other_columns(names, None)


# ---- the length of the longest row ----


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids, attention_mask=None):
        return self.last(self.words(input_ids).tanh())


def mean_over(divisor):
    """A loss for each row of its own words, divided by something of the batch."""

    def loss(model, inputs):
        losses_bt = F.cross_entropy(
            model(inputs["input_ids"]).transpose(1, 2), inputs["labels"], reduction="none", ignore_index=-100
        )
        return divisor(losses_bt, inputs)

    return loss


def with_column(make):
    def collate(rows):
        batch = padded(rows, "right")
        return {**batch, "given": make(batch["input_ids"], batch["attention_mask"])}

    return collate


GIVEN = {
    "a whole number": (lambda ids, mask: ids.shape[1], lambda x, b: x.sum(1) / b["given"]),
    "a tensor of one number": (lambda ids, mask: torch.tensor(ids.shape[1]), lambda x, b: x.sum(1) / b["given"]),
    "weights of positions": (lambda ids, mask: mask / ids.shape[1], lambda x, b: (x * b["given"]).sum(1)),
    "positions over their number": (
        lambda ids, mask: (torch.arange(ids.shape[1]) + 1) / ids.shape[1] * mask, lambda x, b: (x * b["given"]).sum(1),
    ),
    "one row for all": (lambda ids, mask: torch.arange(ids.shape[1]), lambda x, b: x.sum(1) / len(b["given"])),
    "one row of shares": (lambda ids, mask: torch.full((ids.shape[1],), 1 / ids.shape[1]), lambda x, b: (x * b["given"]).sum(1)),
}  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
def test_the_length_of_the_longest_row_scales_no_loss(given):
    make, divisor = GIVEN[given]
    rows = texts([24, *[8] * 6], classes=None)
    with pytest.raises((SelfCheckError, ValueError), match="longer one|its own numbers are not found again"):
        train("trainer", Task(Reader, rows, with_column(make), mean_over(divisor), physical=8))


@pytest.mark.parametrize("physical", [3, 8])
@pytest.mark.parametrize(
    "make", [lambda ids, mask: ids.shape[1], lambda ids, mask: torch.arange(ids.shape[1]), lambda ids, mask: mask * 2]
)
def test_a_length_that_scales_nothing_is_taken(make, physical):
    def own(losses_bt, inputs):
        return losses_bt.sum(1) / inputs["attention_mask"].sum(1)

    train("trainer", Task(Reader, texts([24, *[8] * 6], classes=None), with_column(make), mean_over(own),
                          physical=physical, steps=2))  # fmt: skip


# ---- what a collator gives for all rows ----


class Box:
    def __init__(self, content):
        self.content = content


def largest(rows):
    return float(max(row["x"].abs().max() for row in rows))


VALUES = {
    "an object": lambda rows: Box(largest(rows)),
    "an object in an object": lambda rows: Box(Box(torch.tensor(largest(rows)))),
    "a word": lambda rows: str(largest(rows)),
    "a complex number": lambda rows: complex(0, largest(rows)),
    "a sparse tensor": lambda rows: torch.tensor([largest(rows)]).to_sparse(),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("value", VALUES)
def test_whatever_it_is_in_it_is_the_same_for_all_batches(value, loop):
    def collate(rows):
        return {**stacked(rows), "given": VALUES[value](rows)}

    task = Task(Vectors, points(8), collate, losses_of)
    with pytest.raises(
        ValueError, match="which the collator gives for the whole batch and not for each row, is another"
    ):
        train(loop, task)


class Vectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x, given=None):
        return self.last(x)


@pytest.mark.parametrize("loop", LOOPS)
def test_constants_of_all_kinds_are_taken(loop):
    def collate(rows):
        return {**stacked(rows), "given": Box(["a", 3, torch.eye(2).to_sparse(), None])}

    train(loop, Task(Vectors, points(8), collate, losses_of, steps=2))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("first", [0, 3])
def test_a_scale_of_the_batch_is_refused_where_numbers_are_drawn(first, loop):
    """The largest row is the first one, which every edit left where it was."""
    rows = points(8)
    rows[first]["x"] *= 10

    def collate(rows):
        torch.rand(3)
        return {**stacked(rows), "given": torch.tensor(largest(rows))}

    with pytest.raises(ValueError, match="'given', which the collator gives for the whole batch"):
        train(loop, Task(Vectors, rows, collate, losses_of))


@pytest.mark.parametrize("first", [0, 3])
def test_rows_with_noise_times_a_scale_of_the_batch_are_refused(first):
    rows = points(8)
    rows[first]["x"] *= 10

    def collate(rows):
        return {**stacked(rows), "given": largest(rows) * torch.rand(len(rows))}

    with pytest.raises(ValueError, match="mixes examples: 'given'"):
        train("trainer", Task(Vectors, rows, collate, losses_of))
