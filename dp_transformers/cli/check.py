"""`dp-transformers check`: checks that a model can be trained privately, and measures the cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from .model_check import ModelCheck


def check(
    model: Annotated[str, Argument(help="A folder, or the name of a model on the Hub.")],
    task: Annotated[
        str | None,
        Option(help="Put this head on it: causal_lm, sequence_classification, ... Default: the head that it has."),
    ] = None,
    lora_rank: Annotated[
        int | None, Option(min=1, help="Train LoRA adapters of this rank, and a classification head.")
    ] = None,
    target_modules: Annotated[
        str | None, Option(help="Modules that get an adapter: comma-separated names, or all-linear.")
    ] = None,
    from_config: Annotated[
        bool, Option("--from-config", help="Random weights: only the configuration is read or downloaded.")
    ] = False,
    examples: Annotated[int, Option(min=2, help="Examples at once.")] = 4,
    tokens: Annotated[int, Option(min=1, help="Tokens of an example.")] = 32,
    as_json: Annotated[bool, Option("--json", help="Write the findings as JSON.")] = False,
) -> None:
    """Check that MODEL can be trained privately.

    Runs it on random inputs, and shows the rule that covers each module, the error of norms and clipped sums against
    one example at a time, and the time and memory of a step in each clipping mode. The exit code is 1 if the model is
    refused.
    """
    if target_modules is not None and lora_rank is None:
        raise ValueError("--target-modules needs the rank of the adapters: give --lora-rank too.")
    from .model_check import build, check_model_in_all_modes

    built = build(model, task, lora_rank, target_modules, from_config=from_config)
    found = check_model_in_all_modes(built, examples, tokens)
    print(json.dumps(found.to_dict(), indent=2) if as_json else _in_words(found))
    if found.refusals:
        raise typer.Exit(1)


def _in_words(found: ModelCheck) -> str:
    share = f"{found.trainable:,} of {found.parameters:,} parameters are trained"
    lines = [f"{found.name}: {share}."]
    if found.refusals:
        return "\n".join(
            [*lines, "REFUSED, it cannot be trained privately as it is:", *(f"- {w}" for w in found.refusals)]
        )
    lines += ["", "What covers them:", *_columns(["module", "gradients by", "modules", "parameters"], found.covered)]
    lines += ["", f"A step of {found.examples} random examples in each mode:"]
    names = ["mode", "norm error", "sum error", "loss error", "milliseconds", "MiB"]
    lines += _columns(names, found.modes)
    lines += ["", "Every trainable parameter is covered, and clipping is exact: the model can be trained privately."]
    return "\n".join(lines)


def _columns(names: list[str], rows: list[dict[str, Any]]) -> list[str]:
    table = [names, *([_readable(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def _readable(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < value < 1e-2 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
