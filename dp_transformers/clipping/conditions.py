"""Conditions that only the device can tell about, gathered so that the program waits for it once."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Conditions:
    """What must hold before anything is released. One that does not hold refuses every release until the sums it is
    about are dropped: a loop that catches its error may not go on.

    A comparison of tensors is begun where it is due, and read later, with all others.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, Callable[[], None]]] = []
        self._broken: Callable[[], None] | None = None  # raises the error that was raised first

    def expect(self, holds: torch.Tensor, otherwise: Callable[[], None]) -> None:
        """Call ``otherwise``, which raises, in :meth:`require` if the number ``holds`` is 0."""
        self._pending.append((holds, otherwise))

    def refuse(self, otherwise: Callable[[], None]) -> None:
        """Call ``otherwise``, which raises, now and whenever :meth:`require` is asked."""
        self._broken = self._broken or otherwise
        otherwise()

    def require(self) -> None:
        """Look at what was expected since the last time, and raise the error of the first condition that did not hold
        since :meth:`begin`."""
        pending, self._pending = self._pending, []
        if self._broken is None and pending:
            device = pending[0][0].device
            held = torch.stack([holds.to(device, torch.bool) for holds, _ in pending]).tolist()
            self._broken = next(
                (otherwise for (_, otherwise), holds in zip(pending, held, strict=True) if not holds), None
            )
        if self._broken is not None:
            self._broken()

    def begin(self) -> None:
        """Begin anew, after what was summed was dropped. An error that nobody was told of is raised a last time."""
        try:
            if self._broken is None:
                self.require()
        finally:
            self._pending, self._broken = [], None
