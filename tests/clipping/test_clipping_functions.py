"""Every clipping function: coefficients, clipped sums and sensitivity against one example at a time, in every mode."""

import json
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from adversarial import COEFFICIENTS, SIZE, Net, adversarial
from oracle import distance, length, per_example_gradients, trainable
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.coefficients import checked_clipping
from dp_transformers.clipping.modes import MODES
from dp_transformers.mechanism.clipping_functions import (
    CLIPPING_FUNCTIONS,
    AutomaticClipping,
    ClippingFunction,
    FlatClipping,
    NormalisedClipping,
    PerSampleAdaptiveClipping,
)

ALL_MODES = sorted(MODES)
FUNCTIONS = pytest.mark.parametrize("clipping", COEFFICIENTS, ids=str)


@pytest.fixture(scope="module")
def batches():
    """200 adversarial batches, with the gradients of each example of each, from one example at a time."""
    torch.manual_seed(0)
    model, found = Net(), []
    for seed in range(200):
        batch = adversarial(seed)
        plain = {"ids": batch["ids"], "scale": torch.ones(SIZE)}
        gradients = per_example_gradients(model, lambda x: model(**x), plain)
        scaled = [[x.double() * float(s) for x in g] for g, s in zip(gradients, batch["scale"], strict=True)]
        found.append((batch, scaled))
    return model, found


def contributions(clipping, gradients):
    """What each example adds: nothing where its gradient is not finite."""
    for gradient in gradients:
        norm = length(gradient)
        coefficient = COEFFICIENTS[clipping](norm) if 0 < norm < math.inf else 0.0
        yield [torch.zeros_like(x) if coefficient == 0 else x * coefficient for x in gradient]


@FUNCTIONS
@pytest.mark.parametrize("mode", ALL_MODES)
def test_sums_and_sensitivity_in_200_adversarial_batches(clipping, mode, batches):
    model, found = batches
    bound, longest = clipping.sensitivity, 0.0
    with PerExampleClipper(model, clipping, mode=mode, self_check=False) as clipper:

        def clipped(batch, weights=None):
            model.zero_grad()
            clipper.backward(model(**batch), weights=weights)
            return [p.grad.clone() for p in trainable(model)]

        for number, (batch, gradients) in enumerate(found):
            parts = list(contributions(clipping, gradients))
            whole = clipped(batch)
            expected = [sum(x) for x in zip(*parts, strict=True)]
            assert distance(whole, expected) <= 1e-5 * max(bound, length(expected)), f"batch {number}"
            without = torch.ones(SIZE)
            without[number % SIZE] = 0
            moved = distance(whole, clipped(batch, without))
            assert moved <= bound * (1 + 1e-5), f"batch {number}"
            longest = max(longest, moved)
    assert longest >= 0.99 * bound, "no example came near to the bound"


@FUNCTIONS
def test_coefficients_over_all_norms(clipping):
    largest = torch.finfo(torch.float32).max
    norms_b = torch.cat([torch.tensor([0.0, 1e-45, 1e-38, largest]), torch.logspace(-12, 12, 1001)])
    coefficients_b = clipping.coefficients(norms_b)
    assert bool(((coefficients_b >= 0) & coefficients_b.isfinite()).all())
    assert float((coefficients_b * norms_b).max()) <= clipping.sensitivity * (1 + 1e-6)
    for norm, coefficient in zip(norms_b[4:].tolist(), coefficients_b[4:].tolist(), strict=True):
        assert coefficient == pytest.approx(COEFFICIENTS[clipping](norm), rel=1e-5)
    assert checked_clipping(clipping) is clipping


@FUNCTIONS
def test_json(clipping):
    text = json.dumps(clipping.to_dict())
    assert ClippingFunction.from_dict(json.loads(text)) == clipping
    assert CLIPPING_FUNCTIONS[clipping.kind] is type(clipping)
    assert replace(clipping, max_grad_norm=0.8) != clipping


@pytest.mark.parametrize(
    "make",
    [
        *[lambda kind=kind, bound=bound: kind(bound) for kind in CLIPPING_FUNCTIONS.values() for bound in (0, math.inf, "1")],
        lambda: AutomaticClipping(1.0, gamma=0.0),
        lambda: PerSampleAdaptiveClipping(1.0, r=0.0),
        lambda: PerSampleAdaptiveClipping(1.0, r=1.1),
    ],
)  # fmt: skip
def test_what_cannot_clip_is_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()


class Frozen(nn.Module):
    """Half of it computes in float16, where a small loss leaves nothing."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4).half().requires_grad_(False)

    def forward(self, x, scale):
        return (self.outer(self.inner(x).half()).float()[:, 0] * scale).square()


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("small", [1e-2, 1e-3, 1e-4])
def test_a_large_coefficient_does_not_raise_what_float16_left_out(mode, small):
    """Were the loss multiplied by it, the second pass would sum a longer gradient than the first one measured."""
    torch.manual_seed(0)
    model, x = Frozen(), torch.randn(4, 4)
    with PerExampleClipper(model, NormalisedClipping(1.0), mode=mode, self_check=False) as clipper:
        for i in range(4):
            model.zero_grad()
            clipper.backward(model(x[i : i + 1], torch.full((1,), small)))
            assert length([p.grad for p in trainable(model)]) <= 1 + 1e-5


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("loss", [1e-12, 1e-17, 1e-18, 1e-22])
def test_a_gradient_that_float32_measures_as_zero_is_not_raised_above_the_bound(mode, loss):
    """An example that is learnt by heart has such a gradient, and this function multiplies it with 1e25."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(1, 3)
    with PerExampleClipper(model, AutomaticClipping(1.0, gamma=1e-25), mode=mode, self_check=False) as clipper:
        clipper.backward(model(x).sum(1) * loss)
    assert length([p.grad for p in trainable(model)]) <= 1 + 1e-5


@dataclass(frozen=True)
class NoNumber(FlatClipping):
    """No number for norms between those that it is tried on."""

    kind: ClassVar[str] = "no number"

    def coefficients(self, norms_b):
        return super().coefficients(norms_b).masked_fill(norms_b > 1e13, math.nan)


def test_one_example_whose_coefficient_is_no_number_leaves_the_sum_finite():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    with PerExampleClipper(model, NoNumber(1.0), self_check=False) as clipper:
        clipper.backward(model(x).sum(1) * torch.tensor([1.0, 1e15]))
    assert length([p.grad for p in trainable(model)]) <= 2 + 1e-5


@pytest.mark.parametrize(
    "share", [lambda n: n.max(), lambda n: n.mean(), lambda n: n.quantile(0.9), lambda n: torch.tensor(len(n) * 1e12)]
)
def test_a_function_that_compares_the_norms_of_a_batch_is_refused(share):
    """With C / max(norms) each example adds C at most, but taking the longest out makes all others longer."""

    @dataclass(frozen=True)
    class OfTheBatch(FlatClipping):
        kind: ClassVar[str] = f"of the batch {id(share)}"

        def coefficients(self, norms_b):
            return torch.minimum(super().coefficients(norms_b), self.max_grad_norm / share(norms_b))

    with pytest.raises(ValueError, match="depend on other norms of the batch.*AdaptiveClipping"):
        PerExampleClipper(nn.Linear(3, 2), OfTheBatch(1.0))
