"""What modules do in training alone, and what they were not seen to do in the self-check."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import trainable
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.clipping.modes import MODES

every_mode = pytest.mark.parametrize("mode", MODES)


def assert_exact(model, mode, *inputs, steps=5):
    """Norms and sums equal those of one example at a time."""
    reference = copy.deepcopy(model)
    with PerExampleClipper(model, 0.7, mode=mode) as clipper:
        for _ in range(steps):
            model.zero_grad()
            norms_b = clipper.backward(model(*inputs).flatten(1).square().mean(1))
            wanted = [torch.zeros_like(p) for p in trainable(model)]
            for i, norm in enumerate(norms_b):
                loss = reference(*(x[i : i + 1] for x in inputs)).flatten(1).square().mean(1)
                found = torch.autograd.grad(loss.sum(), trainable(reference), allow_unused=True)
                grads = [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, found, strict=True)]
                length = torch.cat([g.flatten() for g in grads]).norm()
                torch.testing.assert_close(norm, length, rtol=1e-4, atol=1e-6)
                wanted = [w + g * (0.7 / length).clamp(max=1) for w, g in zip(wanted, grads, strict=True)]
            for p, w in zip(trainable(model), wanted, strict=True):
                torch.testing.assert_close(p.grad, w, rtol=1e-4, atol=1e-6)


class Asks(nn.Module):
    """It computes otherwise where autograd records."""

    def __init__(self, question):
        super().__init__()
        self.weight, self.question = nn.Parameter(torch.randn(6)), question

    def forward(self, x):
        return (x * self.weight).neg().exp() if self.question(self, x) else torch.tanh(x * self.weight)


QUESTIONS = {
    "input": lambda module, x: module.training and x.requires_grad,
    "weight": lambda module, x: module.training and module.weight.requires_grad,
    "class": lambda module, x: module.training and isinstance(module.weight, nn.Parameter),
    "graph": lambda module, x: module.training and x.grad_fn is not None,
}


@every_mode
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_a_module_may_ask_whether_a_tensor_needs_a_gradient(question, mode):
    assert_exact(nn.Sequential(nn.Linear(4, 6), Asks(question), nn.Linear(6, 2)), mode, torch.randn(5, 4))


class Scales(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 0.1


class ScalesInTraining(nn.Module):
    """It is run again, on what needs no gradient; its output is the same."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        self.seen = x.detach().mean()
        h = x * self.weight
        return torch.tanh(Scales.apply(h) if self.training and x.requires_grad else h)


@every_mode
def test_a_gradient_that_is_another_one_in_training_alone_is_refused(mode):
    model = nn.Sequential(nn.Linear(4, 6), ScalesInTraining(), nn.Linear(6, 2))
    with (
        PerExampleClipper(model, 1.0, mode=mode) as clipper,
        pytest.raises(SelfCheckError, match="in training mode the sum of the examples' gradients is off"),
    ):
        clipper.backward(model(torch.randn(5, 4)).square().mean(1))


class Appends(nn.Module):
    """A part of the loss goes to a list that it is given."""

    def __init__(self, when):
        super().__init__()
        self.weight, self.when = nn.Parameter(torch.randn(4)), when

    def forward(self, x, kept):
        x = torch.tanh(x * self.weight)
        if self.when(self):
            kept.append(x.square())
        return x


class GivesAList(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.blocks = nn.ModuleList([Appends(when), Appends(when)])

    def forward(self, x):
        kept: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, kept)
        return x + sum(kept)


@every_mode
@pytest.mark.parametrize("when", [lambda m: m.training, lambda m: True], ids=["training", "always"])
def test_what_a_module_appends_to_a_list_is_not_lost(when, mode):
    assert_exact(GivesAList(when), mode, torch.randn(5, 4))


class ForSome(nn.Module):
    """A layer is called on the flagged rows alone, which the first batches have none of."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, flags):
        h = self.first(x)
        if flags.any():
            h = h.masked_scatter(flags[..., None], self.extra(x[flags]))
        return self.last(h)


@every_mode
@pytest.mark.parametrize("flagged", [[(0, 0), (0, 1), (0, 2), (0, 3)], [(3, 1)]], ids=["as many as rows", "one"])
@pytest.mark.parametrize("passes", [3, 5, 6])
def test_a_call_that_the_self_check_did_not_see_is_looked_at(flagged, mode, passes):
    torch.manual_seed(0)
    model, x, flags = ForSome(), torch.randn(4, 5, 4), torch.zeros(4, 5, dtype=torch.bool)
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        for _ in range(passes):
            clipper.backward(model(x, flags).square().mean((1, 2)))
        for place in flagged:
            flags[place] = True
        with pytest.raises(ValueError, match="rows that are taken for other examples|neither the batch"):
            clipper.backward(model(x, flags).square().mean((1, 2)))


def test_calls_that_the_self_check_saw_are_looked_at_rarely(monkeypatch):
    """Looking costs two backward passes."""
    model, x, flags = ForSome(), torch.randn(4, 5, 4), torch.zeros(4, 5, dtype=torch.bool)
    looks = []
    with PerExampleClipper(model, 1.0) as clipper:
        measure = clipper._engine.norms_of_weighted
        monkeypatch.setattr(clipper._engine, "norms_of_weighted", lambda *args: looks.append(1) or measure(*args))
        for _ in range(8):
            clipper.backward(model(x, flags).square().mean((1, 2)))
    assert len(looks) == 2 * 4
