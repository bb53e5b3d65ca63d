"""Inner products between positions, which give ghost norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from ..norms import GhostNorm
from ..precision import factor, product
from .arithmetic import LastResultCache, norms_over

LEFT_GRAM, RIGHT_GRAM = "left gram", "right gram"
# Smaller lengths of positions are unknown: the square may have vanished in float32, while the other factor is long.
SHORTEST = 2.0**-57
# From MANY_POSITIONS on (on an accelerator, which small products leave idle, from twice as many), products are formed
# only below the diagonal, in BLOCKS columns of blocks. Blocks are tall, since BLAS takes up to twice as long for wide
# ones.
MANY_POSITIONS, BLOCKS = 128, 4


@dataclass
class Gram:
    """Inner products between the positions of each example: a symmetric (B, T, T) matrix as columns of blocks, each
    (B, T - start, width) from its diagonal down."""

    columns: list[torch.Tensor]

    @cached_property
    def lengths_bt(self) -> torch.Tensor:
        squares_bt = torch.cat([column.diagonal(dim1=1, dim2=2) for column in self.columns], 1)
        return squares_bt.clamp(min=SHORTEST**2).sqrt()

    def inner_product(self, other: Gram) -> GhostNorm:
        """Return the ghost norm, sum_{t,s} left[t, s]·right[t, s].

        Each product is rounded by a fraction of the lengths of both positions, left times right. The product of the
        traces would bound this too, but it multiplies inputs of some positions with gradients of others, which is far
        larger than the norm if padding has gradients and no input.
        """
        sums_b = [_sum_of_symmetric(left * right) for left, right in zip(self.columns, other.columns, strict=True)]
        return GhostNorm.between(sum(sums_b[1:], sums_b[0]), self.lengths_bt * other.lengths_bt)


def _sum_of_symmetric(column: torch.Tensor) -> torch.Tensor:
    """Return the (B,) sums of a column of blocks and of its mirror image above the diagonal."""
    width = column.shape[2]
    on_diagonal = column[:, :width].sum((1, 2))
    return on_diagonal if column.shape[1] == width else on_diagonal + 2 * column[:, width:].sum((1, 2))


def gram_of(x_btd: torch.Tensor, *, bf16: bool = False) -> Gram:
    x_btd = factor(x_btd, bf16=bf16)
    positions = x_btd.shape[1]
    many = MANY_POSITIONS if x_btd.device.type == "cpu" else 2 * MANY_POSITIONS
    blocks = BLOCKS if positions >= many else 1
    ends = [positions * i // blocks for i in range(blocks + 1)]
    return Gram([product(x_btd[:, start:], x_btd[:, start:end].mT, bf16=bf16) for start, end in pairwise(ends)])


def lengths_of(x: torch.Tensor, summed_dims: Sequence[int], cache: LastResultCache | None) -> torch.Tensor:
    """Return the (B, n) lengths of the vectors that are summed over these dimensions, from inner products if the cache
    has them."""
    if cache is not None:
        for kind in ((gram, bf16) for gram in (LEFT_GRAM, RIGHT_GRAM) for bf16 in (False, True)):
            gram = cache.known(kind, x)
            if gram is not None:
                return gram.lengths_bt
    kept = [dim for dim in range(1, x.dim()) if dim not in summed_dims]
    return (norms_over(x, kept) if kept else x.float().abs()).flatten(1)
