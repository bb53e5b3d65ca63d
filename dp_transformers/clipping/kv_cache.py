"""Caches of keys, values and states, which models of transformers fill by default, in training too.

Nothing reads them there. They take memory, and a module that fills one cannot be re-run, nor can any above it but the
model. So they are off while a batch is clipped, unless the call itself asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_SWITCHES = ("use_cache", "use_mems_eval", "use_mems_train")  # the last two are XLNet's


def configurations(model: nn.Module) -> list[Any]:
    """The configurations of the model and of its parts that say whether a cache is used."""
    found = {id(config): config for m in model.modules() if (config := vars(m).get("config")) is not None}
    return [config for config in found.values() if any(_is_on(config, name) is not None for name in _SWITCHES)]


def _is_on(config: Any, name: str) -> bool | None:
    """Whether a cache is on; None where there is no such switch."""
    value = getattr(config, name, None)
    return value if isinstance(value, bool) else None


@contextmanager
def without_caches(configs: Iterable[Any]) -> Iterator[None]:
    """Inside, the caches of these configurations are off."""
    used = [(config, name) for config in configs for name in _SWITCHES if _is_on(config, name)]
    try:
        for config, name in used:
            setattr(config, name, False)
        yield
    finally:
        for config, name in used:
            setattr(config, name, True)
