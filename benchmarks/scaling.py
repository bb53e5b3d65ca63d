"""How cost grows with batch, length, width, depth, vocabulary and LoRA rank: measured exponents beside those of the
formulas.

    python -m benchmarks.scaling --quick
    python -m benchmarks.scaling --json scaling.json

Each dimension is multiplied by 1, 2, 4 with the others at the base shape; the exponent is the slope of log time over
log dimension. The formula counts multiplications and additions: of plain training 6 per weight and token (4 where
weights are frozen) and 12·T²·width per layer and example in attention; of privacy 2·T²·(d + p) for the ghost norm of a
d × p layer with T < dp / (d + p), nothing for instantiated ones; of the ghost mode a second input-gradient pass, and
instances that are thrown away. What it leaves out (memory traffic, calls) is the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .contenders import Task, field
from .harness import Benchmark, parser
from .models import Shape, build_transformer, transformer_losses

DIMENSIONS = {
    "batch": "size",
    "tokens": "tokens",
    "width": "width",
    "depth": "layers",
    "vocabulary": "vocabulary",
    "rank": "rank",
}


def operations(shape: Shape, contender: str, *, lora: bool) -> float:
    """Floating-point operations of forward, backward and clipping of one batch of the Llama."""
    d, f, t, r = shape.width, shape.hidden, shape.tokens, shape.rank
    inside = [(d, d)] * 4 + [(d, f), (d, f), (f, d)]
    linears = inside * shape.layers + [(d, shape.vocabulary)]
    adapters = [pair for a, b in inside * shape.layers for pair in ((a, r), (r, b))] if lora else []
    trained = adapters if lora else linears
    weights = sum(a * b for a, b in linears + adapters)
    attention = 4 * t * t * d * shape.layers  # of one pass; backward is two
    total = (4 * weights + 2 * sum(a * b for a, b in trained)) * t + 3 * attention
    if contender != "plain":
        total += sum(2 * t * t * (a + b) for a, b in trained if t < a * b / (a + b))
        if not lora:
            total += 2 * t * t * d  # the embedding, by comparing ids
    if contender == "ghost":
        total += 2 * weights * t + 2 * attention + sum(2 * t * a * b for a, b in trained if t >= a * b / (a + b))
    return shape.size * total


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope of log y over log x."""
    xs, ys = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=7)
    p.add_argument("--dimensions", nargs="+", choices=list(DIMENSIONS), default=list(DIMENSIONS))
    p.add_argument(
        "--base",
        nargs=6,
        type=int,
        default=[8, 64, 256, 2, 1000, 8],
        metavar="N",
        help="batch, tokens, width, depth, vocabulary, rank",
    )
    args = p.parse_args(argv)
    if args.quick:
        args.base = [4, 32, 128, 1, 500, 4]
    benchmark = Benchmark("scaling", args)
    size, tokens, width, layers, vocabulary, rank = args.base
    base = Shape(width, layers, vocabulary, tokens, size, rank)
    for dimension in args.dimensions:
        lora, attribute = dimension == "rank", DIMENSIONS[dimension]
        kind = "llama-lora" if lora else "llama"
        values = [getattr(base, attribute) * k for k in (1, 2, 4)]
        shapes = [replace(base, **{attribute: value}) for value in values]
        figures = []
        for value, shape in zip(values, shapes, strict=True):
            losses = transformer_losses(kind, shape, benchmark.device)
            task = Task(lambda k=kind, s=shape: build_transformer(k, s), losses, shape.size, benchmark.device)
            contenders = field(task, peers=False, modes=("book_keeping", "ghost"))
            figures.append(benchmark.compare({"model": kind, dimension: value}, contenders, {"backward": (1, 0)}))
        for name in figures[0]:
            measured = slope(values, [row[name]["ms"] for row in figures])
            formula = slope(values, [operations(shape, name, lora=lora) for shape in shapes])
            benchmark.add({"model": kind, "dimension": dimension}, name, {"exponent": measured, "formula": formula})


if __name__ == "__main__":
    main()
