"""What arrives in TensorBoard, W&B, MLflow and trackio: epsilon, and of the losses the private ones alone.

CI installs TensorBoard. The others are tried where they are installed, each in a folder, without a network.
"""

import json
import math
import sqlite3

import pytest
import torch
from test_mixin import cross_entropy, make

from dp_transformers import DPTrainer, DPTrainingArguments


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for path in {file.parent for file in folder.rglob("events.*")}:
        events = EventAccumulator(str(path)).Reload()
        for name in events.Tags()["scalars"]:
            yield from ((name, event.value) for event in events.Scalars(name))


def read_wandb(folder):
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (file,) = folder.rglob("*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in (*record.history.item, *record.summary.update):
            yield item.key or "/".join(item.nested_key), json.loads(item.value_json)


def read_mlflow(folder):
    for file in folder.rglob("metrics/*"):
        yield from ((file.name, float(line.split()[1])) for line in file.read_text().splitlines())


def read_trackio(folder):
    for file in folder.rglob("*.db"):
        for (text,) in sqlite3.connect(file).execute("SELECT metrics FROM metrics"):
            yield from json.loads(text).items()


TRACKERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where all of them write."""
    where = tmp_path / "tracked"
    where.mkdir()
    settings = {
        "TENSORBOARD_LOGGING_DIR": where, "WANDB_MODE": "offline", "WANDB_DIR": where, "WANDB_SILENT": "true", "WANDB_CONSOLE": "off",
        "MLFLOW_TRACKING_URI": where.as_uri(), "TRACKIO_DIR": where, "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(where)
    return where


@pytest.mark.filterwarnings("ignore")  # of the trackers
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_gets_epsilon_and_nothing_raw(tmp_path, folder, tracker, raw):
    pytest.importorskip(tracker, exc_type=ImportError)
    seen = []

    def noted(outputs, labels):
        losses = cross_entropy(outputs, labels)
        seen.append(losses.detach())
        return losses

    def arguments(**values):
        return DPTrainingArguments(
            **{**values, "max_steps": 3, "report_to": tracker, "log_raw_metrics": raw, "logging_first_step": True}
        )

    trainer = make(DPTrainer, tmp_path / "out", arguments, per_example_loss_func=noted)
    output = trainer.train()
    if tracker in ("wandb", "trackio"):
        __import__(tracker).finish()
    if tracker == "mlflow":
        __import__(tracker).end_run()
    got = [
        (name.split("/")[-1], value) for name, value in TRACKERS[tracker](folder) if isinstance(value, (int, float))
    ]

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
    assert not any("raw" in name for name, _ in got)
    assert torch.isfinite(torch.tensor([value for _, value in got])).all()
