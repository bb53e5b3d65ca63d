"""Bounds on an attacker: the largest rate of detection at a given rate of false alarms.

The attacker knows everything but whether one row was in the training data: all released gradients, the model, the code
and every other row. A test that raises a false alarm with probability α detects the row with probability at most

    min over ε of  min(e^ε · α + δ(ε),  1 - (1 - α - δ(ε)) · e^-ε)

(Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015), where δ(ε) is the privacy curve of everything that was
released. The (ε, δ) that is usually stated is one point of this curve, and gives a much looser bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..mechanism.accounting.accountants import ACCOUNTANTS
from ..mechanism.accounting.events import event_accountant

if TYPE_CHECKING:
    from dp_accounting import DpEvent

FALSE_ALARMS = (0.1, 0.01, 0.001)
_INTERVAL = 1e-3  # grid interval of privacy losses; a coarser grid only raises the bounds
_EPSILONS = np.concatenate([np.linspace(0, 2, 201)[:-1], np.linspace(2, 20, 361)[:-1], np.linspace(20, 100, 161)])


class PrivacyCurve(NamedTuple):
    """δ(ε) of everything that was released, at a few values of ε. Each point is an upper bound."""

    epsilons: np.ndarray
    deltas: np.ndarray

    def detection(self, false_alarms: float) -> float:
        """Return the largest probability of detection at this probability of a false alarm."""
        factor = np.exp(self.epsilons)
        by_removal = factor * false_alarms + self.deltas
        by_addition = 1 - (1 - false_alarms - self.deltas) / factor
        return float(np.clip(np.minimum(by_removal, by_addition).min(), false_alarms, 1))


def privacy_curve(
    event: DpEvent, relation: str, accountant: str = "pld", *, stated: tuple[float, float] | None = None
) -> PrivacyCurve:
    """Return the privacy curve of an event. A user's own accountant computes only ε, so its curve is the one point
    (ε, δ) that is ``stated``."""
    if accountant not in ACCOUNTANTS and stated is not None:
        return PrivacyCurve(np.array(stated[:1]), np.array(stated[1:]))
    counted = event_accountant(accountant, relation, interval=_INTERVAL).compose(event)
    epsilons: Any = _EPSILONS  # typed as a float there
    deltas = counted.get_delta(epsilons) if accountant == "pld" else [counted.get_delta(e) for e in _EPSILONS]
    return PrivacyCurve(_EPSILONS, np.clip(deltas, 0, 1))


def no_privacy() -> PrivacyCurve:
    """Return the curve of a run that is not private: every row may be detected without a false alarm."""
    return PrivacyCurve(_EPSILONS, np.ones_like(_EPSILONS))


def ceilings(curve: PrivacyCurve, false_alarms: Sequence[float] = FALSE_ALARMS) -> dict[float, float]:
    """Return the largest rate of detection at each rate of false alarms."""
    return {alarms: curve.detection(alarms) for alarms in false_alarms}
