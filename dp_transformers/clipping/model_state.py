"""What passes over private batches leave in a model or in a loss is put back.

A counter, running statistics, a memory of features or a table that grows would carry the examples of one batch to the
next one, past clipping and noise. :class:`ModelState` keeps shallow copies of what the modules hold when a draw begins
(attributes, containers and configurations one level deep, hooks, the contents of small tensors) and puts them back
after every pass. What a user changes between two draws stays. Two changes cannot be undone, and are refused for the
rest of the training: one of a trained parameter, and one in the place of a large frozen tensor.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .deferred_checks import DeferredChecks
from .errors import HOW_TO_UNCOMPILE, is_compiled, named

logger = logging.getLogger(__name__)

SMALL = 2**16  # numbers of a tensor up to which its content is kept; of larger ones a sum of its bits
_CONTAINERS = (list, dict, set, deque)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers", "_modules", "_parameters", *_HOOKS}
_WITHOUT_STATE = frozenset(["builtins", "functools", "torch", "dp_transformers", "numpy"])  # packages of classes
_SCALARS = (bool, int, float, complex, str, bytes)
# no code writes to their frozen weights through ``.data``
_LAYERS = (nn.Linear, nn.LayerNorm, nn.modules.conv._ConvNd)
_NOTHING = object()
_UNSAID = ("training", "_flat_weights", "_flat_weight_refs")  # modes, and what recurrent layers of torch set anew


class Held:
    """Shallow copies of all that modules and objects hold, and of the containers and configurations among that.

    Args:
        roots: Modules, with all that they contain, and other objects, by the names that messages call them.
        parameters: Whether parameters are a part of it.
        hooks: Whether hooks are.

    Attributes:
        classes: The modules, with their classes.
        holders: The dicts of attributes, and the containers among these, with their paths and copies, by their ids.
    """

    def __init__(self, roots: Mapping[str, Any], *, parameters: bool = True, hooks: bool = True):
        self.classes: list[tuple[nn.Module, type]] = []
        self.holders: dict[int, tuple[str, Any, Any]] = {}
        ignored = _OF_TORCH.union(() if parameters else ("_parameters",), () if hooks else _HOOKS)
        for root, thing in roots.items():
            parts: list[tuple[str, Any]] = [("", thing)]
            if isinstance(thing, nn.Module):
                parts = list(thing.named_modules())
                self.classes += [(module, type(module)) for _, module in parts]
                if parameters:  # a quantised weight keeps its scales among its attributes
                    own = [(path, vars(part).get("_parameters", {}).items()) for path, part in parts]
                    each = ((_joined(path, name), p) for path, items in own for name, p in items if p is not None)
                    parts += [(path, p) for path, p in each if not p.requires_grad and vars(p)]
            for path, part in parts:
                path = _joined(root, path)
                self._add(path, vars(part), ())
                for name, x in vars(part).items():
                    if name not in ignored and (held := _held_by(x)) is not None:
                        self._add(_joined(path, name), held, held if held is x else ())
        all_held = [held for _, held, _ in self.holders.values()]
        self._views = [view for x in all_held for view in ((x.keys(), x.values()) if isinstance(x, dict) else (x,))]
        self._sizes, self._entries = self._now()

    def _add(self, path: str, held: Any, inner: Iterable[Any]) -> None:
        """Keep a copy of ``held``, and of the containers in ``inner``."""
        if id(held) not in self.holders:
            self.holders[id(held)] = path, held, dict(held) if isinstance(held, dict) else list(held)
            for x in inner.values() if isinstance(inner, dict) else inner:
                if isinstance(x, _CONTAINERS):
                    self._add(path, x, x)

    def _now(self) -> tuple[list[int], list[Any]]:
        return list(map(len, self._views)), list(chain.from_iterable(self._views))

    def is_same(self) -> bool:
        """Whether all of it holds the same objects."""
        sizes, entries = self._now()
        has_same_classes = all(type(module) is cls for module, cls in self.classes)
        return sizes == self._sizes and all(map(is_, entries, self._entries)) and has_same_classes

    def restore(self, stays: Callable[[Any, Any], bool]) -> dict[str, bool]:
        """Put back everything, but attributes and entries for which ``stays(name, what is held)`` is True. Return the
        paths of what is put back: False where there was nothing before, or an equal number."""
        changed: dict[str, bool] = {}
        if self.is_same():
            return changed
        for module, cls in self.classes:
            if type(module) is not cls:
                module.__class__ = cls
        for path, held, before in self.holders.values():
            if isinstance(held, dict):
                for key in [*before, *(key for key in held if key not in before)]:
                    old, new = before.get(key, _NOTHING), held.get(key, _NOTHING)
                    if old is new or _is_ours(old) or _is_ours(new) or stays(key, new):
                        continue
                    is_equal = type(old) is type(new) and isinstance(old, _SCALARS) and old == new
                    is_nothing = old is _NOTHING or old is None or key in _UNSAID
                    changed[_joined(path, key)] = not (is_equal or is_nothing)
                    if old is _NOTHING:
                        del held[key]
                    else:
                        held[key] = old
            elif len(held) != len(before) or not all(map(is_, held, before)):
                changed[path] = path.rpartition(".")[2] not in _UNSAID
                held.clear()
                held.update(before) if isinstance(held, set) else held.extend(before)
        return changed


class _KeptTensor(NamedTuple):
    """A tensor to which only a pass would write.

    Attributes:
        data: The tensor's memory, also after another one is assigned.
        content: A copy; None of a large tensor.
        may_hide: True if a write may show in no version: through ``.data``, or by NumPy.
    """

    name: str
    tensor: torch.Tensor
    data: torch.Tensor
    content: torch.Tensor | None
    may_hide: bool

    @property
    def is_in_place(self) -> bool:
        t, data = self.tensor, self.data
        return t.data_ptr() == data.data_ptr() and t.shape == data.shape and t.dtype == data.dtype


class Snapshot:
    """What modules and objects hold at one time, besides what is trained, and what their tensors hold.

    Args:
        roots, parameters: Those of :class:`Held`.
        sums: Sums of the bits of large tensors, with the versions that they are of. Missing ones are added.
    """

    def __init__(self, roots: Mapping[str, Any], parameters: bool, sums: WeakTensorKeyDictionary):
        self._held, self._sums = Held(roots, parameters=parameters), sums
        modules = [module for module, _ in self._held.classes]
        buffers = [id(vars(module).get("_buffers")) for module in modules]  # compiled modules have none
        self._buffers = [self._held.holders[each] for each in buffers if each in self._held.holders]
        self._tensors = list(
            self._found({id(module._parameters) for module in modules if isinstance(module, _LAYERS)})
        )
        self._note_versions()

    def _found(self, of_layers: set[int]) -> Iterator[_KeptTensor]:
        seen = set()
        for path, held, before in self._held.holders.values():
            for key, x in before.items() if isinstance(before, dict) else enumerate(before):
                if id(x) in seen or not _is_kept(x):
                    continue
                seen.add(id(x))
                t = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
                content = t.data.clone() if _is_small(t) else None
                yield _KeptTensor(_joined(path, key), t, t.data, content, id(held) not in of_layers)

    def _note_versions(self) -> None:
        self._versions = [_version_of(each.tensor) for each in self._tensors]
        for each, version in zip(self._tensors, self._versions, strict=True):
            if each.content is None and self._sums.get(each.tensor, (_NOTHING,))[0] != version:
                self._sums[each.tensor] = version, _sum_of_bits(each.tensor)

    def _copy(self, *, back: bool) -> None:
        """Copy what small tensors hold, or put it back, as far as it may have changed."""
        changed = [
            each
            for each, version in zip(self._tensors, self._versions, strict=True)
            if each.content is not None and (each.may_hide or _version_of(each.tensor) != version)
        ]
        held, kept = [each.data for each in changed], cast(list[torch.Tensor], [each.content for each in changed])
        if changed:
            torch._foreach_copy_(held, kept) if back else torch._foreach_copy_(kept, held)

    def is_same(self) -> bool:
        """Whether the modules hold the same objects, without a look at what tensors hold."""
        return self._held.is_same() and all(each.is_in_place for each in self._tensors)

    def refresh(self) -> None:
        """Keep what tensors hold now."""
        self._copy(back=False)
        self._note_versions()

    def restore_buffers(self) -> None:
        """Put back the buffers that were replaced, and what small tensors and arrays hold."""
        for _, held, before in self._buffers:
            held.update(before)
        self._copy(back=True)

    def restore(self, *, modes: bool = True) -> tuple[list[str], dict[str, torch.Tensor]]:
        """Put back everything but what large tensors hold.

        Args:
            modes: Put back the training mode of modules, too.

        Returns:
            The names of what was put back, as far as it held something before; and of every large tensor that was
            written to in its place, whether it holds what it held.
        """
        undone = self._held.restore(lambda name, x: name == "training" and not modes)
        changed = [path for path, is_said in undone.items() if is_said]
        for each in self._tensors:
            if not each.is_in_place:
                each.tensor.data = each.data
        self._copy(back=True)
        written: dict[str, torch.Tensor] = {}
        for i, each in enumerate(self._tensors):
            if (version := _version_of(each.tensor)) == self._versions[i]:
                continue
            self._versions[i] = version
            if each.content is None:
                bits = self._sums[each.tensor][1]
                written[each.name] = _sum_of_bits(each.tensor) == bits
                self._sums[each.tensor] = version, bits
            else:
                changed.append(each.name)
        return changed, written


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
        self._sums = WeakTensorKeyDictionary()
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
            self.restore()

    def end_draw(self) -> None:
        """The draw is released or dropped: what is changed from now on is the user's own doing."""
        self.end_pass()
        self._require_trained()
        self._is_in_draw, self._trained = False, []

    def restore(self) -> None:
        """Let the next pass begin with what the pass under way began with, but in the mode that modules are in."""
        if self._start is not None:
            self._restore(self._start, modes=False)

    def aside(self) -> AbstractContextManager[None]:
        """Inside, the model runs without being trained, in another mode, say. It may leave nothing behind. Does
        nothing while a batch is under way, at whose end it is all put back."""
        return nullcontext() if self.is_watching else self.during_check()

    @contextmanager
    def during_check(self, *, anew: bool = False) -> Iterator[None]:
        """A check runs the model. Inside, everything is what the pass under way began with, and so again before each
        pass that asks for it (:meth:`restore`); afterwards everything is what it was.

        Args:
            anew: Passes begin with what tensors hold now.
        """
        start, trained, is_checking, now = self._start, self._trained, self._is_checking, self._snapshot()
        if anew or not self.is_watching:
            self._start = now
        self._is_checking, self._trained = True, trained or self._versions_of_trained()
        self.restore()
        try:
            yield
        finally:
            self._restore(now)
            self._start, self._is_checking, self._trained = start, is_checking, trained
        if not self.is_watching:
            self._deferred_checks.require()

    def _snapshot(self) -> Snapshot:
        for path, module in self.parts[""].named_modules():
            if is_compiled(module):
                raise ValueError(f"{named(path, module)} is compiled by torch.compile, {HOW_TO_UNCOMPILE}")
        return Snapshot(self.parts, not self._sharded, self._sums)

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


def _held_by(x: Any) -> Any:
    """Return an attribute that is a container, or the attributes of an object like a configuration; None for
    others."""
    if isinstance(x, _CONTAINERS):
        return x
    if type(x).__module__.partition(".")[0] in _WITHOUT_STATE or isinstance(x, nn.Module | torch.Tensor):
        return None
    attributes = getattr(x, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _joined(*path: Any) -> str:
    return ".".join(str(part) for part in path if part not in ("", "_buffers", "_modules", "_parameters"))


def _is_kept(x: Any) -> bool:
    """Whether ``x`` is a tensor, or a small array of numbers, to which the optimizer does not write."""
    if isinstance(x, np.ndarray):
        return x.size <= SMALL and x.flags.writeable and x.flags.c_contiguous and x.dtype.kind in "biufc"
    is_trained = isinstance(x, nn.Parameter) and x.requires_grad
    is_plain = type(x) is torch.Tensor or (isinstance(x, nn.Parameter) and not hasattr(x, "placements"))
    return is_plain and not is_trained and x.layout == torch.strided and not x.is_meta


def _is_small(t: torch.Tensor) -> bool:
    """Whether the content of ``t`` is kept: it has few numbers, and each has a place of its own."""
    has_places = all(stride or size <= 1 for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.numel() <= SMALL and has_places and not t.is_inference()


def _version_of(t: torch.Tensor) -> int | None:
    """Autograd's count of the writes to ``t``; None where it keeps none, since it was made in inference mode."""
    return None if t.is_inference() else t._version


def _sum_of_bits(t: torch.Tensor) -> torch.Tensor:
    if hasattr(t, "__tensor_flatten__"):  # a weight that torchao quantised
        return torch.stack([_sum_of_bits(getattr(t, name)) for name in t.__tensor_flatten__()[0]]).sum()
    in_bytes = t.detach().reshape(-1).view(torch.uint8)
    whole = len(in_bytes) // 8 * 8 if t.storage_offset() * t.element_size() % 8 == 0 else 0
    return in_bytes[:whole].view(torch.int64).sum() + in_bytes[whole:].sum()


def _is_ours(x: Any) -> bool:
    """Whether ``x`` is a hook of a clipper, or an object of this package."""
    return str(getattr(getattr(x, "func", x), "__module__", "")).startswith("dp_transformers.")


def _refuse(name: str) -> None:
    """Raise ValueError for a tensor of which nobody knows what it held."""
    raise ValueError(
        f"'{name}' of the model was written to between a batch of the loader and the end of its draw, and not by "
        "optimizer.step(): the write may tell of the batch, without clipping and noise, and what was there before is "
        "not known. This training releases nothing more: make the model anew, from its original weights or from a "
        "checkpoint. Write to weights after optimizer.step() has ended a draw ('if engine.has_stepped:') or after "
        "engine.drop_draw(), and keep what forward writes in a buffer of at most 65536 numbers, which is put back."
    )
