"""What a step releases has no digits that noise has not, so that the last ones say nothing of the sum under it."""

import numpy as np
import pytest
import torch
from test_mechanism_in_loops import BOUND, LOOPS, STEPS, mechanism, train
from torch import nn

from dp_transformers import PerExampleClipper, PrivacyEngine, Release, distributed
from dp_transformers.clipping.clipping_functions import AdaptiveClipping
from dp_transformers.noise import BandedInverseNoise, BandedNoise, BufferedNoise, IndependentNoise
from dp_transformers.noise.add_noise import add_noise_and_divide
from dp_transformers.noise.digits import round_digits, step
from dp_transformers.noise.generators import GaussianNoise
from dp_transformers.private_loss import PrivateLoss
from dp_transformers.quantile import NoisedShare
from dp_transformers.sampling import FixedOrderSampling

IN_ORDER = FixedOrderSampling(40, 8)


def is_rounded(x: torch.Tensor, std: float) -> bool:
    multiples = x.double() / step(std)
    return bool((multiples == multiples.round()).all())


@pytest.mark.parametrize("std", [1e-12, 0.3, 0.5, 1.0, 11.1, 2.0**20, 3e7])
def test_the_step_is_a_power_of_two_beside_the_noise(std):
    assert np.frexp(step(std))[0] == 0.5 and 2**-25 * std < step(std) <= 2**-24 * std


def released(parameters, std, divisor=1.0, **options):
    add_noise_and_divide(parameters, GaussianNoise(), std=std, divisor=divisor, **options)
    return [p.grad for p in parameters]


def parameters_with_gradients(dtype, scale=1.0):
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (1, 300, 70_000)]
    for p in parameters:
        p.grad = scale * torch.randn(p.shape, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [0.3, 1.0, 11.1])
def test_gradients_are_rounded_and_as_near_as_that_is_fine(dtype, std):
    parameters = parameters_with_gradients(dtype)
    before = [p.grad.double().clone() for p in parameters]
    off = torch.cat(released(parameters, std)).double() - torch.cat(before)
    assert all(is_rounded(p.grad, std) for p in parameters)
    assert abs(off.std() / std - 1) < 0.02 and abs(off.mean()) < 0.02 * std
    for x in before:
        rounded = x.clone()
        round_digits([rounded], [std])
        assert is_rounded(rounded, std) and (rounded - x).abs().max() <= step(std) / 2


def test_each_parameter_has_the_digits_of_its_own_noise():
    parameters = parameters_with_gradients(torch.float32)
    scales = [0.1, 1.0, 7.3]
    gradients = released(parameters, 2.0, scales=scales)
    assert all(is_rounded(x, 2.0 * scale) for x, scale in zip(gradients, scales, strict=True))
    assert not is_rounded(gradients[1], 2.0 * 7.3)


def test_the_sum_of_all_ranks_is_what_is_rounded(monkeypatch):
    """Another rank's sum has digits of its own, which are added after the noise."""
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda xs: [x.add_(torch.randn_like(x) / 3) for x in xs])
    parameters = parameters_with_gradients(torch.float32)
    assert all(is_rounded(x, 11.1) for x in released(parameters, 11.1))
    clipper = PerExampleClipper(nn.Linear(3, 2), 1.0)
    loss = PrivateLoss(Release.within("loss", 0.0, 4.0, noise_multiplier=5.0), clipper)
    loss.add(torch.rand(5))
    assert is_rounded(loss.release(1.0) - 2, 10.0)
    clipping = AdaptiveClipping(0.5, count_noise=3.3)
    share = NoisedShare(clipper)
    share.add(torch.rand(5), 0.5)
    assert is_rounded(torch.tensor(share.release(clipping, 1.0) - 0.5), 3.3)


def test_without_noise_nothing_is_rounded():
    parameters = parameters_with_gradients(torch.float32)
    before = [p.grad.clone() for p in parameters]
    assert all(torch.equal(x, y) for x, y in zip(released(parameters, 0.0), before, strict=True))


@pytest.mark.parametrize("noise", [IndependentNoise(1.3), BandedNoise(1300.0, (1000.0, 500.0))])
@pytest.mark.parametrize("loop", LOOPS)
def test_both_loops_step_with_rounded_gradients(tmp_path, loop, noise):
    """Correlated noise has the digits of what it is in the step, whatever its independent part is."""
    _, gradients = train(loop, tmp_path, mechanism(sampling=IN_ORDER, noise=noise))
    assert len(gradients) == STEPS
    for t, gradient in enumerate(gradients):
        std = noise.noise_multiplier * noise.relative_std(t) * BOUND
        multiples = gradient.double() * IN_ORDER.expected_batch_size / step(std)
        assert torch.allclose(multiples, multiples.round(), rtol=1e-6, atol=0) and 2**23 < multiples.std() < 2**26


class Rows(nn.Module):
    """A row of the embedding that one example alone uses: its gradient is small beside the noise, and not on it."""

    def __init__(self):
        super().__init__()
        self.rows, self.out = nn.Embedding(50, 256), nn.Linear(256, 2)

    def forward(self, ids):
        return self.out(self.rows(ids).mean(1))


def row_49(is_there, secure):
    torch.manual_seed(0)
    examples = [(torch.tensor([49 if is_there and i == 7 else i, 1, 2]), i % 2) for i in range(8)]
    model = Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = PrivacyEngine(secure_rng=secure).make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(examples, batch_size=8),
        noise_multiplier=11.1,
        max_grad_norm=1.0,
    )
    ids, labels = next(iter(loader))
    nn.functional.cross_entropy(model(ids), labels).backward()
    optimizer.step()
    return model.rows.weight.grad[49].numpy() * 8


def is_noise_alone(x):
    """Whether float32 numbers times σ = 11.1, in float32, can be these."""
    sigma = np.float32(11.1)
    nearest = (x.astype(np.float64) / float(sigma)).astype(np.float32)
    around = [nearest, np.nextafter(nearest, np.float32(-np.inf)), np.nextafter(nearest, np.float32(np.inf))]
    return bool(np.any([sigma * y == x for y in around], axis=0).all())


@pytest.mark.parametrize("secure", [False, True])
def test_the_last_digits_do_not_tell_whether_an_example_was_there(secure):
    """As sums are computed they do, each time, at an ε of 0.17."""
    told = [is_noise_alone(row_49(is_there, secure)) for is_there in (False, True) * 4]
    assert len(set(told)) == 1


@pytest.mark.parametrize("noise", [None, BandedNoise(1.0, (1.0, 0.5))])
@pytest.mark.parametrize("std", [1.0, 3.0])
def test_a_sum_leaves_no_digits_of_its_own(std, noise):
    """Of sums that noise all but takes back: one that has a last digit more comes out odd as often as one without."""
    clipper, odd = PerExampleClipper(nn.Linear(1000, 400), 1.0), []
    for digit in (0, step(std)):
        source = GaussianNoise() if noise is None else noise.source(clipper)
        x, bias = torch.full((400, 1000), 1.5 * std, dtype=torch.float64) + digit, torch.zeros(400)
        source.add_([x, bias], std)
        round_digits([x], [std])
        small = x[x.abs() < std / 8].double() / step(std)
        odd.append((small % 2).mean())
        assert len(small) > 4000
    assert abs(odd[0] - odd[1]) < 4 * 0.5 / (len(small) / 2) ** 0.5


@pytest.mark.parametrize(
    "noise",
    [BandedNoise(1000.0, (1000.0, 500.0)), BandedInverseNoise(0.1, (1.0, -0.5)), BufferedNoise(1.0, (0.3,), (0.9,))],
)
def test_a_dither_is_small_beside_what_the_step_adds(noise, monkeypatch):
    """Whatever the independent part of the noise is."""
    clipper = PerExampleClipper(nn.Linear(100, 200, bias=False), 1.0)
    source, dithered = noise.source(clipper), []
    dither = GaussianNoise.dither_
    monkeypatch.setattr(
        GaussianNoise,
        "dither_",
        lambda self, tensors, std: dithered.append(std) or dither(self, tensors, std),
    )
    for t in range(3):
        x = torch.zeros(200, 100)
        source.add_([x], noise.noise_multiplier)
        assert float(x.std()) == pytest.approx(noise.noise_multiplier * noise.relative_std(t), rel=0.05)
    assert dithered == [pytest.approx(noise.noise_multiplier * noise.relative_std(0))] * 3
