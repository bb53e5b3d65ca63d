"""What arrives in TensorBoard, in W&B and in trackio: epsilon, and of the losses the private ones alone."""

import importlib.util
import json
import math
import sqlite3
import struct

import pytest
import torch
from test_mixin import cross_entropy, make
from transformers import TrainerCallback

from dp_transformers import DPTrainer, DPTrainingArguments


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for path in {file.parent for file in folder.rglob("events.*")}:
        events = EventAccumulator(str(path)).Reload()
        for name in events.Tags()["scalars"]:
            yield from ((name, event.value) for event in events.Scalars(name))


def read_wandb(folder):
    """All records of an offline run: of its metrics, its configuration, and the lines of its console."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.finish()
    wandb.teardown()  # after which the file is whole
    (path,) = folder.rglob("*.wandb")
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        if kind:  # 1: a whole record, 2: its begin, 3: its middle, 4: its end
            record = (b"" if kind <= 2 else record) + content[at + 7 : at + 7 + length]
        at += 7 + length
        if 32768 - at % 32768 < 7:  # the rest of a block is no header
            at += -at % 32768
        if kind not in (1, 4):
            continue
        found = wandb_internal_pb2.Record()
        found.ParseFromString(record)
        if found.WhichOneof("record_type") == "output_raw":
            yield from (("console", word) for word in found.output_raw.line.split())
        for item in (*found.history.item, *found.summary.update, *found.config.update):
            yield item.key or "/".join(item.nested_key), json.loads(item.value_json)
    for file in folder.rglob("output.log"):
        yield from (("console", word) for word in file.read_text().split())


def read_trackio(folder):
    (path,) = folder.rglob("*.db")
    with sqlite3.connect(path) as database:
        for (metrics,) in database.execute("SELECT metrics FROM metrics"):
            yield from json.loads(metrics).items()
        for (config,) in database.execute("SELECT config FROM configs"):
            yield from json.loads(config).items()


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where they write."""
    where = tmp_path / "tracked"
    where.mkdir()
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(where))
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(where))
    monkeypatch.setenv("TRACKIO_DIR", str(where))
    return where


@pytest.mark.filterwarnings("ignore")  # of the tracker
@pytest.mark.parametrize(
    ("tracker", "raw"), [("tensorboard", False), ("tensorboard", True), ("wandb", False), ("trackio", True)]
)
def test_a_tracker_gets_epsilon_and_nothing_raw(tmp_path, folder, tracker, raw):
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    seen = []

    def noted(outputs, labels):
        losses = cross_entropy(outputs, labels)
        seen.append(losses.detach())
        return losses

    def arguments(**values):
        return DPTrainingArguments(**{**values, "max_steps": 3, "report_to": tracker, "log_raw_metrics": raw, "logging_first_step": True})  # fmt: skip

    trainer = make(DPTrainer, tmp_path / "out", arguments, per_example_loss_func=noted)
    output = trainer.train()
    everything = list(READERS[tracker](folder))
    got = [(name.split("/")[-1], value) for name, value in everything if isinstance(value, (int, float))]

    epsilons = [logs["epsilon"] for logs in trainer.state.log_history if "epsilon" in logs]
    assert len(set(epsilons)) == 3
    arrived = [value for name, value in got if name == "epsilon"]
    assert all(any(math.isclose(value, epsilon, rel_tol=1e-6) for value in arrived) for epsilon in epsilons)

    losses = {value for name, value in got if name in ("loss", "train_loss")}
    private = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs] + [
        output.metrics.get("train_loss", math.nan)
    ]
    assert bool(losses) != raw, "the raw loss is on the console alone"
    assert all(any(math.isclose(value, own, rel_tol=1e-5) for own in private) for value in losses)
    for losses_b in filter(len, seen):
        for secret in (*losses_b.tolist(), float(losses_b.mean()), float(losses_b.sum() / 6)):
            near = [name for name, value in got if math.isclose(value, secret, rel_tol=1e-5)]
            assert not near, f"{near} hold a loss without noise"
    assert not any("raw" in name for name, _ in got if name != "log_raw_metrics")
    assert not any("raw_loss" in str(value) for _, value in everything)
    assert torch.isfinite(torch.tensor([value for _, value in got])).all()


def test_raw_losses_are_refused_where_the_console_is_recorded(tmp_path, folder):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")

    def arguments(**values):
        return DPTrainingArguments(**{**values, "report_to": "wandb", "log_raw_metrics": True})

    with pytest.raises(ValueError, match=r"log_raw_metrics beside a tracker that records the console.*trackio"):
        make(DPTrainer, tmp_path / "out", arguments)


@pytest.mark.parametrize("when", ["before training", "while training"])
def test_a_tracker_that_is_added_later_gets_no_raw_losses(tmp_path, capsys, when):
    class WandbCallback(TrainerCallback):
        """Goes by the name of the one that records the console."""

    class Adds(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            trainer.add_callback(WandbCallback())

    def arguments(**values):
        return DPTrainingArguments(**{**values, "max_steps": 3, "log_raw_metrics": True, "logging_steps": 1})

    trainer = make(DPTrainer, tmp_path, arguments)
    trainer.add_callback(WandbCallback() if when == "before training" else Adds())
    with pytest.raises(ValueError, match="log_raw_metrics beside a tracker that records the console"):
        trainer.train()
    assert "raw_loss" not in capsys.readouterr().out
