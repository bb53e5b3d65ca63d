"""The place for a third kind of mode: one that clips and sums inside each layer's backward."""

import pytest
import torch
from oracle import length, per_example_gradients
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping import modes
from dp_transformers.clipping.modes import MODES, MeasuringPass
from dp_transformers.clipping.terms.tied_weights import norm_of_sum

BOUND = 2.0


class EachParameter(MeasuringPass):
    """Clips the gradient of every parameter by itself, to the whole bound, as soon as all its uses were reached; keeps
    nothing."""

    def __init__(self, forward, clip, sums):
        super().__init__(forward, instantiate=False)
        self.clip, self.sums, self.formed = clip, sums, []

    def close(self, parameter, terms):
        measured = norm_of_sum(terms, cache=self.cache)
        self.norms.add(measured)
        clipped = self.clip(measured.squared())
        self.sums.add(parameter, (term.weighted_sum(clipped.of_sum_b) for term in terms))
        self.formed.append(parameter)
        return []

    def finish(self):
        self.formed_inside = list(self.formed)
        return self.squared_norms().sqrt()


class Streaming:
    name, one_pass = "streaming", True

    def refuse(self, trainable):
        pass

    def begin(self, forward, clip, sums, graph):
        self.last = EachParameter(forward, clip, sums)
        return self.last


@pytest.fixture
def streaming(monkeypatch):
    mode = Streaming()
    monkeypatch.setitem(MODES, mode.name, mode)
    return mode


class Net(nn.Module):
    """A layer that is called twice, and one that is tied to another."""

    def __init__(self):
        super().__init__()
        self.table, self.twice, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.twice(self.twice(self.table(ids)).tanh()).mean(1))


class Watcher:
    """Follows a clipper, and counts what it is asked."""

    def __init__(self):
        self.sums = []

    def before_forward(self, args, kwargs):
        pass

    def current_batch(self):
        return self

    def before_sum(self, batch_size):
        self.sums.append("before")
        return None, True

    def after_sum(self):
        self.sums.append("after")


@pytest.mark.parametrize("loop", ["losses", "loss.backward()"])
def test_a_mode_that_clips_and_sums_in_each_layers_backward(streaming, loop):
    torch.manual_seed(0)
    model, batch = Net(), {"ids": torch.randint(0, 7, (5, 3))}

    def losses_of(batch):
        return model(batch["ids"]).square().sum(1)

    gradients = per_example_gradients(model, losses_of, batch)  # of each example, of each parameter
    with PerExampleClipper(
        model, BOUND, mode="streaming"
    ) as clipper:  # whose self-check would not agree: it knows one norm of all
        clipper.checked = True
        clipper.follow(watcher := Watcher(), "sum" if loop == "loss.backward()" else None)
        losses = losses_of(batch)
        norms = clipper.backward(losses) if loop == "losses" else losses.sum().backward() or streaming.last.finish()
    assert watcher.sums == ["before", "after"]
    torch.testing.assert_close(norms, torch.tensor([length(g) for g in gradients]), rtol=1e-5, atol=0)
    number_clipped = 0
    for k, p in enumerate(model.parameters()):
        coefficients = [min(1.0, BOUND / float(g[k].norm())) for g in gradients]
        number_clipped += sum(c < 1 for c in coefficients)
        expected = sum(c * g[k] for c, g in zip(coefficients, gradients, strict=True))
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)
    assert 0 < number_clipped < 5 * len(list(model.parameters()))
    assert set(streaming.last.formed_inside) == set(model.parameters()), "a sum was formed only after backward"
    assert not any(streaming.last.kept.values()), "terms were kept"


def test_modes_are_two_kinds():
    assert {type(mode) for mode in MODES.values()} == {modes.OnePass, modes.TwoPass}
    assert {name for name, mode in MODES.items() if mode.one_pass} == {"book_keeping", "per_sample"}
