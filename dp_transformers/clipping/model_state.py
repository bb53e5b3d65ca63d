"""What passes over private batches leave in a model or in a loss is put back.

A counter, running statistics, a memory of features or a table that grows would carry the examples of one batch to the
next one, past clipping and noise. :class:`ModelState` keeps shallow copies of what the modules hold when a draw begins
(attributes, containers and configurations one level deep, hooks, the contents of small tensors) and puts them back
after every pass. What a user changes between two draws stays. Two changes cannot be undone, and are refused for the
rest of the training: one of a trained parameter, and one in the place of a large frozen tensor.
"""

from __future__ import annotations

import functools
import logging
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, takewhile
from operator import is_
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from .deferred_checks import DeferredChecks
from .errors import HOW_TO_UNCOMPILE, is_compiled, named

logger = logging.getLogger(__name__)

SMALL = 2**16  # numbers of a tensor up to which its content is kept; of larger ones a sum of its bits
_CONTAINERS = (list, dict, set, deque)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers", "_modules", "_parameters", *_HOOKS, *_HOOK_FLAGS}
_NOTHING = object()
_NO_STATE = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)


class _Holder(NamedTuple):
    """A dict of attributes or a container among them, with a shallow copy of it."""

    path: str
    name: str  # of the attribute that holds it; "" of the attributes of a module or an object
    held: Any
    before: Any


class Snapshot:
    """What modules and objects hold at one time, besides what is trained.

    Args:
        roots: Modules, with all that they contain, and other objects, by the names that messages call them.
        parameters: Whether frozen parameters are a part of it.
        sums: Sums of the bits of large tensors that are known, by their ids, with the version they are of.
    """

    def __init__(self, roots: Mapping[str, Any], parameters: bool, sums: dict[int, tuple]):
        self._modules: list[nn.Module] = []
        self._holders = list({id(each.held): each for each in self._found(roots, parameters)}.values())
        # flags change with the hooks that they are of
        compared = [each for each in self._holders if each.name not in _HOOK_FLAGS]
        self._dicts = [each.held for each in compared if isinstance(each.held, dict)]
        self._others = [each.held for each in compared if not isinstance(each.held, dict)]
        self._classes = list(map(type, self._modules))
        self._entries, self._sizes = self._entries_now(), self._sizes_now()
        tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        for path, name, _, before in self._holders:
            for key, x in before.items() if isinstance(before, dict) else enumerate(before):
                if isinstance(x, torch.Tensor) and _is_kept(x):
                    tensors.setdefault(id(x), (_joined(path, name, key), x))
                elif isinstance(x, np.ndarray) and x.size <= SMALL and x.flags.writeable and not x.dtype.hasobject:
                    self._arrays.append((x, x.copy()))
        self._names = [name for name, _ in tensors.values()]
        self._tensors = [t for _, t in tensors.values()]
        self._data = [t.data for t in self._tensors]  # through which a tensor is written without a new version
        self._small = [i for i, t in enumerate(self._tensors) if _is_small(t)]
        self._aliases = [self._data[i] for i in self._small]
        self._contents = [x.clone() for x in self._aliases]
        self._versions = list(map(_version_of, self._tensors))
        self.sums = self._sums_of_large(sums)

    def _found(self, roots: Mapping[str, Any], parameters: bool) -> Iterator[_Holder]:
        for root, thing in roots.items():
            parts = list(thing.named_modules()) if isinstance(thing, nn.Module) else [("", thing)]
            self._modules += [part for _, part in parts if isinstance(part, nn.Module)]
            if parameters and isinstance(thing, nn.Module):  # a quantised weight keeps its scales among its attributes
                parts += [(path, p) for path, p in thing.named_parameters() if not p.requires_grad and vars(p)]
            for path, part in parts:
                path = _joined(root, path)
                yield _Holder(path, "", vars(part), dict(vars(part)))
                for name, x in vars(part).items():
                    if name not in _OF_TORCH and (parameters or name != "_parameters"):
                        yield from _inside(path, name, x)

    def _sums_of_large(self, known: dict[int, tuple]) -> dict[int, tuple]:
        small, sums = set(self._small), {}
        for i, (t, version) in enumerate(zip(self._tensors, self._versions, strict=True)):
            if i not in small:
                found = known.get(id(t))
                is_known = found is not None and found[0] is t and found[1] == version
                sums[id(t)] = found if is_known else (t, version, _sum_of_bits(t))
        return sums

    def _entries_now(self) -> list[Any]:
        values = chain.from_iterable(map(dict.values, self._dicts))
        return [*chain.from_iterable(self._dicts), *values, *chain.from_iterable(self._others)]

    def _sizes_now(self) -> list[int]:
        return list(map(len, chain(self._dicts, self._others)))

    def is_same(self) -> bool:
        """Whether the modules hold the same objects, without a look at what tensors hold."""
        return (
            self._sizes_now() == self._sizes
            and all(map(is_, self._entries_now(), self._entries))
            and list(map(type, self._modules)) == self._classes
            and all(map(_have_same_memory, self._tensors, self._data))
        )

    def refresh(self) -> None:
        """Keep what tensors hold now."""
        if self._aliases:
            torch._foreach_copy_(self._contents, self._aliases)
        self._arrays = [(x, x.copy()) for x, _ in self._arrays]
        self._versions = list(map(_version_of, self._tensors))
        self.sums = self._sums_of_large(self.sums)

    def restore_buffers(self) -> None:
        """Put back the buffers that were replaced, and what small tensors and arrays hold."""
        for _, name, held, before in self._holders:
            if name == "_buffers":
                held.update(before)
        self.restore_contents()

    def restore_contents(self) -> None:
        if self._aliases:
            torch._foreach_copy_(self._aliases, self._contents)
        for x, content in self._arrays:
            x[...] = content

    def restore(self, *, modes: bool = True) -> tuple[list[str], dict[str, torch.Tensor]]:
        """Put back everything but what large tensors hold.

        Args:
            modes: Put back the training mode of modules, too.

        Returns:
            The names of what was put back, as far as it held something before; and of every large tensor that was
            written to in its place, whether it holds what it held.
        """
        changed = [] if self.is_same() else self._restore_entries(modes)
        for t, data in zip(self._tensors, self._data, strict=True):
            if not _have_same_memory(t, data):
                t.data = data
        self.restore_contents()
        versions, small, written = list(map(_version_of, self._tensors)), set(self._small), {}
        if versions != self._versions:
            for i, (now, before) in enumerate(zip(versions, self._versions, strict=True)):
                if now != before and i in small:
                    changed.append(self._names[i])
                elif now != before:
                    t, _, content = self.sums[id(self._tensors[i])]
                    written[self._names[i]] = _sum_of_bits(t) == content
                    self.sums[id(t)] = (t, now, content)
            self._versions = versions
        return changed, written

    def _restore_entries(self, modes: bool) -> list[str]:
        changed: list[str] = []
        hooks: set[int] = set()
        for module, cls in zip(self._modules, self._classes, strict=True):
            if type(module) is not cls:
                module.__class__ = cls
        for path, name, held, before in self._holders:
            if name in _HOOKS:
                _restore_hooks(held, before)
                hooks |= held.keys()
            elif name in _HOOK_FLAGS:  # these come after the hooks that they are of
                flags = before | held
                held.clear()
                held.update((key, flag) for key, flag in flags.items() if key in hooks)
            elif isinstance(held, dict):
                changed += [_joined(path, name, key) for key in _restore_dict(held, before, modes)]
            elif len(held) != len(before) or not all(map(is_, held, before)):
                changed.append(_joined(path, name))
                held.clear()
                held.update(before) if isinstance(held, set) else held.extend(before)
        return changed


class ModelState:
    """Puts back what the passes over private batches leave in a model, and in losses.

    Args:
        parts: The model, which is called "", and the modules and objects that compute losses, by name.
        deferred_checks: They are told what cannot be put back.
        sharded: The trained parameters by name, where FSDP2 puts others in their place in the forward pass.
    """

    def __init__(
        self, parts: dict[str, Any], deferred_checks: DeferredChecks, sharded: Mapping[str, nn.Parameter] | None = None
    ):
        self.parts, self._deferred_checks, self._sharded = parts, deferred_checks, sharded or {}
        self._start: Snapshot | None = None  # what every pass of the draw begins with
        self._trained: list[tuple[str, nn.Parameter, int | None]] = []  # with the versions they had at its beginning
        self._is_in_draw = self._is_under_way = self._is_checking = self._has_said = False

    @property
    def is_watching(self) -> bool:
        """Whether a batch, or a check, is under way."""
        return self._is_under_way or self._is_checking

    def begin_draw(self) -> None:
        """The loop is given the examples of a draw. What it writes to tensors from now on may tell of them, and from
        the first forward pass on, whatever it changes."""
        self.end_pass()
        self._is_in_draw = False
        if self._start is not None and self._start.is_same():
            self._start.refresh()
        else:
            self._start = self._snapshot()
        self._trained = self._versions_of_trained()

    def before_forward(self) -> None:
        """Let a pass begin with what the first one of its draw began with. Does nothing while a batch is under
        way."""
        if self.is_watching:
            return
        if self._start is None or not self._trained:
            self.begin_draw()
        start = cast(Snapshot, self._start)
        if self._is_in_draw:
            self._restore(start)
        else:
            start.restore_buffers()
            if not start.is_same():  # modes and attributes that were set until now
                self._start = self._snapshot()
        self._is_in_draw = self._is_under_way = True

    def end_pass(self) -> None:
        """Put back what the batch that is under way has left."""
        if self._is_under_way and not self._is_checking:
            self._is_under_way = False
            self._restore(cast(Snapshot, self._start), modes=False)

    def end_draw(self) -> None:
        """The draw is released or dropped: what is changed from now on is the user's own doing."""
        self.end_pass()
        self._require_trained()
        self._is_in_draw, self._trained = False, []

    def restore(self) -> None:
        """Let the next pass of a check begin with what the pass under way began with."""
        if self._start is not None:
            self._restore(self._start, modes=False)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, everything is what the pass under way began with; afterwards what it is now."""
        now = self._snapshot()
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def aside(self) -> AbstractContextManager[None]:
        """Inside, the model runs without being trained, in another mode, say. It may leave nothing behind. Does
        nothing while a batch is under way, at whose end it is all put back."""
        return nullcontext() if self.is_watching else self.during_check()

    @contextmanager
    def during_check(self, *, anew: bool = False) -> Iterator[None]:
        """A check runs the model. What it leaves there is put back at the end, and, where it asks for it
        (:meth:`restore`), before each of its passes.

        Args:
            anew: Passes begin with what tensors hold now.
        """
        start, trained, is_checking, now = self._start, self._trained, self._is_checking, self._snapshot()
        if anew or not self.is_watching:
            self._start = now
        self._is_checking, self._trained = True, trained or self._versions_of_trained()
        try:
            yield
        finally:
            self._restore(now)
            self._start, self._is_checking, self._trained = start, is_checking, trained
        self._deferred_checks.require()

    def _snapshot(self) -> Snapshot:
        for path, module in self.parts[""].named_modules():
            if is_compiled(module):
                raise ValueError(f"{named(path, module)} is compiled by torch.compile, {HOW_TO_UNCOMPILE}")
        return Snapshot(self.parts, not self._sharded, {} if self._start is None else self._start.sums)

    def _restore(self, snapshot: Snapshot, *, modes: bool = True) -> None:
        changed, written = snapshot.restore(modes=modes)
        for name, holds_the_same in written.items():
            self._deferred_checks.expect(holds_the_same, partial(_refuse, name), for_good=True)
        self._require_trained()
        if changed and not self._has_said:
            self._has_said = True
            logger.warning(
                "'%s' of the model (and maybe more) changes in forward or backward passes over private batches. It is "
                "put back after each of them, so that no batch tells of another. To keep such a value, compute it on "
                "public data between optimizer.step() and the next batch of the loader: what changes there stays.",
                changed[0],
            )

    def _versions_of_trained(self) -> list[tuple[str, nn.Parameter, int | None]]:
        named_parameters = self._sharded.items() or self.parts[""].named_parameters()
        return [(name, p, _version_of(p)) for name, p in named_parameters if p.requires_grad]

    def _require_trained(self) -> None:
        for name, p, version in self._trained:
            if _version_of(p) != version:
                self._deferred_checks.refuse_for_good(partial(_refuse, name))


def _inside(path: str, name: str, x: Any) -> Iterator[_Holder]:
    """What an attribute holds, if that is a container, or an object like a configuration."""
    if isinstance(x, dict):
        yield _Holder(path, name, x, dict(x))
    elif isinstance(x, _CONTAINERS):
        yield _Holder(path, name, x, list(x))
    elif (
        type(x).__module__.partition(".")[0] not in _WITHOUT_STATE
        and not isinstance(x, _NO_STATE)
        and isinstance(attributes := getattr(x, "__dict__", None), dict)
    ):
        yield _Holder(_joined(path, name), "", attributes, dict(attributes))


def _joined(*path: Any) -> str:
    return ".".join(str(part) for part in path if part not in ("", "_buffers", "_modules", "_parameters"))


def _is_kept(t: torch.Tensor) -> bool:
    """Whether nothing but a pass writes to ``t``: the optimizer writes to what is trained."""
    if isinstance(t, nn.Parameter):
        return not t.requires_grad and t.layout == torch.strided and not t.is_meta and not hasattr(t, "placements")
    return type(t) is torch.Tensor and t.layout == torch.strided and not t.is_meta


def _is_small(t: torch.Tensor) -> bool:
    """Whether the content of ``t`` is kept: it has few numbers, and each has a place of its own."""
    has_places = all(stride or size <= 1 for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.numel() <= SMALL and has_places and not t.is_inference()


def _version_of(t: torch.Tensor) -> int | None:
    """Autograd's count of the writes to ``t``; None where it keeps none, since it was made in inference mode."""
    return None if t.is_inference() else t._version


def _have_same_memory(t: torch.Tensor, data: torch.Tensor) -> bool:
    return t.data_ptr() == data.data_ptr() and t.shape == data.shape and t.dtype == data.dtype


def _sum_of_bits(t: torch.Tensor) -> torch.Tensor:
    in_bytes = t.detach().reshape(-1).view(torch.uint8)
    whole = len(in_bytes) // 8 * 8 if t.storage_offset() * t.element_size() % 8 == 0 else 0
    return in_bytes[:whole].view(torch.int64).sum() + in_bytes[whole:].sum()


def _is_ours(x: Any) -> bool:
    function = x.func if isinstance(x, functools.partial) else x
    return getattr(function, "__module__", "").startswith("dp_transformers.")


def _restore_dict(held: dict, before: dict, modes: bool) -> Iterator[Any]:
    """Put back every entry, and yield the keys of those that held something else than they do now."""
    for key in [*before, *(key for key in held if key not in before)]:
        old, new = before.get(key, _NOTHING), held.get(key, _NOTHING)
        if old is new or _is_ours(type(old)) or _is_ours(type(new)) or (key == "training" and not modes):
            continue
        if old is _NOTHING:
            del held[key]
            continue
        held[key] = old
        is_equal = type(old) is type(new) and isinstance(old, _SCALARS) and old == new
        if old is not None and key != "training" and not is_equal:
            yield key


def _restore_hooks(hooks: dict, before: dict) -> None:
    """Put back the hooks that are not a clipper's. A clipper's stand in front of them or behind them, as they do
    now."""
    others = {key: hook for key, hook in before.items() if not _is_ours(hook)}
    now = {key: hook for key, hook in hooks.items() if not _is_ours(hook)}
    if list(others) == list(now) and all(map(is_, others.values(), now.values())):
        return
    in_front = dict(takewhile(lambda item: _is_ours(item[1]), hooks.items()))
    behind = {key: hook for key, hook in hooks.items() if _is_ours(hook) and key not in in_front}
    hooks.clear()
    hooks.update(in_front | others | behind)


def _refuse(name: str) -> None:
    """Raise ValueError for a tensor of which nobody knows what it held."""
    raise ValueError(
        f"'{name}' of the model was written to between a batch of the loader and the end of its draw, and not by "
        "optimizer.step(): the write may tell of the batch, without clipping and noise, and what was there before is "
        "not known. This training releases nothing more: make the model anew, from its original weights or from a "
        "checkpoint. Write to weights after optimizer.step() has ended a draw ('if engine.has_stepped:') or after "
        "engine.drop_draw(), and keep what forward writes in a buffer of at most 65536 numbers, which is put back."
    )


_SCALARS = (bool, int, float, complex, str, bytes)
_WITHOUT_STATE = frozenset(["builtins", "torch", "dp_transformers", "numpy"])
