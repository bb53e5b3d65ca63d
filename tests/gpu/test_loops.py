"""Whole private steps on a device, in both loops: what they train, how they go on, and what they wait for."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from models import adapted, batch_for, build, losses_function
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from dp_transformers import (
    DPTrainer,
    DPTrainingArguments,
    FlatClipping,
    PerExampleClipper,
    PerLayerClipping,
    PrivacyEngine,
)
from dp_transformers.clipping import model_state
from dp_transformers.clipping.measured_budget import PART, SHARE, DeviceMemory, MeasuredBudget

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:dp_seed")]
N, PHYSICAL = 12, 6  # every example is in every draw, so that a draw has two physical batches


def rows():
    batch = batch_for("bert", 8, N)
    return [{k: v[i] for k, v in batch.items()} for i in range(N)]


class Steps(TrainerCallback):
    """Enters a context for each step of a trainer, and keeps what it yields."""

    def __init__(self, context):
        self.context, self.seen = context, []

    def on_step_begin(self, *args, **kwargs):
        self.running = self.context()
        self.seen.append(self.running.__enter__())

    def on_step_end(self, *args, **kwargs):
        self.running.__exit__(None, None, None)


def small(lora):
    model = build("bert", dropout=0.1)
    del model.bert.encoder.layer[1]
    return adapted(model, "bert") if lora else model


def train_trainer(tmp_path, model, steps, *callbacks, **options):
    defaults = {"noise_multiplier": 1.0, "target_delta": 1e-2, "self_check": False}
    args = DPTrainingArguments(
        output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=PHYSICAL, expected_batch_size=N,
        report_to="none", disable_tqdm=True, logging_strategy="no", save_strategy="no", **{**defaults, **options},
    )  # fmt: skip
    trainer = DPTrainer(model, args, train_dataset=rows(), callbacks=list(callbacks))
    trainer.train()
    return trainer


def train_plain(model, device, steps, context=nullcontext, resume=None, save=None, **options):
    """What ``context()`` gives in each step of an ordinary loop, and the engine."""
    engine, criterion, found = PrivacyEngine(dp_seed=1), nn.CrossEntropyLoss(), []
    trained = [p for p in model.to(device).parameters() if p.requires_grad]
    model, optimizer, criterion, loader = engine.make_private(
        module=model, optimizer=torch.optim.AdamW(trained), data_loader=DataLoader(rows(), batch_size=N), criterion=criterion,
        noise_multiplier=1.0, max_grad_norm=1.0, max_physical_batch_size=PHYSICAL, **{"self_check": False, **options},
    )  # fmt: skip
    if resume is not None:
        engine.load_checkpoint(resume, module=model, optimizer=optimizer)
    for _ in range(steps):
        with context() as of_step:
            found.append(of_step)
            for batch in loader:
                batch = {k: v.to(device) for k, v in batch.items()}
                labels = batch.pop("labels")
                optimizer.zero_grad()
                criterion(model(**batch).logits, labels).backward()
                optimizer.step()
    if save is not None:
        engine.save_checkpoint(save, module=model, optimizer=optimizer)
    return found, engine


# In a step of two physical batches. Twice: whether all norms are finite. Once, where something is expected: whether it
# holds. A loss of this library adds for each batch how many targets count, and whenever losses go back which of
# them have a gradient.
LOOKS = "dp_transformers.clipping.checks."  # in some batches
WAITS = {"book_keeping": (3, 6), "per_sample": (3, 6), "ghost": (3, 9), "fast_gradient": (3, 9)}


def without_looks(seen):
    return Counter({name: count for name, count in seen.items() if not name.startswith(LOOKS)})


@pytest.mark.table("loops")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("mode", WAITS)
def test_how_often_a_step_waits_for_the_device(mode, lora, device, waits, tmp_path, monkeypatch):
    monkeypatch.setattr(model_state, "SMALL", 100)  # so that this model has large weights
    in_plain_loop, in_trainer = WAITS[mode]
    (*_, last), _ = train_plain(small(lora), device, 2, waits, clipping_mode=mode)
    assert without_looks(last).total() == in_plain_loop, last
    steps = Steps(waits)
    train_trainer(tmp_path, small(lora), 4, steps, clipping_mode=mode)
    assert without_looks(steps.seen[-1]).total() == in_trainer, steps.seen[-1]


@pytest.mark.table("loops")
def test_each_group_of_parameters_waits_once(device, waits):
    """Its sum is formed, and its memory freed, before the others are known."""
    model, batch = build("bert").to(device), {k: v.to(device) for k, v in batch_for("bert", 8).items()}
    with PerExampleClipper(model, PerLayerClipping(FlatClipping(1.0)), self_check=False) as clipper:
        losses = losses_function(model)(batch)
        with waits() as found:
            clipper.backward(losses)
        groups = len(clipper.engine.groups)
    assert groups > 10 and found.total() == groups + 1, found  # the losses


@pytest.mark.table("loops")
def test_a_trainer_on_the_device_checks_itself(device, tmp_path):
    trainer = train_trainer(tmp_path, build("bert", dropout=0.1), 2, self_check=True)
    assert next(trainer.model.parameters()).device.type == device.type
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert trainer.privacy_spent().steps == 2 and trainer._run.verified


@pytest.mark.table("loops")
def test_a_loop_on_the_device_goes_on_from_a_checkpoint(device, tmp_path):
    if device.type == "simulated":
        pytest.skip("torch saves no tensors whose memory it does not know")
    first, second = build("bert", dropout=0.1), build("bert", dropout=0.1, seed=1)
    train_plain(first, device, 2, save=tmp_path / "checkpoint.pt")
    _, engine = train_plain(second, device, 0, resume=tmp_path / "checkpoint.pt")
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert p.device == q.device and torch.equal(p, q)
    assert engine.steps == 2


@pytest.mark.table("loops")
def test_what_the_device_has_to_spare_is_kept(tmp_path, device, monkeypatch):
    settled, settle = [], MeasuredBudget.settle
    monkeypatch.setattr(MeasuredBudget, "settle", lambda self, limit: (settled.append(limit), settle(self, limit)))
    train_trainer(tmp_path, small(False), 6, clipping_mode="ghost", memory_budget="auto")
    (limit,) = settled
    memory = DeviceMemory.of(device)
    assert 0 < limit <= min(PART * memory.highest, SHARE * (memory.free + memory.highest))
