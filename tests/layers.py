"""What tests of layers share."""

import torch
from hypothesis import settings
from oracle import assert_exact
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping import layer_rule
from dp_transformers.clipping.layer_rule import LayerRule, rule_for
from dp_transformers.clipping.modes import MODES
from dp_transformers.clipping.terms import Outer

ALL_MODES, D = sorted(MODES), 6
drawn = settings(max_examples=30, deadline=None, derandomize=True, database=None)


class Calls(nn.Module):
    """``call`` of the layers that are its parts."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **named):
        return self.call(self, *inputs, **named)


def weigh(out, seed=3):
    """(B,) a random non-linear function of each example's output."""
    weight = torch.randn(out.shape[1:].numel(), generator=torch.Generator().manual_seed(seed)).to(out)
    return torch.tanh(out).flatten(1) @ weight


def check(model, x, mode="book_keeping"):
    with PerExampleClipper(model, 1.0, mode=mode, self_check=True) as clipper:  # the self-check must pass as well
        assert_exact(model, clipper, lambda b: weigh(model(b["x"])), {"x": x})


def assert_exact_by_rule(model, *inputs, self_check=False, has_rule=True, mode="book_keeping"):
    batch = {str(i): x for i, x in enumerate(inputs)}
    with PerExampleClipper(model, 1.0, mode=mode, self_check=self_check) as clipper:
        assert all(owner.has_rule == has_rule for owner in clipper.owners)
        assert_exact(model, clipper, lambda b: weigh(model(*b.values())), batch)


def overwritten(layer):
    """The layer, with its output overwritten by what follows, as torch allows."""
    return nn.Sequential(layer, nn.LeakyReLU(0.1, inplace=True))


def freeze(layer, what):
    if what != "nothing" and getattr(layer, what, None) is not None:
        getattr(layer, what).requires_grad_(False)
    return layer


def scale_linear_rule(monkeypatch, factor):
    """Let the rule of nn.Linear give ``factor(module, backprops)`` times the gradients of its weights."""
    right = rule_for(nn.Linear(1, 1)).terms

    def wrong(module, activations, backprops):
        return {
            p: Outer(factor(module, backprops) * t.left, t.right) if isinstance(t, Outer) else t
            for p, t in right(module, activations, backprops).items()
        }

    monkeypatch.setitem(layer_rule._RULES, nn.Linear.forward, LayerRule(wrong))


class Norm(nn.Module):
    """The norm layer of somebody, without a rule: a raw parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return (1 + self.weight) * x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()


class Attends(nn.Module):
    """Attention whose first dimension is positions, given a batch there, as happens."""

    def __init__(self, swap: bool):
        super().__init__()
        self.embed, self.attention, self.swap = nn.Embedding(9, 4), nn.MultiheadAttention(4, 2), swap

    def forward(self, ids):
        x = self.embed(ids)
        x = x.transpose(0, 1) if self.swap else x
        y = self.attention(x, x, x, need_weights=False)[0]
        return {"logits": y.transpose(0, 1) if self.swap else y}
