"""Truncated draws, random allocation and balls in bins in both loops: who takes part, what it costs, also resumed."""

from collections import Counter

import pytest
from test_mechanism_in_loops import (
    DELTA,
    EXPECTED,
    LOOPS,
    STEPS,
    N,
    Stop,
    by_engine,
    by_trainer,
    mechanism,
    step_through,
    train,
)

from dp_transformers.mechanism.sampling import (
    BallsInBinsSampling,
    DrawSampler,
    RandomAllocationSampling,
    TruncatedPoissonSampling,
)

PASS = N // EXPECTED
FRESH, PERSISTENT = RandomAllocationSampling(N, PASS), BallsInBinsSampling(N, PASS)
CAPPED = TruncatedPoissonSampling(N, EXPECTED, 12)


@pytest.fixture
def drawn(monkeypatch):
    """The examples of each draw, as they come."""
    draws, draw = [], DrawSampler.draw

    def noted(sampler):
        draws.append(draw(sampler))
        return draws[-1]

    monkeypatch.setattr(DrawSampler, "draw", noted)
    return draws


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("sampling", [CAPPED, FRESH, PERSISTENT], ids=lambda sampling: sampling.kind)
def test_it_trains_and_costs_what_the_mechanism_says(tmp_path, loop, sampling, drawn):
    given = mechanism(sampling=sampling)
    spent, gradients = train(loop, tmp_path, given)
    assert len(gradients) == STEPS and spent.mechanism == given and spent.private
    assert spent.epsilon == given.epsilon(DELTA) and spent.neighboring_relation == sampling.relation
    sizes = [len(draw.indices) for draw in drawn]
    if sampling is CAPPED:
        assert max(sizes) <= 12
    else:
        for start in range(0, STEPS, PASS):
            once = Counter(i for draw in drawn[start : start + PASS] for i in draw.indices)
            assert once == Counter(range(N))


@pytest.mark.parametrize("sampling", [FRESH, PERSISTENT], ids=lambda sampling: sampling.kind)
def test_a_run_that_is_resumed_within_a_pass_pays_for_another(tmp_path, sampling, drawn):
    """Who was drawn is not written, so an example may be drawn again in the pass that is gone on with. The draws that
    Trainer skips belong to no pass: else a pass would end early, and two of them would lie in steps that pay for one.
    """
    given = mechanism(sampling=sampling)
    by_trainer(tmp_path, given, Stop(3), save_strategy="steps", save_steps=3).train()
    trainer = by_trainer(tmp_path, given)
    drawn.clear()
    trainer.train(resume_from_checkpoint=True)
    parts = [given.planned(0, 3), given.planned(3, STEPS - 3)]
    spent = trainer.privacy_spent()
    assert spent.steps == STEPS and spent.epsilon == given.epsilon(DELTA, executed=parts) > given.epsilon(DELTA)
    used = drawn[-(STEPS - 3) :]
    assert [draw.number for draw in used] == list(range(3, STEPS)), "three were skipped"
    assert Counter(i for draw in used[:PASS] for i in draw.indices) == Counter(range(N)), "a new pass"


@pytest.mark.parametrize("sampling", [FRESH, PERSISTENT], ids=lambda sampling: sampling.kind)
def test_an_engine_stops_where_the_first_draw_is_left_out(sampling):
    """Workers load ahead, and what they loaded is lost with the loader's iterator, so that the first step would be
    somewhere inside a pass."""
    engine, model, optimizer, loader = by_engine(mechanism(sampling=sampling))
    next(iter(loader))
    engine.drop_draw()
    with pytest.raises(ValueError, match=rf"draws 0 to 0 were left out.*sampling '{sampling.kind}'"):
        step_through(model, optimizer, loader, 1)
    engine.drop_draw()
    engine.detach()


@pytest.mark.parametrize("sampling", [FRESH, PERSISTENT], ids=lambda sampling: sampling.kind)
def test_an_engine_stops_where_a_draw_is_left_out(sampling):
    engine, model, optimizer, loader = by_engine(mechanism(sampling=sampling))
    step_through(model, optimizer, loader, 2)
    for _ in loader:
        break
    engine.drop_draw()
    with pytest.raises(ValueError, match=rf"were left out.*sampling '{sampling.kind}'"):
        step_through(model, optimizer, loader, 1)
