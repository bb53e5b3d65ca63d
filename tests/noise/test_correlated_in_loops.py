"""Correlated noise in both loops: what is stepped with, what it costs, and how such a run goes on."""

from dataclasses import replace

import pytest
import torch
from test_mechanism_in_loops import EMPTY, LOOPS, STEPS, Stop, by_engine, by_trainer, mechanism, step_through, train
from test_resume import DELTA
from torch.utils.data import DataLoader

from dp_transformers import PrivacyEngine
from dp_transformers.mechanism.correlated import ToeplitzNoise
from dp_transformers.mechanism.noise import BandedInverseNoise, BandedNoise, BufferedNoise, IndependentNoise
from dp_transformers.mechanism.sampling import (
    BallsInBinsSampling,
    CyclicPoissonSampling,
    DrawSampler,
    FixedOrderSampling,
    RandomAllocationSampling,
    ScheduledPoissonSampling,
)
from dp_transformers.mechanism.schedules import LinearSchedule
from dp_transformers.step.ledger import Ledger
from dp_transformers.step.startup_message import describe

pytestmark = pytest.mark.halved

N, EXPECTED = 40, 8
IN_ORDER, IN_GROUPS = FixedOrderSampling(N, EXPECTED), CyclicPoissonSampling(N, EXPECTED, 3)
GROWS = ScheduledPoissonSampling(N, EXPECTED, LinearSchedule(2.0, 6))
PAIRS = [
    (IN_ORDER, BandedInverseNoise(1.3, (1.0, -0.9))),
    (IN_ORDER, BandedInverseNoise.square_root(1.3, bands=4)),
    (IN_ORDER, BufferedNoise.optimal(1.3, steps=STEPS, min_separation=5, buffers=2)),
    (IN_GROUPS, BandedNoise.optimal(1.3, steps=STEPS, bands=3)),
]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("sampling", "noise"), PAIRS)
def test_it_trains_and_costs_what_the_mechanism_says(tmp_path, loop, sampling, noise):
    given = mechanism(sampling=sampling, noise=noise)
    spent, gradients = train(loop, tmp_path, given)
    assert len(gradients) == STEPS and spent.mechanism == given and spent.private
    assert spent.epsilon == given.epsilon(DELTA) and spent.neighboring_relation == sampling.relation


@pytest.mark.parametrize("loop", LOOPS)
def test_the_noise_of_a_step_takes_back_that_of_the_step_before(tmp_path, loop, monkeypatch):
    """With z_t - z_(t-1) all that is left of 10 steps is one z: a twentieth of what independent noise leaves."""
    monkeypatch.setattr(DrawSampler, "draw", lambda sampler: replace(EMPTY, number=next(sampler._number)))
    noise = BandedInverseNoise(1.3, (1.0, -1.0))
    _, gradients = train(loop, tmp_path, mechanism(sampling=IN_ORDER, noise=noise))
    left, added = torch.stack(gradients).sum(0).square().sum(), torch.stack(gradients).square().sum()
    assert float(added) > 0 and float(left / added) < 0.15


@pytest.mark.parametrize(
    ("sampling", "words"),
    [(IN_ORDER, "replacing it by a row without gradient (not N) is"), (IN_GROUPS, "adding or removing it is")],
)
def test_the_plan_says_what_is_hidden(sampling, words):
    engine, *_ = by_engine(mechanism(sampling=sampling, noise=IndependentNoise(1.0)))
    run = engine._loop.run
    assert f"(N = 40); {words} hidden." in describe(run, STEPS, engine.clipper)


def test_a_resumed_run_has_a_noise_source_of_its_own_and_is_composed(tmp_path, monkeypatch):
    sources, source = [], ToeplitzNoise.source
    monkeypatch.setattr(
        ToeplitzNoise,
        "source",
        lambda self, *args, **options: sources.append(source(self, *args, **options)) or sources[-1],
    )
    given = mechanism(sampling=IN_ORDER, noise=PAIRS[0][1])
    by_trainer(tmp_path, given, Stop(7)).train()
    trainer = by_trainer(tmp_path, given)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert len(sources) == 2
    segments = Ledger(tmp_path).segments(trainer._run.state.run_id)
    assert [segment.total() for segment in segments] == [7, 4]
    spent = trainer.privacy_spent()
    assert spent.steps == 11 and spent.epsilon == given.epsilon(DELTA, executed=segments)
    secrets = [stream._normal._entropy for it in sources for stream in it._streams.values()]
    assert len(secrets) == 2 and secrets[0] != secrets[1]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert all(str(secret).encode() not in written for (secret,) in secrets)
    assert all(secret.to_bytes(32, order) not in written for (secret,) in secrets for order in ("little", "big"))


@pytest.mark.parametrize("noise", [PAIRS[0][1], PAIRS[2][1], IndependentNoise(1.3)])
def test_an_engine_goes_on_in_a_new_engine_alone(tmp_path, noise):
    """Its source would take back noise of before, which no segment's epsilon covers."""
    given = mechanism(sampling=IN_ORDER, noise=noise)
    engine, model, optimizer, loader = by_engine(given)
    step_through(model, optimizer, loader, 5)
    engine.save_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"has taken draws already, and its noise .* into a new engine"):
        engine.load_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
    engine.detach()
    engine, model, optimizer, loader = by_engine(given)
    engine.load_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
    step_through(model, optimizer, loader, 4)
    composed = given.epsilon(DELTA, executed=[given.planned(0, 5), given.planned(5, 4)])
    assert engine.steps == 9 and engine.get_epsilon(DELTA) == composed


@pytest.mark.parametrize(
    ("sampling", "noise"), [
        PAIRS[0],
        *((each, IndependentNoise(1.3)) for each in (IN_ORDER, IN_GROUPS, RandomAllocationSampling(N, 5), BallsInBinsSampling(N, 5), GROWS)),
    ], ids=["correlated", "in order", "in groups", "random allocation", "balls in bins", "scheduled"],
)  # fmt: skip
def test_an_engine_stops_where_a_draw_is_left_out(sampling, noise):
    engine, model, optimizer, loader = by_engine(mechanism(sampling=sampling, noise=noise))
    step_through(model, optimizer, loader, 2)
    for _ in loader:
        break
    engine.drop_draw()
    with pytest.raises(ValueError, match=r"draws 2 to \d were left out"):
        step_through(model, optimizer, loader, 1)
    assert not mechanism().needs_every_draw


def test_leaving_the_loader_early_gives_nobody_more_turns_than_epsilon_counts():
    """Workers load ahead, so a loop that takes the first batch of every pass would meet draws 0, 5, 10, ...: in each
    of them the same examples."""
    loader = DataLoader([(torch.zeros(3), 0) for _ in range(N)], batch_size=EXPECTED, num_workers=2, prefetch_factor=2)
    model = torch.nn.Linear(3, 2)
    engine, taken = PrivacyEngine(), []
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, mechanism=mechanism(sampling=IN_ORDER),
        self_check=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"draws 1 to \d were left out .* sampling 'fixed_order' "):
        for _ in range(3):
            for x, y in loader:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                taken.append(engine._loop.step.number)
                break
    assert taken == [0] and engine.steps == 1
