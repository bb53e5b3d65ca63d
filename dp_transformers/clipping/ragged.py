"""Examples of different lengths in one tensor without padding: a ``PackedSequence``, or ids and offsets for
nn.EmbeddingBag.

Such tensors have no batch dimension. A :class:`Ragged` replaces them with one row for each example, so that rows can
be selected, replaced and generated as for any other tensor; :func:`packed` converts it back to the model's input."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import MappingKey, register_pytree_node, tree_leaves, tree_map


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths.

    Attributes:
        padded: (B, T, ...), each row padded with zeros; all zeros for offsets.
        lengths: (B,) number of positions of each row.
        form: The result of :func:`packed`: "packed", or "sorted" if the longest row is first; "flat", rows one after
            the other; "offsets", the start of each row; "all offsets", with the end of the last row.
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
    """Return the tensors in a structure, except those with rows of different lengths."""
    return [x for x in tree_leaves(structure, is_leaf=is_ragged) if isinstance(x, torch.Tensor)]


# ---- to rows and back ----


def unpacked(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Replace every ``PackedSequence``, and the ids, weights and offsets of bags, in the arguments of ``module`` by a
    :class:`Ragged`.

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
    """Convert a ``PackedSequence`` to a :class:`Ragged`; return anything else as it is."""
    if not isinstance(x, PackedSequence):
        return x
    padded, lengths = pad_packed_sequence(x, batch_first=True)
    return Ragged(padded, lengths, "sorted" if x.sorted_indices is None else "packed")


def packed(structure: Any) -> Any:
    """Undo :func:`unpacked`."""
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
    """Return a (B, T) mask of the positions within each row's length."""
    return torch.arange(longest, device=lengths_b.device) < lengths_b[:, None]


def padded_rows(x_n: torch.Tensor, lengths_b: torch.Tensor) -> torch.Tensor:
    """Pad rows that lie one after the other to (B, T), with T at least 1."""
    own_bt = own_positions(lengths_b, max(1, int(lengths_b.max())))
    return x_n.new_zeros(own_bt.shape).masked_scatter(own_bt, x_n)


def bag_lengths(starts: torch.Tensor, number: int) -> torch.Tensor:
    """Return the (B,) sizes of bags from their B + 1 offsets into ``number`` ids.

    Raises:
        ValueError: an id is in no bag.
    """
    lengths = starts.diff()
    if int(starts[0]) or int(starts[-1]) != number or bool((lengths < 0).any()):
        raise ValueError(
            f"the offsets of an nn.EmbeddingBag do not divide its {number} ids into bags, one for each example. Let "
            "them begin with 0 and never decrease, and with include_last_offset=True end with the number of ids."
        )
    return lengths


# ---- ids and offsets ----


@cache
def _argument_names(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _bags(module: nn.Module, args: tuple, kwargs: dict) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """Return the offsets of bags, found by the name of the argument, and their ids and weights; None without bags."""
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
    """Return the number of examples in ragged arguments; None if it is a dimension of the first tensor."""
    bags = _bags(module, args, kwargs)
    if bags is not None:
        return len(bags[0]) - _has_all_offsets(module)
    first = next((x for x in tree_leaves((args, kwargs), is_leaf=is_ragged) if is_ragged(x) or _has_dim(x)), None)
    return int(first.batch_sizes[0]) if isinstance(first, PackedSequence) else None


def _has_dim(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0
