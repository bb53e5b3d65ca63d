"""Allowances for rounding: of positions that cancel, and of a second backward pass."""

import pytest
import torch
from torch import nn

from dp_transformers.clipping.norms import DirectNorm, NormAccumulator
from dp_transformers.clipping.precision import FULL_PRECISION, exact_arithmetic
from dp_transformers.clipping.rounding import BF16, FP32, REDUCED_FP32_SLACK, SPLIT, second_pass_slack
from dp_transformers.clipping.trainable import TrainableParameters

CPU = torch.device("cpu")


@pytest.mark.parametrize("rounding", [FP32, SPLIT, BF16])
def test_rounding_lengthens_by_what_positions_can_hide(rounding):
    lengths = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    norms = NormAccumulator()
    norms.add(DirectNorm(torch.tensor([0.0, 2.0])), lengths, rounding)
    found = norms.total(CPU).sqrt()
    assert found[0] >= 5 * rounding.relative  # what is left of them is nothing, and their roundings do not cancel
    assert found[0] >= 7 * rounding.relative * (1 - 1e-6)  # which may all point the same way
    assert found[1] == 2


def test_reduced_precision_of_convolutions_is_kept_out_of_norms_and_known_to_the_second_pass():
    setting, slack = torch.backends.mkldnn.conv, {}
    before = setting.fp32_precision
    try:
        for precision in ("ieee", "bf16"):
            setting.fp32_precision = precision
            with exact_arithmetic(torch.device("cpu")):
                assert {setting.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision} <= FULL_PRECISION
            assert setting.fp32_precision == precision
            for layer, x in ((nn.Conv2d(3, 4, 3), torch.randn(4, 3, 5, 5)), (nn.Linear(3, 4), torch.randn(4, 3))):
                convolves = TrainableParameters(layer).convolves
                slack[precision, type(layer)] = second_pass_slack(x.device, [x.dtype], convolves=convolves)
    finally:
        setting.fp32_precision = before
    assert slack.pop(("bf16", nn.Conv2d)) == REDUCED_FP32_SLACK
    assert set(slack.values()) == {0.0}
