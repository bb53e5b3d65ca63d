"""Results that layers with a common input share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class LastResultCache:
    """The last result of each kind and the tensor it came from: layers that share their input (query, key, value)
    share work."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[torch.Tensor, Any]] = {}

    def get(self, kind: Hashable, x: torch.Tensor, compute: Callable[[torch.Tensor], T]) -> T:
        result = self.known(kind, x)
        if result is None:
            result = compute(x)
            self._last[kind] = (x, result)
        return result

    def known(self, kind: Hashable, x: torch.Tensor) -> Any:
        """The last result, if it came from ``x``; else None."""
        seen = self._last.get(kind)
        # holding the tensor keeps its memory from being given to another, so an equal address means the same content
        return seen[1] if seen is not None and _identity(seen[0]) == _identity(x) else None


def _identity(x: torch.Tensor) -> tuple:
    return x.data_ptr(), x.dtype, x.shape, x.stride()
