"""Conditions that only the device can tell about, gathered so that the program waits for it once."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Conditions:
    """What must hold before anything is released. One that does not hold refuses every release until the sums it is
    about are dropped: a loop that catches its error may not go on. One about the model refuses them for good, since
    what the model holds then tells of private data whatever is summed.

    A comparison of tensors is begun where it is due, and read later, with all others.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, Callable[[], None], bool]] = []
        self._broken: Callable[[], None] | None = None  # raises the error that was raised first
        self._broken_for_good: Callable[[], None] | None = None

    def expect(self, holds: torch.Tensor, otherwise: Callable[[], None], *, for_good: bool = False) -> None:
        """Call ``otherwise``, which raises, in :meth:`require` if the number ``holds`` is 0."""
        self._pending.append((holds, otherwise, for_good))

    def refuse_for_good(self, otherwise: Callable[[], None]) -> None:
        """Call ``otherwise``, which raises, now and whenever :meth:`require` is asked."""
        self._note(otherwise, for_good=True)
        otherwise()

    def require(self) -> None:
        """Look at what was expected since the last time, and raise the error of the first condition that did not hold
        since :meth:`begin`, or of one that does not hold for good."""
        self._look()
        if self._broken is not None:
            self._broken()

    def begin(self) -> None:
        """Begin anew, after what was summed was dropped. An error that nobody was told of is raised a last time."""
        told = self._broken
        self._look()
        untold = self._broken if told is None else None
        self._broken = self._broken_for_good
        if untold is not None:
            untold()

    def _look(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            device = pending[0][0].device
            held = torch.stack([holds.to(device, torch.bool) for holds, *_ in pending]).tolist()
            for (_, otherwise, for_good), holds in zip(pending, held, strict=True):
                if not holds:
                    self._note(otherwise, for_good=for_good)

    def _note(self, otherwise: Callable[[], None], *, for_good: bool) -> None:
        self._broken = self._broken or otherwise
        if for_good:
            self._broken_for_good = self._broken_for_good or otherwise
