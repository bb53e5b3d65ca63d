"""Terms of the weights of experts, to which slots of an example are routed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..norms import DirectNorm, Measured
from ..precision import factor, is_bf16, product, split
from .arithmetic import LastResultCache, Regrouping, chunks, is_smaller_instantiated, sum_of, zero_rows
from .dense import Dense
from .gram import lengths_of
from .outer import Outer


@dataclass
class Routed:
    """The term of the weights of experts, (num_experts, p, d): every routed slot of an example adds an outer product
    to its expert. With ``experts_last``, the parameter holds (p, d, num_experts), in any number of dimensions."""

    ids: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    num_experts: int
    experts_last: bool = False

    def __post_init__(self) -> None:
        assert self.ids.shape == self.left.shape[:2] == self.right.shape[:2]

    @cached_property
    def is_bf16(self) -> bool:
        return is_bf16(self.left, self.right)

    @property
    def store_instantiated(self) -> bool:
        numbers = self.num_experts * self.left.shape[2] * self.right.shape[2]
        return is_smaller_instantiated(self.left, self.right, numbers)

    def norm(self, *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
        """Return the norms. Experts do not overlap, so each expert that an example uses is an Outer over its slots.

        These are batched by size, rounded up to powers of two, so that padding at most doubles them and uneven routing
        costs little.
        """
        b = len(self.ids)
        norm_sq_b = torch.zeros(b, dtype=torch.float32, device=self.left.device)
        pair_of_slot = (self.ids + torch.arange(b, device=self.ids.device)[:, None] * self.num_experts).flatten()
        pairs, order = pair_of_slot.sort()
        pairs, sizes = pairs.unique_consecutive(return_counts=True)
        first, width_of = sizes.cumsum(0) - sizes, torch.frexp((sizes - 1).float()).exponent  # ceil(log2(size))
        for exponent in width_of.unique().tolist():
            members = (width_of == exponent).nonzero().squeeze(1)
            offset = torch.arange(2**exponent, device=order.device)
            padding = (offset >= sizes[members, None]).unsqueeze(-1)
            slots = order[(first[members, None] + offset).clamp(max=len(order) - 1)]
            for rows in chunks(len(members), 4 * len(offset) * (self.left.shape[2] + self.right.shape[2])):
                left, right = (
                    x.flatten(0, 1)[slots[rows]].masked_fill(padding[rows], 0) for x in (self.left, self.right)
                )
                norm_sq = Outer(left, right).norm(instantiate=instantiate).squared()
                norm_sq_b.index_add_(0, pairs[members[rows]] // self.num_experts, norm_sq)
        return DirectNorm(norm_sq_b.sqrt_())

    def position_norms(self, cache: LastResultCache | None) -> list[torch.Tensor]:
        return [lengths_of(self.left, (1,), None) * lengths_of(self.right, (1,), None)]

    def instantiate(self) -> Dense:
        b, p, d = len(self.ids), self.left.shape[2], self.right.shape[2]
        offset_b = torch.arange(b, device=self.ids.device)[:, None] * self.num_experts
        left, right = (factor(x, bf16=self.is_bf16) for x in (self.left, self.right))
        by_id = _sum_by_id(self.ids + offset_b, left, right, b * self.num_experts, bf16=self.is_bf16)
        return Dense(self._as_held(by_id.view(b, self.num_experts, p, d)))

    def weighted_sum(self, coef_b: torch.Tensor, cache: LastResultCache | None = None) -> torch.Tensor:
        bf16 = self.is_bf16
        left, right = (factor(x, bf16=bf16) for x in (self.left, self.right))
        smaller = left if left.shape[2] < right.shape[2] else right
        parts = split(smaller * coef_b[:, None, None], bf16=bf16)
        pairs = [(part, right) if smaller is left else (left, part) for part in parts]
        return self._as_held(sum_of(_sum_by_id(self.ids, x, y, self.num_experts, bf16=bf16) for x, y in pairs))

    def _as_held(self, by_expert: torch.Tensor) -> torch.Tensor:
        """Bring (..., num_experts, p, d) into the order of the parameter."""
        return by_expert.movedim(-3, -1).contiguous() if self.experts_last else by_expert

    def zero_examples(self, invalid_b: torch.Tensor) -> Routed:
        return replace(self, left=zero_rows(self.left, invalid_b), right=zero_rows(self.right, invalid_b))

    def regrouped(self, regrouping: Regrouping) -> Routed:
        return replace(self, **{name: regrouping.joined(getattr(self, name)) for name in ("ids", "left", "right")})


def _sum_by_id(
    ids_bs: torch.Tensor, left_bsp: torch.Tensor, right_bsd: torch.Tensor, num_ids: int, *, bf16: bool
) -> torch.Tensor:
    """Return (num_ids, p, d): for each id the sum of left ⊗ right over its slots, as one matrix product."""
    ids, order = ids_bs.flatten().sort()
    left, right = left_bsp.flatten(0, 1)[order], right_bsd.flatten(0, 1)[order]
    total = left.new_zeros(num_ids, left.shape[1], right.shape[1], dtype=torch.float32)
    start = 0
    for i, size in enumerate(torch.bincount(ids, minlength=num_ids).tolist()):
        if size:
            total[i] = product(left[start : start + size].t(), right[start : start + size], bf16=bf16)
        start += size
    return total
