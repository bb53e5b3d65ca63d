"""Conditions that only the device can tell about, gathered so that the program waits for it once."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Conditions:
    """What must hold before anything is released.

    A comparison of tensors is begun where it is due, and read later, with all others.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, Callable[[], None]]] = []

    def expect(self, holds: torch.Tensor, otherwise: Callable[[], None]) -> None:
        """Call ``otherwise``, which raises, in :meth:`require` if the number ``holds`` is 0."""
        self._pending.append((holds, otherwise))

    def require(self) -> None:
        """Look at what was expected since the last time, and raise the error of the first condition that does not
        hold."""
        pending, self._pending = self._pending, []
        if pending:
            device = pending[0][0].device
            held = torch.stack([holds.to(device, torch.bool) for holds, _ in pending]).tolist()
            for (_, otherwise), holds in zip(pending, held, strict=True):
                if not holds:
                    otherwise()
