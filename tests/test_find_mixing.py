"""Which examples influence each other, and where."""

import pytest
import torch
from layers import Attends, Calls
from models import SHORT, batch_for, build
from torch import nn

from dp_transformers.checks.find_mixing import find_example_mixing


class Centred(nn.Module):
    def forward(self, x, strength=1.0):
        return x - strength * x.mean(0)


class Limited(nn.Module):
    """The largest row gets through: no gradient of one with respect to another."""

    def forward(self, x):
        return x * (x.detach().sum(1).argsort(stable=True).argsort() == len(x) - 1)[:, None]


def every_pair(n):
    return [(i, j) for i in range(n) for j in range(n) if i != j]


def ids(n=4, t=3):
    return torch.stack([torch.randperm(9)[:t] for _ in range(n)])


@pytest.mark.parametrize(
    ("model", "x", "module"), [
        (nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.BatchNorm1d(5)), nn.Linear(5, 2)), torch.randn(4, 5), "'1.0' (BatchNorm1d)"),
        (nn.Sequential(nn.Linear(5, 5), nn.LeakyReLU(inplace=True), Centred()), torch.randn(4, 5), "'2' (Centred)"),
        (nn.Sequential(Centred(), nn.Linear(5, 2)), torch.randn(4, 5), "'0' (Centred)"),
        (Centred(), torch.randn(4, 5), "Centred"),
        (Attends(swap=False), ids(), "'attention' (MultiheadAttention)"),
    ], ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_mixing_is_found_where_it_happens(model, x, module):
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    mixing = find_example_mixing(model, x)
    assert mixing.pairs == every_pair(4)
    assert mixing.module == module
    assert (
        str(mixing)
        == f"the output of example 0 depends on the input of example 1 (and 11 other pairs), first in {module}"
    )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_which_examples_mix():
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    limited = find_example_mixing(nn.Sequential(nn.Identity(), Limited()), x)  # no gradient shows it
    assert (limited.pairs, limited.module) == ([(2, 3)], "'1' (Limited)")


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.LayerNorm(5)), torch.randn(4, 5)),
        (nn.BatchNorm1d(5).eval(), torch.randn(4, 5)),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)), (torch.randn(4, 5),)),
        (Attends(swap=True), {"ids": ids()}),
        (nn.GRU(5, 3, batch_first=True, dropout=0.5, num_layers=2), torch.randn(4, 6, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_that_do_not_mix(model, batch):
    if isinstance(model, nn.GRU):
        model = Calls(lambda m, x: m.inner(x)[0], inner=model)
    assert find_example_mixing(model, batch) is None


@pytest.mark.parametrize("name", ["bert", "llama-tied"])
def test_transformers_do_not_mix_unless_their_loss_does(name):
    model, batch = build(name, dropout=0.1), batch_for(name, SHORT)
    assert find_example_mixing(model, {k: v for k, v in batch.items() if k != "labels"}) is None
    with pytest.raises(ValueError, match="leave the labels out"):
        find_example_mixing(model, batch)


def test_what_find_example_mixing_refuses():
    with pytest.raises(ValueError, match="at least two"):
        find_example_mixing(nn.Linear(5, 2), torch.randn(1, 5))
    with pytest.raises(ValueError, match=r"\[\(5,\)\] for 4 examples"):
        find_example_mixing(Mean(), torch.randn(4, 5))
    with pytest.raises(ValueError, match="finite"):
        find_example_mixing(nn.Linear(5, 2), torch.full((4, 5), float("nan")))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(0)
