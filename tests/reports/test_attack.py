"""Ceilings of attacks against those that follow from dp_accounting's own curves, and against the best attack there is."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from scipy import stats

from dp_transformers.reports.recompute import FALSE_ALARMS, ceilings, no_privacy, privacy_curve

pytestmark = pytest.mark.halved

AR = "add_or_remove_one"


def steps(sigma, q, count):
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), count)


def test_the_run_at_epsilon_8():
    event = steps(0.5473, 0.01024, 293)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=1e-3).compose(event)
    assert accountant.get_epsilon(1e-6) == pytest.approx(8, abs=0.01)
    seen = ceilings(privacy_curve(event, AR))
    assert [round(100 * seen[alarms], digits) for alarms, digits in zip(FALSE_ALARMS, (1, 1, 2), strict=True)] == [
        30.1,
        7.8,
        1.99,
    ]


def test_three_gaussians_that_are_one_of_a_standard_deviation():
    """dp_accounting's own test: three with σ = √3 are one with σ = 1, of which Φ(Φ⁻¹(0.1) + 1) = 0.38914 are found."""
    curve = privacy_curve(dp.SelfComposedDpEvent(dp.GaussianDpEvent(math.sqrt(3)), 3), AR)
    assert curve.detection(0.1) == pytest.approx(0.38914, rel=1e-4)


def by_both_distributions(event, relation, alarms, epsilons):
    """The same by dp_accounting alone, on a grid of its own: no test beats a hockey stick."""
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation[relation.upper()], value_discretization_interval=1e-3)
    accountant.compose(event)
    best = 1.0
    for epsilon in epsilons:
        delta = accountant.get_delta(epsilon)
        best = min(best, math.exp(epsilon) * alarms + delta, 1 - (1 - alarms - delta) * math.exp(-epsilon))
    return best


@pytest.mark.table("many evaluations")
@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (steps(1.1, 0.02, 200), AR),
        (dp.SelfComposedDpEvent(dp.GaussianDpEvent(9.0), 40), AR),
        (dp.SelfComposedDpEvent(dp.TruncatedSubsampledGaussianDpEvent(10_000, 0.05, 590, 2.0), 20), "replace_special"),
    ],
    ids=["poisson", "full", "truncated"],
)
def test_against_dp_accounting(event, relation):
    curve = privacy_curve(event, relation)
    for alarms in FALSE_ALARMS:
        exact = by_both_distributions(event, relation, alarms, np.linspace(0, 12, 2401))
        assert exact - 1e-9 <= curve.detection(alarms) <= 1.003 * exact


@pytest.mark.parametrize("sigma", [0.7, 2.0, 8.0])
def test_the_best_attack_on_one_gaussian_reaches_the_ceiling(sigma):
    curve = privacy_curve(dp.GaussianDpEvent(sigma), AR)
    for alarms in FALSE_ALARMS:
        best = stats.norm.cdf(stats.norm.ppf(alarms) + 1 / sigma)
        assert best <= curve.detection(alarms) <= 1.002 * best


def test_simulated_attacks_stay_below():
    """The likelihood ratio of all released sums, which no attacker can do better than."""
    sigma, q, count, runs = 0.8, 0.1, 10, 200_000
    generator = np.random.default_rng(0)

    def scores(member):
        drawn = generator.random((runs, count)) < q if member else 0
        x = generator.normal(size=(runs, count)) * sigma + drawn
        return np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2))).sum(1)

    out, member, curve = scores(False), scores(True), privacy_curve(steps(sigma, q, count), AR)
    for alarms in FALSE_ALARMS:
        detected = (member > np.quantile(out, 1 - alarms)).mean()
        assert 0.9 * curve.detection(alarms) < detected < 1.03 * curve.detection(alarms), "it is nearly the ceiling"


def test_rdp_gives_higher_ceilings():
    event = steps(1.0, 0.01, 500)
    tight, loose = ceilings(privacy_curve(event, AR)), ceilings(privacy_curve(event, AR, "rdp"))
    assert all(tight[alarms] < loose[alarms] < 3 * tight[alarms] for alarms in FALSE_ALARMS)


@pytest.mark.table("many evaluations")
def test_ends():
    assert ceilings(no_privacy()) == dict.fromkeys(FALSE_ALARMS, 1.0)
    nothing = privacy_curve(dp.NoOpDpEvent(), AR)
    assert ceilings(nothing) == pytest.approx({alarms: alarms for alarms in FALSE_ALARMS})
    much = privacy_curve(dp.GaussianDpEvent(0.05), AR)
    assert all(0.99 < detected <= 1 for detected in ceilings(much).values())
    curve = privacy_curve(steps(1.0, 0.1, 30), AR)
    alarms = np.geomspace(1e-6, 1, 50)
    detected = [curve.detection(each) for each in alarms]
    assert np.all(np.diff(detected) >= 0) and np.all(np.array(detected) >= alarms) and detected[-1] == 1
