"""What DPTrainer and PrivacyEngine leave for a report."""

import contextlib
import stat
from pathlib import Path

import pytest
import torch
from test_resume import Classifier, build
from torch.utils.data import DataLoader, TensorDataset
from transformers import PretrainedConfig

from dp_transformers import DPTrainer, PrivacyEngine
from dp_transformers.reports.certificate import disagreements, read
from dp_transformers.reports.digest import key_path, name_of, owner_key

pytestmark = pytest.mark.halved

ROOT = Path(__file__).parents[2]


def train(folder, resume=None, **changes):
    options = {"max_steps": 4, "save_steps": 2, "save_total_limit": 3, "target_epsilon": None, "noise_multiplier": 1.0}
    trainer = build(DPTrainer, folder, **{**options, **changes})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(folder, trainer):
    """The certificate of one run says what the trainer says."""
    said, spent = read(folder), trainer.privacy_spent()
    assert disagreements(folder, said) == []
    run = next(run for run in said["runs"] if run["run"] == trainer._run.state.run_id)
    assert (run["epsilon"], run["steps"], run["delta"]) == (spent.epsilon, spent.steps, spent.delta)
    assert (run["verified"], run["private"]) == (spent.verified, spent.private)
    return said


def test_a_trainer(tmp_path):
    trainer = train(tmp_path, self_check=True, log_raw_metrics=True)
    said = same(tmp_path, trainer)
    (run,) = said["runs"]
    assert said["verified"]
    assert run["model"] == {"class": "Classifier", "name": None, "parameters": 50, "trainable": 50}
    assert run["data"]["rows"] == 40 and run["data"]["digest"].startswith("hmac-sha256:")
    assert run["data"]["key"] == name_of(owner_key())
    assert (
        run["software"]["torch"] == torch.__version__.partition("+")[0]
        or run["software"]["torch"] == torch.__version__
    )
    assert run["also_released"] == [
        {"what": "the loss of training batches, without noise (log_raw_metrics)", "covered": False}
    ]
    assert run["accountant"] == "rdp" and run["time"].startswith("20")
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert owner_key() not in written and owner_key().hex().encode() not in written


def test_a_second_training_and_a_resumed_one(tmp_path):
    first = train(tmp_path)
    resumed = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), max_steps=4)
    assert resumed.privacy_spent().steps == 6
    assert same(tmp_path, resumed)["total"]["steps"] == 6
    second = train(tmp_path, max_steps=2, max_grad_norm=0.5)
    said = same(tmp_path, second)
    assert said["total"]["steps"] == 8 and len(said["runs"]) == 2
    assert said["total"]["epsilon"] > max(run["epsilon"] for run in said["runs"])
    assert said["runs"][0]["data"]["digest"] == said["runs"][1]["data"]["digest"]
    assert first._run.state.run_id == said["runs"][0]["run"]


def test_no_digest_where_none_is_wanted(tmp_path):
    data = train(tmp_path, data_digest=False)._about()["data"]
    assert data == {
        "rows": 40,
        "digest": None,
        "key": None,
        "no_digest_because": "none was wanted (data_digest=False)",
    }
    assert read(tmp_path)["runs"][0]["data"] == data


def test_the_model_card_says_what_was_spent(tmp_path):
    trainer = train(tmp_path)
    trainer.model.config = PretrainedConfig()  # the card names it
    trainer.create_model_card(model_name="mine")
    assert f"ε = {trainer.privacy_spent().epsilon:.4g} at δ = 0.001" in (tmp_path / "README.md").read_text()


def test_an_engine(tmp_path):
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    engine, model = PrivacyEngine(ledger_dir=tmp_path), Classifier()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=10), noise_multiplier=1.5,
        max_grad_norm=0.5, max_physical_batch_size=4,
    )  # fmt: skip
    for steps, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if steps == 3:
            break
    with pytest.raises(ValueError, match="delta at which"):
        engine.write_certificate()
    with contextlib.suppress(ValueError):  # where the loop was left within a draw, which counts
        engine.detach()
    engine.write_certificate(delta=1e-3)
    said = read(tmp_path)
    assert disagreements(tmp_path, said) == []
    assert said["total"]["epsilon"] == engine.get_epsilon(1e-3) and said["total"]["steps"] >= engine.steps
    assert said["runs"][0]["data"]["digest"] and said["runs"][0]["model"]["class"] == "Classifier"
