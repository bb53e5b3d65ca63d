"""Convolutions, option by option."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import ALL_MODES, Calls, assert_exact_by_rule, drawn, freeze, overwritten, weigh
from oracle import assert_exact
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.layer_rule import rule_for
from dp_transformers.clipping.rules.convolution import convolution
from dp_transformers.clipping.terms import Convolution, Convolved, Dense, Outer, arithmetic
from dp_transformers.clipping.terms.tied_weights import merge, norm_of_sum

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel lengths"
)  # torch, of its own forward


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    kernel, dilation = each(1, 3), each(1, 2)
    stride = draw(st.sampled_from([(1,) * dims, each(1, 3), kernel]))
    padding = draw(st.sampled_from([(0,) * dims, each(0, 2), "valid", "same"]))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    layer = getattr(nn, f"Conv{dims}d")(
        groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 6)), kernel, stride=1 if padding == "same" else stride, padding=padding,
        dilation=dilation, groups=groups, bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])),
    )  # fmt: skip
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    shape = (draw(st.integers(1, 4)), layer.in_channels, *(size + draw(st.integers(2, 4)) for size in reach))
    return freeze(
        layer,
        draw(st.sampled_from(["nothing", "nothing", "bias", "weight"] if layer.bias is not None else ["nothing"])),
    ), shape


@drawn
@given(convolutions(), st.sampled_from(ALL_MODES))
def test_convolutions(drawn_layer, mode):
    layer, shape = drawn_layer
    torch.manual_seed(0)
    assert_exact_by_rule(overwritten(layer), torch.randn(shape), mode=mode)


@pytest.mark.parametrize(
    ("layer", "shape", "ghost"),
    [
        (nn.Conv2d(3, 4, 3, padding=1), (4, 3, 8, 8), False),
        (nn.Conv2d(24, 20, 3, padding=1), (4, 24, 3, 3), True),
        (nn.Conv2d(48, 40, (3, 2), padding="same", groups=2, dilation=(1, 3)), (4, 48, 3, 3), True),
        (nn.Conv2d(24, 20, 3, stride=2, padding=2, padding_mode="circular"), (4, 24, 5, 4), True),
        (nn.Conv1d(16, 16, 4, padding=3, groups=16), (4, 16, 9), False),
        (nn.Conv3d(12, 10, 3, stride=2), (4, 12, 4, 5, 3), True),
        (nn.Conv2d(3, 4, (2, 3), stride=(2, 3), padding=(1, 0)), (4, 3, 6, 6), False),
        (nn.Conv2d(3, 4, (2, 3), stride=(2, 3), dilation=(2, 1)), (4, 3, 8, 9), False),
        (nn.Conv2d(4, 6, (2, 3), stride=(2, 3), groups=2), (4, 4, 6, 6), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("scratch", [1, 64 * 2**20], ids=["one example at a time", "all at once"])
def test_convolutions_by_ghost_norm_and_by_instance(layer, shape, ghost, scratch, monkeypatch):
    monkeypatch.setattr(arithmetic, "SCRATCH_BYTES", scratch)
    x = torch.randn(shape)
    term = convolution(layer, [x], torch.randn_like(layer(x)))[layer.weight]
    assert isinstance(term, Convolved) and term.cheaper_instantiated == (not ghost)
    by_instance = term.norm(instantiate=True).norm
    torch.testing.assert_close(term._ghost_norm().norm, by_instance, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        term.instantiate().weighted_sum(torch.ones(4)), term.weighted_sum(torch.ones(4)), rtol=1e-4, atol=1e-4
    )
    assert_exact_by_rule(overwritten(layer), x, self_check=True)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 8, 4, stride=4), (4, 3, 9, 11)),
        (nn.Conv2d(3, 40, (4, 2), stride=(4, 2), padding="valid"), (4, 3, 8, 4)),
        (nn.Conv2d(6, 5, 1), (4, 6, 4, 3)),
        (nn.Conv1d(6, 5, 1, dilation=2), (4, 6, 7)),
        (nn.Conv3d(2, 4, (1, 2, 2), stride=(1, 2, 2)), (4, 2, 3, 4, 4)),
    ],
    ids=str,
)
def test_patches_that_do_not_overlap_make_a_linear_layer(layer, shape):
    x = torch.randn(shape)
    assert isinstance(convolution(layer, [x], torch.randn_like(layer(x)))[layer.weight], Outer)
    assert_exact_by_rule(overwritten(layer), x, self_check=True)
    with PerExampleClipper(layer, 1.0, mode="per_sample", self_check=False) as clipper:
        clipper.backward(weigh(layer(x)))
        assert layer.weight.grad_sample.shape == (4, *layer.weight.shape)


def twice(m, x):
    """The layer on a signal, and on a part of what it gave."""
    y = torch.tanh(m.layer(x))
    return torch.cat([y.flatten(1), m.layer(y[..., m.cut :]).flatten(1)], 1)


@pytest.mark.parametrize("cut", [0, 2], ids=["as large", "smaller"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 3, 3, padding=1), (4, 3, 6, 6)),
        (nn.Conv2d(16, 16, 3, padding=1), (4, 16, 3, 4)),
        (nn.Conv1d(4, 4, 3, padding=2, padding_mode="replicate", groups=2), (4, 4, 7)),
        (nn.Conv2d(3, 3, 1), (4, 3, 5, 6)),
        (nn.GroupNorm(2, 4), (4, 4, 5, 6)),
        (nn.InstanceNorm1d(4, affine=True), (4, 4, 6)),
        (nn.PReLU(4), (4, 4, 6)),
    ],
    ids=str,
)
def test_a_layer_used_twice_has_the_norm_of_the_sum(layer, shape, cut):
    assert_exact_by_rule(Calls(twice, layer=layer, cut=cut), torch.randn(shape), self_check=True)


def test_two_layers_of_different_kind_that_share_a_weight():
    both = {"embed": nn.Conv2d(3, 4, 2, stride=2), "slide": nn.Conv2d(3, 4, 2, padding=1)}
    both["slide"].weight = both["embed"].weight
    model = Calls(lambda m, x: torch.cat([m.embed(x).flatten(1), m.slide(x).flatten(1)], 1), **both)
    assert_exact_by_rule(model, torch.randn(4, 3, 6, 6))


def frames_of(layer):
    """Runs a layer on the frames of all examples together."""
    return Calls(lambda m, x: torch.tanh(m.layer(x.flatten(0, 1))).unflatten(0, x.shape[:2]), layer=layer)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 5, 3, padding=1),
        nn.Conv2d(24, 20, 3),
        nn.Conv2d(4, 5, 2, stride=2),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.PReLU(4),
    ],
    ids=str,
)
def test_frames_that_are_the_layers_batch(layer):
    channels = getattr(layer, "in_channels", 4)
    assert_exact_by_rule(frames_of(layer), torch.randn(4, 6, channels, 4, 3), self_check=True)


@pytest.mark.parametrize("frames", [3, 4])
@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 4), nn.PReLU(4)], ids=str)
def test_frames_are_never_taken_for_channels(layer, frames):
    """Also where the check saw another number of frames: the parent answers."""
    model = frames_of(layer)
    with PerExampleClipper(model, 1.0) as clipper:
        for count in (frames, 4, 3):
            assert_exact(model, clipper, lambda b: weigh(model(b["x"])), {"x": torch.randn(3, count, 4, 5)})
        assert not any(owner.has_rule for owner in clipper.owners)


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.InstanceNorm1d(4, affine=True)], ids=str)
def test_channels_are_not_taken_for_the_batch(layer):
    x = torch.randn(4, *[6] * (layer(torch.randn(1, 4, 6, 6)).dim() - 2 if isinstance(layer, nn.Conv2d) else 1))
    with (
        PerExampleClipper(layer, 1.0, self_check=False) as clipper,
        pytest.raises(ValueError, match="without a batch dimension"),
    ):
        clipper.backward(weigh(layer(x)))


def test_a_convolution_with_its_own_computation_is_somebody_else():
    class Doubled(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, 2 * weight, bias)

    class Renamed(nn.Conv2d):
        pass

    assert rule_for(Renamed(3, 4, 3)).terms is convolution and rule_for(Doubled(3, 4, 3)).terms is None
    assert_exact_by_rule(nn.Sequential(Doubled(3, 4, 3)), torch.randn(4, 3, 5, 5), has_rule=False)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), (4, 4, 5)),
        (nn.ConvTranspose2d(3, 4, 3, padding=1, dilation=2), (4, 3, 4, 5)),
        (nn.ConvTranspose3d(2, 3, 2, stride=2, bias=False), (4, 2, 3, 2, 3)),
    ],
    ids=str,
)
def test_transposed_convolutions(layer, shape):
    assert_exact_by_rule(nn.Sequential(layer, nn.Tanh()), torch.randn(shape), self_check=True, has_rule=False)


def test_uses_that_are_not_alike_are_added_as_instances():
    how = Convolution(torch.Size((4, 3, 2)), (1,), (0,), (1,), 1)
    first, second = (Convolved(torch.randn(2, 1, 3, n), torch.randn(2, 1, 4, n - 1), how) for n in (5, 6))
    together = first.instantiate().grad + second.instantiate().grad
    (merged,) = merge([first, second, Dense(torch.zeros(2, 4, 6))])
    torch.testing.assert_close(merged.grad.flatten(), together.flatten())
    mixed = [Outer(torch.randn(2, 3, 4), torch.randn(2, 3, 6)), first]
    expected = (mixed[0].instantiate().grad.flatten(1) + mixed[1].instantiate().grad.flatten(1)).square().sum(1)
    torch.testing.assert_close(norm_of_sum(mixed).squared(), expected)


@pytest.mark.parametrize("shape", [(4, 24, 4, 4), (4, 24, 9, 9)], ids=["ghost", "instance"])
def test_low_precision_factors_are_contracted_in_fp32(shape):
    how = Convolution(torch.Size((20, 24, 3, 3)), (1, 1), (1, 1), (1, 1), 1)
    image, grad = torch.randn(shape).bfloat16().unsqueeze(1), torch.randn(4, 20, *shape[2:]).bfloat16().unsqueeze(1)
    low, full, coef = Convolved(image, grad, how), Convolved(image.float(), grad.float(), how), torch.rand(4)
    for a, b in zip(
        (low.norm().norm, low.weighted_sum(coef), low.instantiate().grad),
        (full.norm().norm, full.weighted_sum(coef), full.instantiate().grad),
        strict=True,
    ):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
