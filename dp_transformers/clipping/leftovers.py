"""What a private batch left in a model. It is put back to what was there before. Where that is not known the model is
marked, and nobody clips it any more: nor a part of it, a copy, or what is built around it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

SMALL = 2**16  # numbers of a tensor up to which its content is kept; of larger ones a sum of its bits
MARK = "_left_by_a_private_batch"  # an attribute, so that copies and pickles of a marked module or tensor have it, too
Written = list[tuple[str, Any, Any]]  # names, tensors or arrays, and their content before; None where it is not known


def content_of(x: Any) -> Any:
    """A copy of what a tensor or an array holds, or a sum of the bits of a large one."""
    if isinstance(x, np.ndarray):
        return x.copy() if x.size <= SMALL else np.asarray(zlib.crc32(x.tobytes()))
    x = x.detach()
    if x.numel() <= SMALL or x.storage_offset() * x.element_size() % 8:
        return x.clone()
    in_bytes = x.reshape(-1).view(torch.uint8)
    whole = len(in_bytes) // 8 * 8
    return in_bytes[:whole].view(torch.int64).sum() + in_bytes[whole:].sum()


def put_back(model: nn.Module, written: Written) -> list[str]:
    """Let what was written hold what it held before, and return the names of what cannot. ``model`` is then marked."""
    lost = {name: x for name, x, content in written if not _is_put_back(x, content)}
    if lost:
        mark(model, list(lost), (x for x in lost.values() if isinstance(x, torch.Tensor)))
    return list(lost)


def mark(model: nn.Module, names: list[str], tensors: Iterable[torch.Tensor] = ()) -> None:
    """Let :func:`refuse_marked` refuse every module of ``model``, and every model that holds one of ``tensors``."""
    for holder in (*model.modules(), *tensors):
        vars(holder)[MARK] = ", ".join(f"'{name}'" for name in names[:3])


def refuse_marked(model: nn.Module) -> None:
    """Raise ValueError if a private batch left something in ``model`` that could not be put back."""
    for holder in chain(model.modules(), model.parameters(), model.buffers()):
        if (names := vars(holder).get(MARK)) is not None:
            raise ValueError(
                f"an earlier training was refused because a batch changed {names} of this model, or of one that it "
                "shares modules or tensors with, and what was there before is not known. The model may hold private "
                "data without noise. Make it anew, from its original weights or from a checkpoint that was written "
                "before, and release neither this model nor a copy of it."
            )


def _is_put_back(x: Any, content: Any) -> bool:
    if content is None:
        return False
    try:
        if content.shape == x.shape:
            with torch.no_grad():
                x[...] = content
            return True
    except (RuntimeError, ValueError):  # it cannot be written to: several of its numbers are one
        return False
    return bool((content_of(x) == content).all()) if content.ndim == 0 else False
