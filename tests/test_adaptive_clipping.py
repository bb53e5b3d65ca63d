"""A clipping bound that follows a quantile of the norms: what it costs, what it moves by, and resuming."""

import json
import math
from collections import Counter
from dataclasses import replace

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
    N,
    by_engine,
    by_trainer,
    mechanism,
    step_through,
    train,
    train_and_resume,
)
from test_resume import rows
from torch import nn

from dp_transformers import PerExampleClipper, compute_epsilon
from dp_transformers.mechanism.clipping_functions import (
    AdaptiveClipping,
    ClippingFunction,
    FlatClipping,
    PerGroupClipping,
    PerLayerClipping,
    ScheduledClipping,
)
from dp_transformers.mechanism.mechanism import Mechanism
from dp_transformers.mechanism.noise import BandedNoise, IndependentNoise
from dp_transformers.mechanism.sampling import CyclicPoissonSampling, DrawSampler
from dp_transformers.mechanism.schedules import ConstantSchedule
from dp_transformers.noise.generators import GaussianNoise
from dp_transformers.step.ledger import LEDGER_NAME
from dp_transformers.step.releases import NoisedShare

pytestmark = pytest.mark.halved

SIGMA = 1.3
ADAPTIVE = AdaptiveClipping(0.7, count_noise=2.0, learning_rate=0.5)
EFFECTIVE = (SIGMA**-2 + 4.0**-2) ** -0.5


@pytest.mark.parametrize(
    ("whole", "count_noise", "on_gradients"),
    [(1.0, 51.2, 1.00004769), (1.0, 10.0, 1.00125235), (1.0, 1.0, 1.15470054), (1.0, 0.55, 2.40039680), (0.5473, 51.2, 0.54730782)],
)  # fmt: skip
def test_count_and_gradient_are_one_gaussian(whole, count_noise, on_gradients):
    """z_Δ = (z⁻² - (2σ_b)⁻²)^(-½) is what is left for the gradient."""
    given = mechanism(clipping=AdaptiveClipping(1.0, count_noise), noise=IndependentNoise(on_gradients))
    assert given.epsilon(DELTA) == pytest.approx(compute_epsilon(whole, EXPECTED / N, STEPS, DELTA), rel=1e-5)
    assert given.epsilon(DELTA) > replace(given, clipping=FlatClipping(1.0)).epsilon(DELTA)


def test_calibration_leaves_the_noise_of_the_count():
    found = mechanism(clipping=AdaptiveClipping(1.0, 1.0)).calibrated(target_epsilon=2.0, target_delta=DELTA)
    alone = mechanism().calibrated(target_epsilon=2.0, target_delta=DELTA).noise.noise_multiplier
    assert 1.997 < found.epsilon(DELTA) <= 2.0 and found.clipping == AdaptiveClipping(1.0, 1.0)
    assert found.noise.noise_multiplier == pytest.approx((alone**-2 - 2.0**-2) ** -0.5, rel=5e-3)
    with pytest.raises(ValueError, match="out of reach"):  # the count alone costs more
        mechanism(clipping=AdaptiveClipping(1.0, 0.1)).calibrated(target_epsilon=2.0, target_delta=DELTA)


def test_json():
    again = ClippingFunction.from_dict(json.loads(json.dumps(ADAPTIVE.to_dict())))
    assert again == ADAPTIVE and hash(again) == hash(ADAPTIVE)
    given = mechanism(clipping=ADAPTIVE)
    assert Mechanism.from_dict(json.loads(json.dumps(given.to_dict()))) == given


@pytest.mark.parametrize(
    "make", [
        lambda: AdaptiveClipping(1.0, 0.0),
        lambda: AdaptiveClipping(0.0, 1.0),
        lambda: AdaptiveClipping(1.0, 1.0, quantile=1.0),
        lambda: AdaptiveClipping(1.0, 1.0, learning_rate=math.inf),
        lambda: PerLayerClipping(ADAPTIVE),
        lambda: PerGroupClipping((("", ADAPTIVE),)),
        lambda: ScheduledClipping(ADAPTIVE, ConstantSchedule()),
        lambda: mechanism(sampling=CyclicPoissonSampling(N, 4, 2), noise=BandedNoise(1.0, (0.8, 0.6)), clipping=ADAPTIVE),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(make):
    with pytest.raises(ValueError, match="must be|needs one clipping bound"):
        make()


def test_the_bound_goes_to_the_quantile():
    generator = torch.Generator().manual_seed(0)
    for quantile in (0.5, 0.9):
        clipping = AdaptiveClipping(100.0, 1.0, quantile=quantile)
        for _ in range(300):
            norms = torch.randn(2000, generator=generator).exp()
            clipping = clipping.moved(float((norms <= clipping.max_grad_norm).float().mean()))
        assert clipping.max_grad_norm == pytest.approx(math.exp(stats.norm.ppf(quantile)), rel=0.05)
    for share, limit in ((-1e9, 1e10), (1e9, 1e-10)):
        assert AdaptiveClipping(1.0, 1.0).moved(share).max_grad_norm == pytest.approx(limit), "a bound stays a number"


def test_the_count_has_the_noise_that_is_accounted_for():
    with PerExampleClipper(nn.Linear(2, 1), 1.0, self_check=False) as clipper:
        share = NoisedShare(clipper)
        found = []
        for _ in range(2000):
            share.begin_draw()
            share.add(torch.tensor([0.5, 1.0, 1.1, math.inf, math.nan]), 1.0)  # two of five
            found.append(share.release(AdaptiveClipping(1.0, 3.0), 10.0))
    assert stats.kstest(found, "norm", (0.5 - 0.05, 0.3)).pvalue > 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_an_example_moves_sum_and_count_by_their_bounds_while_these_move(seed):
    """50 adversarial batches each, of which one example is taken out."""
    torch.manual_seed(0)
    model, clipping, longest = Net(), AdaptiveClipping(0.7, 2.0, learning_rate=2.0), 0.0
    with PerExampleClipper(model, clipping, self_check=False) as clipper:
        share = NoisedShare(clipper)
        for number in range(50 * seed, 50 * seed + 50):
            batch, sums, counts = adversarial(number), [], []
            rest = torch.arange(SIZE) != number % SIZE
            for own in (batch, {name: x[rest] for name, x in batch.items()}):
                model.zero_grad()
                share.begin_draw()
                share.add(clipper.backward(model(**own), clipping=clipping), clipping.max_grad_norm)
                sums.append([p.grad.clone() for p in trainable(model)])
                counts.append(float(share._sum))
            moved = distance(*sums) / clipping.max_grad_norm
            assert moved <= 1 + 1e-5 and abs(counts[0] - counts[1]) == 0.5
            longest, clipping = max(longest, moved), clipping.moved(share.release(clipping, SIZE))
    assert longest >= 0.99


def bounds_of(folder):
    lines = [json.loads(line) for line in (folder / LEDGER_NAME).read_text().splitlines()]
    return [line["max_grad_norm"] for line in lines if "step" in line]


@pytest.fixture
def released(monkeypatch):
    """The shares that were released, with what was counted and the noise."""
    found, release = [], NoisedShare.release

    def noted(share, clipping, expected):
        found.append((float(share._sum), release(share, clipping, expected)))
        return found[-1][1]

    monkeypatch.setattr(NoisedShare, "release", noted)
    return found


@pytest.mark.parametrize("loop", LOOPS)
def test_each_step_uses_the_bound_that_the_one_before_left(tmp_path, loop, monkeypatch, released):
    monkeypatch.setattr(DrawSampler, "draw", lambda sampler: replace(EMPTY, number=next(sampler._number)))
    spent, gradients = train(loop, tmp_path, mechanism(clipping=ADAPTIVE, noise=Shifting(SIGMA)))
    bounds = bounds_of(tmp_path)
    assert bounds[0] == 0.7 and len(set(bounds)) == len(gradients) == len(released) == STEPS
    for t, (counted, share) in enumerate(released):
        assert counted == 0, "the draw was empty"
        assert torch.allclose(gradients[t], torch.full_like(gradients[t], SIGMA * bounds[t] / EXPECTED))
        if t + 1 < STEPS:
            assert bounds[t + 1] == pytest.approx(bounds[t] * math.exp(-0.5 * (share - 0.5)))
    assert spent.epsilon == pytest.approx(compute_epsilon(EFFECTIVE, EXPECTED / N, STEPS, DELTA))


@pytest.mark.parametrize("loop", LOOPS)
def test_all_examples_of_a_draw_are_counted_once(tmp_path, loop, monkeypatch, released):
    """In physical batches of two and of four; fillers are no examples."""
    seven = replace(EMPTY, indices=[*range(7)])
    monkeypatch.setattr(DrawSampler, "draw", lambda sampler: replace(seven, number=next(sampler._number)))
    monkeypatch.setattr(GaussianNoise, "add_", lambda source, tensors, std: None)
    given = mechanism(clipping=replace(ADAPTIVE, max_grad_norm=1e9, quantile=0.01, learning_rate=20.0), steps=4)
    if loop == "trainer":
        by_trainer(tmp_path, given, per_device_train_batch_size=2).train()
    else:
        engine, *made = by_engine(given, folder=tmp_path, max_physical_batch_size=4)
        step_through(*made, 2 * 4)
        engine.detach()
    assert released[0] == (3.5, 0.5 + 3.5 / EXPECTED), "none is longer than the bound"
    assert bounds_of(tmp_path)[1] == pytest.approx(1e9 * math.exp(-20 * (0.5 + 3.5 / EXPECTED - 0.01)))
    assert len(rows()) == N


@pytest.mark.parametrize("loop", LOOPS)
def test_a_resumed_run_goes_on_with_the_bound_of_its_checkpoint(tmp_path, loop):
    given = mechanism(clipping=ADAPTIVE)
    spent, said = train_and_resume(loop, tmp_path, given)
    bounds = bounds_of(tmp_path)
    first, second = bounds[:8], bounds[8:]
    assert len(second) == STEPS - 3 and second[0] == first[3] != first[0] and second[1] != first[4]
    assert spent.steps == 8 + STEPS - 3
    assert spent.epsilon == pytest.approx(compute_epsilon(EFFECTIVE, EXPECTED / N, spent.steps, DELTA))
    assert said == [Counter(given.at(0)._replace(max_grad_norm=c) for c in part) for part in (first, second)]
