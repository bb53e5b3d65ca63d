"""Norms, option by option, and which modules are taken for one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import ALL_MODES, Calls, assert_exact_by_rule, check, drawn, freeze, overwritten
from oracle import length
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.layer_rule import rule_for
from dp_transformers.clipping.rules.normalization import _weight_only_rms_norm


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LayerNorm(6),
        lambda: nn.LayerNorm(6, bias=False),
        lambda: nn.LayerNorm((3, 6)),
        lambda: nn.RMSNorm(6, eps=1e-5),
        lambda: nn.RMSNorm((3, 6)),
        lambda: LlamaRMSNorm(6, eps=1e-5),
        lambda: Gemma2RMSNorm(6, eps=1e-5),
        lambda: T5LayerNorm(6, eps=1e-5),
    ],
    ids=["layer", "layer no bias", "layer 2d", "rms", "rms 2d", "llama", "gemma", "t5"],
)
def test_norms(norm):
    model = nn.Sequential(nn.Linear(6, 6), norm(), nn.Linear(6, 2))
    nn.init.normal_(model[1].weight)
    check(model, torch.randn(4, 3, 6))


def test_rms_norms_are_recognised_by_what_they_compute():
    class LooksLikeOne(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) * 1.01

    assert rule_for(LlamaRMSNorm(6)).terms is _weight_only_rms_norm
    assert rule_for(Gemma2RMSNorm(6)).terms is _weight_only_rms_norm
    assert rule_for(LooksLikeOne(6)).terms is None


class LimitsItsInput(LlamaRMSNorm):
    """An RMS norm of what an input is limited to, above, below or in training."""

    def __init__(self, size, kind="above"):
        super().__init__(size)
        self.kind = kind

    def forward(self, hidden_states):
        x = hidden_states
        if self.kind == "below":
            x = x * (x.abs() > 1e-4)
        elif self.kind == "above" or self.training:
            x = x.clamp(-6, 6)
        return super().forward(x)


@pytest.mark.parametrize("kind", ["above", "below", "in training"])
def test_norms_of_a_limited_input_are_not_taken_for_plain_ones(kind):
    module = LimitsItsInput(6, kind)
    assert rule_for(module).terms is None and module.training
    assert rule_for(module.eval()).terms is None and not module.training


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_norm_that_limits_its_input_is_clipped(mode):
    """Taken for a plain one it saw none of the second column, and one example moved the sum of the two-pass modes by
    70 C."""
    model = nn.Sequential(LimitsItsInput(8), nn.Linear(8, 3, bias=False))
    model[1].requires_grad_(False).weight[:, [0, *range(2, 8)]] = 0
    x = torch.tensor([[1e4, 100.0, 0, 0, 0, 0, 0, 0], [1.0, 2, 3, 4, 5, 6, 7, 8]])
    clipper = PerExampleClipper(model, 0.01, mode=mode)
    losses = torch.nn.functional.cross_entropy(30 * model(x), torch.tensor([0, 1]), reduction="none")
    clipper.backward(losses, torch.tensor([1.0, 0.0]))
    assert length([model[0].weight.grad]) <= 0.01 * 1.001


class GatedNorm(LlamaRMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x * torch.sigmoid(gate))


def test_a_gated_norm_is_not_taken_for_a_plain_one():
    model = Calls(lambda m, x: m.norm(m.first(x), gate=x), first=nn.Linear(5, 5), norm=GatedNorm(5))
    check(model, torch.randn(4, 3, 5))


@pytest.mark.parametrize("norm", [T5LayerNorm, LlamaRMSNorm, Gemma2RMSNorm])
def test_outputs_of_norms_may_be_overwritten(norm):
    """In place, as a router's jitter does."""
    scales = Calls(lambda m, x: x.mul_(2))
    check(nn.Sequential(nn.Linear(6, 6), norm(6), scales, nn.Linear(6, 2)), torch.randn(4, 3, 6))


@st.composite
def channel_norms(draw):
    spatial = tuple(draw(st.integers(2, 4)) for _ in range(draw(st.integers(1, 3))))
    channels = draw(st.integers(1, 3)) * (groups := draw(st.integers(1, 3)))
    if draw(st.booleans()):
        layer = nn.GroupNorm(groups, channels, eps=0.1)
        spatial = spatial if draw(st.integers(0, 4)) else ()
        if channels == groups and not spatial:  # one number, normalised, is zero
            spatial = (2,)
    else:
        layer = getattr(nn, f"InstanceNorm{len(spatial)}d")(channels, affine=True, eps=0.1)
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    return freeze(layer, draw(st.sampled_from(["nothing", "nothing", "bias", "weight"]))), (
        draw(st.integers(1, 4)),
        channels,
        *spatial,
    )


@drawn
@given(channel_norms(), st.sampled_from(ALL_MODES))
def test_group_and_instance_norms(drawn_layer, mode):
    layer, shape = drawn_layer
    torch.manual_seed(0)
    assert_exact_by_rule(overwritten(layer), torch.randn(shape) + 3, mode=mode)


def test_running_statistics_are_used_where_they_are_kept_fixed():
    model, x = nn.Sequential(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)), torch.randn(4, 3, 4, 4)
    model(x + 1)
    assert_exact_by_rule(model.eval(), x)


@drawn
@given(st.data())
def test_layer_norms_over_several_dimensions(data):
    torch.manual_seed(0)
    shape = [data.draw(st.integers(2, 4)) for _ in range(data.draw(st.integers(1, 3)))]
    middle = [data.draw(st.integers(1, 4)) for _ in range(data.draw(st.integers(0, 2)))]
    layer = nn.LayerNorm(shape, bias=data.draw(st.booleans()))
    nn.init.normal_(layer.weight)
    x = torch.randn(data.draw(st.integers(1, 4)), *middle, *shape)
    assert_exact_by_rule(overwritten(layer), x, mode=data.draw(st.sampled_from(ALL_MODES)))


def evaluating(dims, **options):
    """A batch normalization with statistics and weights of its own, which evaluates."""
    layer = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](4, **options).eval()
    for x in (*layer.parameters(), layer.running_mean):
        nn.init.normal_(x)
    nn.init.uniform_(layer.running_var, 0.5, 2)
    return layer


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 6), (5, 4, 3, 2), (5, 4, 3, 2, 2), (2, 4, 1), (5, 4, 0)])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_batch_normalization_that_evaluates(shape, eps):
    layer = evaluating(max(1, len(shape) - 2), eps=eps)
    assert_exact_by_rule(nn.Sequential(layer, nn.Tanh()), torch.randn(shape), self_check=len(shape) > 2)
    with PerExampleClipper(layer, 1.0) as clipper:
        clipper.backward(layer(torch.randn(shape)).flatten(1).sum(1))
        assert all(owner.has_rule for owner in clipper.owners)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_batch_normalization_in_another_precision(dtype):
    layer, x = evaluating(2).to(dtype), torch.randn(5, 4, 3, 2, dtype=dtype)
    norms = [
        torch.stack(
            [g.norm() for g in torch.autograd.grad(layer(row[None]).sin().sum(), list(layer.parameters()))]
        ).norm()
        for row in x
    ]
    with PerExampleClipper(layer, 1.0) as clipper:
        got = clipper.backward(layer(x).sin().flatten(1).sum(1))
    torch.testing.assert_close(
        got.double(), torch.stack(norms).double(), rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=0
    )


class Switches(nn.Module):
    """Its normalization trains while it runs, and at no other time."""

    def __init__(self, trains=True):
        super().__init__()
        self.norm, self.trains = evaluating(1, momentum=0.0), trains

    def forward(self, x):
        self.norm.train(self.trains)
        x = self.norm(x)
        self.norm.eval()
        return x


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("model", [Switches, lambda: nn.BatchNorm1d(4, track_running_stats=False).eval()])
def test_batch_normalization_that_mixes_is_refused_whenever_it_runs(model, self_check):
    model, x = model(), torch.randn(5, 4)
    with PerExampleClipper(model, 1.0, self_check=self_check) as clipper:
        with pytest.raises(ValueError, match=r"BatchNorm1d.*mixes examples.*eval\(\) after every"):
            clipper.backward(model(x).square().sum(1))
        with torch.no_grad():
            model(x)
        with clipper.suspended():
            model(x).sum().backward()


def test_batch_normalization_that_mixes_is_refused_after_it_was_right():
    model, x = Switches(trains=False), torch.randn(5, 4)
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.backward(model(x).square().sum(1))
        model.trains = True
        with pytest.raises(ValueError, match="BatchNorm1d.*mixes examples"):
            clipper.backward(model(x).square().sum(1))
