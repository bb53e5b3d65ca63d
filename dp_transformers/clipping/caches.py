"""Caches of keys, values and states, which models of transformers fill by default, in training too.

Nothing reads them there. They take memory, and a module that fills one cannot be re-run, nor can any above it but the
model. So they are off while a batch is clipped, unless the call itself asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def configurations(model: nn.Module) -> list[Any]:
    """The configurations of the model and of its parts that say whether a cache is used."""
    found = {id(config): config for m in model.modules() if (config := vars(m).get("config")) is not None}
    return [config for config in found.values() if isinstance(getattr(config, "use_cache", None), bool)]


@contextmanager
def without_caches(configs: Iterable[Any]) -> Iterator[None]:
    """Inside, ``use_cache`` is off in these configurations."""
    used = [config for config in configs if config.use_cache]
    try:
        for config in used:
            config.use_cache = False
        yield
    finally:
        for config in used:
            config.use_cache = True
