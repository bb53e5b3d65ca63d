"""What privacy costs in accuracy: the text classification recipe with its defaults, for several epsilon and seeds.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --seeds 43 44 --results mine.jsonl -- --lora_r 16

Every run is the recipe as a command of its own, and its result is one line of the results file. Runs that are in the
file are not run again, so a sweep that was stopped goes on, and several processes with seeds of their own can share
one file. From the file come the table (also in the pages that have a place for it) and the picture.

A seed chooses the split, the start of the adapters and of the head. Draws and noise never depend on it: they come
from the operating system. Epsilon inf is the recipe without noise and without clipping. What follows `--` goes to the
recipe.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .harness import Row, machine

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "text_classification.py"
RESULTS = Path(__file__).with_name("accuracy.jsonl")
PICTURE = ROOT / "docs" / "accuracy.png"
PAGES = (ROOT / "README.md", ROOT / "docs" / "before-you-train.md")
PLACE = re.compile(r"(<!-- table: accuracy -->\n).*?(\n\n|\Z)", re.S)
NOT_PRIVATE = ("--noise_multiplier", "0", "--max_grad_norm", "1000000")
KEPT = ("noise_multiplier", "steps", "num_examples", "expected_batch_size", "delta", "test_accuracy")


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--epsilons", nargs="+", type=float, default=[8.0, 1.0, math.inf, 2.0, 4.0])
    p.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    p.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    p.add_argument("--results", type=Path, default=RESULTS, help="one line of JSON for every finished run")
    p.add_argument("flags", nargs="*", help="of the recipe, after --")
    args = p.parse_args(argv)
    for seed in args.seeds:
        for epsilon in args.epsilons:
            if (epsilon, seed) not in {(row["epsilon"], row["seed"]) for row in read(args.results, args.flags)}:
                row = run(epsilon, seed, args.flags, args.threads)
                with args.results.open("a") as file:
                    file.write(json.dumps(row | {"epsilon": str(epsilon)}) + "\n")
                print(
                    f"epsilon {epsilon:g}, seed {seed}: {row['test_accuracy']:.4f} ({row['seconds']:.0f} s)",
                    flush=True,
                )
    rows = read(args.results, args.flags)
    print("\n".join(table(rows)))
    if args.results == RESULTS:
        write(rows)


def read(results: Path, flags: Sequence[str] | None = None) -> list[Row]:
    """The finished runs of these flags, of all flags if None."""
    lines = results.read_text().splitlines() if results.exists() else []
    rows = [row | {"epsilon": float(row["epsilon"])} for row in map(json.loads, lines)]  # JSON has no infinity
    return [row for row in rows if flags is None or row["flags"] == list(flags)]


def run(epsilon: float, seed: int, flags: Sequence[str], threads: int) -> Row:
    """One training from the beginning to its evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        privacy = NOT_PRIVATE if epsilon == math.inf else ("--target_epsilon", str(epsilon))
        command = [sys.executable, RECIPE, *privacy, "--seed", str(seed), *flags]
        command += ["--output_dir", folder, "--report_to", "none", "--disable_tqdm", "True"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            sys.exit(f"the recipe stopped at epsilon {epsilon:g}, seed {seed}:\n{done.stderr[-2000:]}")
        report = json.loads(Path(folder, "privacy_report.json").read_text())
    return {
        "epsilon": epsilon,
        "seed": seed,
        **{name: report[name] for name in KEPT},
        "majority": report["majority_baseline"],
        "flags": list(flags),
        "seconds": round(time.perf_counter() - start, 1),
        "machine": machine(torch.device("cpu")),
    }


def by_epsilon(rows: Sequence[Row]) -> dict[float, list[Row]]:
    return {
        epsilon: [row for row in rows if row["epsilon"] == epsilon] for epsilon in sorted({r["epsilon"] for r in rows})
    }


def table(rows: Sequence[Row]) -> list[str]:
    """One line for every epsilon: median and range over the seeds."""
    lines = ["| ε | noise multiplier σ | test accuracy, median | lowest to highest | seeds |", "|---|---|---|---|---|"]
    for epsilon, runs in by_epsilon(rows).items():
        accuracies = [row["test_accuracy"] for row in runs]
        low, middle, high = (f"{100 * f(accuracies):.1f}%" for f in (min, statistics.median, max))
        name = "∞ (not private)" if epsilon == math.inf else f"{epsilon:g}"
        lines.append(f"| {name} | {runs[0]['noise_multiplier']:.2f} | {middle} | {low} to {high} | {len(runs)} |")
    return lines


def write(rows: Sequence[Row]) -> None:
    """The table into the pages that have a place for it, and the picture."""
    for page in PAGES:
        page.write_text(PLACE.sub(in_place(rows), page.read_text()))
    draw(rows, PICTURE)


def in_place(rows: Sequence[Row]) -> Callable[[re.Match[str]], str]:
    return lambda place: place[1] + "\n".join(table(rows)) + place[2]


def draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    groups = by_epsilon(rows)
    figure = Figure(figsize=(6, 3.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, runs in enumerate(groups.values()):
        accuracies = [100 * row["test_accuracy"] for row in runs]
        axes.plot([place, place], [min(accuracies), max(accuracies)], color="#5c6bc0", linewidth=6, alpha=0.35)
        axes.plot([place], [statistics.median(accuracies)], "o", color="#303f9f", markersize=7)
    guess = 100 * statistics.median(row["majority"] for row in rows)
    axes.axhline(guess, color="grey", linestyle=":")
    axes.annotate(
        "always the more frequent class", (0, guess), xytext=(0, 4), textcoords="offset points", color="grey"
    )
    axes.set_xticks(range(len(groups)), ["∞" if epsilon == math.inf else f"{epsilon:g}" for epsilon in groups])
    axes.set(xlabel="ε (∞: not private)", ylabel="test accuracy, %", ylim=(guess - 3, None))
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main()
