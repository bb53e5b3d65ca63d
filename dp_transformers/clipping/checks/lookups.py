"""In how large a table the ids of an input are looked up, which no name says where a model is not of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from ..engine import ClippingEngine
from .synthetic import LossFunction, evaluating, kept_buffers, on_packed, synthetic_inputs


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
        if func in (F.embedding, F.embedding_bag):
            self._look_up(*args[:2], **{name: kwargs[name] for name in ("input", "weight") if name in kwargs})
            return func(*args, **kwargs)
        self._note_indices(func, args, kwargs)
        output = func(*args, **kwargs)
        if sources := set().union(*map(self._sources_of, tree_leaves((args, kwargs)))):
            for x in tree_leaves([output, args[0] if func is torch.Tensor.__setitem__ else None]):
                self._note(x, sources)
        return output

    def _note_indices(self, func: Callable, args: tuple, kwargs: dict) -> None:
        """Note integers that choose among the numbers of a tensor, before an index that is too large raises."""
        if func is torch.Tensor.__getitem__:
            x, chosen = args
            for dim, index in enumerate(chosen if isinstance(chosen, tuple) else (chosen,)):
                self._note_size(index, x.shape[dim] if dim < x.dim() else 0)
        elif func in _CHOOSE:
            x, dim, index = (*args, *kwargs.values())[:3]
            self._note_size(index, x.shape[dim] if isinstance(dim, int) and x.dim() else 0)
        elif func is F.one_hot:
            self._note_size(args[0], next(iter((*args[1:], *kwargs.values())), 0))
        elif func in (F.cross_entropy, F.nll_loss) and len(args) > 1:
            self._note_size(args[1], args[0].shape[min(1, args[0].dim() - 1)])

    def _look_up(self, input: torch.Tensor, weight: torch.Tensor) -> None:
        self._note_size(input, len(weight))

    def _note_size(self, ids: Any, size: int) -> None:
        for path in self._sources_of(ids) if size > 0 else ():
            self.sizes[path] = min(size, self.sizes.get(path, size))

    def _sources_of(self, x: Any) -> set[tuple]:
        return self._sources.get(x.untyped_storage().data_ptr(), set()) if _holds_integers(x) else set()

    def _note(self, x: Any, sources: set[tuple]) -> None:
        if _holds_integers(x):
            self._kept.append(x)
            self._sources.setdefault(x.untyped_storage().data_ptr(), set()).update(sources)


_CHOOSE = (torch.gather, torch.Tensor.gather, torch.index_select, torch.Tensor.index_select)


def _holds_integers(x: Any) -> bool:
    is_tensor = isinstance(x, torch.Tensor) and x.numel() > 0
    return is_tensor and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def tables_of_ids(
    engine: ClippingEngine, loss_function: LossFunction | None, args: tuple, kwargs: dict
) -> Callable[[tuple], int | None]:
    """Returns a function from a path into (args, kwargs) to the size of the smallest table that the ids there are
    looked up in, or choose from; None where that is not seen.

    The model runs without a graph, on synthetic input, when the function is first asked: again where an id was too
    large for what was only then seen.
    """
    model = engine.model

    @cache
    def seen() -> dict[tuple, int]:
        sizes: dict[tuple, int] = {}
        for _ in range(_RUNS):
            given = synthetic_inputs(model, args, kwargs, table_of=sizes.get)
            lookups = _Lookups(dict(tree_flatten_with_path(given)[0]))
            try:
                with engine.suspended(), evaluating(model), kept_buffers(model), torch.no_grad(), lookups:
                    on_packed(loss_function or model)(*given[0], **given[1])
                return lookups.sizes
            except Exception:  # which the check will raise again, or does not meet
                engine.trainable.shards.recover()
            if sizes == lookups.sizes:
                break
            sizes = lookups.sizes
        return sizes

    return lambda path: seen().get(path)


_RUNS = 8  # each may find one table more
