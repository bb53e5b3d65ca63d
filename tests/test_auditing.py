"""Audits: honest steps pass, planted faults are found, and scores are compared with what a mechanism allows."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import dp_transformers as dpt
from benchmarks import audits
from dp_transformers.auditing.planted import FAULTS, _noise
from dp_transformers.cli.audit import audit_trainer
from dp_transformers.cli.main import main
from dp_transformers.noise.generators import GaussianNoise

ROWS = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "labels": i % 2} for i in range(200)]
FOUND = {  # by faults: what must be said of them
    "noise halved": "less noise than claimed", "noise reused in every step": "comes again in another",
    "a rank without noise": "less noise than claimed", "noise from a known seed": "can be drawn again",
    "clipping off": "mu of a step is at least", "clipped at 2C, noise for C": "moves the sum by 2 times",
    "an unclipped parameter": "moves the sum by", "a row twice in a draw": "moves the sum by 2 times",
    "fixed batches": "draws are not independent",
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, inputs=4):
        super().__init__()
        self.hidden, self.classifier = nn.Linear(inputs, 30), nn.Linear(30, 2)

    def forward(self, x, labels=None):
        return {"logits": self.classifier(self.hidden(x).tanh())}


def losses(outputs, labels):
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")


@pytest.fixture(autouse=True)
def _fixed_secrets(monkeypatch):  # two set-ups of a step still have different ones
    monkeypatch.setattr("secrets.randbits", random.Random(0).getrandbits)


def make_trainer(tmp_path, audit=None, rows=ROWS, **options):
    torch.manual_seed(0)
    defaults = dict(
        noise_multiplier=1.0, max_grad_norm=0.1, target_delta=1e-3, expected_batch_size=20, max_steps=10,
        per_device_train_batch_size=16, use_cpu=True, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    args = dpt.DPTrainingArguments(str(tmp_path / "out"), **{**defaults, **options})
    return dpt.DPTrainer(Net(), args, train_dataset=rows, per_example_loss_func=losses, audit=audit)


def audited(trainer, plant=lambda one: None, trials=40):
    return audit_trainer(trainer, plant, delta=1e-3, trials=trials, seed=0)


def test_an_honest_step_passes_and_every_planted_fault_is_found(tmp_path):
    assert FOUND.keys() == FAULTS.keys()
    trainer = make_trainer(tmp_path)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    honest = audited(trainer)
    assert honest.faults == [] and honest.mu <= honest.claimed_mu == 1.0 and honest.epsilon <= honest.claimed_epsilon
    assert honest.canary_norm == pytest.approx(1, abs=1e-3) and honest.moved == pytest.approx(1, abs=1e-3)
    for name, plant in FAULTS.items():
        assert FOUND[name] in "; ".join(audited(trainer, plant).faults), name
    assert audited(trainer).faults == []  # nothing planted is left behind
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert not (tmp_path / "out" / "privacy_ledger.jsonl").exists()


def test_scores_alone_show_a_step_with_an_eighth_of_its_noise(tmp_path):
    eighth = lambda source, tensors, std: source.add_(tensors, std / 8)  # noqa: E731
    found = audited(make_trainer(tmp_path), lambda one: _noise(one, eighth), trials=100)
    assert found.mu > 1.5 * found.claimed_mu and found.epsilon > found.claimed_epsilon
    assert (
        found.mu == dpt.clopper_pearson_gdp_lower_bound(found.detected, 50, found.alarms, 50, 0.99) <= found.largest_mu
    )


def test_groups_are_weighed_by_their_noise(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    groups = dpt.PerGroupClipping((("classifier", dpt.FlatClipping(0.01)), ("", dpt.FlatClipping(0.1))))
    run = trainer._private.run
    changed = dpt.Mechanism(
        sampling=run.mechanism.sampling, clipping=groups, noise=dpt.IndependentNoise(2.0), steps=10
    )
    monkeypatch.setattr(type(run), "mechanism", changed)
    honest = audited(trainer)
    assert honest.faults == [] and honest.canary_norm == pytest.approx(1, abs=1e-3)
    assert "less noise" in audited(trainer, FAULTS["noise halved"]).faults[0]


def test_of_persons_one_comes_and_goes_with_all_of_its_rows(tmp_path):
    rows = [{**row, "owner": i // 5} for i, row in enumerate(ROWS)]
    persons = make_trainer(tmp_path, rows=rows, privacy_unit_column="owner", rows_per_unit=3)
    honest = audited(persons)
    assert honest.mechanism.unit.is_person and honest.faults == []
    assert honest.canary_norm == pytest.approx(1, abs=1e-3) and honest.moved == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match="privacy_unit_column draws persons"):
        make_trainer(tmp_path, dpt.AuditConfig(50), rows, privacy_unit_column="owner")


def test_without_noise_nothing_is_claimed_and_everything_is_seen(tmp_path):
    found = audited(make_trainer(tmp_path, noise_multiplier=0.0))
    assert found.faults == [] and found.mu == found.largest_mu and found.claimed_epsilon == float("inf")


def run(*words):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *words])
    return stopped.value.code


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_auditing import make_trainer
from pathlib import Path
try:
    make_trainer(Path({folder!r}), expected_batch_size=int(sys.argv[1])).train()
except Exception:
    pass
raise SystemExit("it went on")
"""


def test_the_command_takes_a_script_to_its_training(tmp_path, capsys, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=__file__.rpartition("/")[0], folder=str(tmp_path)))
    code = run("--trials", "20", "--json", "--no-faults", str(script), "25")
    found = json.loads(capsys.readouterr().out)
    assert not code and found["faults"] == [] and found["trials"] == 20
    assert found["claimed"]["mu"] == 1.0 and found["lower_bound"]["mu"] < 1

    monkeypatch.setattr("secrets.randbits", lambda bits: 1)  # as if the secrets were known
    code = run("--trials", "20", "--no-faults", str(script), "25")
    assert code == 1 and "EVIDENCE AGAINST" in capsys.readouterr().out
    script.write_text("print(1)")
    code = run(str(script))
    assert code == 2 and "without a call of train()" in capsys.readouterr().err


LOOP = """
import torch
from dp_transformers import PrivacyEngine
from torch.nn.functional import cross_entropy

def make():
    torch.manual_seed(0)
    model, rows = torch.nn.Linear(3, 2), [(torch.randn(3), i % 2) for i in range(200)]
    engine = PrivacyEngine()
    loader, optimizer = torch.utils.data.DataLoader(rows, batch_size=20), torch.optim.SGD(model.parameters(), lr=0.1)
    values = dict(noise_multiplier=1.0, max_grad_norm=0.1, loss_reduction="none")
    engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **values)
    return engine, lambda batch: cross_entropy(model(batch[0]), batch[1], reduction="none")
"""


def test_the_command_takes_a_loop(tmp_path, capsys):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    code = run("--trials", "40", "--json", "--delta", "1e-3", f"{script}:make")
    found = json.loads(capsys.readouterr().out)
    assert not code and found["faults"] == [] and found["canary_norm"] == pytest.approx(1, abs=1e-3)
    assert [name for name, faults in found["planted"].items() if not faults] == []
    for words, why in (([f"{script}:make"], "no target_delta"), ([f"{script}:makes"], "has no function 'makes'")):
        code = run("--trials", "10", *words)
        assert code == 2 and why in capsys.readouterr().err


def test_scores_are_compared_with_what_the_mechanism_allows():
    rng = np.random.default_rng(0)
    members, others = rng.normal(1, 1, 4000), rng.normal(0, 1, 4000)
    # with all rows in its one step it is one Gaussian mechanism, which the scores attack as well as possible
    parts = {"sampling": dpt.PoissonSampling(50, 50), "clipping": dpt.FlatClipping(1.0), "steps": 1}
    whole = dpt.Mechanism(**parts, noise=dpt.IndependentNoise(1.0))
    report = dpt.membership_report(members, others, whole, twin=([3.0, 2.0], [1.0]))
    assert report["model"]["auc"] == pytest.approx(0.760, abs=0.01)  # Phi(1 / sqrt(2))
    assert report["model"]["tpr at 0.01 fpr"] == pytest.approx(0.0924, abs=0.01)  # Phi(1 - 2.326)
    assert report["ceiling"]["tpr at 0.01 fpr"] == pytest.approx(0.0924, abs=0.004)
    assert report["model"]["auc"] < report["ceiling"]["auc"] < 0.78
    assert report["twin"]["auc"] == 1 and np.isnan(report["twin"]["tpr at 0.01 fpr"])
    with pytest.raises(ValueError, match="finite"):
        dpt.membership_report(members, [np.nan])


CANARIES = 80


def with_canaries(tmp_path, **options):
    rows = [{"x": nn.functional.pad(row["x"], (0, CANARIES)), "labels": row["labels"]} for row in ROWS]
    rows += [{"x": 5 * torch.eye(CANARIES + 4)[4 + i], "labels": i // 2 % 2} for i in range(CANARIES)]
    audit = dpt.AuditConfig(CANARIES, num_guesses=40, every_step=options.pop("every_step", False))
    defaults = dict(
        max_grad_norm=1.0, target_delta=1e-5, expected_batch_size=100, max_steps=20, learning_rate=5.0, optim="sgd",
        per_device_train_batch_size=128, use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", self_check=False,
    )  # fmt: skip
    torch.manual_seed(0)
    args = dpt.DPTrainingArguments(str(tmp_path / "out"), **{**defaults, **options})
    return dpt.DPTrainer(Net(CANARIES + 4), args, train_dataset=rows, per_example_loss_func=losses, audit=audit)


@pytest.mark.whole
@pytest.mark.parametrize("every_step", [False, True])
def test_canaries_of_one_training_show_what_it_leaks(tmp_path, monkeypatch, every_step):
    trainer = with_canaries(tmp_path, noise_multiplier=0.0, every_step=every_step)
    coins = trainer.audit._is_in
    # epsilon is for the rows that are there: all that are no canaries, and the canaries that are in
    assert len(trainer.train_dataset) == 200 + coins.sum() == trainer._run.mechanism.sampling.num_examples
    assert 20 < coins.sum() < 60
    assert not np.array_equal(coins, with_canaries(tmp_path, noise_multiplier=0.0).audit._is_in)
    trainer.train()
    assert trainer.model.training
    for found in trainer.audit.result.values():
        assert found.correct == 40 and len(found.of_members) == coins.sum()
        assert found.epsilon == dpt.largest_one_run_bound(CANARIES, 40, 1e-5, 0.975) < found.gaussian_epsilon

    honest = with_canaries(tmp_path, target_epsilon=1.0, every_step=every_step)
    honest.train()
    assert all(found.epsilon <= 1.0 and found.correct < 35 for found in honest.audit.result.values())

    monkeypatch.setattr(GaussianNoise, "add_", lambda *args, **kwargs: None)  # it claims noise, and adds none
    broken = with_canaries(tmp_path, target_epsilon=1.0, every_step=every_step)
    broken.train()
    assert broken.privacy_spent().epsilon <= 1.0
    assert max(found.epsilon for found in broken.audit.result.values()) > 2


def test_audits_that_can_show_nothing_are_refused_or_warned_of(tmp_path, caplog):
    with pytest.raises(ValueError, match="40 guesses on 30 canaries: take 10 canaries or more"):
        dpt.AuditConfig(30, 40)
    for delta, is_warned in ((1e-5, False), (1e-3, True)):
        trainer = with_canaries(tmp_path, noise_multiplier=1.0, target_delta=delta)
        assert ("eats the bound" in caplog.text) == is_warned
    with pytest.raises(ValueError, match="append the canaries"):
        make_trainer(tmp_path, audit=dpt.AuditConfig(200))
    trainer.state.global_step = 3
    with pytest.raises(ValueError, match="cannot be resumed"):
        trainer.audit.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_the_table_of_the_page_can_be_made(capsys):
    small = "--epsilons 4 --trials 10 --canaries 20 --steps 2 --faults"
    audits.main([*small.split(), "noise halved"])
    honest, halved = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| 4 |"))
    assert "**noise**" not in honest and "**noise**" in halved
