"""Collectives: sums, maxima and broadcasts over ranks. Gradients are added once per logical step, never averaged."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_BUCKET_NUMEL = 25 * 2**20
T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def place() -> tuple[int, int]:
    """Return this process's rank and the number of processes."""
    return rank(), world_size()


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


def max_over_ranks(number: int, device: torch.device) -> int:
    """Return the largest of all ranks' numbers on every rank."""
    if world_size() == 1:
        return number
    box = torch.tensor(number, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def min_over_ranks(number: int, device: torch.device) -> int:
    """Return the smallest of all ranks' numbers on every rank."""
    return -max_over_ranks(-number, device)


def wait_for_all() -> None:
    """Return when every rank has called this."""
    if world_size() > 1:
        dist.barrier()


def broadcast_first(value: Any) -> Any:
    """Broadcast the value of the lowest rank whose value is not None; there must be one."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=gathered(value is not None).index(True))
    return box[0]


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, in their order."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def require_same(settings: Mapping[str, Any]) -> None:
    """Raise ValueError on every rank unless all ranks have the same settings, up to rounding. The message names the
    setting that differs."""
    first, *rest = gathered(dict(settings))
    for number, other in enumerate(rest, start=1):
        for name in dict.fromkeys([*first, *other]):
            if not _is_same(value := first.get(name), other_value := other.get(name)):
                raise ValueError(
                    f"{name} is {value!r} on rank 0, and {other_value!r} on rank {number}. All processes release one "
                    "sum with one clipping bound, one noise and one epsilon, so give each the same settings and "
                    "number of examples. Compute settings that depend on data from all of it, or on rank 0 and "
                    "broadcast them."
                )


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b


def noise_entropy(
    parameter: torch.Tensor, dp_seed: int | None = None, *, layout: int = 0, replicas: dist.ProcessGroup | None = None
) -> list[int] | None:
    """Return entropy for the noise on this rank's shards of ``parameter``, and of all parameters with the same mesh
    and placements.

    Ranks that hold different shards get independent entropy from the operating system. Ranks that hold replicas of one
    shard (HSDP) get the same secret entropy.

    Args:
        layout: A different number for each mesh and placements in the model; needed only with a fixed ``dp_seed``.
        replicas: The tensor-parallel group, for a parameter that is not a DTensor and that the whole group holds.

    Returns:
        256 bits (or numbers made from ``dp_seed``); None if the parameter is not a DTensor and no group is given.
    """
    if not hasattr(parameter, "placements") and replicas is None:
        return None
    mesh: Any = getattr(parameter, "device_mesh", None)
    placements = getattr(parameter, "placements", ())
    box = [secrets.randbits(256)]
    for group in (replicas, *(mesh.get_group(dim) for dim, p in enumerate(placements) if p.is_replicate())):
        if group is not None:
            dist.broadcast_object_list(box, group=group, group_src=0)
    if dp_seed is None:
        return box
    return [
        dp_seed,
        layout,
        *(0 if p.is_replicate() else mesh.get_local_rank(dim) for dim, p in enumerate(placements)),
    ]


def shared_secret(dp_seed: int | None = None) -> int:
    """Return 128 secret bits, which rank 0 draws from the operating system and broadcasts."""
    return call_on_rank_zero(lambda: secrets.randbits(128)) if dp_seed is None else dp_seed


def require_on_all(require: Callable[[], None], device: torch.device, *, draw: int = 0) -> None:
    """Call ``require`` on every rank. Raise ValueError on all ranks if it raises one on any, or if the numbers of the
    ``draw`` differ."""
    if world_size() == 1:
        return require()
    text = None
    try:
        require()
    except ValueError as error:
        text = f"rank {rank()}: {error}"
    box = torch.tensor([int(text is not None), draw, -draw], dtype=torch.int32, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    is_refused, last, minus_first = box.tolist()
    if last != -minus_first:
        raise ValueError(
            f"one process is in draw {-minus_first} and another in draw {last}, so a release would mix two draws. One "
            "process alone dropped a draw (engine.drop_draw() after an error on one device). Go on from a checkpoint, "
            "and call drop_draw() on all processes for one draw, or on none."
        )
    if is_refused:
        raise ValueError(broadcast_first(text))


def made_on_all(make: Callable[[], T]) -> T:
    """Call ``make`` on every rank and return its result. If it raises on one rank, that rank raises the error and all
    others a ValueError with its text, instead of waiting."""
    try:
        made, error = [make()], None
    except Exception as raised:
        made, error = [], raised
    texts = gathered(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failed := [f"rank {other}: {text}" for other, text in enumerate(texts) if text is not None]:
        raise ValueError(failed[0])
    return made[0]


def call_on_rank_zero(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0, and return its result, or raise its exception, on every rank."""
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
