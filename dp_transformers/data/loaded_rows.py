"""Rows of a batch that was handed out, looked for again in what a model is called with."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from .scalings import FEWEST_VALUES, POSITIONS, Scalings

_COLUMNS = 256  # numbers of each row that are looked at


_ROWS = 32  # rows of the model's input that are looked at


_TINY = torch.finfo(torch.float64).tiny


_IDS = (torch.int32, torch.int64)


_FEWEST = 8  # numbers that must agree before two rows are said to have something in common


class _Column(NamedTuple):
    """A tensor of a batch as it was loaded, with some numbers of each of its rows."""

    x: torch.Tensor
    version: int
    width: int
    numbers_bk: torch.Tensor


class LoadedRows:
    """Some numbers of every row of a batch: rows that were made of several of them since are refused.

    Seen are a sum of two rows with any weights, parts of one row in another, a row that is there twice, features
    whose mean over the batch was taken off, and factors that follow the batch (:class:`Scalings`), in floating-point
    tensors with as many numbers a row as the batch has.
    Labels and losses are not seen, and of whole numbers (tokens) only that the rows come in several orders.
    """

    def __init__(self, batch: Any, size: int, scalings: Scalings | None = None):
        """``batch`` has ``size`` examples in the first or second dimension of its tensors. ``scalings`` says how other
        batches were changed; None where they are not compared."""
        self._size, self._scalings = size, scalings
        self._kept = [
            _Column(x, x._version, rows_bn.shape[1], _sample(rows_bn)) for x, rows_bn in _by_row(batch, size)
        ]
        self._order: list[int] | None = None  # which loaded rows those of the model's input were
        self._first_ids: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # of the first call
        self._loaded_ids = [(found, found[0]._version) for found in _by_row(batch, size, of_ids=True)]

    @classmethod
    def of_examples(cls, examples: Sequence[Any]) -> LoadedRows:
        """Of examples that are not collated yet, where they have arrays or tensors of one shape."""
        return cls(_columns_of(examples), len(examples))

    def refuse_mixed(self, made: Any, who: str) -> bool:
        """Raise ValueError if rows of what ``who`` made hold parts of other rows than their own. Whether rows are seen
        to be other ones than they were."""
        untouched = {id(column.x): i for i, column in enumerate(self._kept) if column.x._version == column.version}
        changed = False
        for place, (x, rows_bn) in enumerate(_by_row(made, self._size) if self._kept else ()):
            if id(x) in untouched:
                self._require_order(list(range(self._size)), who)
                self._compare_scaling(place, untouched[id(x)], None, x, who)
                continue
            if not x.is_floating_point():
                continue
            made_bk = _sample(rows_bn)
            alike = {i: column.numbers_bk for i, column in enumerate(self._kept) if column.width == rows_bn.shape[1]}
            same = next((i for i, loaded_bk in alike.items() if torch.equal(made_bk, loaded_bk)), None)
            if same is not None:
                self._require_order(list(range(self._size)), who)
                self._compare_scaling(place, same, None, x, who)
                continue
            changed = True
            for loaded_bk in alike.values():
                self._require_order(_order_by_likeness(made_bk, loaded_bk), who)
            if any(_is_mixed(made_bk, loaded_bk) for loaded_bk in alike.values()):
                raise ValueError(
                    f"the {who} mixes examples: a row holds parts of other rows, as MixUp, CutMix and normalisation "
                    "over the batch make them, or is there twice. Clipping would then not bound what one example can "
                    f"change. Remove the mixing from the {who}, and augment each example by itself."
                )
            for i in alike:
                self._compare_scaling(place, i, made_bk, x, who)
        self._compare_ids(made, who)
        return changed

    def _compare_scaling(self, place: int, i: int, made_bk: torch.Tensor | None, x: torch.Tensor, who: str) -> None:
        """Compare how the ``i``-th loaded column became ``x`` with other batches, in the first call of the model."""
        if self._scalings is None or self._first_ids is not None or self._size < FEWEST_VALUES:
            return
        column = self._kept[i]
        # at the same positions whatever the length of the first dimension of a row
        kind = (place, i, column.x.shape[2:], column.width.bit_length())
        self._scalings.require_same(
            kind, column.numbers_bk, made_bk, torch.finfo(x.dtype).eps if made_bk is not None else 0, who
        )

    def _require_order(self, order: list[int] | None, who: str) -> None:
        """Raise ValueError if the rows are known to be in another order than those of another input of this batch."""
        if order is None:
            return
        if self._order not in (None, order):
            raise ValueError(
                f"the {who} gives the model the rows of one batch in several orders (x, and x.roll(1, 0) or x[perm]), "
                "so that one row of what is clipped is made of several examples, and clipping would not bound what "
                "one example can change. Keep one order in all forward passes of a batch and in all that the model is "
                "given. Losses that compare examples (negatives from the batch) cannot be trained privately by "
                "example: let the data set give each example its own negatives."
            )
        self._order = order

    def _compare_ids(self, made: Any, who: str) -> None:
        """Look at the order of whole numbers once the model is called a second time on the batch: the first call alone
        need not wait for the device."""
        ids = _by_row(made, self._size, of_ids=True)
        if self._first_ids is None:
            self._first_ids = ids
            return
        loaded = [(x, rows_bn) for (x, rows_bn), version in self._loaded_ids if x._version == version]
        first, self._first_ids = self._first_ids, []
        for x, rows_bn in [*first, *ids]:
            alike = [(y, y_bn) for y, y_bn in loaded if y_bn.shape == rows_bn.shape]
            x_bn = rows_bn.cpu()
            if any(x is y or torch.equal(x_bn, y_bn.cpu()) for y, y_bn in alike):
                self._require_order(list(range(self._size)), who)
                continue
            for _, y_bn in alike:
                self._require_order(_order_by_equality(x_bn, y_bn.cpu()), who)


class PlacesOfRows:
    """The rows of a batch that is filled up. The last ones are copies of others and have weight 0, which is known by
    their places alone.

    Args:
        batch: Its tensors have the examples in the first or second dimension.
        size: The number of rows, copies among them.
    """

    def __init__(self, batch: Any, size: int):
        self._size = size
        self._loaded = self._read(batch)
        self._kinds_b = _kinds([numbers_bk for width, numbers_bk in self._loaded if width > 1], size)
        if not self._kinds_b.any():  # otherwise labels need not tell rows apart
            self._kinds_b = _kinds([numbers_bk for _, numbers_bk in self._loaded], size)

    def _read(self, batch: Any) -> list[tuple[int, torch.Tensor]]:
        """The width of each tensor's rows, and some of their numbers."""
        return [(rows_bn.shape[1], _sample(rows_bn).nan_to_num()) for rows_bn in _rows_of(batch, self._size)]

    def require_kept(self, made: Any) -> None:
        """Raise ValueError unless rows of what the model is called with are seen to lie where they were loaded."""
        pairs = [(x_bk, y_bk) for n, x_bk in self._read(made) for width, y_bk in self._loaded if n == width]
        same = [x_bk for x_bk, y_bk in pairs if torch.equal(x_bk, y_bk)]
        if self._tells_kinds(_kinds(same, self._size)) or any(self._is_most_alike(*pair) for pair in pairs):
            return
        raise ValueError(
            "fill_physical_batches=True fills batches up with copies of rows, which come last and have weight 0, and "
            "it is not seen that the training loop gives the model the rows as the loader gave them: they are sorted "
            "or shuffled, or changed so much that nobody can tell. A copy could then count in the place of an "
            "example. Keep the order of the loader (pack_padded_sequence with enforce_sorted=False sorts by itself), "
            "or leave fill_physical_batches out."
        )

    def _tells_kinds(self, kinds_b: torch.Tensor) -> bool:
        """Whether rows of one of these kinds are of one loaded kind."""
        pairs = torch.stack([kinds_b, self._kinds_b], 1).unique(dim=0)
        return len(pairs) == len(kinds_b.unique())

    def _is_most_alike(self, x_bk: torch.Tensor, y_bk: torch.Tensor) -> bool:
        """Whether each row of ``x`` is more like the loaded row in its place than like those of another kind."""
        x0_bk, y0_bk = _without_mean(x_bk), _without_mean(y_bk)
        like_bb = x0_bk @ y0_bk.T / y0_bk.norm(dim=1).clamp(min=_TINY)
        is_other_bb = self._kinds_b[:, None] != self._kinds_b
        others_b = like_bb.masked_fill(~is_other_bb, -torch.inf).amax(1)
        return bool((like_bb.diagonal() > others_b).all())


def _rows_of(batch: Any, size: int) -> list[torch.Tensor]:
    """All tensors with numbers of each of several rows, as (B, N)."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [
        x.detach()
        for x in leaves
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested and x.numel()
    ]
    dims = [next((d for d in range(min(2, x.dim())) if x.shape[d] == size), None) for x in tensors]
    return [x.movedim(dim, 0).reshape(size, -1) for x, dim in zip(tensors, dims, strict=True) if dim is not None]


def _kinds(columns: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """(B,) the same number for rows that are equal in all columns."""
    if not columns:
        return torch.zeros(size, dtype=torch.long)
    return torch.cat([*columns], 1).unique(dim=0, return_inverse=True)[1]


def _columns_of(examples: Sequence[Any]) -> list[torch.Tensor]:
    if not examples or isinstance(examples[0], (str, bytes)):
        return []
    first = examples[0]
    keys = (
        list(first)
        if isinstance(first, Mapping)
        else range(len(first))
        if isinstance(first, (tuple, list))
        else [None]
    )
    columns = ([example if key is None else example[key] for example in examples] for key in keys)
    return [
        torch.stack([torch.as_tensor(x) for x in column])
        for column in columns
        if all(
            isinstance(x, (torch.Tensor, np.ndarray)) and x.shape == column[0].shape and x.dtype == column[0].dtype
            for x in column
        )
        and len(column[0].shape)
    ]


def _by_row(batch: Any, size: int, *, of_ids: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sounds, images and other tensors with many numbers for each of several examples, and each as (B, N); or, instead
    of these, as many whole numbers, such as tokens."""
    found = []
    for x in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if not isinstance(x, torch.Tensor) or size < 2:
            continue
        is_wanted = x.dtype in _IDS if of_ids else x.is_floating_point() or x.dtype == torch.uint8
        if is_wanted and x.numel() >= (1 if of_ids else 2) * _FEWEST * size:
            rows_in = next((d for d in range(min(2, x.dim())) if x.shape[d] == size), None)
            if rows_in is not None:
                found.append((x, x.detach().movedim(rows_in, 0).flatten(1)))
    return found


def _sample(x_bn: torch.Tensor) -> torch.Tensor:
    """Some columns, the same of all that have as many, as (B, K) float64 on the CPU."""
    return x_bn[:, _columns(x_bn.shape[1]).to(x_bn.device)].cpu().double()


@functools.lru_cache(maxsize=8)
def _columns(width: int) -> torch.Tensor:
    """The first ones are the same for all widths that are as long in binary."""
    first, others = (
        torch.randperm(n, generator=torch.Generator().manual_seed(0))[:_COLUMNS]
        for n in (2 ** (width.bit_length() - 1), width)
    )
    first = first[:POSITIONS]
    return torch.cat([first, others[~torch.isin(others, first)]])[:_COLUMNS]


def _order_by_equality(x_bn: torch.Tensor, y_bn: torch.Tensor) -> list[int] | None:
    """Which row of ``y`` each row of ``x`` equals; None where that is not one of its own for each, or where rows have
    much in common by chance, as masks do."""
    same_bb = torch.stack([(row_n == y_bn).all(1) for row_n in x_bn])
    is_one_of_its_own = bool((same_bb.sum(0) == 1).all() and (same_bb.sum(1) == 1).all())
    return same_bb.int().argmax(1).tolist() if is_one_of_its_own and bool((_distinct(x_bn) > 2).all()) else None


def _order_by_likeness(x_bk: torch.Tensor, y_bk: torch.Tensor) -> list[int] | None:
    """Which row of ``y`` each row of ``x`` is much more like than any other; None where that is not known, as after
    some augmentations."""
    if len(x_bk) != len(y_bk) or not (torch.isfinite(x_bk).all() and torch.isfinite(y_bk).all()):
        return None
    x0_bk, y0_bk = _without_mean(x_bk), _without_mean(y_bk)
    squares = (x0_bk**2).sum(1, keepdim=True) * (y0_bk**2).sum(1)
    like_bb = (x0_bk @ y0_bk.T) ** 2 / squares.clamp(min=_TINY)
    best = like_bb.topk(2, 1)
    order = best.indices[:, 0]
    is_known = bool((best.values[:, 0] > 0.5).all() and (best.values[:, 1] < best.values[:, 0] / 2).all())
    return order.tolist() if is_known and len(order.unique()) == len(order) else None


def _is_mixed(x_bk: torch.Tensor, y_bk: torch.Tensor) -> bool:
    """Whether rows of ``x`` hold parts of other rows of ``y`` than their own."""
    if not (torch.isfinite(x_bk).all() and torch.isfinite(y_bk).all()):
        return False
    if _is_centred(x_bk) and not _is_centred(y_bk):
        return True
    x_ik, x0_ik, y0_bk = x_bk[:_ROWS], _without_mean(x_bk[:_ROWS]), _without_mean(y_bk)
    own_i = ((x0_ik @ y0_bk.T) ** 2 / (y0_bk**2).sum(1).clamp(min=_TINY)).argmax(1)  # rows may be in another order
    return _are_sums(x0_ik, y0_bk, own_i, _distinct(x_ik) > 2) or _are_parts(x_ik, y_bk, own_i)


def _without_mean(x_bk: torch.Tensor) -> torch.Tensor:
    return x_bk - x_bk.mean(1, keepdim=True)


def _is_centred(x_bk: torch.Tensor) -> bool:
    """Whether the mean over the batch is nothing beside the numbers; that of independent rows is 1/√B of them."""
    return bool(x_bk.mean(0).norm() <= 1e-3 * x_bk.norm() / len(x_bk))


def _are_sums(x_ik: torch.Tensor, y_bk: torch.Tensor, own_i: torch.Tensor, many_i: torch.Tensor) -> bool:
    """Whether what is left of a row of ``x`` without its own row of ``y`` is a multiple of what is left of another row
    of ``y``.

    Or nothing is left of two rows of ``x`` that have one row of ``y`` for their own. Rows where not ``many`` numbers
    differ, as zeros and ones, have much in common by chance.
    """
    squares_i, squares_b = (x_ik**2).sum(1), (y_bk**2).sum(1)
    own_ik, own_squares_i = y_bk[own_i], squares_b[own_i].clamp(min=_TINY)
    left_ik = x_ik - (x_ik * own_ik).sum(1, keepdim=True) / own_squares_i[:, None] * own_ik
    left_i = (left_ik**2).sum(1)
    others_ib = squares_b - (own_ik @ y_bk.T) ** 2 / own_squares_i[:, None]
    is_other_ib = others_ib > 1e-4 * squares_b
    pure = own_i[many_i & (left_i <= 1e-5 * squares_i) & (is_other_ib.sum(1) == len(y_bk) - 1)]
    if len(pure.unique()) < len(pure):
        return True
    spread_i = left_ik.abs().sum(1) ** 2 / left_i.clamp(min=_TINY)  # in how many numbers, if all are of one size
    tells_i = many_i & (left_i > 1e-4 * squares_i) & (spread_i >= _FEWEST)
    is_sum_ib = is_other_ib & ((left_ik @ y_bk.T) ** 2 >= 0.999 * left_i[:, None] * others_ib)
    return bool((tells_i[:, None] & is_sum_ib).any())


def _are_parts(x_ik: torch.Tensor, y_bk: torch.Tensor, own_i: torch.Tensor) -> bool:
    """Whether numbers of a row of ``x`` were replaced by those of another row of ``y``, that are nowhere else in their
    row and column of it."""
    changed_ik = x_ik != y_bk[own_i]
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
