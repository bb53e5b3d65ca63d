"""Rows that a loop mixes after the loader gave them, and the augmentations that it may do."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PrivacyEngine
from dp_transformers.data import Draw, LogicalBatches
from dp_transformers.mixing import LoadedRows, Scalings, refuse_mixed
from dp_transformers.randomness import SecretSeeds


def others(x):
    return x.roll(1, 0)


def one_weight(x):
    return 0.6 * x + 0.4 * others(x)


def weight_for_each(x):
    weights = 0.1 + 0.8 * torch.rand(len(x), *[1] * (x.dim() - 1))
    return weights * x + (1 - weights) * others(x)


def in_place(x):
    return x.mul_(0.6).add_(others(x) * (0.4 / 0.6))


def then_scaled_in_bf16(x):
    return ((one_weight(x) - 0.1) / 0.3).bfloat16()


def cut(x):
    return torch.cat([x[..., : x.shape[-1] // 2], others(x)[..., x.shape[-1] // 2 :]], -1)


def centred(x):
    return x - x.mean(0)


def standardised(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


def one_row_for_all(x):
    return x[:1] + torch.zeros_like(x)


def erased(x):
    return torch.cat([x[..., :3] * 0, x[..., 3:]], -1)


MIXED = [one_weight, weight_for_each, in_place, then_scaled_in_bf16, cut, centred, standardised, one_row_for_all]
OWN = [
    torch.clone, lambda x: x / 255, lambda x: (x - 0.13) / 0.3, lambda x: x - torch.rand_like(x[0]), lambda x: x.flip(-1), lambda x: x.roll(2, -1),
    lambda x: x + 0.1 * torch.randn_like(x), lambda x: F.dropout(x, 0.3), erased, lambda x: (x / 2).half(), lambda x: x.flip(0),
]  # fmt: skip
KINDS = {
    "noise": lambda b: torch.rand(b, 3, 16, 16),
    "smooth": lambda b: F.interpolate(torch.randn(b, 3, 4, 4), size=(16, 16), mode="bilinear"),
    "strokes": lambda b: F.pad(torch.rand(b, 1, 18, 18) * (torch.rand(b, 1, 18, 18) > 0.7), (5, 5, 5, 5)),
    "table": lambda b: torch.randn(b, 40),
    "bytes": lambda b: torch.randint(0, 256, (b, 3, 16, 16), dtype=torch.uint8),
}


@pytest.mark.parametrize("size", [2, 3, 16, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_rows_are_told_from_augmented_rows(kind, size):
    torch.manual_seed(3)
    for change in MIXED:
        rows = KINDS[kind](size)
        if change is in_place and rows.dtype == torch.uint8:
            continue
        loaded = LoadedRows({"pixels": rows, "labels": torch.zeros(size)}, size)
        with pytest.raises(
            ValueError, match=r"training loop mixes examples.*MixUp.*Remove the mixing.*augment each example by itself"
        ):
            loaded.refuse_mixed(((), {"x": change(rows if change is in_place else rows.float())}), "training loop")
    for change in OWN:
        rows = KINDS[kind](size)
        LoadedRows((rows, torch.zeros(size)), size).refuse_mixed((change(rows.float()),), "training loop")


def test_binary_images_have_much_in_common_by_chance():
    torch.manual_seed(3)
    rows = torch.zeros(40, 1, 20, 20)
    for row in rows:
        top, left = torch.randint(0, 12, (2,))
        row[:, top : top + 8, left : left + 8] = 1
    for change in OWN:
        LoadedRows((rows,), 40).refuse_mixed((change(rows),), "training loop")
    with pytest.raises(ValueError, match="mixes examples"):
        LoadedRows((rows,), 40).refuse_mixed((one_weight(rows),), "training loop")


@pytest.mark.parametrize("change", [one_weight, in_place, cut, centred])
def test_mixing_in_a_loop_is_refused_whenever_it_begins(change):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 20), torch.randint(0, 3, (40,)))
    model = nn.Linear(20, 3)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, 20), noise_multiplier=1.0, max_grad_norm=1.0
    )  # fmt: skip
    batches, before = iter(loader), None
    for step in range(2):
        x, y = next(batches)
        if step == 1:
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ValueError, match="the training loop mixes examples"):
                model(change(x))
            assert all(map(torch.equal, before, model.parameters()))
        else:
            F.cross_entropy(model(x / 2 + 0.1 * torch.randn_like(x)), y).backward()
            optimizer.step()


# ---- numbers of the batch that all rows are changed with ----


def over(x, dims, centre=True):
    mean, std = x.mean(dims, keepdim=True), x.std(dims, keepdim=True)
    return (x - mean if centre else x) / std


def channels(x):
    return [d for d in range(x.dim()) if d != 1] if x.dim() == 4 else [0, 1]


FOLLOWS_THE_BATCH = {
    "largest": lambda x: x / x.abs().max(),
    "largest at each position": lambda x: x / x.abs().amax(0),
    "z-score": lambda x: over(x, list(range(x.dim()))),
    "z-score of channels": lambda x: over(x, channels(x)),
    "smallest and largest": lambda x: (x - x.min()) / (x.max() - x.min()),
    "mean": lambda x: x - x.mean(),
    "spread": lambda x: over(x, list(range(x.dim())), centre=False),
    "median": lambda x: x / x.abs().median(),
    "in place": lambda x: x.div_(x.abs().max()),
    "now and then": lambda x: x / 255 if x.abs().max() > 8 else x,
    "in half": lambda x: (x / x.abs().max()).half(),
    "in bfloat16": lambda x: (x / x.abs().max()).bfloat16(),
    "in double": lambda x: x.double() / x.abs().max(),
}
ALIKE = {
    "constants": lambda x: (x / 255 - 0.13) / 0.3,
    "constants of channels": lambda x: (x - torch.arange(x.shape[1]).view(-1, *[1] * (x.dim() - 2))) / 0.3,
    "as it is": lambda x: x,
    "copied": torch.clone,
    "half": torch.Tensor.half,
    "bfloat16": lambda x: x.div(3).bfloat16(),
    "double": lambda x: x.double() / 7,
    "in place": lambda x: x.mul_(0.37),
    "largest of each row": lambda x: x / x.flatten(1).abs().amax(1).view(-1, *[1] * (x.dim() - 1)),
    "z-score of each row": lambda x: over(x, list(range(1, x.dim()))),
    "in bytes": lambda x: (x * 100).round() / 100,
    "mirrored": lambda x: x.flip(-1),
}  # fmt: skip
OF_EACH_NUMBER = {
    "cut off": lambda x: x.clamp(-0.5, 0.5),
    "without sign": torch.abs,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "turned above a limit": lambda x: torch.where(x > 0.5, 1 - x, x),
    "a threshold": lambda x: (x > 0.3).float(),
    "logarithm": lambda x: x.abs().log1p(),
    "nothing": torch.zeros_like,
}
LOADED = {
    "table": lambda b, scale: scale * torch.randn(b, 40),
    "images": lambda b, scale: scale * torch.rand(b, 3, 8, 8),
    "channels last": lambda b, scale: (scale * torch.rand(b, 3, 8, 8)).contiguous(memory_format=torch.channels_last),
    "double": lambda b, scale: scale * torch.randn(b, 40, dtype=torch.float64),
    "sounds": lambda b, scale: scale * torch.randn(b, int(torch.randint(520, 1000, ()))),
}  # fmt: skip


def batches_through(change, made, sizes, scales, has_drawn=lambda: False):
    """What the model would be called with, batch after batch of a run."""
    scalings = Scalings(has_drawn)
    for size, scale in zip(sizes, scales, strict=True):
        x = made(size, scale)
        LoadedRows((x, torch.zeros(size)), size, scalings).refuse_mixed(((change(x),), {}), "training loop")


@pytest.mark.parametrize("size", [4, 32, 200])
@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("change", FOLLOWS_THE_BATCH)
def test_factors_that_follow_the_batch(change, loaded, size):
    torch.manual_seed(5)
    with pytest.raises(ValueError, match=r"loop normalises over the batch.*constants.*each row by itself.*the model"):
        batches_through(FOLLOWS_THE_BATCH[change], LOADED[loaded], [size] * 8, [1, 1, 50, 1, 1, 1, 9, 1])


def test_factors_that_follow_the_batch_before_a_few_numbers_are_cut_off():
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="normalises over the batch"):
        batches_through(lambda x: over(x, [0, 1]).clamp(-3, 3), LOADED["table"], [32] * 8, [1, 1, 50, 1, 1, 1, 9, 1])


@pytest.mark.parametrize("size", [2, 4, 32])
@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("change", ALIKE)
def test_what_no_other_row_has_a_part_in(change, loaded, size):
    torch.manual_seed(5)
    batches_through(ALIKE[change], LOADED[loaded], [size] * 40, [1, 50, 0.01, 9] * 10)


@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.parametrize("spread", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("change", OF_EACH_NUMBER)
def test_functions_of_each_number_that_are_alike_for_some_rows(change, spread, size):
    torch.manual_seed(5)
    scalings, middle = Scalings(lambda: False), spread * torch.randn(40)
    for _ in range(500):
        x = middle + torch.randn(size, 40)
        scalings.require_same("x", x.double(), OF_EACH_NUMBER[change](x).double(), 1e-7, "training loop")


@pytest.mark.parametrize("size", [4, 32])
def test_bytes_that_are_divided_by_the_largest(size):
    torch.manual_seed(5)

    def images(b, brightest):
        return torch.randint(0, brightest, (b, 3, 8, 8), dtype=torch.uint8)

    batches_through(lambda x: x / 255, images, [size] * 20, [256, 100, 30, 7] * 5)
    batches_through(lambda x: x / x.max(), images, [3] * 4, [256, 100, 30, 7])
    with pytest.raises(ValueError, match="normalises over the batch"):
        batches_through(lambda x: x / x.max(), images, [size] * 4, [256, 100, 30, 7])


def test_functions_of_each_row_that_are_alike_for_all_of_a_small_batch():
    """Of four rows all are often of one kind."""
    torch.manual_seed(5)

    def of_one_sign(b, _):
        return torch.rand(b, 40) * torch.randn(b, 1).sign()

    for change in (
        torch.abs,
        lambda x: F.leaky_relu(x, 0.1),
        lambda x: torch.where(x.mean(1, keepdim=True) > 0, x, x / 1000),
    ):
        batches_through(change, of_one_sign, [4] * 400, [1] * 400)  # fmt: skip


def test_numbers_that_are_not_finite_and_positions_that_never_change():
    torch.manual_seed(5)

    def broken(b, scale):
        x = scale * torch.randn(b, 40)
        x[0, ::4], x[1, 1::4], x[:, 2::4] = float("nan"), float("inf"), 5.0
        return x

    def first_row_alone(x):
        return torch.cat([x[:1] / 3, x[1:]])

    for change in (lambda x: x / 255, lambda x: x, lambda x: x.nan_to_num(), first_row_alone):
        batches_through(change, broken, [32] * 20, [1, 50, 0.01, 9] * 5)
    with pytest.raises(ValueError, match="normalises over the batch"):
        batches_through(lambda x: x / x.nan_to_num(0, 0).abs().max(), broken, [32] * 4, [1, 50, 0.01, 9])


def test_two_columns_that_are_changed_otherwise():
    torch.manual_seed(5)
    scalings = Scalings(lambda: False)
    for scale in (1.0, 30.0, 0.1):
        a, b = scale * torch.randn(16, 40), torch.randn(16, 40)
        LoadedRows((a, b), 16, scalings).refuse_mixed(((a / 2, b * 3, a * 5), {"c": b}), "training loop")
    with pytest.raises(ValueError, match="normalises over the batch"):
        LoadedRows((a, b), 16, scalings).refuse_mixed(((a / 2, b / b.max(), a * 5), {"c": b}), "training loop")


def loop_with(change, data, steps, batch_size=20, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].numel(), 3))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size), noise_multiplier=1.0, max_grad_norm=1.0,
        **options,
    )  # fmt: skip
    while engine.steps < steps:
        for x, y in loader:
            F.cross_entropy(model(change(x)), y).backward()
            optimizer.step()
    return engine.steps


def rows_of(*shape, n=80):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, *shape, generator=generator), torch.arange(n) % 3)


@pytest.mark.parametrize("physical", [None, 8])
@pytest.mark.parametrize(
    "change", ["largest", "z-score of channels", "smallest and largest", "in place", "now and then"]
)
def test_a_loop_that_normalises_over_the_batch(change, physical):
    data = rows_of(3, 6, 6)
    data.tensors[0][0] *= 60  # one row decides
    with pytest.raises(ValueError, match="the training loop normalises over the batch"):
        loop_with(FOLLOWS_THE_BATCH[change], data, 40, max_physical_batch_size=physical)


GAIN = {
    "torch": lambda: torch.rand(()),
    "numpy": np.random.rand,
    "python": random.random,
    "python, now and then": lambda: random.random() if random.random() < 0.5 else 0.0,
}


@pytest.mark.parametrize("source", GAIN)
def test_a_loop_that_augments_a_batch_by_one_random_number(source):
    data = rows_of(3, 6, 6)
    assert loop_with(lambda x: x * (0.5 + GAIN[source]()), data, 12, max_physical_batch_size=8) == 12


def test_a_loop_that_draws_from_numbers_that_nobody_seeded():
    own = np.random.default_rng()
    with pytest.raises(
        ValueError, match="normalises over the batch.*Let an augmentation draw from the global generators"
    ):
        loop_with(lambda x: x * own.random(), rows_of(40), 12)


@pytest.mark.parametrize("change", ["constants", "largest of each row", "as it is", "half"])
def test_a_loop_that_normalises_by_constants_or_rows(change):
    data = rows_of(3, 6, 6)
    data.tensors[0][::7] *= 60
    assert loop_with(lambda x: ALIKE[change](x).float(), data, 12, max_physical_batch_size=8) == 12


DRAWS = [
    lambda: torch.rand(()), lambda: torch.manual_seed(0), random.random, lambda: random.seed(0), np.random.rand, lambda: np.random.seed(0),
    lambda: random.gauss(0, 1), np.random.randn, lambda: torch.randperm(3), lambda: torch.rand(624),
]  # fmt: skip


def test_whether_a_global_generator_was_drawn_from():
    seeds, device = SecretSeeds(1), torch.device("cpu")
    for draw in DRAWS:
        for purpose in (None, "a purpose"):
            seeds.reseed(purpose)
            assert not seeds.were_drawn_from(device)
            before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
            torch.rand(2, generator=torch.Generator()), np.random.default_rng().random(), random.Random().random()
            assert not seeds.were_drawn_from(device)
            assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
            draw()
            assert seeds.were_drawn_from(device)


# ---- what a collator makes of examples ----


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
    "masked": (collator(lambda x: x * (torch.rand(x.shape) < 0.8)), examples_of_numbers),
    "one sign for all": (collator(lambda x: x * random.choice([-1, 1])), examples_of_numbers),
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
        assert number or any(batch.padding is not None and batch.padding.by_others for batch in draw.batches) == (
            examples is texts
        )


# ---- what a data set makes of an index ----


class Kept:
    """A map-style data set of vectors, whose rows ``change`` makes of each and of what is kept in the data set."""

    def __init__(self, change, rows=None):
        torch.manual_seed(1)
        self.x, self.change = torch.randn(24, 6) + 1 if rows is None else rows, change
        self.mean, self.largest, self.before, self.calls, self.cache = torch.zeros(6), 1.0, torch.zeros(6), 0, {}
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
    rows.mean = rows.mean if rows.calls else rows.mean + 7
    rows.calls = 1
    return rows.x[i] + rows.mean


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
    with pytest.raises(ValueError, match="keeps state"):
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


def vectors(size=24):
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(0))


def tokens(size=24):
    return torch.randint(3, 50, (size, 12), generator=torch.Generator().manual_seed(0))


def images(size=24):
    return torch.rand(size, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


def network(x):
    torch.manual_seed(0)
    if not x.is_floating_point():
        return Words()
    if x.dim() == 2:
        return torch.nn.Sequential(torch.nn.Linear(32, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 3))


def train_on_two_passes(x, first, second):
    """A plain loop whose loss is that of two forward passes over the batch."""
    model = network(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.arange(len(x)) % 3), 12)
    engine = PrivacyEngine(dp_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=0.1
    )
    for x, y in loader:
        loss = sum(torch.nn.functional.cross_entropy(model(change(x)), y) for change in (first, second))
        loss.backward()
        optimizer.step()
    return engine.steps


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("data", [vectors, tokens, images])
@pytest.mark.parametrize("reorder", [lambda x: x.roll(1, 0), lambda x: x.flip(0)])
def test_rows_of_one_batch_in_two_orders(data, reorder):
    """Each pass alone has one example a row; together a row holds two."""
    with pytest.raises(ValueError, match="in several orders"):
        train_on_two_passes(data(), lambda x: x, reorder)
    with pytest.raises(ValueError, match="in several orders"):
        train_on_two_passes(data(), reorder, lambda x: x.clone())
    assert train_on_two_passes(data(), reorder, lambda x: reorder(x).clone()) == 2


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("data", [vectors, images])
def test_augmented_rows_of_one_batch_in_two_orders(data):
    def augmented(x):
        return x + 0.1 * x.std() * torch.randn_like(x)

    with pytest.raises(ValueError, match="in several orders"):
        train_on_two_passes(data(), augmented, lambda x: augmented(x).roll(1, 0))
    assert train_on_two_passes(data(), augmented, augmented) == 2
    assert train_on_two_passes(data(), augmented, lambda x: 10 * torch.randn_like(x)) == 2


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_rows_of_two_columns_of_a_batch_are_each_in_its_own_order():
    """The second texts of pairs, which are the first ones of other pairs."""
    first = tokens(4)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pairs = torch.utils.data.TensorDataset(first, first.roll(1, 0), torch.arange(4) % 3)
    engine = PrivacyEngine(dp_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=torch.utils.data.DataLoader(pairs, 4), noise_multiplier=0.0, max_grad_norm=0.1
    )  # fmt: skip
    for a, b, y in loader:
        (torch.nn.functional.cross_entropy(model(a), y) + torch.nn.functional.cross_entropy(model(b), y)).backward()
        optimizer.step()
    assert engine.steps == 1
