"""What a training with DPTrainer takes before it goes at its pace, beside one with Trainer, by part.

    python -m benchmarks.startup --quick
    python -m benchmarks.startup --json startup.json

Every figure is the process time of a fresh Python, with the byte code that an installed package has, in which torch,
transformers' Trainer and the model are there before the clock starts. `startup_ms` ends with the first step, less the
median of the later ones. Its parts: `import_ms`, the trainer and its arguments; `accounting_ms`, the import of
dp_accounting and of the scipy that it takes; `build_ms`, the trainer is made, which calibrates the noise; `check_ms`,
the self-check; `first_step_ms`, all else. `passes` are the model's forward passes in the self-check.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .harness import Benchmark, Row, parser, spread
from .models import Shape, build_transformer

TRAINERS, STEPS, EXAMPLES = ("Trainer", "DPTrainer"), 6, 2000


def parts(name: str, shape: Shape) -> dict[str, float]:
    """The figures of one training of this process."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = time.process_time
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(clock())

    model = build_transformer("bert", shape)
    ids = torch.randint(1, shape.vocabulary, (EXAMPLES, shape.tokens))
    data = [{"input_ids": ids[i], "attention_mask": torch.ones_like(ids[i]), "labels": i % 2} for i in range(EXAMPLES)]
    check = {"check_ms": 0.0, "passes": 0}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        options: dict[str, Any] = {
            "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": shape.size, "use_cpu": True,
            "save_strategy": "no", "disable_tqdm": True, "report_to": "none",
        }  # fmt: skip
        begin = imported = accounted = clock()
        if name == "DPTrainer":
            from dp_transformers import DPTrainer, DPTrainingArguments

            imported = clock()
            import dp_accounting  # noqa: F401

            accounted = clock()
            stack.enter_context(self_check_watched(model, check))
            privacy = {"target_epsilon": 8.0, "target_delta": 1e-5, "expected_batch_size": shape.size}
            started = clock()
            trainer = DPTrainer(
                model, DPTrainingArguments(**options, **privacy), train_dataset=data, callbacks=[Clock()]
            )
        else:
            started = clock()
            trainer = Trainer(model, TrainingArguments(**options), train_dataset=data, callbacks=[Clock()])
        built = clock()
        trainer.train()
    first = ends[0] - built - statistics.median(b - a for a, b in itertools.pairwise(ends))
    seconds = {"import_ms": imported - begin, "accounting_ms": accounted - imported, "build_ms": built - started}
    figures = {key: 1e3 * value for key, value in seconds.items()}
    figures |= {"check_ms": check["check_ms"], "first_step_ms": 1e3 * first - check["check_ms"]}
    return {"startup_ms": sum(figures.values()), **figures, "passes": check["passes"]}


@contextlib.contextmanager
def self_check_watched(model: torch.nn.Module, seen: dict[str, float]) -> Iterator[None]:
    """Inside, every comparison of rows adds what it takes."""
    from dp_transformers.clipping.checks.oracle import Oracle

    original, passes = Oracle.compare, [0]

    def compare(*args: Any, **kwargs: Any) -> Any:
        before, start = passes[0], time.process_time()
        errors = original(*args, **kwargs)
        seen["check_ms"] += 1e3 * (time.process_time() - start)
        seen["passes"] += passes[0] - before
        return errors

    handle = model.register_forward_pre_hook(lambda *args: passes.__setitem__(0, passes[0] + 1))
    Oracle.compare = compare
    try:
        yield
    finally:
        Oracle.compare = original
        handle.remove()


def in_fresh_process(name: str, shape: Shape, threads: int, compiled: str) -> dict[str, float]:
    """The same of a Python of its own, which finds its byte code in the folder ``compiled``, or leaves it there."""
    code = (
        "import json, torch; from benchmarks.models import Shape; from benchmarks.startup import parts; "
        f"torch.set_num_threads({threads}); print(json.dumps(parts({name!r}, {shape!r})))"
    )
    command, folder = [sys.executable, "-W", "ignore", "-c", code], Path(__file__).parents[1]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": compiled, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument("--width", type=int, default=384)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--vocabulary", type=int, default=30522)
    p.add_argument("--tokens", type=int, nargs="+", default=[4, 64], help="per example")
    p.add_argument(
        "--physical", type=int, default=8, help="examples that are processed at once, and expected in a step"
    )
    args = p.parse_args(argv)
    if args.quick:
        args.tokens = args.tokens[:1]
    benchmark = Benchmark("startup", args)
    with tempfile.TemporaryDirectory() as compiled:
        for tokens in args.tokens:
            shape = Shape(
                width=args.width, layers=args.layers, vocabulary=args.vocabulary, tokens=tokens, size=args.physical
            )
            case: Row = {"model": "bert", "width": args.width, "layers": args.layers, "tokens": tokens}
            if tokens == args.tokens[0]:
                in_fresh_process(TRAINERS[-1], shape, args.threads, compiled)  # compiles
            for name in TRAINERS:
                runs = [in_fresh_process(name, shape, args.threads, compiled) for _ in range(benchmark.repeats)]
                figures: Row = spread("startup_ms", [run["startup_ms"] for run in runs])
                figures |= {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "passes"}
                benchmark.add(case, name, figures | {"passes": runs[0]["passes"]})


if __name__ == "__main__":
    main()
