"""What privacy costs in accuracy on many texts: which of 26 classes is a noun of, by its gloss in WordNet.

    apt-get install wordnet-base
    python -m benchmarks.glosses
    python -m benchmarks.glosses --data_dir FOLDER --seeds 42 43 44

The text classification recipe with its defaults on 78,115 glosses, tested on 4,000 others. Epsilon inf is its twin. As
in benchmarks.accuracy, a result is a line of the results file, a run that is in the file is not run again, and the
table of the page comes from the file.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dp_transformers import FlatClipping, IndependentNoise, Mechanism, PoissonSampling
from dp_transformers.mechanism.planner import predicted_noise

from .accuracy import ROOT, cell, groups, read, run_recipe, share_kept
from .harness import Row, machine
from .pages import with_table

RESULTS = Path(__file__).with_name("glosses.jsonl")
PAGE = ROOT / "docs" / "accuracy.md"
FLAGS = "--max_eval_samples 4000 --max_length 64"
BF16 = "--bf16 --use_cpu --attn_implementation eager --per_device_train_batch_size 256"
# WordNet's files of nouns in their order; the first one has the nouns above all classes
CLASSES = (
    "anything act animal artifact attribute body cognition communication event feeling food group location motive "
    "object person phenomenon plant possession process quantity relation shape state substance time"
)
FIRST_CLASS = 3  # WordNet's number of the first class of nouns


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--data_dir", type=Path, default="/usr/share/wordnet", help="has data.noun of WordNet 3.0")
    p.add_argument("--epsilons", nargs="+", type=float, default=[8.0, math.inf, 3.0, 1.0])
    p.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    p.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    p.add_argument("--bf16", action="store_true", help="train under autocast; faster where the CPU multiplies bf16")
    p.add_argument("--named", action="store_true", help="the head starts from the names of classes; other --results")
    p.add_argument("--results", type=Path, default=RESULTS, help="one line of JSON for every finished run")
    args = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "glosses.csv")
        write_csv(args.data_dir / "data.noun", file, args.named)
        for seed, epsilon in [(s, e) for s in args.seeds for e in args.epsilons]:
            if (seed, epsilon) in {(row["seed"], row["epsilon"]) for row in read(args.results)}:
                continue
            start = time.perf_counter()
            flags = [*FLAGS.split(), *BF16.split() * args.bf16, "--train_file", str(file)]
            row = {"epsilon": str(epsilon), "seed": seed, "bf16": args.bf16}
            row |= run_recipe(epsilon, seed, args.threads, flags, "")
            row |= {"seconds": round(time.perf_counter() - start, 1), "machine": machine(torch.device("cpu"))}
            with args.results.open("a") as results:
                results.write(json.dumps(row) + "\n")
            print(f"epsilon {epsilon:g}, seed {seed}: {row['test_accuracy']:.4f}", flush=True)
    rows = read(args.results)
    print("\n".join(table(rows)))
    if args.results == RESULTS:
        PAGE.write_text(with_table(PAGE.read_text(), "glosses", table(rows)))


def write_csv(source: Path, target: Path, named: bool = False) -> None:
    """Write the definitions of WordNet's nouns, and the numbers or the names of their classes, as texts and labels."""
    labels = CLASSES.split() if named else range(len(CLASSES.split()))
    with target.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows((definition, labels[number]) for _, number, definition in nouns(source))


def nouns(source: Path) -> Iterator[tuple[str, int, str]]:
    """The first word, the number of the class and the definition of each of WordNet's nouns."""
    if not source.is_file():
        raise SystemExit(f"there is no '{source}': apt-get install wordnet-base, or give --data_dir.")
    for line in source.read_text().splitlines():
        if not line.startswith("  "):  # those begin the lines of the licence
            entry, gloss = line.split(" | ", 1)
            fields = entry.split()
            yield fields[4].replace("_", " "), int(fields[1]) - FIRST_CLASS, gloss.split('; "')[0].strip()


def table(rows: Sequence[Row]) -> list[str]:
    """One line for every epsilon: accuracy, its share of that without privacy, the planner's noise, and the time."""
    lines = ["| ε | accuracy | share kept | σ | noise, by `plan` | minutes |", "|---|---|---|---|---|---|"]
    twin = [row["test_accuracy"] for row in rows if row["epsilon"] == math.inf]
    for epsilon, runs in groups(rows).items():
        scores = [row["test_accuracy"] for row in runs]
        share = share_kept(scores, twin) if twin else "not measured"
        minutes = statistics.median(row["seconds"] for row in runs) / 60
        private = (
            f"{epsilon:g} | {cell(scores)} | {share} | {runs[0]['noise_multiplier']:.2f} | {noise_of(runs[0]):.3g}"
        )
        line = private if epsilon < math.inf else f"∞ (not private) | {cell(scores)} | | 0 | 0"
        lines.append(f"| {line} | {minutes:.0f} |")
    return lines


def noise_of(row: Row) -> float:
    """The noise that the planner predicts in the sum of gradients so far, over how often an example takes part."""
    sampling = PoissonSampling(row["num_examples"], row["expected_batch_size"])
    noise = IndependentNoise(row["noise_multiplier"])
    return predicted_noise(Mechanism(sampling=sampling, clipping=FlatClipping(1.0), noise=noise, steps=row["steps"]))


if __name__ == "__main__":
    main()
