"""What was said of a run's steps is said of it after a resume too, in both loops: whether it was verified, and how
many rows a person may have."""

import hashlib
import itertools
import json
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from neighbours import padded, seeded, texts
from test_contract import bert
from test_resume import Classifier
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine
from dp_transformers.reports import certificate
from dp_transformers.reports.certificate import CERTIFICATE_NAME
from dp_transformers.reports.words import run_table
from dp_transformers.step.checkpoint import STATE_NAME
from dp_transformers.step.ledger import LEDGER_NAME, PrivacyStateError

pytestmark = pytest.mark.halved

LOOPS = ["trainer", "engine", "engine with a ledger"]
DELTA = 1e-3
N = 16


def by_trainer(
    folder,
    steps,
    resume,
    *,
    max_examples_per_person=1,
    self_check=True,
    sigma=1.0,
    target_epsilon=None,
    seed=0,
    **others,
):
    args = DPTrainingArguments(
        str(folder), target_delta=DELTA, noise_multiplier=sigma if target_epsilon is None else None, target_epsilon=target_epsilon,
        per_device_train_batch_size=8, expected_batch_size=4, max_steps=steps, save_strategy="steps", save_steps=2, use_cpu=True,
        report_to="none", disable_tqdm=True, self_check=self_check, max_examples_per_person=max_examples_per_person, **others,
    )  # fmt: skip
    trainer = DPTrainer(seeded(bert), args, lambda rows: padded(rows, "right"), texts([8 + seed] * N))
    trainer.train(resume_from_checkpoint=resume)
    return trainer.privacy_spent()


def by_engine(folder, steps, resume, *, ledger_dir=None, target_epsilon=None, sigma=1.0, seed=0, **options):
    model, engine = Classifier(), PrivacyEngine(ledger_dir=ledger_dir)
    data = TensorDataset(torch.randn(N, 3, generator=torch.Generator().manual_seed(seed)), torch.arange(N) % 2)
    common = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data_loader": DataLoader(data, 4), **options}  # fmt: skip
    _, optimizer, loader = engine.make_private(**common, noise_multiplier=sigma, max_grad_norm=1.0)
    if resume:
        engine.load_checkpoint(folder / "c.pt", module=model, optimizer=optimizer)
    batches = iter(loader)
    while engine.steps < steps:
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.save_checkpoint(folder / "c.pt", module=model, optimizer=optimizer)
    spent = engine.privacy_spent(DELTA)
    engine.detach()
    return spent


def lines_of(ledger):
    return list(map(json.loads, ledger.read_text().splitlines()))


def without(line, name):
    return {k: v for k, v in line.items() if k != name}


def rewrite(ledger, lines):
    """Write a ledger whose digests are right."""
    content = b""
    for line in lines:
        line = {**line, "before": hashlib.sha256(content).hexdigest()}
        content += json.dumps(line).encode() + b"\n"
    ledger.write_bytes(content)


def train(loop, folder, steps, resume=False, **options):
    if loop == "trainer":
        return by_trainer(folder, steps, resume, **options)
    return by_engine(folder, steps, resume, ledger_dir=folder if "ledger" in loop else None, **options)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("checks", [(False, True, True), (True, False, True), (True, True, True)], ids=str)
def test_verified_means_all_steps(tmp_path, loop, checks, caplog):
    """A self-check before the last steps says nothing of the first ones; it is made all the same."""
    caplog.set_level(logging.INFO, "dp_transformers")
    for i, self_check in enumerate(checks):
        caplog.clear()
        spent = train(loop, tmp_path, 2 * (i + 1), resume=i > 0, self_check=self_check)
        assert spent.verified == all(checks[: i + 1]) and spent.steps == 2 * (i + 1)
        assert spent.to_dict()["verified"] is spent.verified
        assert ("self-check passed" in caplog.text) == self_check


@pytest.mark.parametrize("loop", LOOPS)
def test_a_resumed_run_says_no_less_of_a_person(tmp_path, loop, caplog):
    """The larger number stays, with the ε of so many rows; a larger one of now is taken."""
    reported = [train(loop, tmp_path, 2, max_examples_per_person=3)]
    for steps, rows in ((4, 1), (6, 1), (8, 5), (10, 4)):
        caplog.clear()
        reported.append(train(loop, tmp_path, steps, resume=True, max_examples_per_person=rows))
        largest = max(3, 5 if steps > 6 else 0, rows)
        assert reported[-1].max_examples_per_person == largest
        assert (f"max_examples_per_person is {rows} now, but this run was begun with {largest}" in caplog.text) == (
            rows < largest
        )
    for before, after in itertools.pairwise(reported):
        assert before.epsilon < after.epsilon and before.epsilon_per_person < after.epsilon_per_person < math.inf
        assert after.epsilon_per_person > 2 * after.epsilon


@pytest.mark.parametrize("loop", ["trainer", "engine with a ledger"])
def test_the_ledger_knows_what_came_after_a_checkpoint(tmp_path, loop):
    """Steps after the checkpoint count, and so does what was said of them."""
    name = "checkpoint-2" if loop == "trainer" else "c.pt"
    train(loop, tmp_path, 2)
    kept = (tmp_path / name).read_bytes() if loop != "trainer" else None
    train(loop, tmp_path, 4, resume=True, self_check=False, max_examples_per_person=3)
    if kept is not None:
        (tmp_path / name).write_bytes(kept)
    spent = train(loop, tmp_path, 6, resume=str(tmp_path / name))
    assert not spent.verified and spent.max_examples_per_person == 3


def test_the_budget_is_that_of_all_rows_of_a_person(tmp_path):
    """A target that was met for three rows together is not spent on one row after a resume."""
    spent = by_trainer(tmp_path, 4, False, target_epsilon=6.0, max_examples_per_person=3)
    assert spent.epsilon < 2.5 < 5.5 < spent.epsilon_per_person <= 6
    with pytest.raises(ValueError, match=r"(?s)all rows of one person \(max_examples_per_person=3\) is "):
        by_trainer(tmp_path, 8, True, target_epsilon=6.0)


@pytest.mark.parametrize("where", ["checkpoint", "ledger"])
def test_each_of_both_records_is_enough(tmp_path, where):
    """A checkpoint that was copied without its ledger lines' facts, and the other way round."""
    by_trainer(tmp_path, 2, False, self_check=False)
    state, ledger = tmp_path / "checkpoint-2" / STATE_NAME, tmp_path / LEDGER_NAME
    assert json.loads(state.read_text())["verified"] is False and '"verified": false' in ledger.read_text()
    if where == "ledger":
        content = json.loads(state.read_text())
        del content["verified"]  # as an earlier release wrote it
        state.write_text(json.dumps(content))
    else:
        rewrite(ledger, [without(line, "verified") for line in lines_of(ledger)])
        (tmp_path / CERTIFICATE_NAME).unlink()
    assert not by_trainer(tmp_path, 4, True).verified


def with_less_noise(lines):
    return [{**line, "noise_multiplier": 50.0} if "step" in line else line for line in lines]


@pytest.mark.parametrize("loop", ["trainer", "engine with a ledger"])
@pytest.mark.parametrize("change", [with_less_noise, lambda lines: [lines[0], *lines[3:]]], ids=["noise", "lines"])
def test_a_ledger_that_was_changed_is_not_gone_on_from(tmp_path, loop, change):
    train(loop, tmp_path, 4)
    ledger = tmp_path / LEDGER_NAME
    changed = change(lines_of(ledger))
    ledger.write_text("".join(json.dumps(line) + "\n" for line in changed))
    with pytest.raises(
        PrivacyStateError, match="does not follow from what stands before it.*from one backup|lines are missing"
    ):
        train(loop, tmp_path, 6, resume=True)
    assert lines_of(ledger) == changed


@pytest.mark.parametrize("loop", ["trainer", "engine with a ledger"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_ledger_that_was_cut_off_is_not_gone_on_from(tmp_path, loop, resume):
    """The certificate knows how long it was. An older one that was restored without it would count too few steps."""
    train(loop, tmp_path, 2)
    kept = {name: (tmp_path / name).read_bytes() for name in (LEDGER_NAME, "c.pt") if (tmp_path / name).exists()}
    train(loop, tmp_path, 4, resume=True)
    if loop != "trainer":
        certificate.write(tmp_path, delta=DELTA)
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    before = (tmp_path / CERTIFICATE_NAME).read_bytes()
    tells = "was cut off by [34] lines after privacy.json was written"
    if loop == "trainer" and resume:
        tells = "holds 2 steps of this run, which has executed 4 at least"  # by the checkpoint beside that one
    with pytest.raises(PrivacyStateError, match=tells):
        train(loop, tmp_path, 6, resume=resume and str(tmp_path / ("checkpoint-2" if loop == "trainer" else "c.pt")))
    assert (tmp_path / CERTIFICATE_NAME).read_bytes() == before


@pytest.mark.parametrize("loop", ["trainer", "engine with a ledger"])
def test_what_was_shown_and_of_which_data_stays_in_reports(tmp_path, loop, caplog):
    options = {"log_raw_metrics": True} if loop == "trainer" else {}
    train(loop, tmp_path, 2, **options)
    before = certificate.build(tmp_path, delta=DELTA)["runs"][0]
    caplog.clear()
    train(loop, tmp_path, 4, resume=True, seed=1)
    assert "goes on with other data" in caplog.text
    after = certificate.build(tmp_path, delta=DELTA)["runs"][0]
    assert after["also_released"] == before["also_released"] and len(before["also_released"]) == (loop == "trainer")
    assert after["data"]["earlier"] == [before["data"]] and after["data"]["digest"] != before["data"]["digest"]
    assert before["data"]["digest"] in dict(run_table(after))["Data digest, earlier"]
    caplog.clear()
    train(loop, tmp_path, 6, resume=True, seed=1)
    assert "goes on with other data" not in caplog.text
