"""Mechanisms in both loops: given whole, with parts that a user wrote, with schedules and samplings, and resumed."""

import hashlib
import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from mechanisms import Automatic, Capped, EverybodyInTurn, Halving, Shifting
from test_resume import DELTA, Classifier, build, rows
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from dp_transformers import DPTrainer, PrivacyEngine, compute_epsilon
from dp_transformers.clipping.coefficients import checked_clipping, coefficients
from dp_transformers.mechanism.accounting.events import phases_epsilon
from dp_transformers.mechanism.clipping_functions import (
    AutomaticClipping,
    FlatClipping,
    PerGroupClipping,
    PerLayerClipping,
)
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit, Release
from dp_transformers.mechanism.noise import IndependentNoise
from dp_transformers.mechanism.sampling import (
    BallsInBinsSampling,
    DrawSampler,
    PoissonSampling,
    RandomAllocationSampling,
    TruncatedPoissonSampling,
)
from dp_transformers.mechanism.values import StepParameters
from dp_transformers.step.ledger import LEDGER_NAME, Ledger, PrivacyStateError

pytestmark = pytest.mark.halved

N, EXPECTED, STEPS, BOUND = 40, 8, 10, 0.7
LOOPS = ("trainer", "engine")


def mechanism(**changes):
    parts = {"sampling": PoissonSampling(N, EXPECTED), "clipping": FlatClipping(BOUND), "noise": IndependentNoise(1.3), "steps": STEPS}  # fmt: skip
    return Mechanism(**{**parts, **changes})


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


class Gradients(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))


def by_trainer(folder, mechanism, *callbacks, **changes):
    options = {"target_epsilon": None, "mechanism": mechanism, "accountant": "pld", "save_total_limit": None, "expected_batch_size": None}  # fmt: skip
    return build(DPTrainer, folder, callbacks, **{**options, "max_steps": -1, **changes})


def by_engine(mechanism, batch_size=EXPECTED, folder=None, secure=False, optimizer_class=torch.optim.SGD, **options):
    model, engine = Classifier(), PrivacyEngine(ledger_dir=folder, secure_rng=secure)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    data = [(torch.tensor(row["x"]), row["labels"]) for row in rows()]
    loader = DataLoader(data, batch_size=batch_size)
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, mechanism=mechanism, self_check=False, **options
    )
    return engine, *made


def step_through(model, optimizer, loader, steps):
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    gradients = []
    for x, y in itertools.islice(batches, steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if next(model.parameters()).grad is not None:  # otherwise there are more batches of this draw
            gradients.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
    return gradients


def train(loop, folder, mechanism):
    """What was spent, and the gradients that were stepped with."""
    if loop == "trainer":
        noted = Gradients()
        trainer = by_trainer(folder, mechanism, noted)
        trainer.train()
        return trainer.privacy_spent(), noted.seen
    engine, *loop = by_engine(mechanism, folder=folder)
    gradients = step_through(*loop, STEPS)
    engine.detach()
    return engine.privacy_spent(DELTA), gradients


def train_and_resume(loop, folder, mechanism):
    """Eight steps, and those after the third once more, from its checkpoint; what was spent, and the ledger's parts."""
    if loop == "trainer":
        by_trainer(folder, mechanism, Stop(8)).train()
        trainer = by_trainer(folder, mechanism, ignore_data_skip=True)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        return trainer.privacy_spent(), Ledger(folder).segments(trainer._run.state.run_id)
    engine, model, optimizer, loader = by_engine(mechanism, folder=folder)
    step_through(model, optimizer, loader, 3)
    engine.save_checkpoint(folder / "c.pt", module=model, optimizer=optimizer)
    step_through(model, optimizer, loader, 5)
    engine.detach()
    engine, model, optimizer, loader = by_engine(mechanism, folder=folder)
    engine.load_checkpoint(folder / "c.pt", module=model, optimizer=optimizer)
    step_through(model, optimizer, loader, STEPS - 3)
    engine.detach()
    return engine.privacy_spent(DELTA), Ledger(folder).segments(engine._loop.run.state.run_id)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_mechanism_is_what_the_flags_say(tmp_path, loop):
    given = mechanism()
    spent, gradients = train(loop, tmp_path, given)
    assert len(gradients) == STEPS and spent.mechanism == given
    assert spent.epsilon == given.epsilon(DELTA) == compute_epsilon(1.3, EXPECTED / N, STEPS, DELTA)
    report = spent.to_dict()
    assert Mechanism.from_dict(json.loads(json.dumps(report))["mechanism"]) == given
    assert (
        report["noise_multiplier"],
        report["max_grad_norm"],
        report["expected_batch_size"],
        report["num_examples"],
    ) == (1.3, BOUND, EXPECTED, N)
    begin, *steps = [json.loads(line) for line in (tmp_path / LEDGER_NAME).read_text().splitlines()]
    assert begin["version"] == 2 and Mechanism.from_dict(begin["mechanism"]) == given
    assert [StepParameters(*(line[name] for name in StepParameters._fields)) for line in steps] == [
        given.at(0)
    ] * STEPS


def test_a_mechanism_and_flags_at_once_or_neither():
    for options in ({"noise_multiplier": 1.3}, {"max_grad_norm": BOUND}, {"max_examples_per_person": 2}):
        with pytest.raises(ValueError, match="is given beside a mechanism"):
            by_engine(mechanism(), **options)
    for options in ({}, {"noise_multiplier": 1.3}, {"max_grad_norm": BOUND}):
        with pytest.raises(ValueError, match="needs noise_multiplier and max_grad_norm, or a mechanism"):
            by_engine(None, **options)


@pytest.mark.parametrize("sampling", [PoissonSampling(N + 1, EXPECTED), PoissonSampling(N, EXPECTED + 1)], ids=str)
def test_a_mechanism_for_other_data_is_refused(tmp_path, sampling):
    with pytest.raises(
        ValueError, match=rf"mechanism is for {sampling.num_examples} rows and an expected batch size of"
    ):
        by_engine(mechanism(sampling=sampling))
    if sampling.num_examples != N:
        with pytest.raises(ValueError, match=f"mechanism is for num_examples={N + 1}, but train_dataset has {N}"):
            by_trainer(tmp_path, mechanism(sampling=sampling))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("releases", "message"),
    [
        ((Release("count", 1.0, 1.0),), r"releases 'loss' and nothing else.*plans \['count'\]"),
        ((Release("loss", 1.0, 1.0),) * 2, r"each once, but the mechanism plans \['loss', 'loss'\]"),
    ],
    ids=["another", "twice"],
)
def test_what_the_step_cannot_do_is_refused(tmp_path, loop, releases, message):
    """Nothing would be as the mechanism says."""
    with pytest.raises(ValueError, match=message):
        train(loop, tmp_path, mechanism(releases=releases))


def test_an_accountant_that_cannot_account_for_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'rdp' has no bound.*Choose another accountant"):
        by_trainer(tmp_path, mechanism(sampling=Capped(N, EXPECTED, 15)), accountant="rdp")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_clipping_function_of_the_users_own_is_what_clips(tmp_path, loop, monkeypatch):
    """C / (norm + γ) of the one example that is drawn, by hand."""
    one = replace(EMPTY, indices=[7])
    monkeypatch.setattr(DrawSampler, "draw", lambda sampler: replace(one, number=next(sampler._number)))
    spent, gradients = train(loop, tmp_path, mechanism(clipping=Automatic(BOUND, 0.3), noise=Shifting(0.0001)))
    model, row = Classifier(), rows()[7]
    torch.nn.functional.cross_entropy(model(torch.tensor([row["x"]])), torch.tensor([row["labels"]])).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = (gradient * BOUND / (gradient.norm() + 0.3) + 0.0001 * BOUND) / EXPECTED
    assert torch.allclose(gradients[0], expected, rtol=1e-5, atol=1e-8)
    assert spent.max_grad_norm == BOUND and spent.mechanism.clipping == Automatic(BOUND, 0.3)


PER_GROUP = PerGroupClipping((("weight", FlatClipping(0.4)), ("", AutomaticClipping(0.3))))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("clipping", [PerLayerClipping(FlatClipping(BOUND)), PER_GROUP], ids=["layers", "groups"])
def test_each_group_has_noise_of_its_own(tmp_path, loop, clipping, monkeypatch):
    """Of which the squares, each over its bound, add up to the noise multiplier that epsilon is computed from."""
    monkeypatch.setattr(DrawSampler, "draw", lambda sampler: replace(EMPTY, number=next(sampler._number)))
    given = mechanism(clipping=clipping, noise=Shifting(1.3))
    spent, gradients = train(loop, tmp_path, given)
    sizes = {name: p.numel() for name, p in Classifier().named_parameters()}
    deviations = dict(zip(sizes, gradients[0].mul(EXPECTED).split(list(sizes.values())), strict=True))
    precision, total, least = 0.0, 0.0, 0.0
    for group in clipping.groups(sizes):
        own = torch.cat([deviations[name] for name in group.names])
        assert torch.allclose(own, own[:1])
        precision += (group.clipping.sensitivity / float(own[0])) ** 2
        total, least = total + float(own.square().sum()), least + group.clipping.sensitivity * len(own) ** 0.5
    assert precision == pytest.approx(1.3**-2) and total == pytest.approx((1.3 * least) ** 2)
    assert spent.epsilon == mechanism().epsilon(DELTA) and spent.max_grad_norm == clipping.sensitivity
    assert Mechanism.from_dict(json.loads(json.dumps(given.to_dict()))) == given
    steps = [json.loads(line) for line in (tmp_path / LEDGER_NAME).read_text().splitlines()][1:]
    assert {line["max_grad_norm"] for line in steps} == {clipping.sensitivity}


@pytest.mark.parametrize("loop", LOOPS)
def test_noise_of_the_users_own_is_what_is_added(tmp_path, loop, monkeypatch):
    monkeypatch.setattr(DrawSampler, "draw", lambda sampler: replace(EMPTY, number=next(sampler._number)))
    _, gradients = train(loop, tmp_path, mechanism(noise=Shifting(1.3)))
    assert len(gradients) == STEPS and all(
        torch.equal(g, torch.full_like(g, 1.3 * BOUND / EXPECTED)) for g in gradients
    ), "all draws are empty"


EMPTY = next(iter(DrawSampler(PoissonSampling(N, EXPECTED), 1, 0)))[0]
EMPTY = replace(EMPTY, indices=[])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_sampling_of_the_users_own_is_what_draws_and_is_accounted_for(tmp_path, loop, drawn):
    spent, _ = train(loop, tmp_path, mechanism(sampling=EverybodyInTurn(N, EXPECTED)))
    passes = [sorted(i for d in drawn[start : start + 5] for i in d.indices) for start in (0, 5)]
    assert passes == [list(range(N))] * 2
    assert spent.epsilon == compute_epsilon(1.3, 1.0, 2, DELTA) and spent.sampling == "in turn"


@dataclass(frozen=True)
class Growing(PoissonSampling):
    """The expected batch size doubles after ``double_at`` steps."""

    kind: ClassVar[str] = "growing in loops"
    double_at: int

    def at(self, step):
        factor = 1 if step < self.double_at else 2
        return factor * self.sample_rate, factor * self.expected_batch_size

    def draws(self, generator, first_step):
        for step in itertools.count(first_step):
            yield np.flatnonzero(generator.random(self.num_examples) < self.at(step)[0])


SCHEDULED = mechanism(sampling=Growing(N, EXPECTED, 4), noise=Halving(4.0, 5))


def epsilon_of(steps):
    """ε of these steps of the plan, one by one."""
    phases = Counter((used.noise_multiplier, used.sample_rate) for used in map(SCHEDULED.at, steps))
    return pytest.approx(phases_epsilon([(*used, count) for used, count in phases.items()], DELTA), rel=1e-12)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("at", [3, 6])
def test_a_schedule_goes_on_where_the_checkpoint_was(tmp_path, at, skip, monkeypatch):
    """Both the draws and the noise, also within an epoch (of 5 steps), whose first draws Trainer skips or not; ε
    counts what each step used."""
    by_trainer(tmp_path, SCHEDULED, Stop(8)).train()
    drawn, draws = [], Growing.draws
    monkeypatch.setattr(
        Growing, "draws", lambda self, generator, first: (drawn.append(first), draws(self, generator, first))[1]
    )
    trainer = by_trainer(tmp_path, SCHEDULED, ignore_data_skip=skip)
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert drawn == ([at] if skip else [at - at % 5, at])  # what is used begins anew, after what Trainer skips
    spent = trainer.privacy_spent()
    assert spent.epsilon == epsilon_of([*range(8), *range(at, STEPS)]) and spent.steps == 8 + STEPS - at
    segments = Ledger(tmp_path).segments(trainer._run.state.run_id)
    assert segments == [SCHEDULED.planned(0, 8), SCHEDULED.planned(at, STEPS - at)]


def test_steps_of_which_the_ledger_does_not_say_what_they_used_are_the_costliest(tmp_path):
    by_trainer(tmp_path, SCHEDULED, Stop(7)).train()
    path = tmp_path / LEDGER_NAME
    lines = path.read_text().splitlines(keepends=True)
    content = "".join(lines[:3]) + lines[3][:20] + "\n"  # the third step's line is torn
    for line in lines[4:]:
        before = hashlib.sha256(content.encode()).hexdigest()
        content += json.dumps({**json.loads(line), "before": before}) + "\n"
    path.write_text(content)
    (tmp_path / "privacy.json").unlink()
    trainer = by_trainer(tmp_path, SCHEDULED, Stop(6))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.privacy_spent().epsilon == epsilon_of([0, 1, 6, 3, 4, 5, 6, 3, 4, 5]), (
        "of the first seven, the last two cost most"
    )


def test_a_budget_knows_what_the_next_steps_cost(tmp_path):
    """Training stops before the step that would exceed the target, by a schedule whose last steps cost most."""
    target = SCHEDULED.epsilon(DELTA, executed=[SCHEDULED.planned(0, 7)]) * 1.001
    trainer = by_trainer(tmp_path, SCHEDULED, target_epsilon=target)
    trainer.train()
    assert trainer.privacy_spent().steps == 7 and trainer.privacy_spent().epsilon <= target


@pytest.mark.table("trainings")
@pytest.mark.parametrize("people", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_training_goes_on_until_the_budget_is_spent(loop, people, tmp_path):
    """Steps are not given: the last is the last that the target has room for, also after a checkpoint."""
    target = (
        mechanism(unit=PrivacyUnit(people)).epsilon(DELTA, executed=[mechanism().planned(0, 7)], rows=people) * 1.001
    )
    spent, length = [], 0
    if loop == "trainer":
        options = {"target_epsilon": target, "noise_multiplier": 1.3, "max_grad_norm": BOUND, "expected_batch_size": EXPECTED,
                   "max_examples_per_person": people, "loss_noise_factor": 1e9}  # fmt: skip
        for callbacks in ([Stop(3)], []):
            trainer = by_trainer(tmp_path, None, *callbacks, **options, num_train_epochs=math.inf, save_steps=3)
            trainer.train(resume_from_checkpoint=bool(spent))
            spent.append(trainer.privacy_spent())
        length = trainer.state.max_steps
        with pytest.raises(ValueError, match="until the budget is spent: give target_epsilon and noise_multiplier"):
            by_trainer(tmp_path / "o", None, **{**options, "target_epsilon": None}, num_train_epochs=math.inf).train()
    else:
        given = {"target_epsilon": target, "target_delta": DELTA}
        for _ in range(2):
            engine, model, optimizer, loader = by_engine(mechanism(steps=None, unit=PrivacyUnit(people)), **given)
            length = len(loader)
            if spent:
                engine.load_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if not spent and number == 2:
                    engine.save_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
                    break
            spent.append(engine.privacy_spent())
            engine.detach()
        with pytest.raises(ValueError, match="one step spends more than target_epsilon=0.01: give more noise"):
            by_engine(mechanism(steps=None), target_epsilon=0.01, target_delta=DELTA)
    assert [each.steps for each in spent] == [3, 7] and length == 7
    assert spent[1].epsilon_per_person <= target


def test_another_mechanism_is_refused_and_another_number_of_steps_is_not(tmp_path):
    given = mechanism(steps=6)
    by_trainer(tmp_path, given).train()
    for other, message in (
        (replace(given, noise=Halving(1.3, 5)), "noise.kind='independent', now it is 'halving'"),
        (replace(given, sampling=Capped(N, EXPECTED, 30)), "sampling.kind='poisson', now it is 'capped'"),
        (replace(given, clipping=FlatClipping(0.8)), "clipping.max_grad_norm=0.7, now it is 0.8"),
        (replace(given, releases=(Release("loss", 1.0, 2.0),)), "releases="),
    ):
        with pytest.raises(PrivacyStateError, match=message):
            by_trainer(tmp_path, other).train(resume_from_checkpoint=True)
    trainer = by_trainer(tmp_path, replace(given, steps=8, unit=PrivacyUnit(2)))
    trainer.train(resume_from_checkpoint=True)
    spent = trainer.privacy_spent()
    assert spent.steps == 8 and spent.mechanism.steps == 8
    assert spent.epsilon == compute_epsilon(1.3, EXPECTED / N, 8, DELTA)
    assert spent.epsilon_per_person == given.epsilon(DELTA, executed=[given.planned(0, 8)], rows=2) > spent.epsilon


@pytest.mark.parametrize("coefficient", [5.0, -5.0])
def test_a_clipping_function_keeps_to_its_sensitivity_also_for_norms_it_was_not_tried_on(coefficient):
    class Sometimes(Automatic):
        kind: ClassVar[str] = f"sometimes {coefficient}"

        def coefficients(self, norms_b):
            return torch.where(norms_b == 3.25, coefficient, super().coefficients(norms_b))

    found = coefficients(torch.tensor([3.25**2, 1.0]), clipping=checked_clipping(Sometimes(BOUND)))
    assert bool(((found.of_sum_b * found.norms_b).abs() <= BOUND * (1 + 1e-6)).all())


PASS = N // EXPECTED
FRESH, PERSISTENT = RandomAllocationSampling(N, PASS), BallsInBinsSampling(N, PASS)
CAPPED = TruncatedPoissonSampling(N, EXPECTED, 12)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("sampling", [CAPPED, FRESH, PERSISTENT], ids=lambda sampling: sampling.kind)
def test_samplings_train_and_cost_what_the_mechanism_says(tmp_path, loop, sampling, drawn):
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
