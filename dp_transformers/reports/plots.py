"""The pictures of a report, as PNG (extra ``report``)."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from .attack import FALSE_ALARMS, PrivacyCurve
from .words import percent, up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _GREY = "#1f5f8b", "#9aa5b1"


class NoPictures(ImportError):
    """matplotlib is not installed."""


def epsilon_over_steps(points: list[tuple[int, float]], delta: float) -> bytes:
    """ε after each number of steps."""
    figure, axes = _figure()
    steps, epsilons = zip(*points, strict=True)
    axes.plot(steps, epsilons, color=_BLUE, linewidth=2)
    axes.plot(steps[-1:], epsilons[-1:], "o", color=_BLUE, markersize=5)
    axes.set(
        xlabel="steps", ylabel=f"ε for one row at δ = {delta:g}", xlim=(0, None), ylim=(0, 1.1 * max(epsilons) or 1)
    )
    axes.locator_params(axis="x", integer=True)
    _say(axes, up(epsilons[-1]), steps[-1], epsilons[-1], (-9, 3))
    return _png(figure)


def detection(curve: PrivacyCurve) -> bytes:
    """The largest rate of detection over the rate of false alarms, both logarithmic."""
    figure, axes = _figure()
    alarms = np.geomspace(1e-4, 1, 200)
    axes.plot(alarms, [curve.detection(alarm) for alarm in alarms], color=_BLUE, linewidth=2, label="at most")
    axes.plot(alarms, alarms, color=_GREY, linestyle="--", label="by guessing")
    for alarm in FALSE_ALARMS:
        found = curve.detection(alarm)
        axes.plot([alarm], [found], "o", color=_BLUE, markersize=5)
        _say(axes, percent(found), alarm, found, (-7, 5))
    axes.set(xscale="log", yscale="log", xlabel="rate of false alarms", ylabel="rate of detection of one row")
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
