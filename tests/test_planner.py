"""The planner: the predicted noise of published settings, who is ranked where, and that its mechanisms train."""

import json
import math
from dataclasses import replace

import pytest

from dp_transformers import (
    BandedInverseNoise,
    BandedNoise,
    CyclicPoissonSampling,
    FixedOrderSampling,
    FlatClipping,
    IndependentNoise,
    Mechanism,
    PoissonSampling,
    calibrate_noise_multiplier,
    plan,
    plan_units,
)
from dp_transformers.cli.main import main
from dp_transformers.mechanism.planner import predicted_noise

pytestmark = pytest.mark.halved

BATCH, DELTA = 1000, 1e-6


def predicted(sampling, noise, steps, epsilon):
    made = Mechanism(sampling=sampling, clipping=FlatClipping(3.0), noise=noise, steps=steps)
    return predicted_noise(made.calibrated(target_epsilon=epsilon, target_delta=DELTA))


def examples(steps, epochs):
    """So many that everybody takes part ``epochs`` times at most in a fixed order."""
    return math.ceil(steps / epochs) * BATCH


@pytest.mark.parametrize(
    ("steps", "epochs", "epsilon", "expected"),
    [(30, 3, 1, 3.560), (30, 3, 8, 1.033), (1000, 3, 1, 6.379), (1000, 3, 4, 4.414), (1000, 10, 8, 1.380), (200, 20, 8, 0.608)],
)  # fmt: skip
def test_poisson(steps, epochs, epsilon, expected):
    found = predicted(PoissonSampling(examples(steps, epochs), BATCH), IndependentNoise(1.0), steps, epsilon)
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("steps", "epochs", "epsilon", "decay", "square_root"),
    [
        (1000, 3, 1, 11.66, 8.387),
        (1000, 3, 8, 1.802, 1.296),
        (1000, 3, 16, 1.017, 0.732),
        (1000, 10, 4, 1.820, 1.476),
        (2000, 10, 8, 1.172, 0.909),
        (30, 3, 1, 5.264, None),
        (200, 20, 8, 0.597, None),
    ],
)
def test_fixed_order(steps, epochs, epsilon, decay, square_root):
    sampling = FixedOrderSampling(examples(steps, epochs), BATCH)
    best = BandedInverseNoise.optimal_decay(1.0, steps=steps, min_separation=sampling.min_separation)
    assert predicted(sampling, best, steps, epsilon) == pytest.approx(decay, rel=0.01)
    if square_root is not None:
        noise = BandedInverseNoise.square_root(1.0, bands=64)
        assert predicted(sampling, noise, steps, epsilon) == pytest.approx(square_root, rel=0.01)


@pytest.mark.parametrize(
    ("steps", "epochs", "epsilon", "bands", "expected"),
    [(30, 3, 1, 2, 3.691), (30, 3, 8, 8, 0.826), (1000, 3, 2, 16, 2.689), (1000, 3, 8, 32, 1.283), (2000, 10, 8, 64, 0.752), (200, 20, 1, 2, 3.120)],
)  # fmt: skip
def test_cyclic_poisson_with_bands(steps, epochs, epsilon, bands, expected):
    sampling = CyclicPoissonSampling(examples(steps, epochs), BATCH, bands)
    noise = BandedNoise.optimal(1.0, steps=steps, bands=bands)
    assert predicted(sampling, noise, steps, epsilon) == pytest.approx(expected, rel=0.01)


@pytest.fixture(scope="module")
def few():
    return plan(10_000, expected_batch_size=1000, target_epsilon=1.0, target_delta=DELTA, epochs=3)


@pytest.fixture(scope="module")
def many():
    return plan(200, expected_batch_size=10, target_epsilon=8.0, target_delta=1e-3, steps=60)


def test_every_candidate_meets_the_target_and_is_ranked(few, many):
    for found, epsilon, delta in ((few, 1.0, DELTA), (many, 8.0, 1e-3)):
        noises = [c.noise for c in found]
        assert noises == sorted(noises) and len(noises) == 8
        for c in found:
            assert 0.99 * epsilon < c.mechanism.epsilon(delta) <= epsilon
            assert c.noise == predicted_noise(c.mechanism)
            assert Mechanism.from_dict(json.loads(json.dumps(c.to_dict()))["mechanism"]) == c.mechanism
            assert ("N is public" in c.against) == (c.relation == "replace_special")
            assert c.name in str(found)
        assert "no promise of accuracy" in str(found) and str(found).count("<- best") == 1


def test_the_best_hides_what_was_asked_for(many):
    """Of all, a fixed order has the least noise here, which hides less: by default it is shown, and not the best."""
    first = next(iter(many))
    assert first.mechanism.sampling.kind == "fixed_order" and first.relation == "replace_special"
    assert many.best.sampling.relation == "add_or_remove_one"
    assert many.best == next(c for c in many if c.relation == "add_or_remove_one").mechanism
    asked = plan(
        200, expected_batch_size=10, target_epsilon=8.0, target_delta=1e-3, steps=60, relation="replace_special"
    )
    assert asked.best == first.mechanism


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 1.0}, "either epochs or steps"),
        ({"steps": None}, "either epochs or steps"),
        ({"relation": "replace_one"}, "relation must be one of"),
        ({"expected_batch_size": 101}, "at most num_examples=100"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    given = {"expected_batch_size": 10, "target_epsilon": 1.0, "target_delta": 1e-3, "steps": 5, **changes}
    with pytest.raises(ValueError, match=message):
        plan(100, **given)


def test_the_trainer_takes_the_best(tmp_path, many):
    from dp_transformers import DPTrainingArguments

    args = DPTrainingArguments(tmp_path, target_delta=1e-3, mechanism=many.best, use_cpu=True)
    assert args.mechanism_for(200, 60) == many.best and args.max_steps == 60


def test_the_command(capsys):
    flags = ["budget", "--examples", "500", "--epsilon", "4", "--batch", "50", "--steps", "5", "--plan"]

    def said(*more):
        with pytest.raises(SystemExit) as ended:
            main([*flags, *more])
        assert ended.value.code in (0, None)
        return capsys.readouterr().out

    words = said()
    assert "Mechanisms for the same target" in words and "random allocation" in words and "<- best" in words
    answer = json.loads(said("--json"))
    keys = {"name", "predicted_noise", "neighboring_relation", "bytes_per_trainable_parameter", "against", "mechanism"}
    assert len(answer["plan"]) == 8 and keys <= set(answer["plan"][0])
    assert [each["predicted_noise"] for each in answer["plan"]] == sorted(e["predicted_noise"] for e in answer["plan"])


def test_persons_or_rows():
    """400 rows in a step, of 10,000 persons with four rows each: numbers that dp_accounting gives."""
    found = plan_units(
        [4] * 10_000, expected_rows=400, rows_per_unit=4, target_epsilon=2.0, target_delta=1e-5, steps=300
    )
    assert found.noise_by_person == pytest.approx(0.8042 / 100, rel=1e-3)
    assert found.noise_by_row == pytest.approx(1.6454 / 400, rel=1e-3)
    assert found.break_even == pytest.approx(1.95, rel=3e-3)
    assert "more than 1.95 times shorter" in found.better and found.better in str(found)
    assert 0.999 * 2 < found.by_person.epsilon(1e-5) <= 2
    assert 0.999 * 2 < found.by_row.epsilon(1e-5, rows=4) <= 2
    assert calibrate_noise_multiplier(8.0, 1e-5, 0.01, 300) == pytest.approx(0.5141, rel=1e-3)


def test_persons_with_other_numbers_of_rows():
    """Rows beyond a bound are in no draw; a person with fewer than k rows gives those."""
    budget = {"target_epsilon": 4.0, "target_delta": 1e-3, "steps": 10}
    counts = [1] * 50 + [10] * 50
    found = plan_units(counts, expected_rows=40, rows_per_unit=4, max_examples_per_person=2, **budget)
    assert found.by_person.sampling == PoissonSampling(100, 16) and found.mean_rows == 2.5
    assert found.by_row.sampling == PoissonSampling(150, 40) and found.by_row.unit.max_examples_per_person == 2
    assert "1.15 times shorter" in found.better and "1.58 times (nothing" in found.better
    found = replace(found, mean_rows=1.2)
    assert "hardly" in found.better
    alone = plan_units([1] * 100, expected_rows=16, rows_per_unit=3, **budget, max_examples_per_person=1)
    assert alone.by_person == alone.by_row and alone.better == "Draws of persons leave less noise."
    with pytest.raises(ValueError, match="are at least 1"):
        plan_units([0, 3], expected_rows=2, rows_per_unit=4, **budget)


def test_the_budget_shows_persons_beside_rows(capsys):
    words = "budget --examples 300 --persons 100 --rows-per-unit 3 --max-examples-per-person 2 --batch 30 --steps 10 --epsilon 4"
    budget = {"target_epsilon": 4.0, "target_delta": 1e-3, "steps": 10}
    expected = plan_units([3] * 100, expected_rows=30, rows_per_unit=3, max_examples_per_person=2, **budget)
    for form in ("--json", "--delta 1e-3"):
        with pytest.raises(SystemExit) as stopped:
            main([*words.split(), *form.split(), "--delta", "1e-3"])
        assert not stopped.value.code
        said = capsys.readouterr().out
        if form == "--json":
            answer = json.loads(said)
            assert answer["units"] == json.loads(json.dumps(expected.to_dict()))
            assert answer["num_examples"] == 200, "a person keeps two rows"
            assert answer["noise_on_mean"] == expected.noise_by_row
        else:
            assert str(expected) in said
    for words in ("--persons 400 --epsilon 4", "--persons 100 --sigma 0"):
        with pytest.raises(SystemExit):
            main(["budget", "--examples", "300", "--batch", "30", "--steps", "10", *words.split()])
        assert "are compared at one finite --epsilon" in capsys.readouterr().err
