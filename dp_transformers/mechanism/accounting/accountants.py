"""What an accountant is, and which ones are known by their names: "pld", "rdp", and those of users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class Accountant(Protocol):
    """Computes upper bounds of ε. An instance may be given wherever "pld" and "rdp" are.

    Attributes:
        name: What arguments, ledgers and reports call it.
    """

    name: str

    def epsilon(self, event: DpEvent, delta: float, relation: str) -> float:
        """ε at ``delta`` of what was released, for neighbours by ``relation`` (as ``Sampling.relation``).

        Raises:
            ValueError: there is no bound for this event under this relation.
        """
        ...


_KNOWN: dict[str, Accountant] = {}


def register_accountant(accountant: Accountant) -> str:
    """Make an accountant known by its name, also to mechanisms that no other has a bound for; returns the name.

    Raises:
        ValueError: it is no accountant, or the name is taken by one of another class or with other attributes.

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
    if type(before) is not type(accountant) or not _same_attributes(before, accountant):
        raise ValueError(
            f"an accountant named {name!r} is known already, {before!r}, and would compute in the place of yours: "
            "give yours another name, or give that one again."
        )
    return name


def _same_attributes(one: Accountant, other: Accountant) -> bool:
    try:
        return one is other or bool(getattr(one, "__dict__", None) == getattr(other, "__dict__", None))
    except ValueError:  # arrays, of which nothing says whether they are equal
        return False


_INSTEAD = {
    "prv": "'pld' computes what 'prv' does, more tightly. ",
    "gdp": "'gdp' approximates, and may lie below the true epsilon; 'pld' is a tight upper bound. ",
}


def check_accountant(accountant: str | Accountant) -> str:
    """The name of an accountant, which is registered if it is one of a user's."""
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
