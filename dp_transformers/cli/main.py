"""The commands of `dp-transformers`. Wrong usage ends in one line and exit code 2."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from typing import Annotated

import typer

from .. import __version__
from .audit import audit
from .budget import budget
from .check import check
from .merge import merge
from .report import report
from .train import train

app = typer.Typer(
    name="dp-transformers",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# as recipes take both, and their own names of what `budget` computes
_BY_RECIPES = {
    "noise-multiplier": "sigma", "target-epsilon": "epsilon", "target-delta": "delta", "expected-batch-size": "batch",
    "num-train-epochs": "epochs", "max-steps": "steps",
}  # fmt: skip


def _either_spelling(flag: str) -> str:
    flag = flag.replace("_", "-")
    return _BY_RECIPES.get(flag, flag)


either_spelling = {"token_normalize_func": _either_spelling}


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"dp-transformers {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fine-tune models with differential privacy."""


app.command(context_settings=either_spelling)(budget)
app.command(context_settings=either_spelling)(check)
# the recipe parses its own flags, --help among them
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(train)
app.command(context_settings=either_spelling)(report)
# the flags after the script are the script's
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)(audit)
app.command(context_settings=either_spelling)(merge)


def main(arguments: list[str] | None = None) -> None:
    """Run a command. An error that the user can correct ends in one line on standard error and exit code 2."""
    try:
        code = app(arguments, prog_name="dp-transformers", standalone_mode=False)
    except (typer.TyperException, ValueError, OSError, ImportError) as error:
        print(f"error: {_message(error)}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _message(error: Exception) -> str:
    if not isinstance(error, typer.TyperException):
        return str(error)
    flag = getattr(error, "option_name", None)
    if flag is None:
        return error.format_message()
    likely = [each for each in getattr(error, "possibilities", None) or () if _are_close(flag, each)]
    return error.message + (f". Did you mean {' or '.join(sorted(likely))}?" if likely else "")


def _are_close(flag: str, other: str) -> bool:
    """Compare two flags without their dashes."""
    return bool(get_close_matches(flag.strip("-"), [other.strip("-")]))
