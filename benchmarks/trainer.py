"""DPTrainer beside Trainer, end to end: examples per second with sampling, noise, accounting and logging included.

    python -m benchmarks.trainer --quick
    python -m benchmarks.trainer --json trainer.json

Both take the same number of optimizer steps of the same logical batch, Trainer through gradient accumulation. The time
is that between the ends of the first and the last step, per example really processed (a Poisson draw varies); what
comes before the end of the first step, calibration and self-check included, is the `startup`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dp_transformers import DPTrainer, DPTrainingArguments

from .harness import Benchmark, parser, spread, summarise
from .models import Shape, build_transformer


class Clock(TrainerCallback):
    """Time and examples at the end of every step."""

    def __init__(self, model: nn.Module, benchmark: Benchmark):
        self.benchmark, self.examples, self.marks = benchmark, 0, []
        model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._mark()

    def _count(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.examples += len(kwargs["input_ids"])

    def _mark(self) -> None:
        self.benchmark.synchronise()
        self.marks.append((self.benchmark.clock(), time.perf_counter(), self.examples))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._mark()


def dataset(kind: str, shape: Shape, examples: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, shape.vocabulary, (examples, shape.tokens))
    labels = torch.arange(examples) % 2 if kind.startswith("bert") else ids
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(examples)]


def train(name: str, kind: str, shape: Shape, data: list, logical: int, steps: int, benchmark: Benchmark) -> Clock:
    model = build_transformer(kind, shape)
    clock = Clock(model, benchmark)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": shape.size, "learning_rate": 1e-5,
            "gradient_accumulation_steps": max(1, logical // shape.size), "logging_steps": 10, "save_strategy": "no",
            "use_cpu": benchmark.device.type == "cpu", "disable_tqdm": True, "report_to": "none",
        }  # fmt: skip
        if name == "Trainer":
            trainer = Trainer(model, TrainingArguments(**options), train_dataset=data)
        else:
            privacy = {"target_epsilon": 8.0, "target_delta": 1e-6, "clipping_mode": name.split()[1]}
            trainer = DPTrainer(model, DPTrainingArguments(**options, **privacy), train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    return clock


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument(
        "--models", nargs="+", choices=["bert", "llama", "bert-lora", "llama-lora"], default=["bert", "llama-lora"]
    )
    p.add_argument("--tokens", type=int, default=128, help="per example")
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocabulary", type=int, default=8000)
    p.add_argument("--physical", type=int, default=16, help="examples that are processed at once")
    p.add_argument("--logical", type=int, default=64, help="examples of a step")
    p.add_argument("--steps", type=int, default=6, help="optimizer steps of a turn")
    p.add_argument("--modes", nargs="+", default=["auto"], help="clipping modes")
    args = p.parse_args(argv)
    if args.quick:
        args.tokens, args.width, args.layers, args.physical, args.logical = 32, 256, 2, 16, 32
    benchmark = Benchmark("trainer", args)
    shape = Shape(args.width, args.layers, args.vocabulary, args.tokens, args.physical)
    names = ["Trainer", *(f"DPTrainer {mode}" for mode in args.modes)]
    for kind in args.models:
        data = dataset(kind, shape, 50 * args.logical)
        times, walls, startups = ({name: [] for name in names} for _ in range(3))
        for _ in range(benchmark.repeats):
            for name in names:
                begin, first, *_, last = train(name, kind, shape, data, args.logical, args.steps, benchmark).marks
                examples = last[2] - first[2]
                times[name].append((last[0] - first[0]) / examples)
                walls[name].append((last[1] - first[1]) / examples)
                startups[name].append(first[0] - begin[0])
        case = {
            "model": kind,
            "width": args.width,
            "layers": args.layers,
            "tokens": args.tokens,
            "logical": args.logical,
        }
        for name, figures in summarise("Trainer", times, walls).items():
            speed = {"examples_per_s": 1e3 / figures["ms"]}
            benchmark.add(
                case,
                name,
                speed | {k: v for k, v in figures.items() if "ratio" in k} | spread("startup_s", startups[name]),
            )


if __name__ == "__main__":
    main()
