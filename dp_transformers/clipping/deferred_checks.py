"""DeferredChecks that only the device can tell about, gathered so that the program waits for it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class _Expected(NamedTuple):
    holds: torch.Tensor
    otherwise: Callable[[], None]
    for_good: bool


class DeferredChecks:
    """Conditions that must hold before anything is released. One that does not hold refuses every release until the
    sums it is about are dropped: a loop that catches its error may not go on. One about the model refuses them for
    good.

    A comparison of tensors is begun where it is due, and read later, with all others.
    """

    def __init__(self) -> None:
        self._pending: list[_Expected] = []
        self._broken: Callable[[], None] | None = None  # raises the error of the first one that did not hold
        self._broken_for_good: Callable[[], None] | None = None
        self._is_told = False  # somebody was told of what is broken

    def expect(self, holds: torch.Tensor, otherwise: Callable[[], None], *, for_good: bool = False) -> None:
        """Call ``otherwise``, which raises, in :meth:`require` if the number ``holds`` is 0.

        Args:
            for_good: Call it whenever :meth:`require` is asked from then on.
        """
        self._pending.append(_Expected(holds, otherwise, for_good))

    def refuse_for_good(self, otherwise: Callable[[], None]) -> None:
        """Call ``otherwise``, which raises, whenever :meth:`require` is asked."""
        self._note(otherwise, for_good=True)

    def require(self) -> None:
        """Evaluate the pending checks. Raise the error of the first that failed since :meth:`begin`, or of one that
        failed for the rest of the training."""
        self.look()
        if self._broken is not None:
            self._is_told = True
            self._broken()

    def begin(self) -> None:
        """Begin anew, after what was summed was dropped. An error that nobody was told of is raised a last time."""
        self.look()
        untold = None if self._is_told else self._broken
        self._broken = self._broken_for_good
        self._is_told = self._broken is not None
        if untold is not None:
            untold()

    def look(self) -> None:
        """Look at what was expected since the last time. What did not hold is told later."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        device = pending[0].holds.device
        held = torch.stack([each.holds.to(device, torch.bool) for each in pending]).tolist()
        for each, holds in zip(pending, held, strict=True):
            if not holds:
                self._note(each.otherwise, for_good=each.for_good)

    def _note(self, otherwise: Callable[[], None], *, for_good: bool) -> None:
        self._broken = self._broken or otherwise
        if for_good:
            self._broken_for_good = self._broken_for_good or otherwise
