"""What the modes with two backward passes sum is what they measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_transformers import PerExampleClipper
from dp_transformers.clipping import modes

# factors of branches whose gradients cancel exactly as they are, and not once they are multiplied with a coefficient
CANCELLING = {
    torch.float32: [2.0**24, -(2.0**24 - 1), -1.0, 2.0**-10][::-1],
    torch.bfloat16: [2.0**15, -(2.0**15) + 128, -128.0, 2.0**-10][::-1],
}


class Branches(nn.Module):
    def __init__(self, dtype, *, checkpointed):
        super().__init__()
        self.layer, self.dtype, self.checkpointed = nn.Linear(4, 4, dtype=dtype), dtype, checkpointed

    def branches(self, x, factors):
        h = self.layer(x.to(self.dtype))
        return sum(h * factors[:, k : k + 1].to(self.dtype) for k in range(factors.shape[1]))

    def forward(self, x, factors):
        if self.checkpointed:
            return checkpoint(self.branches, x, factors, use_reentrant=False)
        return self.branches(x, factors)


def clipped_sum(x, factors, *, mode, dtype, checkpointed):
    torch.manual_seed(0)
    model = Branches(dtype, checkpointed=checkpointed)
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        for _ in range(4):  # rows are looked at in the first passes
            model.zero_grad()
            norms_b = clipper.backward(model(x, factors).float().sum(1))
        return torch.cat([p.grad.flatten().double() for p in model.parameters()]), norms_b


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "fast_gradient"])
def test_gradients_that_cancel_behind_a_weight_move_the_sum_by_no_more_than_the_bound(mode, dtype, checkpointed):
    x, factors = torch.randn(6, 4), torch.randn(6, 4)
    null_x, null_factors = x.clone(), factors.clone()
    x[0], factors[0] = 7000.0, torch.tensor(CANCELLING[dtype])
    null_x[0], null_factors[0] = 0.0, 0.0
    settings = {"mode": mode, "dtype": dtype, "checkpointed": checkpointed}
    with_it, norms_b = clipped_sum(x, factors, **settings)
    without_it, _ = clipped_sum(null_x, null_factors, **settings)
    assert norms_b[0] > 10  # it is clipped
    assert (with_it - without_it).norm() <= 1.0001


class Grows(torch.autograd.Function):
    """Its backward gives more when it runs again, as no operation should."""

    factor = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * Grows.factor


@pytest.mark.parametrize("mode", ["ghost", "fast_gradient"])
def test_what_is_summed_is_measured_again_where_operations_may_differ(mode, monkeypatch):
    monkeypatch.setattr(modes, "may_differ", lambda device: True)
    monkeypatch.setattr(Grows, "factor", 1.0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    with PerExampleClipper(model, 0.1, mode=mode) as clipper:
        for _ in range(3):
            clipper.backward(Grows.apply(model(x)).square().sum(1))
        model.zero_grad()
        sum_up = modes._FirstPass._sum

        def other_numbers(self, *args):
            Grows.factor = 1.5
            sum_up(self, *args)

        monkeypatch.setattr(modes._FirstPass, "_sum", other_numbers)
        with pytest.raises(ValueError, match="longer than it was in the first"):
            clipper.backward(Grows.apply(model(x)).square().sum(1))
    assert all(p.grad is None for p in model.parameters())
