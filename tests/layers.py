"""What tests of layers share."""

import torch
from hypothesis import settings
from oracle import assert_exact
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.modes import MODES

ALL_MODES = sorted(MODES)
drawn = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def weigh(out, seed=3):
    """(B,) a random non-linear function of each example's output."""
    weight = torch.randn(out.shape[1:].numel(), generator=torch.Generator().manual_seed(seed)).to(out)
    return torch.tanh(out).flatten(1) @ weight


def check(model, x, mode):
    with PerExampleClipper(model, 1.0, mode=mode, self_check=True) as clipper:  # the self-check must pass as well
        assert_exact(model, clipper, lambda b: weigh(model(b["x"])), {"x": x})


def assert_exact_in_all_modes(model, *inputs, self_check=False, has_rule=True):
    batch = {str(i): x for i, x in enumerate(inputs)}
    for mode in ALL_MODES:
        with PerExampleClipper(model, 1.0, mode=mode, self_check=self_check) as clipper:
            assert all(owner.is_rerun != has_rule for owner in clipper.owners)
            assert_exact(model, clipper, lambda b: weigh(model(*b.values())), batch)


def overwritten(layer):
    """The layer, with its output overwritten by what follows, as torch allows."""
    return nn.Sequential(layer, nn.LeakyReLU(0.1, inplace=True))


def freeze(layer, what):
    if what != "nothing" and getattr(layer, what, None) is not None:
        getattr(layer, what).requires_grad_(False)
    return layer
