"""What data set and collator keep when a row is first used: numbers of classes or words that are given out on the fly,
a scaler that is fitted on the first rows, the largest number so far.

Once it is kept, a row is the same whenever it is loaded. But which rows came first has decided what it is.
:class:`Memory` can go back to what was kept before a draw, so that a row can be loaded as the first.
"""

from __future__ import annotations

import logging
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..mechanism.values import equal_or_nan
from .rows import GENERATORS, attributes_of, is_of_a_library, package_of, parts_of, variables_of

logger = logging.getLogger(__name__)

_CONTAINERS = (dict, list, set, deque)
# Packages that keep nothing of rows, or what threads and processes share, or this training itself
_WITHOUT = frozenset(
    [
        "accelerate",
        "asyncio",
        "concurrent",
        "dp_transformers",
        "logging",
        "multiprocessing",
        "pandas",
        "peft",
        "pyarrow",
        "queue",
        "threading",
        "tokenizers",
        "transformers",
        "trl",
    ]
)
# Objects that are looked into; entries of a container, and numbers of a tensor, beyond which it is taken for data or
# for a cache; and entries of a dict whose names are those of what it holds
_PARTS, _MANY, _NUMBERS, _FEW = 2**14, 2**20, 2**16, 2**12


class _Holder(NamedTuple):
    """Something that holds values.

    Attributes:
        name: What errors call it; of attributes of an object the part before their own names.
        read: Returns a copy of what it holds.
        write: Lets it hold that again.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


class Memory:
    """What ``owners`` keep at this moment: attributes of their objects, variables of their functions, containers and
    small tensors among these."""

    def __init__(self, owners: Any):
        self._holders = list(_holders(owners))
        self._before = self._contents()
        sizes = ((part, _size_of_closed(part)) for part in parts_of(owners, most=_PARTS))
        self._closed = [(part, size) for part, size in sizes if size is not None]

    def _contents(self) -> list[Any]:
        return [holder.read() for holder in self._holders]

    def _put(self, contents: Iterable[Any]) -> None:
        for holder, content in zip(self._holders, contents, strict=True):
            holder.write(content)

    def put_back(self) -> None:
        """Let them keep what they kept, and nothing else."""
        self._put(self._before)

    def as_first(self, make: Callable[[], Any]) -> list[Any]:
        """Return what ``make`` makes where they keep what they kept, and let them keep what they keep now. Nothing is
        returned where it raises: a file that was opened since cannot always be opened twice."""
        return self.made_with(self._before, make)

    def made_with(self, contents: Sequence[Any], make: Callable[[], Any]) -> list[Any]:
        """Do the same where they keep ``contents``."""
        now = self._contents()
        self._put(contents)
        try:
            return [make()]
        except Exception as error:
            logger.info("an example was not made as another of its draw: %s: %s", type(error).__name__, error)
            return []
        finally:
            self._put(now)

    def counted_further(self) -> list[Any]:
        """Return what they would keep if the whole numbers that are others now had counted a million further; nothing
        where there are none."""
        pairs = [*zip(self._contents(), self._before, strict=True)]
        counters = [_counters(now, before) for now, before in pairs]
        return [_further(now, keys) for (now, _), keys in zip(pairs, counters, strict=True)] if any(counters) else []

    def changed(self) -> list[str]:
        """Return the names of what is something else now."""
        changed = []
        for holder, now, before in zip(self._holders, self._contents(), self._before, strict=True):
            if holder.name.endswith("."):  # attributes, which have names of their own
                changed += [f"{holder.name}{key}" for key in {**before, **now} if now.get(key) is not before.get(key)]
            elif not _is_same(now, before):
                changed.append(holder.name)
        return changed

    def collected(self) -> list[str]:
        """Return the names of the numbers, but for whole ones, that are others now, as statistics of rows are; and of
        tokenizers and tables of pandas that grew."""
        names = [f"{type(part).__name__}, its size" for part, size in self._closed if _size_of_closed(part) != size]
        for holder, now, before in zip(self._holders, self._contents(), self._before, strict=True):
            has_names = holder.name.endswith(".") or (isinstance(now, dict) and [*now] == [holder.name])
            if isinstance(now, dict) and not has_names:
                continue  # a cache
            if has_names:
                path = holder.name if holder.name.endswith(".") else ""
                pairs = [(key, value, before.get(key)) for key, value in now.items()]
                # what was empty is data that are loaded late, or decides over rows from now on
                others = [(key, a, b) for key, a, b in pairs if a is not b and b is not None]
                names += [f"{path}{key}" for key, a, b in others if _are_numbers(a) and not _are_equal(a, b)]
            elif _are_numbers(now) and not _is_same(now, before):
                names.append(holder.name)
        return names


def _size_of_closed(part: Any) -> Any:
    """How large something is that is not looked into: the words of a tokenizer, the rows and columns of a table of
    pandas; None for anything else."""
    if hasattr(type(part), "get_added_vocab"):
        return len(part)
    if hasattr(type(part), "get_vocab_size"):
        return part.get_vocab_size()
    return getattr(part, "shape", None) if package_of(type(part)) == "pandas" else None


def _counters(now: Any, before: Any) -> list[Any]:
    """The keys of the whole numbers in a dict, or places in a list, that are others now."""
    if isinstance(now, (torch.Tensor, np.ndarray)) or len(now) != len(before):
        return []
    keys = now if isinstance(now, dict) else range(len(now))
    known = [key for key in keys if not isinstance(now, dict) or key in before]
    return [k for k in known if type(now[k]) is int and type(before[k]) is int and now[k] != before[k]]


def _further(now: Any, counters: Sequence[Any]) -> Any:
    """The same contents, with :data:`_FAR` added to what counts."""
    if not counters:
        return now
    later = now.copy()
    for key in counters:
        later[key] += _FAR
    return later


_FAR = 10**6  # beyond the end of a warm-up by the number of rows


def _are_numbers(x: Any) -> bool:
    return isinstance(x, float) or (
        x.is_floating_point() if isinstance(x, torch.Tensor) else isinstance(x, np.ndarray) and x.dtype.kind == "f"
    )


def _are_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (_is_same(a, b) if hasattr(a, "shape") else a == b)


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, (torch.Tensor, np.ndarray)):
        return now.shape == before.shape and now.dtype == before.dtype and bool(equal_or_nan(now, before).all())
    if isinstance(now, dict):
        return list(now) == list(before) and all(now[key] is value for key, value in before.items())
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _holders(owners: Any) -> Iterator[_Holder]:
    names: dict[int, str] = {}  # of containers and tensors, by who has them as an attribute or a variable
    for part in parts_of(owners, without=_WITHOUT, most=_PARTS):
        named: dict[str, Any] = {}
        if isinstance(part, GENERATORS):
            continue  # they are seeded anew
        if isinstance(part, types.FunctionType):
            for name, owner in variables_of(part):
                holder = _variable(name, owner)
                named |= holder.read()
                yield holder
            named |= vars(part)
            yield _container(f"{part.__name__}.", vars(part))
        elif isinstance(part, _CONTAINERS):
            if len(part) <= _MANY:
                yield _container(names.get(id(part), f"a {type(part).__name__}"), part)
            named = dict(part) if isinstance(part, dict) and len(part) <= _FEW else {}
        elif isinstance(part, type):
            if is_of_a_library(part):
                continue
            holder = _class(part)
            named = holder.read()
            yield holder
        for attributes in attributes_of(part) if not isinstance(part, (type, types.FunctionType)) else ():
            named |= attributes
            yield _container(f"{type(part).__name__}.", attributes)
        for name, value in list(named.items()):
            owner = part if isinstance(part, type) else type(part)
            path = name if isinstance(part, types.FunctionType) else f"{owner.__name__}.{name}"
            names.setdefault(id(value), path)
            if isinstance(value, (torch.Tensor, np.ndarray)) and (holder := _numbers(path, value)) is not None:
                yield holder


def _variable(name: str, owner: Any) -> _Holder:
    """A variable of a closure, which is a cell, or of a module, whose variables are a dict."""
    if isinstance(owner, dict):
        return _Holder(name, lambda: {name: owner[name]}, owner.update)
    return _Holder(name, lambda: {name: owner.cell_contents}, lambda kept: setattr(owner, "cell_contents", kept[name]))


def _class(cls: type) -> _Holder:
    """The attributes of a class, without its methods."""

    def read() -> dict[str, Any]:
        return {k: v for k, v in vars(cls).items() if not (k.startswith("__") or hasattr(v, "__get__"))}

    def write(content: dict[str, Any]) -> None:
        for name, value in read().items():
            if name not in content:
                delattr(cls, name)
            elif content[name] is not value:
                setattr(cls, name, content[name])

    return _Holder(f"{cls.__name__}.", read, write)


def _container(name: str, holder: Any) -> _Holder:
    def write(content: Any) -> None:
        if not _is_same(holder, content):
            holder.clear()
            (holder.extend if isinstance(holder, (list, deque)) else holder.update)(content)

    return _Holder(name, lambda: dict(holder) if isinstance(holder, dict) else list(holder), write)


def _numbers(name: str, x: Any) -> _Holder | None:
    """A small tensor or array that may be written to."""
    if isinstance(x, np.ndarray):
        if x.size > _NUMBERS or not x.flags.writeable or x.dtype.hasobject:
            return None
        return _Holder(name, x.copy, lambda content: x.__setitem__(..., content))
    if x.numel() > _NUMBERS or x.layout != torch.strided or x.requires_grad or x.is_meta:
        return None

    def write(content: torch.Tensor) -> None:
        if not _is_same(x, content):  # a tensor that is written to counts as changed, whatever is written
            x.copy_(content)

    return _Holder(name, x.clone, write)
