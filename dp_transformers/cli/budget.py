"""`dp-transformers budget`: computes the cost of a private training before it is run. Free of torch."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..mechanism.values import HOPELESS
from ..reports.words import up

if TYPE_CHECKING:
    from ..mechanism.planner import MechanismPlan, UnitPlan
    from .planning import Plan

FACTORS, VARIED = (0.25, 0.5, 1.0, 2.0, 4.0), ("sigma", "batch", "epochs")
NAMES = {
    "epsilon": "epsilon",
    "sigma": "noise multiplier (sigma)",
    "batch": "expected batch size (B)",
    "steps": "steps",
}


def budget(
    examples: Annotated[int, Option("--examples", min=1, help="Rows of the training data (N), not persons.")],
    epsilon: Annotated[float | None, Option(help="The privacy budget.")] = None,
    sigma: Annotated[float | None, Option(help="The noise multiplier: noise over clipping bound.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Expected number of examples in a step.")] = None,
    epochs: Annotated[float | None, Option(help="Passes over the data, on average.")] = None,
    steps: Annotated[int | None, Option(min=1, help="Number of steps, in the place of --epochs.")] = None,
    delta: Annotated[
        float | None, Option(help="Below 1/N. Default: the largest power of ten that is at most a tenth of 1/N.")
    ] = None,
    max_examples_per_person: Annotated[
        int, Option(min=1, help="Rows that one person may have; epsilon is then for all of them together.")
    ] = 1,
    persons: Annotated[
        int | None, Option(min=1, help="Persons who own the rows: adds draws of persons beside draws of rows.")
    ] = None,
    rows_per_unit: Annotated[
        int | None, Option(min=1, help="Rows of a drawn person, with --persons. Default: --max-examples-per-person.")
    ] = None,
    max_grad_norm: Annotated[float, Option(help="The clipping bound C.")] = 1.0,
    trainable_parameters: Annotated[
        int | None, Option(min=1, help="How many parameters are trained, to compare the noise with the signal.")
    ] = None,
    accountant: Annotated[str, Option(help="pld (tight) or rdp.")] = "pld",
    table: Annotated[bool, Option("--table", help="Add epsilon for other sigmas, batch sizes and epochs.")] = False,
    compare: Annotated[
        bool, Option("--plan", help="Add the mechanisms that meet the same target, by the noise that each leaves.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Write the answer as JSON.")] = False,
    plot: Annotated[Path | None, Option(help="Draw epsilon over steps and sigma into this file (.png, .svg).")] = None,
) -> None:
    """Compute the cost of a private training.

    Give all but one of --epsilon, --sigma, --batch and --epochs (or --steps): the one left out is the answer. Nothing
    is trained, and no data is read. The flags of trainings (--noise_multiplier, --max_steps, ...) are taken too.
    """
    from .planning import Setting, default_delta, find

    setting = Setting(
        examples=examples if persons is None else min(examples, persons * max_examples_per_person),
        delta=default_delta(examples) if delta is None else delta,
        max_grad_norm=max_grad_norm,
        max_examples_per_person=max_examples_per_person,
        accountant=accountant,
    )
    plan, found = find(setting, epsilon=epsilon, sigma=sigma, batch=batch, steps=steps, epochs=epochs)
    answer = _answer(plan, found, trainable_parameters)
    rows = _table(plan) if table else []
    mechanisms = _mechanisms(plan) if compare else None
    units = None if persons is None else _units(plan, examples, persons, rows_per_unit)
    if plot is not None:
        _draw(plan, plot)
        print(f"wrote {plot}", file=sys.stderr)
    if as_json:
        answer |= {"table": rows} if table else {}
        answer |= {"plan": [each.to_dict() for each in mechanisms]} if mechanisms else {}
        answer |= {"units": units.to_dict()} if units else {}
        print(json.dumps(answer, indent=2, allow_nan=False))
    else:
        print(_in_words(plan, answer, delta_was_chosen=delta is None))
        if table:
            print(_table_in_words(plan, rows))
        if mechanisms:
            print(f"\nMechanisms for the same target:\n{mechanisms}")
        if units:
            print(f"\nPersons or rows, each person with as many rows, at the same epsilon of a person:\n{units}")


def _answer(plan: Plan, found: str, parameters: int | None) -> dict[str, Any]:
    """Return everything about a plan for JSON. An infinite ε is None."""
    setting, training = plan.setting, (plan.sigma, plan.batch, plan.steps)
    of_one_row = setting.epsilon(*training, rows=1) if setting.max_examples_per_person > 1 else plan.epsilon
    answer = {
        "found": found,
        "num_examples": setting.examples,
        "expected_batch_size": plan.batch,
        "sample_rate": plan.batch / setting.examples,
        "steps": plan.steps,
        "epochs": plan.epochs,
        "noise_multiplier": plan.sigma,
        "max_grad_norm": setting.max_grad_norm,
        "epsilon": plan.epsilon if plan.epsilon < math.inf else None,
        "delta": setting.delta,
        "accountant": setting.accountant,
        "max_examples_per_person": setting.max_examples_per_person,
        "epsilon_of_one_row": of_one_row if of_one_row < math.inf else None,
        "noise_on_mean": plan.noise_on_mean,
        "d_ln_sigma_d_ln_batch": plan.batch_exponent(),
        "mechanism": setting.mechanism(*training).to_dict(),
    }
    if parameters is not None:
        norm = plan.noise_norm(parameters)
        answer |= {
            "trainable_parameters": parameters,
            "noise_norm": norm,
            "noise_over_signal": norm / setting.max_grad_norm,
            "noise_over_signal_of_all_steps": norm / setting.max_grad_norm / math.sqrt(plan.steps),
        }
    return answer


def _in_words(plan: Plan, answer: dict[str, Any], *, delta_was_chosen: bool) -> str:
    rows = _rows(plan, answer, delta_was_chosen)
    rows[NAMES[answer["found"]]] += "  <- the answer"
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    if answer.get("noise_over_signal_of_all_steps", 0) > HOPELESS:
        lines.append(
            "Nothing will be learned: the noise of all steps together is longer than their signal. Take a larger "
            "batch, fewer trainable parameters (LoRA), more examples or a larger epsilon."
        )
    if plan.sigma == 0:
        lines.append("Without noise nothing is private: give a --sigma above 0, or --epsilon.")
    else:
        lines.append("The flags of a recipe that trains so:\n  " + _flags(plan, answer["found"]))
        if answer["found"] != "sigma":
            lines.append(
                "This epsilon is of the gradients alone. With these flags DPTrainer spends a little more, for the "
                "loss that it logs; with --target_epsilon in the place of --noise_multiplier both are in it."
            )
    return "\n".join(lines)


def _rows(plan: Plan, answer: dict[str, Any], delta_was_chosen: bool) -> dict[str, str]:
    k, q = plan.setting.max_examples_per_person, answer["sample_rate"]
    rows = {
        "protected": "one row of the data" if k == 1 else f"all rows of one person, {k} at most",
        "epsilon": up(plan.epsilon) if plan.epsilon < math.inf else "infinite: NOT PRIVATE",
        "delta": f"{plan.setting.delta:g}"
        + ("  (chosen: a power of ten, at most a tenth of 1/N)" if delta_was_chosen else ""),
        "examples (N)": f"{plan.setting.examples:,}",
        NAMES["batch"]: f"{plan.batch:,}  (each example with probability q = {q:.4g})",
        NAMES["steps"]: f"{plan.steps:,}  ({plan.epochs:.4g} epochs)",
        NAMES["sigma"]: f"{plan.sigma:.4f}",
        "noise on the mean (sigma/B)": f"{plan.noise_on_mean:.3g} C in each coordinate",
    }
    if k > 1 and plan.epsilon < math.inf:
        rows["epsilon"] += f"  (of one row alone: {up(answer['epsilon_of_one_row'])})"
    if (exponent := answer["d_ln_sigma_d_ln_batch"]) is not None:
        rows["with twice the batch"] = (
            f"sigma/B is {2 ** (1 - exponent):.2f} times smaller at the same epsilon and epochs, in half the steps"
        )
    if (norm := answer.get("noise_norm")) is not None:
        rows["noise beside signal"] = (
            f"length {norm:.3g} beside at most C = {plan.setting.max_grad_norm:g} in a step; over all steps "
            f"{answer['noise_over_signal_of_all_steps']:.2g} times the signal"
        )
    elif plan.sigma > 0:
        most = plan.steps * (HOPELESS / plan.noise_on_mean) ** 2
        rows["noise beside signal"] = (
            f"it drowns the signal beyond about {float(f'{most:.2g}'):,.0f} trainable parameters"
        )
    return rows


def _flags(plan: Plan, found: str) -> str:
    noise = f"--target_epsilon {plan.epsilon:g}" if found == "sigma" else f"--noise_multiplier {plan.sigma:g}"
    k = plan.setting.max_examples_per_person
    return (
        f"{noise} --target_delta {plan.setting.delta:g} --expected_batch_size {plan.batch} --max_steps {plan.steps} "
        f"--max_grad_norm {plan.setting.max_grad_norm:g}" + (f" --max_examples_per_person {k}" if k > 1 else "")
    )


def _table(plan: Plan) -> list[dict[str, float | None]]:
    """Return ε with one of sigma, batch and epochs multiplied by each factor; None if B would exceed N."""
    return [{"factor": factor, **{name: plan.varied_epsilon(name, factor) for name in VARIED}} for factor in FACTORS]


def _table_in_words(plan: Plan, rows: list[dict[str, float | None]]) -> str:
    def line(*cells: str) -> str:
        return "  " + "".join(f"{cell:>18}" for cell in cells)

    def epsilon(value: float | None) -> str:
        return up(value, 3) if value is not None else "B would exceed N"

    lines = [
        "",
        "Epsilon where one number is multiplied and the others stay:",
        line("", f"sigma {plan.sigma:.3g}", f"B {plan.batch}", f"epochs {plan.epochs:.3g}"),
        *(line(f"x {row['factor']:g}", *(epsilon(row[name]) for name in VARIED)) for row in rows),
    ]
    return "\n".join(lines)


def _mechanisms(plan: Plan) -> MechanismPlan:
    from ..mechanism.planner import plan as mechanisms_for

    if not math.isfinite(plan.epsilon):
        raise ValueError("--plan compares mechanisms that meet one epsilon: give a --sigma above 0, or --epsilon.")
    return mechanisms_for(
        plan.setting.examples,
        expected_batch_size=plan.batch,
        steps=plan.steps,
        target_epsilon=plan.epsilon,
        target_delta=plan.setting.delta,
        max_grad_norm=plan.setting.max_grad_norm,
        max_examples_per_person=plan.setting.max_examples_per_person,
        accountant=plan.setting.accountant,
    )


def _units(plan: Plan, examples: int, persons: int, rows_per_unit: int | None) -> UnitPlan:
    from ..mechanism.planner import plan_units

    most = plan.setting.max_examples_per_person
    if persons > examples or not math.isfinite(plan.epsilon):
        raise ValueError("--persons are at most as many as --examples, and are compared at one finite --epsilon.")
    return plan_units(
        [examples / persons] * persons,
        expected_rows=plan.batch,
        rows_per_unit=rows_per_unit or most,
        max_examples_per_person=most,
        target_epsilon=plan.epsilon,
        target_delta=plan.setting.delta,
        steps=plan.steps,
        max_grad_norm=plan.setting.max_grad_norm,
        accountant=plan.setting.accountant,
    )


def _draw(plan: Plan, path: Path) -> None:
    """Draw ε over the steps of the plan, and at its end over sigma."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            '--plot needs matplotlib, which is not installed. Type: pip install "dp-finetune[report]"'
        ) from error
    if plan.sigma == 0:
        raise ValueError("--plot has nothing to draw: with --sigma 0 epsilon is infinite from the first step on.")
    steps = sorted({max(1, round(plan.steps * share / 10)) for share in range(1, 11)})
    sigmas = [plan.sigma * 2 ** (k / 4) for k in range(-4, 5)]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    over_steps, over_sigma = figure.subplots(1, 2)
    over_steps.plot(steps, [plan.setting.epsilon(plan.sigma, plan.batch, n) for n in steps])
    over_steps.set(xlabel="steps", ylabel=f"epsilon at delta = {plan.setting.delta:g}")
    over_sigma.plot(sigmas, [plan.setting.epsilon(s, plan.batch, plan.steps) for s in sigmas])
    over_sigma.set(xlabel="noise multiplier (sigma)", yscale="log")
    for axes, x in ((over_steps, plan.steps), (over_sigma, plan.sigma)):
        axes.plot([x], [plan.epsilon], "o")
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"N = {plan.setting.examples:,}, B = {plan.batch:,}, {plan.epochs:.4g} epochs, sigma = {plan.sigma:.4f}"
    )
    figure.savefig(path)
