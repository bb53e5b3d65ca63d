"""nn.PReLU and nn.Bilinear."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from layers import ALL_MODES, Calls, assert_exact_by_rule, drawn, freeze, overwritten
from torch import nn


@drawn
@given(st.data())
def test_prelu(data):
    torch.manual_seed(0)
    shape = [data.draw(st.integers(1, 4)) for _ in range(data.draw(st.integers(2, 4)))]
    channels = shape[1] if data.draw(st.booleans()) else 1
    # below 0, where there is a gradient; in float64, since one number sums up all positions, which may nearly cancel
    assert_exact_by_rule(overwritten(nn.PReLU(channels)).double(), torch.randn(shape).double() - 2)


@drawn
@given(st.data())
def test_bilinear(data):
    torch.manual_seed(0)
    batch, d, e, p, *middle = (data.draw(st.integers(1, 4)) for _ in range(4 + data.draw(st.integers(0, 2))))
    layer = nn.Bilinear(d, e, p, bias=data.draw(st.booleans()))
    frozen = data.draw(st.sampled_from(["nothing", "bias", "weight"] if layer.bias is not None else ["nothing"]))
    model = Calls(lambda m, x, y: F.leaky_relu_(m.layer(x, y)), layer=freeze(layer, frozen))
    every = data.draw(st.sampled_from(ALL_MODES))
    assert_exact_by_rule(model, torch.randn(batch, *middle, d), torch.randn(batch, *middle, e), mode=every)
