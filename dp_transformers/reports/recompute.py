"""Recomputes ε from a ledger, and what it leaves to an attacker, without the model, the data or torch.

An attacker knows everything but whether one row was in the training data: all released gradients, the model, the code
and every other row. A test that raises a false alarm with probability α detects the row with probability at most

    min over ε of  min(e^ε · α + δ(ε),  1 - (1 - α - δ(ε)) · e^-ε)

(Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015), where δ(ε) is the privacy curve of everything that was
released. The (ε, δ) that is usually stated is one point of this curve, and gives a much looser bound.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..mechanism.accounting import event_epsilon
from ..mechanism.accounting.accountants import ACCOUNTANTS, require_small_delta
from ..mechanism.accounting.events import event_accountant
from ..mechanism.mechanism import Mechanism, PrivacyUnit, Steps
from ..step.checkpoint import PrivacyState
from ..step.ledger import Ledger

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class RecordedRun:
    """One run of a ledger.

    Attributes:
        state: The state when the run last began or resumed, with the largest ``max_examples_per_person`` ever given.
        segments: Parameters of the executed steps, in one counter for each noise source.
        unfinished: Number of these steps that were drawn for a loop, and not taken.
        facts: Data, model and software when the run last began or resumed. Further releases, and other data, are those
            of all beginnings.
    """

    state: PrivacyState
    segments: tuple[Steps, ...]
    not_private_because: tuple[str, ...] = ()
    verified: bool = True
    unfinished: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mechanism(self) -> Mechanism:
        return self.state.mechanism

    @property
    def accountant(self) -> str:
        return self.facts.get("accountant", "pld")

    @property
    def steps(self) -> int:
        return sum(sum(segment.values()) for segment in self.segments)

    @property
    def event(self) -> Any:
        return self.mechanism.event(*self.segments) if self.segments else self.mechanism.event(Counter())


@dataclass(frozen=True)
class Spent:
    """The privacy spent by several runs on the same data together."""

    epsilon: float
    epsilon_per_person: float
    delta: float
    accountant: str
    relation: str
    protects: str
    max_examples_per_person: int
    steps: int


def recorded_runs(ledger: Ledger, unfinished: Mapping[str, int] | None = None) -> list[RecordedRun]:
    """Read all runs of a ledger, in order.

    Args:
        unfinished: Number of draws of each run, by its id, that were given to a loop and not stepped. They have no
            line, and ε covers them.

    Raises:
        ValueError: the first line of a run is missing or cannot be read, or its lines disagree on the mechanism.
    """
    return [_recorded(ledger, run_id, (unfinished or {}).get(run_id, 0)) for run_id in ledger.run_ids()]


def _recorded(ledger: Ledger, run_id: str, unfinished: int) -> RecordedRun:
    beginnings = ledger.beginnings(run_id)
    if not beginnings:
        raise ValueError(
            f"'{ledger.path}' has steps of run {run_id!r} and no line that begins it, so their epsilon is not known: "
            "a line was removed. Restore the file from a backup."
        )
    try:
        states = [PrivacyState.from_dict({"run_id": run_id, **line}) for line in beginnings]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"'{ledger.path}' does not say how run {run_id!r} began ({type(error).__name__}: {error}): a line was "
            "changed. Restore the file from a backup."
        ) from error
    if any(_fixed_part(state.mechanism) != _fixed_part(states[0].mechanism) for state in states):
        raise ValueError(
            f"'{ledger.path}' says that run {run_id!r} went on with another mechanism, so its epsilon is not known: a "
            "line or a checkpoint was changed. Restore the file from a backup."
        )
    mechanism = states[-1].mechanism
    segments = ledger.segments(run_id)
    executed = sum(segment.total() for segment in segments)
    known = [mechanism.known(segment, executed) for segment in segments]
    if unfinished:
        *known, last = known
        known = [*known, last + Counter({mechanism.costliest(executed + 1): unfinished})]
    unit = max((state.mechanism.unit for state in states), key=lambda unit: unit.max_examples_per_person)
    return RecordedRun(
        state=_with_unit(states[-1], unit),
        segments=tuple(filter(None, known)),
        not_private_because=_reasons(beginnings, mechanism),
        verified=all(line.get("verified", True) for line in beginnings),
        unfinished=unfinished,
        facts={**beginnings[-1], **_facts_of_all(beginnings)},
    )


def _facts_of_all(beginnings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collect the facts that stay true when a run resumes without them: further releases, and data."""
    shown = [each for line in beginnings for each in line.get("also_released") or ()]
    facts: dict[str, Any] = {"also_released": [each for i, each in enumerate(shown) if each not in shown[:i]]}
    last = beginnings[-1].get("data")
    earlier = [line["data"] for line in beginnings if line.get("data") not in (None, last)]
    if last is not None and earlier:
        facts["data"] = {**last, "earlier": [each for i, each in enumerate(earlier) if each not in earlier[:i]]}
    return facts


def is_other_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if the digests of two data sets show that they differ. Digests with different keys show nothing."""
    both = one.get("digest") and other.get("digest") and one.get("key") == other.get("key")
    return bool(both) and one["digest"] != other["digest"]


def _fixed_part(mechanism: Mechanism) -> Mechanism:
    """Return a mechanism without the parts that may change when a run is resumed."""
    return replace(mechanism, steps=None, unit=replace(mechanism.unit, max_examples_per_person=1))


def _with_unit(state: PrivacyState, unit: PrivacyUnit) -> PrivacyState:
    return replace(state, mechanism=replace(state.mechanism, unit=unit))


def _reasons(beginnings: Iterable[Mapping[str, Any]], mechanism: Mechanism) -> tuple[str, ...]:
    recorded = [why for line in beginnings for why in line.get("not_private_because", ())]
    silent = ["noise_multiplier=0: no noise is added"] if mechanism.is_silent else []
    return tuple(dict.fromkeys([*recorded, *silent]))


def spent(runs: Sequence[RecordedRun], delta: float | None = None) -> Spent:
    """Add up runs on the same data. Their events are composed, which is tighter than adding their ε.

    Args:
        delta: The δ at which ε is stated; by default the smallest δ of the runs.

    Raises:
        ValueError: no run has a δ, it is not below 1/N, or the runs have different neighbouring relations, so that
            there is no common ε.
    """
    neighbours = {(run.mechanism.sampling.relation, run.mechanism.unit.noun) for run in runs}
    if len(neighbours) > 1:
        differ = " and by ".join(sorted(f"{relation!r} of a {noun}" for relation, noun in neighbours))
        raise ValueError(
            f"the runs do not add up to one epsilon, since neighbours differ by {differ}: state the epsilon of each."
        )
    ((relation, noun),) = neighbours
    deltas = [run.state.delta for run in runs if run.state.delta is not None]
    if delta is None and not deltas:
        raise ValueError("no run has a delta at which to state its epsilon: give one (delta=, --delta).")
    delta = min(deltas) if delta is None else delta
    require_small_delta(delta, max(run.mechanism.sampling.num_examples for run in runs))
    accountant = _common_accountant(runs)
    rows = max(run.mechanism.unit.max_examples_per_person for run in runs)
    epsilon = epsilon_of(runs, delta, accountant)
    return Spent(
        epsilon=epsilon,
        epsilon_per_person=epsilon if rows == 1 else epsilon_of(runs, delta, accountant, rows),
        delta=delta,
        accountant=accountant,
        relation=relation,
        protects=noun,
        max_examples_per_person=rows,
        steps=sum(run.steps for run in runs),
    )


def _common_accountant(runs: Sequence[RecordedRun]) -> str:
    names = {run.accountant for run in runs}
    if len(names) == 1:
        return names.pop()
    if names <= set(ACCOUNTANTS):
        return "rdp"
    raise ValueError(
        f"the runs were accounted for by {' and by '.join(sorted(names))}, which have no common bound: state the "
        "epsilon of each."
    )


def epsilon_of(runs: Sequence[RecordedRun], delta: float, accountant: str, rows: int = 1) -> float:
    """Return ε of all steps of all runs; infinite if one of them is not private, or has no bound for ``rows`` rows."""
    counted = [run for run in runs if run.steps]
    if any(run.not_private_because for run in counted):
        return math.inf
    if rows > 1 and any(run.mechanism.sampling.needs_every_draw for run in counted):
        return math.inf  # rows of one person have different turns
    if not counted:
        return 0.0
    relation = counted[0].mechanism.sampling.relation
    return event_epsilon(composed(counted), delta, accountant, relation=relation, rows=rows)


def composed(runs: Sequence[RecordedRun]) -> Any:
    """Return the event of all steps of all runs."""
    import dp_accounting

    return dp_accounting.ComposedDpEvent([run.event for run in runs])


def over_steps(
    runs: Sequence[RecordedRun], delta: float, accountant: str, points: int = 12
) -> list[tuple[int, float]]:
    """Return (steps, ε) after a few numbers of steps, from none to all, in the order of the ledger."""
    pieces = [
        (run, number, step, count)
        for run in runs
        for number, segment in enumerate(run.segments)
        for step, count in segment.items()
    ]
    total = sum(count for *_, count in pieces)
    at = sorted({min(1, total), *(round(total * k / points) for k in range(points + 1))})
    return [(steps, epsilon_of(_first(pieces, steps), delta, accountant)) for steps in at]


def _first(pieces: Iterable[tuple[RecordedRun, int, Any, int]], steps: int) -> list[RecordedRun]:
    """Return the runs as if they had stopped after ``steps`` steps in total."""
    taken: dict[int, tuple[RecordedRun, defaultdict[int, Counter]]] = {}
    for run, number, step, count in pieces:
        if now := min(count, steps):
            taken.setdefault(id(run), (run, defaultdict(Counter)))[1][number][step] += now
            steps -= now
    return [replace(run, segments=tuple(segments.values())) for run, segments in taken.values()]


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
