"""What the mechanisms are worth in accuracy: one fine-tuning under each of them, at the same epsilon.

    python -m benchmarks.mechanisms
    python -m benchmarks.mechanisms --trained head --epsilons 1 2 4 8

*lora* is the text classification recipe with its defaults, and *head* trains a linear layer alone on the embeddings of
the frozen model, as in ``benchmarks.accuracy``. Only the mechanism changes from run to run, or the optimizer; nothing
is tuned for any of them. Beside the accuracy stands the noise that the planner predicts. The loss is not released.

The result of a run is one line of the results file, and runs that are in the file are not run again. The table is
also put in its place in docs/before-you-train.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from dp_transformers import AdaptiveClipping, AutomaticClipping, DPAdamW, Mechanism, plan
from dp_transformers.mechanism.planner import MechanismPlan, predicted_noise

from .accuracy import BATCH, DELTA, EPOCHS, HEAD_LEARNING_RATE, RECIPE, cell, examples, read, train_head
from .harness import Row, machine
from .pages import with_table

RESULTS = Path(__file__).with_name("mechanisms.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "before-you-train.md"
BOUND = 1.0


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--trained", choices=list(RUNS), default="lora")
    p.add_argument("--epsilons", nargs="+", type=float, default=[8.0])
    p.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    p.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    p.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    p.add_argument("--results", type=Path, default=RESULTS, help="one line of JSON for every finished run")
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    for case in [(args.trained, e, s, n) for s in args.seeds for e in args.epsilons for n in args.settings]:
        if case in {(row["trained"], row["epsilon"], row["seed"], row["setting"]) for row in read(args.results)}:
            continue
        trained, epsilon, seed, setting = case
        mechanism, optimizer = SETTINGS[setting](num_examples(seed), epsilon)
        start = time.process_time()
        accuracy = RUNS[trained](mechanism, optimizer, seed)
        row = {
            "trained": trained,
            "epsilon": str(epsilon),
            "seed": seed,
            "setting": setting,
            "test_accuracy": accuracy,
        }
        row |= {"predicted_noise": predicted_noise(mechanism), "relation": mechanism.sampling.relation}
        row |= {"noise_multiplier": mechanism.at(0).noise_multiplier, "steps": mechanism.steps}
        row |= {"process_seconds": round(time.process_time() - start, 1), "machine": machine(torch.device("cpu"))}
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{trained}, epsilon {epsilon:g}, seed {seed}, {setting}: {accuracy:.4f}", flush=True)
    rows = read(args.results)
    print("\n".join(table(rows)))
    if args.results == RESULTS:
        PAGE.write_text(with_table(PAGE.read_text(), "mechanisms", table(rows)))


@cache
def num_examples(seed: int) -> int:
    return examples(seed)["train"].num_rows


# ---- settings ----


Setting = Callable[[int, float], tuple[Mechanism, type[torch.optim.Optimizer]]]


@cache
def planned(num_examples: int, epsilon: float) -> MechanismPlan:
    return plan(
        num_examples,
        expected_batch_size=BATCH,
        epochs=EPOCHS,
        target_epsilon=epsilon,
        target_delta=DELTA,
        max_grad_norm=BOUND,
    )


def poisson(num_examples: int, epsilon: float) -> Mechanism:
    return next(c.mechanism for c in planned(num_examples, epsilon) if c.name == "Poisson, independent")


def allocation(num_examples: int, epsilon: float) -> Mechanism:
    return next(c.mechanism for c in planned(num_examples, epsilon) if c.name == "random allocation, independent")


def correlated(num_examples: int, epsilon: float) -> Mechanism:
    """The one with the least predicted noise."""
    return next(c.mechanism for c in planned(num_examples, epsilon) if c.mechanism.noise.bands > 1)


def clipped_by(clipping: Any, num_examples: int, epsilon: float) -> Mechanism:
    return replace(poisson(num_examples, epsilon), clipping=clipping).calibrated(
        target_epsilon=epsilon, target_delta=DELTA
    )


def with_optimizer(optimizer: type[torch.optim.Optimizer], mechanism: Callable[[int, float], Mechanism]) -> Setting:
    return lambda num_examples, epsilon: (mechanism(num_examples, epsilon), optimizer)


SETTINGS: dict[str, Setting] = {
    "Poisson sampling, flat clipping, AdamW": with_optimizer(AdamW, poisson),
    "random allocation": with_optimizer(AdamW, allocation),
    "best correlated noise": with_optimizer(AdamW, correlated),
    "AUTO-S": with_optimizer(AdamW, partial(clipped_by, AutomaticClipping(BOUND))),
    "adaptive clipping": with_optimizer(AdamW, partial(clipped_by, AdaptiveClipping(BOUND, count_noise=BATCH / 20))),
    "DPAdamW": with_optimizer(DPAdamW, poisson),
}


# ---- runs ----


def run_recipe(mechanism: Mechanism, optimizer: type[torch.optim.Optimizer], seed: int) -> float:
    """The recipe from its beginning to its evaluation."""
    import text_classification  # benchmarks.accuracy has put the recipes on the path

    class Trainer(text_classification.HeadFirstTrainer):
        """With the optimizer, and the schedule and settings of the recipe."""

        def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
            kind, settings = super().get_optimizer_cls_and_kwargs(args, model)
            settings = {k: v for k, v in settings.items() if k != "fused"}
            return (kind, settings) if optimizer is AdamW else (optimizer, settings)

    text_classification.HeadFirstTrainer = Trainer
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--seed", seed, "--output_dir", folder, "--mechanism", json.dumps(mechanism.to_dict()))
        quiet = ("--disable_tqdm", "True", "--report_to", "none", "--save_strategy", "no")
        sys.argv = [str(RECIPE), *map(str, flags), *quiet]
        return text_classification.main()["test_accuracy"]


def run_head(mechanism: Mechanism, optimizer: type[torch.optim.Optimizer], seed: int) -> float:
    """A linear layer on embeddings."""
    made = partial(optimizer, lr=HEAD_LEARNING_RATE, weight_decay=0.0)
    return train_head(seed, made, {"mechanism": mechanism}, round(mechanism.at(0).expected_batch_size))[0]


RUNS: dict[str, Callable[[Mechanism, type[torch.optim.Optimizer], int], float]] = {
    "lora": run_recipe,
    "head": run_head,
}


# ---- what is shown ----


def table(rows: Sequence[Row]) -> list[str]:
    """A line for every setting, and a column for every epsilon and what was trained: median and range over the seeds,
    and the predicted noise."""
    columns = sorted({(row["epsilon"], row["trained"]) for row in rows})
    lines = ["| | " + " | ".join(f"{trained}, ε = {epsilon:g} | noise" for epsilon, trained in columns) + " |"]
    lines.append("|---|" + "---|---|" * len(columns))
    for setting in SETTINGS:
        cells = []
        for column in columns:
            runs = [r for r in rows if (r["epsilon"], r["trained"]) == column and r["setting"] == setting]
            noise = statistics.median(r["predicted_noise"] for r in runs) if runs else math.nan
            cells += [cell([r["test_accuracy"] for r in runs]) if runs else "not measured", f"{noise:.3g}"]
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
