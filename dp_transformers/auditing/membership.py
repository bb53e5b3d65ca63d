"""How well scores tell members of the training data from others, beside what a mechanism allows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from ..mechanism.mechanism import Mechanism
from ..reports.recompute import ceilings, privacy_curve

FALSE_ALARMS = (0.01, 0.001)


def membership_report(
    members: ArrayLike, others: ArrayLike, mechanism: Mechanism | None = None, *, twin: tuple[Any, Any] | None = None
) -> dict[str, dict[str, float]]:
    """Return how well scores tell members from others: "auc", "tpr at 0.01 fpr" and "tpr at 0.001 fpr".

    Args:
        members: (n,) scores of rows that were trained on, larger where membership is likelier (the negative loss, or
            better how much it fell).
        others: (k,) scores of rows of the same kind that were not. With fewer than 1000 of them nothing can be said at
            0.001, which is NaN then; with fewer than 100 nothing at 0.01 either.
        mechanism: What was trained with. Its planned steps give the largest rates that any attack can have.
        twin: Scores of members and others by a model that was trained in the same way without privacy.

    Returns:
        The rates of "model", and of "twin" and "ceiling" where they were asked for.

    Raises:
        ValueError: scores are missing or not finite, or the mechanism does not say how many steps are taken.

    Example::

        >>> from dp_transformers import membership_report
        >>> membership_report([2.0, 1.0, 3.0], [0.0, 1.5])["model"]["auc"]
        0.8333333333333334
    """
    report = {"model": _rates(members, others)}
    if twin is not None:
        report["twin"] = _rates(*twin)
    if mechanism is not None:
        report["ceiling"] = _ceiling(mechanism)
    return report


def _rates(members: ArrayLike, others: ArrayLike) -> dict[str, float]:
    scores, without = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (members, others))
    if not (len(scores) and len(without)) or not np.isfinite(np.concatenate([scores, without])).all():
        raise ValueError("members and others must each have a score at least, and all scores must be finite.")
    n, k = len(scores), len(without)
    auc = (rankdata(np.concatenate([scores, without]))[:n].sum() - n * (n + 1) / 2) / (n * k)
    falling = np.sort(without)[::-1]
    rates = {_name(a): float((scores > falling[int(a * k)]).mean()) if k * a >= 1 else np.nan for a in FALSE_ALARMS}
    return {"auc": float(auc), **rates}


def _ceiling(mechanism: Mechanism) -> dict[str, float]:
    if mechanism.steps is None:
        raise ValueError("the mechanism leaves open how many steps are taken: give Mechanism(steps=...).")
    curve = privacy_curve(mechanism.event(mechanism.planned()), mechanism.sampling.relation)
    upper = [curve.detection(a) for a in np.linspace(0, 1, 1001)[1:]]  # an upper sum, as the curve rises
    return {"auc": float(np.mean(upper)), **{_name(a): rate for a, rate in ceilings(curve, FALSE_ALARMS).items()}}


def _name(false_alarms: float) -> str:
    return f"tpr at {false_alarms:g} fpr"
