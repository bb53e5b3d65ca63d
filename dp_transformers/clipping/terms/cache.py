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
            self._last[kind] = (weakref.ref(x.untyped_storage()), _identity(x), result)
        return result

    def known(self, kind: Hashable, x: torch.Tensor) -> Any:
        """The last result, if it came from ``x``; else None."""
        if kind not in self._last:
            return None
        storage, identity, result = self._last[kind]
        # while its memory was not freed it was not given to another, so an equal address means the same content
        return result if storage() is not None and identity == _identity(x) else None


def _identity(x: torch.Tensor) -> tuple:
    return x.data_ptr(), x.dtype, x.shape, x.stride()
