"""`dp-transformers audit`: attacks the private step of a script, and says what it would have noticed."""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from ..auditing.one_step import OneStep, StepAudit

SetUp = Callable[[], AbstractContextManager["OneStep"]]
Plant = Callable[["OneStep"], None]
_SIZES = 400  # draws whose sizes are compared


def audit(
    context: typer.Context,
    script: Annotated[
        str,
        Argument(
            help="A Python file that calls train() of a DPTrainer, its flags follow; or FILE.py:FUNCTION of a loop, "
            "which returns a PrivacyEngine after make_private, and the function of a batch that computes (B,) losses."
        ),
    ],
    trials: Annotated[int, Option(min=10, help="Trials of one step, half of them with the canary.")] = 200,
    confidence: Annotated[float, Option(help="Probability that an honest step passes, at least.")] = 0.95,
    delta: Annotated[float | None, Option(help="That of epsilon. Default: the target_delta of the script.")] = None,
    faults: Annotated[bool, Option(help="Try planted faults too, each at the same cost.")] = True,
    as_json: Annotated[bool, Option("--json", help="Write the findings as JSON.")] = False,
) -> None:
    """Attack the private step of SCRIPT, which runs until it calls train().

    Nothing is trained, and no ledger is written. The exit code is 1 if the trials speak against the claim.
    """
    from ..auditing.planted import FAULTS

    set_up = _set_up_of(script, context.args)

    def audited(plant: Plant = lambda one: None) -> StepAudit:
        return _audited(set_up, plant, delta=delta, trials=trials, confidence=confidence)

    honest = audited()
    planted = {name: audited(plant) for name, plant in FAULTS.items()} if faults else {}
    print(json.dumps(_as_dict(honest, planted), indent=2) if as_json else _in_words(honest, planted))
    if honest.faults:
        raise typer.Exit(1)


def audit_trainer(trainer: Any, plant: Plant = lambda one: None, **options: Any) -> StepAudit:
    """Audit the private step of a trainer, with a fault if one is planted. Options are those of
    :func:`.auditing.one_step.audit_step`."""
    return _audited(lambda: _of_trainer(trainer), plant, **options)


def _audited(set_up: SetUp, plant: Plant, *, delta: float | None = None, **options: Any) -> StepAudit:
    """Audit a step. It is set up twice, from the same known seeds, to compare the noise.

    Raises:
        ValueError: no delta is given or known.
    """
    from ..auditing.one_step import audit_step

    with set_up() as one:
        plant(one)
        one.take(one.draw([0]))
        noise = one.first_noise
    with set_up() as one:
        plant(one)
        delta = delta or one.step.run.state.delta
        if delta is None:
            raise ValueError("the script says no target_delta: give the delta of its guarantee (--delta 1e-6).")
        return audit_step(one, noise, delta=delta, **options)


@contextmanager
def _of_trainer(trainer: Any) -> Iterator[OneStep]:
    """Attach the private step as train() does, without a ledger. Dropout is off, so that a sum is the same in all
    trials."""
    from transformers import set_seed

    set_seed(trainer.args.seed)
    training = trainer._private
    training._say = lambda text: None
    with training.running(trainer.get_tp_size()):
        trainer._prepare_for_training(training.planned_steps, trainer.get_train_dataloader(), None)
        losses = lambda rows: trainer._losses_of(**trainer._prepare_inputs(rows))  # noqa: E731
        yield _one_step(training.step, losses, trainer.optimizer, training.sampler(0, 1))


@contextmanager
def _of_loop(make: Callable[[], tuple[Any, Any]]) -> Iterator[OneStep]:
    """Make the private loop anew."""
    engine, losses = make()
    loop = engine._made_private()
    yield _one_step(loop.step, losses, loop.optimizer, loop.loader._sampler)
    engine.detach()


def _one_step(step: Any, losses: Callable[[Any], Any], optimizer: Any, sampler: Any) -> OneStep:
    from ..auditing.one_step import OneStep

    step.run.ledger = None
    step.clipper.model.eval()
    sizes = [len(sampler.draw().indices) for _ in range(_SIZES)]
    return OneStep(step, step._data, losses, optimizer, sizes)


class _Reached(BaseException):
    """Ends a script where it would train. No "except Exception" of a script catches it."""


def _set_up_of(script: str, flags: list[str]) -> SetUp:
    """Return what sets up the private step of a script.

    Raises:
        ValueError: there is no such file or function, or it ends without a private step.
    """
    path, _, function = script.rpartition(":")
    if os.path.isfile(script):
        trainer = _trainer_of(script, flags)
        return lambda: _of_trainer(trainer)
    if not os.path.isfile(path):
        raise ValueError(f"there is no file '{script}': give a Python script that calls train() of a DPTrainer.")
    if (make := runpy.run_path(path).get(function)) is None:
        raise ValueError(f"'{path}' has no function '{function}' that returns a PrivacyEngine and the losses.")
    return lambda: _of_loop(make)


def _trainer_of(script: str, flags: list[str]) -> Any:
    """Run a script until it calls train() of a private trainer, and return this trainer."""
    from ..trainer import DPTrainerMixin

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
    claimed = {"mu": honest.claimed_mu, "epsilon": honest.claimed_epsilon}
    return {
        **{name: getattr(honest, name) for name in ("confidence", "delta", "seconds", "canary_norm", "faults")},
        "trials": honest.num_in + honest.num_out,
        "claimed": {name: value if math.isfinite(value) else None for name, value in claimed.items()},
        "lower_bound": {"mu": honest.mu, "epsilon": honest.epsilon, "epsilon_of_one_step": honest.step_epsilon},
        "planted": {name: each.faults for name, each in planted.items()},
    }


def _in_words(honest: StepAudit, planted: dict[str, StepAudit]) -> str:
    trials, percent = honest.num_in + honest.num_out, f"{100 * honest.confidence:g}%"
    lines = [
        f"{trials} trials of one step in {honest.seconds:.0f} s; everything below holds together at {percent}.",
        f"  claimed         mu = {honest.claimed_mu:.3g} for a step, epsilon = {honest.claimed_epsilon:.4g} at "
        f"delta = {honest.delta:g} for all steps",
        f"  at least        mu = {honest.mu:.3g} for a step, epsilon = {honest.epsilon:.4g} for all steps like it",
        f"  could show      mu = {honest.largest_mu:.3g}, with {honest.canary_norm:.2g} C of the canary's gradient",
    ]
    nothing = ["Nothing speaks against the claim, which is no proof of it."]
    lines += [f"EVIDENCE AGAINST THE CLAIM: {each}." for each in honest.faults] or nothing
    lines += ["At this cost the audit notices, where it is planted:"] if planted else []
    lines += [f"  {name:<28}{'; '.join(each.faults) or 'NOT NOTICED'}" for name, each in planted.items()]
    return "\n".join(lines)
