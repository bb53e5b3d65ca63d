"""MixUp and CutMix in a training loop, recognised by the rows that the model is given.

Shape legend: B rows, I the first of them, K numbers of each row.
"""

from __future__ import annotations

from typing import Any

import torch

from .columns import tensors_of

_ROWS, _NUMBERS, _FEWEST = 32, 256, 8  # that are compared, and numbers of a row that must come from another one


def refuse_mixed(loaded: Any, given: Any, size: int) -> bool:
    """Raise ValueError if rows that a model is given are sums of two of the ``size`` loaded rows, or hold numbers of
    another one in their own place. Return whether any are other rows than the loaded ones."""
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
    """Return numbers of each row, of the same places for all tensors of a shape: (B, K) float64."""
    x_bn = x.detach().flatten(1)
    places = torch.linspace(0, x_bn.shape[1] - 1, min(_NUMBERS, x_bn.shape[1])).long()
    return x_bn[:, places.to(x.device)].cpu().double()


def _are_sums(x_bk: torch.Tensor, y_bk: torch.Tensor) -> bool:
    """Return whether what is left of a row of x without its own row of y is a multiple of what is left of another."""
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
    """Return whether numbers of a row that are not its own are those of another row, and not all the same."""
    changed_ik, same_ibk = x_bk[:_ROWS] != y_bk[:_ROWS], x_bk[:_ROWS, None] == y_bk
    taken_ibk = same_ibk & changed_ik[:, None]
    is_most_ib = taken_ibk.sum(2) >= (0.9 * changed_ik.sum(1)).clamp(min=_FEWEST)[:, None]
    is_most_ib &= ~same_ibk.all(2)  # a row in another place
    return any(len(x_bk[i, taken_ibk[i, j]].unique()) >= _FEWEST for i, j in is_most_ib.nonzero().tolist())
