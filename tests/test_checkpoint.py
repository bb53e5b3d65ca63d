"""Ledger and privacy state on disk."""

import json

import pytest

from dp_transformers.checkpoint import LEDGER_NAME, STATE_NAME, Ledger, PrivacyState, PrivacyStateError


def state(**changes):
    values = {"run_id": "a1", "num_examples": 100, "expected_batch_size": 10, "noise_multiplier": 1.5, "max_grad_norm": 0.5,
              "delta": 1e-5, "target_epsilon": 3.0, "sampling": "poisson"}  # fmt: skip
    return PrivacyState(**{**values, **changes})


def test_round_trip(tmp_path):
    state().save(tmp_path / "checkpoint-3", ledger_steps=3)
    assert PrivacyState.load(tmp_path / "checkpoint-3") == (state(), 3)
    assert [p.name for p in (tmp_path / "checkpoint-3").iterdir()] == [STATE_NAME]


def test_missing_broken_or_partial_state(tmp_path):
    with pytest.raises(PrivacyStateError, match=r"is missing.*start a new run"):
        PrivacyState.load(tmp_path)
    (tmp_path / STATE_NAME).write_text('{"run_id": "a')
    with pytest.raises(PrivacyStateError, match="cannot be read"):
        PrivacyState.load(tmp_path)
    state().save(tmp_path, 3)
    content = json.loads((tmp_path / STATE_NAME).read_text())
    del content["noise_multiplier"]
    (tmp_path / STATE_NAME).write_text(json.dumps(content))
    with pytest.raises(PrivacyStateError, match="noise_multiplier"):
        PrivacyState.load(tmp_path)


def test_require_names_what_disagrees():
    state().require({"max_grad_norm": 0.5, "delta": 1e-5})
    with pytest.raises(PrivacyStateError, match=r"max_grad_norm=0.5, now it is 0.7"):
        state().require({"max_grad_norm": 0.7})


def test_ledger_counts_every_line_of_its_run(tmp_path):
    ledger = Ledger(tmp_path / "new")
    assert ledger.steps("a1") == 0
    ledger.begin(state())
    for step in (1, 2, 3, 2, 3):  # two steps were done again after a resume: they happened
        ledger.add_step("a1", step)
    ledger.begin(state(run_id="b2"))
    ledger.add_step("b2", 1)
    assert ledger.steps("a1") == 5
    assert ledger.steps("b2") == 1
    assert ledger.other_steps("b2") == 5
    assert len((tmp_path / "new" / LEDGER_NAME).read_text().splitlines()) == 8


def test_torn_line_counts_and_stays_alone(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add_step("a1", 1)
    with open(ledger.path, "a") as file:
        file.write('{"run": "a1", "st')
    assert ledger.steps("a1") == 2
    ledger.add_step("a1", 2)
    assert ledger.steps("a1") == 3
    assert json.loads(ledger.path.read_text().splitlines()[-1]) == {"run": "a1", "step": 2}
