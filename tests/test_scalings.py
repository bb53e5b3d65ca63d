"""Numbers of a batch that a loop changes all rows with, and numbers that do not follow the batch."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PrivacyEngine
from dp_transformers.data.loaded_rows import LoadedRows
from dp_transformers.data.scalings import Scalings
from dp_transformers.runtime.randomness import SecretSeeds


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
