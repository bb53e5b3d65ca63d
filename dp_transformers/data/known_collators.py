"""Collators of torch and transformers that make each row of a batch from one example and random numbers of its own.

They get a whole physical batch, which takes a fraction of the time of one call for each example. Every other collator,
also a subclass of these, gets one example at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from .joining import Sizes

_PADDING = ("DataCollatorWithPadding", "DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling")
_LIKE_IDS = ("attention_mask", "token_type_ids", "special_tokens_mask")  # tokenizers pad them like ids


def acts_on_rows_alone(collate: Any) -> bool:
    """Return True for a collator that is known to do so, and pads rows to the longest of them."""
    collate = _inner(collate)
    if collate is default_collate or _is_of_transformers(collate, "default_data_collator"):
        return True
    if not any(_is_of_transformers(type(collate), name) for name in _PADDING):
        return False
    from transformers import PreTrainedTokenizerBase

    tokenizer = type(collate.tokenizer)
    pads_as_usual = all(getattr(tokenizer, f, 0) is getattr(PreTrainedTokenizerBase, f) for f in ("pad", "_pad"))
    to_longest = getattr(collate, "padding", True) in (True, "longest") and collate.pad_to_multiple_of is None
    return pads_as_usual and to_longest and collate.return_tensors == "pt"


def draws_numbers(collate: Any) -> bool:
    """Return True for a collator of these that masks tokens at random."""
    return getattr(_inner(collate), "mlm", False)


def are_of_one_kind(column: Sequence[Any]) -> bool:
    """Return True if these collators make the same columns, each of one type, of any of these examples."""
    kinds = {*map(type, column)}
    if len(kinds) != 1:
        return False
    (kind,) = kinds
    if kind is list:
        return all(column) and {*map(type, itertools.chain(*column))} in ({int}, {float}, {bool})
    if issubclass(kind, (torch.Tensor, np.ndarray)):
        return len({x.dtype for x in column}) == 1
    if kind is tuple:
        return len({*map(len, column)}) == 1 and all(map(are_of_one_kind, zip(*column, strict=True)))
    if issubclass(kind, Mapping):
        return len({*map(tuple, column)}) == 1 and all(are_of_one_kind([x[k] for x in column]) for k in column[0])
    return issubclass(kind, (int, float, str, np.generic))


def sizes_of(collate: Any, examples: Sequence[Any], batch: Any) -> Sizes:
    """Return the own sizes of the rows in the padded columns of a batch that such a collator made of examples."""
    collate, sizes = _inner(collate), Sizes()
    if type(collate).__name__ not in _PADDING:
        return sizes
    ids, labels = collate.tokenizer.model_input_names[0], "label" if "label" in examples[0] else "labels"
    padded_like = dict.fromkeys((ids, *_LIKE_IDS), ids) | {
        "DataCollatorForLanguageModeling": {"labels": ids},
        "DataCollatorForSeq2Seq": {"labels": labels, "decoder_input_ids": labels},
    }.get(type(collate).__name__, {})
    for name in batch:
        own = [len(example[padded_like[name]]) for example in examples if name in padded_like]
        if own and min(own) < max(own):
            sizes[name] = {1: (collate.tokenizer.padding_side, own)}
    return sizes


def _inner(collate: Any) -> Any:
    return collate.data_collator if _is_of_transformers(type(collate), "RemoveColumnsCollator") else collate


def _is_of_transformers(x: Any, name: str) -> bool:
    return getattr(x, "__name__", "") == name and x.__module__.startswith("transformers.")
