"""The report as one self-contained HTML page, with its pictures as PNG (extra ``report``), and as the section
"Privacy" of a model card."""

from __future__ import annotations

import base64
import io
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..step.ledger import Ledger
from .certificate import changes_of
from .findings import Report, look
from .recompute import FALSE_ALARMS, PrivacyCurve
from .words import epsilons, paragraph, percent, run_table, table, up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_NAME = "privacy_report.html"
_BLUE, _GREY = "#1f5f8b", "#9aa5b1"
_PICTURES = {
    "epsilon_over_steps": ("privacy_epsilon.png", "ε spent over the steps of all trainings together."),
    "detection": ("privacy_detection.png", "Largest rate of detection, by the accountant's privacy curve."),
}


def write(report: Report, folder: str | os.PathLike) -> list[Path]:
    """Write the page and its pictures into a folder, and return their paths. The files of a report on several folders
    end in ``_sum``, so that they do not overwrite those of one folder."""
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
    """Return the page, with the pictures in it or with the reason why they are ``missing``."""
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
    """Return the pictures by name, or the reason why they cannot be drawn."""
    if report.faults or not report.certificate["private"]:
        return {}, None
    try:
        drawn = [epsilon_over_steps(report.over_steps, report.certificate["total"]["delta"]), detection(report.curve)]
    except NoPictures as error:
        return {}, str(error)
    return dict(zip(_PICTURES, drawn, strict=True)), None


# ---- pictures ----


class NoPictures(ImportError):
    """Raised if matplotlib is not installed."""


def epsilon_over_steps(points: list[tuple[int, float]], delta: float) -> bytes:
    """Draw ε over the number of steps."""
    figure, axes = _figure()
    steps, epsilons = zip(*points, strict=True)
    axes.plot(steps, epsilons, color=_BLUE, linewidth=2)
    axes.plot(steps[-1:], epsilons[-1:], "o", color=_BLUE, markersize=5)
    axes.set(xlabel="steps", ylabel=f"ε at δ = {delta:g}", xlim=(0, None), ylim=(0, 1.1 * max(epsilons) or 1))
    axes.locator_params(axis="x", integer=True)
    _say(axes, up(epsilons[-1]), steps[-1], epsilons[-1], (-9, 3))
    return _png(figure)


def detection(curve: PrivacyCurve) -> bytes:
    """Draw the largest rate of detection over the rate of false alarms, both logarithmic."""
    figure, axes = _figure()
    alarms = np.geomspace(1e-4, 1, 200)
    axes.plot(alarms, [curve.detection(alarm) for alarm in alarms], color=_BLUE, linewidth=2, label="at most")
    axes.plot(alarms, alarms, color=_GREY, linestyle="--", label="by guessing")
    for alarm in FALSE_ALARMS:
        found = curve.detection(alarm)
        axes.plot([alarm], [found], "o", color=_BLUE, markersize=5)
        _say(axes, percent(found), alarm, found, (-7, 5))
    axes.set(xscale="log", yscale="log", xlabel="rate of false alarms", ylabel="rate of detection")
    axes.set(xlim=(1e-4, 1), ylim=(1e-4, 1.3))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: percent(value))
    axes.legend(frameon=False, loc="lower right")
    return _png(figure)


def _figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoPictures("pictures need matplotlib: pip install 'dp-finetune[report]'") from None
    figure = Figure(figsize=(5.2, 3.6), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e9ed", linewidth=0.8)
    return figure, axes


def _say(axes: Axes, text: str, x: float, y: float, offset: tuple[int, int]) -> None:
    axes.annotate(text, (x, y), offset, textcoords="offset points", ha="right", color=_BLUE)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


logger = logging.getLogger(__name__)

_BEGIN, _END = "<!-- privacy: begin -->", "<!-- privacy: end -->"


def section(certificate: Mapping[str, Any], curve: PrivacyCurve) -> str:
    """Return the section as Markdown: one paragraph and one table."""
    rows = [f"| {name} | {value.replace('|', '/')} |" for name, value in table(certificate, curve)]
    lines = ["## Privacy", "", paragraph(certificate, curve), "", "| | |", "|---|---|", *rows]
    return "\n".join([_BEGIN, *lines, _END])


def add_to(card: Path, run_dir: str | os.PathLike) -> None:
    """Put the section for a folder of trainings into a model card, if both exist. A failure is only logged, so that
    the model is saved all the same."""
    if not card.exists() or not Ledger(run_dir).run_ids():
        return
    try:
        folder = look(run_dir)
        if not changes_of(Ledger(run_dir)):  # any other fault is due to the model being saved before its certificate
            folder = replace(folder, faults=())
        found = Report([folder])
        put_into(card, section(found.certificate, found.curve))
    except (OSError, ValueError) as error:
        logger.warning("'%s' says nothing of privacy: %s", card, error)


def put_into(card: Path, text: str) -> None:
    """Replace the section of a model card, or add it at the end."""
    content = card.read_text(encoding="utf-8")
    old = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.S)
    if old.search(content):
        content = old.sub(lambda _: text, content, count=1)
    else:
        content = f"{content.rstrip()}\n\n{text}\n"
    card.write_text(content, encoding="utf-8")
