"""Which audit notices which fault, at which claimed ε and what cost.

    python -m benchmarks.audits

A small model learns made-up rows, whose last ones are canaries: each has a token of its own, and
all are alike but for it. The
faults are those of `dp-transformers audit`, planted in its one-step trials and in whole trainings.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from dp_transformers import AuditConfig, DPTrainer, DPTrainingArguments, PoissonSampling
from dp_transformers.auditing.one_step import OneStep, StepAudit
from dp_transformers.auditing.planted import FAULTS
from dp_transformers.cli.audit import audit_trainer

ROWS, TOKENS, WORDS, DELTA = 1000, 6, 50, 1e-5
NOT_IN_TRAININGS = ("a row twice in a draw",)  # the library refuses such a draw
SHOWN = {
    "a parameter has less noise than claimed": "noise",
    "noise of one step comes again in another": "reuse",
    "the noise can be drawn again from what is known": "seed",
    "draws are not independent of each other": "draws",
}


class Words(nn.Module):
    """Classifies by the mean of the embeddings. They hold most of a gradient, so that canaries are nearly ideal."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 32), nn.Linear(32, 2)
        nn.init.normal_(self.embedding.weight, std=0.01)
        nn.init.normal_(self.head.weight)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.embedding(input_ids).mean(1))}


def _losses(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 4.0, math.inf])
    p.add_argument("--trials", type=int, default=400)
    p.add_argument("--canaries", type=int, default=500)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--faults", nargs="*", default=[*FAULTS])
    args = p.parse_args(argv)
    print("| claimed ε | planted | one-step trials | seconds | canaries: ε ≥ | if like a Gaussian | seconds |")
    print("|---|---|---|---|---|---|---|")
    for epsilon in args.epsilons:
        for name in ["nothing", *(args.faults if math.isfinite(epsilon) else ())]:
            row = _row(epsilon, FAULTS.get(name, lambda one: None), name, args)
            print("| " + " | ".join([f"{epsilon:g}", name, *row]) + " |", flush=True)


def _row(epsilon: float, plant: Callable[[OneStep], None], name: str, args: argparse.Namespace) -> list[str]:
    trainer = _trainer(epsilon, args)
    found = audit_trainer(trainer, plant, delta=DELTA, trials=args.trials, seed=0)
    cells = [_noticed(found), f"{found.seconds:.0f}"]
    if name in NOT_IN_TRAININGS:
        return [*cells, "-", "-", "-"]
    trainer = _trainer(epsilon, args, AuditConfig(args.canaries, every_step=True))
    start = time.perf_counter()
    with _planted(trainer, plant, is_of_draws=name == "fixed batches"), contextlib.redirect_stdout(None):
        trainer.train()
    best = trainer.audit.result.values()
    bounds = [max(getattr(each, which) for each in best) for which in ("epsilon", "gaussian_epsilon")]
    return [*cells, *(f"{'**' * (b > epsilon)}{b:.2f}{'**' * (b > epsilon)}" for b in bounds),
            f"{time.perf_counter() - start:.0f}"]  # fmt: skip


def _noticed(found: StepAudit) -> str:
    """Say by which tests a fault is noticed, and the bound."""
    by = ["sum"] if found.moved > 1.02 and not found.mechanism.is_silent else []
    by += [short for what, short in SHOWN.items() if found.p_values.get(what, 1.0) <= 1 - found.each]
    bound = f"μ ≥ {found.mu:.2f} of {found.claimed_mu:.2f}"
    return ", ".join([f"**{bound}**" if found.mu > found.claimed_mu else bound, *(f"**{each}**" for each in by)])


def _trainer(epsilon: float, args: argparse.Namespace, audit: AuditConfig | None = None) -> DPTrainer:
    torch.manual_seed(0)
    words = torch.randint(WORDS, (ROWS, TOKENS))
    rows = [{"input_ids": ids, "labels": int(ids[0] < WORDS // 2)} for ids in words]
    rows += [{"input_ids": torch.full((TOKENS,), WORDS + i), "labels": 1} for i in range(args.canaries)]
    noise = {"target_epsilon": epsilon} if math.isfinite(epsilon) else {"noise_multiplier": 0.0}
    arguments = DPTrainingArguments(
        tempfile.mkdtemp(), **noise, target_delta=DELTA, max_grad_norm=0.5, expected_batch_size=250,
        max_steps=args.steps, learning_rate=2.0, optim="sgd", lr_scheduler_type="constant", use_cpu=True,
        per_device_train_batch_size=300, per_device_eval_batch_size=500, disable_tqdm=True, save_strategy="no",
        report_to=[], logging_strategy="no",
    )  # fmt: skip
    return DPTrainer(
        Words(WORDS + args.canaries), arguments, train_dataset=rows, per_example_loss_func=_losses, audit=audit
    )


@contextlib.contextmanager
def _planted(trainer: Any, plant: Callable[[OneStep], None], *, is_of_draws: bool) -> Iterator[None]:
    """Plant a fault in a training."""

    class Plant(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not is_of_draws:
                step: Any = trainer._private.step
                plant(OneStep(step, step._data, trainer._losses_of, trainer.optimizer))

    def fixed(sampling: PoissonSampling, generator: Any, first_step: int) -> Iterator[Any]:
        size = round(sampling.expected_batch_size)
        while True:
            shuffled = generator.permutation(sampling.num_examples)
            yield from (shuffled[i : i + size] for i in range(0, len(shuffled), size))

    trainer.add_callback(Plant())
    draws = PoissonSampling.draws
    if is_of_draws:
        PoissonSampling.draws = fixed  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        PoissonSampling.draws = draws


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    main()
