"""Allowances for the rounding of positions that cancel."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dp_transformers.clipping.norms import FP32, SPLIT, SPLIT_ROUNDING, DirectNorm, NormAccumulator
from dp_transformers.clipping.precision import FULL_PRECISION, exact_arithmetic
from dp_transformers.clipping.terms.outer import Outer

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


class Products(TorchDispatchMode):
    """Counts those of matrices."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.overloadpacket is torch.ops.aten.mm
        return func(*args, **(kwargs or {}))


def test_sums_of_bf16_factors_take_two_products_only_where_these_are_fast(bf16_products):
    """And lose no more than what the allowance says."""
    left, right, coefficients = torch.randn(3, 8, 5).bfloat16(), torch.randn(3, 8, 4).bfloat16(), torch.rand(3)
    with exact_arithmetic(CPU), Products() as products:
        total = Outer(left, right).weighted_sum(coefficients)
    assert products.number == 1 + bf16_products
    parts = coefficients[:, None, None, None].double() * left[..., None].double() * right[:, :, None].double()
    rounding = SPLIT_ROUNDING if bf16_products else 0
    assert ((total - parts.sum((0, 1))).abs() <= (rounding + 1e-6) * parts.abs().sum((0, 1))).all()
