"""A gradient that reaches a parameter past the taps is refused at any backward, not only where the first call takes
that way."""

import gc
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from oracle import clipped_sum, distance, length, per_example_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_transformers import PerExampleClipper, register_grad_sampler
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


WAY: list = ["plain"]
UNSEEN = property(
    lambda self: WAY[0], lambda self, way: WAY.__setitem__(0, way)
)  # no attribute, so nobody checks again


class Ways(nn.Module):
    """A forward with several ways; ``way`` is neither an input nor an attribute of the model, so that the self-check
    sees the first only."""

    way = UNSEEN

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
    "functional": "head.weight", "kept activation": "block.scale", "bypassed inside": "block.inner.weight", "as an input": "block.inner.weight",
}  # fmt: skip


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
        with pytest.raises(ValueError, match=rf"'{PAST[way]}' got a gradient that did not come through its module"):
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


def test_a_deep_graph_that_is_thrown_away():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5000)))
    with PerExampleClipper(model, max_grad_norm=1.0, self_check=False):
        model(torch.ones(2, 1))


@dataclass
class Box:
    """An input in which nobody looks for tensors."""

    h: torch.Tensor


class Bias(nn.Module):
    """Adds a parameter, by a rule of its own."""

    def __init__(self):
        super().__init__()
        self.bias, self.inner, self.context = nn.Parameter(torch.rand(4) + 0.5), nn.Identity(), None

    def forward(self, x):
        x = x.h if isinstance(x, Box) else x
        return self.inner(x if self.context is None else x + self.context) + self.bias


class Carries(Bias):
    def forward(self, x):
        before, self.context = self.context, x + self.bias
        return self.context if before is None else self.context + before


class InPlace(Bias):
    def forward(self, x):
        x += self.bias
        return self.inner(x)


class Nearest(Bias):
    def forward(self, x, table):
        return x + table.detach()[torch.cdist(x.detach(), table.detach()).argmin(-1)] + self.bias


for cls in (Bias, Carries, InPlace, Nearest):
    register_grad_sampler(cls)(lambda module, activations, backprops: {module.bias: backprops})


class Borrows(nn.Module):
    """Re-run by the fallback; may use a weight of another module."""

    def __init__(self, other):
        super().__init__()
        self.bias, self.other = nn.Parameter(torch.rand(4)), [other]

    def forward(self, x, borrows=False):
        return (F.linear(x, self.other[0].weight) if borrows else x) + self.bias


class MaskToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.rand(4))

    def forward(self, x, mask):
        x[mask] = self.token
        return x


class Net(nn.Module):
    way = UNSEEN

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.other, self.head = (nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))  # fmt: skip
        self.bias, self.carries, self.in_place, self.nearest, self.token = (Bias(), Carries(), InPlace(), Nearest(), MaskToken())  # fmt: skip
        self.borrows = Borrows(self.middle)
        self.way = way

    def forward(self, x):
        self.bias.context = self.carries.context = None
        return self.head(self.way(self, self.first(x).sin()))


def plain(net, h):
    return net.borrows(net.carries(net.bias(net.middle(net.other(h)))))


def twice_under_autocast(net, h):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.borrows(net.borrows(net.middle(net.middle(h)))).float()


@pytest.mark.parametrize(
    ("way", "modes"),
    [
        (lambda net, h: net.in_place(net.middle(h)), MODES),
        (lambda net, h: net.nearest(net.middle(h), net.middle.weight), MODES),
        (
            lambda net, h: net.token(net.middle(h), h.sum(1) > 0),
            ("book_keeping", "per_sample"),
        ),  # the others keep the input for a second pass
        (twice_under_autocast, MODES),
    ],
    ids=["input changed in place", "table that is detached", "token written in place", "autocast's copies"],
)
def test_what_only_looks_like_a_way_around_the_taps_is_exact(way, modes):
    tolerance = 3e-2 if way is twice_under_autocast else 1e-5
    for mode in modes:
        net, (x, y) = Net(way), data()
        gradients = per_example_gradients(net, lambda batch, net=net: losses(net, **batch), {"x": x, "y": y})
        norms, total = clipped_sum(gradients, bound := sorted(map(length, gradients))[2])
        with PerExampleClipper(net, max_grad_norm=bound, mode=mode) as clipper:
            got = clipper.backward(losses(net, x, y))
        assert got.tolist() == pytest.approx(norms, rel=tolerance)
        assert distance(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()], total
        ) <= tolerance * length(total)


def test_the_walk_takes_every_operation_once():
    """Residual blocks have 2**200 ways through them."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks, self.head = (nn.Linear(3, 4), nn.ModuleList(Bias() for _ in range(200)), nn.Linear(4, 2))  # fmt: skip

        def forward(self, x):
            h = self.first(x)
            for block in self.blocks:
                h = h + 0.01 * block(Box(h))
            return self.head(h)

    model, (x, y) = Residual(), data()
    with PerExampleClipper(model, max_grad_norm=1.0, self_check=False) as clipper:
        clipper.backward(losses(model, x, y))


def test_a_state_that_is_carried_from_step_to_step_keeps_no_graph():
    class Cell(Bias):
        def forward(self, x, state):
            return x + state.detach() + self.bias

    register_grad_sampler(Cell)(lambda module, activations, backprops: {module.bias: backprops})

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cell, self.head = nn.Linear(3, 4), Cell(), nn.Linear(4, 2)

        def forward(self, x, state):
            h = self.cell(self.first(x), state)
            return self.head(h), h

    model, (x, y) = Recurrent(), data()
    state, alive = torch.zeros(5, 4), []
    with PerExampleClipper(model, max_grad_norm=1.0) as clipper:
        for _ in range(6):
            logits, state = model(x, state)
            clipper.backward(F.cross_entropy(logits, y, reduction="none"))
            alive.append(sum(type(o).__name__ == "RecordedCall" for o in gc.get_objects()))
    assert alive[1] == alive[-1]
