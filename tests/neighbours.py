"""Two trainings of one model, with and without one example, in either loop: how far the released sums are apart, in
units of C.

Noise is off, the learning rate is zero and the draws are the same but for the example, so that what moves is what
noise has to cover.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import trainable
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import TrainerCallback

from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine
from dp_transformers.losses.heads import find_per_example_loss
from dp_transformers.mechanism.sampling import DrawSampler

LOOPS = ["trainer", "engine"]
DELTA = 1e-4


@dataclass
class Task:
    """What is trained: ``model`` makes it anew, ``loss`` is f(outputs, labels) -> (B,), None where the library knows
    the head's."""

    model: Callable[[], nn.Module]
    rows: Sequence[Any]
    collate: Callable | None = None
    loss: Callable | None = None
    bound: float = 0.1
    expected: int | None = None  # all of them
    physical: int = 4
    steps: int = 1
    mode: str = "auto"
    seed: int | None = 5
    sigma: float = 0.0
    callbacks: Sequence[TrainerCallback] = ()
    before_forward: Callable = lambda: None  # in an engine's loop
    workers: int = 0
    worker_init_fn: Callable | None = None
    arguments: dict | None = None  # of DPTrainingArguments
    options: dict | None = None  # of make_private
    body: Callable[[PlainLoop, Any], None] | None = None  # what a plain loop does with a batch, its step included
    check: bool = True  # compare clipping with one example at a time before the first step

    @property
    def batch_size(self) -> int:
        return self.expected or len(self.rows)


@dataclass
class PlainLoop:
    """What make_private returned, for the body of a loop."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    criterion: Any = None


class Noted(TrainerCallback):
    """The sums that the optimizer is given, in units of C."""

    def __init__(self, task: Task):
        self.task, self.sums = task, []

    def note(self, model: nn.Module) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
        self.sums.append(torch.cat([g.double().flatten() for g in grads]) * self.task.batch_size / self.task.bound)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.note(model)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Stacked; texts are padded on the right."""
    return padded(rows, side="right")


def padded(rows: list[dict], side: str) -> dict[str, torch.Tensor]:
    """With an attention_mask where there are ids of several lengths."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in rows[0]}
    if "input_ids" in columns:
        columns.setdefault("attention_mask", [torch.ones_like(x) for x in columns["input_ids"]])
    return {
        name: nn.utils.rnn.pad_sequence(column, batch_first=True, padding_value=fill[name], padding_side=side)
        if name in fill and column[0].dim()
        else torch.stack(column)
        for name, column in columns.items()
    }


def texts(lengths: Sequence[int], *, classes: int | None = 3, vocabulary: int = 50) -> list[dict]:
    """A text of each length, with a class each, or to be continued."""
    generator, rows = torch.Generator().manual_seed(0), []
    for length in lengths:
        ids = torch.randint(3, vocabulary, (length,), generator=generator)
        labels = ids if classes is None else torch.randint(0, classes, (), generator=generator)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def points(size: int, width: int = 6, classes: int = 3) -> list[dict]:
    """Vectors with a class each."""
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(width, generator=generator), "labels": torch.tensor(i % classes)} for i in range(size)]


class At(Dataset):
    """Rows that ``read(i)`` gives for each of these numbers."""

    def __init__(self, read: Callable[[int], Any], numbers: Sequence[int]):
        self.read, self.numbers = read, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Any:
        return self.read(self.numbers[i])


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def split(batch: Any) -> tuple[tuple, dict, torch.Tensor]:
    """What the model is given, and the labels: the last of a tuple, or of this name."""
    if isinstance(batch, Mapping):
        return (), {name: x for name, x in batch.items() if name != "labels"}, batch["labels"]
    return tuple(batch[:-1]), {}, batch[-1]


def trainer_for(task: Task, folder: str, cls: type = DPTrainer, **changes: Any) -> DPTrainer:
    args = {"output_dir": folder, "noise_multiplier": task.sigma, "target_delta": DELTA, "max_grad_norm": task.bound,
            "expected_batch_size": task.batch_size, "per_device_train_batch_size": task.physical, "max_steps": task.steps,
            "learning_rate": 0.0, "optim": "sgd", "lr_scheduler_type": "constant", "use_cpu": True, "disable_tqdm": True,
            "save_strategy": "no", "report_to": "none", "dp_seed": task.seed, "clipping_mode": task.mode,
            "remove_unused_columns": False, "dataloader_num_workers": task.workers, "self_check": task.check}  # fmt: skip
    args = DPTrainingArguments(**{**args, **(task.arguments or {}), **changes})
    own = {} if task.loss is None else {"per_example_loss_func": task.loss}
    return cls(seeded(task.model), args, task.collate or collate, task.rows, callbacks=list(task.callbacks), **own)


def engine_for(task: Task, **options: Any) -> tuple:
    model = seeded(task.model)
    loader = DataLoader(
        task.rows, task.batch_size, collate_fn=task.collate or collate, num_workers=task.workers, worker_init_fn=task.worker_init_fn,
    )  # fmt: skip
    options = {"noise_multiplier": task.sigma, "max_grad_norm": task.bound, "max_physical_batch_size": task.physical,
               "loss_reduction": "none", "clipping_mode": task.mode, "self_check": task.check, **(task.options or {}),
               **options}  # fmt: skip
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    engine = PrivacyEngine(dp_seed=task.seed)
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)


def backward(task: Task, engine: PrivacyEngine, model: nn.Module, batch: Any) -> None:
    args, kwargs, labels = split(batch)
    task.before_forward()
    engine.backward((task.loss or find_per_example_loss(model))(model(*args, **kwargs), labels))


def plain_loop(task: Task, **options: Any) -> PlainLoop:
    engine, model, optimizer, *criterion, loader = engine_for(task, **options)
    return PlainLoop(engine, model, optimizer, loader, *criterion)


def train(loop: str, task: Task, noted: Noted | None = None) -> list[torch.Tensor]:
    """The sum that each step of a training releases, in units of C; ``noted`` has them also where it was refused."""
    noted = noted or Noted(task)
    if loop == "trainer":
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_for(task, folder)
            trainer.add_callback(noted)
            trainer.train()
        return noted.sums
    plain = plain_loop(task)
    while len(noted.sums) < task.steps:
        for batch in plain.loader:
            if task.body is not None:
                task.body(plain, batch)
            else:
                plain.optimizer.zero_grad()
                backward(task, plain.engine, plain.model, batch)
                plain.optimizer.step()
            if plain.engine.steps > len(noted.sums):  # it was the last physical batch
                noted.note(plain.model)
            if len(noted.sums) == task.steps:
                break
    plain.engine.detach()
    return noted.sums


def moves(
    loop: str, task: Task, example: int | tuple[int, ...], again: Task | None = None, noted: Noted | None = None
) -> list[tuple[bool, float]]:
    """For each step whether it drew ``example``, or one of these indices that one example has, and how far the sum
    moves when it is taken out. ``again`` is the same task made anew, where its parts remember a training."""
    taken = {example} if isinstance(example, int) else set(example)
    with pytest.MonkeyPatch.context() as patch:
        drawn, draw = [], DrawSampler.draw

        def with_it(sampler):
            drawn.append(draw(sampler))
            return drawn[-1]

        def without_it(sampler):
            found = draw(sampler)
            return type(found)(found.number, [i for i in found.indices if i not in taken])

        patch.setattr(DrawSampler, "draw", with_it)
        sums = train(loop, task, noted)
        patch.setattr(DrawSampler, "draw", without_it)
        others = train(loop, again or task)
    assert len(sums) == len(others) == task.steps
    return [
        (not taken.isdisjoint(d.indices), float((a - b).norm())) for d, a, b in zip(drawn, sums, others, strict=False)
    ]


def assert_bounded(found: list[tuple[bool, float]]) -> None:
    """A step that drew the example moves by C at most, another not at all; some step drew it, and it did not go
    unseen."""
    assert max(move for drawn, move in found if drawn) > 1e-3
    for drawn, move in found:
        assert move <= (1 + 1e-5 if drawn else 1e-5), (
            f"{move:.3f} C in a step that {'drew' if drawn else 'did not draw'} it"
        )
