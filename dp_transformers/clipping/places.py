"""The places of a model outside of its weights: attributes of its modules, and what these hold."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

SCALARS = (bool, int, float, complex, str, bytes)
_DEPTH = 4  # of containers and objects in attributes
CONTAINERS = (list, dict, set, deque)
INTERNAL = frozenset(vars(nn.Module())) - {"training"}
WIDTH = 4096  # entries of a container that are looked into
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


class Place(NamedTuple):
    """A dict of attributes, or a container among them; and the object, other than a module, whose they are."""

    path: str
    holder: Any
    holds_buffers: bool = False
    of: Any = None

    def name_of(self, key: Any) -> str:
        return f"{self.path}.{key}".lstrip(".")


def places_in(model: nn.Module, parameters: bool) -> Iterator[Place]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        yield Place(path, vars(module)["_buffers"], holds_buffers=True)
        yield Place(path, vars(module)["_modules"])
        if parameters:
            yield Place(path, vars(module)["_parameters"])
        yield from _attributes(path, vars(module), seen, _DEPTH)


def _attributes(path: str, holder: Any, seen: set[int], depth: int, of: Any = None) -> Iterator[Place]:
    """``holder`` and what it holds: a dict of attributes, or a container."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    yield Place(path, holder, of=of)
    for key, value in list(entries_of(holder))[:WIDTH] if depth else ():
        inside = value if isinstance(value, (*CONTAINERS, tuple)) else vars(value) if has_attributes(value) else None
        if inside is not None and key not in INTERNAL:
            # objects that hold objects lead anywhere, to a trainer's own counters at last
            costs = 1 if inside is value else 2
            if depth >= costs:
                whose = of if inside is value else value
                yield from _attributes(f"{path}.{key}".lstrip("."), inside, seen, depth - costs, whose)


def has_attributes(value: Any) -> bool:
    """Returns True for an object like a configuration, whose attributes a forward pass might set."""
    if isinstance(
        value,
        (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial),
    ):
        return False
    return type(value).__module__.partition(".")[0] not in ("builtins", "torch", "dp_transformers") and isinstance(
        getattr(value, "__dict__", None), dict
    )


def values_of(holder: Any) -> Iterable[Any]:
    return holder.values() if isinstance(holder, dict) else holder


def entries_of(holder: Any) -> Iterable[tuple[Any, Any]]:
    return holder.items() if isinstance(holder, dict) else enumerate(holder)


def ids_of(holders: Iterable[Any]) -> list[int]:
    return list(map(id, chain.from_iterable(map(values_of, holders))))


def ids_and_lengths_of(holders: Sequence[Any]) -> list[int]:
    return [*ids_of(holders), *map(len, holders)]


def is_ours(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return getattr(function, "__module__", "").startswith("dp_transformers.")
