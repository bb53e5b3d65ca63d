"""Rows that hold data of several examples (MixUp, CutMix, normalisation over the batch): clipping by row bounds none of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .rows import Collate, leaves


def refuse_mixed(collate: Collate, examples: Sequence[Any], reseed: Callable[[], None], *, who: str = "collator") -> None:
    """Raise ValueError if replacing one example changes the rows of others (MixUp, CutMix, normalisation over the batch).

    Both are made from the same random numbers. Who differs from itself then has generators of its own, and is let be. ``collate`` gives a
    batch, or a list with a row for each example.
    """

    def made(part: list[Any]) -> dict[str, torch.Tensor]:
        reseed()
        batch = collate(copy.deepcopy(part))
        return {
            name: x for name, x in leaves(_as_batch(batch) if isinstance(batch, list) else batch) if isinstance(x, torch.Tensor) and x.dim()
        }

    size, whole = len(examples), list(examples)
    first, again, fewer, moved = made(whole), made(whole), made(whole[:-1]), made([*whole[:-1], whole[0]])
    if not _agree(list(first.items()), list(again.items())):
        return
    for name in (name for name in first if name in fewer and name in moved):
        x, y, z = first[name], moved[name], fewer[name]
        if x.shape != y.shape or x.dim() != z.dim():
            continue
        rows_in = next((d for d in range(min(2, x.dim())) if x.shape[d] == size and z.shape[d] == size - 1), None)
        if rows_in is not None and not _have_other_rows(x.movedim(rows_in, 0), y.movedim(rows_in, 0)):
            raise ValueError(
                f"the {who} mixes examples: '{name}' of a row changes when another example of its batch is replaced (MixUp, CutMix, normalisation "
                "over the batch). Such a row holds several people's data, and one example is in several rows. Take that out of it; augment each "
                "example by itself."
            )


def _as_batch(examples: list[Any]) -> dict[str, torch.Tensor]:
    """Columns of rows that have one shape; others are left out."""
    columns: dict[str, list[Any]] = {}
    for example in examples:
        named = example.items() if isinstance(example, Mapping) else enumerate(example if isinstance(example, (tuple, list)) else [example])
        for name, x in named:
            columns.setdefault(str(name), []).append(x)
    batch = {}
    for name, column in columns.items():
        try:
            batch[name] = torch.stack([torch.as_tensor(x) for x in column])
        except (TypeError, ValueError, RuntimeError):
            continue
    return batch


def _have_other_rows(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether all rows of ``x`` but one are rows of ``y`` too, in whatever order."""
    same = (x[:, None] == y[None]) | ((x != x)[:, None] & (y != y)[None])
    return int(same.reshape(len(x), len(y), -1).all(2).any(1).sum()) >= len(x) - 1


def _agree(a: list[tuple[str, torch.Tensor]], b: list[tuple[str, torch.Tensor]]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and _equal(x, y) for (_, x), (_, y) in zip(a, b, strict=True))


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all())
