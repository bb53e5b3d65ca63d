"""`dp-transformers train`: run a recipe, in this process or in several."""

from __future__ import annotations

import ast
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def train(
    context: typer.Context,
    recipe: Annotated[str | None, Argument(help="The name of a recipe; its flags follow.")] = None,
    num_processes: Annotated[
        int | None, Option("--num_processes", min=1, help="Launch so many processes with accelerate.")
    ] = None,
    accelerate_config: Annotated[
        str | None,
        Option("--accelerate_config", help="Accelerate's configuration: a file, or ddp, fsdp2, fsdp2_tp, multi_node."),
    ] = None,
    show_help: Annotated[bool, Option("--help", help="Show this help, or that of the recipe.")] = False,
) -> None:
    """Train by a recipe: dp-transformers train RECIPE --config FILE --FLAG VALUE ...

    Flags override the file. If the command is repeated, it resumes from the newest checkpoint in --output_dir.
    """
    if recipe is None:
        if not show_help:
            raise ValueError(f"train needs a recipe: one of {', '.join(recipes())}.")
        print(context.get_help() + "\n\n" + _list_of_recipes())
        return
    path = _find(recipe)
    flags = [*context.args, *(["--help"] if show_help else [])]
    if (num_processes is None and accelerate_config is None) or show_help:
        _run(path, flags)
    else:
        _launch(path, flags, num_processes, accelerate_config or "ddp")


def recipes() -> dict[str, Path]:
    """Return the recipes by name: the files that can be run, in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    folder = next(folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")}


def _list_of_recipes() -> str:
    lines = ["Recipes:"]
    for name, path in recipes().items():
        what = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        lines.append(f"  {name:<22}{what}")
    return "\n".join([*lines, "", "The flags of a recipe: dp-transformers train RECIPE --help"])


def _find(recipe: str) -> Path:
    known = recipes()
    if recipe in known:
        return known[recipe]
    if recipe.startswith("-"):
        raise ValueError(f"the recipe comes before its flags: dp-transformers train RECIPE {recipe} ...")
    close = get_close_matches(recipe, known, n=1)
    way_out = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
    raise ValueError(f"there is no recipe '{recipe}'; {way_out}")


def _run(path: Path, flags: list[str]) -> None:
    sys.argv = [f"dp-transformers train {path.stem}", *flags]
    sys.path.insert(0, str(path.parent))  # as for `python recipes/...`, whose modules import each other
    runpy.run_path(str(path), run_name="__main__")


def _launch(path: Path, flags: list[str], num_processes: int | None, config: str) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    words = ["--config_file", str(_accelerate_file(path.parent, config))]
    if num_processes is not None:
        words += ["--num_processes", str(num_processes)]
    if "--use_cpu" in flags:  # accelerate's own --cpu starts one process, whatever the number
        words += ["--num_cpu_threads_per_process", "1"]
    launch_command(launch_command_parser().parse_args([*words, str(path), *flags]))


def _accelerate_file(folder: Path, config: str) -> Path:
    named = folder / "accelerate" / f"{config}.yaml"
    file = named if named.is_file() else Path(config)
    if not file.is_file():
        known = ", ".join(path.stem for path in sorted(named.parent.glob("*.yaml")))
        raise ValueError(f"--accelerate_config: there is no file '{config}', and it is none of {known}.")
    return file
