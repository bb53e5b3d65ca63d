"""Switches off the caches of keys, values and states, which models of transformers fill by default, even in training.

In training, nothing reads them. They take memory, and a module that fills one cannot be re-run, nor can the modules
above it. So they are off while a batch is clipped, unless the call itself asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_SWITCHES = ("use_cache", "use_mems_eval", "use_mems_train")  # the last two are XLNet's


def configurations(model: nn.Module) -> list[Any]:
    """Return the configurations of the model and of its parts that have a switch for a cache."""
    found = {id(config): config for m in model.modules() if (config := vars(m).get("config")) is not None}
    return [c for c in found.values() if any(isinstance(getattr(c, name, None), bool) for name in _SWITCHES)]


@contextmanager
def without_caches(configs: Iterable[Any]) -> Iterator[None]:
    """Switch the caches of these configurations off inside the context."""
    used = [(config, name) for config in configs for name in _SWITCHES if getattr(config, name, None) is True]
    try:
        for config, name in used:
            setattr(config, name, False)
        yield
    finally:
        for config, name in used:
            setattr(config, name, True)
