"""Rules are found by what runs; the user's own rules and norm samplers."""

import subprocess
import sys

import pytest
import torch
from layers import ALL_MODES, check, weigh
from oracle import distance, length
from torch import nn

from dp_transformers import PerExampleClipper, register_grad_sampler, register_norm_sampler
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.clipping.layer_rule import _RULES, LayerRule, rule_for
from dp_transformers.clipping.rules.linear import linear


def test_dispatch_is_by_what_runs():
    class OwnForward(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        pass

    patched = nn.Linear(2, 2)
    patched.forward = lambda x: 2 * x
    assert rule_for(Renamed(2, 2)).terms is linear
    assert rule_for(OwnForward(2, 2)).terms is None
    assert rule_for(patched).terms is None


@pytest.mark.parametrize("mode", ALL_MODES)
def test_own_rule(mode):
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(5))

        def forward(self, x):
            return x * self.w

    try:
        register_grad_sampler(Mine)(
            lambda layer, activations, backprops: {layer.w: torch.full((len(backprops), 5), float("nan"))}
        )

        @register_grad_sampler(Mine)  # the last registration wins
        def mine(layer, activations, backprops):
            return {layer.w: (activations[0] * backprops).sum(1)}

        check(nn.Sequential(nn.Linear(5, 5), Mine()), torch.randn(4, 3, 5), mode)
    finally:
        _RULES.pop(Mine.forward)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_rule_that_forgets_a_parameter_is_named(mode):
    class Forgetful(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    try:
        register_grad_sampler(Forgetful)(lambda m, a, g: {m.weight: torch.einsum("btp,btd->bpd", g, a[0])})
        model = nn.Sequential(Forgetful(5, 3))
        clipper = PerExampleClipper(model, 1.0, mode=mode, self_check=False)
        with pytest.raises(ValueError, match=r"'0' \(Forgetful\) gives no gradients for its trainable \['bias'\]"):
            clipper.backward(weigh(model(torch.randn(4, 3, 5))))
    finally:
        _RULES.pop(Forgetful.forward)


@pytest.mark.parametrize("keeps_batch", [True, False])
def test_a_rule_whose_gradients_are_not_of_the_examples_is_named(keeps_batch):
    """One row for all was added to every example's norm without a word."""

    class Averaging(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    def rule(layer, activations, backprops):
        gradient = torch.einsum("btp,btd->pd", backprops, activations[0])
        return {layer.weight: gradient[None] if keeps_batch else gradient}

    try:
        register_grad_sampler(Averaging)(rule)
        model = nn.Sequential(Averaging(5, 3, bias=False))
        clipper = PerExampleClipper(model, 1.0, self_check=False)
        message = rf"'0' \(Averaging\) gives a gradient of shape \({'1, ' * keeps_batch}3, 5\).*shape \(4, 3, 5\)"
        with pytest.raises(ValueError, match=message):
            clipper.backward(weigh(model(torch.randn(4, 3, 5))))
    finally:
        _RULES.pop(Averaging.forward)


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return x * self.w + self.b


@pytest.fixture
def asked():
    """Affine with both samplers, which note their names here when they are called."""
    called = []

    def gradients(layer, activations, backprops):
        called.append("gradients")
        return {layer.w: (activations[0] * backprops).sum(1), layer.b: backprops.sum(1)}

    def norms(layer, activations, backprops):
        called.append("norms")
        return {layer.w: (activations[0] * backprops).sum(1).norm(dim=1), layer.b: backprops.sum(1).norm(dim=1)}

    register_grad_sampler(Affine)(gradients)
    register_norm_sampler(Affine)(lambda *_: {})
    register_norm_sampler(Affine)(norms)  # the last registration wins
    yield called
    _RULES.pop(Affine.forward, None)


GO_BACK_TWICE = ("ghost", "fast_gradient")


def test_norms_that_are_too_small_are_refused_where_their_gradients_are_summed(asked):
    """Also on devices that compute the same twice, and by what the self-check does not see."""
    right = _RULES[Affine.forward].norms
    register_norm_sampler(Affine)(lambda *args: {p: 0.9 * n for p, n in right(*args).items()})
    model = nn.Sequential(nn.Linear(5, 5), Affine())
    clipper = PerExampleClipper(model, 1.0, mode="ghost", self_check=False)
    with pytest.raises(ValueError, match="register_norm_sampler gives norms that are too small"):
        clipper.backward(weigh(model(torch.randn(4, 3, 5))))


def asked_in_one_pass(asked, model, mode):
    clipper = PerExampleClipper(model, 1.0, mode=mode, self_check=False)
    asked.clear()
    clipper.backward(weigh(model(torch.randn(4, 3, 5))))
    clipper.detach()
    return asked


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("has_grad_sampler", [True, False])
def test_norm_sampler(asked, mode, has_grad_sampler):
    model = nn.Sequential(nn.Linear(5, 5), Affine(), nn.Tanh(), Affine())
    if not has_grad_sampler:
        _RULES[Affine.forward] = LayerRule(norms=_RULES[Affine.forward].norms)
    check(model, torch.randn(4, 3, 5), mode)
    gradients = ["gradients"] * 2 if has_grad_sampler else []
    measured = ["norms"] * 2 if mode == "ghost" else gradients
    assert asked_in_one_pass(asked, model, mode) == measured + (gradients if mode in GO_BACK_TWICE else [])


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("has_grad_sampler", [True, False])
@pytest.mark.parametrize("kind", ["reused", "tied"])
def test_norms_are_not_asked_for_where_a_parameter_is_used_twice(asked, kind, mode, has_grad_sampler):
    one, other = Affine(), Affine()
    other.b = one.b
    model = nn.Sequential(nn.Linear(5, 5), one, nn.Tanh(), one if kind == "reused" else other)
    if not has_grad_sampler:
        _RULES[Affine.forward] = LayerRule(norms=_RULES[Affine.forward].norms)
    check(model, torch.randn(4, 3, 5), mode)
    passes = 2 if mode in GO_BACK_TWICE else 1
    assert asked_in_one_pass(asked, model, mode) == (["gradients"] * 2 * passes if has_grad_sampler else [])


@pytest.mark.parametrize("has_grad_sampler", [True, False])
def test_norm_sampler_and_an_example_that_is_not_finite(asked, has_grad_sampler):
    model, x = nn.Sequential(nn.Linear(5, 5), Affine()), torch.randn(4, 3, 5)
    if not has_grad_sampler:
        _RULES[Affine.forward] = LayerRule(norms=_RULES[Affine.forward].norms)
    x[1, 0, 0] = float("inf")
    good = [0, 2, 3]
    with PerExampleClipper(model, 0.5, mode="ghost", self_check=False) as clipper:
        norms = clipper.backward(weigh(model(x)))
        total = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        expected = clipper.backward(weigh(model(x[good])))
    assert not norms[1].isfinite()
    torch.testing.assert_close(norms[good], expected, rtol=1e-6, atol=0)
    assert distance(total, [p.grad for p in model.parameters()]) <= 1e-6 * length(total)


def test_norm_samplers_that_are_wrong(asked):
    model, x = nn.Sequential(nn.Linear(5, 5), Affine()), torch.randn(4, 3, 5)
    right = _RULES[Affine.forward].norms
    register_norm_sampler(Affine)(lambda *a: {p: n.square() for p, n in right(*a).items()})
    with pytest.raises(SelfCheckError, match="not exact"):
        check(model, x, "ghost")
    register_norm_sampler(Affine)(lambda layer, *a: {layer.w: right(layer, *a)[layer.w]})
    with (
        PerExampleClipper(model, 1.0, mode="ghost", self_check=False) as clipper,
        pytest.raises(ValueError, match=r"no norms for its trainable \['b'\].*register_norm_sampler"),
    ):
        clipper.backward(weigh(model(x)))
    register_norm_sampler(Affine)(lambda *a: {p: n[:, None] for p, n in right(*a).items()})
    with (
        PerExampleClipper(model, 1.0, mode="ghost", self_check=False) as clipper,
        pytest.raises(ValueError, match=r"Affine.*shape \(4, 1\).*each of the 4 examples"),
    ):
        clipper.backward(weigh(model(x)))


def test_norm_sampler_is_found_by_what_runs(asked):
    class Other(Affine):
        def forward(self, x):
            return super().forward(x)

    class Same(Affine):
        pass

    assert rule_for(Same()).norms is rule_for(Affine()).norms is not None
    assert rule_for(Other()).norms is None
    replaced = Affine()
    replaced.forward = lambda x: x
    assert rule_for(replaced).norms is None


def test_a_rule_that_is_registered_before_anything_else_wins():
    """In a process of its own: the rules of torch's layers must not be registered after it."""
    code = """
import torch
from dp_transformers import register_grad_sampler
called = []
@register_grad_sampler(torch.nn.Linear)
def mine(layer, activations, backprops):
    called.append(layer)
    return {layer.weight: torch.einsum("bp,bd->bpd", backprops, activations[0]), layer.bias: backprops}
from dp_transformers import check_model
check_model(torch.nn.Linear(3, 2), {"input": torch.randn(4, 3)})
print(len(called) > 0)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"
