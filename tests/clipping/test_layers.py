"""Every layer: empty batches, examples that are not finite, low precision."""

import pytest
import torch
from layers import ALL_MODES, weigh
from oracle import assert_exact, clipped_sum, distance, length, per_example_gradients
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.terms import Convolution, Convolved

LAYERS = [
    (nn.Conv1d(4, 6, 3), (4, 8)),
    (nn.Conv2d(3, 4, 3, padding=1), (3, 6, 6)),
    (nn.Conv2d(24, 20, 3), (24, 4, 4)),
    (nn.Conv2d(4, 8, 3, groups=4, padding="same", padding_mode="reflect"), (4, 6, 6)),
    (nn.Conv2d(3, 4, 2, stride=2), (3, 6, 6)),
    (nn.Conv3d(2, 3, 2), (2, 3, 4, 4)),
    (nn.ConvTranspose1d(4, 6, 3), (4, 5)),
    (nn.GroupNorm(2, 4), (4, 3, 3)),
    (nn.InstanceNorm1d(4, affine=True), (4, 5)),
    (nn.LayerNorm((3, 4)), (2, 3, 4)),
    (nn.PReLU(), (4,)),
    (nn.PReLU(4), (4, 3)),
    (nn.Linear(4, 3), (4,)),
    (nn.EmbeddingBag(7, 5), None),
    (nn.EmbeddingBag(7, 5, mode="max"), None),
]


def examples(shape, batch):
    return torch.randint(0, 7, (batch, 3)) if shape is None else torch.randn(batch, *shape)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=str)
def test_empty_batches_and_batches_of_one(layer, shape, mode):
    model = nn.Sequential(layer)
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        if not isinstance(layer, nn.InstanceNorm1d):  # torch runs it on no examples in no way
            model.zero_grad()
            assert clipper.backward(weigh(model(examples(shape, 0)))).shape == (0,)
            assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
        assert_exact(model, clipper, lambda b: weigh(model(b["x"])), {"x": examples(shape, 1)})


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(("layer", "shape"), [case for case in LAYERS if case[1] is not None], ids=str)
def test_an_example_that_is_not_finite_leaves_the_others_as_they_were(layer, shape, mode):
    model, x = nn.Sequential(layer), examples(shape, 4)
    bad = x.clone()
    bad[2] = float("nan")
    with PerExampleClipper(model, 1e9, mode=mode, self_check=False) as clipper:
        model.zero_grad()
        norms = clipper.backward(weigh(model(bad)))
    assert norms.isfinite().tolist() == [True, True, False, True]
    expected, total = clipped_sum(
        per_example_gradients(model, lambda b: weigh(model(b["x"])), {"x": x[[0, 1, 3]]}), 1e9
    )
    torch.testing.assert_close(norms[[0, 1, 3]].double(), torch.tensor(expected).double(), rtol=1e-5, atol=0)
    assert distance([p.grad for p in model.parameters()], total) <= 1e-5 * length(total)


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
