"""The state that a loss keeps outside of the model: a threshold that follows its losses, a memory of outputs.

What one batch leaves there carries its examples to later ones, past clipping and noise, as a buffer of the model
would. Both loops call their losses through :class:`WatchedLoss`: the criterion of ``make_private``, and the
``per_example_loss_func`` of DPTrainer.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..clipping.conditions import Conditions
from ..clipping.errors import is_compiled
from ..clipping.model_state import ModelState
from ..clipping.places import CONTAINERS, INTERNAL, SCALARS, has_attributes, values_of

_LIBRARIES = ("torch", "transformers", "trl", "dp_transformers", "accelerate", "numpy", "functools", "builtins")
_PARTS, _ENTRIES = 256, 64  # objects that are looked at, and entries of a container whose functions are
_PLAIN = (*SCALARS, *CONTAINERS, torch.Tensor, type(None))
_Variable = tuple[Any, str]  # an object or a dict, and the name of its attribute or entry


class WatchedLoss:
    """Calls a loss, and compares what it keeps before and after. What held numbers, tensors or nothing is put back,
    all else is refused, as in the model (:class:`.ModelState`).

    It looks at objects and modules that the loss is, belongs to (a bound method) or closes over, at variables of
    closures and of modules that its functions name, and at the containers among these.

    Args:
        loss: A function, a method or an object that is called.
        model: The model that is trained, which is watched by itself.
        conditions: They are given what must be read from the device.
        name: What the loss is called in errors.

    Raises:
        ValueError: a batch of an earlier training left something in the loss that could not be put back.
    """

    def __init__(self, loss: Callable, model: nn.Module, conditions: Conditions, name: str = "loss"):
        self._loss = loss
        self._kept, self._variables = _Kept(model.modules()), dict[str, _Variable]()
        for path, part in _reached(loss, name, self._variables):
            self._kept.keep(path, part)
        self._read()
        is_sharded = any(hasattr(p, "placements") for p in self._kept.parameters())
        self._state = ModelState(self._kept, conditions, watch_parameters=not is_sharded)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._read()
        self._state.before_forward()
        try:
            return self._loss(*args, **kwargs)
        finally:
            self._read()
            self._state.expect_unchanged()
            self._write()
            self._state.end_draw()  # what is changed between two losses is the user's own doing

    def _read(self) -> None:
        for path, (owner, name) in self._variables.items():
            self._kept.variables[path] = _value(owner, name)

    def _write(self) -> None:
        for path, (owner, name) in self._variables.items():
            if self._kept.variables[path] is _value(owner, name):
                continue
            if isinstance(owner, dict):
                owner[name] = self._kept.variables[path]
            else:
                setattr(owner, name, self._kept.variables[path])


class _Kept(nn.Module):
    """Holds what a loss keeps. Modules of the trained model are not among its own, nor those that torch compiled or
    wrapped around it."""

    def __init__(self, of_the_model: Iterable[nn.Module]):
        super().__init__()
        self._left_out = frozenset(of_the_model)
        self.variables: dict[str, Any] = {}

    def keep(self, path: str, part: Any) -> None:
        if not isinstance(part, nn.Module):
            setattr(self, path, part)
            return
        self._left_out |= {m for m in part.modules() if is_compiled(m) or isinstance(m, DistributedDataParallel)}
        self.add_module(path.replace(".", "_"), part)

    # pyrefly: ignore[bad-override]  (torch leaves out what its generator yields)
    def named_modules(self, memo: set | None = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator:
        return super().named_modules({*self._left_out, *(memo or ())}, prefix, remove_duplicate)


def _reached(loss: Any, name: str, variables: dict[str, _Variable]) -> Iterator[tuple[str, Any]]:
    """The modules, objects and containers that a loss leads to, by a name each. Variables of its functions, which may
    come to stand for something else, are added to ``variables``."""
    seen: set[int] = set()
    todo = deque([(name, loss)])
    while todo and len(seen) < _PARTS:
        path, part = todo.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        named: dict[str, _Variable] = {}
        if isinstance(part, functools.partial):
            todo += ((path, x) for x in (part.func, *part.args, *part.keywords.values()))
        elif isinstance(part, types.MethodType):
            todo += ((path, part.__self__), (path, part.__func__))
        elif isinstance(part, types.FunctionType):
            if not _is_of_a_library(part):
                of_function = _variables_of(part)
                named = {key: (x, key if isinstance(x, dict) else "cell_contents") for key, x in of_function}
                named |= {key: (vars(part), key) for key in vars(part)}
                todo += ((path, x) for x in (*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values()))
        elif isinstance(part, (*CONTAINERS, tuple)):
            yield path, part
            todo += ((path, x) for x in itertools.islice(values_of(part), _ENTRIES))
        elif isinstance(part, nn.Module) or has_attributes(part):
            of_class = _of_class(type(part))
            todo += ((path, x) for x in of_class.values() if isinstance(x, types.FunctionType))
            inside = {key: (part, key) for key in vars(part) if key not in INTERNAL}
            if any(_is_of_a_library(cls) for cls in type(part).__mro__[:-1]) and not isinstance(part, nn.Module):
                named = {key: each for key, each in inside.items() if _is_kept_by_users(_value(*each))}
            else:
                yield path, part
                todo += ((f"{path}.{key}", x) for key, each in inside.items() if callable(x := _value(*each)))
            named = {key: (part, key) for key, x in of_class.items() if _is_kept_by_users(x)} | named
        elif isinstance(part, type):
            named = {key: (part, key) for key, x in _of_class(part).items() if _is_kept_by_users(x)}
        variables.update({f"{path}.{key}": each for key, each in named.items()})
        todo += ((f"{path}.{key}", _value(*each)) for key, each in named.items())


def _of_class(cls: type) -> dict[str, Any]:
    """The attributes and methods that are defined in classes which are of no library."""
    of_classes = [vars(each) for each in reversed(cls.__mro__) if not _is_of_a_library(each)]
    named = {key: x for attributes in of_classes for key, x in attributes.items()}
    return {key: x for key, x in named.items() if key == "__call__" or not key.startswith("__")}


def _is_kept_by_users(value: Any) -> bool:
    """Whether an attribute of an object of a library, as a trainer, may hold what a loss keeps."""
    return isinstance(value, _PLAIN) or (has_attributes(value) and not _is_of_a_library(type(value)))


def _value(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def _is_of_a_library(thing: Any) -> bool:
    return _package_of(thing) in _LIBRARIES


def _variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of its closure, each with its cell, and those of its module and of others that it names, with the
    dict of these. Functions of libraries have none."""
    if _has_no_rows(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield name, cell
    names, variables = set(_names_in(function.__code__)), function.__globals__
    for name in sorted(names & variables.keys()):
        yield name, variables
        if isinstance(module := variables[name], types.ModuleType) and not _has_no_rows(module):
            yield from ((each, vars(module)) for each in sorted(names & vars(module).keys()))


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function uses which are not its own, also those in its comprehensions and inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _has_no_rows(thing: Any) -> bool:
    """Whether a module, a class or a function keeps nothing of rows, and leads to nothing that does."""
    package = _package_of(thing)
    return package in _WITHOUT_ROWS or (isinstance(thing, types.ModuleType) and package in sys.stdlib_module_names)


_WITHOUT_ROWS = frozenset(
    [
        "abc",
        "builtins",
        "collections",
        "datasets",
        "functools",
        "numpy",
        "torch",
        "transformers",
        "typing",
        "typing_extensions",
    ]
)


def _package_of(thing: Any) -> str:
    """The first part of the name of a module, or of the module that a class or a function is defined in."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return name.partition(".")[0] if isinstance(name, str) else ""  # some types of Cython have a descriptor there
