"""What a model does in training alone is compared with random numbers that do not depend on how many rows there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.errors import SelfCheckError

WIDTH = 16


class Draws(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.change = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), [change]

    def forward(self, x):
        x = self.first(x).tanh()
        return self.second(self.change[0](x) if self.training else x).squeeze(-1)


def by_probability(x):
    return x * torch.bernoulli(torch.full_like(x, min(0.9, len(x) / 10)))


def by_probability_in_place(x):
    return x * torch.empty_like(x).bernoulli_(min(0.9, len(x) / 10))


def by_threshold(x):
    return x * (torch.rand_like(x) > len(x) / 10)


def by_threshold_of_normal_numbers(x):
    return x * (torch.randn_like(x) > len(x) / 2)


def by_scale(x):
    return x + torch.randn_like(x) / len(x)


MIXES = [by_probability, by_probability_in_place, by_threshold, by_threshold_of_normal_numbers, by_scale]


def clipped(change):
    torch.manual_seed(0)
    model = Draws(change).train()
    with PerExampleClipper(model, 0.1) as clipper:
        return clipper.backward(model(torch.randn(4, WIDTH)))


@pytest.mark.parametrize("change", MIXES)
def test_random_numbers_that_depend_on_the_number_of_rows(change):
    with pytest.raises(SelfCheckError, match="was left out"):
        clipped(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: nn.functional.dropout(x, 0.3),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
        lambda x: x * (torch.rand_like(x) > 0.3),
        lambda x: x + 0.1 * torch.randn_like(x),
        lambda x: torch.nn.functional.gumbel_softmax(x, hard=True) * x,
    ],
)
def test_random_numbers_that_do_not(change):
    assert torch.isfinite(clipped(change)).all()


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x)
        return torch.cond((x.sum() > -1e9).detach(), torch.sin, torch.cos, (y,)).square().mean(1)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch, while it traces
def test_operations_that_hold_others():
    """They trace what they are given, and could not do it again after they did it where operations are replaced."""
    model, x = Conditional().train(), torch.randn(4, WIDTH)
    with PerExampleClipper(model, 0.1) as clipper:
        norms_b = clipper.backward(model(x))
    for i in range(4):
        found = torch.autograd.grad(model(x[i : i + 1]).sum(), list(model.parameters()))
        own = torch.cat([g.flatten() for g in found]).norm()
        torch.testing.assert_close(norms_b[i], own, rtol=1e-5, atol=0)


class FreezesForItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.second.requires_grad_(False)
        y = self.second(self.first(x))
        self.second.requires_grad_(True)
        return (y + self.second(x)).square().mean(1)


def test_a_layer_that_a_forward_pass_freezes_for_a_call_comes_to_an_end():
    """The check used to look for an owner of what was frozen, without end."""
    model, x = FreezesForItself().train(), torch.randn(4, WIDTH)
    with PerExampleClipper(model, 0.1) as clipper:
        norms_b = clipper.backward(model(x))
    assert all(p.requires_grad for p in model.parameters())
    for i in range(4):
        found = torch.autograd.grad(model(x[i : i + 1]).sum(), list(model.parameters()))
        own = torch.cat([g.flatten() for g in found]).norm()
        torch.testing.assert_close(norms_b[i], own, rtol=1e-5, atol=0)
