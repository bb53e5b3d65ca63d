"""Random allocation: the bound against its exact value where that is known, Monte-Carlo values and audits, and who is
drawn."""

import itertools
import math
from collections import Counter

import dp_accounting as dp
import numpy as np
import pytest
from mechanisms import flat_mechanism as mechanism
from scipy import stats

from dp_transformers.mechanism.accounting import compute_epsilon, event_epsilon
from dp_transformers.mechanism.accounting.allocation import RandomAllocationDpEvent, allocation_losses
from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit
from dp_transformers.mechanism.noise import BandedInverseNoise
from dp_transformers.mechanism.sampling import BallsInBinsSampling, RandomAllocationSampling, Sampling
from dp_transformers.mechanism.values import StepParameters
from dp_transformers.reports.recompute import privacy_curve

DELTA = 1e-5


def event(sigma, steps):
    return RandomAllocationDpEvent(dp.GaussianDpEvent(sigma), steps)


def deltas(sigma, steps, epsilon, interval=None):
    """To remove the example, and to add it."""
    losses = allocation_losses(event(sigma, steps), interval or event(sigma, steps).interval)
    return losses._pmf_remove.get_delta_for_epsilon(epsilon), losses._pmf_add.get_delta_for_epsilon(epsilon)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0, 200.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_one_step_is_one_gaussian(sigma, delta):
    exact = dp.get_epsilon_gaussian(sigma, delta)
    assert exact * (1 - 1e-9) <= event_epsilon(event(sigma, 1), delta) <= 1.003 * exact + 1e-9


@pytest.mark.parametrize("sigma", [0.6, 1.5])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_two_steps_by_quadrature(sigma, epsilon):
    """The mean over two independent normals, on a fine grid."""
    z = np.linspace(-9, 9, 4001)
    weight = stats.norm.pdf(z) * (z[1] - z[0])
    x = np.exp(z / sigma - 0.5 / sigma**2)
    ratio = (x[:, None] + x) / 2
    weights = np.outer(weight, weight)
    exact = ((weights * np.maximum(0, ratio - math.exp(epsilon))).sum(), (weights * np.maximum(0, 1 - math.exp(epsilon) * ratio)).sum())  # fmt: skip
    for bound, value in zip(deltas(sigma, 2, epsilon, 0.01), exact, strict=True):
        assert value * (1 - 1e-4) - 1e-9 < bound < 1.003 * value + 1e-7


@pytest.mark.parametrize(
    ("sigma", "epsilon", "remove", "error", "add", "published", "poisson"),
    [(1.0, 1.0, 0.002765, 0.000028, 0.000492, 0.002814, 0.006901), (0.5, 2.0, 0.07329, 0.00021, None, 0.07322, 0.08860)],
)  # fmt: skip
def test_published_monte_carlo_values_of_ten_steps(sigma, epsilon, remove, error, add, published, poisson):
    """With 10⁶ samples, of jax_privacy: to three of their standard errors, and 0.5%; and below the bound of
    dp_accounting after 0.6.0, and what Poisson sampling at the rate 1/10 has."""
    to_remove, to_add = deltas(sigma, 10, epsilon)
    assert remove - 3 * error < to_remove < 1.005 * remove + 3 * error < poisson
    assert to_remove < 1.001 * published and (add is None or to_add == pytest.approx(add, rel=0.01))
    assert compute_epsilon(sigma, 0.1, 10, poisson) == pytest.approx(epsilon, rel=1e-3)


def test_published_monte_carlo_value_of_bins():
    """Of one bin of five in each of four passes with σ = 2, so of one step of five with σ = 1; 3·10⁵ samples."""
    assert deltas(1.0, 5, 1.0) == pytest.approx((0.01373, 0.00677), abs=0.0003)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 10), (0.5, 10), (2.0, 100), (0.7, 7)])
def test_own_monte_carlo_values_in_both_directions(sigma, steps):
    """4·10⁵ samples of the pair itself, at three ε: no bound is 4 standard errors below, none is 2% above."""
    generator, samples = np.random.default_rng(0), 400_000

    def ratio(shift=0.0):
        return np.exp((generator.normal(size=samples) + shift) / sigma - 0.5 / sigma**2) / steps

    rest = sum(ratio() for _ in range(steps - 1))
    without, with_it = rest + ratio(), rest + ratio(1 / sigma)
    for epsilon in (0.2, 0.7, 1.5):
        bounds = deltas(sigma, steps, epsilon)
        for bound, values in zip(
            bounds,
            (np.maximum(0, 1 - math.exp(epsilon) / with_it), np.maximum(0, 1 - math.exp(epsilon) * without)),
            strict=True,
        ):
            error = values.std() / math.sqrt(samples)
            assert values.mean() - 4 * error <= bound <= 1.02 * values.mean() + 4 * error + 1e-9


@pytest.mark.parametrize(
    ("sigma", "steps", "passes", "delta", "expected", "poisson"),
    [(2.0, 10, 10, 1e-6, 2.4265, 2.6750), (1.0, 100, 1, 1e-5, 0.6247, 0.7181), (1.0, 100, 3, 1e-5, 0.9667, 1.0684)],
)
def test_it_is_below_published_bounds_and_poisson_sampling(sigma, steps, passes, delta, expected, poisson):
    """Of dp_accounting after 0.6.0 on a grid of 1e-4, and of 1e-3, where its rounding adds 1%."""
    epsilon = event_epsilon(dp.SelfComposedDpEvent(event(sigma, steps), passes), delta)
    assert 0.985 * expected < epsilon < 1.001 * expected < poisson
    others = {2.0: (2.4323, 2.4498, 2.4770, 2.5563), 1.0: (0.6247, 0.9668)}[sigma]  # on coarser grids, and of opake
    assert all(epsilon < other for other in others if other > expected)
    assert compute_epsilon(sigma, 1 / steps, steps * passes, delta) == pytest.approx(poisson, rel=1e-3)


def test_what_has_no_bound():
    assert event_epsilon(event(0.03, 10), DELTA) == math.inf
    with pytest.raises(ValueError, match="no bound on epsilon for .*replace_one"):
        event_epsilon(event(1.0, 10), DELTA, relation="replace_one")
    with pytest.raises(ValueError, match="'rdp' has no bound"):
        event_epsilon(event(1.0, 10), DELTA, "rdp")
    with pytest.raises(ValueError, match="groups of 2 rows"):
        event_epsilon(event(1.0, 10), DELTA, rows=2)
    assert event_epsilon(event(1.0, 10), DELTA, relation="replace_special") == event_epsilon(event(1.0, 10), DELTA)


def test_it_composes_with_other_events():
    poisson = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0)), 100)
    both = event_epsilon(dp.ComposedDpEvent([poisson, event(1.0, 100)]), DELTA)
    each = [event_epsilon(poisson, DELTA), event_epsilon(event(1.0, 100), DELTA)]
    assert max(each) < both < sum(each)
    curve = privacy_curve(event(1.0, 100), "add_or_remove_one")
    assert 0.01 < curve.detection(0.01) < 0.04


FRESH, PERSISTENT = RandomAllocationSampling(2000, 20), BallsInBinsSampling(2000, 20)
both = pytest.mark.parametrize("sampling", [FRESH, PERSISTENT], ids=["fresh", "persistent"])


def steps_taken(sampling, passes, first_step=0, seed=0):
    """(passes, N): in which step of each pass everybody takes part."""
    found = np.full((passes, sampling.num_examples), -1)
    draws = sampling.draws(np.random.default_rng(seed), first_step)
    for step, indices in enumerate(itertools.islice(draws, passes * sampling.steps_per_pass)):
        each = step // sampling.steps_per_pass
        assert (found[each, indices] == -1).all()
        found[each, indices] = (step + first_step) % sampling.steps_per_pass
    return found


@both
@pytest.mark.parametrize("first_step", [0, 7])
def test_everybody_takes_part_once_in_each_pass(sampling, first_step):
    found = steps_taken(sampling, 4, first_step)
    assert (found >= 0).all()
    assert (found == found[0]).all() == (sampling is PERSISTENT)
    assert not np.array_equal(found, steps_taken(sampling, 4, first_step, seed=1))


@both
def test_steps_are_uniform_and_independent_of_other_examples_and_passes(sampling):
    """χ² over 20 steps, and over pairs of steps: of an example in two passes, and of two neighbours in one. A step with
    a tenth more than its share would be seen."""
    found = steps_taken(sampling, 2 if sampling is PERSISTENT else 12)
    own = found[:1] if sampling is PERSISTENT else found
    assert stats.chisquare(np.bincount(own.ravel(), minlength=20)).pvalue > 1e-4
    neighbours = np.bincount((20 * own[:, :-1] + own[:, 1:]).ravel(), minlength=400)
    assert stats.chisquare(neighbours).pvalue > 1e-4
    if sampling is FRESH:
        again = np.bincount((20 * found[:-1] + found[1:]).ravel(), minlength=400)
        assert stats.chisquare(again).pvalue > 1e-4
        crowded = np.concatenate([found.ravel(), np.full(120, 3)])
        assert stats.chisquare(np.bincount(crowded, minlength=20)).pvalue < 1e-3
    sizes = np.array([np.bincount(row, minlength=20) for row in own])
    assert sizes.std() > 5, "random, as independent choices make them"


@both
def test_costs(sampling):
    for steps, passes in ((1, 1), (20, 1), (21, 2), (60, 3)):
        if sampling is FRESH:
            expected = event_epsilon(dp.SelfComposedDpEvent(event(1.0, 20), passes), DELTA)
        else:
            expected = event_epsilon(event(1.0 / math.sqrt(passes), 20), DELTA)
        assert mechanism(sampling, 1.0, steps).epsilon(DELTA) == expected
    weak, strong = StepParameters(0.05, 100, 1.0, 1.0), StepParameters(0.05, 100, 2.0, 1.0)
    assert sampling.event([(strong, 50), (weak, 10)]) == sampling.event([(weak, 60)])
    found = mechanism(sampling, 1.0, 60).calibrated(target_epsilon=2.0, target_delta=DELTA)
    assert 1.998 < found.epsilon(DELTA) <= 2.0
    first, second = Counter({weak: 25}), Counter({weak: 35})
    resumed = mechanism(sampling, 1.0, 60).epsilon(DELTA, executed=[first, second])
    assert resumed == event_epsilon(dp.ComposedDpEvent([sampling.event(s.items()) for s in (first, second)]), DELTA)


@both
def test_values(sampling):
    assert Sampling.from_dict(sampling.to_dict()) == sampling
    assert (sampling.sample_rate, sampling.expected_batch_size) == (0.05, 100)
    assert sampling.relation == "add_or_remove_one" and sampling.min_separation == 1
    assert mechanism(sampling, 1.0, 5).needs_every_draw
    with pytest.raises(ValueError, match="groups of 3 rows"):
        mechanism(sampling, 1.0, 5, unit=PrivacyUnit(3))
    with pytest.raises(ValueError, match="correlated over"):
        Mechanism(sampling=sampling, clipping=FlatClipping(1.0), noise=BandedInverseNoise(1.0, (1.0, -0.5)))


@pytest.mark.parametrize("made", [RandomAllocationSampling, BallsInBinsSampling])
@pytest.mark.parametrize("steps", [0, 101, 10.0])
def test_what_cannot_be_is_refused(made, steps):
    with pytest.raises(ValueError, match="steps_per_pass must be an int from 1 to num_examples=100"):
        made(100, steps)


@pytest.mark.parametrize("steps", [5, 12, 15], ids=["one pass", "stopped early", "three passes"])
@pytest.mark.parametrize("made", [RandomAllocationSampling, BallsInBinsSampling])
def test_audit(made, steps):
    """δ of 200,000 examples' draws with noise, at three ε, for gradients of 1: below the claim, and above half of it
    (a tenth where the last pass is not finished). With noise that is a tenth smaller it is above."""
    sampling, sigma, examples = made(200_000, 5), 1.0, 200_000
    passes = math.ceil(steps / 5)
    draws = itertools.islice(sampling.draws(np.random.default_rng(1), 0), steps)
    taken = np.zeros((passes * 5, examples))
    for step, indices in enumerate(draws):
        taken[step, indices] = 1
    noise = np.random.default_rng(2).normal(size=taken.shape)

    def losses(released, scale):
        logs = (released - 0.5) / scale**2
        logs[steps:] = 0  # not seen
        logs = logs.reshape(passes, 5, examples)
        logs = logs if made is RandomAllocationSampling else logs.sum(0, keepdims=True)
        return (np.logaddexp.reduce(logs, axis=1) - math.log(5)).sum(0)

    def estimate(epsilon, scale):
        of = [losses(taken + scale * noise, scale), -losses(scale * noise, scale)]
        values = [np.maximum(0, -np.expm1(epsilon - each)) for each in of]
        return max((v.mean(), v.std() / math.sqrt(examples)) for v in values)

    claim = mechanism(sampling, sigma, steps)
    for delta in (0.1, 0.03, 0.003):
        seen, error = estimate(claim.epsilon(delta), sigma)
        assert seen < delta + 5 * error
        assert seen > (0.5 if steps % 5 == 0 else 0.1) * delta
    if steps % 5 == 0:
        seen, error = estimate(claim.epsilon(0.03), 0.85 * sigma)
        assert seen > 0.03 + 5 * error
