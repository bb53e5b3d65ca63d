"""Terms of weights that multiply: sums over positions of outer products."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch

from ..norms import DirectNorm, Measured
from ..precision import factor, is_bf16, product, split
from . import arithmetic
from .arithmetic import (
    LastResultCache,
    Regrouping,
    chunks,
    flat_norm,
    is_cheaper_instantiated,
    is_smaller_instantiated,
    joined,
    sum_of,
    zero_rows,
)
from .dense import Dense
from .gram import LEFT_GRAM, RIGHT_GRAM, gram_of, lengths_of

# Instances of a weight with at least so many rows per column, such as LoRA's B, are computed transposed: products with
# few rows are faster than products with few columns.
TALL = 8


@dataclass
class Outer:
    """The term of a weight that multiplies: a sum over positions of outer products. ``left`` (B, T, p) gives the rows
    of the parameter, ``right`` (B, T, d) its columns."""

    left: torch.Tensor
    right: torch.Tensor
    instance_memory: int = (
        1  # an instance is kept instead of the factors if it takes at most so many times their memory
    )

    def __post_init__(self) -> None:
        assert self.left.dim() == self.right.dim() == 3 and self.left.shape[:2] == self.right.shape[:2]

    @cached_property
    def is_bf16(self) -> bool:
        return is_bf16(self.left, self.right)

    def _factor(self, x: torch.Tensor) -> torch.Tensor:
        return factor(x, bf16=self.is_bf16)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of positions, rows and columns."""
        return self.left.shape[1], self.left.shape[2], self.right.shape[2]

    @property
    def cheaper_instantiated(self) -> bool:
        return is_cheaper_instantiated(*self.sizes)

    @property
    def store_instantiated(self) -> bool:
        numbers = self.left.shape[2] * self.right.shape[2]
        return is_smaller_instantiated(self.left, self.right, numbers, times=self.instance_memory)

    def norm(self, *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
        (b, t, p), d = self.left.shape, self.right.shape[2]
        gram = partial(gram_of, bf16=self.is_bf16)
        if t == 1 and not instantiate:
            return DirectNorm(flat_norm(self._factor(self.left)) * flat_norm(self._factor(self.right)))
        by_instance = instantiate or self.cheaper_instantiated
        if not by_instance and cache is not None and 4 * b * t * t <= arithmetic.SCRATCH_BYTES:
            left = cache.get((LEFT_GRAM, self.is_bf16), self.left, gram)
            return left.inner_product(cache.get((RIGHT_GRAM, self.is_bf16), self.right, gram))
        measured = []
        for rows in chunks(b, 4 * (p * d if by_instance else 2 * t * t)):
            left, right = self.left[rows], self.right[rows]
            measured.append(
                Outer(left, right).instantiate().norm() if by_instance else gram(left).inner_product(gram(right))
            )
        return joined(measured)

    def position_norms(self, cache: LastResultCache | None) -> list[torch.Tensor]:
        return [lengths_of(self.left, (1,), cache) * lengths_of(self.right, (1,), cache)]

    def instantiate(self) -> Dense:
        left, right = self._factor(self.left), self._factor(self.right)
        if left.shape[2] >= TALL * right.shape[2]:
            return Dense(product(right.mT, left, bf16=self.is_bf16).mT)
        return Dense(product(left.mT, right, bf16=self.is_bf16))

    def weighted_sum(self, coef_b: torch.Tensor, cache: LastResultCache | None = None) -> torch.Tensor:
        def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return split((x.bfloat16() if self.is_bf16 else x.float()) * coef_b[:, None, None], bf16=self.is_bf16)

        left, right, cache = self.left, self.right, cache or LastResultCache()
        if left.shape[2] < right.shape[2]:
            right = self._factor(right)
            pairs = [(part, right) for part in cache.get(("scaled left", self.is_bf16), left, scaled)]
        else:
            left = self._factor(left)
            pairs = [(left, part) for part in cache.get(("scaled right", self.is_bf16), right, scaled)]
        return sum_of(product(x.flatten(0, 1).t(), y.flatten(0, 1), bf16=self.is_bf16) for x, y in pairs)

    def zero_examples(self, invalid_b: torch.Tensor) -> Outer:
        return Outer(zero_rows(self.left, invalid_b), zero_rows(self.right, invalid_b))

    def regrouped(self, regrouping: Regrouping) -> Outer:
        return Outer(regrouping.joined(self.left, "left"), regrouping.joined(self.right, "right"))


@dataclass
class Stacked:
    """The term of a weight with blocks of rows that have different inputs, such as one projection of queries, keys and
    values."""

    blocks: Sequence[Outer]

    @property
    def is_bf16(self) -> bool:
        return any(block.is_bf16 for block in self.blocks)

    @property
    def store_instantiated(self) -> bool:
        return all(block.store_instantiated for block in self.blocks)

    def norm(self, *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
        norm_sq_b = [block.norm(instantiate=instantiate, cache=cache).squared() for block in self.blocks]
        return DirectNorm(torch.stack(norm_sq_b).sum(0).sqrt())

    def position_norms(self, cache: LastResultCache | None) -> list[torch.Tensor]:
        return [x for block in self.blocks for x in block.position_norms(cache)]

    def instantiate(self) -> Dense:
        return Dense(torch.cat([block.instantiate().grad for block in self.blocks], 1))

    def weighted_sum(self, coef_b: torch.Tensor, cache: LastResultCache | None = None) -> torch.Tensor:
        return torch.cat([block.weighted_sum(coef_b, cache) for block in self.blocks])

    def zero_examples(self, invalid_b: torch.Tensor) -> Stacked:
        return Stacked([block.zero_examples(invalid_b) for block in self.blocks])

    def regrouped(self, regrouping: Regrouping) -> Stacked:
        return Stacked([block.regrouped(regrouping) for block in self.blocks])


def sum_in_blocks(terms: Sequence[Outer | Stacked]) -> Outer | Stacked:
    """Return the sum of several terms, in the common refinement of their blocks."""
    blocks_of = [t.blocks if isinstance(t, Stacked) else [t] for t in terms]
    ends = [list(accumulate(block.left.shape[2] for block in blocks)) for blocks in blocks_of]
    cuts = sorted(set().union(*ends))
    found = []
    for start, end in pairwise([0, *cuts]):
        parts = []
        for blocks, block_ends in zip(blocks_of, ends, strict=True):
            i = bisect_left(block_ends, end)
            offset = block_ends[i] - blocks[i].left.shape[2]
            parts.append(Outer(blocks[i].left[..., start - offset : end - offset], blocks[i].right))
        found.append(Outer(torch.cat([x.left for x in parts], 1), torch.cat([x.right for x in parts], 1)))
    return found[0] if len(found) == 1 else Stacked(found)
