"""Write the tables of benchmarks/RESULTS.md from the JSON files of the other benchmarks.

python -m benchmarks.report results/*.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from .harness import Row, readable

RESULTS = Path(__file__).parent / "RESULTS.md"


def table(rows: Sequence[Row]) -> list[str]:
    """One Markdown table, a line for every row and a column for every figure that any of them has."""
    rows = [readable(row) for row in rows]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def side_by_side(rows: Sequence[Row]) -> list[Row]:
    """One row for every case with a cell for every contender, where the rows are times; else the rows."""
    if not any("factor" in row and "ms" in row for row in rows):
        return list(rows)
    cases = [dict(itertools.takewhile(lambda item: item[0] != "contender", row.items())) for row in rows]
    columns = dict.fromkeys(column for case in cases for column in case)
    lines: dict[str, Row] = {}
    for case, row in zip(cases, rows, strict=True):
        lines.setdefault(str(case), dict.fromkeys(columns) | case)[row["contender"]] = cell(row)
    return list(lines.values())


def cell(row: Row) -> str:
    """Milliseconds, the ratio with its quartiles, and its inverse; of plain training the first."""
    figures = readable(row)
    text = [figures["ms"].split(" (")[0] + " ms"] if figures.get("ms") else []
    if row.get("wall_ms", row.get("ms", 0)) < 0.9 * row.get("ms", 0):  # the work of other threads
        text.append(f"{figures['wall_ms']} ms wall")
    if row.get("ratio") != 1:
        text += [figures[name] + sign for name, sign in (("ratio", ""), ("factor", "×")) if figures.get(name)]
    return figures.get("failed", ", ".join(text)).replace("ModuleNotFoundError: No module named", "not installed:")


def section(document: dict) -> list[str]:
    """Heading, machine and settings, and one table for every part."""
    conditions = [", ".join(f"{k} {v}" for k, v in document[what].items()) for what in ("machine", "settings")]
    lines = [f"## {document['benchmark']}", "", *(f"{line}." for line in conditions), ""]
    for part in dict.fromkeys(row.get("part", "") for row in document["rows"]):
        rows = [
            {k: v for k, v in row.items() if k != "part"} for row in document["rows"] if row.get("part", "") == part
        ]
        lines += [f"### {part}", ""] * bool(part) + [*table(side_by_side(rows)), ""]
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("files", nargs="+", type=Path, help="JSON files")
    p.add_argument("--output", type=Path, default=RESULTS)
    args = p.parse_args(argv)
    lines = [
        "# Results",
        "",
        "As run, written by `python -m benchmarks.report`. Times are medians: milliseconds (and by the wall clock, "
        "where several threads",
        "worked), plain time / this time with its quartiles, and the inverse of that (×). *published* is what the "
        "papers that `benchmarks/` names",
        "report, on their hardware.",
        "",
    ]
    for path in args.files:
        lines += section(json.loads(path.read_text()))
    args.output.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
