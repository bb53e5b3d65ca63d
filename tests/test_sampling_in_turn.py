"""Sampling in which examples take turns: who is drawn when, with stated power, and what it costs."""

import math
from collections import Counter

import dp_accounting as dp
import numpy as np
import pytest
from mechanisms import flat_mechanism as mechanism
from mechanisms import taken
from scipy import stats

from dp_transformers.mechanism.accounting import compute_epsilon, event_epsilon
from dp_transformers.mechanism.mechanism import PrivacyUnit
from dp_transformers.mechanism.sampling import (
    CyclicPoissonSampling,
    DrawSampler,
    FixedOrderSampling,
    PoissonSampling,
    Sampling,
)
from dp_transformers.mechanism.values import StepParameters

DELTA = 1e-5
CYCLIC = CyclicPoissonSampling(2000, 100, min_separation=5)
FIXED = FixedOrderSampling(103, 20)


def least_separation(rows):
    return min(np.diff(np.flatnonzero(column)).min(initial=len(rows)) for column in rows.T)


@pytest.mark.parametrize("sampling", [CYCLIC, FIXED], ids=["cyclic", "fixed"])
@pytest.mark.parametrize("first_step", [0, 3])
def test_nobody_takes_part_again_too_early(sampling, first_step):
    rows = taken(sampling, 40, first_step=first_step)
    assert least_separation(rows) == sampling.min_separation == 5
    assert rows.sum(0).max() <= math.ceil(40 / 5)


def test_groups_are_as_independent_uniform_choices_make_them():
    """χ² over 5 groups of 2000 (a group of 460 instead of 400 would be seen), and of pairs of neighbours."""
    groups = np.full(2000, -1)
    rows = taken(CYCLIC, 100)
    for step, row in enumerate(rows):
        assert set(groups[row]) <= {-1, step % 5}
        groups[row] = step % 5
    known = groups[groups >= 0]
    assert len(known) > 1950
    assert stats.chisquare(np.bincount(known)).pvalue > 1e-5
    pairs = np.bincount(5 * known[:-1] + known[1:], minlength=25)
    assert stats.chisquare(pairs).pvalue > 1e-5
    assert not np.array_equal(groups, np.arange(2000) % 5)


def test_each_turn_takes_everybody_of_the_group_with_the_same_probability():
    """Sizes and appearances are binomial: 5 standard errors, which a rate of .25 exceeds at .263."""
    rows = taken(CYCLIC, 400)
    assert CYCLIC.rate_in_group == 0.25
    appearances = rows.sum(0)
    assert abs(appearances.mean() - 20) < 5 * math.sqrt(80 * 0.25 * 0.75 / 2000)
    assert stats.kstest(appearances + np.random.default_rng(1).random(2000) - 0.5, _smoothed_binomial).pvalue > 1e-4
    turn = np.array([rows[group::5] for group in range(5)])  # (groups, turns, N)
    for group in range(5):
        members = turn[group].any(0)
        together = turn[group][:, members].astype(float)
        correlation = np.corrcoef(together)  # of one turn with another: who is drawn again
        off = correlation[~np.eye(len(correlation), dtype=bool)]
        assert np.abs(off).max() < 5.5 / math.sqrt(members.sum())


def _smoothed_binomial(x):
    below = np.floor(x + 0.5)
    return stats.binom.cdf(below - 1, 80, 0.25) + (x + 0.5 - below) * stats.binom.pmf(below, 80, 0.25)


def test_a_fixed_order_is_shuffled_once_and_has_one_size():
    rows = taken(FIXED, 12)
    assert (rows.sum(1) == 20).all()
    assert np.array_equal(rows[:5], rows[5:10]) and rows[:5].sum() == 100
    assert (rows[:5].sum(0) == 1).sum() == 100 and (rows.sum(0) == 0).sum() == 3, "three fill no whole batch"
    assert np.array_equal(taken(FIXED, 4, first_step=8), rows[8:])


def test_every_example_is_as_often_at_every_place_of_the_order():
    """Over 3000 shuffles each of 103 examples in each of 5 batches, or left out: 5.5 standard errors."""
    first = np.stack([taken(FIXED, 5, seed) for seed in range(3000)])  # (shuffles, batches, N)
    chances = first.mean(0)
    assert np.abs(chances - 20 / 103).max() < 5.5 * math.sqrt(20 / 103 * 83 / 103 / 3000)
    together = (first[:, 0, :-1] & first[:, 0, 1:]).mean(0)  # neighbours in the data are no neighbours in the order
    chance = 20 / 103 * 19 / 102
    assert np.abs(together - chance).max() < 5.5 * math.sqrt(chance / 3000)


def test_cyclic_costs_poisson_sampling_from_a_group():
    for steps, turns in ((1, 1), (5, 1), (6, 2), (400, 80)):
        assert mechanism(CYCLIC, 1.0, steps).epsilon(DELTA) == compute_epsilon(1.0, 0.25, turns, DELTA)
    one_group = CyclicPoissonSampling(2000, 100, 1)
    assert mechanism(one_group, 1.0, 30).epsilon(DELTA) == mechanism(PoissonSampling(2000, 100), 1.0, 30).epsilon(
        DELTA
    )


def test_a_fixed_order_costs_full_batches():
    for steps, turns in ((1, 1), (5, 1), (6, 2), (30, 6)):
        made = mechanism(FIXED, 2.0, steps)
        assert made.epsilon(DELTA) == compute_epsilon(2.0, 1.0, turns, DELTA)
        closed_form = dp.get_epsilon_gaussian(2.0 / math.sqrt(turns), DELTA)
        assert made.epsilon(DELTA) == pytest.approx(closed_form, rel=1e-9)
        assert made.epsilon(DELTA, accountant="rdp") >= closed_form
    found = mechanism(FIXED, 1.0, 30).calibrated(target_epsilon=2.0, target_delta=DELTA)
    assert 1.998 < found.epsilon(DELTA) <= 2.0


def test_steps_of_several_kinds_cost_as_if_all_were_the_costliest():
    """Of steps in any order an example may take part in the costliest alone."""
    weak, strong = StepParameters(0.05, 100, 1.0, 1.0), StepParameters(0.05, 100, 2.0, 1.0)
    for sampling in (CYCLIC, FIXED):
        event = sampling.event([(strong, 15), (weak, 5)])
        assert event == sampling.event([(weak, 20)]) and event.count == 4
    alternating = Counter({weak: 10, strong: 10})  # with two groups, one group has all the weak ones
    in_pairs = CyclicPoissonSampling(2000, 100, 2)
    assert event_epsilon(in_pairs.event(alternating.items()), DELTA) >= compute_epsilon(1.0, 0.1, 10, DELTA)


def test_nulling_an_example_moves_a_sum_as_adding_it_does():
    """Both relations have the same pair of distributions; dp_accounting agrees, on its own grid."""
    for event in (
        dp.SelfComposedDpEvent(dp.GaussianDpEvent(2.0), 4),
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0)), 50),
    ):
        nulled = event_epsilon(event, DELTA, relation="replace_special")
        assert nulled == event_epsilon(event, DELTA)
        other = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL).compose(event).get_epsilon(DELTA)
        assert nulled == pytest.approx(other, rel=2e-3)
        replaced = event_epsilon(event, DELTA, relation="replace_one")
        assert replaced > 1.2 * nulled


@pytest.mark.parametrize("sampling", [CYCLIC, FIXED], ids=["cyclic", "fixed"])
def test_values(sampling):
    assert Sampling.from_dict(sampling.to_dict()) == sampling
    with pytest.raises(ValueError, match="no bound for groups of 3 rows"):
        mechanism(sampling, 1.0, 5, unit=PrivacyUnit(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CyclicPoissonSampling(100, 21, 5), "each of min_separation=5 groups has 100 / 5 examples"),
        (lambda: CyclicPoissonSampling(100, 0, 5), "above 0"),
        (lambda: CyclicPoissonSampling(100, 10, 0), "must be an int of at least 1"),
        (lambda: CyclicPoissonSampling(100, 10, 2.0), "must be an int of at least 1"),
        (lambda: FixedOrderSampling(100, 101), "from 1 to num_examples=100"),
        (lambda: FixedOrderSampling(100, 0), "from 1 to"),
        (lambda: FixedOrderSampling(100, 10.5), "an int from 1"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_noise_hides_less_which_step_an_example_chose():
    """An example that is in one of 5 steps of each of 4 passes, the same ones, chosen at random: with C = 1, 0, 0, ...
    δ at ε = 1 is .0137, and with the columns of λ = .5, which have the same norm, .0539 (Monte-Carlo values of
    jax_privacy, 3·10⁵ samples): what such a scheme costs is not what it costs with independent noise of the same
    worth."""
    generator, steps, period, sigma = np.random.default_rng(0), 20, 5, 2.0

    def delta(coefficients):
        column = np.array(coefficients) / np.linalg.norm(coefficients)
        C = np.array([[column[t - s] if t >= s else 0.0 for s in range(steps)] for t in range(steps)])
        modes = np.stack([C[:, first::period].sum(1) for first in range(period)])
        chosen = modes[generator.integers(period, size=300_000)]
        released = chosen + sigma * generator.normal(size=(300_000, steps))
        exponents = (released @ modes.T - (modes**2).sum(1) / 2) / sigma**2
        losses = np.logaddexp.reduce(exponents, axis=1) - math.log(period)
        return np.maximum(0, -np.expm1(1 - losses)).mean()

    assert delta(np.eye(1, steps)[0]) == pytest.approx(0.01373, abs=4e-4)
    assert delta(0.5 ** np.arange(steps)) == pytest.approx(0.0539, abs=1e-3)


@pytest.mark.parametrize("sampling", [CYCLIC, FIXED, PoissonSampling(2000, 100)], ids=["cyclic", "fixed", "poisson"])
def test_turns_do_not_begin_anew_behind_a_draw(sampling):
    """Epsilon is that of draws that go on from each other."""
    sampler = DrawSampler(sampling, 5, secret=1)
    sampler.start_at(3)
    assert next(iter(sampler))[0].step == 3
    if isinstance(sampling, PoissonSampling):
        sampler.start_at(0)
        return
    with pytest.raises(ValueError, match="examples take turns"):
        sampler.start_at(0)
