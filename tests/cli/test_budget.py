"""`dp-transformers budget` beside the long way through the library's functions, for questions that people ask."""

import json
import math
import re
import subprocess
import sys

import pytest

from dp_transformers import (
    FlatClipping,
    IndependentNoise,
    Mechanism,
    PoissonSampling,
    PrivacyUnit,
    calibrate_noise_multiplier,
    compute_epsilon,
)
from dp_transformers.cli.main import main
from dp_transformers.cli.planning import Setting, default_delta, find

pytestmark = pytest.mark.halved


def budget(capsys, *words):
    """The answer as JSON."""
    with pytest.raises(SystemExit) as stopped:
        main(["budget", *map(str, words), "--json"])
    said = capsys.readouterr()
    assert not stopped.value.code, said.err
    return json.loads(said.out)


def refused(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["budget", *map(str, words)])
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert said.out == ""
    return said.err


def test_1_a_ward_has_10_000_notes_and_may_spend_8_how_much_noise(capsys):
    answer = budget(capsys, "--examples", 10_000, "--batch", 256, "--epochs", 3, "--epsilon", 8)
    steps = 3 * round(10_000 / 256)
    assert (answer["found"], answer["delta"], answer["steps"]) == ("sigma", 1e-5, steps)
    assert answer["noise_multiplier"] == calibrate_noise_multiplier(8, 1e-5, 256 / 10_000, steps)


@pytest.mark.table("many evaluations")
def test_6_a_patient_has_up_to_ten_notes(capsys):
    answer = budget(
        capsys, "--examples", 10_000, "--batch", 200, "--epochs", 2, "--epsilon", 8, "--max-examples-per-person", 10
    )
    sigma = calibrate_noise_multiplier(8, 1e-5, 0.02, 100, rows=10)
    mechanism = Mechanism(
        sampling=PoissonSampling(10_000, 200), clipping=FlatClipping(1.0), noise=IndependentNoise(sigma), steps=100, unit=PrivacyUnit(10),
    )  # fmt: skip
    assert answer["noise_multiplier"] == sigma
    assert answer["epsilon_of_one_row"] == mechanism.epsilon(1e-5) < 8
    assert mechanism.epsilon(1e-5, rows=10) <= 8
    assert Mechanism.from_dict(answer["mechanism"]) == mechanism


def test_8_is_epsilon_one_hopeless_for_a_full_model(capsys):
    words = ["--examples", 10_000, "--batch", 64, "--epochs", 3, "--epsilon", 1]
    full = budget(capsys, *words, "--trainable-parameters", 125_000_000)
    sigma, steps = full["noise_multiplier"], full["steps"]
    assert full["noise_norm"] == pytest.approx(sigma * math.sqrt(125e6) / 64)
    assert full["noise_over_signal_of_all_steps"] == pytest.approx(full["noise_norm"] / math.sqrt(steps))
    assert full["noise_over_signal_of_all_steps"] > 2
    lora = budget(capsys, *words, "--trainable-parameters", 300_000, "--max-grad-norm", 0.1)
    assert lora["noise_norm"] == pytest.approx(0.1 * lora["noise_over_signal"])
    assert lora["noise_over_signal_of_all_steps"] < 2


def test_9_what_does_a_larger_batch_bring(capsys):
    """The rule of thumb printed is that of the calibrated sigmas themselves."""
    sigmas = {
        batch: calibrate_noise_multiplier(8, 1e-6, batch / 100_000, round(300_000 / batch))
        for batch in (512, 1024, 2048)
    }
    assert sigmas[1024] == pytest.approx(0.5473, abs=3e-4)
    slope = math.log(sigmas[2048] / sigmas[512]) / math.log(4)
    answer = budget(capsys, "--examples", 100_000, "--batch", 1024, "--steps", 293, "--epsilon", 8, "--delta", 1e-6)
    assert answer["d_ln_sigma_d_ln_batch"] == pytest.approx(slope, abs=0.03)
    assert answer["noise_on_mean"] == pytest.approx(5.35e-4, rel=2e-3)


def test_10_steps_and_epochs_are_given_what_is_the_batch(capsys):
    answer = budget(capsys, "--examples", 30_000, "--steps", 200, "--epochs", 4, "--epsilon", 4)
    assert answer["expected_batch_size"] == 600
    assert answer["noise_multiplier"] == calibrate_noise_multiplier(4, 1e-6, 0.02, 200)


@pytest.mark.parametrize(("examples", "delta"), [(1, 0.1), (99, 1e-3), (100, 1e-3), (101, 1e-4), (10**6, 1e-7)])
def test_delta_is_a_power_of_ten_well_below_one_over_n(examples, delta):
    assert default_delta(examples) == pytest.approx(delta)


def test_each_unknown_is_found_again_from_the_others():
    setting = Setting(examples=10_000, delta=1e-6, accountant="rdp")
    plan, _ = find(setting, sigma=1.0, batch=100, steps=300)
    assert find(setting, epsilon=plan.epsilon, batch=100, steps=300)[0].sigma == pytest.approx(1.0, rel=2e-3)
    assert find(setting, epsilon=plan.epsilon, sigma=1.0, batch=100)[0].steps == 300
    assert find(setting, epsilon=plan.epsilon, sigma=1.0, steps=300)[0].batch == 100


def test_the_table_says_what_each_change_costs(capsys):
    words = ["--examples", 10_000, "--batch", 4000, "--epochs", 10, "--sigma", 2, "--delta", 1e-5, "--table"]
    table = {row["factor"]: row for row in budget(capsys, *words)["table"]}
    assert table[1]["sigma"] == table[1]["batch"] == table[1]["epochs"] == compute_epsilon(2, 0.4, 20, 1e-5)
    assert table[0.5]["sigma"] == compute_epsilon(1, 0.4, 20, 1e-5)
    assert table[2]["batch"] == compute_epsilon(2, 0.8, 10, 1e-5)
    assert table[4]["batch"] is None
    assert table[2]["epochs"] == compute_epsilon(2, 0.4, 40, 1e-5)
    with pytest.raises(SystemExit):
        main(["budget", *map(str, words)])
    assert "B would exceed N" in capsys.readouterr().out


def test_words_say_who_is_protected_and_which_flags_train_so(capsys):
    with pytest.raises(SystemExit):
        main(["budget", "--examples", "1000", "--batch", "50", "--epochs", "2", "--epsilon", "8", "--trainable-parameters", "90000000"])  # fmt: skip
    text = capsys.readouterr().out
    assert "one row of the data" in text
    assert "(chosen: a power of ten, at most a tenth of 1/N)" in text
    assert (
        "--target_epsilon 8 --target_delta 0.0001 --expected_batch_size 50 --max_steps 40 --max_grad_norm 1\n" in text
    )
    assert "Nothing will be learned" in text and "of the gradients alone" not in text
    with pytest.raises(SystemExit):
        main(["budget", "--examples", "1000", "--expected_batch_size", "50", "--noise_multiplier", "0.8", "--target_epsilon", "8"])  # fmt: skip
    text = capsys.readouterr().out
    assert "--noise_multiplier 0.8" in text and "This epsilon is of the gradients alone." in text
    with pytest.raises(SystemExit):
        main(["budget", "--examples", "1000", "--batch", "50", "--epochs", "2", "--sigma", "0"])
    text = capsys.readouterr().out
    assert "infinite: NOT PRIVATE" in text and "Without noise nothing is private" in text


def test_what_is_spent_is_rounded_up(capsys):
    words = ["--examples", 10_000, "--batch", 256, "--epochs", 3, "--sigma", 0.7, "--max-examples-per-person", 2]
    answer = budget(capsys, *words)
    with pytest.raises(SystemExit):
        main(["budget", *map(str, words)])
    person, row = re.search(r"epsilon +([\d.]+)  \(of one row alone: ([\d.]+)\)", capsys.readouterr().out).groups()
    assert answer["epsilon"] <= float(person) < 1.001 * answer["epsilon"]
    assert answer["epsilon_of_one_row"] <= float(row) < 1.001 * answer["epsilon_of_one_row"]


def test_the_budget_loads_no_torch():
    code = (
        "import sys\nfrom dp_transformers.cli.main import main\n"
        "try: main('budget --examples 10000 --batch 256 --epochs 3 --epsilon 8'.split())\n"
        "except SystemExit: print([name for name in ('torch', 'transformers', 'peft', 'accelerate') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch 10 --epochs 1 --epsilon 8", "Missing option '--examples'."),
        ("--examples 100 --epsilon 8", "too little is given: give all but one of --sigma, --batch, --steps (or --epochs); that one is the answer."),
        ("--examples 100 --batch 5 --epochs 3", "give --epsilon (the answer is then sigma) or --sigma (the answer is then epsilon)."),
        ("--examples 100 --epsilon 8 --sigma 1", "give --batch (the answer is then steps) or --steps (or --epochs) (the answer is then batch)."),
        ("--examples 100 --epsilon 8 --sigma 1 --batch 5 --steps 4", "nothing is asked for: leave out one of --epsilon, --sigma, --batch and --steps (or --epochs)."),
        ("--examples 100 --epsilom 8 --batch 5 --steps 4", "No such option: --epsilom. Did you mean --epsilon?"),
        ("--examples 100 --epsilon 0 --batch 5 --steps 4", "--epsilon must be a positive finite number, got 0."),
        ("--examples 100 --sigma nan --batch 5 --steps 4", "--sigma must be a finite number, at least 0, got nan."),
        ("--examples 100 --sigma 1 --batch 500 --steps 4", "--batch 500 exceeds the 100 examples of --examples: lower it."),
        ("--examples 100 --sigma 1 --batch 5 --steps 4 --delta 0.01", "--delta 0.01 is not smaller than 1/N = 0.01: at that delta, publishing one example outright would count as private. Leave it out for 0.001."),
        ("--examples 100 --sigma 0.1 --batch 50 --epsilon 0.1", "not one step stays within --epsilon 0.1: it spends 77.2. Take a larger --sigma or --epsilon, a smaller --batch, or more examples."),
        ("--examples 100 --sigma 1 --batch 5 --steps 4 --epochs 1", "of --batch, --steps and --epochs two give the third: leave one of them out."),
        ("--examples 100 --sigma 1 --steps 4 --epochs 9", "9 epochs cannot be had in 4 steps: a step draws 100 examples at most. Raise --steps."),
        ("--examples 100 --sigma 1 --batch 5 --steps 4 --accountant plld", "accountant must be one of ('pld', 'rdp'), got 'plld'. One of your own is known after register_accountant(...), which every process must call that computes with it."),
    ],
)  # fmt: skip
def test_wrong_usage_ends_in_one_line(words, message, capsys):
    assert refused(capsys, *words.split()) == f"error: {message}\n"
