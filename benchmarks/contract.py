"""What the contract of a release costs in every step, part by part, in both loops.

    python -m benchmarks.contract --quick
    python -m benchmarks.contract --json contract.json

A 4-layer BERT of d = 512 and a model of one Linear layer are trained by DPTrainer and by PrivacyEngine. Every part is
timed inside the running step (thread time); `share` is of the whole private step, of which it is a part already.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine
from dp_transformers.clipping import PerExampleClipper
from dp_transformers.clipping.model_state import ModelState
from dp_transformers.runtime.randomness import SecretSeeds
from dp_transformers.step import step as private_step
from dp_transformers.step.order import DrawOrder
from dp_transformers.step.releases import PrivateLoss, ReleasedGradients
from dp_transformers.step.step import PrivateStep

from .harness import Benchmark, parser
from .models import Shape, build_transformer

PARTS = {
    "random numbers": [(SecretSeeds, "reseed")],
    "state of the model": [(ModelState, "before_forward"), (ModelState, "require_unchanged")],
    "trainable parameters": [(PerExampleClipper, "require_same_parameters")],
    "sums": [(DrawOrder, "begin_sum")],
    "mixed rows": [(private_step, "refuse_mixed")],
    "draws": [(DrawOrder, "begin"), (DrawOrder, "hand_out")],
    "optimizers": [(ReleasedGradients, "refuse_unreleased")],
    "private loss": [(PrivateLoss, "add"), (PrivateLoss, "release")],
}
WARM_UP = 3


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


def losses(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")


@contextmanager
def timed() -> Iterator[tuple[dict[str, list[float]], list[float]]]:
    """Seconds of every part in each step, without those of parts inside it, and of the steps."""
    parts, steps, now, inside = defaultdict(list), [], defaultdict(float), [0.0]
    originals: list[tuple[type, str, Callable]] = []

    def measured(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - start
                now[name] += took - inside.pop()
                inside[-1] += took

        return call

    last = [time.thread_time()]
    release = PrivateStep.release

    def released(step: PrivateStep) -> None:
        release(step)
        steps.append(time.thread_time() - last[0])
        for name in PARTS:
            parts[name].append(now.pop(name, 0.0))
        last[0] = time.thread_time()

    for name, methods in PARTS.items():
        for owner, method in methods:
            originals.append((owner, method, getattr(owner, method)))
            setattr(owner, method, measured(name, getattr(owner, method)))
    PrivateStep.release = released
    try:
        yield parts, steps
    finally:
        PrivateStep.release = release
        for owner, method, original in originals:
            setattr(owner, method, original)


def by_trainer(
    model: nn.Module, data: TensorDataset, names: Sequence[str], physical: int, batch: int, steps: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = DPTrainingArguments(
            output_dir=folder,
            noise_multiplier=1.0,
            target_delta=1e-7,
            expected_batch_size=batch,
            per_device_train_batch_size=physical,
            max_steps=steps,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=10**6,
            disable_tqdm=True,
            remove_unused_columns=False,
        )

        def collate(rows):
            return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}

        DPTrainer(model, args, collate, data, per_example_loss_func=losses).train()


def by_engine(
    model: nn.Module, data: TensorDataset, names: Sequence[str], physical: int, batch: int, steps: int
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model.train(),
        optimizer=optimizer,
        data_loader=DataLoader(data, batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=physical,
    )
    while engine.steps < steps:
        for rows in loader:
            batch = dict(zip(names, rows, strict=True))
            labels = batch.pop("labels")
            losses(model(**batch), labels).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if engine.steps >= steps:
                break


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=10)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--physical", type=int, default=16, help="examples that are processed at once")
    p.add_argument("--examples-per-step", type=int, default=64)
    args = p.parse_args(argv)
    if args.quick:
        args.tokens, args.examples_per_step = 32, 16
    benchmark = Benchmark("contract", args)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    shape = Shape(width=512, layers=4, tokens=args.tokens, size=args.physical)
    ids, labels = torch.randint(5, 900, (4096, args.tokens)), torch.randint(0, 2, (4096,))
    cases = {
        "BERT, 4 layers, d = 512": (
            lambda: build_transformer("bert", shape),
            TensorDataset(ids, labels),
            ("input_ids", "labels"),
        ),
        "one Linear layer": (OneLayer, TensorDataset(torch.randn(4096, 64), labels), ("x", "labels")),
    }
    for model_name, (build, data, names) in cases.items():
        for loop_name, loop in (("DPTrainer", by_trainer), ("PrivacyEngine", by_engine)):
            with timed() as (parts, steps):
                loop(build(), data, names, args.physical, args.examples_per_step, benchmark.repeats + WARM_UP)
            step = statistics.median(steps[WARM_UP:])
            case = {"model": model_name, "loop": loop_name, "examples": args.examples_per_step}
            benchmark.add(case, "private step", {"ms": 1e3 * step})
            medians = {name: statistics.median(seconds[WARM_UP:]) for name, seconds in parts.items()}
            for name, seconds in [*medians.items(), ("together", sum(medians.values()))]:
                benchmark.add(case, name, {"us": 1e6 * seconds, "share": seconds / step})


if __name__ == "__main__":
    main()
