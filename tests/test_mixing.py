"""Rows that a collator or a data set makes of several examples, and what both may do."""

import itertools
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dp_transformers import PrivacyEngine
from dp_transformers.data.draws import Draw, LogicalBatches
from dp_transformers.data.mixing import refuse_mixed


def one_weight(x):
    return 0.6 * x + 0.4 * x.roll(1, 0)


def examples_of_numbers(n=24, width=6):
    torch.manual_seed(1)
    return [{"x": torch.randn(width), "labels": i % 3} for i in range(n)]


def texts(n=24):
    torch.manual_seed(1)
    return [{"x": torch.randint(1, 50, (4 + 2 * (i % 7),)), "labels": i % 3} for i in range(n)]


def images(n=24):
    torch.manual_seed(1)
    return [{"x": torch.rand(1, 4 + i % 3, 4 + i % 5), "labels": i % 3} for i in range(n)]


def stacked(rows, labels):
    return {"x": torch.stack(list(rows)), "labels": torch.tensor(labels)}


def columns(examples):
    return [e["x"] for e in examples], [e["labels"] for e in examples]


def collator(change):
    def collate(examples):
        rows, labels = columns(examples)
        return stacked(change(torch.stack(rows)), labels)

    return collate


def with_numbers(draw):
    """Noise that ``draw`` makes, as a batch has rows."""
    return collator(lambda x: x + draw(x.shape))


def with_column(make):
    """A column beside the rows, made of all of them."""
    return lambda examples: stacked(*columns(examples)) | {"extra": make(torch.stack(columns(examples)[0]))}


def padded_to(rows, place):
    longest = max(map(len, rows))
    return [F.pad(row, place(longest - len(row))) for row in rows]


def cut_to_the_shortest(examples):
    rows, labels = columns(examples)
    return stacked([row[: min(map(len, rows))] for row in rows], labels)


def stretched_to_the_longest(examples):
    rows, labels = columns(examples)
    longest = max(map(len, rows))
    return stacked([F.interpolate(row.float()[None, None], longest)[0, 0] for row in rows], labels)


def padded_images(examples):
    rows, labels = columns(examples)
    height, width = (max(row.shape[d] for row in rows) for d in (1, 2))
    return stacked([F.pad(row, (0, width - row.shape[2], 0, height - row.shape[1])) for row in rows], labels)


def neighbours_tokens(examples):
    rows, labels = columns(examples)
    rows = padded_to(rows, lambda n: (0, n))
    return stacked([rows[0], *(torch.cat([a[:1], b[1:]]) for a, b in itertools.pairwise(rows))], labels)


def dropped(x):
    return x * (torch.rand(x.shape) < 0.9)


def first_emptied(x):
    return torch.cat([0 * x[:5], x[5:]])


def antithetic(x):
    t = torch.rand(len(x) // 2 + 1)
    return torch.cat([t, 1 - t])[: len(x)]


def turned(x):
    angles = torch.rand(len(x)) * 6.28
    turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], 1).view(-1, 2, 2)
    return torch.cat([torch.bmm(turns, x[:, :2, None])[..., 0], x[:, 2:]], 1)


def hard_examples_twice(examples):
    hard = sorted(examples, key=lambda e: -e["x"].norm())[: (len(examples) + 1) // 2]
    return collator(torch.clone)((hard + hard)[: len(examples)])


def counted():
    calls = iter(range(10**6))
    return collator(lambda x: x + next(calls))


class Batch:
    def __init__(self, x, labels):
        self.x, self.labels = x, labels


def own_class(examples):
    rows, labels = columns(examples)
    return Batch(one_weight(torch.stack(rows)), torch.tensor(labels))


def all_different(examples):
    rows, labels = columns(examples)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows), "duplicate example"
    return stacked(rows, labels)


REFUSED = {
    "asserts that examples differ": (all_different, examples_of_numbers,
                                     r"(?s)raised AssertionError \(duplicate example.*left out or given twice.*one row of every"),
    "an object of its own class": (own_class, examples_of_numbers, "mixes examples: 'x' of a row"),
    "the row before": (collator(lambda x: x + torch.cat([x[:1] * 0, x[:-1]])), examples_of_numbers, "mixes examples"),
    "the first row in all": (collator(lambda x: torch.cat([x, x[:1].expand_as(x)], 1)), examples_of_numbers, "mixes examples"),
    "cumulative sum": (collator(lambda x: x.cumsum(0)), examples_of_numbers, "mixes examples"),
    "rows in another order than labels": (collator(lambda x: x.flip(0)), examples_of_numbers, "mixes examples"),
    "tokens of the row before": (neighbours_tokens, texts, "mixes examples"),
    "cut to the shortest": (cut_to_the_shortest, texts, r"mixes examples|other examples decide"),
    "stretched to the longest": (stretched_to_the_longest, texts, "other examples decide how it is cut, resized or padded"),
    "images padded in two "
    "dimensions": (padded_images, images, "other examples decide how it is cut, resized or padded"),
    "hard examples twice": (hard_examples_twice, examples_of_numbers, "mixes examples|depends on how many examples"),
    "numpy seed": (with_numbers(lambda shape: (np.random.seed(42), torch.from_numpy(np.random.rand(*shape)))[1]), examples_of_numbers,
                   "depends on how many examples come before"),
    "seed of random": (with_numbers(lambda shape: (random.seed(42), torch.tensor([[random.random()] for _ in range(shape[0])]))[1]),
                       examples_of_numbers, "depends on how many examples come before"),
    "generator made in the "
    "call": (with_numbers(lambda shape: torch.from_numpy(np.random.default_rng(0).random(shape))), examples_of_numbers,
                                   "depends on how many examples come before"),
    "torch generator made in the "
    "call": (with_numbers(lambda shape: torch.rand(shape, generator=torch.Generator().manual_seed(3))),
                                         examples_of_numbers, "depends on how many examples come before"),
    "entropy of its own": (with_numbers(lambda shape: torch.from_numpy(np.random.default_rng().random(shape))), examples_of_numbers,
                           "gives another batch when it is called again"),
    "state": (counted(), examples_of_numbers, "gives another batch when it is called again"),
    "one sign for all": (collator(lambda x: x * random.choice([-1, 1])), examples_of_numbers, "all rows of a batch share"),
    "one size for all": (collator(lambda x: x[:, : random.randint(2, 5)]), examples_of_numbers, "all rows of a batch share"),
    "every second row, beside "
    "noise": (collator(lambda x: dropped(x) * (1 - 2 * (torch.arange(len(x)) % 2))[:, None]), examples_of_numbers, "its place in the batch"),
    "odd and even, beside noise": (collator(lambda x: dropped(x) * (-1) ** len(x)), examples_of_numbers, "its place in the batch"),
    "a ramp, beside noise": (collator(lambda x: dropped(x) + torch.linspace(-1, 1, len(x))[:, None]), examples_of_numbers, "its place in the batch"),
    "a table, beside noise": (collator(lambda x: dropped(x) + torch.arange(64.0).sin()[: len(x), None]), examples_of_numbers, "its place in the batch"),
    "the first rows emptied": (collator(first_emptied), examples_of_numbers, "its place in the batch"),
    "antithetic times": (with_column(antithetic), examples_of_numbers, "its place in the batch"),
    "a mean": (with_column(lambda x: float(x.mean())), examples_of_numbers, "'extra', which the collator gives for the whole batch"),
    "a mean in a tensor": (with_column(torch.mean), examples_of_numbers, "'extra', which the collator gives for the whole batch"),
    "deviations": (with_column(lambda x: x.std(0)), examples_of_numbers, "'extra', which the collator gives for the whole batch"),
    "a count": (with_column(lambda x: int((x > 0).sum())), examples_of_numbers, "'extra', which the collator gives for the whole batch"),
    "a scale beside noise": (lambda e: with_column(lambda x: x.abs().max())(e) | {"noise": torch.rand(len(e))}, examples_of_numbers,
                             "'extra', which the collator gives for the whole batch"),
    "a list over its mean": (with_column(lambda x: (x.norm(dim=1) / x.norm(dim=1).mean()).tolist()), examples_of_numbers, "'extra' of a row changes"),
    "words of others": (with_column(lambda x: [f"{v:.3f}" for v in x.norm(dim=1).roll(1)]), examples_of_numbers, "'x' of a row changes|'extra' of a row changes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_collators_whose_rows_depend_on_others(case):
    collate, examples, match = REFUSED[case]
    with pytest.raises(ValueError, match=match):
        LogicalBatches(examples(), collate, 8)[Draw(0, range(24), True)]


@pytest.mark.parametrize("lengths", [[6] * 24, [4, 6, 5, 7] * 6])
@pytest.mark.parametrize("drawn", [False, True])
def test_two_examples_in_a_row_and_empty_rows_behind(drawn, lengths):
    """There are as many rows as examples, and each depends on two of them."""

    def collate(examples):
        ids, size = [ids for ids, _ in examples], len(examples)
        rows = torch.zeros(size, 16, dtype=torch.long)
        for k in range(0, size, 2):
            both = torch.cat(ids[k : k + 2])
            rows[k // 2, : len(both)] = both
        labels = rows.masked_fill(rows == 0, -100)
        if drawn:
            rows = torch.where((torch.rand(rows.shape) < 0.15) & (rows > 0), 2, rows)
        return {"input_ids": rows, "labels": labels}

    examples = [(torch.randint(3, 50, (n,)), 0) for n in lengths]
    with pytest.raises(ValueError, match="one row of several examples|mixes examples"):
        refuse_mixed(collate, examples, lambda purpose: torch.manual_seed(len(purpose)))


@pytest.mark.parametrize("seed", range(20))
def test_augmented_rows_may_be_alike_by_chance(seed):
    """A part of an image that is nearly all background."""

    def cropped(examples):
        rows = []
        for image, _ in examples:
            top, left = torch.randint(0, 12, (2,)).tolist()
            rows.append(image[top : top + 4, left : left + 4])
        return {"x": torch.stack(rows), "labels": torch.tensor([label for _, label in examples])}

    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(24, 16, 16)
    for image in images:
        image[tuple(torch.randint(0, 16, (2,), generator=generator).tolist())] = 1.0
    examples = [(image, 0) for image in images]
    refuse_mixed(cropped, examples, lambda purpose: torch.manual_seed(seed + len(purpose)))


def test_a_collator_that_always_fails_is_not_blamed_for_what_it_was_called_with():
    def missing_column(examples):
        return {"x": torch.stack([e["features"] for e in examples])}

    message = r"the collator raised KeyError \('features'\).*for every batch, correct it or the data. If not: private"
    with pytest.raises(ValueError, match=message) as refused:
        LogicalBatches(examples_of_numbers(), missing_column, 8)[Draw(0, range(24), True)]
    assert isinstance(refused.value.__cause__, KeyError)


def pad_and_shuffle(examples):
    rows, labels = columns(random.sample(examples, len(examples)))
    return stacked(padded_to(rows, lambda n: (0, n)), labels)


def sort_by_length(examples):
    rows, labels = columns(sorted(examples, key=lambda e: -len(e["x"])))
    return {**stacked(padded_to(rows, lambda n: (0, n)), labels), "lengths": torch.tensor([len(row) for row in rows])}


def noise_then_padding(examples):
    rows, labels = columns(examples)
    return stacked(padded_to([row + torch.rand(len(row)) for row in rows], lambda n: (n, 0)), labels)


TAKEN = {
    "stacked": (collator(torch.clone), examples_of_numbers),
    "noise": (with_numbers(torch.rand), examples_of_numbers),
    "noise of numpy": (with_numbers(lambda shape: torch.from_numpy(np.random.rand(*shape))), examples_of_numbers),
    "products, which round by place, "
    "beside noise": (collator(lambda x: torch.rand(len(x), 1) + x @ torch.arange(64.0).sin()[:, None]), partial(examples_of_numbers, width=64)),
    "turned": (collator(turned), examples_of_numbers),
    "noise, time first": (collator(lambda x: x + torch.randn(x.shape[::-1]).T), examples_of_numbers),
    "masked with Bernoulli's": (collator(lambda x: x.masked_fill(torch.bernoulli(torch.full(x.shape, 0.15)).bool(), 0)), examples_of_numbers),
    "masked": (collator(lambda x: x * (torch.rand(x.shape) < 0.8)), examples_of_numbers),
    "a sign for each": (collator(lambda x: x * torch.tensor([[random.choice([-1.0, 1.0])] for _ in x])), examples_of_numbers),
    "longest": (lambda e: stacked(padded_to(columns(e)[0], lambda n: (0, n)), columns(e)[1]) | {"longest": max(map(len, columns(e)[0]))}, texts),
    "a constant": (lambda e: stacked(*columns(e)) | {"temperature": 0.7, "weights": torch.ones(3), "names": ["a"] * len(e)}, examples_of_numbers),
    "lists": (lambda e: {"x": [x.tolist() for x in columns(e)[0]], "labels": columns(e)[1]}, examples_of_numbers),
    "a list of tensors": (lambda e: (columns(e)[0], torch.tensor(columns(e)[1])), examples_of_numbers),
    "padded, shuffled": (pad_and_shuffle, texts),
    "sorted": (sort_by_length, texts),
    "padded in the middle": (lambda e: stacked(padded_to(columns(e)[0], lambda n: (n // 2, n - n // 2)), columns(e)[1]), texts),
    "noise, then padding": (noise_then_padding, texts),
    "not for one alone": (lambda e: {k: x.squeeze() for k, x in stacked(padded_to(columns(e)[0], lambda n: (0, n)), columns(e)[1]).items()}, texts),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_collators_whose_rows_are_their_own(case):
    collate, examples = TAKEN[case]
    for number in range(3):
        draw = LogicalBatches(examples(), collate, 8)[Draw(number, range(24), True)]
        assert sum(draw.sizes) == 24
        assert number or any(any(padding.by_others for padding in batch.paddings) for batch in draw.batches) == (
            examples is texts
        )


# ---- what a data set makes of an index ----


class Kept:
    """A map-style data set of vectors, whose rows ``change`` makes of each and of what is kept in the data set."""

    def __init__(self, change, rows=None):
        torch.manual_seed(1)
        self.x, self.change = torch.randn(24, 6) + 1 if rows is None else rows, change
        self.mean, self.largest, self.before, self.calls, self.cache = torch.zeros(6), 1.0, torch.zeros(6), 0, {}
        self.table = None
        self.rng, self.py = np.random.default_rng(0), random.Random(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.change(self, i), "labels": i % 3}


def running_mean(rows, i):
    rows.mean = 0.999 * rows.mean + 0.001 * rows.x[i]
    return rows.x[i] - rows.mean


def largest_so_far(rows, i):
    rows.largest = max(rows.largest, rows.x[i].max().item())
    return rows.x[i] / rows.largest


def with_the_row_before(rows, i):
    before, rows.before = rows.before, rows.x[i]
    return rows.x[i] + 0.5 * before


def every_second(rows, i):
    rows.calls += 1
    return rows.x[i] * (rows.calls % 2)


def in_place(rows, i):
    return rows.x[i].mul_(0.5)


def of_the_system(rows, i):
    return rows.x[i] + random.SystemRandom().random()


STATE = [running_mean, largest_so_far, with_the_row_before, every_second, in_place, of_the_system]


def cached(rows, i):
    return rows.cache.setdefault(i, rows.x[i] * 2)


def opened_late(rows, i):
    rows.table = torch.full((6,), 7.0) if rows.table is None else rows.table
    return rows.x[i] + rows.table


NO_STATE = {
    "rows": lambda rows, i: rows.x[i],
    "cached": cached,
    "opened late": opened_late,
    "torch": lambda rows, i: rows.x[i] + torch.randn(6) * torch.rand(()),
    "numpy": lambda rows, i: torch.from_numpy(np.random.permutation(rows.x[i].numpy())),
    "python": lambda rows, i: rows.x[i] * random.choice([-1, 1]) + random.gauss(0, 1),
    "a generator of numpy": lambda rows, i: rows.x[i] + rows.rng.random(),
    "a generator of python": lambda rows, i: rows.x[i] + rows.py.random(),
    "not numbers": lambda rows, i: rows.x[i] * float("nan"),
    "arrays": lambda rows, i: rows.x[i].numpy(),
    "lists": lambda rows, i: rows.x[i].tolist(),
}
HELD_BY = {
    "itself": lambda rows: rows,
    "a subset": lambda rows: torch.utils.data.Subset(rows, range(24)),
    "two": lambda rows: torch.utils.data.ConcatDataset([rows, rows]),
}


def collated(examples):
    return {"x": torch.stack([torch.as_tensor(e["x"]) for e in examples]), "labels": torch.tensor([e["labels"] for e in examples])}  # fmt: skip


@pytest.mark.parametrize("held_by", HELD_BY)
@pytest.mark.parametrize("number", [0, 4])
@pytest.mark.parametrize("change", STATE)
def test_data_sets_that_keep_state(change, number, held_by):
    message = r"the data set \(\w+\) gives another row.*'x'.*keeps state.*depend on that index alone"
    message = message if held_by == "itself" else message + "|data set mixes examples|data set gives another batch"
    with pytest.raises(ValueError, match=message):
        LogicalBatches(HELD_BY[held_by](Kept(change)), collated, 8)[Draw(number, range(24), True)]
    LogicalBatches(HELD_BY[held_by](Kept(change)), collated, 8)[Draw(3, range(24), True)]  # in 0, 1, 2, 4, ... alone


@pytest.mark.parametrize("held_by", HELD_BY)
@pytest.mark.parametrize("change", NO_STATE)
def test_data_sets_that_keep_none(change, held_by):
    batches = LogicalBatches(HELD_BY[held_by](Kept(NO_STATE[change])), collated, 8)
    for number in range(5):
        for indices in (range(24), range(5), [3, 1], [7], []):
            assert sum(batches[Draw(number, indices, True)].sizes) == len(indices)


@pytest.mark.parametrize("column", ["word", 7, 0.5, float("nan"), b"bytes", None, True, object(), [1, "two"], np.array(["a"]), np.float64(3), torch.eye(3).to_sparse()])  # fmt: skip
def test_rows_of_things_that_are_not_tensors(column):
    def with_column(rows, i):
        return {"x": rows.x[i], "more": column}

    def collate(examples):
        return collated([{"x": e["x"]["x"], "labels": e["labels"]} for e in examples])

    assert LogicalBatches(Kept(with_column), collate, 8)[Draw(0, range(24), True)].sizes == [8, 8, 8]


def counted_words(rows, i):
    rows.calls += 1
    return {"x": rows.x[i], "more": rows.kind(rows.calls)}


@pytest.mark.parametrize("kind", [str, int, float, lambda n: str(n).encode(), lambda n: [1, n], lambda n: np.full(2, n), lambda n: {n: 1},
                                  lambda n: Image.fromarray(np.full((2, 2), n, np.uint8))])  # fmt: skip
def test_state_in_things_that_are_not_tensors(kind):
    rows = Kept(counted_words)
    rows.kind = kind
    with pytest.raises(ValueError, match="gives another row when it is asked for it again.*'x/more"):
        LogicalBatches(rows, list, 8)[Draw(0, range(24), True)]


def test_how_often_rows_are_loaded_again():
    loaded = Counter()

    def noted(rows, i):
        loaded[i] += 1
        return rows.x[i]

    batches = LogicalBatches(Kept(noted, torch.randn(200, 6)), collated, 50)
    for number in (3, 5, 6, 7):
        batches[Draw(number, range(200), True)]
    assert set(loaded.values()) == {4}
    batches[Draw(8, range(200), True)]
    assert loaded.total() == 5 * 200 + 16 + 8


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", [running_mean, largest_so_far])
def test_state_of_a_data_set_in_a_loop(change, workers):
    model = nn.Linear(6, 3)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(Kept(change), 8, num_workers=workers),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="keeps state|keeps what it met first"):
        for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), 8):
            F.cross_entropy(model(batch["x"]), batch["labels"]).backward()
            optimizer.step()


def test_mixing_that_begins_late_is_seen_in_numbers():
    data = [{"x": torch.rand(40), "labels": 0} for _ in range(24)]
    calls = []

    def mixes_from_the_third_draw_on(examples):
        x = torch.stack([e["x"] for e in examples])
        return stacked(one_weight(x) if 5 in calls else x, [0] * len(x))

    batches = LogicalBatches(data, mixes_from_the_third_draw_on, 8)
    batches[Draw(4, range(24), True)]
    calls.append(5)
    with pytest.raises(ValueError, match="the collator mixes examples"):
        batches[Draw(5, range(24))]


def test_a_collator_may_change_the_rows_that_it_is_called_with():
    """Those that it is called with twice, too."""

    def takes_out(examples):
        return stacked(torch.stack([e.pop("x") for e in examples]), [e.pop("labels") for e in examples])

    data = [{"x": torch.rand(4), "labels": i} for i in range(2)]
    assert LogicalBatches(data, takes_out, 8)[Draw(0, range(2))].sizes == [2]


@pytest.mark.parametrize("case", ["one sign for all", "one size for all"])
def test_a_batch_that_is_the_whole_draw_may_share_random_numbers(case):
    collate, examples, _ = REFUSED[case]
    for number in range(3):
        assert LogicalBatches(examples(), collate, 24)[Draw(number, range(24), True)].sizes == [24]
