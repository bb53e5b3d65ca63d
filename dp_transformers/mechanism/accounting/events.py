"""ε of events of `dp_accounting`, which describe the releases of a mechanism."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .accountants import (
    ACCOUNTANTS,
    Accountant,
    accountant_named,
    check_accountant,
    check_delta,
    check_rows,
    register_accountant,
)
from .gaussian import FLOAT_ROUNDING, ORDERS, GaussianStep, Phase, epsilon_of_phases, gaussian_event, loss_interval

if TYPE_CHECKING:
    from dp_accounting import DpEvent

MOVED_BY_ONE = ("add_or_remove_one", "replace_special")  # relations under which a sum moves by one gradient
_INTERVAL = 1e-4  # grid interval of privacy losses, for events of an unknown kind


def event_epsilon(
    event: DpEvent,
    delta: float,
    accountant: str | Accountant = "pld",
    *,
    relation: str = "add_or_remove_one",
    rows: int = 1,
) -> float:
    """Return an upper bound of ε of an event at `delta`, for neighbours by `relation`.

    Args:
        rows: Number of rows that are added or removed together. More than 1 needs Poisson-sampled Gaussian steps, and
            "pld" or "rdp" (`group_epsilon`).

    Raises:
        ValueError: The accountant has no bound for this event.
    """
    delta, rows, name = check_delta("delta", delta), check_rows(rows), check_accountant(accountant)
    if rows == 1:
        epsilon = float(accountant_named(name).epsilon(event, delta, relation))
        return math.inf if math.isnan(epsilon) else max(0.0, epsilon)
    return epsilon_of_phases(phases_of_groups(event, name, relation=relation, rows=rows), delta, name, rows=rows)


def phases_of_groups(event: DpEvent, accountant: str, *, relation: str, rows: int) -> list[Phase]:
    """Return the phases of an event for a bound on groups of `rows` rows.

    Raises:
        ValueError: There is no such bound.
    """
    phases = _phases(event) if relation == "add_or_remove_one" and accountant in ACCOUNTANTS else None
    if phases is None:
        raise ValueError(
            f"there is no bound for groups of {rows} rows (max_examples_per_person) and {type(event).__name__} for "
            f"neighbours by {relation!r} by accountant {accountant!r}. Take Poisson sampling ('add_or_remove_one') "
            "and accountant 'pld' or 'rdp', or leave max_examples_per_person at 1, which protects one row."
        )
    return phases


def phases_epsilon(phases: Iterable[Phase], delta: float, accountant: str = "pld", *, rows: int = 1) -> float:
    """Return ε of Poisson-sampled Gaussian steps, if `rows` examples are added or removed."""
    if accountant in ACCOUNTANTS:
        return epsilon_of_phases(phases, delta, accountant, rows=rows)
    import dp_accounting as dp

    steps: list[Any] = [dp.SelfComposedDpEvent(gaussian_event(sigma, q), n) for sigma, q, n in phases if n]
    return event_epsilon(dp.ComposedDpEvent(steps), delta, accountant, rows=rows) if steps else 0.0


def unsupported(event: DpEvent, accountant: str | Accountant, *, relation: str = "add_or_remove_one") -> str | None:
    """Return the reason why `accountant` has no bound for an event; None if it has one."""
    known = accountant_named(check_accountant(accountant))
    if isinstance(known, _OfThisLibrary):
        return None if known.supports(event, relation) else known.no_bound(event, relation)
    try:
        known.epsilon(event, 0.5, relation)
    except ValueError as error:
        return f"{error} So by accountant {known.name!r} nothing is known of what it spends."
    return None


class _OfThisLibrary:
    """An accountant of this library. :mod:`.gaussian` accounts for Poisson-sampled and full Gaussian steps, under
    relations that move a sum by one gradient; :mod:`.allocation` for random allocation; and `dp_accounting` for all
    other events."""

    def __init__(self, name: str):
        self.name = name

    def epsilon(self, event: DpEvent, delta: float, relation: str) -> float:
        phases = _phases(event) if relation in MOVED_BY_ONE else None
        if phases is not None:
            return epsilon_of_phases(phases, delta, self.name)
        if not event_accountant(self.name, relation).supports(event):
            raise ValueError(
                f"{self.no_bound(event, relation)} Choose another accountant, or an event that it bounds (Gaussian "
                "steps, Poisson-sampled or of all examples)."
            )
        parts = list(_parts(event, 1))
        usable = delta - FLOAT_ROUNDING * (10 + sum(count for _, count in parts))
        if usable < delta / 2:
            return math.inf
        counted = event_accountant(self.name, relation, interval=_interval(parts, delta))
        return counted.compose(event).get_epsilon(usable)

    def supports(self, event: DpEvent, relation: str) -> bool:
        if relation in MOVED_BY_ONE and _phases(event) is not None:
            return True
        return event_accountant(self.name, relation).supports(event)

    def no_bound(self, event: DpEvent, relation: str) -> str:
        return (
            f"accountant={self.name!r} has no bound on epsilon for {event} for neighbours by {relation!r}, so nothing "
            "is known of what it spends."
        )


for _name in ACCOUNTANTS:
    register_accountant(_OfThisLibrary(_name))


def event_accountant(accountant: str, relation: str, *, interval: float = _INTERVAL) -> Any:
    """Return the accountant of `dp_accounting` for "pld" or "rdp", with the grid interval of its privacy losses."""
    import dp_accounting

    known = [relation.name.lower() for relation in dp_accounting.NeighboringRelation]
    if relation not in known:
        raise ValueError(f"relation {relation!r} is unknown; let the relation of the sampling be one of {known}.")
    neighbours = dp_accounting.NeighboringRelation[relation.upper()]
    if accountant == "rdp":
        return dp_accounting.rdp.RdpAccountant(ORDERS, neighbours)
    from .allocation import PLDAccountant

    return PLDAccountant(neighbours, interval)


def _interval(parts: list[tuple[DpEvent, int]], delta: float) -> float:
    """Return the interval of the common grid of the losses of these events."""
    import dp_accounting as dp

    from .allocation import RandomAllocationDpEvent

    intervals, phases = [], []
    for event, count in parts:
        if isinstance(event, RandomAllocationDpEvent):
            intervals.append(event.interval)
        elif isinstance(event, dp.TruncatedSubsampledGaussianDpEvent):
            phases.append((event.noise_multiplier, event.sampling_probability, count))
        elif (step := _gaussian_step(event)) is not None:
            phases.append((*step, count))
        else:
            intervals.append(_INTERVAL)
    return min([*intervals, *([loss_interval(phases, delta)] if phases else [])], default=_INTERVAL)


def _phases(event: DpEvent) -> list[Phase] | None:
    """Return the phases of an event in order of first use, equal ones merged; None if it has any other part."""
    counts: Counter[GaussianStep] = Counter()
    for part, count in _parts(event, 1):
        step = _gaussian_step(part)
        if step is None:
            return None
        counts[step] += count
    return [(sigma, q, n) for (sigma, q), n in counts.items() if n]


def _gaussian_step(event: DpEvent) -> GaussianStep | None:
    import dp_accounting as dp

    if isinstance(event, dp.GaussianDpEvent):
        return event.noise_multiplier, 1.0
    if isinstance(event, dp.PoissonSampledDpEvent) and isinstance(event.event, dp.GaussianDpEvent):
        return event.event.noise_multiplier, event.sampling_probability
    return None


def _parts(event: DpEvent, count: int) -> Iterator[tuple[DpEvent, int]]:
    """Yield the parts of a composed event, and how often each occurs."""
    import dp_accounting as dp

    if isinstance(event, dp.ComposedDpEvent):
        for part in event.events:
            yield from _parts(part, count)
    elif isinstance(event, dp.SelfComposedDpEvent):
        yield from _parts(event.event, count * event.count)
    elif not isinstance(event, dp.NoOpDpEvent):
        yield event, count
