"""Command-line flags of recipes: from dataclasses, in groups, and with a configuration file below them."""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """The description as it is written, one spelling of each flag, and the defaults that say something."""

    def _format_action_invocation(self, action: Action) -> str:
        kind = action.type.__name__ if action.type in (int, float, str) else "value"
        return f"{action.option_strings[0]} {kind}" if action.nargs in (None, "+") else action.option_strings[0]

    def _get_help_string(self, action: Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class HelpAll(Action):
    """Show every flag, also those that a recipe's own help leaves out."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        parser.print_help_of_all()
        parser.exit()


class RecipeParser(HfArgumentParser):
    """Flags of dataclasses, below them the file of ``--config``, and what was meant where a flag does not exist.

    Args:
        groups: Title of a group in ``--help`` -> names of its flags, in order. ``--help_all`` has the others too.
    """

    def __init__(self, classes: tuple[type, ...], groups: dict[str, list[str]], description: str):
        super().__init__(
            classes,
            usage="%(prog)s [flags]",
            description=description,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("--config", default=SUPPRESS, help="A YAML or JSON file of flags; those given here win.")
        self.add_argument("--help", "-h", action="help", help="Show this help.")
        self.add_argument("--help_all", action=HelpAll, nargs=0, default=SUPPRESS, help="Show every flag.")
        self._all_groups = list(self._action_groups)
        self._action_groups[:] = self._grouped({**groups, "More": ["config", "help", "help_all"]})

    def _grouped(self, groups: dict[str, list[str]]) -> list:
        shown = []
        for title, names in groups.items():
            group = self.add_argument_group(title)
            first = {action.dest: action for action in reversed(self._actions)}  # not --no_..., which is the second
            group._group_actions += [first[name] for name in names]
            shown.append(group)
        return shown

    @property
    def _shown(self) -> list[str]:
        return [action.option_strings[0] for group in self._action_groups for action in group._group_actions]

    def print_help_of_all(self) -> None:
        self._action_groups[:] = self._all_groups
        self.print_help()

    def parse(self, words: list[str] | None = None, example: Path | None = None, mine: tuple[str, ...] = ()) -> tuple:
        """The dataclasses, from the command line and from the file that its ``--config`` names. Where neither of them
        gives one of the flags ``mine``, the file ``example`` says what is left open."""
        words = sys.argv[1:] if words is None else words
        given, unknown = self.parse_known_args(words)
        if unknown:
            self.error(self._unknown(unknown[0]))
        values = self._read(config) if (config := getattr(given, "config", None)) else {}
        if example and not any(getattr(given, name) or values.get(name) for name in mine):
            values = self._read(str(example)) | values
        self.set_defaults(**values)
        parsed = self.parse_args_into_dataclasses(words, look_for_args_file=False)
        return parsed[: len(self.dataclass_types)]

    def _read(self, path: str) -> dict[str, Any]:
        if not Path(path).is_file():
            self.error(f"--config: there is no file '{path}'.")
        try:
            text = Path(path).read_text(encoding="utf-8")
            values = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
        except (ValueError, yaml.YAMLError) as error:
            self.error(f"--config {path} cannot be read: {' '.join(str(error).split())}")
        if not isinstance(values, dict):
            self.error(f"--config {path} must hold lines of the form 'flag: value'.")
        known = {action.dest for action in self._actions} - {"config", "help", "help_all"}
        if unknown := [str(name) for name in values if name not in known]:
            self.error(f"--config {path}: there is no flag '{unknown[0]}'{self._meant(unknown[0])}")
        return values

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            way_out = f" A file of flags is given as --config {word}." if Path(word).suffix else ""
            return f"'{word}' stands where a flag should stand.{way_out}"
        return f"there is no flag {word}{self._meant(word)}"

    def _meant(self, word: str) -> str:
        """Suggest the flag that was meant: one that ends as the word does, or looks like it. Flags that are shown come
        before the others."""
        name = word.lstrip("-").split("=")[0].replace("-", "_")
        for flags in (self._shown, [action.option_strings[0] for action in self._actions]):
            ending = [flag for flag in flags if flag.endswith(f"_{name}")]
            if close := ending or get_close_matches(f"--{name}", flags, n=1):
                return f"; did you mean {close[0]}?"
        return ". See --help, or --help_all for every flag."

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line."""
        self.exit(2, f"error: {message}\n")
