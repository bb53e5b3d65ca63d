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
# pay. Blocks are tall, since BLAS takes up to twice as long for wide ones. On an accelerator, which small products leave
# idle, from twice as many on.
MANY_POSITIONS, BLOCKS = 128, 4


@dataclass
class Gram:
    """Inner products between the positions of each example, (B, T, T)."""

    products_bts: torch.Tensor

    @cached_property
    def lengths_bt(self) -> torch.Tensor:
        return self.products_bts.diagonal(dim1=1, dim2=2).clamp(min=SHORTEST**2).sqrt()

    def inner_product(self, other: Gram) -> GhostNorm:
        """The ghost norm, sum_{t,s} left[t, s]·right[t, s].

        Each product is rounded by a fraction of both positions' lengths, left times right. The traces' product would
        bound that too, but it multiplies the inputs of some positions with the gradients of others, which dwarfs a
        norm where padding has gradients and no input.
        """
        return GhostNorm.between(
            (self.products_bts * other.products_bts).sum((1, 2)), self.lengths_bt * other.lengths_bt
        )


def gram_of(x_btd: torch.Tensor, *, bf16: bool = False) -> Gram:
    x_btd = factor(x_btd, bf16=bf16)
    batch, positions, _ = x_btd.shape
    if positions < (MANY_POSITIONS if x_btd.device.type == "cpu" else 2 * MANY_POSITIONS):
        return Gram(product(x_btd, x_btd.mT, bf16=bf16))
    products_bts = torch.empty(batch, positions, positions, device=x_btd.device, dtype=torch.float32)
    ends = [positions * i // BLOCKS for i in range(BLOCKS + 1)]
    for start, end in pairwise(ends):
        products_bts[:, start:, start:end] = product(x_btd[:, start:], x_btd[:, start:end].mT, bf16=bf16)
        products_bts[:, start:end, end:] = products_bts[:, end:, start:end].mT
    return Gram(products_bts)


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
