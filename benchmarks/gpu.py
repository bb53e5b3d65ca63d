"""One table for one card: speed, memory and largest batch at the sizes of models that people fine-tune.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --models llama-1b-lora --lengths 512 --dtypes bf16 --json gpu.json
    python -m benchmarks.gpu --device cpu --dtypes fp32 --layers 1 --tokens-per-batch 1024
    python -m benchmarks.gpu --toy

The weights are random. Full fine-tuning and LoRA are measured beside plain training, Opacus and opake. The table shows
forward, backward and clipping of one physical batch; *step*, which is printed as it comes, is a whole step of
--examples-per-step examples with its noise and the optimizer. On a card every contender takes turns with plain
training alone, so that no more than two models lie there; on the CPU all take turns. The largest batch is the one that
the card's memory has room for.
--toy does all of this with tiny models, on the CPU unless --device says otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import torch

from .contenders import Task, field
from .harness import Benchmark, Contender, Row, parser
from .memory import peaks
from .models import Shape, build_transformer, transformer_losses
from .report import table

SHAPES = {
    "bert-base": Shape(width=768, layers=12, vocabulary=30522),
    "modernbert-base": Shape(width=768, layers=22, vocabulary=50368, inner=1152),
    "smollm2-135m": Shape(width=576, layers=30, vocabulary=49152, inner=1536, key_value_heads=3, tied=True),
    "llama-1b": Shape(width=2048, layers=16, vocabulary=128256, inner=8192, key_value_heads=8, tied=True),
    "llama-8b": Shape(width=4096, layers=32, vocabulary=128256, inner=14336, key_value_heads=8, head_width=128),
}
KINDS = {"bert-base": "bert", "modernbert-base": "modernbert"}  # the others are Llamas
TOY = Shape(width=64, layers=1, vocabulary=50)
MODES = ("auto", "ghost")
PARTS = ("time", "memory")
COLUMNS = ("ratio", "tokens_per_second", "peak_mb", "peak_of_plain", "largest_batch", "largest_of_plain")


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__)
    p.set_defaults(device=None)
    models = [*SHAPES, *(f"{name}-lora" for name in SHAPES)]
    default = [name for name in models if name.startswith(("bert-base", "llama-1b"))]
    p.add_argument("--models", nargs="+", choices=models, default=default)
    p.add_argument("--layers", type=int, help="fewer layers than the model has")
    p.add_argument("--vocabulary", type=int, help="a smaller vocabulary than the model has")
    p.add_argument("--lengths", nargs="+", type=int, default=[128, 512], help="tokens per example")
    p.add_argument("--tokens-per-batch", type=int, default=8192, help="physical batch: this many tokens")
    p.add_argument("--examples-per-step", type=int, default=256, help="logical batch of the step figure")
    p.add_argument("--modes", nargs="+", default=list(MODES), help="clipping modes, and per_layer")
    p.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"], help="bf16 is autocast")
    p.add_argument("--budget-gb", type=float, default=16.0, help="memory that the largest batch has on the CPU")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    p.add_argument("--toy", action="store_true", help="tiny models and batches, to see that everything runs")
    args = p.parse_args(argv)
    args.device = args.device or ("cpu" if args.toy else "cuda")
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("there is no CUDA device: --toy shows on the CPU what would be measured.")
    if args.toy:
        args.lengths, args.tokens_per_batch = [8], 32
    elif args.quick:
        args.lengths, args.dtypes = [128], ["bf16"]
    if args.tokens_per_batch < 2 * max(args.lengths):
        p.error(
            "memory is measured with half a batch, too: let --tokens-per-batch be twice the longest length or more"
        )
    benchmark = Benchmark("gpu", args)
    budget = args.budget_gb * 1e9 if args.device == "cpu" else torch.cuda.get_device_properties(0).total_memory
    lines = []
    for model in args.models:
        for tokens in args.lengths:
            for dtype in args.dtypes:
                case = {"model": model, "tokens": tokens, "batch": args.tokens_per_batch // tokens, "dtype": dtype}
                lines += measured(benchmark, case, budget)
    print("\n" + "\n".join(table(lines)))


def measured(benchmark: Benchmark, case: Row, budget: float) -> list[Row]:
    """The lines of the table for one case: a row for each contender."""
    size = case["batch"]
    contenders = contenders_of(benchmark, case, size)
    names = list(contenders)
    figures: dict[str, Row] = {name: {} for name in names}
    parts = {"step": (benchmark.args.examples_per_step / size, 1), "backward": (1, 0)}
    if "time" in benchmark.args.parts:
        for others in [names[1:]] if benchmark.device.type == "cpu" else [[name] for name in names[1:]]:
            figures |= benchmark.compare(case, {each: contenders[each] for each in (names[0], *others)}, parts)
            release(benchmark)
    for name in names:
        if "ms" in figures[name]:
            figures[name]["tokens_per_second"] = size * case["tokens"] / figures[name]["ms"] * 1e3
    if "memory" in benchmark.args.parts:
        found = peaks(
            benchmark,
            {**case, "part": "memory"},
            lambda batch: contenders_of(benchmark, case, batch),
            size // 2,
            budget,
        )
        release(benchmark)
        for name in names:
            figures[name] |= found[name]
    shown = (*COLUMNS, "failed")
    return [{**case, "contender": name, **{k: v for k, v in figures[name].items() if k in shown}} for name in names]


def contenders_of(benchmark: Benchmark, case: Row, size: int) -> dict[str, Contender]:
    name = case["model"]
    base = name.removesuffix("-lora")
    shape = TOY if benchmark.args.toy else SHAPES[base]
    smaller = {k: v for k in ("layers", "vocabulary") if (v := getattr(benchmark.args, k)) is not None}
    shape = replace(shape, tokens=case["tokens"], size=size, **smaller)
    kind = KINDS.get(base, "llama") + name.removeprefix(base)
    losses = transformer_losses(kind, shape, benchmark.device)
    task = Task(lambda: build_transformer(kind, shape), losses, size, benchmark.device, case["dtype"] == "bf16")
    return field(task, peers=benchmark.args.peers, modes=benchmark.args.modes)


def release(benchmark: Benchmark) -> None:
    """Give the memory of the models that took their turns back to the card."""
    gc.collect()
    if benchmark.device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
