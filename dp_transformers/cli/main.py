"""The commands of `dp-transformers`, and what is said of wrong usage: one line, and exit code 2."""

from __future__ import annotations

import sys

import typer

from .budget import budget
from .check import check
from .report import report
from .train import train

app = typer.Typer(
    name="dp-transformers",
    help="Fine-tune models with differential privacy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(budget)
app.command()(check)
# the flags of a recipe, --help among them, are the recipe's to read
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(train)
app.command()(report)


def main(arguments: list[str] | None = None) -> None:
    """Run a command. What the user can set right ends in one line on standard error and exit code 2."""
    try:
        code = app(arguments, prog_name="dp-transformers", standalone_mode=False)
    except (typer.TyperException, ValueError, OSError) as error:
        print(f"error: {_message(error)}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _message(error: Exception) -> str:
    if not isinstance(error, typer.TyperException):
        return str(error)
    if close := getattr(error, "possibilities", None):
        return f"{error.message}. Did you mean {' or '.join(sorted(close))}?"
    return error.format_message()
