"""What arrives in TensorBoard: epsilon, and of the losses the private ones alone."""

import math

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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where it writes."""
    where = tmp_path / "tracked"
    where.mkdir()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(where))
    return where


@pytest.mark.filterwarnings("ignore")  # of the tracker
@pytest.mark.parametrize("raw", [False, True])
def test_a_tracker_gets_epsilon_and_nothing_raw(tmp_path, folder, raw):
    seen = []

    def noted(outputs, labels):
        losses = cross_entropy(outputs, labels)
        seen.append(losses.detach())
        return losses

    def arguments(**values):
        return DPTrainingArguments(
            **{
                **values,
                "max_steps": 3,
                "report_to": "tensorboard",
                "log_raw_metrics": raw,
                "logging_first_step": True,
            }
        )

    trainer = make(DPTrainer, tmp_path / "out", arguments, per_example_loss_func=noted)
    output = trainer.train()
    got = [(name.split("/")[-1], value) for name, value in read_tensorboard(folder) if isinstance(value, (int, float))]

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
