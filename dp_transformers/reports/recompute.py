"""What a ledger says was released, and the ε of it: computed without the model, the data or torch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..mechanism.accounting import ACCOUNTANTS, event_epsilon
from ..mechanism.accounting.arguments import require_small_delta
from ..mechanism.mechanism import Mechanism, PrivacyUnit, Steps
from ..step.checkpoint import PrivacyState
from ..step.ledger import Ledger


@dataclass(frozen=True)
class RecordedRun:
    """One run, as the ledger has it.

    Attributes:
        state: As of when it began or went on for the last time, with the most rows of one person that were ever said.
        segments: The parameters of its executed steps, in one counter for each noise source.
        unfinished: How many of these were drawn and shown to a loop, and not taken.
        facts: What its last beginning says besides the state: data, model, software. What else was shown, and other
            data, are those of all beginnings.
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
    """What several runs on the same data have spent together."""

    epsilon: float
    epsilon_per_person: float
    delta: float
    accountant: str
    relation: str
    max_examples_per_person: int
    steps: int


def recorded_runs(ledger: Ledger, unfinished: Mapping[str, int] | None = None) -> list[RecordedRun]:
    """Read all runs of a ledger, in order.

    Args:
        unfinished: Draws of each run that were shown to a loop and not stepped. They are in no line, and count.

    Raises:
        ValueError: a line that begins a run is missing or cannot be read, or they say different mechanisms of it.
    """
    return [_recorded(ledger, run_id, (unfinished or {}).get(run_id, 0)) for run_id in ledger.run_ids()]


def _recorded(ledger: Ledger, run_id: str, unfinished: int) -> RecordedRun:
    beginnings = ledger.beginnings(run_id)
    if not beginnings:
        raise ValueError(
            f"'{ledger.path}' has steps of run {run_id!r} and no line that says how it began, so what they spent is "
            "not known: a line was taken out. Restore the file from a backup."
        )
    try:
        states = [PrivacyState.from_dict({"run_id": run_id, **line}) for line in beginnings]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"'{ledger.path}' does not say how run {run_id!r} began ({type(error).__name__}: {error}): a line was "
            "changed. Restore the file from a backup."
        ) from error
    if any(_kept(state.mechanism) != _kept(states[0].mechanism) for state in states):
        raise ValueError(
            f"'{ledger.path}' says of run {run_id!r} that it went on with another mechanism, and lines of steps do "
            "not say all of theirs: a line or a checkpoint was changed. Restore the file from a backup."
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
        facts={**beginnings[-1], **_of_all(beginnings)},
    )


def _of_all(beginnings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run says of itself that does not end when it goes on without it: what else was shown, and data."""
    shown = [each for line in beginnings for each in line.get("also_released") or ()]
    facts: dict[str, Any] = {"also_released": [each for i, each in enumerate(shown) if each not in shown[:i]]}
    last = beginnings[-1].get("data")
    earlier = [line["data"] for line in beginnings if line.get("data") not in (None, last)]
    if last is not None and earlier:
        facts["data"] = {**last, "earlier": [each for i, each in enumerate(earlier) if each not in earlier[:i]]}
    return facts


def is_other_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the digests of two data show that they are not the same. Those of different keys show nothing."""
    both = one.get("digest") and other.get("digest") and one.get("key") == other.get("key")
    return bool(both) and one["digest"] != other["digest"]


def _kept(mechanism: Mechanism) -> Mechanism:
    """What of a mechanism stays when a run is resumed."""
    return replace(mechanism, steps=None, unit=PrivacyUnit())


def _with_unit(state: PrivacyState, unit: PrivacyUnit) -> PrivacyState:
    return replace(state, mechanism=replace(state.mechanism, unit=unit))


def _reasons(beginnings: Iterable[Mapping[str, Any]], mechanism: Mechanism) -> tuple[str, ...]:
    said = [why for line in beginnings for why in line.get("not_private_because", ())]
    silent = ["noise_multiplier=0: no noise is added"] if mechanism.is_silent else []
    return tuple(dict.fromkeys([*said, *silent]))


def spent(runs: Sequence[RecordedRun], delta: float | None = None) -> Spent:
    """Add up runs on the same data: their events are composed, which is tighter than adding their ε.

    Args:
        delta: The δ at which ε is stated; by default the smallest of the runs.

    Raises:
        ValueError: no run says a δ, it is not below 1/N, or the runs hide different things, so that there is no common
            ε.
    """
    relations = {run.mechanism.sampling.relation for run in runs}
    if len(relations) > 1:
        raise ValueError(
            f"the runs do not add up to one epsilon, since neighbours differ by {' and by '.join(sorted(relations))}: "
            "state the epsilon of each."
        )
    deltas = [run.state.delta for run in runs if run.state.delta is not None]
    if delta is None and not deltas:
        raise ValueError("no run says at which delta its epsilon is to be stated: give one (delta=, --delta).")
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
        relation=relations.pop(),
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
    """ε of all steps of all runs; infinite where one with steps is not private, or has no bound for so many rows."""
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
    """The event of all steps of all runs."""
    import dp_accounting

    return dp_accounting.ComposedDpEvent([run.event for run in runs])


def over_steps(
    runs: Sequence[RecordedRun], delta: float, accountant: str, points: int = 12
) -> list[tuple[int, float]]:
    """ε after a few numbers of steps, from none to all, in the order in which the ledger has them."""
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
    """The runs, as if they had been stopped after so many steps."""
    taken: dict[int, tuple[RecordedRun, defaultdict[int, Counter]]] = {}
    for run, number, step, count in pieces:
        if now := min(count, steps):
            taken.setdefault(id(run), (run, defaultdict(Counter)))[1][number][step] += now
            steps -= now
    return [replace(run, segments=tuple(segments.values())) for run, segments in taken.values()]
