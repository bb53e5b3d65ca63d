"""DPAdamW: torch's AdamW where gradients have no noise, and else what the papers say, in both loops."""

import copy
import math

import numpy as np
import pytest
import torch
from test_mechanism_in_loops import by_engine, by_trainer
from transformers import TrainerCallback

from dp_transformers import (
    BandedInverseNoise,
    BandedNoise,
    BufferedNoise,
    DPAdamW,
    FixedOrderSampling,
    FlatClipping,
    IndependentNoise,
    Mechanism,
    PoissonSampling,
)
from dp_transformers.mechanism.strategies import inverse
from dp_transformers.noise.optimizers import noise_variance, set_noise_variance

pytestmark = pytest.mark.halved

NOISE = [IndependentNoise(1.0), BandedNoise(1.0, (0.8, 0.5, 0.3)), BandedInverseNoise(1.0, (1.0, -0.9)), BufferedNoise(1.0, (0.3, 0.1), (0.9, 0.5))]  # fmt: skip


def stepped(optimizer, parameters, gradients, variances):
    """The parameters after each step with these gradients and the variance of their noise."""
    seen = []
    for step, variance in zip(gradients, variances, strict=True):
        for p, grad in zip(parameters, step, strict=True):
            p.grad = grad.to(p.dtype, copy=True)
            set_noise_variance(p.grad, variance)
        optimizer.step()
        seen.append([p.detach().clone() for p in parameters])
    return seen


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((4, 3), (5,), ())]


def gradients(steps=6):
    torch.manual_seed(1)
    return [[torch.randn_like(p) for p in parameters()] for _ in range(steps)]


@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3, "lr": 0.1}])
def test_without_noise_it_is_adamw(options):
    ours, theirs = parameters(), parameters()
    by_ours = stepped(DPAdamW(ours, **options), ours, gradients(), [0.0] * 6)
    by_theirs = stepped(torch.optim.AdamW(theirs, **options), theirs, gradients(), [0.0] * 6)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for x, y in zip(by_ours, by_theirs, strict=True) for a, b in zip(x, y, strict=True))  # fmt: skip


@pytest.mark.parametrize("floor", [None, 0.0, 0.3])
def test_it_is_the_rule_of_the_papers(floor):
    """In float64, with noise that changes from step to step."""
    lr, (b1, b2), eps, decay, variances = 0.1, (0.8, 0.95), 1e-6, 0.2, [0.5, 0.1, 2.0, 0.9, 0.0, 0.4]
    ours = parameters()
    seen = stepped(DPAdamW(ours, lr, (b1, b2), eps, decay, floor=floor), ours, gradients(), variances)
    expected = [p.detach().double().numpy() for p in parameters()]
    m, v, phi, corrected, kept = [0.0] * 3, [0.0] * 3, 0.0, 0, 0
    for t, (step, variance) in enumerate(zip(gradients(), variances, strict=True), 1):
        phi = b2 * phi + (1 - b2) * variance
        for i, grad in enumerate(g.double().numpy() for g in step):
            m[i], v[i] = b1 * m[i] + (1 - b1) * grad, b2 * v[i] + (1 - b2) * grad**2
            second, noise = v[i] / (1 - b2**t), phi / (1 - b2**t)
            left = np.where(second > noise, second - noise, second) if floor is None else np.maximum(second - noise, floor)  # fmt: skip
            corrected, kept = corrected + (second > noise).sum(), kept + (second <= noise).sum()
            expected[i] = expected[i] * (1 - lr * decay) - lr * (m[i] / (1 - b1**t)) / (np.sqrt(left) + eps)
            assert np.allclose(seen[t - 1][i].double().numpy(), expected[i], rtol=2e-4, atol=1e-5)
    assert corrected > 10 and kept > 10, "both cases are met"


def test_what_is_left_of_pure_noise_is_small_on_average():
    """v̂ is unbiased for the noise, so the correction leaves v̂ - Φ̂ about 0, with constant noise and in a schedule."""
    for variances in ([0.04] * 400, [0.04 * (1 + t % 3) for t in range(400)]):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.zeros(2000))
        optimizer = DPAdamW([p], lr=0.0, betas=(0.9, 0.99))
        stepped(optimizer, [p], [[torch.randn(2000) * math.sqrt(v)] for v in variances], variances)
        state = optimizer.state[p]
        assert abs(float(state["exp_avg_sq"].mean()) / state["noise"] - 1) < 0.02


def test_bfloat16_parameters_keep_their_moments_in_float32(tmp_path):
    ours = parameters(torch.bfloat16)
    optimizer = DPAdamW(ours, lr=0.1)
    stepped(optimizer, ours, gradients(2), [0.1, 0.1])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which casts to bfloat16
    stepped(optimizer, ours, gradients(2), [0.1, 0.1])
    assert all(p.dtype == torch.bfloat16 and optimizer.state[p]["exp_avg_sq"].dtype == torch.float32 for p in ours)


def test_it_goes_on_from_its_state():
    whole, resumed = parameters(), parameters()
    variances = [0.5, 0.1, 2.0, 0.9, 0.0, 0.4]
    expected = stepped(DPAdamW(whole), whole, gradients(), variances)[-1]
    first = DPAdamW(resumed)
    stepped(first, resumed, gradients()[:3], variances[:3])
    second = DPAdamW(resumed)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    stepped(second, resumed, gradients()[3:], variances[3:])
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected, strict=True))


def test_gradients_of_nobody_are_refused():
    [p, *_] = parameters()
    p.grad = torch.randn_like(p)
    with pytest.raises(ValueError, match="DPAdamW needs gradients that a private step released"):
        DPAdamW([p]).step()


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"eps": math.nan}, {"floor": -0.1}, {"betas": (1.0, 0.9)}])
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="must"):
        DPAdamW(parameters(), **options)


@pytest.mark.parametrize("noise", NOISE, ids=lambda noise: noise.kind)
def test_correlated_noise_has_the_deviation_that_it_says(noise):
    """That of a row of C⁻¹, which is drawn here."""
    coefficients = np.ones(1) if noise.kind == "independent" else inverse(noise.strategy(8), 8)
    drawn = np.random.default_rng(0).standard_normal((8, 200_000))
    for t in range(8):
        rows_of = coefficients[: t + 1]
        noised = rows_of @ drawn[t - len(rows_of) + 1 : t + 1][::-1]
        assert noise.relative_std(t) == pytest.approx(noised.std(), rel=0.01)
    if noise.kind == "banded_inverse":
        assert noise.relative_std(0) == 1 and noise.relative_std(5) ** 2 == pytest.approx(1 + 0.9**2)


class Variances(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append({noise_variance(p.grad) for p in model.parameters()})


@pytest.mark.parametrize("noise", NOISE[:3], ids=lambda noise: noise.kind)
def test_both_loops_say_it(tmp_path, noise):
    sampling = PoissonSampling(40, 8) if noise.kind == "independent" else FixedOrderSampling(40, 8)
    made = Mechanism(sampling=sampling, clipping=FlatClipping(0.5), noise=noise, steps=5)
    watch = Variances()
    by_trainer(tmp_path, made, watch).train()
    expected = [(0.5 / 8 * noise.relative_std(t)) ** 2 for t in range(5)]
    assert all(len(each) == 1 for each in watch.seen)
    assert [each.pop() for each in watch.seen] == pytest.approx(expected)
    _, model, optimizer, loader = by_engine(made, optimizer_class=DPAdamW)
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append(noise_variance(next(model.parameters()).grad))
    assert seen == pytest.approx(expected)
    b2 = 0.999
    phi = sum((1 - b2) * b2 ** (4 - t) * variance for t, variance in enumerate(expected))
    assert optimizer.state[next(model.parameters())]["noise"] == pytest.approx(phi)
