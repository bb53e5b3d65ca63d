"""What a model returns, by rows, and a loss of it where its own is not known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import SelfCheckError
from ..parallel.dtensor import is_dtensor
from ..ragged import is_ragged, unpacked_sequence

LossFunction = Callable[..., torch.Tensor]  # (*args, **kwargs of the model) -> (B,) losses


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


def by_example(model: nn.Module, output: Any, batch: int, *, batch_first: bool) -> list[torch.Tensor]:
    """Return every tensor of numbers in what the model returned for so many examples, examples first."""

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
    if any(len(x) != batch for x in found):
        raise SelfCheckError(
            f"{type(model).__name__} returns a tensor without a dimension for the examples of its batch, so it is not "
            "known which of its numbers are whose and nothing can be checked: return tensors whose first dimension is "
            "the batch, or hand over a loss_function."
        )
    return found


def examples_first(x: torch.Tensor, batch: int, *, batch_first: bool) -> torch.Tensor:
    """Return an output with its examples first. Those of the states of a recurrent layer are second, whatever comes
    first in its outputs."""
    return x.transpose(0, 1) if is_batch_second(x, batch, batch_first=batch_first) else x


def is_batch_second(x: torch.Tensor, batch: int, *, batch_first: bool) -> bool:
    return x.dim() > 1 and x.shape[1] == batch and (len(x) != batch or (not batch_first and x.dim() > 2))


def with_rows(output: Any) -> Any:
    """Return (B, ...) in the place of every PackedSequence: for each example a sum over its positions, each with a
    weight of its own."""

    def weighted(x: Any) -> Any:
        if not is_ragged(x):
            return x
        padded = unpacked_sequence(x).padded
        return torch.tensordot(torch.arange(1, padded.shape[1] + 1).sin().to(padded), padded, dims=([0], [1]))

    return tree_map(weighted, output, is_leaf=is_ragged)


def floating_tensors(structure: Any) -> list[torch.Tensor]:
    """Return the tensors of numbers in it, also in mappings and dataclasses that torch does not know."""
    found: list[torch.Tensor] = []
    for x in tree_leaves(structure):
        if isinstance(x, torch.Tensor):
            found += [x] if x.is_floating_point() else []
        elif isinstance(x, Mapping):
            found += floating_tensors(list(x.values()))
        elif is_dataclass(x) and not isinstance(x, type):
            found += floating_tensors([getattr(x, each.name, None) for each in fields(x)])
    return found


def projected(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return (B,), a fixed random linear function of each row of the tensors."""
    losses = []
    for x in tensors:
        generator = torch.Generator().manual_seed(x[0].numel())
        weight = torch.randn(x[0].numel(), generator=generator).to(x.device) / max(1, x[0].numel()) ** 0.5
        losses.append(x.flatten(1).float() @ weight if x.dim() > 1 else x.float() * weight)
    return torch.stack(losses).sum(0)


def cut_to(x: torch.Tensor, shape: Sequence[int], side: str) -> torch.Tensor:
    """Return a row of an output without the positions that it has for padding, which are on this side."""
    if x.dim() != len(shape) or any(n < m for n, m in zip(x.shape, shape, strict=True)):
        raise SelfCheckError(
            f"the model's output has {x.dim() + 1} dimensions for several examples, and another shape for one alone: "
            "squeeze() takes the dimension of the batch too where it is 1. Name the dimension, as in squeeze(-1)."
        )
    for d, wanted in enumerate(shape):
        x = x.narrow(d, 0 if side == "right" else x.shape[d] - wanted, wanted)
    return x


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
