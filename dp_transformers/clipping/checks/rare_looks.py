"""When it is looked at what costs more than it may in every pass."""

from __future__ import annotations

import random


class RareLooks:
    """Is due at the first passes, and then after about twice as many each time.

    Twice as many, or one more: where each draw has the same number of physical batches, powers of two would meet the
    same one in all of them. All ranks take the same turns.

    Args:
        rate: How often it is due besides, by chance, so that what begins after some look is not unseen for long.
        often: How many passes at first are all looked at; then ever fewer, this many over twice their number, down to
            the rate.

    Attributes:
        number: How many passes there were.

    Example::

        >>> looks = RareLooks()
        >>> [i for i in range(40) if looks.is_due()]
        [0, 1, 2, 4, 9, 19, 38]
    """

    def __init__(self, rate: float = 0.0, often: int = 0) -> None:
        self.number, self._next, self._one_more = 0, 0, random.Random(_SEED)
        self._rate, self._often, self._chance = rate, often, random.Random(_SEED + 1)

    def is_due(self) -> bool:
        """Count a pass, and return whether it is looked at."""
        number, self.number = self.number, self.number + 1
        by_chance = number < self._often or self._chance.random() < max(self._rate, self._often / (2 * number + 2))
        if number != self._next:
            return by_chance
        self._next = max(number + 1, 2 * number + (self._one_more.randint(0, 1) if number > 1 else 0))
        return True


_SEED = 6  # odd and even numbers, in the first ten
