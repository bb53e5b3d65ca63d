"""Allowances for the rounding of positions that cancel."""

import pytest
import torch

from dp_transformers.clipping.norms import DirectNorm, NormAccumulator
from dp_transformers.clipping.precision import FULL_PRECISION, exact_arithmetic
from dp_transformers.clipping.rounding import FP32, SPLIT

CPU = torch.device("cpu")


@pytest.mark.parametrize("rounding", [FP32, SPLIT])
def test_rounding_lengthens_by_what_positions_can_hide(rounding):
    lengths = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    norms = NormAccumulator()
    norms.add(DirectNorm(torch.tensor([0.0, 2.0])), lengths, rounding)
    found = norms.total(CPU).sqrt()
    assert found[0] >= 5 * rounding.relative  # what is left of them is nothing, and their roundings do not cancel
    assert found[0] >= 7 * rounding.relative * (1 - 1e-6)  # which may all point the same way
    assert found[1] == 2


@pytest.mark.parametrize("precision", ["ieee", "bf16"])
def test_reduced_precision_of_convolutions_is_kept_out_of_norms_and_sums(precision):
    setting = torch.backends.mkldnn.conv
    before = setting.fp32_precision
    try:
        setting.fp32_precision = precision
        with exact_arithmetic(CPU):
            assert {setting.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision} <= FULL_PRECISION
        assert setting.fp32_precision == precision
    finally:
        setting.fp32_precision = before
