"""A gradient that reaches a parameter past the taps is refused at any backward, not only where the first call takes that way."""

import pytest
import torch
import torch.nn.functional as F
from oracle import clipped_sum, distance, length, per_example_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.modes import MODES


class Scaled(nn.Module):
    """Owns a parameter and a layer, and shows what it computed on the way."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.rand(4) + 0.5), nn.Linear(4, 4)

    def forward(self, x, bypass=False):
        self.on_the_way = x * self.scale
        inner = F.linear(self.on_the_way, self.inner.weight) if bypass else self.inner(self.on_the_way)
        return inner + self.scale


class Ways(nn.Module):
    """A forward with several ways; ``way`` is no input, so that the self-check sees the first only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.head = nn.Linear(3, 4), Scaled(), nn.Linear(4, 2)
        self.way = "plain"

    def forward(self, x):
        h = checkpoint(self.first, x, use_reentrant=False) if self.way == "checkpointed" else self.first(x)
        y = self.head(self.block(h, bypass=self.way == "bypassed inside"))
        if self.way == "functional":
            y = y + F.linear(h, self.head.weight)
        if self.way == "kept activation":
            y = y + self.block.on_the_way[..., :2]
        if self.way == "as an input":
            y = y + self.head(h + self.block.inner.weight.mean(0))
        if self.way == "twice":
            y = y + self.head(h.sin()).cos() + self.block(self.block(h)).sum(-1, keepdim=True)
        return y


PAST = {
    "functional": "head.weight",
    "kept activation": "block.scale",
    "bypassed inside": "block.inner.weight",
    "as an input": "block.inner.weight",
}


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 3, generator=generator), torch.randint(2, (5,), generator=generator)


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", PAST)
def test_a_way_taken_later_that_no_tap_sees_is_refused(mode, way):
    model, (x, y) = Ways(), data()
    with PerExampleClipper(model, max_grad_norm=0.7, mode=mode) as clipper:
        clipper.backward(losses(model, x, y))
        before = [p.grad.clone() for p in model.parameters()]
        model.way = way
        with pytest.raises(ValueError, match=rf"'{PAST[way]}' got a gradient past its module"):
            clipper.backward(losses(model, x, y))
        assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["checkpointed", "twice"])
def test_a_way_taken_later_through_the_modules_is_exact(mode, way):
    model, (x, y) = Ways(), data()
    model.way = way
    gradients = per_example_gradients(model, lambda batch: losses(model, **batch), {"x": x, "y": y})
    norms, total = clipped_sum(gradients, bound := sorted(map(length, gradients))[2])
    model.way = "plain"
    with PerExampleClipper(model, max_grad_norm=bound, mode=mode) as clipper:
        clipper.backward(losses(model, x, y))
        model.way = way
        model.zero_grad()
        got = clipper.backward(losses(model, x, y))
    assert got.tolist() == pytest.approx(norms, rel=1e-5)
    assert distance([p.grad for p in model.parameters()], total) <= 1e-5 * length(total)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_uses_a_parameter_is_refused(mode):
    model, (x, y) = Ways(), data()
    with PerExampleClipper(model, max_grad_norm=0.7, mode=mode) as clipper:
        with pytest.raises(ValueError, match=r"'first.bias' got a gradient past.*weight_decay"):
            clipper.backward(losses(model, x, y) + model.first.bias.square().sum())
        clipper.backward(losses(model, x, y) + model.first.bias.detach().square().sum())


def test_a_deep_graph_that_is_thrown_away():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5000)))
    with PerExampleClipper(model, max_grad_norm=1.0, self_check=False):
        model(torch.ones(2, 1))
