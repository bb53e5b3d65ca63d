"""Compares the result of a recipe with that of its twin without privacy and that of no training at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORT_NAME = "privacy_report.json"
TWIN = "twin"  # the twin's folder, within that of the private training
TWIN_HELP = (
    "Train the same without noise and without clipping, which is NOT PRIVATE, in the folder twin of output_dir. The "
    "table of the private training shows the result beside its own."
)


@dataclass(frozen=True)
class Outcome:
    """One number, such as the test accuracy, on so many held-out examples, and the same number for a baseline that
    needs no training."""

    name: str
    value: float
    baseline_name: str
    baseline: float
    held_out: int
    lower_is_better: bool = False

    def to_dict(self) -> dict[str, float]:
        return {_key(self.name): self.value, _key(self.baseline_name): self.baseline, "held_out": self.held_out}

    def rows(self, report: Mapping[str, Any], folder: str) -> dict[str, str]:
        """The lines of the table: the result, that of the other training in this folder, and the baseline.

        Args:
            report: What is known of the training that has ended; the other one is compared with it.
        """
        learned = self.value < self.baseline if self.lower_is_better else self.value > self.baseline
        other_name, other_folder, way_out = "without privacy (twin)", Path(folder, TWIN), "with --twin"
        if Path(folder).name == TWIN:
            other_name, other_folder, way_out = "with privacy", Path(folder).parent, "without --twin"
        how = (
            f"on {self.held_out} held-out examples" if learned else "not better than the baseline: nothing was learned"
        )
        return {
            self.name: f"{self.value:.4f}  ({how})",
            other_name: self._other(report, other_folder) or f"not trained yet: the same command {way_out}",
            self.baseline_name: f"{self.baseline:.4f}",
        }

    def _other(self, report: Mapping[str, Any], folder: Path) -> str | None:
        if not (file := folder / REPORT_NAME).is_file():
            return None
        other = json.loads(file.read_text())
        if _key(self.name) not in other:
            return None
        differing = [
            f"{name.replace('_', ' ')} {other[name]}"
            for name in ("num_examples", "steps", "held_out")
            if name in other and name in report and other[name] != report[name]
        ]
        unlike = f"  (of another training: {', '.join(differing)})" if differing else ""
        return f"{other[_key(self.name)]:.4f}{unlike}"


def _key(name: str) -> str:
    return name.replace(" ", "_")


def print_table(rows: Mapping[str, str]) -> None:
    width = max(map(len, rows))
    print("\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()))
