"""Opacus's examples, trained plainly, with this library and with Opacus, in turns: lines, outcome, time.

    python -m benchmarks.opacus_examples --quick
    python -m benchmarks.opacus_examples --examples mnist lora --rows 4096 --epochs 20

Each example is one module beside this one, whose functions `plain`, `private` and `opacus` hold what a user writes:
model, optimizer, loader and loop, an epoch at a time. Lines are counted between these functions: those that are
replaced, taken away or added. `lines` are those from the plain function to this one, `from_opacus` those from
Opacus's. Times are of a step, by epochs; the first, with what each library prepares and checks in it, does not count.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from importlib import import_module
from types import ModuleType

import torch

from ..harness import Benchmark, Row, parser, summarise

EXAMPLES = ("mnist", "cifar10", "char_lstm", "dcgan", "imdb", "image_classifier", "text_classifier", "lora")
CONTENDERS = ("plain", "private", "opacus")


def example(name: str) -> ModuleType:
    return import_module(f"{__package__}.{name}")


def lines_changed(old: Callable, new: Callable) -> int:
    """How many lines differ between two functions, but for empty ones and that of the function's name."""
    before, after = ([line for line in inspect.getsource(f).splitlines()[1:] if line.strip()] for f in (old, new))
    changes = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")


def compare(name: str, benchmark: Benchmark) -> None:
    """Let the three train on the same rows, an epoch each in turns."""
    args, its = benchmark.args, example(name)
    torch.manual_seed(0)
    data, test = its.rows(args.rows), its.rows(args.rows)
    steps = args.rows / its.BATCH_SIZE
    ready = {contender: getattr(its, contender)(data, args.epochs) for contender in CONTENDERS}
    times, walls = ({contender: [] for contender in CONTENDERS} for _ in range(2))
    outcomes, engines = {}, {}
    for epoch in range(args.epochs):
        for contender, training in ready.items():
            states = {}
            (seconds,), (wall,) = benchmark.turn([lambda t=training, s=states: s.update(now=next(t))])
            model, engine = states["now"]
            outcomes[contender], engines[contender] = its.outcome(model, test), engine
            if epoch or args.epochs == 1:
                times[contender].append(seconds / steps)
                walls[contender].append(wall / steps)
    figures = summarise("plain", times, walls)
    for contender in CONTENDERS:
        this = getattr(its, contender)
        lines: Row = {"lines": lines_changed(its.plain, this), "from_opacus": lines_changed(its.opacus, this)}
        results: Row = {"outcome": outcomes[contender]}
        if engines[contender] is not None:
            results["epsilon"] = engines[contender].get_epsilon(its.DELTA)
        benchmark.add({"example": name, "rows": args.rows}, contender, lines | results | figures[contender])


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table, one for each example."""
    by_example: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_example.setdefault(row["example"], {})[row["contender"]] = row
    lines = [
        "| example | lines from plain: here, Opacus | lines from Opacus to here | outcome: plain, here, Opacus | "
        "ε: here, Opacus | time of a step: plain, here, Opacus |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in by_example.items():
        plain, private, opacus = (row[contender] for contender in CONTENDERS)
        cells = [
            name,
            f"{private['lines']}, {opacus['lines']}",
            f"{private['from_opacus']}",
            ", ".join(f"{its['outcome']:.2f}" for its in row.values()),
            f"{private['epsilon']:.2f}, {opacus['epsilon']:.2f}",
            f"{plain['ms']:.3g} ms, {private['factor']:.1f}, {opacus['factor']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__)
    p.add_argument("--examples", nargs="+", choices=EXAMPLES, default=EXAMPLES)
    p.add_argument("--rows", type=int, default=2048, help="of the training data, and as many of the test data")
    p.add_argument("--epochs", type=int, default=6)
    args = p.parse_args(argv)
    if args.quick:
        args.rows, args.epochs = 256, 3
    benchmark = Benchmark("opacus_examples", args)
    logging.getLogger("dp_transformers").setLevel(logging.ERROR)
    for name in args.examples:
        compare(name, benchmark)
    print("", *table(benchmark.rows), sep="\n")


if __name__ == "__main__":
    main()
