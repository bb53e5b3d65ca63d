"""What a training does before its first step, counted: passes over the model, evaluations of ε, modules imported."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from models import VOCABULARY, build
from torch.utils.data import DataLoader

from benchmarks.models import Shape
from benchmarks.startup import parts
from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine
from dp_transformers.clipping.checks.oracle import Oracle
from dp_transformers.clipping.engine import ClippingEngine
from dp_transformers.mechanism.accounting import gaussian

BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-4}


def rows():
    ids = torch.randint(1, VOCABULARY, (40, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": torch.tensor(i % 2)} for i, x in enumerate(ids)]  # fmt: skip


def train_by_trainer(model, tmp_path, mode):
    arguments = DPTrainingArguments(
        output_dir=tmp_path, max_steps=2, per_device_train_batch_size=8, expected_batch_size=8, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, clipping_mode=mode, **BUDGET,
    )  # fmt: skip
    DPTrainer(model, arguments, train_dataset=rows()).train()


def train_by_engine(model, tmp_path, mode):
    model, optimizer, criterion, loader = PrivacyEngine().make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.CrossEntropyLoss(),
        data_loader=DataLoader(rows(), batch_size=8), epochs=1, max_grad_norm=1.0, clipping_mode=mode, **BUDGET,
    )  # fmt: skip
    for batch in loader:
        optimizer.zero_grad()
        labels = batch.pop("labels")
        criterion(model(**batch).logits, labels).backward()
        optimizer.step()


@pytest.mark.parametrize(("train", "evaluations"), [(train_by_trainer, 8), (train_by_engine, 4)])
@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_passes_of_the_self_check_and_evaluations_of_epsilon(tmp_path, monkeypatch, train, evaluations, mode):
    """15 forward passes: 1 for the precision, 5 to discover owners, 1 of eight rows that are clipped, and each by itself.
    6 passes are of more than one row."""
    model, counts, checking = build("bert"), Counter(), []

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] += name == "_pld_epsilon" or bool(checking)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    def compare(*args, **kwargs):
        if not counts["comparisons"]:
            checking.append("now")
        errors = original(*args, **kwargs)
        checking.clear()
        counts["comparisons"] += 1
        return errors

    original = Oracle.compare
    monkeypatch.setattr(Oracle, "compare", compare)
    count(torch.autograd, "grad")
    count(ClippingEngine, "backward")
    count(gaussian, "_pld_epsilon")
    model.register_forward_pre_hook(lambda *args: counts.update(forward=bool(checking)))
    train(model, tmp_path, mode)
    assert 0 < counts.pop("_pld_epsilon") <= evaluations
    assert counts == {"comparisons": 1, "forward": 15, "backward": 1, "grad": 24 if mode == "ghost" else 22}


def test_importing_the_trainer_brings_nothing_large(tmp_path):
    """What accounts and what trains others than the Trainer's models is imported where it is used."""
    code = (
        "import sys, torch; from transformers import Trainer, TrainingArguments; before = {*sys.modules}\n"
        "from dp_transformers import DPTrainer, DPTrainingArguments; new = {m.split('.')[0] for m in {*sys.modules} - before}\n"
        "large = {'dp_accounting', 'scipy', 'peft', 'trl', 'datasets', 'pandas', 'matplotlib', 'cryptography'}\n"
        "print(sorted(new & (large - {m.split('.')[0] for m in before})))\n"
        "print(sorted(m for m in ('dp_accounting', 'scipy.stats', 'scipy.signal') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


@pytest.mark.parametrize("name", ["Trainer", "DPTrainer"])
def test_the_benchmark_tells_the_parts(name):
    figures = parts(name, Shape(width=64, layers=1, vocabulary=50, tokens=8, size=2))
    private = name == "DPTrainer"
    assert figures["passes"] == 9 * private and (figures["check_ms"] > 0) is private
    assert figures["startup_ms"] == pytest.approx(sum(v for key, v in figures.items() if key not in ("startup_ms", "passes")))  # fmt: skip
