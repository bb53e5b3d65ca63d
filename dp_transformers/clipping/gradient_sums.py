"""The sums of clipped gradients while they grow: in float32, reduce-scattered where parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .parallel.dtensor import as_dtensor_like
from .precision import set_gradient, sum_dtype
from .trainable import TrainableParameters


class GradientSums:
    """Holds the clipped sum of each trainable parameter, out of reach of whatever reads or writes ``p.grad``.

    Under FSDP2 whole sums of several physical batches may wait here until one of them is reduced.

    Attributes:
        reduces: Whether sums of sharded parameters are reduce-scattered when they are added, or wait.
    """

    def __init__(self, trainable: TrainableParameters):
        self._trainable, self.reduces = trainable, True
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._unreduced: dict[nn.Parameter, torch.Tensor] = {}

    def __getitem__(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of a parameter, in float32 at least; None where nothing was added."""
        return self._sums.get(parameter)

    def order(self, summed: Iterable[nn.Parameter], group: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The order in which the sums of these parameters of a group must be formed.

        Under FSDP2 every rank takes part in every sum, in one order, whatever its examples used.
        """
        return group if self._trainable.shards else list(summed)[::-1]

    def add(self, parameter: nn.Parameter, parts: Iterable[torch.Tensor], *, may_wait: bool = False) -> None:
        """Add what ``parts`` come to; they are taken one after the other, and freed.

        Args:
            may_wait: Leave a sharded sum whole while :attr:`reduces` is not set.
        """
        shards, parallel = self._trainable.shards, self._trainable.parallel
        total = self.total(parameter, parts, self._unreduced.pop(parameter, None))
        if shards and may_wait and not self.reduces:
            if total is not None:
                self._unreduced[parameter] = total
            return
        if total is None:
            total = torch.zeros(parallel.shape(parameter), dtype=sum_dtype(parameter), device=self._trainable.device)
        total = shards.summed(parameter, total) if shards else as_dtensor_like(total, parameter)
        before = self._sums.get(parameter)
        self._sums[parameter] = total if before is None else before.add_(total)

    def total(
        self, parameter: nn.Parameter, parts: Iterable[torch.Tensor], total: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """What ``parts`` come to with ``total``, on this rank; None if there are none."""
        for part in parts:
            part = part.to(sum_dtype(parameter)).view(self._trainable.parallel.shape(parameter))
            total = part.contiguous() if total is None else total.add_(part)
        return total

    def clear(self) -> None:
        """Forget all that was added."""
        self._sums, self._unreduced = {}, {}

    # ---- p.grad ----

    def take_gradients(self) -> None:
        """Go on from what ``p.grad`` holds, which is None afterwards."""
        for p in self._trainable.parameters:
            if p.grad is not None:
                self._sums[p], p.grad = p.grad, None

    def become_gradients(self) -> None:
        """Make ``p.grad`` of every trainable parameter its sum, None where nothing was added, and forget the sums."""
        for p in self._trainable.parameters:
            set_gradient(p, self._sums.pop(p, None))

    @contextmanager
    def in_gradients(self) -> Iterator[None]:
        """Inside, the sums are in ``p.grad``, where FSDP2's own backward pass adds to them."""
        self.become_gradients()
        try:
            yield
        finally:
            self.take_gradients()
