"""Schedules of noise, clipping bound and batch size: what each step uses, in both loops, accounted and resumed."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from adversarial import SIZE, Net, adversarial
from mechanisms import Shifting
from oracle import distance, trainable
from scipy import stats
from test_mechanism_in_loops import (
    DELTA,
    EMPTY,
    EXPECTED,
    LOOPS,
    STEPS,
    by_trainer,
    mechanism,
    train,
    train_and_resume,
)

from dp_transformers import PerExampleClipper, compute_epsilon
from dp_transformers.mechanism.accounting.events import phases_epsilon
from dp_transformers.mechanism.clipping_functions import (
    AutomaticClipping,
    ClippingFunction,
    FlatClipping,
    NormalisedClipping,
    PerLayerClipping,
    PerSampleAdaptiveClipping,
    ScheduledClipping,
)
from dp_transformers.mechanism.noise import BandedNoise, Noise, ScheduledNoise
from dp_transformers.mechanism.sampling import CyclicPoissonSampling, DrawSampler, Sampling, ScheduledPoissonSampling
from dp_transformers.mechanism.schedules import (
    ConstantSchedule,
    ExponentialSchedule,
    LinearSchedule,
    Schedule,
    StepSchedule,
)
from dp_transformers.mechanism.values import StepParameters
from dp_transformers.step.ledger import LEDGER_NAME

pytestmark = pytest.mark.halved

SCHEDULES = [ConstantSchedule(), LinearSchedule(0.25, 8), ExponentialSchedule(3.0, 4), StepSchedule(0.5, 3)]
N = 40
ALL = mechanism(
    sampling=ScheduledPoissonSampling(N, EXPECTED, LinearSchedule(2.0, 6)),
    clipping=ScheduledClipping(FlatClipping(0.7), ExponentialSchedule(0.1, STEPS)),
    noise=ScheduledNoise(4.0, StepSchedule(0.5, 4)),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_json(schedule):
    values = [
        (Noise, ScheduledNoise(1.3, schedule)),
        (ClippingFunction, ScheduledClipping(PerLayerClipping(AutomaticClipping(0.7)), schedule)),
        (Sampling, ScheduledPoissonSampling(1000, 8, schedule)),
        (Schedule, schedule),
    ]
    for base, value in values:
        again = base.from_dict(json.loads(json.dumps(value.to_dict())))
        assert again == value and hash(again) == hash(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearSchedule(0.0, 10),
        lambda: ExponentialSchedule(math.inf, 10),
        lambda: StepSchedule(0.5, 0),
        lambda: ScheduledNoise(1.0, 0.5),
        lambda: ScheduledNoise(-1.0, ConstantSchedule()),
        lambda: ScheduledClipping(0.5, ConstantSchedule()),
        lambda: ScheduledClipping(ALL.clipping, ConstantSchedule()),
        lambda: PerLayerClipping(ALL.clipping),
        lambda: ScheduledPoissonSampling(10, 8, LinearSchedule(2.0, 4)).at(2),
    ],
)
def test_what_is_no_schedule_is_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()


def test_a_clipper_takes_the_function_of_a_step():
    clipping = ScheduledClipping(FlatClipping(1.0), StepSchedule(0.5, every=1))
    with pytest.raises(ValueError, match=r"Give PerExampleClipper the function of the first step, clipping\.at\(0\)"):
        PerExampleClipper(Net(), clipping)
    model, found = Net(), []
    for made_with, given in ((clipping.at(0), clipping.at(1)), (FlatClipping(0.5), None)):
        with PerExampleClipper(model, made_with, self_check=False) as clipper:
            model.zero_grad()
            clipper.backward(model(**adversarial(0)), clipping=given)
            found.append([p.grad for p in trainable(model)])
    assert distance(*found) == 0


def test_draws_have_the_rate_of_their_step():
    sampling, count = ScheduledPoissonSampling(30, 6.0, StepSchedule(2.0, every=1)), 4000
    sizes = np.array(
        [[len(d) for d in itertools.islice(sampling.draws(np.random.default_rng(k), 1), 2)] for k in range(count)]
    )
    for column, rate in zip(sizes.T, (0.4, 0.8), strict=True):
        assert stats.binomtest(int(column.sum()), 30 * count, rate).pvalue > 1e-4
        assert column.var() == pytest.approx(30 * rate * (1 - rate), rel=0.15)


def epsilon_of(steps, given=ALL):
    phases = Counter((used.noise_multiplier, used.sample_rate) for used in map(given.at, steps))
    return pytest.approx(phases_epsilon([(*used, count) for used, count in phases.items()], DELTA), rel=1e-9)


def test_epsilon_is_that_of_the_steps_and_knows_no_bound():
    assert ALL.epsilon(DELTA) == epsilon_of(range(STEPS))
    assert ALL.epsilon(DELTA) == replace(ALL, clipping=FlatClipping(5.0)).epsilon(DELTA)
    constant = mechanism(noise=ScheduledNoise(1.3, ConstantSchedule()))
    assert constant.epsilon(DELTA) == compute_epsilon(1.3, EXPECTED / N, STEPS, DELTA)


def test_calibration_scales_the_whole_schedule():
    found = ALL.calibrated(target_epsilon=3.0, target_delta=DELTA)
    assert 2.99 < found.epsilon(DELTA) <= 3.0 and found.noise.schedule == ALL.noise.schedule
    ratios = [found.at(step).noise_multiplier / ALL.at(step).noise_multiplier for step in range(STEPS)]
    assert ratios == pytest.approx([ratios[0]] * STEPS)


def test_correlated_noise_keeps_its_bound():
    with pytest.raises(ValueError, match="needs one clipping bound for all of them, but clipping 'scheduled' changes"):
        mechanism(
            sampling=CyclicPoissonSampling(N, 4, 2),
            noise=BandedNoise(1.0, (0.8, 0.6)),
            clipping=ScheduledClipping(FlatClipping(1.0), LinearSchedule(0.5, 10)),
        )


@pytest.mark.parametrize(
    "function",
    [
        FlatClipping(0.7),
        AutomaticClipping(0.7),
        NormalisedClipping(0.7),
        PerSampleAdaptiveClipping(0.7),
        PerLayerClipping(FlatClipping(0.7)),
        PerLayerClipping(NormalisedClipping(0.7)),
    ],
    ids=str,
)
def test_sensitivity_in_200_adversarial_batches_while_the_bound_moves(function):
    torch.manual_seed(0)
    model, clipping, longest = Net(), ScheduledClipping(function, ExponentialSchedule(1e-3, 199)), 0.0
    with PerExampleClipper(model, clipping.at(0), self_check=False) as clipper:
        for number in range(200):
            bound, sums, now = 0.7 * 1e-3 ** (number / 199), [], clipping.at(number)
            assert now.sensitivity == pytest.approx(bound)
            for weight in (1.0, 0.0):
                weights = torch.ones(SIZE)
                weights[number % SIZE] = weight
                model.zero_grad()
                clipper.backward(model(**adversarial(number)), weights=weights, clipping=now)
                scales = clipper.noise_scales_of(now)
                sums.append([p.grad / s for p, s in zip(trainable(model), scales, strict=True)])
            moved = distance(*sums) / bound
            assert moved <= 1 + 1e-5, number
            longest = max(longest, moved)
    assert longest >= 0.98


@pytest.mark.parametrize("loop", LOOPS)
def test_each_step_clips_noises_and_divides_by_its_own(tmp_path, loop, monkeypatch):
    """One example is in every draw, and is longer than every bound."""
    one = replace(EMPTY, indices=[7])
    monkeypatch.setattr(DrawSampler, "draw", lambda sampler: replace(one, number=next(sampler._number)))
    moving = replace(ALL, noise=ShiftingBySchedule(4.0, StepSchedule(0.5, 4)))
    moving = replace(moving, clipping=ScheduledClipping(NormalisedClipping(0.7), ExponentialSchedule(0.1, STEPS)))
    spent, gradients = train(loop, tmp_path, moving)
    for step, gradient in enumerate(gradients):
        factor = 0.1 ** (step / STEPS)
        noise = 4.0 * 0.5 ** (step // 4) * 0.7 * factor
        divisor = EXPECTED * (1 + min(step / 6, 1.0))
        clipped = gradient.double() * divisor - noise
        assert float(clipped.norm()) == pytest.approx(0.7 * factor, rel=1e-3)
    assert spent.epsilon == epsilon_of(range(STEPS))
    lines = [json.loads(line) for line in (tmp_path / LEDGER_NAME).read_text().splitlines()][1:]
    said = [StepParameters(*(line[name] for name in StepParameters._fields)) for line in lines]
    assert said == list(map(moving.at, range(STEPS))) and len({s.max_grad_norm for s in said}) == STEPS


class ShiftingBySchedule(ScheduledNoise):
    kind = "shifting by schedule"
    source = Shifting.source


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.filterwarnings("ignore:dp_seed")
def test_what_ran_is_accounted_for_across_resume(tmp_path, loop):
    """The second run goes on with the step of the checkpoint; what the first took after it counts too."""
    spent, said = train_and_resume(loop, tmp_path, ALL)
    assert spent.epsilon == epsilon_of([*range(8), *range(3, STEPS)])
    assert said == [Counter(map(ALL.at, range(8))), Counter(map(ALL.at, range(3, STEPS)))]


def test_a_schedule_that_leaves_the_data_set_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="makes the expected batch size 42 in step"):
        by_trainer(tmp_path, replace(ALL, sampling=ScheduledPoissonSampling(N, 6, LinearSchedule(7.0, 6)))).train()
