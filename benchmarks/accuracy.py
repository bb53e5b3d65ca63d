"""What privacy costs in accuracy: movie-review sentences and MiniLM, for several epsilon and seeds.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --trained head --seeds 45 46 47

*lora* is the text classification recipe with its defaults, run as a command of its own. *head* trains a linear layer
alone, on the sentence embeddings of the frozen model, with as many examples and batches of 1,024. The recipe's batch
follows from its rule, so that its noise multiplier can be another.

The result of a run is one line of the results file. Runs that are in the file are not run again, so a sweep that was
stopped goes on, and several processes with seeds of their own can share one file. From the file come the table (also
in the pages that have a place for it) and the picture.

A seed chooses the split and the start of what is trained. Draws and noise never depend on it: they come from the
operating system. Epsilon inf is training without noise and without clipping, with the batch and the learning rates
that suit it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PrivacyEngine, PrivacySpent

from .harness import Row, machine
from .pages import with_table

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "text_classification.py"
RESULTS = Path(__file__).with_name("accuracy.jsonl")
PICTURE = ROOT / "docs" / "accuracy.png"
PAGES = (ROOT / "README.md", ROOT / "docs" / "before-you-train.md")
TRAINED = {"lora": "LoRA and head (the recipe)", "head": "head alone, on frozen embeddings"}
NO_CLIPPING = 1e6  # a bound that no gradient reaches
BATCH, EPOCHS, DELTA = 1024, 3, 1e-5  # of the head alone; epochs and delta are the recipe's, too
# without privacy small batches and learning rates are better: with the recipe's own it learns less
TWIN = "--expected_batch_size 128 --learning_rate 2e-3 --head_learning_rate 2e-3"
HEAD_LEARNING_RATE = 0.1  # chosen among 0.01, 0.03, 0.1, 0.3 at epsilon 8, as the recipe's was at epsilon 8

sys.path.insert(0, str(RECIPE.parent))


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--trained", nargs="+", choices=list(TRAINED), default=["head", "lora"])
    p.add_argument("--epsilons", nargs="+", type=float, default=[8.0, 1.0, math.inf, 2.0, 4.0])
    p.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    p.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    p.add_argument("--results", type=Path, default=RESULTS, help="one line of JSON for every finished run")
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    for case in [(t, s, e) for t in args.trained for s in args.seeds for e in args.epsilons]:
        if case in {(row["trained"], row["seed"], row["epsilon"]) for row in read(args.results)}:
            continue
        trained, seed, epsilon = case
        start = time.perf_counter()
        result = RUNS[trained](epsilon, seed, args.threads)
        row = {"trained": trained, "epsilon": str(epsilon), "seed": seed, **result}
        row |= {"seconds": round(time.perf_counter() - start, 1), "machine": machine(torch.device("cpu"))}
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{trained}, epsilon {epsilon:g}, seed {seed}: {row['test_accuracy']:.4f}", flush=True)
    rows = read(args.results)
    print("\n".join(table(rows)))
    if args.results == RESULTS:
        write(rows)


def read(results: Path) -> list[Row]:
    """The finished runs."""
    lines = results.read_text().splitlines() if results.exists() else []
    return [row | {"epsilon": float(row["epsilon"])} for row in map(json.loads, lines)]  # JSON has no infinity


# ---- runs ----


def run_recipe(epsilon: float, seed: int, threads: int, flags: Sequence[str] = (), twin: str = TWIN) -> Row:
    """The text classification recipe from its beginning to its evaluation, with the flags ``twin`` for epsilon inf."""
    with tempfile.TemporaryDirectory() as folder:
        report = run(RECIPE, folder, epsilon, seed, threads, [*flags, *(twin.split() if epsilon == math.inf else [])])
    kept = ("noise_multiplier", "steps", "num_examples", "expected_batch_size", "delta", "test_accuracy")
    return {name: report[name] for name in kept} | {"majority": report["majority_baseline"]}


def run(recipe: Path, folder: str, epsilon: float, seed: int, threads: int, flags: Sequence[str]) -> dict[str, Any]:
    """Run a recipe and return its report; the model is in ``folder``, that of epsilon inf in its folder twin. The
    outputs of frozen layers are kept for all epsilons of a seed."""
    import assets

    command = [sys.executable, recipe, "--seed", str(seed), "--output_dir", folder, "--disable_tqdm", "True"]
    command += ["--keep_frozen", assets.cache_folder() / "frozen_layers", "--report_to", "none", *flags]
    command += ["--twin"] if epsilon == math.inf else ["--target_epsilon", str(epsilon)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"the recipe stopped at epsilon {epsilon:g}, seed {seed}:\n{done.stderr[-2000:]}")
    (written,) = Path(folder).rglob("privacy_report.json")
    return json.loads(written.read_text())


def run_head(epsilon: float, seed: int, threads: int) -> Row:
    """A linear layer on embeddings, split and shuffled as the recipe does it."""
    optimizer = partial(torch.optim.AdamW, lr=HEAD_LEARNING_RATE, weight_decay=0.0)
    if epsilon == math.inf:
        accuracy, spent = train_head(seed, optimizer, {"noise_multiplier": 0.0, "max_grad_norm": NO_CLIPPING}, BATCH)
    else:
        budget = {"target_epsilon": epsilon, "target_delta": DELTA, "epochs": EPOCHS}
        accuracy, spent = train_head(seed, optimizer, {**budget, "max_grad_norm": 1.0}, BATCH)
    y_test = split(seed)[1][1]
    return {
        "noise_multiplier": spent.noise_multiplier,
        "steps": spent.steps,
        "num_examples": spent.num_examples,
        "expected_batch_size": BATCH,
        "delta": DELTA,
        "test_accuracy": accuracy,
        "majority": float(y_test.bincount().max() / len(y_test)),
    }


def train_head(
    seed: int, optimizer_of: Callable[..., torch.optim.Optimizer], privacy: dict[str, Any], batch_size: int
) -> tuple[float, PrivacySpent]:
    """The accuracy of a linear layer on embeddings, and what its training spent.

    Args:
        optimizer_of: Makes the optimizer of the parameters.
        privacy: What make_private is given, or make_private_with_epsilon if it says target_epsilon.
    """
    (x, y), (x_test, y_test) = split(seed)
    torch.manual_seed(seed)
    model, engine = nn.Linear(x.shape[1], 2), PrivacyEngine()
    optimizer = optimizer_of(model.parameters())
    make = engine.make_private_with_epsilon if "target_epsilon" in privacy else engine.make_private
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    _, _, loader = make(module=model, optimizer=optimizer, data_loader=loader, **privacy)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, EPOCHS * loader.steps_per_epoch)
    for _ in range(EPOCHS):
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            schedule.step()
    engine.detach()
    with torch.no_grad():
        accuracy = float((model(x_test).argmax(1) == y_test).float().mean())
    return accuracy, engine.privacy_spent(DELTA)


RUNS: dict[str, Callable[[float, int, int], Row]] = {"lora": run_recipe, "head": run_head}


def split(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Embeddings and labels for training and for the test, of the split that the recipe makes with this seed."""
    data = examples(seed)
    of = embeddings()
    return [
        (torch.stack([of[text] for text in data[part]["text"]]), torch.tensor(data[part]["label"]))
        for part in ("train", "test")
    ]


def examples(seed: int) -> DatasetDict:
    """The split that the recipe makes with this seed."""
    import assets
    import fine_tuning

    return fine_tuning.read_examples(fine_tuning.DataArguments(), assets.movie_sentences, {}, seed)


@cache
def embeddings() -> dict[str, torch.Tensor]:
    """Every sentence's embedding by the frozen model, the mean over its tokens, of length 1."""
    import assets
    from transformers import AutoModel, AutoTokenizer

    folder = assets.minilm_folder()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    texts = sorted({row["text"] for row in assets.movie_sentences()}, key=len)
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for start in range(0, len(texts), 64):
            some = texts[start : start + 64]
            batch = tokenizer(some, padding=True, truncation=True, max_length=128, return_tensors="pt")
            weights = batch["attention_mask"][..., None]
            means = (model(**batch).last_hidden_state * weights).sum(1) / weights.sum(1)
            found |= zip(some, nn.functional.normalize(means), strict=True)
    return found


# ---- what is shown ----


def groups(rows: Sequence[Row]) -> dict[float, list[Row]]:
    """The runs of each epsilon."""
    return {
        epsilon: [row for row in rows if row["epsilon"] == epsilon] for epsilon in sorted({r["epsilon"] for r in rows})
    }


def table(rows: Sequence[Row]) -> list[str]:
    """One line for every epsilon: median and range over the seeds, and the share of the median without privacy."""
    lines = [f"| ε | noise multiplier σ: recipe, head | {' | '.join(TRAINED.values())} |", "|---|---|---|---|"]
    twins = {trained: scores_of(rows, trained, math.inf) for trained in TRAINED}
    for epsilon, runs in groups(rows).items():
        sigmas = {row["trained"]: f"{row['noise_multiplier']:.2f}" for row in runs}
        cells = [", ".join(sigmas[trained] for trained in TRAINED if trained in sigmas)]
        for trained, twin in twins.items():
            scores = scores_of(runs, trained, epsilon)
            share = f"; {share_kept(scores, twin)} kept" if scores and twin and epsilon < math.inf else ""
            cells.append(cell(scores) + share if scores else "not measured")
        name = "∞ (not private)" if epsilon == math.inf else f"{epsilon:g}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def scores_of(rows: Sequence[Row], trained: str, epsilon: float) -> list[float]:
    """The accuracies of one kind of training at one epsilon."""
    return [row["test_accuracy"] for row in rows if (row["trained"], row["epsilon"]) == (trained, epsilon)]


def share_kept(scores: Sequence[float], twin: Sequence[float]) -> str:
    return f"{100 * statistics.median(scores) / statistics.median(twin):.1f}%"


def cell(scores: Sequence[float]) -> str:
    low, middle, high = (f"{100 * f(scores):.1f}" for f in (min, statistics.median, max))
    return f"{middle}% ({low} to {high}, {len(scores)} seeds)" if len(scores) > 1 else f"{middle}% (1 seed)"


def write(rows: Sequence[Row]) -> None:
    """The table into the pages that have a place for it, and the picture."""
    for page in PAGES:
        page.write_text(with_table(page.read_text(), "accuracy", table(rows)))
    draw(rows, PICTURE)


def draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), dpi=150, layout="constrained")
    axes, by_epsilon = figure.subplots(), groups(rows)
    for (trained, name), color, shift in zip(TRAINED.items(), ("#e65100", "#303f9f"), (-0.08, 0.08), strict=True):
        for place, runs in enumerate(by_epsilon.values()):
            scores = [100 * row["test_accuracy"] for row in runs if row["trained"] == trained]
            if scores:
                axes.vlines(place + shift, min(scores), max(scores), color=color, linewidth=6, alpha=0.3)
                axes.plot(place + shift, statistics.median(scores), "o", color=color)
        axes.plot([], [], "o", color=color, label=name)
    guess = 100 * statistics.median(row["majority"] for row in rows)
    axes.axhline(guess, color="grey", linestyle=":", label="always the more frequent class")
    axes.set_xticks(range(len(by_epsilon)), ["∞" if epsilon == math.inf else f"{epsilon:g}" for epsilon in by_epsilon])
    axes.set(xlabel="ε (∞: not private)", ylabel="test accuracy, %", ylim=(guess - 3, None))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, loc="center")
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main()
