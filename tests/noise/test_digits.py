"""What a step releases has no digits that noise has not, so that the last ones say nothing of the sum under it."""

import numpy as np
import pytest
import torch
from scipy import stats
from test_mechanism_in_loops import BOUND, LOOPS, STEPS, mechanism, train
from torch import nn

from dp_transformers import PerExampleClipper, Release
from dp_transformers.mechanism.clipping_functions import AdaptiveClipping
from dp_transformers.mechanism.noise import BandedInverseNoise, BandedNoise, BufferedNoise, IndependentNoise
from dp_transformers.mechanism.sampling import FixedOrderSampling
from dp_transformers.noise.add_noise import add_noise_and_divide
from dp_transformers.noise.generators import DITHER, Dither, GaussianNoise, round_digits, step
from dp_transformers.runtime import distributed
from dp_transformers.step.releases import NoisedShare, PrivateLoss

pytestmark = pytest.mark.whole

IN_ORDER = FixedOrderSampling(40, 8)


def is_rounded(x: torch.Tensor, std: float) -> bool:
    multiples = x.double() / step(std)
    return bool((multiples == multiples.round()).all())


@pytest.mark.parametrize("std", [1e-12, 0.3, 0.5, 1.0, 11.1, 2.0**20, 3e7])
def test_the_step_is_a_power_of_two_beside_the_noise(std):
    assert np.frexp(step(std))[0] == 0.5 and 2**-25 * std < step(std) <= 2**-24 * std


def released(parameters, std, divisor=1.0, noise=None, **options):
    dither = Dither(entropy=[torch.randint(2**62, ()).item()], secure=options.pop("secure", False))
    add_noise_and_divide(parameters, noise or GaussianNoise(), dither=dither, std=std, divisor=divisor, **options)
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
        round_digits([rounded], std)
        assert is_rounded(rounded, std) and (rounded - x).abs().max() <= step(std) / 2


def test_each_parameter_has_the_digits_of_its_own_noise():
    parameters = parameters_with_gradients(torch.float64)
    scales = [0.1, 1.0, 7.3]
    for x, scale in zip(released(parameters, 2.0, scales=scales), scales, strict=True):
        multiples = x / scale / step(2.0)
        assert (multiples - multiples.round()).abs().max() < 1e-6
        assert len(x) < 3 or abs(x.std() / (2.0 * scale) - 1) < 0.3


def test_the_sum_of_all_ranks_is_what_is_dithered(monkeypatch):
    """What another rank adds to the noised sum would leave its own digits where they all but take each other back."""
    clipper = PerExampleClipper(nn.Linear(3, 2), 1.0)
    clipping, odd, both = AdaptiveClipping(0.5, count_noise=1.99), [], []
    for digit in (0.0, 2.0**-23):

        def sum_of_two(tensors, digit=digit):
            for x in tensors:
                x.sub_(1.5 + digit)

        monkeypatch.setattr(distributed, "sum_over_ranks", sum_of_two)
        p = nn.Parameter(torch.zeros(200_000))
        (x,) = released([p], 1.99)
        among = x[(x.abs() > 0.55) & (x.abs() < 1.2)].double() / 2.0**-23
        odd.append((among % 2 == 1).double().mean())
        loss, share = PrivateLoss(Release("loss", 1.0, 1.99), clipper), NoisedShare(clipper)
        both.append((loss.release(1.0), share.release(clipping, 1.0)))
    assert len(among) > 20_000 and abs(odd[0] - odd[1]) < 0.02
    assert all(
        is_rounded(torch.tensor(float(x) - center), 1.99)
        for pair in both
        for x, center in zip(pair, (0, 0.5), strict=True)
    )


def test_the_loss_and_the_count_are_dithered_after_the_sum(monkeypatch):
    seen, add, clipper = [], Dither.add_, PerExampleClipper(nn.Linear(3, 2), 1.0)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda sums: seen.append("sum"))
    monkeypatch.setattr(Dither, "add_", lambda self, sums, std: (seen.append(std), add(self, sums, std)))
    PrivateLoss(Release("loss", 1.0, 3.3), clipper).release(1.0)
    NoisedShare(clipper).release(AdaptiveClipping(0.5, count_noise=1.99), 1.0)
    assert seen == ["sum", 3.3, "sum", 1.99]


def test_without_noise_nothing_is_rounded():
    parameters = parameters_with_gradients(torch.float32)
    before = [p.grad.clone() for p in parameters]
    assert all(torch.equal(x, y) for x, y in zip(released(parameters, 0.0), before, strict=True))


@pytest.mark.parametrize("noise", [IndependentNoise(1.3), BandedNoise(1300.0, (1000.0, 500.0))])
@pytest.mark.parametrize("loop", LOOPS)
def test_both_loops_dither_and_round(tmp_path, loop, noise, monkeypatch):
    """Correlated noise has the dither and the digits of what it is in the step, whatever its independent part is."""
    dithers, add = [], Dither.add_
    monkeypatch.setattr(Dither, "add_", lambda self, grads, std: (dithers.append(std), add(self, grads, std)))
    _, gradients = train(loop, tmp_path, mechanism(sampling=IN_ORDER, noise=noise))
    stds = [noise.noise_multiplier * noise.relative_std(t) * BOUND for t in range(STEPS)]
    assert len(gradients) == STEPS and dithers == pytest.approx(stds)
    for gradient, std in zip(gradients, stds, strict=True):
        multiples = gradient.double() * IN_ORDER.expected_batch_size / step(std)
        small = multiples[multiples.abs() < 2**22]
        assert len(small) and (small - small.round()).abs().max() < 0.3


KINDS = [None, BandedNoise(1.0, (1.0, 0.5)), BandedInverseNoise(1.0, (1.0, -0.5)), BufferedNoise(1.0, (0.3,), (0.9,))]


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("noise", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [1.0, 1.99, 11.1])
def test_the_last_digits_have_no_phase(std, dtype, noise, secure):
    """Normal numbers times the deviation lie on a lattice, on which a sum moves them. Where noise all but takes back
    the sum, results have the digits to see by how much."""
    clipper, phases = PerExampleClipper(nn.Linear(1000, 400, bias=False), 1.0), []
    lattices = torch.tensor([std * 2.0**-24, std * 2.0**-23, std * 2.0**-32, 2.0**-24], dtype=torch.float64)
    for _ in range(3):
        source = GaussianNoise(secure=secure) if noise is None else noise.source(clipper, secure=secure)
        p = nn.Parameter(torch.zeros(400, 1000, dtype=dtype))
        p.grad = torch.full_like(p, 1.5 * std) * (1 + torch.rand((), dtype=dtype) / 10)
        (x,) = released([p], std, noise=source, secure=secure)
        small = x[x.abs() < std / 4].double()
        phases.append(torch.exp(2j * torch.pi * (small[:, None] / lattices % 1)).mean(0))
    assert len(small) > 12_000
    for i in range(3):
        assert (phases[i] - phases[i - 1]).abs().max() < 6 / len(small) ** 0.5


@pytest.mark.parametrize("secure", [False, True])
def test_a_dither_is_uniform_and_no_noise_of_the_same_entropy(secure):
    n, std, dither, normal = 400_000, 0.37, torch.zeros(400_000), torch.zeros(400_000)
    Dither(secure=secure, entropy=[5]).add_([dither], std)
    GaussianNoise(secure=secure, entropy=[5]).add_([normal], std)
    u = dither.double().numpy() / (DITHER * std)
    assert len(np.unique(u)) > 0.98 * n and abs(u).max() < 0.5 + 1e-7
    assert stats.kstest(u, "uniform", args=(-0.5, 1)).pvalue > 1e-4
    for x in (normal.numpy()[:-1], normal.numpy()[1:], u[1:]):
        assert abs(np.corrcoef(u[:-1], x)[0, 1]) < 5 / np.sqrt(n)
    again = torch.zeros(n)
    Dither(secure=secure, entropy=[5]).add_([again], std)
    assert torch.equal(again, dither)
