"""Noiseless trajectories of tiny models, in both loops and all clipping modes, and the pins that
tests/test_trajectories.py compares them with.

`PYTHONPATH=. python tests/trajectories.py --write` writes the pins, tests/trajectories.json, from the code as it is:
do that only for a change that is meant to change trajectories, and say so where you commit them. A pin holds the hash
of all trainable parameters after each step, for the machine and the versions it was written with, and projections of
how far they moved in the end, for any other.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from models import VOCABULARY, build, losses_function
from oracle import trainable
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from world import World

import dp_transformers
from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine

ROOT, PINS = Path(__file__).resolve().parent.parent, Path(__file__).with_suffix(".json")
EXAMPLES, EXPECTED, STEPS, SEED, CLASSES = 24, 6, 5, 1, 3
RANKS = 2
PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


class Recurrent(nn.Module):
    """An LSTM over ids of one length, and a classifier of its mean state."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(20, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(x))[0].mean(1))


class Convolutions(nn.Module):
    """Two convolutions, the second strided, with a group norm between them, and a classifier of the mean pixel."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.head = nn.Conv2d(4, 6, 3, stride=2), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.norm(self.first(x))))).mean((2, 3)))


def seeded(network: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return network()


def texts(*, classes: bool) -> list[dict[str, torch.Tensor]]:
    """Texts of 4 to 13 tokens, with a class each or to be continued."""
    generator, rows = torch.Generator().manual_seed(0), []
    for _ in range(EXAMPLES):
        ids = torch.randint(1, VOCABULARY, (int(torch.randint(4, 14, (), generator=generator)),), generator=generator)
        labels = torch.randint(CLASSES, (), generator=generator) if classes else ids
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def inputs(make: Callable[[torch.Generator], torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Inputs of one shape, with a class each."""
    generator = torch.Generator().manual_seed(0)
    return [{"x": make(generator), "labels": torch.randint(CLASSES, (), generator=generator)} for _ in range(EXAMPLES)]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stacked, and padded on the right to the longest where rows are texts."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: pad_sequence(column, batch_first=True, padding_value=PADDING[name]) if name in PADDING and column[0].dim() else torch.stack(column)
        for name, column in columns.items()
    }  # fmt: skip


def cross_entropies(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(B,) losses of a plain network."""
    return F.cross_entropy(scores, labels, reduction="none")


@dataclass(frozen=True)
class Task:
    """What is trained. At ``bound`` some examples are clipped and some are not, and it is no power of two, by which
    all products are exact.

    ``loss`` is None where the library knows the head's.
    """

    model: Callable[[], nn.Module]
    rows: Callable[[], list[dict[str, torch.Tensor]]]
    bound: float
    physical: int
    loss: Callable | None = None

    def losses(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """(B,), as DPTrainer computes them."""
        return losses_function(model)(batch) if self.loss is None else self.loss(model(batch["x"]), batch["labels"])


TASKS = {
    "bert": Task(lambda: build("bert"), lambda: texts(classes=True), bound=1.35, physical=2),
    "llama-lora": Task(lambda: build("llama", lora=True), lambda: texts(classes=False), bound=0.8, physical=3),
    "lstm": Task(lambda: seeded(Recurrent), lambda: inputs(lambda g: torch.randint(20, (7,), generator=g)), 0.99, 2, cross_entropies),
    "convolutions": Task(lambda: seeded(Convolutions), lambda: inputs(lambda g: torch.randn(2, 9, 9, generator=g)), 0.95, 3, cross_entropies),
}  # fmt: skip
FOLLOW = ("book_keeping", "per_sample")  # modes that clip during somebody else's loss.backward()
MODES = ("book_keeping", "ghost", "fast_gradient", "per_sample")


@dataclass
class Trajectory:
    """All trainable parameters, flat, before the first step and after each; with the norms of all examples where the
    loop saw them."""

    model: nn.Module
    points: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self):
        self.note()

    def note(self) -> None:
        self.points.append(torch.cat([p.detach().float().flatten() for p in trainable(self.model)]))

    @property
    def moved(self) -> torch.Tensor:
        return self.points[-1].double() - self.points[0].double()


class AfterEachStep(TrainerCallback):
    def __init__(self, trajectory: Trajectory):
        self.trajectory = trajectory

    def on_step_end(self, args, state, control, **kwargs):
        self.trajectory.note()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=0.2, momentum=0.9)


def by_trainer(task: Task, mode: str) -> Trajectory:
    """The trajectory of DPTrainer."""
    model = task.model()
    trajectory = Trajectory(model)
    with tempfile.TemporaryDirectory() as folder:
        args = DPTrainingArguments(
            folder, noise_multiplier=0.0, target_delta=1e-4, dp_seed=SEED, expected_batch_size=EXPECTED, clipping_mode=mode, max_steps=STEPS,
            per_device_train_batch_size=task.physical, max_grad_norm=task.bound, lr_scheduler_type="constant", remove_unused_columns=False,
            use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no", report_to="none",
        )  # fmt: skip
        DPTrainer(model, args, collate, task.rows(), callbacks=[AfterEachStep(trajectory)], optimizers=(momentum(model), None),
                  per_example_loss_func=task.loss).train()  # fmt: skip
    return trajectory


def by_engine(task: Task, mode: str, reduction: str = "mean") -> Trajectory:
    """The trajectory of a plain loop with PrivacyEngine: by ``loss.backward()`` in modes that follow that, else by
    losses of examples."""
    model, follows = task.model(), mode in FOLLOW
    trajectory, engine = Trajectory(model), PrivacyEngine(dp_seed=SEED)
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=momentum(model), data_loader=DataLoader(task.rows(), EXPECTED, collate_fn=collate), noise_multiplier=0.0,
        max_grad_norm=task.bound, loss_reduction=reduction if follows else "none", max_physical_batch_size=task.physical, clipping_mode=mode,
    )  # fmt: skip
    while len(trajectory.points) <= STEPS:
        for batch in loader:
            optimizer.zero_grad()
            losses = task.losses(model, batch)
            if follows:
                getattr(losses, reduction)().backward()
            else:
                engine.backward(losses)
                trajectory.norms.append(engine.clipper.norms)
            optimizer.step()
            if trainable(model)[0].grad is not None:  # otherwise there are more batches of this draw
                trajectory.note()
            if len(trajectory.points) > STEPS:
                break
    engine.detach()
    return trajectory


LOOPS = {"DPTrainer": by_trainer, "PrivacyEngine": by_engine}  # the latter by the mean
CELLS = [(loop, mode, task) for task in TASKS for mode in MODES for loop in LOOPS]
CELLS_OF_RANKS = [("DPTrainer", mode, "bert") for mode in ("book_keeping", "ghost")]


@functools.cache
def run(loop: str, mode: str, task: str) -> Trajectory:
    """The trajectory of a cell, on one thread; made once in each process."""
    assert torch.get_num_threads() == 1
    return LOOPS[loop](TASKS[task], mode)


def name_of(cell: tuple[str, str, str], ranks: int = 1) -> str:
    return " ".join(cell) + (f" on {ranks} ranks" if ranks > 1 else "")


def pin(trajectory: Trajectory) -> dict[str, list]:
    """The hash of the parameters after each step, as little-endian float32, and eight projections of how far they
    moved in the end."""
    hashes = [hashlib.sha256(point.numpy().astype("<f4").tobytes()).hexdigest() for point in trajectory.points[1:]]
    moved = trajectory.moved.numpy()
    signs = np.random.Generator(np.random.PCG64(0)).integers(0, 2, (8, len(moved))) * 2.0 - 1.0
    return {"sha256": hashes, "moved": (signs @ moved).tolist()}


def fingerprint() -> dict[str, str]:
    """What decides how sums are rounded: the processor, the kernels chosen for it, and the versions of what
    computes."""
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "peft", "torch", "transformers")}
    return {"processor": processor(), "capability": torch.backends.cpu.get_cpu_capability(), **versions}


def processor() -> str:
    """Its name, family, model and stepping, for virtual machines all have one name."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return "unknown"
    told = dict(line.replace("\t", "").split(":", 1) for line in first.splitlines() if ":" in line)
    return ", ".join(told.get(name, "unknown").strip() for name in ("model name", "cpu family", "model", "stepping"))


def pins_of_ranks() -> dict[str, dict]:
    """Pins of the cells of several gloo processes, after a check that all processes end with the same."""
    with tempfile.TemporaryDirectory() as folder:
        world = World("trajectories", Path(folder), RANKS)
        first, *others = world.run("pins_of_a_rank", "pins")
        world.end()
    if any(other != first for other in others):
        raise RuntimeError("the processes hold different parameters")
    return first


def pins_of_a_rank(folder: Path) -> dict[str, dict]:
    return {name_of(cell, RANKS): pin(run(*cell)) for cell in CELLS_OF_RANKS}


def write() -> None:
    """Write the pins of the library beside these tests; another one that is installed would be pinned without a
    word."""
    if Path(dp_transformers.__file__).parent.parent != ROOT:
        raise RuntimeError(f"this would pin {dp_transformers.__file__}: set PYTHONPATH={ROOT}")
    pins = {name_of(cell): pin(run(*cell)) for cell in CELLS} | pins_of_ranks()
    PINS.write_text(json.dumps({"fingerprint": fingerprint(), "trajectories": pins}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", required=True, help="write the pins")
    parser.parse_args()
    warnings.filterwarnings("ignore", message="dp_seed")
    torch.set_num_threads(1)
    write()
