"""Examples of different lengths that lie in one tensor without padding: a ``PackedSequence``, and the ids and offsets
that nn.EmbeddingBag takes.

No dimension of such tensors is the batch. A :class:`Ragged` in their place has a row for each example, so that rows
can be chosen, replaced and made up as those of any other tensor; :func:`packed` turns it into what the model takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import MappingKey, register_pytree_node, tree_leaves, tree_map

_SHORTEST_LONGEST = 3  # made-up rows have three different lengths


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths.

    Attributes:
        padded: (B, T, ...), each row filled up with zeros; of offsets nothing but zeros.
        lengths: (B,) how many positions are each row's own.
        form: What :func:`packed` makes of it: "packed", or "sorted" where the rows come longest first; "flat", one row
            behind the other; "offsets", where each begins; "all offsets", with the end of the last.
    """

    padded: torch.Tensor
    lengths: torch.Tensor
    form: str


def _with_keys(x: Ragged) -> tuple[list[Any], str]:
    return [(MappingKey("padded"), x.padded), (MappingKey("lengths"), x.lengths)], x.form


register_pytree_node(
    Ragged,
    lambda x: ([x.padded, x.lengths], x.form),
    lambda tensors, form: Ragged(*list(tensors), form=form),
    flatten_with_keys_fn=_with_keys,
)


def is_ragged(x: Any) -> bool:
    return isinstance(x, (Ragged, PackedSequence))


def tensors_with_rows(structure: Any) -> list[torch.Tensor]:
    """The tensors in it, without those that hold rows of different lengths."""
    return [x for x in tree_leaves(structure, is_leaf=is_ragged) if isinstance(x, torch.Tensor)]


# ---- to rows and back ----


def unpacked(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of ``module`` with a :class:`Ragged` in the place of every ``PackedSequence``, and of the ids,
    weights and offsets of bags.

    Raises:
        ValueError: the offsets do not divide the ids into bags.
    """
    bags = _bags(module, args, kwargs)
    if bags is not None:
        offsets, flat = bags
        ids = flat[0]
        starts = offsets if _has_all_offsets(module) else torch.cat([offsets, offsets.new_tensor([len(ids)])])
        lengths = bag_lengths(starts, len(ids))

        def by_bag(x: Any) -> Any:
            if x is offsets:
                form = "all offsets" if starts is offsets else "offsets"
                return Ragged(padded_rows(torch.zeros_like(ids, dtype=x.dtype), lengths), lengths, form)
            return Ragged(padded_rows(x, lengths), lengths, "flat") if any(x is y for y in flat) else x

        args, kwargs = tuple(map(by_bag, args)), {name: by_bag(x) for name, x in kwargs.items()}
    return tree_map(unpacked_sequence, (args, kwargs), is_leaf=is_ragged)


def unpacked_sequence(x: Any) -> Any:
    """A :class:`Ragged` in the place of a ``PackedSequence``; anything else as it is."""
    if not isinstance(x, PackedSequence):
        return x
    padded, lengths = pad_packed_sequence(x, batch_first=True)
    return Ragged(padded, lengths, "sorted" if x.sorted_indices is None else "packed")


def packed(structure: Any) -> Any:
    """What was there before :func:`unpacked`."""
    return tree_map(lambda x: _packed(x) if isinstance(x, Ragged) else x, structure, is_leaf=is_ragged)


def _packed(x: Ragged) -> Any:
    if x.form in ("packed", "sorted"):
        is_sorted = x.form == "sorted" and bool((x.lengths[1:] <= x.lengths[:-1]).all())
        return pack_padded_sequence(x.padded, x.lengths.cpu(), batch_first=True, enforce_sorted=is_sorted)
    if x.form == "flat":
        return x.padded[own_positions(x.lengths, x.padded.shape[1])]
    ends = x.lengths.cumsum(0).to(x.padded)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends])
    return starts if x.form == "all offsets" else starts[:-1]


def own_positions(lengths_b: torch.Tensor, longest: int) -> torch.Tensor:
    """(B, T) bool."""
    return torch.arange(longest, device=lengths_b.device) < lengths_b[:, None]


def padded_rows(x_n: torch.Tensor, lengths_b: torch.Tensor) -> torch.Tensor:
    """(B, T) of rows that lie one behind the other; a column at least, so that rows without numbers have a row."""
    own_bt = own_positions(lengths_b, max(1, int(lengths_b.max())))
    return x_n.new_zeros(own_bt.shape).masked_scatter(own_bt, x_n)


def bag_lengths(starts: torch.Tensor, number: int) -> torch.Tensor:
    """(B,) how many of ``number`` ids each bag has, of the B + 1 offsets where they begin and the last one ends.

    Raises:
        ValueError: some id is in no bag.
    """
    lengths = starts.diff()
    if int(starts[0]) or int(starts[-1]) != number or bool((lengths < 0).any()):
        raise ValueError(
            f"the offsets of an nn.EmbeddingBag do not divide its {number} ids into bags, one for each example. They "
            "must begin with 0 and never decrease, and with include_last_offset=True the last one must be the number "
            "of ids."
        )
    return lengths


# ---- who has ids and offsets ----


@cache
def _argument_names(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _bags(module: nn.Module, args: tuple, kwargs: dict) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """The offsets of bags, known by the name of the argument, and the ids and weights that they divide."""
    given = {**dict(zip(_argument_names(type(module)), args, strict=False)), **kwargs}
    offsets = next((x for name, x in given.items() if "offset" in name and _are_numbers(x)), None)
    if offsets is None or not any(isinstance(m, nn.EmbeddingBag) for m in module.modules()):
        return None
    ids = next((x for x in given.values() if _are_numbers(x) and x is not offsets), None)
    if ids is None:
        return None
    weights = [
        x
        for name, x in given.items()
        if "weight" in name and isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape == ids.shape
    ]
    return offsets, [ids, *weights]


def _are_numbers(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 1 and not x.is_floating_point() and x.dtype != torch.bool


def _has_all_offsets(module: nn.Module) -> bool:
    return any(m.include_last_offset for m in module.modules() if isinstance(m, nn.EmbeddingBag))


def number_of_examples(module: nn.Module, args: tuple, kwargs: dict) -> int | None:
    """How many examples the module is called with, where that is no tensor's dimension; None where it is."""
    bags = _bags(module, args, kwargs)
    if bags is not None:
        return len(bags[0]) - _has_all_offsets(module)
    first = next((x for x in tree_leaves((args, kwargs), is_leaf=is_ragged) if is_ragged(x) or _has_dim(x)), None)
    return int(first.batch_sizes[0]) if isinstance(first, PackedSequence) else None


def _has_dim(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


# ---- bags in collated batches, whose columns may have no names ----


def bag_columns(batches: Sequence[tuple[dict[str, torch.Tensor], int]]) -> tuple[str, list[str]] | None:
    """The names of the offsets, and of the ids and weights that they divide, in batches of so many examples; None
    where there are none. They stand side by side in each batch: labels that are in order are no offsets of a row."""
    (first, size), others = batches[0], [batch for batch, _ in batches[1:]]
    vectors = {name: x for name, x in first.items() if x.dim() == 1 and all(name in batch for batch in others)}
    ids = next((name for name, x in vectors.items() if _are_numbers(x) and len(x) != size), None)
    if ids is None:
        return None
    beside = {name: x for name, x in vectors.items() if name.rpartition("/")[0] == ids.rpartition("/")[0]}
    candidates = [
        name
        for name in beside
        if ("offset" in name or name.rpartition("/")[2].isdigit())
        and all(_lengths_of_bags(batch, n, name, ids) is not None for batch, n in batches)
    ]
    if not candidates:
        return None
    flat = [name for name, x in beside.items() if len(x) == len(first[ids])]
    return max(candidates, key=lambda name: int(first[name][-1])), flat


def with_rows_for_bags(
    batch: dict[str, torch.Tensor], size: int, columns: tuple[str, list[str]] | None
) -> dict[str, torch.Tensor]:
    """The batch with a row for each example in the place of ids and weights, and lengths in the place of offsets."""
    lengths = None if columns is None else _lengths_of_bags(batch, size, columns[0], columns[1][0])
    if columns is None or lengths is None:
        return batch
    return {**batch, columns[0]: lengths, **{name: padded_rows(batch[name], lengths) for name in columns[1]}}


def _lengths_of_bags(batch: dict[str, torch.Tensor], size: int, offsets: str, ids: str) -> torch.Tensor | None:
    if offsets == ids or not (_are_numbers(batch.get(offsets)) and _are_numbers(batch.get(ids))):
        return None
    number, starts = len(batch[ids]), batch[offsets]
    if len(starts) == size:
        starts = torch.cat([starts, starts.new_tensor([number])])
    try:
        return bag_lengths(starts, number) if len(starts) == size + 1 else None
    except ValueError:
        return None


# ---- made-up rows ----


def varied(structure: Any) -> Any:
    """Rows of three lengths in the place of those that there are. They are in no order of their lengths, unless the
    model was given sorted ones, so that a model which loses the order of a PackedSequence is seen to do so."""

    def change(x: Any) -> Any:
        if not isinstance(x, Ragged):
            return x
        missing = max(0, _SHORTEST_LONGEST - x.padded.shape[1])
        more = x.padded.new_zeros(len(x.padded), missing, *x.padded.shape[2:])
        padded = torch.cat([x.padded, more], 1)
        by_one = [0, 1, 2] if x.form == "sorted" else [1, 0, 2]
        shorter_b = x.lengths.new_tensor(by_one)[torch.arange(len(padded), device=x.lengths.device) % len(by_one)]
        return replace(x, padded=padded, lengths=(padded.shape[1] - shorter_b).to(x.lengths))

    return tree_map(change, structure, is_leaf=is_ragged)
