"""All modes on a device agree with one example at a time through plain autograd, and no example adds more than C."""

import pytest
import torch
from layers import ALL_MODES
from models import Net, batch_for, build, losses_function, net_losses
from oracle import assert_exact, length, trainable
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dp_transformers import PerExampleClipper
from dp_transformers.clipping import precision
from dp_transformers.clipping.norms import SPLIT_ROUNDING
from dp_transformers.clipping.precision import product_settings
from dp_transformers.clipping.terms import Outer

pytestmark = pytest.mark.gpu
FEW_MODES = ["book_keeping", "ghost"]


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(5, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x, lengths=None):
        if lengths is None:
            return self.head(self.layer(x)[0].mean(1))
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0].sum(1))


class Apart(nn.Module):
    """Modules without a rule: a scaled embedding, and a raw parameter beside a layer and attention."""

    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 3.0

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor, self.qkv = nn.Parameter(torch.randn(4)), nn.Linear(4, 12)

        def forward(self, x):
            q, k, v = (self.qkv(x) * self.factor.repeat(3)).unsqueeze(1).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)

    def __init__(self):
        super().__init__()
        self.embed, self.attends = self.Scaled(50, 4), self.Attends()

    def forward(self, ids):
        return self.attends(self.embed(ids))


def sequences():
    return {"x": torch.randn(4, 6, 5), "lengths": torch.tensor([3, 6, 5, 2])}


def images():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def of_outputs(model):
    def losses_of(batch):
        out = model(*batch.values())
        return torch.tanh(out).flatten(1) @ torch.arange(1.0, 1 + out[0].numel(), device=out.device)

    return losses_of


def net_batch():
    ids = torch.randint(0, 50, (5, 9))
    return {"input_ids": ids, "labels": torch.randint(0, 50, (5, 9))}


CASES = {
    "net": (Net, net_batch, net_losses, ALL_MODES),
    "apart": (Apart, lambda: {"ids": torch.randint(0, 50, (5, 9))}, of_outputs, ALL_MODES),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: {"x": torch.randn(4, 6, 5)}, of_outputs, FEW_MODES),
    "gru": (lambda: Recurrent(nn.GRU), sequences, of_outputs, FEW_MODES),
    "images": (images, lambda: {"x": torch.randn(4, 3, 6, 6)}, of_outputs, FEW_MODES),
    "bert-lora": (lambda: build("bert", lora=True), lambda: batch_for("bert", 8), losses_function, ALL_MODES),
    "llama-tied": (lambda: build("llama-tied"), lambda: batch_for("llama-tied", 8), losses_function, FEW_MODES),
}


def case_on(device, name):
    build_model, make_batch, losses, _ = CASES[name]
    model = build_model().to(device)
    return model, losses(model), {k: v.to(device) for k, v in make_batch().items()}


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, case in CASES.items() for mode in case[3]])
def test_norms_and_sums_are_exact(name, mode, device):
    model, losses_of, batch = case_on(device, name)
    with PerExampleClipper(model, 1.0, mode=mode, self_check=name in ("net", "apart")) as clipper:  # it runs there too
        assert_exact(model, clipper, losses_of, batch)
        assert any(owner.runs_by_example for owner in clipper.owners) is (name == "apart")
    assert all(p.grad.device.type == device.type for p in trainable(model) if p.grad is not None)


@pytest.fixture
def tf32(device):
    """Products of float32 may run as TF32, as for a program that asked for speed."""
    settings = product_settings(device)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "tf32"
    yield
    assert [setting.fp32_precision for setting in settings] == ["tf32"] * 2  # clipping leaves them as they are
    for setting, own in zip(settings, before, strict=True):
        setting.fp32_precision = own


def longest_contribution(model, losses_of, batch, mode, bound):
    """The length of the longest clipped gradient that one example adds to a sum, over the bound."""
    size, longest = len(next(iter(batch.values()))), 0.0
    with PerExampleClipper(model, bound, mode=mode, self_check=False) as clipper:
        for alone in torch.eye(size):
            model.zero_grad()
            clipper.backward(losses_of(batch), weights=alone)
            longest = max(longest, length([p.grad for p in trainable(model) if p.grad is not None]) / bound)
    return longest


@pytest.mark.parametrize("mode", ALL_MODES)
def test_norms_are_exact_whatever_is_allowed_to_products(mode, device, tf32):
    """TF32 keeps ten bits of a factor. The model computes so where the program asked for it, norms never do."""
    layer = nn.Linear(64, 48, bias=False).to(device)
    x, g = torch.randn(4, 32, 64, device=device), torch.randn(4, 32, 48, device=device)
    exact = [torch.linalg.matrix_norm(g[i].double().cpu().mT @ x[i].double().cpu()) for i in range(4)]
    with PerExampleClipper(layer, 1e-3, mode=mode, self_check=False) as clipper:
        norms = clipper.backward((layer(x) * g).sum((1, 2)))  # whose gradient is g, whatever the layer computes
    assert norms.double().cpu() == pytest.approx(torch.stack(exact), rel=1e-5)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", ["net", "images"])
def test_no_example_adds_more_than_the_bound_with_tf32(name, mode, device, tf32):
    assert longest_contribution(*case_on(device, name), mode, 1e-2) <= 1 + 1e-6


def test_factors_in_bf16_are_multiplied_into_float32(device, monkeypatch):
    if device.type == "simulated":  # which can do it, as CUDA can
        monkeypatch.setattr(precision, "_multiplies_bf16", lambda x: True)
    left, right = torch.randn(4, 32, 48).bfloat16(), torch.randn(4, 32, 64).bfloat16()
    coef = torch.rand(4)
    each = left.double().mT @ right.double()
    term = Outer(left.to(device), right.to(device))
    for norm in (term.norm(), term.norm(instantiate=True)):
        assert norm.squared().sqrt().double().cpu() == pytest.approx(each.flatten(1).norm(dim=1), rel=1e-5)
    total = term.weighted_sum(coef.to(device))
    expected = (each * coef[:, None, None]).sum(0)
    assert total.dtype == torch.float32 and (total.cpu() - expected).norm() <= SPLIT_ROUNDING * expected.norm()


@pytest.mark.parametrize("mode", ALL_MODES)
def test_no_example_adds_more_than_the_bound_in_bf16(mode, device):
    model, losses_of, batch = case_on(device, "net")
    assert longest_contribution(model.bfloat16(), losses_of, batch, mode, 1e-2) <= 1 + 1e-6
