"""Made-up input with the shapes of the given one, and losses for models whose own is not known."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_with_path

from ..batch_dims import batch_size_of
from ..errors import SelfCheckError
from ..parallel.dtensor import is_dtensor
from ..ragged import Ragged, is_ragged, packed, unpacked_sequence, varied

# parts of the names of integers that say how the others are to be read
_STRUCTURE = ("mask", "position", "token_type", "length", "shape", "grid", "size", "task")
LossFunction = Callable[..., torch.Tensor]  # (*args, **kwargs of the model) -> (B,) losses


def synthetic_inputs(
    model: nn.Module,
    args: tuple,
    kwargs: dict,
    rows: int | None = None,
    *,
    table_of: Callable[[tuple], int | None] | None = None,
) -> tuple[tuple, dict]:
    """Random input with the shapes, dtypes and structure of the given one, ``rows`` examples (default: three, five or
    seven).

    The structure is what masks, lengths and shapes say, and where the ids stand that configs of the model and of its
    parts name (ends, separators, images): a model may look for them. Words are drawn among the others.

    Args:
        table_of: ``f(path)``, how many different ids there may be at this path into (args, kwargs), where neither the
            argument's name nor the model's config says it (:mod:`.lookups`); where it is None, the size of the
            smallest table.
    """
    args, kwargs = varied((args, kwargs))
    batch = batch_size_of(model, args, kwargs)
    sizes = {n for x in tree_flatten((args, kwargs))[0] if has_batch(x, batch) for n in x.shape[1:]}
    sizes |= {m.num_layers * (2 if m.bidirectional else 1) for m in model.modules() if isinstance(m, nn.RNNBase)}
    rows = rows or next(n for n in (3, 5, 7, 9, 11) if n not in sizes)
    table_of = table_of or (lambda path: None)
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    num_labels = max(2, getattr(config, "num_labels", None) or 2)
    token_labels = (vocabulary or smallest_table(model)) if predicts_words(model) else num_labels
    name_of = argument_names(model)
    named_ids = torch.tensor(sorted(_named_ids(model)))
    longest = max((n for n in sizes if n < 2**20), default=0)

    def ids_below(size: int, recycled: torch.Tensor) -> torch.Tensor:
        words = torch.arange(size)
        words = words[~torch.isin(words, named_ids)] if size > len(named_ids) else words
        drawn = words[torch.randint(0, len(words), recycled.shape)].to(recycled)
        return torch.where(torch.isin(recycled, named_ids.to(recycled)), recycled, drawn)

    def make(path: tuple, x: Any) -> Any:
        if not has_batch(x, batch):
            return x
        name = name_of(path)
        recycled = x[torch.arange(rows, device=x.device) % batch]
        if x.is_floating_point():
            return recycled if "mask" in name else torch.randn(recycled.shape, device=x.device).to(x.dtype)
        if x.dtype == torch.bool or any(word in name for word in _STRUCTURE):
            return recycled
        if x.dim() == 1 and "label" not in name and all(0 < n <= longest for n in x.tolist()):
            return recycled  # lengths of rows, whatever they are called
        if "label" in name:
            classes = num_labels if x.dim() == 1 else token_labels
            classes = classes if hasattr(config, "to_dict") else min(classes, table_of(path) or classes)
            drawn = torch.randint(0, classes, recycled.shape, device=x.device, dtype=x.dtype)
            return drawn.masked_fill(recycled < 0, -100)
        if vocabulary and name.endswith("input_ids"):
            return ids_below(vocabulary, recycled)
        if "box" in name and recycled.shape[-1] == 4:
            return _boxes(recycled, getattr(config, "max_2d_position_embeddings", 1000))
        return ids_below(table_of(path) or smallest_table(model), recycled)

    return varied(tree_map_with_path(make, (args, kwargs)))


def predicts_words(model: nn.Module) -> bool:
    """Returns False for heads that predict something else for each position, or for all."""
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    return get_output_embeddings is None or get_output_embeddings() is not None


def smallest_table(model: nn.Module) -> int:
    """Returns how many ids the smallest embedding of the model knows; 2 where there is none."""
    tables = (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    return min((m.num_embeddings for m in tables), default=2)


def _named_ids(model: nn.Module) -> set[int]:
    """What configs of the model and of its parts name (:func:`_ids_named_in`)."""
    configs = {id(config): config for m in model.modules() if (config := vars(m).get("config")) is not None}
    settings = [config.to_dict() for config in configs.values() if hasattr(config, "to_dict")]
    return set().union(*map(_ids_named_in, settings))


def _ids_named_in(settings: Mapping[str, Any]) -> set[int]:
    """The ids of tokens with a meaning of their own in these settings of a model and of its parts, but for padding,
    which masks hide: where rows end in many alike, gradients cancel and no longer tell whether norms are exact."""
    found: set[int] = set()
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _ids_named_in(value)
        elif "pad" not in str(name) and str(name).endswith(("token_id", "token_index", "eos_index", "bos_index")):
            found |= {i for i in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(i, int)}
    return found


def _boxes(like: torch.Tensor, side: int) -> torch.Tensor:
    """Random boxes (left, top, right, bottom) on a page of this size."""
    left_top, right_bottom = torch.randint(0, side, (2, *like.shape[:-1], 2)).sort(0).values.to(like)
    return torch.cat([left_top, right_bottom], -1)


def argument_names(model: nn.Module) -> Callable[[tuple], str]:
    """Returns a function from a path into (args, kwargs) to the name of that argument of the model."""
    positional = dict(enumerate(inspect.signature(model.forward).parameters))

    def name_of(path: tuple) -> str:
        return (
            positional.get(path[1].idx, "")
            if len(path) == 2 and path[0].idx == 0
            else str(getattr(path[-1], "key", ""))
        )

    return name_of


def replace_example(args: tuple, kwargs: dict, batch: int, row: int, source: int) -> tuple[tuple, dict]:
    """Example ``row`` becomes a copy of another, so that its content is valid whatever it is."""

    def change(x: Any) -> Any:
        if isinstance(x, Ragged):  # as long as it was, so that random numbers stay where they are
            return replace(x, padded=change(x.padded))
        return torch.cat([x[:row], x[source : source + 1], x[row + 1 :]]) if has_batch(x, batch) else x

    return tree_map(change, (args, kwargs), is_leaf=is_ragged)


def only_rows(rows: list[int], args: tuple, kwargs: dict, batch: int) -> tuple[tuple, dict]:
    """The same input with these of its examples alone."""
    return tree_map(lambda x: x[rows] if has_batch(x, batch) else x, (args, kwargs))


def has_batch(x: Any, batch: int) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0 and len(x) == batch


def arguments_of(batch: Any) -> tuple[tuple, dict]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) and not is_ragged(batch) else (batch,)), {}


def second_dimension_first(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tree_map(
        lambda x: x.transpose(0, 1) if isinstance(x, torch.Tensor) and x.dim() > 1 else x,
        (args, kwargs),
        is_leaf=is_ragged,
    )


def batch_second(losses_of: LossFunction) -> LossFunction:
    """``losses_of`` for inputs whose batch comes first, given one for those where it comes second."""

    def swapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = second_dimension_first(args, kwargs)
        return losses_of(*args, **kwargs)

    return swapped


def on_packed(losses_of: LossFunction) -> LossFunction:
    """``losses_of`` for inputs with a row for each example (:class:`.clipping.ragged.Ragged`), given one for what the
    model takes."""

    def repacked(*args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = packed((args, kwargs))
        return losses_of(*args, **kwargs)

    return repacked


def random_output_loss(model: nn.Module, *, batch_first: bool = True) -> LossFunction:
    """A loss for models whose own is not known: a fixed random weight for every number an example puts out."""

    def losses_of(*args: Any, **kwargs: Any) -> torch.Tensor:
        return projected(outputs_by_example(model, args, kwargs, batch_first=batch_first))

    return losses_of


def outputs_by_example(model: nn.Module, args: tuple, kwargs: dict, *, batch_first: bool) -> list[torch.Tensor]:
    """Every tensor of numbers that the model returns for this input, examples first."""
    batch = batch_size_of(model, args, kwargs, batch_first)
    return by_example(model, model(*args, **kwargs), batch, batch_first=batch_first)


def by_example(model: nn.Module, output: Any, batch: int, *, batch_first: bool) -> list[torch.Tensor]:
    """Every tensor of numbers in what the model returned for so many examples, examples first."""

    tensors = [x for x in floating_tensors(with_rows(output)) if x.dim()]
    if not tensors:
        raise SelfCheckError(
            f"{type(model).__name__} returns {type(output).__name__}, in which there is no tensor of floating-point "
            "numbers with a dimension for the examples, so nothing can be checked: return one, in a tuple, dict or "
            "dataclass if need be, or hand over a loss_function."
        )
    if any(is_dtensor(x) for x in tensors):
        raise SelfCheckError(
            f"{type(model).__name__} returns a DTensor, which is split over processes, so nothing can be checked of "
            "it: let the last module of the plan gather its output (output_layouts=Replicate()), or hand over a "
            "loss_function."
        )
    found = [examples_first(x, batch, batch_first=batch_first) for x in tensors]
    if shapes := [tuple(x.shape) for x in found if len(x) != batch]:
        raise SelfCheckError(
            f"{type(model).__name__} returns a tensor of shape {shapes[0]} for {batch} examples, so it is not known "
            "which of its numbers are whose and nothing can be checked: return tensors whose first dimension is the "
            "batch, or hand over a loss_function."
        )
    return found


def examples_first(x: torch.Tensor, batch: int, *, batch_first: bool) -> torch.Tensor:
    """An output with its examples first. Those of the states of a recurrent layer are second, whatever comes first in
    its outputs."""
    return x.transpose(0, 1) if is_batch_second(x, batch, batch_first=batch_first) else x


def is_batch_second(x: torch.Tensor, batch: int, *, batch_first: bool) -> bool:
    return x.dim() > 1 and x.shape[1] == batch and (len(x) != batch or (not batch_first and x.dim() > 2))


def with_rows(output: Any) -> Any:
    """(B, ...) in the place of every PackedSequence: for each example a sum over its positions, each with a weight of
    its own."""

    def weighted(x: Any) -> Any:
        if not is_ragged(x):
            return x
        padded = unpacked_sequence(x).padded
        return torch.tensordot(torch.arange(1, padded.shape[1] + 1).sin().to(padded), padded, dims=([0], [1]))

    return tree_map(weighted, output, is_leaf=is_ragged)


def floating_tensors(structure: Any) -> list[torch.Tensor]:
    """The tensors of numbers in it, also in mappings and dataclasses that torch does not know."""
    found: list[torch.Tensor] = []
    for x in tree_leaves(structure):
        if isinstance(x, torch.Tensor):
            found += [x] if x.is_floating_point() else []
        elif isinstance(x, Mapping):
            found += floating_tensors(list(x.values()))
        elif is_dataclass(x) and not isinstance(x, type):
            found += floating_tensors([getattr(x, field.name, None) for field in fields(x)])
    return found


def projected(tensors: list[torch.Tensor]) -> torch.Tensor:
    """(B,), a fixed random linear function of each row of the tensors."""
    losses = []
    for x in tensors:
        generator = torch.Generator().manual_seed(x[0].numel())
        weight = torch.randn(x[0].numel(), generator=generator).to(x.device) / max(1, x[0].numel()) ** 0.5
        losses.append(x.flatten(1).float() @ weight if x.dim() > 1 else x.float() * weight)
    return torch.stack(losses).sum(0)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for m, training in modes.items():
            m.training = training


@contextlib.contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Afterwards every buffer has the content it had. (Batch normalisation writes to its own without telling
    autograd.) One that has it is not written to, since a graph may need it."""
    kept = {name: t.clone() for name, t in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, t in model.named_buffers():
                if name in kept and kept[name].shape == t.shape and (is_dtensor(t) or not torch.equal(t, kept[name])):
                    t.copy_(kept[name])
