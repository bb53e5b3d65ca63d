"""The batch dimension of tensors that enter or leave a module, learned from their shapes for two batch sizes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten, tree_leaves

from . import ragged


@dataclass(frozen=True)
class BatchDim:
    """The batch dimension of a tensor. Without ``dim`` and ``flat``, the tensor is the same for all examples.

    Attributes:
        dim: The dimension with one entry for each example, or a single one for all.
        flat: The first dimension holds all positions of all examples, example by example.
        one_row: Only a single entry was seen; as many entries as examples may be a table that is the same for all.
    """

    dim: int | None = None
    flat: bool = False
    one_row: bool = field(default=False, compare=False)

    def holds_examples(self, x: torch.Tensor, batch: int) -> bool:
        """Return True if ``x`` has an entry for each of ``batch`` examples."""
        if self.flat:
            return True
        return self.dim is not None and x.dim() > self.dim and x.shape[self.dim] == batch

    def batch_first(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        """Return (B, ...), or (B, positions, ...) for a flat tensor. A tensor that is the same for all examples is not
        changed."""
        if self.flat:
            return x.reshape(batch, len(x) // max(batch, 1), *x.shape[1:])
        return x.movedim(self.dim, 0) if self.dim and self.holds_examples(x, batch) else x

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`batch_first` for a tensor that holds examples."""
        if self.flat:
            return x.flatten(0, 1)
        return x.movedim(0, self.dim) if self.dim else x


@dataclass(frozen=True, eq=False)
class PackedRows(BatchDim):
    """The rows of a PackedSequence's data. ``order`` are its fields besides the data."""

    order: tuple = ()

    def holds_examples(self, x: torch.Tensor, batch: int) -> bool:
        return True

    def batch_first(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        """Return (B, T, ...), zero after the end of an example."""
        return pad_packed_sequence(PackedSequence(x, *self.order), batch_first=True)[0]


BATCH_FIRST, FLAT, SHARED = BatchDim(0), BatchDim(flat=True), BatchDim()


def _tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    given = [*args, *kwargs.values()]
    if not all(isinstance(x, torch.Tensor) for x in given):  # walking containers takes as long as a small layer
        given = tree_leaves(given)
    return [x for x in given if isinstance(x, torch.Tensor)]


def kind_of_call(args: tuple, kwargs: dict) -> Hashable:
    """Return a key of the structure of a call and the ranks of its tensors. In calls with one key, each tensor has the
    same role."""
    leaves, spec = tree_flatten((args, kwargs))
    return repr(spec), tuple(x.dim() if isinstance(x, torch.Tensor) else None for x in leaves)


def positions_of(args: tuple, kwargs: dict, batch: int) -> set[int]:
    """Return the possible numbers of positions of an example in this input: the sizes of its dimensions, and products
    of the leading ones."""
    found = set()
    for x in ragged.tensors_with_rows((args, kwargs)):
        if x.dim() > 1 and len(x) == batch:
            found |= {*x.shape[1:], *(x.shape[1:k].numel() for k in range(3, x.dim() + 1))}
    return found


def learn_batch_dim(
    shape: Sequence[int], other: Sequence[int], batch: int, other_batch: int, positions: set[int]
) -> BatchDim:
    """Return the batch dimension of a tensor that has ``shape`` in a run on ``batch`` examples, and ``other`` in a run
    on ``other_batch``."""
    if len(shape) != len(other) or not shape:
        return SHARED
    pairs = list(zip(shape, other, strict=True))
    if (batch, other_batch) in pairs:
        return BatchDim(pairs.index((batch, other_batch)))
    size, other_size = pairs[0]
    if (size, other_size) in ((1, 1), (batch, 1), (1, other_batch)):
        return BatchDim(0, one_row=size == other_size)
    # the size must be batch times a known number of positions: a mere multiple could be tokens sorted by expert
    if size * other_batch == other_size * batch and size % batch == 0 and size // batch in positions:
        return FLAT
    return SHARED


def batch_size_of(model: nn.Module, args: tuple, kwargs: dict, batch_first: bool = True) -> int:
    """Return the number of examples of a call of the model, from its main input or its first tensor, the offsets of
    bags, or the lengths of a PackedSequence."""
    if (number := ragged.number_of_examples(model, args, kwargs)) is not None:
        return number
    main = kwargs.get(getattr(model, "main_input_name", ""))
    tensors = [main] if isinstance(main, torch.Tensor) else [x for x in _tensors(args, kwargs) if x.dim()]
    if not tensors:
        raise ValueError(
            "the model was called without a tensor, so the batch size is unknown: pass inputs with the batch in "
            "dimension 0."
        )
    return tensors[0].shape[0 if batch_first or tensors[0].dim() == 1 else 1]
