"""docs/models.md: what works for which model and adapter, written from what the tests measure."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).parents[1] / "docs" / "models.md"

HEAD = """# Models and adapters

Measured by the test suite (`python -m pytest tests/clipping/test_models.py tests/clipping/test_adapters.py --write-tables` writes this
page), on small random models, in fp32: norms and clipped sums in all four modes (`book_keeping`, `ghost`, `fast_gradient`, `per_sample`)
against one example at a time through plain autograd. Everything listed is exact to 1e-5; the last digits of the figures differ between
machines. Modules under *re-run* have no rule of their own: they go through the fallback, exact and slower, and the log says so.
"""
MODELS = "\n## Models\n\n| model | tuning | worst relative error | rules | re-run |\n|---|---|---|---|---|\n"
ADAPTERS = "\n## Adapters (peft)\n\n| adapter | outcome | worst relative error | re-run |\n|---|---|---|---|\n"
TUNING = {"full": "full", "tied": "full, embeddings tied", "lora": "LoRA"}


def _classes(owners, *, ruled: bool) -> str:
    return ", ".join(sorted({type(c.module).__name__ for c in owners if c.is_rerun is not ruled})) or "none"


class ModelTable:
    """Rows of the two tables; the columns before the error are what must be current in the file."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[str, float | None, str]]] = {MODELS: [], ADAPTERS: []}

    def add(self, name: str, variant: str, worst: float, owners: list) -> None:
        tail = f" {_classes(owners, ruled=True)} | {_classes(owners, ruled=False)} |"
        self.rows[MODELS].append((f"| {name} | {TUNING[variant]} |", worst, tail))

    def add_adapter(self, name: str, outcome: str, worst: float | None, owners: list) -> None:
        self.rows[ADAPTERS].append(
            (f"| {name} | {outcome} |", worst, f" {_classes(owners, ruled=False) if owners else ''} |")
        )

    def lines(self, title: str) -> list[str]:
        return [
            head + (f" {worst:.1e} |" if worst is not None else " |") + tail for head, worst, tail in self.rows[title]
        ]

    def write(self) -> None:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(HEAD + "".join(title + "\n".join(self.lines(title)) + "\n" for title in (MODELS, ADAPTERS)))

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
