"""Terms of embeddings, which add gradients to rows of the parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..norms import Measured
from .arithmetic import (
    LastResultCache,
    Regrouping,
    chunks,
    flat_norm,
    joined,
    norms_over,
    sum_rows,
    summed_anew,
    zero_rows,
)
from .dense import Dense
from .gram import lengths_of


@dataclass
class Rows:
    """The term of an embedding: gradients are added to rows of the parameter. It equals an Outer with one-hot
    ``left``, which is never built."""

    ids: torch.Tensor
    grad: torch.Tensor
    num_rows: int

    store_instantiated = is_bf16 = False

    def __post_init__(self) -> None:
        assert self.ids.dim() == 2 and self.grad.dim() == 3 and self.ids.shape == self.grad.shape[:2]

    def norm(self, *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
        (b, t), d = self.ids.shape, self.grad.shape[2]
        if instantiate:
            parts = chunks(b, 4 * self.num_rows * d)
            return joined([Rows(self.ids[r], self.grad[r], self.num_rows).instantiate().norm() for r in parts])
        if t == 1:
            return Dense(self.grad).norm()
        # Positions of one example with the same id share a slot; the slots of an example are the rows of its gradient.
        sorted_ids, order = self.ids.sort(dim=1)
        is_repeated = sorted_ids[:, 1:] == sorted_ids[:, :-1]
        slot_sorted = torch.zeros_like(sorted_ids)
        slot_sorted[:, 1:] = (~is_repeated).cumsum(1)
        slot = torch.empty_like(slot_sorted).scatter_(1, order, slot_sorted)
        slot += torch.arange(b, device=slot.device)[:, None] * t
        lengths_bt = norms_over(self.grad, [2])
        if slot.device.type != "cpu":
            return summed_anew(flat_norm(sum_rows(self.grad, slot, b * t).view(b, t * d)), lengths_bt)
        # Without the cost of a synchronisation, only rows with several positions are summed.
        shares = torch.zeros_like(self.ids, dtype=torch.bool)
        shares[:, 1:] = is_repeated
        shares[:, :-1] |= is_repeated
        shares = torch.empty_like(shares).scatter_(1, order, shares)
        slots, row = slot[shares].unique(return_inverse=True)
        rows = sum_rows(self.grad[shares], row, len(slots))
        norm_sq_b = lengths_bt.square().masked_fill_(shares, 0.0).sum(1)
        norm_sq_b.index_add_(0, slots // t, torch.linalg.vector_norm(rows, dim=1).square())
        return summed_anew(norm_sq_b.sqrt_(), lengths_bt)

    def position_norms(self, cache: LastResultCache | None) -> list[torch.Tensor]:
        return [lengths_of(self.grad, (1,), None)]

    def instantiate(self) -> Dense:
        b, d = len(self.ids), self.grad.shape[2]
        offset_b = torch.arange(b, device=self.ids.device)[:, None] * self.num_rows
        return Dense(sum_rows(self.grad, self.ids + offset_b, b * self.num_rows).view(b, self.num_rows, d))

    def weighted_sum(self, coef_b: torch.Tensor, cache: LastResultCache | None = None) -> torch.Tensor:
        return sum_rows(self.grad.float() * coef_b[:, None, None], self.ids, self.num_rows)

    def zero_examples(self, invalid_b: torch.Tensor) -> Rows:
        return Rows(self.ids, zero_rows(self.grad, invalid_b), self.num_rows)

    def regrouped(self, regrouping: Regrouping) -> Rows:
        return Rows(regrouping.joined(self.ids), regrouping.joined(self.grad), self.num_rows)
