"""DTensors and ordinary tensors, handled alike."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch


def is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of it."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``tensor``, what this process holds, laid out over processes as ``other`` is."""
    if not is_dtensor(other):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride())


def everywhere(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors without shards, gathered where they had any."""
    return [t.full_tensor() if is_dtensor(t) else t for t in tensors]
