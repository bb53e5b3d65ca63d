"""In how large a table the ids of an input are looked up, which no name says where a model is not of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from ..engine import ClippingEngine
from .synthetic import LossFunction, evaluating, kept_buffers, on_packed, smallest_table, synthetic_inputs


class _Lookups(TorchFunctionMode):
    """Inside, integers are followed from the tensors of an input to the tables that they are looked up in.

    Attributes:
        sizes: Of the smallest table that each of these tensors was looked up in.
    """

    def __init__(self, given: Mapping[tuple, torch.Tensor]):
        super().__init__()
        self.sizes: dict[tuple, int] = {}
        self._sources: dict[int, set[tuple]] = {}  # by the memory that holds integers
        self._kept: list[torch.Tensor] = []  # so that no other tensor takes over their memory
        for path, x in given.items():
            self._note(x, {path})

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in (F.embedding, F.embedding_bag):
            self._look_up(*args[:2], **{name: kwargs[name] for name in ("input", "weight") if name in kwargs})
        elif sources := set().union(*map(self._sources_of, tree_leaves((args, kwargs)))):
            for x in tree_leaves([output, args[0] if func is torch.Tensor.__setitem__ else None]):
                self._note(x, sources)
        return output

    def _look_up(self, input: torch.Tensor, weight: torch.Tensor) -> None:
        for path in self._sources_of(input):
            self.sizes[path] = min(len(weight), self.sizes.get(path, len(weight)))

    def _sources_of(self, x: Any) -> set[tuple]:
        return self._sources.get(x.untyped_storage().data_ptr(), set()) if _holds_integers(x) else set()

    def _note(self, x: Any, sources: set[tuple]) -> None:
        if _holds_integers(x):
            self._kept.append(x)
            self._sources.setdefault(x.untyped_storage().data_ptr(), set()).update(sources)


def _holds_integers(x: Any) -> bool:
    is_tensor = isinstance(x, torch.Tensor) and x.numel() > 0
    return is_tensor and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def tables_of_ids(
    engine: ClippingEngine, loss_function: LossFunction | None, args: tuple, kwargs: dict
) -> Callable[[tuple], int]:
    """Returns a function from a path into (args, kwargs) to the size of the smallest table that the ids there are
    looked up in; of the smallest of all where that is not seen.

    The model runs once without a graph, on synthetic input, when the function is first asked, unless all tables have
    one size.
    """
    model = engine.model
    sizes = {m.num_embeddings for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}

    @cache
    def seen() -> dict[tuple, int]:
        if len(sizes) < 2:
            return {}
        given = synthetic_inputs(model, args, kwargs)
        lookups = _Lookups(dict(tree_flatten_with_path(given)[0]))
        try:
            with engine.suspended(), evaluating(model), kept_buffers(model), torch.no_grad(), lookups:
                on_packed(loss_function or model)(*given[0], **given[1])
        except Exception:  # which the check will raise again, or does not meet
            engine.trainable.shards.recover()
            return {}
        return lookups.sizes

    return lambda path: seen().get(path, smallest_table(model))
