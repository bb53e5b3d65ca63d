"""Time against memory where instances may be kept within a budget, and random settings none of which exceeds its own.

    python -m benchmarks.budget --quick
    python -m benchmarks.budget --model llama --width 768 --layers 2 --tokens 256 --batch 4 --checkpointed

Budgets are given as parts of the peak of plain training. *over_mb* is the peak less that of the same mode without a
budget and less the budget: above 0 the budget would be exceeded. With *auto* the part is what a device, which is
played here, says that it has free.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import nn

from dp_transformers.clipping.measured_budget import PART, SHARE, DeviceMemory

from .contenders import Task, ours, plain
from .harness import Benchmark, Contender, Phase, Row, parser
from .models import KINDS, Shape, build_transformer, transformer_losses

MODES = ("book_keeping", "ghost")


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__)
    kinds = [*KINDS, *(f"{kind}-lora" for kind in KINDS)]
    p.add_argument("--model", choices=kinds, default="bert")
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--vocabulary", type=int, default=1000)
    p.add_argument("--tokens", type=int, default=256, help="tokens per example")
    p.add_argument("--batch", type=int, default=4, help="examples")
    p.add_argument("--rank", type=int, default=16, help="of the LoRA adapters")
    p.add_argument("--checkpointed", action="store_true", help="recompute activations in the backward pass")
    p.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    p.add_argument("--budgets", nargs="+", type=float, default=[0.1, 0.2, 0.4, 0.8], help="parts of plain's peak")
    p.add_argument("--settings", type=int, default=20, help="random ones")
    args = p.parse_args(argv)
    if args.quick:
        args.width, args.layers, args.budgets, args.settings = 256, 1, [0.2, 0.8], 5
    benchmark = Benchmark("budget", args)
    shape = Shape(args.width, args.layers, args.vocabulary, args.tokens, args.batch, args.rank)
    curve(benchmark, args.model, shape, args.modes, args.budgets, checkpointed=args.checkpointed)
    numbers = random.Random(0)
    for _ in range(args.settings):
        options = {name: numbers.random() < 0.5 for name in ("auto", "checkpointed", "bf16")}
        within(benchmark, *random_setting(numbers), **options)


def task_of(benchmark: Benchmark, kind: str, shape: Shape, *, checkpointed: bool = False, bf16: bool = False) -> Task:
    def build() -> nn.Module:
        model = build_transformer(kind, shape)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        return model

    return Task(build, transformer_losses(kind, shape, benchmark.device), shape.size, benchmark.device, bf16)


def curve(
    benchmark: Benchmark,
    kind: str,
    shape: Shape,
    modes: Sequence[str],
    parts: Sequence[float],
    *,
    checkpointed: bool = False,
) -> None:
    """Record time and peak of each mode, without a budget and with each."""
    task = task_of(benchmark, kind, shape, checkpointed=checkpointed)
    contenders: dict[str, Contender] = {"plain": partial(plain, task)}
    plain_peak = benchmark.peak_bytes(contenders["plain"])
    peaks = {"plain": plain_peak}
    for mode in modes:
        for part in (None, *parts):
            name, budget = mode if part is None else f"{mode} + {part:g}", part and part * plain_peak
            contenders[name] = partial(ours, task, mode, memory_budget=budget)
            peaks[name] = benchmark.peak_bytes(contenders[name])
    case = described(kind, shape) | {"checkpointed": checkpointed}
    figures = benchmark.compare(case, contenders, {"backward": (1, 0)})
    for name, row in figures.items():
        row |= {"peak_mb": peaks[name] / 1e6, "peak_of_plain": peaks[name] / plain_peak}
        benchmark.add(case | {"part": "peak"}, name, {k: row[k] for k in ("ratio", "peak_mb", "peak_of_plain")})


def random_setting(numbers: random.Random) -> tuple[str, Shape, str, float]:
    """A model, its shape and batch, a mode, and a budget as a part of plain training's peak."""
    kind = numbers.choice([*KINDS, *KINDS, *(f"{kind}-lora" for kind in KINDS)])
    tokens = numbers.choice([16, 64, 144, 256, 324])
    shape = Shape(
        64 * numbers.randint(1, 6),
        numbers.randint(1, 3),
        numbers.choice([50, 500, 3000]),
        tokens,
        max(1, numbers.choice([256, 512, 1024]) // tokens),
        numbers.choice([4, 16]),
    )
    return kind, shape, numbers.choice(MODES), 10 ** numbers.uniform(-1.5, 0.5)


def within(
    benchmark: Benchmark,
    kind: str,
    shape: Shape,
    mode: str,
    part: float,
    *,
    auto: bool = False,
    checkpointed: bool = False,
    bf16: bool = False,
) -> Row:
    """Record by how much a peak is above that without a budget, and the budget."""
    task = task_of(benchmark, kind, shape, checkpointed=checkpointed, bf16=bf16)
    plain_peak, usual = (benchmark.peak_bytes(c) for c in (partial(plain, task), partial(ours, task, mode)))
    budget = part * plain_peak
    contender: Contender = partial(ours, task, mode, memory_budget=budget)
    if auto:
        contender, budget = partial(settled, task, mode), min(SHARE * budget, PART * usual)
    with device_with(usual, part * plain_peak) if auto else nullcontext():
        peak = benchmark.peak_bytes(contender)
    figures = {"plain_mb": plain_peak / 1e6, "usual_mb": usual / 1e6, "budget_mb": budget / 1e6, "peak_mb": peak / 1e6}
    figures["over_mb"] = (peak - usual - budget) / 1e6
    how = {"auto": auto, "checkpointed": checkpointed, "bf16": bf16}
    benchmark.add(described(kind, shape) | how | {"part": "random"}, mode, figures)
    return figures


def settled(task: Task, mode: str) -> Sequence[Phase]:
    """After so many steps that what may be kept is known."""
    phases = ours(task, mode, memory_budget="auto")
    for _ in range(4):
        for phase in phases:
            phase()
    return phases


@contextmanager
def device_with(highest: float, free: float) -> Iterator[None]:
    """Inside, every device says this of its memory."""
    of = DeviceMemory.of
    DeviceMemory.of = classmethod(lambda cls, device: cls(highest, free))
    try:
        yield
    finally:
        DeviceMemory.of = of


def described(kind: str, shape: Shape) -> Row:
    sizes = {"width": shape.width, "layers": shape.layers, "tokens": shape.tokens, "batch": shape.size}
    return {"model": kind, **sizes}


if __name__ == "__main__":
    main()
