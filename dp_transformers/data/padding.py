"""Padding of the rows of a batch, and other things about it for which a model may compute otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .joining import Sizes, tensors_of


@dataclass(frozen=True)
class Padding:
    """Padding that one row of a physical batch was given, in some of its columns.

    Attributes:
        row: Which row of the batch.
        own_t: (T,) bool, the positions that are the row's own.
        by_others: Longer rows of the batch decide how much padding the row gets. False: it was padded before the
            collator saw it, to one length or to that of a longer example.
        fills: Whether some row of the batch has no padding.
        columns: The columns that are padded so, and in which dimensions, beside that of the rows; None where that is
            not known.
    """

    row: int
    own_t: torch.Tensor
    by_others: bool
    fills: bool
    columns: Mapping[str, tuple[int, ...]] | None = None

    @property
    def length(self) -> int:
        return len(self.own_t)

    @property
    def kind(self) -> tuple:
        """Paddings of one kind are checked once: columns, side, and lengths to within a factor of two."""
        names = None if self.columns is None else frozenset(self.columns)
        own = self.own_t.nonzero().flatten().tolist() or [0]
        sides = own[0] > 0, own[-1] < self.length - 1, len(own) < own[-1] - own[0] + 1
        return (names, self.by_others, *sides, self.length.bit_length(), len(own).bit_length())


def paddings_of(sizes: Sizes) -> list[Padding]:
    """Return the padding of the shortest row of each column, with the columns together that are padded alike in one
    row."""
    columns: dict[tuple, dict[str, tuple[int, ...]]] = {}
    for name, of_column in sizes.items():
        for d, (side, own) in of_column.items():
            row = min(range(len(own)), key=own.__getitem__)
            found = columns.setdefault((row, side, own[row], max(own)), {})
            found[name] = (*found.get(name, ()), d)
    paddings = []
    for (row, side, own, longest), dims in columns.items():
        positions = torch.arange(longest)
        own_t = positions < own if side == "right" else positions >= longest - own
        paddings.append(Padding(row, own_t, True, True, dims))
    return paddings


def padding_before(batch: Any) -> Padding | None:
    """Return the padding of the row that has most of it by the mask of the batch, and had it before it was
    collated."""
    mask_bt = _mask_of(batch)
    if mask_bt is None or bool(mask_bt.all()):
        return None
    lengths_b = mask_bt.sum(1)
    row = int(lengths_b.masked_fill(lengths_b == 0, mask_bt.shape[1]).argmin())
    return Padding(row, mask_bt[row], False, bool(mask_bt.all(1).any()))


def _mask_of(batch: Any) -> torch.Tensor | None:
    """Return which positions are not padding, as the batch itself says: (B, T) bool."""
    found = dict(tensors_of(batch)).get("attention_mask") if isinstance(batch, Mapping) else None
    if found is None or found.dim() < 2 or found.is_floating_point():
        return None
    mask = found != 0
    # choices of an example are padded to each other's length anyway
    return mask.flatten(1, -2).any(1) if mask.dim() > 2 else mask


def traits_of(batch: Any, size: int) -> frozenset:
    """Return what kinds of masks and counts a batch has, for which rules may compute otherwise: the self-check runs
    for each that is new.

    Of every mask the sides on which it hides something; every column of whole numbers, one for each example, that
    varies.
    """
    traits = set()
    for name, x in tensors_of(batch):
        if x.is_floating_point() or x.is_complex() or not x.dim() or len(x) != size:
            continue
        if x.dim() == 1 and size > 1 and "label" not in name:
            traits |= {(name, "varies")} if bool((x != x[0]).any()) else set()
        elif "mask" in name and x.numel():
            sides = (("left", x[..., 0]), ("right", x[..., -1]))
            traits |= {(name, side) for side, column in sides if bool((column == 0).any())}
    return frozenset(traits)


# ---- what no batch may be ----

# as models of transformers call texts and sounds
MAIN_INPUTS = ("input_ids", "input_values", "input_features", "inputs_embeds")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # what packing and flattening collators add


def require_mask(batch: Any, paddings: Sequence[Padding], own_columns: set[str]) -> None:
    """Raise ValueError for texts or sounds of the data set that are padded without a mask."""
    names = {name for padding in paddings for name in padding.columns or ()} & {*MAIN_INPUTS} & own_columns
    if names and isinstance(batch, Mapping) and "attention_mask" not in batch:
        raise ValueError(
            f"examples of different lengths ('{min(names)}') were padded without an attention_mask, so how much "
            "padding an example sees depends on the others. Use a collator that returns the attention_mask "
            "(DataCollatorWithPadding does if the tokenizer's output has it), or pad all to one length "
            "(padding='max_length')."
        )


def refuse_packed(batch: Any) -> None:
    """Raise ValueError for rows that were packed of several examples before the training."""
    found = dict(tensors_of(batch))
    packed = next((name for name, x in found.items() if _tells_of_packing(name.rpartition("/")[2], x)), None)
    starts = found.get("position_ids")
    if packed is None and (starts is None or starts.dim() != 2):
        return
    if packed is None and not _restarts(starts, found.get("attention_mask")):
        return
    how = f"the batch has '{packed}'" if packed else "the position_ids of a row start again at 0 in the middle of it"
    raise ValueError(
        f"{how}, as packed rows have. Packing joins several examples in one row, so the norm of a row is not the norm "
        "of an example. Switch packing, padding_free and flattening collators off, and use one that pads "
        "(DataCollatorWithPadding, or that of your trainer without packing)."
    )


def _tells_of_packing(name: str, column: torch.Tensor) -> bool:
    """Whether it is a packing collator's column, or the lengths of several texts in a row."""
    return name in _PACKED or (name == "seq_lengths" and column.dim() == 2 and column.shape[1] > 1)


def _restarts(positions_bt: Any, mask: Any) -> bool:
    starts = (positions_bt[:, 1:] == 0) & (positions_bt[:, :-1] > 0)
    if isinstance(mask, torch.Tensor) and mask.shape == positions_bt.shape:
        starts &= (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(starts.any())
