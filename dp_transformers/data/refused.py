"""Batches that are refused: packed rows, and rows that the training loop mixed.

Shape legend: B rows, I the first of them, K numbers of each row, T positions.
"""

from __future__ import annotations

from typing import Any

import torch

from .columns import tensors_of

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # columns of packing and flattening collators
_ROWS, _NUMBERS, _FEWEST = 32, 256, 8  # rows and numbers that are compared; numbers that must come from another row


def refuse_packed(batch: Any) -> None:
    """Raise ValueError for rows that were packed of several examples before the training."""
    found = {path.rpartition("/")[2]: x for path, x in tensors_of(batch)}
    signs = [f"the batch has '{name}'" for name in _PACKED if name in found]
    if (lengths := found.get("seq_lengths")) is not None and lengths.dim() == 2 and lengths.shape[1] > 1:
        signs.append("the batch has 'seq_lengths'")
    positions_bt, mask_bt = found.get("position_ids"), found.get("attention_mask")
    if positions_bt is not None and positions_bt.dim() == 2:
        starts_bt = (positions_bt[:, 1:] == 0) & (positions_bt[:, :-1] > 0)
        if mask_bt is not None and mask_bt.shape == positions_bt.shape:
            starts_bt &= (mask_bt[:, 1:] != 0) & (mask_bt[:, :-1] != 0)
        signs += ["the position_ids of a row start again at 0 in the middle of it"] * bool(starts_bt.any())
    if signs:
        raise ValueError(
            f"{signs[0]}, as packed rows have. Packing joins several examples in one row, so the norm of a row is not "
            "the norm of an example. Switch packing, padding_free and flattening collators off, and use one that pads "
            "(DataCollatorWithPadding, or that of your trainer without packing)."
        )


# ---- MixUp and CutMix in the loop ----


def refuse_mixed(loaded: Any, given: Any, size: int) -> bool:
    """Raise ValueError if a row that the model is called with is a sum of two of the ``size`` loaded rows (MixUp), or
    has numbers of another row in the place of its own (CutMix). Return True if any row is not as it was loaded."""
    pairs = []
    for x in _columns(given, size):
        alike = [y for y in _columns(loaded, size) if y.shape == x.shape]
        found = [] if any(x is y for y in alike) else [(_numbers(x), _numbers(y)) for y in alike]
        pairs += [] if any(torch.equal(*pair) for pair in found) else found
    if any(_are_sums(*pair) or _are_parts(*pair) for pair in pairs):
        raise ValueError(
            "the training loop mixes examples: a row holds parts of other rows, as MixUp and CutMix make them, so "
            "clipping would not bound what one example can change. Augment each example by itself (in the data set)."
        )
    return bool(pairs)


def _columns(batch: Any, size: int) -> list[torch.Tensor]:
    tensors = [x for _, x in tensors_of(batch) if x.is_floating_point() or x.dtype == torch.uint8]
    return [x for x in tensors if x.dim() > 1 and len(x) == size > 1 and x.numel() >= 2 * _FEWEST * size]


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Return K numbers of each row, (B, K) float64, from the same places for all tensors of a shape."""
    x_bn = x.detach().flatten(1)
    places = torch.linspace(0, x_bn.shape[1] - 1, min(_NUMBERS, x_bn.shape[1])).long()
    return x_bn[:, places.to(x.device)].cpu().double()


def _are_sums(x_bk: torch.Tensor, y_bk: torch.Tensor) -> bool:
    """Return True if a row of x without its part along its own row of y is a multiple of another row of y without
    that part."""
    x_ik, y_bk = (z - z.mean(1, keepdim=True) for z in (x_bk[:_ROWS], y_bk))
    own_ik, squares_b = y_bk[: len(x_ik)], (y_bk**2).sum(1).clamp(min=1e-300)
    left_ik = x_ik - ((x_ik * own_ik).sum(1) / squares_b[: len(x_ik)])[:, None] * own_ik
    left_i, rest_ib = (left_ik**2).sum(1), squares_b - (own_ik @ y_bk.T) ** 2 / squares_b[: len(x_ik), None]
    squares_i = (x_ik**2).sum(1)
    is_one_i = ((x_ik @ y_bk.T) ** 2 >= (1 - 1e-6) * squares_i[:, None] * squares_b).any(1)  # in another place, say
    tells_i = (left_i > 1e-4 * squares_i) & (left_ik.abs().sum(1) ** 2 >= _FEWEST * left_i) & ~is_one_i
    is_sum_ib = ((left_ik @ y_bk.T) ** 2 >= 0.999 * left_i[:, None] * rest_ib) & (rest_ib > 1e-4 * squares_b)
    return bool((tells_i[:, None] & is_sum_ib).any())


def _are_parts(x_bk: torch.Tensor, y_bk: torch.Tensor) -> bool:
    """Return True if the changed numbers of a row are those of one other row, and not all the same."""
    changed_ik, same_ibk = x_bk[:_ROWS] != y_bk[:_ROWS], x_bk[:_ROWS, None] == y_bk
    taken_ibk = same_ibk & changed_ik[:, None]
    is_most_ib = taken_ibk.sum(2) >= (0.9 * changed_ik.sum(1)).clamp(min=_FEWEST)[:, None]
    is_most_ib &= ~same_ibk.all(2)  # a row in another place
    return any(len(x_bk[i, taken_ibk[i, j]].unique()) >= _FEWEST for i, j in is_most_ib.nonzero().tolist())
