"""Rows that came padded or packed: how long they are by their mask, and what no batch may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .joining import Sizes, tensors_of


def sizes_by_mask(batch: Any) -> Sizes:
    """Return how the rows of a batch were padded before they were collated, by its mask; nothing where none was, no
    row fills them, or some row has padding that is not on one side."""
    columns = dict(tensors_of(batch)) if isinstance(batch, Mapping) else {}
    mask = columns.get("attention_mask")
    if mask is None or mask.dim() != 2 or mask.is_floating_point() or bool((mask != 0).all()):
        return {}
    own_bt, longest = mask != 0, mask.shape[1]
    own = [n or longest for n in own_bt.sum(1).tolist()]
    on_left = bool((~own_bt[:, 0] & own_bt[:, -1]).any())
    positions = torch.arange(longest)
    ends = torch.tensor(own)[:, None]
    expected_bt = positions >= longest - ends if on_left else positions < ends
    if max(own) < longest or not bool((own_bt == expected_bt).all(1).logical_or(~own_bt.any(1)).all()):
        return {}
    side = "left" if on_left else "right"
    return {name: {1: (side, own)} for name, x in columns.items() if x.shape[:2] == mask.shape and not _scores(x)}


def _scores(x: torch.Tensor) -> bool:
    """Whether it may be a number for each class."""
    return x.dim() == 2 and x.is_floating_point()


# ---- what no batch may be ----

# as models of transformers call texts and sounds
MAIN_INPUTS = ("input_ids", "input_values", "input_features", "inputs_embeds")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # what packing and flattening collators add


def require_mask(batch: Any, sizes: Sizes, own_columns: set[str]) -> None:
    """Raise ValueError for texts or sounds of the data set that are padded without a mask."""
    names = sizes.keys() & {*MAIN_INPUTS} & own_columns
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
