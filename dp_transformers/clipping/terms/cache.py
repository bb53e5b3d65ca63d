"""Results that layers with a common input share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class LastResultCache:
    """The last result of each kind and which tensor it came from: layers that share their input (query, key, value)
    share work. The tensor itself is not kept."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[weakref.ref[torch.UntypedStorage], tuple, Any]] = {}

    def get(self, kind: Hashable, x: torch.Tensor, compute: Callable[[torch.Tensor], T]) -> T:
        result = self.known(kind, x)
        if result is None:
            result = compute(x)
            self._last[kind] = (weakref.ref(x.untyped_storage()), _place(x), result)
        return result

    def known(self, kind: Hashable, x: torch.Tensor) -> Any:
        """The last result, if it came from ``x``; else None."""
        if kind not in self._last:
            return None
        storage, place, result = self._last[kind]
        return result if storage() is x.untyped_storage() and place == _place(x) else None


def _place(x: torch.Tensor) -> tuple:
    """Where in its memory a tensor lies."""
    return x.storage_offset(), x.dtype, x.shape, x.stride()
