"""Functions that treat DTensors and ordinary tensors alike."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor | None) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor; an ordinary tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def as_dtensor_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with the local part ``tensor``, placed like ``other``; ``tensor`` itself if ``other`` is not a
    DTensor."""
    if not is_dtensor(other):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride()
    )


def full_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """All-gather DTensors. Ordinary tensors are not changed."""
    return [t.full_tensor() if is_dtensor(t) else t for t in tensors]
