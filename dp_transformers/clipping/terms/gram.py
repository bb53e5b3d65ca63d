"""Inner products between positions, from which ghost norms follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from ..norms import GhostNorm
from ..precision import factor, product
from .arithmetic import norms_over
from .cache import LastResultCache

LEFT_GRAM, RIGHT_GRAM = "left gram", "right gram"
# Below this, a position's length is not known: its square may have vanished in float32, while its gradient, or its
# input, is long.
SHORTEST = 2.0**-57
# From so many positions on, products are formed below the diagonal only, in so many columns of blocks: fewer do not
# pay. Blocks are tall, since BLAS takes up to twice as long for wide ones. On an accelerator, which small products
# leave idle, from twice as many on.
MANY_POSITIONS, BLOCKS = 128, 4


@dataclass
class Gram:
    """Inner products between the positions of each example: a symmetric (B, T, T) matrix in columns of blocks, each
    from its diagonal down, (B, T - start, width)."""

    columns: list[torch.Tensor]

    @cached_property
    def lengths_bt(self) -> torch.Tensor:
        squares_bt = torch.cat([column.diagonal(dim1=1, dim2=2) for column in self.columns], 1)
        return squares_bt.clamp(min=SHORTEST**2).sqrt()

    def inner_product(self, other: Gram) -> GhostNorm:
        """The ghost norm, sum_{t,s} left[t, s]·right[t, s].

        Each product is rounded by a fraction of both positions' lengths, left times right. The traces' product would
        bound that too, but it multiplies the inputs of some positions with the gradients of others, which dwarfs a
        norm where padding has gradients and no input.
        """
        sums_b = [_sum_of_symmetric(left * right) for left, right in zip(self.columns, other.columns, strict=True)]
        return GhostNorm.between(sum(sums_b[1:], sums_b[0]), self.lengths_bt * other.lengths_bt)


def _sum_of_symmetric(column: torch.Tensor) -> torch.Tensor:
    """(B,): of the numbers of a column of blocks and of those above the diagonal that mirror it."""
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
    """(B, n): of the vectors that are summed over these dimensions, read off inner products where a norm has just
    computed them."""
    if cache is not None:
        for kind in ((gram, bf16) for gram in (LEFT_GRAM, RIGHT_GRAM) for bf16 in (False, True)):
            gram = cache.known(kind, x)
            if gram is not None:
                return gram.lengths_bt
    kept = [dim for dim in range(1, x.dim()) if dim not in summed_dims]
    return (norms_over(x, kept) if kept else x.float().abs()).flatten(1)
