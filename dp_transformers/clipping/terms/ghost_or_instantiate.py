"""The choice between factors and instantiated gradients: by operations for the norm, and by memory for storage."""

from __future__ import annotations

import torch


def is_cheaper_instantiated(positions: int, rows: int, columns: int) -> bool:
    """Return True if the norm of a (rows, columns) gradient, a sum of outer products over positions, takes fewer
    floating-point operations from the gradient (T·p·d) than as a ghost norm (T²(p + d))."""
    return positions * (rows + columns) >= rows * columns


def is_smaller_instantiated(left_btp: torch.Tensor, right_btd: torch.Tensor, numbers: int, *, times: int = 1) -> bool:
    """Return True if an example's gradient of ``numbers`` float32 numbers takes at most ``times`` the memory of its
    factors."""
    (t, p), d = left_btp.shape[1:], right_btd.shape[2]
    return times * t * (p * left_btp.element_size() + d * right_btd.element_size()) >= 4 * numbers
