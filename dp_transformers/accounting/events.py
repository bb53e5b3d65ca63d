"""ε of the events of `dp_accounting`, in which a mechanism says what its steps release."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .arguments import check_accountant, check_delta, check_rows
from .gaussian import ORDERS, GaussianStep, Phase, epsilon_of_phases

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_MOVED_BY_ONE = ("add_or_remove_one", "replace_special")  # relations by which a sum moves by one gradient


def event_epsilon(
    event: DpEvent, delta: float, accountant: str = "pld", *, relation: str = "add_or_remove_one", rows: int = 1
) -> float:
    """ε of an event of `dp_accounting` at `delta`, for neighbours by `relation`, an upper bound.

    Poisson-sampled and full Gaussian steps are accounted for by :mod:`.gaussian`, where neighbours differ by adding or
    removing an example or by making it a null one, which moves a sum alike. All other events are accounted for by the
    accountant of `dp_accounting`.

    Args:
        rows: Size of the group that is added or removed; more than 1 for the former steps only (`group_epsilon`).

    Raises:
        ValueError: The accountant has no bound for this event.
    """
    delta, rows = check_delta("delta", delta), check_rows(rows)
    moves_by_one = relation == "add_or_remove_one" or (relation in _MOVED_BY_ONE and rows == 1)
    phases = _phases(event) if moves_by_one else None
    if phases is not None:
        return epsilon_of_phases(phases, delta, check_accountant(accountant), rows=rows)
    if rows > 1:
        raise ValueError(
            f"there is no bound for groups of {rows} rows (max_examples_per_person) and {type(event).__name__} for "
            f"neighbours by {relation!r}; only Poisson sampling by 'add_or_remove_one' has one. Take PoissonSampling, "
            "or leave max_examples_per_person at 1, which protects one row."
        )
    counted = _accountant_of_events(accountant, relation)
    if why := unsupported(event, accountant, relation=relation):
        raise ValueError(
            f"{why} Choose another accountant, or an event that it bounds (Gaussian steps, Poisson-sampled or of all "
            "examples)."
        )
    epsilon = float(counted.compose(event).get_epsilon(delta))
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon)


def unsupported(event: DpEvent, accountant: str, *, relation: str = "add_or_remove_one") -> str | None:
    """Why `accountant` has no bound for an event, if it has none."""
    if (relation in _MOVED_BY_ONE and _phases(event) is not None) or _accountant_of_events(
        accountant, relation
    ).supports(event):
        return None
    return (
        f"accountant={accountant!r} has no bound on epsilon for {event} for neighbours by {relation!r}, so nothing is "
        "known of what it spends."
    )


def _accountant_of_events(accountant: str, relation: str) -> Any:
    import dp_accounting

    known = [relation.name.lower() for relation in dp_accounting.NeighboringRelation]
    if relation not in known:
        raise ValueError(f"relation {relation!r} is unknown; let the relation of the sampling be one of {known}.")
    neighbours = dp_accounting.NeighboringRelation[relation.upper()]
    if check_accountant(accountant) == "pld":
        return dp_accounting.pld.PLDAccountant(neighbours)
    return dp_accounting.rdp.RdpAccountant(ORDERS, neighbours)


def _phases(event: DpEvent) -> list[Phase] | None:
    """The phases that an event is composed of, if those are all: equal ones are one, in order of first use."""
    counts: Counter[GaussianStep] = Counter()
    for part, count in _parts(event, 1):
        if part is None:
            return None
        counts[part] += count
    return [(sigma, q, n) for (sigma, q), n in counts.items() if n]


def _parts(event: DpEvent, count: int) -> Iterator[tuple[GaussianStep | None, int]]:
    import dp_accounting as dp

    if isinstance(event, dp.ComposedDpEvent):
        for part in event.events:
            yield from _parts(part, count)
    elif isinstance(event, dp.SelfComposedDpEvent):
        yield from _parts(event.event, count * event.count)
    elif isinstance(event, dp.GaussianDpEvent):
        yield (event.noise_multiplier, 1.0), count
    elif isinstance(event, dp.PoissonSampledDpEvent) and isinstance(event.event, dp.GaussianDpEvent):
        yield (event.event.noise_multiplier, event.sampling_probability), count
    elif not isinstance(event, dp.NoOpDpEvent):
        yield None, count
