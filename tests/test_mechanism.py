"""The mechanism as a value: what it costs, what it refuses, JSON, and parts that a user wrote."""

import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import dp_accounting as dp
import numpy as np
import pytest
import torch
from mechanisms import Automatic, Capped, EverybodyInTurn, GrowingBatches, Halving, OverTwoSteps

from dp_transformers.mechanism.accounting import (
    calibrate_noise_multiplier,
    compute_epsilon,
    event_epsilon,
    group_epsilon,
)
from dp_transformers.mechanism.accounting.events import phases_epsilon
from dp_transformers.mechanism.clipping_functions import ClippingFunction, FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit, Release
from dp_transformers.mechanism.noise import IndependentNoise
from dp_transformers.mechanism.sampling import PoissonSampling
from dp_transformers.mechanism.values import StepParameters

pytestmark = pytest.mark.whole

DELTA = 1e-5


def mechanism(**changes):
    parts = {"sampling": PoissonSampling(1000, 50), "clipping": FlatClipping(0.5), "noise": IndependentNoise(1.0), "steps": 30}  # fmt: skip
    return Mechanism(**{**parts, **changes})


PARTS = [
    {},
    {"steps": None, "releases": (Release("loss", 2.0, 5.0), Release("count", 1.0, 3.0)), "unit": PrivacyUnit(4)},
    {"sampling": EverybodyInTurn(1000, 50), "noise": OverTwoSteps(1.0)},
    {"sampling": Capped(1000, 50, 80), "clipping": Automatic(0.5)},
    {"sampling": GrowingBatches(1000, 50, 10), "noise": Halving(1.0, 20)},
]


@pytest.mark.parametrize("parts", PARTS, ids=range(len(PARTS)))
def test_json(parts):
    first = mechanism(**parts)
    text = json.dumps(first.to_dict(), allow_nan=False)
    again = Mechanism.from_dict(json.loads(text))
    assert again == first and hash(again) == hash(first) and json.dumps(again.to_dict()) == text
    assert replace(again, noise=replace(again.noise, noise_multiplier=1.0001)) != first
    with pytest.raises(AttributeError):
        again.steps = 3


def test_what_json_says_must_be_all_there_and_known():
    data = mechanism().to_dict()
    for part in data:
        with pytest.raises(ValueError, match=part):
            Mechanism.from_dict({name: value for name, value in data.items() if name != part})
    with pytest.raises(ValueError, match=r"no Sampling of kind 'flat' is defined; there are \[.*'capped', "):
        Mechanism.from_dict({**data, "sampling": data["clipping"]})
    with pytest.raises(ValueError, match="Noise of kind 'independent'.*colour"):
        Mechanism.from_dict({**data, "noise": {**data["noise"], "colour": "pink"}})


def test_epsilon_is_that_of_the_functions_of_accounting():
    plain = mechanism()
    assert plain.epsilon(DELTA) == compute_epsilon(1.0, 0.05, 30, DELTA)
    assert plain.epsilon(DELTA, accountant="rdp") == compute_epsilon(1.0, 0.05, 30, DELTA, "rdp")
    assert plain.epsilon(DELTA, rows=3) == group_epsilon([(1.0, 0.05, 30)], 3, DELTA)
    assert plain.epsilon(DELTA, executed=[]) == 0.0
    assert plain.epsilon(DELTA, executed=[plain.planned(0, 10), Counter(), plain.planned(10, 20)]) == plain.epsilon(
        DELTA
    )
    assert mechanism(noise=IndependentNoise(0.0)).epsilon(DELTA) == math.inf


def test_calibrated_and_affordable_steps():
    found = mechanism().calibrated(target_epsilon=2.0, target_delta=DELTA)
    assert found.noise.noise_multiplier == calibrate_noise_multiplier(2.0, DELTA, 0.05, 30)
    assert found.affordable_steps(target_epsilon=2.0, delta=DELTA, limit=30) == 30
    steps = mechanism().affordable_steps(
        target_epsilon=2.0, delta=DELTA, limit=10**4, executed=[mechanism().planned(0, 7)]
    )
    assert compute_epsilon(1.0, 0.05, steps + 7, DELTA) <= 2.0 < compute_epsilon(1.0, 0.05, steps + 8, DELTA)
    group = mechanism(unit=PrivacyUnit(3)).calibrated(target_epsilon=2.0, target_delta=DELTA)
    assert group.noise.noise_multiplier == calibrate_noise_multiplier(2.0, DELTA, 0.05, 30, rows=3)
    with pytest.raises(ValueError, match="give the mechanism steps="):
        mechanism(steps=None).calibrated(target_epsilon=2.0, target_delta=DELTA)
    with pytest.raises(ValueError, match="out of reach for 30 steps"):
        mechanism(sampling=PoissonSampling(50, 50)).calibrated(target_epsilon=1e-7, target_delta=1e-9)


def test_releases_are_paid_for():
    """Several Gaussian sums over one draw are one Gaussian sum, whose precision is the sum of theirs."""
    with_loss = mechanism(releases=(Release("loss", 2.0, 3.0),))
    joint = (1 + 1 / 9) ** -0.5
    assert with_loss.epsilon(DELTA) == compute_epsilon(joint, 0.05, 30, DELTA) > mechanism().epsilon(DELTA)
    found = with_loss.calibrated(target_epsilon=1.5, target_delta=DELTA)
    assert 1.498 < found.epsilon(DELTA) <= 1.5
    assert found.noise.noise_multiplier > calibrate_noise_multiplier(1.5, DELTA, 0.05, 30)


def test_schedules_are_composed_step_by_step():
    scheduled = mechanism(sampling=GrowingBatches(1000, 50, 10), noise=Halving(1.6, 20))
    assert scheduled.epsilon(DELTA) == phases_epsilon([(1.6, 0.05, 10), (1.6, 0.1, 10), (0.8, 0.1, 10)], DELTA)
    assert scheduled.at(25) == StepParameters(0.1, 100, 0.8, 0.5) and scheduled.at(25).noise_std == 0.4
    assert scheduled.planned(15, 10) == {StepParameters(0.1, 100, 1.6, 0.5): 5, StepParameters(0.1, 100, 0.8, 0.5): 5}
    assert scheduled.costliest(30) == StepParameters(0.1, 100, 0.8, 0.5)
    steps = scheduled.affordable_steps(target_epsilon=2.0, delta=DELTA, limit=30)
    assert (
        scheduled.epsilon(DELTA, executed=[scheduled.planned(0, steps)])
        <= 2.0
        < scheduled.epsilon(DELTA, executed=[scheduled.planned(0, steps + 1)])
    )


def test_other_events_are_accounted_for_by_dp_accounting():
    # 300 steps of the reference with a cap far above the mean, where the tight bound is Poisson's
    capped = mechanism(sampling=Capped(10_000, 500, 608), noise=IndependentNoise(2.0), steps=500)
    assert capped.epsilon(DELTA) == pytest.approx(2.5324, rel=1e-3)
    with pytest.raises(ValueError, match="'rdp' has no bound.*TruncatedSubsampledGaussian.*replace_special"):
        capped.epsilon(DELTA, accountant="rdp")
    in_turn = mechanism(sampling=EverybodyInTurn(1000, 50), steps=60)
    assert in_turn.epsilon(DELTA) == compute_epsilon(1.0, 1.0, 3, DELTA)


def test_phases_are_found_in_nested_events():
    step = dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.0))
    nested = dp.ComposedDpEvent(
        [dp.SelfComposedDpEvent(dp.ComposedDpEvent([step, step]), 5), dp.NoOpDpEvent(), dp.SelfComposedDpEvent(step, 20)],
    )  # fmt: skip
    assert event_epsilon(nested, DELTA) == compute_epsilon(1.0, 0.05, 30, DELTA)
    with pytest.raises(ValueError, match="groups of 2 rows"):
        event_epsilon(nested, DELTA, relation="replace_special", rows=2)


@dataclass(frozen=True)
class Shuffled(PoissonSampling):
    kind: ClassVar[str] = "shuffled"

    def event(self, steps):
        return dp.UnsupportedDpEvent()


class Swapped(PoissonSampling):
    kind: ClassVar[str] = "swapped"
    relation: ClassVar[str] = "swap"


@dataclass(frozen=True)
class Shrinking(ClippingFunction):
    kind: ClassVar[str] = "shrinking"
    bound: float

    @property
    def sensitivity(self):
        return self.bound

    def at(self, step):
        return FlatClipping(self.bound / (1 + step))


@pytest.mark.parametrize(
    ("parts", "message"), [
        (
            {"noise": OverTwoSteps(1.0)},
            "'over two steps' is correlated over 2 steps.*'poisson' an example may take part again after 1: "
            ".*independent noise",
        ),
        ({"sampling": EverybodyInTurn(1000, 50), "noise": OverTwoSteps(1.0), "clipping": Shrinking(1.0)}, "needs one clipping bound"),
        (
            {"sampling": Shuffled(1000, 50)},
            r"no accountant \(pld, rdp\) .* sampling 'shuffled' with noise 'independent', .*UnsupportedDpEvent.* by '"
            "add_or_remove_one'. Let event.*or take PoissonSampling",
        ),
        ({"sampling": Swapped(1000, 50)}, r"relation 'swap' is unknown; .*one of \[.*'add_or_remove_one'"),
        ({"sampling": Capped(1000, 50, 80), "unit": PrivacyUnit(2)}, "groups of 2 rows"),
        ({"sampling": "poisson"}, "sampling must be a Sampling"),
        ({"noise": 1.0}, "noise must be a Noise"),
        ({"clipping": 1.0}, "clipping must be a ClippingFunction"),
        ({"steps": 0}, "steps must be"),
    ], ids=range(9),
)  # fmt: skip
def test_refusals(parts, message):
    with pytest.raises(ValueError, match=message):
        mechanism(**parts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PoissonSampling(10, 11),
        lambda: PoissonSampling(10, 0),
        lambda: FlatClipping(0.0),
        lambda: FlatClipping(math.inf),
        lambda: IndependentNoise(-1.0),
        lambda: IndependentNoise("1"),
        lambda: PrivacyUnit(0),
        lambda: Release("loss", 1.0, 0.0),
    ],
)
def test_parts_refuse_what_they_cannot_be(make):
    with pytest.raises(ValueError, match="must|needs"):
        make()


def test_coefficients():
    norms = torch.tensor([0.1, 0.5, 2.0, 0.0])
    assert FlatClipping(0.5).coefficients(norms).tolist() == [1.0, 1.0, 0.25, 1.0]
    for function in (FlatClipping(0.5), Automatic(0.5)):
        assert (function.coefficients(norms) * norms <= function.sensitivity).all()


def test_draws_go_on_where_they_are_told_to():
    sampling = EverybodyInTurn(8, 2)
    whole = list(itertools.islice(sampling.draws(np.random.default_rng(1), 0), 9))
    later = list(itertools.islice(sampling.draws(np.random.default_rng(1), 5), 4))
    assert [x.tolist() for x in whole[5:]] == [x.tolist() for x in later]
    assert sorted(np.concatenate(whole[:4]).tolist()) == list(range(8))
