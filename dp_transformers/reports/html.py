"""The report as one HTML page that needs no other file, and its pictures as PNG."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .attack import FALSE_ALARMS
from .findings import Report
from .plots import NoPictures, detection, epsilon_over_steps
from .words import epsilons, percent, run_table, table, up

PAGE_NAME = "privacy_report.html"
_PICTURES = {
    "epsilon_over_steps": (
        "privacy_epsilon.png",
        "What was spent for one row over the steps of all trainings together.",
    ),
    "detection": (
        "privacy_detection.png",
        "How well one row is detected at most, by the accountant's privacy curve.",
    ),
}


def write(report: Report, folder: str | os.PathLike) -> list[Path]:
    """Write the page and its pictures into a folder, and return their paths. The files of several folders together
    end in ``_sum``, so that they do not take the place of those of one."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures, missing = _pictures(report)
    page = render(report, pictures, missing)
    ending = "_sum" if len(report.folders) > 1 else ""
    names = [PAGE_NAME, *(_PICTURES[name][0] for name in pictures)]
    paths = [(folder / name).with_stem(Path(name).stem + ending) for name in names]
    for path, content in zip(paths, [page.encode(), *pictures.values()], strict=True):
        path.write_bytes(content)
    return paths


def render(report: Report, pictures: Mapping[str, bytes], missing: str | None) -> str:
    """The page, with the pictures in it, or with what is said in their place."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    template = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    numbers = _numbers(report) if report.has_numbers else {}
    return template.get_template("report.html").render(
        up=up,
        report=report,
        **numbers,
        pictures=[(base64.b64encode(png).decode(), _PICTURES[name][1]) for name, png in pictures.items()],
        missing=missing,
    )


def _numbers(report: Report) -> dict[str, Any]:
    certificate, curve = report.certificate, report.curve
    return {
        "certificate": certificate,
        "epsilons": epsilons(certificate["total"]),
        "table": table(certificate, curve),
        "runs": [run_table(run) for run in certificate["runs"]],
        "attack": [
            (percent(alarm), percent(curve.detection(alarm)), curve.detection(alarm)) for alarm in FALSE_ALARMS
        ],
    }


def _pictures(report: Report) -> tuple[dict[str, bytes], str | None]:
    """The pictures by name, or why there are none."""
    if report.faults or not report.certificate["private"]:
        return {}, None
    try:
        drawn = [epsilon_over_steps(report.over_steps, report.certificate["total"]["delta"]), detection(report.curve)]
    except NoPictures as error:
        return {}, str(error)
    return dict(zip(_PICTURES, drawn, strict=True)), None
