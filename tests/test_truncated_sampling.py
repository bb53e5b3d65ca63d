"""Poisson draws with a cap: who is drawn, with stated power, what it costs, and what is said of it."""

import logging
import math

import numpy as np
import pytest
from mechanisms import flat_mechanism as mechanism
from mechanisms import taken
from scipy import stats

from dp_transformers.mechanism.accounting import compute_epsilon
from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit
from dp_transformers.mechanism.noise import BandedInverseNoise
from dp_transformers.mechanism.sampling import PoissonSampling, Sampling, TruncatedPoissonSampling

DELTA = 1e-5


def epsilon(examples, batch, cap, sigma, steps, relation="replace_special"):
    return mechanism(TruncatedPoissonSampling(examples, batch, cap, relation), sigma, steps).epsilon(DELTA)


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (960, 7.23002), (991, 5.59801), (1022, 4.17291), (1053, 2.56330), (1084, 1.06281),
        (1100, 1.0277), (1115, 1.02389), (1130, 1.0238), (1150, 1.0238),
    ],
)  # fmt: skip
def test_a_cap_near_the_mean_of_960_costs_a_lot(cap, expected):
    assert epsilon(100_000, 960, cap, 1.0, 300) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("examples", "batch", "sigma", "steps"), [(100_000, 960, 1.0, 300), (10_000, 500, 2.0, 500)])
def test_five_standard_deviations_above_the_mean_are_free(examples, batch, sigma, steps):
    deviation = math.sqrt(batch * (1 - batch / examples))
    assert examples != 100_000 or deviation == pytest.approx(30.83, abs=0.01)
    cap = math.ceil(batch + 5 * deviation)
    assert TruncatedPoissonSampling(examples, batch, cap).excess(sigma, steps, DELTA) <= 0.001


def test_without_a_cap_it_is_poisson_sampling():
    for steps in (1, 300):
        poisson = compute_epsilon(1.0, 0.05, steps, DELTA)
        assert epsilon(1000, 50, 1000, 1.0, steps) == pytest.approx(poisson, rel=1e-3)
    with pytest.raises(ValueError, match="groups of 3 rows"):
        mechanism(TruncatedPoissonSampling(1000, 50, 90), 1.0, 5, unit=PrivacyUnit(3))


def test_the_cap_that_is_found_is_the_smallest_that_is_free():
    found = TruncatedPoissonSampling.with_free_cap(10_000, 500, noise_multiplier=2.0, steps=500, delta=DELTA)
    assert 560 < found.cap < 590
    smaller = TruncatedPoissonSampling(10_000, 500, found.cap - 1)
    assert found.excess(2.0, 500, DELTA) <= 0.001 < smaller.excess(2.0, 500, DELTA) < 0.002
    assert epsilon(10_000, 500, found.cap, 2.0, 500) == pytest.approx(2.5323, rel=2e-3)
    few = TruncatedPoissonSampling.with_free_cap(20, 18, noise_multiplier=2.0, steps=5, delta=DELTA)
    assert few.cap == 20, "where nothing but N is free"


def test_a_cap_that_costs_is_warned_of(tmp_path, caplog):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from dp_transformers import PrivacyEngine

    costly, free = (TruncatedPoissonSampling(100, 20, cap) for cap in (25, 60))
    assert free.warning(1.0, 5, 1e-3) is None and costly.excess(1.0, 5, 1e-3) > 0.05
    assert TruncatedPoissonSampling(100, 20, 25).warning(0.0, 5, 1e-3) is None, "nothing is private anyway"
    data = TensorDataset(torch.randn(100, 3), torch.arange(100) % 2)
    for sampling in (costly, free):
        model = torch.nn.Linear(3, 2)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            engine = PrivacyEngine()
            engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(data, batch_size=20),
                mechanism=mechanism(sampling, 1.0, 5),
            )
            engine.detach()
        assert ("cap of 25 examples on a draw makes epsilon" in caplog.text) == (sampling is costly)
        assert "replacing it by a row without gradient (not N)" in caplog.text and "truncated_poisson" in caplog.text


def sizes(sampling):
    """The probabilities of 0, 1, ..., cap."""
    chances = stats.binom.pmf(np.arange(sampling.cap + 1), sampling.num_examples, sampling.sample_rate)
    chances[-1] = stats.binom.sf(sampling.cap - 1, sampling.num_examples, sampling.sample_rate)
    return chances


def test_draws_are_uniform_subsets_of_truncated_sizes():
    """Of 20,000 draws: sizes by χ² (a rate of .31 in the place of .3 gives a p-value below 1e-9), inclusion and pairs
    to 5 standard errors (.016 of .29, .013 of .08), and no step knows of the one before."""
    sampling, steps = TruncatedPoissonSampling(30, 9, 11), 20_000
    rows, chances = taken(sampling, steps), sizes(sampling)
    seen = np.bincount(rows.sum(1), minlength=12)
    assert len(seen) == 12 and seen[11] > 0.2 * steps
    assert stats.chisquare(seen[3:], seen[3:].sum() * chances[3:] / chances[3:].sum()).pvalue > 1e-4
    other = sizes(TruncatedPoissonSampling(30, 9.3, 11))
    assert stats.chisquare(seen[3:], seen[3:].sum() * other[3:] / other[3:].sum()).pvalue < 1e-9
    size = np.arange(12)
    rate, pair = chances @ size / 30, chances @ (size * (size - 1)) / (30 * 29)
    assert np.abs(rows.mean(0) - rate).max() < 5 * math.sqrt(rate * (1 - rate) / steps)
    together = rows.T.astype(float) @ rows / steps
    assert np.abs(together[~np.eye(30, dtype=bool)] - pair).max() < 5 * math.sqrt(pair * (1 - pair) / steps)
    again = (rows[:-1] & rows[1:]).mean()
    assert abs(again - rate**2) < 5 * math.sqrt(rate**2 * (1 - rate**2) / (30 * steps))


def test_values():
    sampling = TruncatedPoissonSampling(100, 10.5, 20, "replace_one")
    assert Sampling.from_dict(sampling.to_dict()) == sampling and sampling.sample_rate == 0.105
    assert sampling.min_separation == 1 and not sampling.needs_every_draw
    with pytest.raises(ValueError, match="correlated over"):
        Mechanism(sampling=sampling, clipping=FlatClipping(1.0), noise=BandedInverseNoise(1.0, (1.0, -0.5)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TruncatedPoissonSampling(100, 0, 5), "expected_batch_size must be above 0"),
        (lambda: TruncatedPoissonSampling(100, 10, 0), "cap .* from 1 to num_examples=100.*with_free_cap"),
        (lambda: TruncatedPoissonSampling(100, 10, 101), "cap"),
        (lambda: TruncatedPoissonSampling(100, 10, 20.0), "cap"),
        (lambda: TruncatedPoissonSampling(100, 10, 20, "add_or_remove_one"), "N is public, or PoissonSampling"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def estimates(sampling, sigma, steps, others, epsilons, runs=4000):
    """δ at each ε, in the worse direction, and its standard error: of somebody who knows that each other example's
    gradient is ``others`` and asks whether one's is 1 or null. Every example of a run is asked about in turn."""
    generator, n = np.random.default_rng(3), sampling.num_examples
    rows = taken(sampling, runs * steps).reshape(runs, steps, n)
    without = others * (rows.sum(2, keepdims=True) - rows)
    grid = [(size, inside) for size in range(sampling.cap + 1) for inside in (0, 1) if inside <= size]
    chances = np.array([sizes(sampling)[m] * (m / n if i else 1 - m / n) for m, i in grid])
    places = np.array([[others * (m - i) + i * here for m, i in grid] for here in (1, 0)])

    def losses(released):
        logs = [
            np.log(
                sum(c * np.exp(-((released - x) ** 2) / (2 * sigma**2)) for c, x in zip(chances, place, strict=True))
            )
            for place in places
        ]
        return (logs[0] - logs[1]).sum(1)  # over steps

    noise = sigma * generator.normal(size=rows.shape)
    p, q = losses(without + rows + noise), -losses(without + noise)
    values = [[np.maximum(0, -np.expm1(e - each)).mean(1) for each in (p, q)] for e in epsilons]
    return [max((v.mean(), v.std() / math.sqrt(runs)) for v in both) for both in values]


def test_audit():
    """160,000 runs of the draws themselves. With a cap that is free the claim is reached to 5%. One that is not is
    below its claim, which holds for any values that others have, and whoever takes another's place is seen: more than
    a Poisson draw of the same rate would cost."""
    deltas, steps = (0.1, 0.03, 0.003), 5
    free, costly = (TruncatedPoissonSampling(40, 10, cap) for cap in (20, 4))
    claimed = [mechanism(free, 1.0, steps).epsilon(delta) for delta in deltas]
    for delta, (estimate, error) in zip(deltas, estimates(free, 1.0, steps, 0.0, claimed), strict=True):
        assert 0.95 * delta - 5 * error < estimate < delta + 5 * error
    claimed = [mechanism(costly, 1.0, steps).epsilon(delta) for delta in deltas]
    for others in (0.0, 1.0, -1.0):
        seen = estimates(costly, 1.0, steps, others, claimed)
        assert all(estimate < delta + 5 * error for delta, (estimate, error) in zip(deltas, seen, strict=True))
    assert seen[0][0] > 0.2 * deltas[0]
    untruncated = mechanism(PoissonSampling(40, 4), 1.0, steps).epsilon(0.1)
    ((estimate, error),) = estimates(costly, 1.0, steps, -1.0, [untruncated])
    assert estimate > 0.1 + 5 * error


def test_the_audit_sees_less_noise():
    free = TruncatedPoissonSampling(40, 10, 20)
    ((estimate, error),) = estimates(free, 0.9, 5, 0.0, [mechanism(free, 1.0, 5).epsilon(0.03)])
    assert estimate > 0.03 + 5 * error
