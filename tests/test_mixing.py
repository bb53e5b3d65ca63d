"""Rows that a loop mixes after the loader gave them, and the augmentations that it may do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PrivacyEngine
from dp_transformers.mixing import LoadedRows


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


def erased(x):
    return torch.cat([x[..., :3] * 0, x[..., 3:]], -1)


MIXED = [one_weight, weight_for_each, in_place, then_scaled_in_bf16, cut, centred, standardised]
OWN = [
    torch.clone, lambda x: x / 255, lambda x: (x - 0.13) / 0.3, lambda x: x - torch.rand_like(x[0]), lambda x: x.flip(-1), lambda x: x.roll(2, -1),
    lambda x: x + 0.1 * torch.randn_like(x), lambda x: F.dropout(x, 0.3), erased, lambda x: (x / 2).half(),
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
        with pytest.raises(ValueError, match=r"loop mixes examples.*MixUp.*Remove the mixing.*augment each example by itself"):
            loaded.refuse_mixed(((), {"x": change(rows if change is in_place else rows.float())}))
    for change in OWN:
        rows = KINDS[kind](size)
        LoadedRows((rows, torch.zeros(size)), size).refuse_mixed((change(rows.float()),))


def test_binary_images_have_much_in_common_by_chance():
    torch.manual_seed(3)
    rows = torch.zeros(40, 1, 20, 20)
    for row in rows:
        top, left = torch.randint(0, 12, (2,))
        row[:, top : top + 8, left : left + 8] = 1
    for change in OWN:
        LoadedRows((rows,), 40).refuse_mixed((change(rows),))
    with pytest.raises(ValueError, match="mixes examples"):
        LoadedRows((rows,), 40).refuse_mixed((one_weight(rows),))


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
            with pytest.raises(ValueError, match="the loop mixes examples"):
                model(change(x))
            assert all(map(torch.equal, before, model.parameters()))
        else:
            F.cross_entropy(model(x / 2 + 0.1 * torch.randn_like(x)), y).backward()
            optimizer.step()
