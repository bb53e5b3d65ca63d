"""What a run counts, says and refuses; groups of rows; the message at its start."""

import json
import math
from types import SimpleNamespace

import dp_accounting
import pytest
from torch import nn, optim

from dp_transformers.mechanism.accounting import calibrate_noise_multiplier, compute_epsilon, group_epsilon
from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit
from dp_transformers.mechanism.noise import IndependentNoise
from dp_transformers.mechanism.sampling import FixedOrderSampling, PoissonSampling
from dp_transformers.step.checkpoint import PrivacyState
from dp_transformers.step.ledger import LEDGER_NAME, Ledger, PrivacyStateError
from dp_transformers.step.run import PrivateRun
from dp_transformers.step.startup_message import describe, hopeless, warnings

pytestmark = pytest.mark.whole

NET = nn.Linear(100, 100)
CLIPPER = SimpleNamespace(
    model=NET, parameters=[NET.weight], mode=SimpleNamespace(name="book_keeping"), asked_mode="auto"
)


def run_of(
    ledger=None, run_id="a", dp_seed=None, rows=1, verified=True, noise_multiplier=1.0, target_epsilon=None, delta=1e-5
):
    mechanism = Mechanism(
        sampling=PoissonSampling(1000, 50), clipping=FlatClipping(1.0), noise=IndependentNoise(noise_multiplier), unit=PrivacyUnit(rows),
    )  # fmt: skip
    state = PrivacyState(run_id, mechanism, delta=delta, target_epsilon=target_epsilon)
    return PrivateRun(state, ledger=ledger, dp_seed=dp_seed, verified=verified)


def spend(run, steps=1):
    for _ in range(steps):
        run.spend_step(run.steps)


def test_what_was_spent():
    run = run_of()
    spend(run, 3)
    spent = run.spent()
    assert spent.epsilon == compute_epsilon(1.0, 0.05, 3, 1e-5) and spent.steps == 3
    assert spent.unit == "one row of the training data (N = 1000)" and spent.private and spent.verified
    assert spent.epsilon_per_person == spent.epsilon
    assert json.loads(json.dumps(spent.to_dict(), allow_nan=False))["private"] is True


def test_a_run_without_a_delta_reports_at_one_that_is_given_and_holds_no_target():
    run = run_of(delta=None)
    spend(run)
    assert run.spent(1e-6).delta == 1e-6
    with pytest.raises(ValueError, match="needs a delta"):
        run.spent()
    with pytest.raises(ValueError, match="needs a delta"):
        run_of(delta=None, target_epsilon=1.0).plan(10)


@pytest.mark.parametrize(
    ("options", "reason"), [({"dp_seed": 3}, "dp_seed=3"), ({"noise_multiplier": 0.0}, "noise_multiplier=0")]
)
def test_what_is_not_private_says_so_everywhere(tmp_path, options, reason):
    ledger = Ledger(tmp_path)
    ledger.open()
    run = run_of(ledger, verified=False, **options)
    assert run.spent().epsilon == 0, "nothing was released yet"
    run.begin()
    spend(run)
    ledger.close()
    spent = run.spent()
    assert spent.epsilon == math.inf and not spent.private and not spent.verified
    assert reason in spent.not_private_because[0]
    written = json.loads(json.dumps(spent.to_dict(), allow_nan=False))
    assert written["epsilon"] is None and written["private"] is False
    line = json.loads((tmp_path / LEDGER_NAME).read_text().splitlines()[0])
    assert line["private"] is False and line["verified"] is False and reason in line["not_private_because"][0]
    said = describe(run, 3, CLIPPER)
    assert said.startswith("NOT PRIVATE, nobody is protected (N = ") and reason in said.splitlines()[0]
    assert "to be spent: epsilon is infinite;" in said and "NOT VERIFIED" in said
    assert "hidden" not in said and "protects" not in said


def test_a_run_stays_what_it_was_when_it_is_resumed_without_its_seed(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.open()
    first = run_of(ledger, dp_seed=3)
    first.begin()
    spend(first)
    second = run_of(ledger)
    second.resume(first.state, first.executed)
    second.begin()
    ledger.close()
    assert not second.spent().private and second.spent().epsilon == math.inf
    assert "dp_seed=3" in second.spent().not_private_because[0]
    other = run_of(Ledger(tmp_path), run_id="b")
    other.resume(other.state, [])
    assert other.spent().private


def test_steps_that_the_ledger_lacks(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.open()
    run = run_of(ledger)
    run.begin()
    spend(run)
    ledger.close()
    with pytest.raises(PrivacyStateError, match="holds 1 steps of this run, which has executed 4 at least.*a backup"):
        run_of(Ledger(tmp_path)).resume(run.state, [run.mechanism.planned(0, 4)])


def test_budget():
    run = run_of(target_epsilon=3.0)
    run.plan(10**4)
    steps = int(run.steps_left)
    assert compute_epsilon(1.0, 0.05, steps, 1e-5) <= 3.0 < compute_epsilon(1.0, 0.05, steps + 1, 1e-5) and steps > 9
    spend(run, steps)
    with pytest.raises(
        RuntimeError,
        match=r"budget is spent: epsilon is (2\.9\d+|3) after \d+ steps.*new run with a target_epsilon of its own",
    ):
        spend(run)
    assert run.steps == steps


def test_a_draw_that_was_shown_counts():
    run = run_of()
    spend(run)
    run.unfinished = 1
    assert run.epsilon(1e-5) == compute_epsilon(1.0, 0.05, 2, 1e-5) and run.steps == 1


def test_a_draw_that_was_shown_belongs_to_what_was_begun_last():
    """Its examples may have had their turn before the run went on with another order."""
    mechanism = Mechanism(
        sampling=FixedOrderSampling(1000, 50), clipping=FlatClipping(1.0), noise=IndependentNoise(4.0)
    )
    run = PrivateRun(PrivacyState("1", mechanism, 1e-5, None))
    run.begin()
    spend(run, 5)
    run.begin()
    run.unfinished = 1
    assert run.epsilon(1e-5) == compute_epsilon(4.0, 1.0, 2, 1e-5)
    run.unfinished = 0
    assert run.epsilon(1e-5) == compute_epsilon(4.0, 1.0, 1, 1e-5)


# Ganesh 2024 (arXiv 2401.10294): mixtures of Gaussians; composed by dp_accounting at its own discretisation of 1e-4
@pytest.mark.parametrize(("rows", "epsilon"), [(1, 1.8282), (3, 6.3429), (8, 20.895)])
def test_epsilon_of_all_rows_of_a_person(rows, epsilon):
    found = group_epsilon([(1.0, 0.01, 1000)], rows, 1e-5)
    assert epsilon * (1 - 1e-3) <= found <= epsilon * 1.001


@pytest.mark.parametrize("before", [[], [(1.0, 0.5, 1)]])
def test_all_rows_of_a_person_in_full_batches(before):
    """Each step is then one Gaussian that moves by all of them; sampled steps before cost what they cost alone."""
    found = group_epsilon([*before, (1.0, 1.0, 5)], 2, 1e-6)
    exact = dp_accounting.get_epsilon_gaussian(1 / math.sqrt(4 * (5 + len(before))), 1e-6)
    assert exact <= found <= 1.001 * exact if not before else 30.5 < found < exact


# Choquette-Choo et al. 2024 (arXiv 2407.07737), example-level sampling with a cap of G rows for each person: a mixture of
# Gaussians whose means 0, 1, ..., G have the probabilities of Binomial(G, q). The last number is for sensitivity G in
# every draw that takes any row, 1 - (1 - q)^G.
CAPPED = [(1.0, 0.0096, 300, 1e-5, {1: (1.0238, None), 2: (2.1899, 13.73), 4: (4.7115, 157.7), 8: (10.3818, 1304)}),
          (2.0, 0.05, 200, 1e-6, {1: (1.7922, None), 2: (3.8626, 10.94), 4: (8.5777, 88.9)})]  # fmt: skip


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta", "rows", "epsilon", "all_or_none"),
    [(*run, rows, *values) for *run, table in CAPPED for rows, values in table.items()],
)
def test_published_epsilons_of_capped_persons(sigma, q, steps, delta, rows, epsilon, all_or_none):
    assert group_epsilon([(sigma, q, steps)], rows, delta) == pytest.approx(epsilon, rel=1e-3)
    if all_or_none is not None:
        useless = compute_epsilon(sigma / rows, 1 - (1 - q) ** rows, steps, delta)
        assert useless == pytest.approx(all_or_none, rel=1e-3) and useless > 2 * epsilon


@pytest.mark.parametrize(
    ("rows", "steps", "q", "by_conversion"), [(2, 782, 0.0064, 2.532), (3, 782, 0.0064, 6.425), (2, 5, 1.0, 30.579), (3, 5, 1.0, 56.224), (10, 5, 1.0, 366.374), (10, 782, 0.0064, math.inf)]
)  # fmt: skip
def test_groups_are_below_what_follows_from_the_epsilon_of_one_row(rows, steps, q, by_conversion):
    """Tensorflow Privacy's (kε, δ(e^(kε) - 1)/(e^ε - 1)) for k rows with σ = 1 and δ = 1e-6."""
    assert group_epsilon([(1.0, q, steps)], rows, 1e-6) < 1.0005 * by_conversion


def test_sigma_for_all_rows_of_a_person():
    sigma = calibrate_noise_multiplier(2.0, 1e-5, 0.05, 30, rows=4)
    assert 1.99 < group_epsilon([(sigma, 0.05, 30)], 4, 1e-5) <= 2.0
    assert sigma > 2 * calibrate_noise_multiplier(2.0, 1e-5, 0.05, 30)
    run = run_of(noise_multiplier=sigma, target_epsilon=2.0, rows=4)
    run.plan(30)
    assert run.steps_left == 30
    spend(run, 30)
    spent = run.spent()
    assert spent.epsilon < 0.8 < 1.9 < spent.epsilon_per_person <= 2.0 and spent.max_examples_per_person == 4
    said = rf"all rows of one person \(max_examples_per_person=4\) is {spent.epsilon_per_person:.4g} after 30 steps.*target_epsilon=2\."
    with pytest.raises(RuntimeError, match=said):
        spend(run)
    with pytest.raises(ValueError, match="max_examples_per_person"):
        run_of(rows=0)


def test_the_start_says_what_is_to_be_spent():
    assert "to be spent: epsilon 8 at delta 1e-05;" in describe(run_of(target_epsilon=8.0), 3, CLIPPER)
    assert "to be spent: epsilon 8 at delta 1e-05 for all rows of one person" in describe(
        run_of(target_epsilon=8.0, rows=3), 3, CLIPPER
    )
    assert "there is no target_epsilon" in describe(run_of(), 3, CLIPPER)


def test_what_a_newcomer_cannot_know_is_said():
    table = nn.ModuleDict({"modules_to_save": nn.Embedding(100, 100)})
    clipper = SimpleNamespace(model=table, parameters=[*table.parameters()])
    adam = optim.AdamW(table.parameters(), lr=1e-5)
    slow, noise = warnings(run_of(), 100, clipper, adam)
    assert "in 100 steps of this learning rate a weight moves by 0.001 at most, and weights are about 1." in slow
    assert "the 100 rows of 'modules_to_save'" in noise and "trainable_token_indices" in noise
    assert warnings(run_of(), 1010, clipper, adam) == warnings(run_of(), 101, clipper, adam, passes=10) == [noise]
    assert "in 500 steps of" in warnings(run_of(), 5, clipper, adam, passes=100)[0]  # of a loop that ends by itself
    assert "moves by 0.01 at most" in warnings(run_of(), 1_000, clipper, optim.SGD(table.parameters(), lr=1e-3))[0]


def test_plan_in_words():
    run = run_of(target_epsilon=8.0, rows=30)
    text = describe(run, 100, CLIPPER)
    assert "one row of the training data (N = 1000)" in text and "30 at most" in text
    assert "10,000 of 10,100 parameters are trained" in text
    assert "clipping bound 1: noise 2 beside a signal" in text, "σ·C·√d/B = 1 · 1 · 100 / 50"
    assert len(describe(run_of(verified=False), 3, CLIPPER, "and more").splitlines()) == 5
    assert hopeless(run, 100, 10_000) is None
    warning = hopeless(run_of(noise_multiplier=239.0), 100, 10_000)
    assert "nothing will be learned" in warning and "478" in warning and "LoRA" in warning
