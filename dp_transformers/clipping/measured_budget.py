"""The budget of memory that follows from what a device has to spare: ``memory_budget="auto"``.

At first nothing is kept beyond what the mode keeps, and passes are looked at, from the second step on, when the
optimizer has its state. When most passes of some steps were no larger than those before, the most that the process
ever had in use is known. The budget is :data:`SHARE` of what the device has free then, and at most :data:`PART` of
what was in use.

From then on it is the same for all steps, and ranks agree on the least of theirs. A larger pass than those that were
looked at keeps what the mode keeps, since its own peak is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from .device_memory import DeviceMemory
from .memory import MemoryBudget
from .recorded_call import ForwardPass
from .trainable import TrainableParameters

SHARE, PART = 0.5, 0.25


@dataclass(frozen=True)
class _Size:
    """The numbers that the modules of each parameter returned, and how many examples they are of. Memory grows with
    them, and where positions look at each other with their square for each example."""

    returned: Mapping[nn.Parameter, int]
    examples: int

    def is_within(self, other: _Size) -> bool:
        for p, n in self.returned.items():
            most = other.returned.get(p, 0)
            if n > most or n * n * other.examples > most * most * self.examples:
                return False
        return True


@dataclass
class MeasuredBudget(MemoryBudget):
    """A budget that is nothing until :meth:`settle` says how many bytes it has."""

    limit: float = 0.0
    is_settled: bool = False
    _trainable: TrainableParameters = field(init=False)
    _seen: list[_Size] = field(default_factory=list)  # the largest passes, of which none is within another
    _balance: int = 0  # since the last offer: how many more passes were within those before than were not

    def refuse(self, mode: str, trainable: TrainableParameters) -> None:
        """As for any budget; also where nobody says how much memory the device has."""
        super().refuse(mode, trainable)
        self._trainable = trainable
        DeviceMemory.of(trainable.device)

    def limit_of(self, forward: ForwardPass) -> float:
        """Look at a pass that is about to go back; returns the bytes that it may keep."""
        size = _Size(dict(forward.returned), max(1, forward.batch_size))
        if any(size.is_within(seen) for seen in self._seen):
            self._balance += 1
            return self.limit
        if not self.is_settled:
            self._seen = [*(seen for seen in self._seen if not seen.is_within(size)), size]
            self._balance -= 1
        return 0.0

    def forget(self) -> None:
        """The passes until now had less in use beside them than later ones will have."""
        self._seen, self._balance = [], 0

    def offer(self) -> int:
        """The bytes that this process can spare, after a step; -1 as long as most passes are larger than before."""
        balance, self._balance = self._balance, 0
        if balance <= 0:
            return -1
        memory = DeviceMemory.of(self._trainable.device)
        return max(0, int(min(SHARE * memory.free, PART * memory.highest)))

    def settle(self, limit: float) -> None:
        """From now on passes within those that were looked at may keep so many bytes."""
        self.limit, self.is_settled = limit, True


def memory_budget_of(given: float | str | None) -> MemoryBudget | None:
    """The budget that a user means by this. Raises ValueError for what is neither bytes nor "auto"."""
    if given is None:
        return None
    return MeasuredBudget() if given == "auto" else MemoryBudget(cast(float, given))
