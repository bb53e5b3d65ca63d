"""Attributes, containers and hooks of a model are put back to what they were before a batch."""

from __future__ import annotations

import logging
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from .errors import warn_once
from .leftovers import MARK
from .places import SCALARS, Place, ids_of, is_ours

logger = logging.getLogger(__name__)


def settle_hooks(hooks: dict, before: dict) -> None:
    """Put back the hooks that are not a clipper's: those that came go, and those that went or were replaced return. A
    clipper's stand in front of them or behind them, as they do now."""
    others = {key: hook for key, hook in before.items() if not is_ours(hook)}
    now = {key: hook for key, hook in hooks.items() if not is_ours(hook)}
    if list(others) == list(now) and ids_of([others]) == ids_of([now]):
        return
    in_front = dict(takewhile(lambda item: is_ours(item[1]), hooks.items()))
    behind = {key: hook for key, hook in hooks.items() if is_ours(hook) and key not in in_front}
    hooks.clear()
    hooks.update(in_front | others | behind)


def settle_dict(place: Place, before: dict) -> list[str]:
    holder = place.holder
    changed: list[str] = []
    for key in [*before, *(key for key in holder if key not in before)]:
        old, new = before.get(key), holder.get(key)
        is_of_a_clipper = key == MARK or is_ours(type(old)) or is_ours(type(new))
        if is_of_a_clipper or old is new or _is_equal(old, new):
            continue
        if key not in before:
            del holder[key]
            continue
        holder[key] = old
        is_buffer = place.holds_buffers and old is not None and not _has_grown(old, new)
        if is_buffer or isinstance(old, (bool, str, bytes, nn.Module, nn.Parameter)):
            changed.append(place.name_of(key))
        elif isinstance(old, SCALARS):
            warn_once(
                logger,
                place.name_of(key),
                "'%s' of the model changes with every batch; it is put back to %r each time, so that no batch tells "
                "of others.",
                place.name_of(key),
                old,
            )
    return changed


def settle_list(place: Place, before: list) -> list[str]:
    holder, now = place.holder, list(place.holder)
    if isinstance(holder, tuple):
        return []
    if len(now) == len(before) and all(a is b or _is_equal(a, b) for a, b in zip(before, now, strict=True)):
        return []
    is_refused = (
        not isinstance(holder, set)
        and ids_of([now[: len(before)]]) != ids_of([before])
        and any(isinstance(x, SCALARS) for x in before)
    )
    if not is_refused:
        warn_once(
            logger,
            place.path,
            "'%s' grows or changes with every batch; it is put back each time, so that no batch tells of others. What "
            "you note there of losses or outputs is lost: evaluate on public data instead.",
            place.path,
        )
    holder.clear()
    holder.update(before) if isinstance(holder, set) else holder.extend(before)
    return [place.path] if is_refused else []


def _is_equal(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if torch._C._functorch.is_functorch_wrapped_tensor(new):  # left by a module that was re-run by vmap
            return False
        return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device and torch.equal(old, new)
    return isinstance(old, SCALARS) and type(old) is type(new) and old == new


def _has_grown(old: Any, new: Any) -> bool:
    """Returns True if a table became longer in one dimension, and its leading part is what it was."""
    if not (
        isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    ) or torch._C._functorch.is_functorch_wrapped_tensor(new):
        return False
    if old.dim() != new.dim() or old.dtype != new.dtype:
        return False
    longer = [d for d in range(old.dim()) if new.shape[d] != old.shape[d]]
    if len(longer) != 1 or new.shape[longer[0]] < old.shape[longer[0]] or old.device != new.device:
        return False
    return torch.equal(new.narrow(longer[0], 0, old.shape[longer[0]]), old)
