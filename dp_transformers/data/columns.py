"""Walks through the containers of a batch or an example: its tensors, numbers and words by their paths."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ..mechanism.values import equal_or_nan


def columns_of(x: Any) -> Mapping[Any, Any] | None:
    """Return the content of a container by name or position; None for anything else."""
    if isinstance(x, Mapping):
        return x
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    attributes = getattr(x, "__dict__", {})
    if dataclasses.is_dataclass(x) or any(isinstance(y, (torch.Tensor, np.ndarray)) for y in attributes.values()):
        return attributes  # of a class of the user's
    return None


def filled(container: Any, columns: dict[Any, Any]) -> Any:
    """Return a copy of a container with these columns."""
    if type(container) is dict:
        return columns
    if isinstance(container, (list, tuple)):
        kind = type(container)
        return kind(*columns.values()) if hasattr(kind, "_fields") else kind(columns.values())
    made: Any = copy.copy(container)
    if not isinstance(container, Mapping):
        made.__dict__.update(columns)
        return made
    for name, x in columns.items():
        made[name] = x
    return made


def inner(path: str, key: Any) -> str:
    """Return the path of the column ``key`` of a container at ``path``."""
    return f"{path}/{key}" if path else str(key)


def named(path: str) -> str:
    """Return the path in the form of error messages."""
    return f"'{path}'" if path else "the tensor"


def as_tensor(x: Any) -> torch.Tensor | None:
    """Return a tensor, or an array of numbers as one; None for anything else."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
        return torch.from_numpy(np.require(x, requirements="W"))
    return x if isinstance(x, torch.Tensor) else None


def leaves_of(batch: Any, path: str = "", *, with_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield everything in the containers of a batch or an example with its path; arrays as tensors."""
    x = as_tensor(batch)
    columns = None if x is not None or isinstance(batch, PackedSequence) else columns_of(batch)
    if columns is None or (with_lists and isinstance(batch, (list, tuple))):
        yield path, batch if x is None else x
    for key, held in (columns or {}).items():
        yield from leaves_of(held, inner(path, key), with_lists=with_lists)


def tensors_of(batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors and arrays of a batch with their paths."""
    return ((path, x) for path, x in leaves_of(batch) if isinstance(x, torch.Tensor))


def size_of(row: Any) -> int:
    """Return the number of numbers, characters and other entries of a row."""
    if isinstance(row, torch.Tensor):
        return row.numel()
    if isinstance(row, (str, bytes)):
        return len(row)
    if isinstance(row, (list, tuple)):
        return len(row) if row and type(row[0]) in (int, float) else sum(map(size_of, row))
    if isinstance(row, np.ndarray):
        return row.size
    columns = None if isinstance(row, (int, float)) else columns_of(row)
    return 1 if columns is None else sum(map(size_of, columns.values()))


def are_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if two tensors have the same shape and numbers; nan equals nan."""
    return x.shape == y.shape and bool(equal_or_nan(x, y).all())


def are_alike(x: Any, y: Any) -> bool:
    """Return True if two batches have the same tensors up to rounding."""
    ours, others = dict(tensors_of(x)), dict(tensors_of(y))
    return ours.keys() == others.keys() and all(
        a.shape == others[k].shape and torch.allclose(a.double(), others[k].double(), equal_nan=True)
        for k, a in ours.items()
        if a.layout is torch.strided and not a.is_complex()
    )
