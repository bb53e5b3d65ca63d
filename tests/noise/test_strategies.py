"""Coefficients, sensitivities and errors of correlated noise, against published numbers and brute force; and what each
pair of sampling and noise is predicted to leave on the prefix sums."""

import math

import numpy as np
import pytest
from toeplitz import brute_force, matrix

from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism
from dp_transformers.mechanism.noise import BandedInverseNoise, BandedNoise, IndependentNoise
from dp_transformers.mechanism.sampling import CyclicPoissonSampling, FixedOrderSampling, PoissonSampling
from dp_transformers.mechanism.strategies import (
    buffered,
    inverse,
    optimal_bands,
    optimal_buffers,
    optimal_decay,
    prefix_error,
    sensitivity,
    square_root,
)


def test_square_root():
    assert square_root(6) == pytest.approx([1, 0.5, 0.375, 0.3125, 0.2734375, 0.24609375], abs=1e-12)
    assert inverse(square_root(6), 6) == pytest.approx([1, -0.5, -0.125, -0.0625, -0.0390625, -0.02734375], abs=1e-12)
    assert matrix(square_root(9), 9) @ matrix(square_root(9), 9) == pytest.approx(np.tril(np.ones((9, 9))))


def test_banded_inverse_of_the_square_root():
    published = [1, 0.5, 0.375, 0.3125, 0.234375, 0.179688, 0.138672, 0.106445, 0.081787, 0.062866, 0.048309, 0.037125]
    assert BandedInverseNoise.square_root(1.0, bands=4).strategy(12) == pytest.approx(published, abs=1e-6)


def test_buffered():
    assert buffered((0.3, 0.1), (0.9, 0.5), 5) == pytest.approx([1, 0.4, 0.32, 0.268, 0.2312], abs=1e-12)


@pytest.mark.parametrize(
    "coefficients", [square_root(7), [2.0, -1.0], buffered((0.3, 0.1), (0.9, 0.5), 9)], ids=range(3)
)
def test_inverse(coefficients):
    assert matrix(inverse(coefficients, 9), 9) == pytest.approx(np.linalg.inv(matrix(coefficients, 9)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("coefficients", [(1.0, 3.0, 5.0), (1.0, -2.0, 5.0)])
def test_noise_whose_coefficients_overflow_hides_nothing(coefficients, accountant):
    """The inverse grows and changes its sign until it is inf - inf, of which nothing is known."""
    noise = BandedInverseNoise(1.0, coefficients)
    assert np.isnan(noise.strategy(5000)).any()
    assert sensitivity(noise.strategy(5000), 5000, 100) == math.inf
    given = Mechanism(sampling=FixedOrderSampling(1000, 10), clipping=FlatClipping(1.0), noise=noise, steps=5000)
    assert given.epsilon(1e-5, accountant=accountant) == math.inf
    assert given.affordable_steps(target_epsilon=8.0, delta=1e-5, limit=5000, accountant=accountant) < 100


def test_published_sensitivities():
    decaying = 0.9 ** np.arange(12)
    assert sensitivity(decaying, 12, 4) ** 2 == pytest.approx(24.269380674339, rel=1e-12)
    assert sensitivity(square_root(12), 12, 4) ** 2 == pytest.approx(8.407630192629, rel=1e-12)
    normalised = matrix(decaying, 12) / np.linalg.norm(matrix(decaying, 12), axis=0)
    assert brute_force(normalised, 4) ** 2 == pytest.approx(6.0091020266425, rel=1e-12)


@pytest.mark.parametrize("separation", [1, 2, 3, 5, 9])
def test_sensitivity_is_that_of_the_worst_schedule(separation):
    generator = np.random.default_rng(0)
    for _ in range(20):
        falling = np.sort(generator.random(9))[::-1]
        assert sensitivity(falling, 9, separation) == pytest.approx(brute_force(matrix(falling, 9), separation))
        of_any_sign = generator.normal(size=9)
        assert sensitivity(of_any_sign, 9, separation) >= brute_force(matrix(of_any_sign, 9), separation) - 1e-12
    banded = generator.random(separation)
    times = math.ceil(9 / separation)
    assert brute_force(matrix(banded, 9), separation) <= np.linalg.norm(banded) * math.sqrt(times) + 1e-12


def test_one_participation_is_the_norm_of_the_first_column():
    assert sensitivity(square_root(30), 30, 30) == pytest.approx(np.linalg.norm(square_root(30)))


def test_prefix_error():
    """Of A·C⁻¹, where A adds up: the root of the mean squared norm of its rows."""
    c = [1.0, 0.4, 0.1]
    rows = np.tril(np.ones((11, 11))) @ np.linalg.inv(matrix(c, 11))
    assert prefix_error(inverse(c, 11)) == pytest.approx(math.sqrt((rows**2).sum(1).mean()))
    assert IndependentNoise(1.0).noise_multiplier * prefix_error(np.eye(1, 1000)[0]) == pytest.approx(
        22.3719, rel=1e-5
    )


BANDED = [
    (16, 4, [0.794875, 0.438433, 0.329274, 0.259862], 1.93753, 2.91548, 1.505),
    (100, 4, [0.682983, 0.482802, 0.414458, 0.358695], 3.91614, 7.10634, 1.815),
    (100, 8, [0.644142, 0.397148, 0.331926, 0.295695, 0.269752, 0.248327, 0.228529, 0.207572], 3.12533, 7.10634, 2.274),
    (1000, 4, [0.587019, 0.503511, 0.468188, 0.427417], 11.4310, 22.3719, 1.957),
    (1000, 16, [0.474584, 0.316331, 0.278615, 0.259594], 6.27816, 22.3719, 3.563),
    (2000, 32, [0.435266, 0.266654, 0.227090, 0.207973], 6.48264, 31.6307, 4.879),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "bands", "coefficients", "error", "independent", "gain"), BANDED)
def test_optimal_bands(steps, bands, coefficients, error, independent, gain):
    found = optimal_bands(steps, bands)
    assert len(found) == bands and np.linalg.norm(found) == pytest.approx(1)
    assert found[: len(coefficients)] == pytest.approx(coefficients, abs=1e-3)
    assert prefix_error(inverse(found, steps)) == pytest.approx(error, rel=1e-3)
    assert prefix_error(np.eye(1, steps)[0]) == pytest.approx(independent, rel=1e-5)
    assert independent / prefix_error(inverse(found, steps)) == pytest.approx(gain, rel=1e-3)
    for position in range(bands):  # a minimum, to the digits that a difference can show
        for change in (-0.02, 0.02):
            other = found + change * np.eye(bands)[position]
            worse = np.linalg.norm(other) * prefix_error(inverse(other, steps))
            assert worse > prefix_error(inverse(found, steps))


DECAYS = [
    (30, 10, 0.72662, 3.738),
    (100, 100, 0.86761, 2.748),
    (1000, 1000, 0.95625, 4.781),
    (1000, 334, 0.95625, 8.280),
    (1000, 100, 0.95305, 15.249),
    (2000, 200, 0.96829, 17.949),
    (200, 10, 0.82585, 18.295),
]


@pytest.mark.parametrize(("steps", "separation", "decay", "error"), DECAYS)
def test_optimal_decay(steps, separation, decay, error):
    found = optimal_decay(steps, separation)
    c = found ** np.arange(steps)
    assert found == pytest.approx(decay, abs=2e-5)
    assert sensitivity(c, steps, separation) * prefix_error(inverse(c, steps)) == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(("separation", "independent"), [(334, 38.749), (100, 70.746)])
def test_buffers_are_better_than_one_decay(separation, independent):
    assert math.sqrt(math.ceil(1000 / separation)) * prefix_error(np.eye(1, 1000)[0]) == pytest.approx(
        independent, rel=1e-4
    )
    weights, decays = optimal_buffers(1000, separation, 3)
    c = buffered(weights, decays, 1000)
    assert (np.diff(c) <= 0).all() and (c >= 0).all(), "so its sensitivity is exact"
    decay = optimal_decay(1000, separation) ** np.arange(1000)
    found, other = (sensitivity(x, 1000, separation) * prefix_error(inverse(x, 1000)) for x in (c, decay))
    assert found < 0.85 * other


def test_the_noise_of_the_decaying_strategy():
    """Its covariance, and the largest row of C⁻¹ with columns of C that have norm 1."""
    covariance = matrix([1.0, -0.8], 6) @ matrix([1.0, -0.8], 6).T
    expected = np.diag([1.0] + 5 * [1.64]) + np.diag(5 * [-0.8], 1) + np.diag(5 * [-0.8], -1)
    assert covariance == pytest.approx(expected)
    C = matrix(0.95625 ** np.arange(1000), 1000)
    rows = np.linalg.norm(np.linalg.inv(C / np.linalg.norm(C, axis=0)), axis=1)
    assert rows.max() == pytest.approx(4.73, abs=0.005)


def predicted(sampling, noise, steps, epsilon):
    """σ times the error over the number of epochs, and σ."""
    mechanism = Mechanism(sampling=sampling, clipping=FlatClipping(1.0), noise=noise, steps=steps)
    found = mechanism.calibrated(target_epsilon=epsilon, target_delta=1e-6).noise
    error = getattr(found, "prefix_error", lambda n: found.noise_multiplier * math.sqrt((n + 1) / 2))(steps)
    return error / (steps * sampling.sample_rate), found.noise_multiplier


POISSON = [
    (30, 3, 1, 3.560), (30, 3, 8, 1.033),
    (1000, 3, 1, 6.379), (1000, 3, 2, 5.361), (1000, 3, 4, 4.414), (1000, 3, 8, 3.577), (1000, 3, 16, 2.902),
    (1000, 10, 1, 3.498), (1000, 10, 4, 1.742), (1000, 10, 8, 1.380),
    (2000, 10, 2, 2.733), (2000, 10, 8, 1.773),
    (200, 20, 1, 3.079), (200, 20, 8, 0.608),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "epochs", "epsilon", "error"), POISSON)
def test_predicted_with_poisson_sampling(steps, epochs, epsilon, error):
    sampling = PoissonSampling(3000, 3000 * epochs // steps) if steps != 2000 else PoissonSampling(2000, 10)
    assert sampling.sample_rate == pytest.approx(epochs / steps)
    found, sigma = predicted(sampling, IndependentNoise(1.0), steps, epsilon)
    assert found == pytest.approx(error, rel=2e-3)
    if (steps, epochs) == (1000, 3):
        published = {1: 0.8554, 2: 0.7188, 4: 0.5919, 8: 0.4797, 16: 0.3891}
        assert sigma == pytest.approx(published[epsilon], rel=1e-3)


CYCLIC = [
    (30, 3, 1, 2, 3.691, None), (30, 3, 8, 8, 0.826, None),
    (1000, 3, 1, 16, 4.128, None), (1000, 3, 2, 16, 2.689, None), (1000, 3, 4, 32, 1.812, 1.1066),
    (1000, 3, 8, 32, 1.283, 0.7836), (1000, 3, 16, 32, 0.928, 0.5671),
    (2000, 10, 2, 16, 1.931, None), (2000, 10, 8, 64, 0.752, None),
    (200, 20, 1, 2, 3.120, None), (200, 20, 8, 4, 0.549, None),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "epochs", "epsilon", "bands", "error", "sigma"), CYCLIC)
def test_predicted_with_cyclic_sampling_and_bands(steps, epochs, epsilon, bands, error, sigma):
    sampling = CyclicPoissonSampling(100 * steps, 100 * epochs, bands)
    found, its_sigma = predicted(sampling, BandedNoise.optimal(1.0, steps=steps, bands=bands), steps, epsilon)
    assert found == pytest.approx(error, rel=2e-3)
    assert sigma is None or its_sigma == pytest.approx(sigma, rel=1e-3)


def test_published_bound_of_a_cycle():
    """Twenty steps in four groups at σ = 2: five rounds with q = 1/2, δ(1) = 0.02015. Monte Carlo of a cycle that begins
    anywhere is below, at 0.00563 and 0.00112 to remove and to add."""
    noise = BandedNoise(2.0, tuple(np.array([1, 0.5, 0.25, 0.125]) / math.sqrt(1.328125)))
    given = Mechanism(sampling=CyclicPoissonSampling(80, 10, 4), clipping=FlatClipping(1.0), noise=noise, steps=20)
    assert given.epsilon(0.02015) == pytest.approx(1.0, rel=1e-3)
    assert min(given.epsilon(seen) for seen in (0.00563, 0.00112)) > 1.3


FIXED = [
    (30, 10, 1, "decay", 5.264), (30, 10, 8, "decay", 0.814), (30, 10, 1, 4, 5.206), (30, 10, 8, 4, 0.805),
    *[(1000, 334, e, "decay", x) for e, x in zip((1, 2, 4, 8, 16), (11.66, 6.156, 3.294, 1.802, 1.017), strict=True)],
    *[(1000, 334, e, 64, x) for e, x in zip((1, 2, 4, 8, 16), (8.387, 4.428, 2.369, 1.296, 0.732), strict=True)],
    *[(1000, 100, e, "decay", x) for e, x in zip((1, 4, 8), (6.442, 1.820, 0.996), strict=True)],
    *[(1000, 100, e, 64, x) for e, x in zip((1, 4, 8), (5.224, 1.476, 0.807), strict=True)],
    (2000, 200, 2, "decay", 4.003), (2000, 200, 8, "decay", 1.172), (2000, 200, 2, 64, 3.106), (2000, 200, 8, 64, 0.909),
    (200, 10, 1, "decay", 3.864), (200, 10, 8, "decay", 0.597),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "separation", "epsilon", "which", "error"), FIXED)
def test_predicted_with_a_fixed_order(steps, separation, epsilon, which, error):
    sampling = FixedOrderSampling(10 * separation, 10)
    if which == "decay":
        noise = BandedInverseNoise.optimal_decay(1.0, steps=steps, min_separation=separation)
    else:
        noise = BandedInverseNoise.square_root(1.0, bands=which)
    epochs = math.ceil(steps / separation)  # the last of them not whole
    found, sigma = predicted(sampling, noise, steps, epsilon)
    assert found * steps / separation / epochs == pytest.approx(error, rel=2e-3)
    unamplified = {1: 4.2247, 2: 2.2305, 4: 1.1935, 8: 0.6529, 16: 0.3686}[epsilon]
    assert sigma / sensitivity(noise.strategy(steps), steps, separation) == pytest.approx(unamplified, rel=1e-3)
