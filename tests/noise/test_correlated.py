"""Correlated noise as it is drawn: its covariance over steps, what it keeps, who gets the same; what it is worth, and
Monte-Carlo audits of the claim with each sampling."""

import copy
import gc
import itertools
import math
import os
import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toeplitz import brute_force, matrix

from dp_transformers.mechanism.accounting import compute_epsilon
from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit, Release
from dp_transformers.mechanism.noise import BandedInverseNoise, BandedNoise, BufferedNoise, IndependentNoise
from dp_transformers.mechanism.sampling import CyclicPoissonSampling, FixedOrderSampling, PoissonSampling

pytestmark = pytest.mark.whole

STEPS = 12
NOISES = {
    "bands": BandedNoise.optimal(1.0, steps=STEPS, bands=4),
    "bands of any norm": BandedNoise(1.0, (2.0, 0.5, -0.3)),
    "decay": BandedInverseNoise(1.0, (1.0, -0.8)),
    "square root": BandedInverseNoise.square_root(1.0, bands=4),
    "buffers": BufferedNoise(1.0, (0.3, 0.1), (0.9, 0.5)),
    "independent": IndependentNoise(1.0),
}
every_noise = pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
every_correlated = pytest.mark.parametrize("noise", [NOISES[n] for n in NOISES if n != "independent"])


def source_of(noise, shapes, **options):
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    whole, alone = SimpleNamespace(unsharded=lambda p: p), SimpleNamespace(group=None)
    return noise.source(
        SimpleNamespace(parameters=parameters, trainable=SimpleNamespace(shards=whole, parallel=alone)), **options
    )


def drawn(noise, steps, shapes, std=1.0, **options):
    """(steps, coordinates)"""
    source, rows = source_of(noise, shapes, **options), []
    for _ in range(steps):
        grads = [torch.zeros(shape) for shape in shapes]
        source.add_(grads, std)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows).numpy()


def strategy_of(noise, steps=STEPS):
    return matrix(noise.strategy(steps) if hasattr(noise, "strategy") else [1.0], steps)


def deviations(numbers, covariance):
    """Of the estimated covariance over steps from this one, in standard errors of each entry."""
    variances = np.diag(covariance)
    errors = np.sqrt((np.outer(variances, variances) + covariance**2) / numbers.shape[1])
    return np.abs(numbers @ numbers.T / numbers.shape[1] - covariance) / errors


@pytest.mark.parametrize("secure", [False, True])
@every_noise
def test_covariance_over_steps(noise, secure):
    """As designed to 5 standard errors in each of 144 entries; were C wrong by 3% in one coefficient, some entry would
    be off by more."""
    numbers = drawn(noise, STEPS, [(150_000,), (5, 20), (49_900,)], std=0.3, secure=secure) / 0.3
    backward = np.linalg.inv(strategy_of(noise))
    assert deviations(numbers, backward @ backward.T).max() < 5
    for lag in range(4):
        changed = strategy_of(noise) + 0.03 * np.eye(STEPS, k=-lag)
        other = np.linalg.inv(changed)
        assert deviations(numbers, other @ other.T).max() > 6


@every_noise
def test_coordinates_are_independent(noise):
    numbers = drawn(noise, STEPS, [(100_000,), (100_000,)])
    for a, b in ((numbers[:, :100_000], numbers[:, 100_000:]), (numbers[:, :-1], numbers[:, 1:])):
        cross = a @ b.T / a.shape[1]
        errors = np.sqrt(np.outer((a**2).mean(1), (b**2).mean(1)) / a.shape[1])
        assert (np.abs(cross) / errors).max() < 5


@every_correlated
def test_it_is_added_and_sums_are_as_far_off_as_predicted(noise):
    source, total, squares = source_of(noise, [(10_000,)]), 0, []
    for _ in range(40):
        grad = torch.full((10_000,), 5.0)
        source.add_([grad], noise.noise_multiplier)
        total = total + grad - 5
        squares.append(float(total.square().mean()))
    assert math.sqrt(np.mean(squares)) == pytest.approx(noise.prefix_error(40), rel=0.02)


@every_correlated
def test_nobody_else_draws_the_same(noise):
    a, b = drawn(noise, 3, [(1000,)]), drawn(noise, 3, [(1000,)])
    assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 5 / 3000**0.5


@pytest.mark.filterwarnings("ignore:dp_seed")
@every_correlated
def test_a_fixed_seed_is_for_tests(noise):
    first, again = (drawn(noise, 5, [(7,), (3, 2)], dp_seed=3) for _ in range(2))
    assert np.array_equal(first, again) and not np.array_equal(first, drawn(noise, 5, [(7,), (3, 2)], dp_seed=4))


@every_correlated
def test_equal_entropy_gives_equal_noise(noise):
    """As ranks have it that hold replicas of one shard."""
    streams = [noise._stream()(secure=False, entropy=entropy) for entropy in ([5, 6], [5, 6], [6, 5])]
    for _ in range(6):
        tensors = [torch.zeros(1000) for _ in streams]
        for stream, tensor in zip(streams, tensors, strict=True):
            stream.add_([tensor], 1.0)
        assert torch.equal(*tensors[:2])
        assert abs(torch.corrcoef(torch.stack(tensors[1:]))[0, 1]) < 5 / 1000**0.5


@every_correlated
def test_a_source_is_neither_copied_nor_drawn_from_in_a_forked_process(noise):
    source = source_of(noise, [(3,)])
    source.add_([torch.zeros(3)], 1.0)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            copied(source)
    child = os.fork()
    if child == 0:
        try:
            source.add_([torch.zeros(3)], 1.0)
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@every_correlated
def test_the_level_stays(noise):
    source = source_of(noise, [(3,)])
    source.add_([torch.zeros(3)], 1.0)
    with pytest.raises(ValueError, match=r"correlated at standard deviation 1, and this step wants 0.5.*Independent"):
        source.add_([torch.zeros(3)], 0.5)


KEPT = [
    (BandedNoise.optimal(1.0, steps=30, bands=16), 15),
    (NOISES["decay"], 0),
    (BandedInverseNoise.square_root(1.0, bands=16), 0),
    (BufferedNoise.optimal(1.0, steps=30, min_separation=10), 3),
]


@pytest.mark.parametrize(("noise", "copies"), KEPT, ids=["bands", "decay", "square root", "buffers"])
def test_bytes_that_are_kept_between_steps(noise, copies):
    """At any number of steps: so many float32 copies of the gradient."""
    count = 12_347
    source = source_of(noise, [(count,)])

    def held():
        gc.collect()
        return sum(1 for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == (count,))

    for steps in (20, 20):
        for _ in range(steps):
            source.add_([grad := torch.zeros(count)], 1.0)
        del grad
        assert held() == copies


def mechanism(noise, sampling, steps=20, **changes):
    return Mechanism(sampling=sampling, clipping=FlatClipping(1.0), noise=noise, steps=steps, **changes)


@pytest.mark.parametrize("bands", [2, 4, 7])
def test_as_many_bands_as_groups_cost_what_independent_noise_costs(bands):
    noise, sampling = BandedNoise.optimal(1.3, steps=20, bands=bands), CyclicPoissonSampling(1000, 20, 7)
    independent = mechanism(IndependentNoise(1.3), sampling).epsilon(1e-5)
    assert mechanism(noise, sampling).epsilon(1e-5) == pytest.approx(independent, rel=1e-9)
    twice = BandedNoise(2.6, tuple(2 * c for c in noise.coefficients))
    assert mechanism(twice, sampling).epsilon(1e-5) == pytest.approx(independent, rel=1e-9)


@every_correlated
@pytest.mark.parametrize("taken", [1, 4, 5, 12, 13])
def test_a_fixed_order_costs_one_gaussian_with_the_worst_schedule(noise, taken):
    """Also where a run stops before its end."""
    sampling = FixedOrderSampling(40, 8)
    made = mechanism(noise, sampling)
    moved = brute_force(strategy_of(noise, taken), sampling.min_separation)
    one = mechanism(IndependentNoise(1.0 / moved), FixedOrderSampling(40, 40), steps=1)
    steps = made.planned(0, taken)
    if noise is NOISES["bands of any norm"] or noise is NOISES["bands"]:  # as if no column were cut off at the end
        assert made.epsilon(1e-5, executed=[steps]) >= one.epsilon(1e-5) * (1 - 1e-9)
    else:
        assert made.epsilon(1e-5, executed=[steps]) == pytest.approx(one.epsilon(1e-5), rel=1e-9)


@every_correlated
def test_sampling_is_claimed_to_help_bands_alone(noise):
    """Columns of the others overlap, so an example that skipped one of its steps is not hidden as if it had one."""
    separation, rate = 5, 0.25
    in_groups = mechanism(noise, CyclicPoissonSampling(200, 10, separation)).epsilon(1e-5)
    in_order = mechanism(noise, FixedOrderSampling(200, 40)).epsilon(1e-5)
    if isinstance(noise, BandedNoise):
        sigma = 1 / np.linalg.norm(noise.coefficients)
        assert in_groups == pytest.approx(compute_epsilon(sigma, rate, 4, 1e-5), rel=1e-9) and in_groups < in_order
    else:
        assert in_groups == pytest.approx(in_order, rel=1e-9)


@every_correlated
def test_segments_are_composed(noise):
    """What a resumed run costs: no noise of the first segment is taken back in the second."""
    made = mechanism(noise, FixedOrderSampling(40, 8))
    first, second = made.planned(0, 7), made.planned(7, 13)
    moved = [sum(e.count / e.event.noise_multiplier**2 for e in made.event(s).events) for s in (first, second)]
    one = mechanism(IndependentNoise(sum(moved) ** -0.5), FixedOrderSampling(40, 40), steps=1)
    assert made.epsilon(1e-5, executed=[first, second]) == pytest.approx(one.epsilon(1e-5), rel=1e-9)
    alone = made.epsilon(1e-5, executed=[first])
    assert made.epsilon(1e-5, executed=[first, Counter()]) == alone < one.epsilon(1e-5)


@every_correlated
def test_other_releases_are_paid_for_in_every_appearance(noise):
    """One Gaussian mechanism: the squared shifts of gradients and of the other sums add up."""
    made = mechanism(noise, FixedOrderSampling(40, 8), releases=(Release("loss", 1.0, 3.0),))
    taken = 20
    worth = mechanism(noise, FixedOrderSampling(40, 8)).event()
    moved = sum(e.count / e.event.noise_multiplier**2 for e in worth.events) + math.ceil(taken / 5) / 9
    one = mechanism(IndependentNoise(moved**-0.5), FixedOrderSampling(40, 40), steps=1)
    assert made.epsilon(1e-5) == pytest.approx(one.epsilon(1e-5), rel=1e-9)


@every_correlated
def test_what_does_not_go_together_is_refused(noise):
    for sampling in (PoissonSampling(100, 10), CyclicPoissonSampling(100, 10, noise.bands - 1)):
        with pytest.raises(ValueError, match=r"correlated over .* steps.*CyclicPoissonSampling, FixedOrderSampling"):
            mechanism(noise, sampling)
    for sampling in (FixedOrderSampling(100, 10), CyclicPoissonSampling(100, 10, 5)):
        with pytest.raises(ValueError, match=r"groups of 2 rows"):
            mechanism(noise, sampling, unit=PrivacyUnit(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: BandedNoise(-1.0, (1.0,)),
        lambda: BandedNoise(1.0, ()),
        lambda: BandedNoise(1.0, (0.0, 1.0)),
        lambda: BandedNoise(1.0, (1.0, math.nan)),
        lambda: BandedInverseNoise(1.0, (2.0, -1.0)),
        lambda: BandedInverseNoise(math.inf, (1.0, -0.5)),
        lambda: BufferedNoise(1.0, (0.1,), (0.5, 0.6)),
        lambda: BufferedNoise(1.0, (0.1,), (1.0,)),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()


SIGMA, ROUNDS, SEPARATION = 1.0, 3, 4
AUDITED = {name: noise for name, noise in NOISES.items() if name != "bands of any norm"}


def appearances(sampling, steps, examples):
    """(steps, examples) of those that may take part in the first step: whether they did, as the sampling draws."""
    draws = itertools.islice(sampling.draws(np.random.default_rng(1), 0), steps)
    taken = np.zeros((steps, sampling.num_examples), bool)
    for step, indices in enumerate(draws):
        taken[step, indices] = True
    elsewhere = taken[np.arange(steps) % SEPARATION != 0].any(0)
    return taken[:, ~elsewhere][:, :examples]


def losses(noised, C, rate, sigma):
    """log P/Q of what was released to somebody who knows all but whether one example, whose gradient is 1 in all its
    steps, takes part with this rate in every SEPARATION-th step (P) or in none (Q)."""
    steps = len(C)
    eligible = range(0, steps, SEPARATION)
    whitened = C @ noised
    of_subset = []
    for subset in itertools.product([0, 1], repeat=len(eligible)):
        moved = C[:, list(eligible)] @ np.array(subset, float)
        chance = math.prod(rate if bit else 1 - rate for bit in subset)
        if chance:
            exponent = (moved @ whitened - moved @ moved / 2) / sigma**2
            of_subset.append(math.log(chance) + exponent)
    return np.logaddexp.reduce(of_subset)


def both_losses(noise, noised, taken, rate):
    """With and without the example, for somebody who knows the strategy and has measured the noise."""
    C = strategy_of(noise, len(noised))
    sigma = (C @ noised).std()
    return losses(noised + taken, C, rate, sigma), losses(noised, C, rate, sigma)


def estimates(losses_p, losses_q, epsilon):
    """δ at ε in both directions, and the larger of the standard errors."""
    means, errors = [], []
    for losses in (losses_p, -losses_q):
        values = np.maximum(0.0, -np.expm1(epsilon - losses))
        means.append(values.mean())
        errors.append(values.std() / len(values) ** 0.5)
    return max(means), max(errors)


SAMPLINGS = {"fixed": FixedOrderSampling(4 * 300_000, 300_000), "cyclic": CyclicPoissonSampling(4 * 300_000, 120_000, SEPARATION)}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("name", AUDITED)
def test_audit(name, kind):
    """δ estimated from 200,000 runs of the noise and the draws themselves, at three ε: below the claim, and not by
    orders of magnitude, unless the claim leaves out that sampling helps."""
    noise, sampling, runs = AUDITED[name], SAMPLINGS[kind], 200_000
    steps = SEPARATION * ROUNDS
    made = mechanism(noise, sampling, steps=steps)
    taken = appearances(sampling, steps, runs)
    noised = drawn(noise, steps, [(taken.shape[1],)], std=SIGMA)
    rate = getattr(sampling, "rate_in_group", 1.0)
    p, q = both_losses(noise, noised, taken, rate)
    claims_sampling = kind == "fixed" or noise.bands <= 1 or isinstance(noise, BandedNoise)
    for delta in (0.1, 0.03, 0.003):
        epsilon = made.epsilon(delta)
        estimated, error = estimates(p, q, epsilon)
        assert estimated < delta + 5 * error
        assert estimated > 0.5 * delta or not claims_sampling


def test_the_audit_sees_less_noise():
    """The same, with noise that is a tenth too small."""
    noise, sampling = AUDITED["decay"], SAMPLINGS["fixed"]
    made = mechanism(noise, sampling, steps=12)
    taken = appearances(sampling, 12, 200_000)
    noised = drawn(noise, 12, [(taken.shape[1],)], std=0.9 * SIGMA)
    epsilon = made.epsilon(0.03)
    estimated, error = estimates(*both_losses(noise, noised, taken, 1.0), epsilon)
    assert estimated > 0.03 + 5 * error
