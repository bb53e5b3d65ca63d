"""The choice, by cost, between factors and the gradients that they give: for the norm by operations, for what is kept
until the sum is formed by memory."""

from __future__ import annotations

import torch


def is_cheaper_instantiated(positions: int, rows: int, columns: int) -> bool:
    """Whether the norm of a (rows, columns) gradient, a sum of outer products over positions, takes fewer
    floating-point operations from the gradient (T·p·d) than as a ghost norm (T²(p + d))."""
    return positions * (rows + columns) >= rows * columns


def is_smaller_instantiated(left_btp: torch.Tensor, right_btd: torch.Tensor, numbers: int, *, times: int = 1) -> bool:
    """Whether an example's gradient, so many numbers in float32, takes at most so many times the memory of its
    factors."""
    (t, p), d = left_btp.shape[1:], right_btd.shape[2]
    return times * t * (p * left_btp.element_size() + d * right_btd.element_size()) >= 4 * numbers
