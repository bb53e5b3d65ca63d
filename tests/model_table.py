"""docs/models.md: what works for which model and adapter, written from what the tests measure."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import with_table

PATH = Path(__file__).parents[1] / "docs" / "models.md"
HEADS = {
    "models": ["| model | tuning | worst relative error | rules | apart | re-run |", "|---|---|---|---|---|---|"],
    "adapters": ["| adapter | outcome | worst relative error | apart | re-run |", "|---|---|---|---|---|"],
}
TUNING = {"full": "full", "tied": "full, embeddings tied", "lora": "LoRA"}


def _way(owner) -> str:
    return "rules" if owner.has_rule else "re-run" if owner.is_rerun else "apart"


def _classes(owners, way: str) -> str:
    return ", ".join(sorted({type(c.module).__name__ for c in owners if _way(c) == way})) or "none"


class ModelTable:
    """Rows of the two tables; the columns before the error are what must be current in the file."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[str, float | None, str]]] = {name: [] for name in HEADS}

    def add(self, name: str, variant: str, worst: float, owners: list) -> None:
        tail = "".join(f" {_classes(owners, way)} |" for way in ("rules", "apart", "re-run"))
        self.rows["models"].append((f"| {name} | {TUNING[variant]} |", worst, tail))

    def add_adapter(self, name: str, outcome: str, worst: float | None, owners: list) -> None:
        tail = "".join(f" {_classes(owners, way) if owners else ''} |" for way in ("apart", "re-run"))
        self.rows["adapters"].append((f"| {name} | {outcome} |", worst, tail))

    def lines(self, name: str) -> list[str]:
        return HEADS[name] + [
            head + (f" {worst:.1e} |" if worst is not None else " |") + tail for head, worst, tail in self.rows[name]
        ]

    def write(self) -> None:
        """The tables whose tests ran, into their places."""
        for name in (name for name, rows in self.rows.items() if rows):
            PATH.write_text(with_table(PATH.read_text(), name, self.lines(name)))

    def stale(self) -> list[str]:
        """Rows measured in this run that the file does not have, figures aside."""
        text = PATH.read_text() if PATH.exists() else ""
        have = [line for line in text.splitlines() if line.startswith("|")]
        rows = [(head, tail) for rows in self.rows.values() for head, _, tail in rows]
        return [
            head + " ..." + tail
            for head, tail in rows
            if not any(x.startswith(head) and x.endswith(tail) for x in have)
        ]
