"""Accountants by name ("pld", "rdp" and those of users), and checks of the arguments of accounting."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ACCOUNTANTS = ("pld", "rdp")  # the accountants of this library


class Accountant(Protocol):
    """Computes upper bounds of ε. An instance may be given wherever "pld" and "rdp" are.

    Attributes:
        name: Its name in arguments, ledgers and reports.
    """

    name: str

    def epsilon(self, event: DpEvent, delta: float, relation: str) -> float:
        """Return ε of ``event`` at ``delta``, under the neighbouring ``relation`` (as ``Sampling.relation``).

        Raises:
            ValueError: there is no bound for this event under this relation.
        """
        ...


_KNOWN: dict[str, Accountant] = {}


def register_accountant(accountant: Accountant) -> str:
    """Make an accountant known by its name, also for mechanisms that no other accountant supports. Return the name.

    Raises:
        ValueError: it is not an accountant, or its name is taken by a different one.

    Example::

        >>> from dp_transformers import Mechanism, register_accountant
        >>> class ClosedForm:
        ...     name = "zcdp"
        ...
        ...     def epsilon(self, event, delta, relation):
        ...         raise ValueError(f"there is no bound for {event}")
        >>> register_accountant(ClosedForm())
        'zcdp'
    """
    name, epsilon = getattr(accountant, "name", None), getattr(accountant, "epsilon", None)
    if not (isinstance(name, str) and name and callable(epsilon)):
        raise ValueError(
            f"{accountant!r} is no accountant: it needs a name, and epsilon(event, delta, relation). Take one of "
            f"{sorted(_KNOWN)}, or write these two."
        )
    before = _KNOWN.setdefault(name, accountant)
    if type(before) is not type(accountant) or not _have_same_attributes(before, accountant):
        raise ValueError(
            f"an accountant named {name!r} is known already, {before!r}, and would compute in the place of yours: "
            "give yours another name, or give that one again."
        )
    return name


def _have_same_attributes(one: Accountant, other: Accountant) -> bool:
    try:
        return one is other or bool(getattr(one, "__dict__", None) == getattr(other, "__dict__", None))
    except ValueError:  # attributes are arrays, whose comparison has no truth value
        return False


_INSTEAD = {
    "prv": "'pld' computes what 'prv' does, more tightly. ",
    "gdp": "'gdp' approximates, and may lie below the true epsilon; 'pld' is a tight upper bound. ",
}


def check_accountant(accountant: str | Accountant) -> str:
    """Return the name of an accountant. An instance is registered first."""
    if not isinstance(accountant, str):
        return register_accountant(accountant)
    if accountant not in _KNOWN:
        raise ValueError(
            f"accountant must be one of {known_accountants()}, got {accountant!r}. {_INSTEAD.get(accountant, '')}"
            "One of your own is known after register_accountant(...), which every process must call that computes "
            "with it."
        )
    return accountant


def accountant_named(name: str) -> Accountant:
    return _KNOWN[check_accountant(name)]


def known_accountants() -> tuple[str, ...]:
    return tuple(_KNOWN)


# ---- arguments of accounting ----


def _check_number(name: str, value: Any, is_valid: Callable[[float], bool], rule: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not is_valid(number):
        raise ValueError(f"{name} must be {rule}; got {value!r}.")
    return number


def check_noise(value: float) -> float:
    rule = "a finite number >= 0 (noise standard deviation / clipping bound; get one from calibrate_noise_multiplier)"
    return _check_number("noise_multiplier", value, lambda x: 0 <= x < math.inf, rule)


def check_rate(value: float) -> float:
    rule = "a probability in [0, 1] (expected batch size / number of examples)"
    return _check_number("sample_rate", value, lambda x: 0 <= x <= 1, rule)


def check_delta(name: str, value: float) -> float:
    rule = "strictly between 0 and 1 (choose it well below 1 / number of examples)"
    return _check_number(name, value, lambda x: 0 < x < 1, rule)


def check_epsilon(name: str, value: float) -> float:
    rule = "a finite number > 0 (for a run without privacy, set noise_multiplier=0 instead)"
    return _check_number(name, value, lambda x: 0 < x < math.inf, rule)


def require_small_delta(delta: float, num_examples: int, *, name: str = "delta") -> None:
    """Raise ValueError unless 0 < δ < 1/N."""
    if not delta > 0:
        raise ValueError(f"{name} must be above 0, got {delta!r}; 1e-6 is common.")
    if delta >= 1 / num_examples:
        raise ValueError(
            f"{name}={delta:g} is not smaller than 1/N = {1 / num_examples:.3g} for N = {num_examples} training "
            "examples: at that delta, publishing one example outright would count as private. Choose it well below, "
            "for example 1e-6."
        )


def _check_index(name: str, value: int, least: int, meaning: str) -> int:
    try:
        index = operator.index(value)
    except TypeError:
        index = least - 1
    if index < least:
        raise ValueError(f"{name} must be an int >= {least} ({meaning}); got {value!r}.")
    return index


def check_rows(value: int) -> int:
    return _check_index("rows", value, 1, "how many rows one person may have, max_examples_per_person")


def check_count(name: str, value: int) -> int:
    return _check_index(name, value, 0, "a number of optimizer steps")
