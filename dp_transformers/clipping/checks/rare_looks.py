"""When it is looked at what costs more than it may in every pass."""

from __future__ import annotations

import random


class RareLooks:
    """Is due at the first passes, and then after about twice as many each time.

    Twice as many, or one more: where each draw has the same number of physical batches, powers of two would meet the
    same one in all of them. All ranks take the same turns.

    Attributes:
        number: How many passes there were.

    Example::

        >>> looks = RareLooks()
        >>> [i for i in range(40) if looks.is_due()]
        [0, 1, 2, 4, 9, 19, 38]
    """

    def __init__(self) -> None:
        self.number, self._next, self._one_more = 0, 0, random.Random(_SEED)

    def is_due(self) -> bool:
        """Count a pass, and return whether it is looked at."""
        number, self.number = self.number, self.number + 1
        if number != self._next:
            return False
        self._next = max(number + 1, 2 * number + (self._one_more.randint(0, 1) if number > 1 else 0))
        return True


_SEED = 6  # odd and even numbers, in the first ten
