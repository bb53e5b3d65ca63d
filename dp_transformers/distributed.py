"""Sums over ranks. Gradients are added once per logical step, never averaged."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

_BUCKET_NUMEL = 25 * 2**20
T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def sum_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    """Replace every tensor by its sum over all ranks, in place, in few flat messages."""
    if world_size() == 1:
        return
    bucket: list[torch.Tensor] = []
    for i, tensor in enumerate(tensors):
        bucket.append(tensor)
        following = tensors[i + 1] if i + 1 < len(tensors) else None
        full = sum(t.numel() for t in bucket) >= _BUCKET_NUMEL
        if following is None or full or following.dtype != tensor.dtype or following.device != tensor.device:
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            for t, summed in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                t.copy_(summed.view_as(t))
            bucket = []


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Replace every tensor by rank 0's, in place."""
    if world_size() == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


def shared_secret(dp_seed: int | None = None) -> int:
    """128 bits that every rank knows and nobody else: drawn by rank 0 from the operating system, broadcast once."""
    return on_rank_zero(lambda: secrets.randbits(128)) if dp_seed is None else dp_seed


def on_rank_zero(function: Callable[[], T]) -> T:
    """What `function` returns when rank 0 calls it, on every rank. What it raises there is raised on every rank."""
    box: list = [None, None]
    if rank() == 0:
        try:
            box[0] = function()
        except Exception as error:
            box[1] = error
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]
