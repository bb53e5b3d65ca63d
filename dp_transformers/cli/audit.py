"""`dp-transformers audit`: attacks the private step of a script, and says what it would have noticed."""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from ..auditing.one_step import OneStep, StepAudit

_SIZES = 400  # draws whose sizes are compared


def audit(
    context: typer.Context,
    script: Annotated[str, Argument(help="A Python file that calls train() of a DPTrainer; its flags follow.")],
    trials: Annotated[int, Option(min=10, help="Trials of one step, half of them with the canary.")] = 200,
    confidence: Annotated[float, Option(help="Probability that an honest step passes, at least.")] = 0.95,
    faults: Annotated[bool, Option(help="Try planted faults too, each at the same cost.")] = True,
    as_json: Annotated[bool, Option("--json", help="Write the findings as JSON.")] = False,
) -> None:
    """Attack the private step of SCRIPT, which runs until it calls train().

    Nothing is trained, and no ledger is written. The exit code is 1 if the trials speak against the claim.
    """
    from ..auditing.planted import FAULTS

    trainer = _trainer_of(script, context.args)

    def audited(plant: Callable[[OneStep], None] | None = None) -> StepAudit:
        options = {"delta": trainer.args.target_delta, "trials": trials, "confidence": confidence}
        return audit_trainer(trainer, plant, **options)

    honest = audited()
    planted = {name: audited(plant) for name, plant in FAULTS.items()} if faults else {}
    print(json.dumps(_as_dict(honest, planted), indent=2) if as_json else _in_words(honest, planted))
    if honest.faults:
        raise typer.Exit(1)


def audit_trainer(trainer: Any, plant: Callable[[OneStep], None] | None = None, **options: Any) -> StepAudit:
    """Audit the private step of a trainer, with a fault if one is planted. It is set up twice from the same seeds, to
    compare the noise."""
    from ..auditing.one_step import audit_step

    with _set_up(trainer, plant) as one:
        one.take(one.draw([0]))
        noise = one.first_noise
    with _set_up(trainer, plant) as one:
        return audit_step(one, noise, **options)


@contextmanager
def _set_up(trainer: Any, plant: Callable[[OneStep], None] | None) -> Iterator[OneStep]:
    """Attach the private step as train() does, without a ledger. Dropout is off, so that a sum is the same in all
    trials."""
    from transformers import set_seed

    from ..auditing.one_step import OneStep

    set_seed(trainer.args.seed)
    training = trainer._private
    training.run.ledger, training._say = None, lambda text: None
    with training.running(trainer.get_tp_size()):
        trainer._prepare_for_training(training.planned_steps, trainer.get_train_dataloader(), None)
        trainer.model.eval()
        sampler = training.sampler(0, 1)
        one = OneStep(
            training.step,
            training._draws,
            lambda rows: trainer._losses_of(**trainer._prepare_inputs(rows)),
            trainer.optimizer,
            sizes=[len(sampler.draw().indices) for _ in range(_SIZES)],
        )
        if plant is not None:
            plant(one)
        yield one


class _Reached(BaseException):
    """Ends a script where it would train. No "except Exception" of a script catches it."""


def _trainer_of(script: str, flags: list[str]) -> Any:
    """Run a script until it calls train() of a private trainer, and return this trainer.

    Raises:
        ValueError: there is no such file, or it ends without such a call.
    """
    from ..trainer import DPTrainerMixin

    if not os.path.isfile(script):
        raise ValueError(f"there is no file '{script}': give a Python script that calls train() of a DPTrainer.")

    def reached(trainer: Any, *args: Any, **kwargs: Any) -> None:
        raise _Reached(trainer)

    train, argv, path = DPTrainerMixin.train, sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [script, *flags], [os.path.dirname(os.path.abspath(script))]
    DPTrainerMixin.train = reached  # pyrefly: ignore[bad-assignment]
    try:
        runpy.run_path(script, run_name="__main__")
    except _Reached as found:
        return found.args[0]
    finally:
        DPTrainerMixin.train, sys.argv, sys.path[:] = train, argv, path
    raise ValueError(f"'{script}' ended without a call of train() of a DPTrainer: there is no private step to audit.")


def _as_dict(honest: StepAudit, planted: dict[str, StepAudit]) -> dict[str, Any]:
    return {
        "trials": honest.num_in + honest.num_out,
        "confidence": honest.confidence,
        "seconds": honest.seconds,
        "claimed": {"mu": _number(honest.claimed_mu), "epsilon": _number(honest.claimed_epsilon)},
        "delta": honest.delta,
        "lower_bound": {"mu": honest.mu, "epsilon": honest.epsilon, "epsilon_of_one_step": honest.step_epsilon},
        "canary_norm": honest.canary_norm,
        "faults": honest.faults,
        "planted": {name: each.faults for name, each in planted.items()},
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_words(honest: StepAudit, planted: dict[str, StepAudit]) -> str:
    trials, percent = honest.num_in + honest.num_out, f"{100 * honest.confidence:g}%"
    lines = [
        f"{trials} trials of one step in {honest.seconds:.0f} s; everything below holds together at {percent}.",
        f"  claimed         mu = {honest.claimed_mu:.3g} for a step, epsilon = {honest.claimed_epsilon:.4g} at "
        f"delta = {honest.delta:g} for all steps",
        f"  at least        mu = {honest.mu:.3g} for a step, epsilon = {honest.epsilon:.4g} for all steps like it",
        f"  could show      mu = {honest.largest_mu:.3g}, with {honest.canary_norm:.2g} C of the canary's gradient",
    ]
    lines += [f"EVIDENCE AGAINST THE CLAIM: {each}." for each in honest.faults] or [
        "Nothing speaks against the claim, which is no proof of it. At this cost the audit would have noticed:"
        if planted
        else "Nothing speaks against the claim, which is no proof of it."
    ]
    for name, audit in planted.items():
        lines.append(f"  {name:<28}{'yes: ' + '; '.join(audit.faults) if audit.faults else 'NO'}")
    return "\n".join(lines)
