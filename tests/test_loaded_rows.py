"""Rows that a loop mixes after the loader gave them, or gives in several orders, and the augmentations that it may do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PrivacyEngine
from dp_transformers.data.loaded_rows import LoadedRows


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
