"""Rows that hold data of several examples (MixUp, CutMix, normalisation over the batch): clipping by row bounds none of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
                "over the batch). Such a row holds several people's data, and clipping rows would not bound what one example can change. Remove the "
                f"mixing from the {who}, and augment each example by itself."
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


_COLUMNS = 256  # numbers of each row that are looked at
_ROWS = 32  # rows of the model's input that are looked at
_FEWEST = 8  # numbers that must agree before two rows are said to have something in common


class LoadedRows:
    """Some numbers of every row of a batch, as the loader gave it: rows that a loop made of several of them are refused.

    Seen are a sum of two rows with any weights, parts of one row in another, and features whose mean over the batch was taken off, in
    floating-point inputs with as many numbers a row as the batch has. What a loop does to whole numbers (tokens), to labels or to losses is not.
    """

    def __init__(self, batch: Any, size: int):
        self._size = size
        self._kept = [(x, x._version, rows_bn.shape[1], _sample(rows_bn)) for x, rows_bn in _by_row(batch, size)]

    def refuse_mixed(self, inputs: Any) -> None:
        """Raise ValueError if rows of the model's ``inputs`` hold parts of other rows than their own."""
        untouched = {id(x) for x, version, *_ in self._kept if x._version == version}
        for x, rows_bn in _by_row(inputs, self._size) if self._kept else ():
            if id(x) in untouched or not x.is_floating_point():
                continue
            for *_, width, loaded_bk in self._kept:
                if width == rows_bn.shape[1] and _is_mixed(_sample(rows_bn), loaded_bk):
                    raise ValueError(
                        "the loop mixes examples: rows of the model's input hold parts of other rows of the loader's batch, as MixUp, CutMix and "
                        "normalisation over the batch make them. Clipping would then not bound what one example can change. Remove the mixing from "
                        "the loop, and augment each example by itself."
                    )


def _by_row(batch: Any, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sounds, images and other tensors with many numbers for each of several examples, and each as (B, N)."""
    found = []
    for x in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if (
            isinstance(x, torch.Tensor)
            and (x.is_floating_point() or x.dtype == torch.uint8)
            and x.numel() >= 2 * _FEWEST * size > 2 * _FEWEST
        ):
            rows_in = next((d for d in range(min(2, x.dim())) if x.shape[d] == size), None)
            if rows_in is not None:
                found.append((x, x.detach().movedim(rows_in, 0).flatten(1)))
    return found


def _sample(x_bn: torch.Tensor) -> torch.Tensor:
    """Some columns, the same of all that have as many, as (B, K) float64 on the CPU."""
    return x_bn[:, _columns(x_bn.shape[1]).to(x_bn.device)].cpu().double()


@functools.lru_cache(maxsize=8)
def _columns(width: int) -> torch.Tensor:
    return torch.randperm(width, generator=torch.Generator().manual_seed(0))[:_COLUMNS]


def _is_mixed(x_bk: torch.Tensor, y_bk: torch.Tensor) -> bool:
    """Whether rows of ``x`` hold parts of other rows of ``y`` than their own."""
    if torch.equal(x_bk, y_bk) or not (torch.isfinite(x_bk).all() and torch.isfinite(y_bk).all()):
        return False
    centred = _is_centred(x_bk) and not _is_centred(y_bk)
    return centred or _are_sums(x_bk[:_ROWS], y_bk) or _are_parts(x_bk[:_ROWS], y_bk)


def _is_centred(x_bk: torch.Tensor) -> bool:
    """Whether the mean over the batch is nothing beside the numbers; that of independent rows is 1/√B of them."""
    return bool(x_bk.mean(0).norm() <= 1e-3 * x_bk.norm() / len(x_bk))


def _are_sums(x_ik: torch.Tensor, y_bk: torch.Tensor) -> bool:
    """Whether what is left of a row of ``x`` without its own row of ``y`` and a constant is a multiple of what is left of another row of ``y``."""
    many_i = _distinct(x_ik) > 2  # rows of zeros and ones have much in common by chance
    x_ik, y_bk = x_ik - x_ik.mean(1, keepdim=True), y_bk - y_bk.mean(1, keepdim=True)
    own_ik, squares_b = y_bk[: len(x_ik)], (y_bk**2).sum(1)
    tiny = torch.finfo(torch.float64).tiny
    left_ik = x_ik - (x_ik * own_ik).sum(1, keepdim=True) / (own_ik**2).sum(1, keepdim=True).clamp(min=tiny) * own_ik
    left_i = (left_ik**2).sum(1)
    spread_i = left_ik.abs().sum(1) ** 2 / left_i.clamp(min=tiny)  # in how many numbers, if all are of one size
    others_ib = squares_b - (own_ik @ y_bk.T) ** 2 / squares_b[: len(x_ik), None].clamp(min=tiny)
    along_ib = (left_ik @ y_bk.T) ** 2
    tells_i = many_i & (left_i > 1e-4 * (x_ik**2).sum(1)) & (spread_i >= _FEWEST)
    is_sum_ib = (others_ib > 1e-4 * squares_b) & (along_ib >= 0.999 * left_i[:, None] * others_ib)
    return bool((tells_i[:, None] & is_sum_ib.fill_diagonal_(False)).any())


def _are_parts(x_ik: torch.Tensor, y_bk: torch.Tensor) -> bool:
    """Whether numbers of a row of ``x`` were replaced by those of another row of ``y``, that are nowhere else in their row and column of it."""
    changed_ik = x_ik != y_bk[: len(x_ik)]
    taken_ibk = (x_ik[:, None] == y_bk) & changed_ik[:, None]
    if not taken_ibk.any():
        return False
    taken_ib = (taken_ibk & _is_unique(y_bk, 0) & _is_unique(y_bk, 1)).sum(2)
    return bool((taken_ib.max(1).values >= (changed_ik.sum(1) // 16).clamp(min=_FEWEST)).any())


def _is_unique(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Which numbers are there only once along ``dim``."""
    ordered, order = x.movedim(dim, 0).sort(0)
    same = ordered[1:] == ordered[:-1]
    none = torch.zeros_like(same[:1])
    repeated = torch.cat([same, none]) | torch.cat([none, same])
    return torch.empty_like(repeated).scatter_(0, order, ~repeated).movedim(0, dim)


def _distinct(x_ik: torch.Tensor) -> torch.Tensor:
    """How many numbers of each row are different."""
    ordered = x_ik.sort(1).values
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
