"""Sums of clipped gradients: in float32, and reduce-scattered if parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .parallel.dtensor import as_dtensor_like
from .precision import set_gradient, sum_dtype
from .trainable import TrainableParameters


class GradientSums:
    """Holds the clipped sum of each trainable parameter, where code that reads or writes ``p.grad`` cannot reach it.

    Under FSDP2, whole sums of several physical batches may be collected here before they are reduced.

    Attributes:
        reduces: True if sums of sharded parameters are reduce-scattered when they are added.
    """

    def __init__(self, trainable: TrainableParameters):
        self._trainable, self.reduces = trainable, True
        self._is_split = bool(trainable.shards or trainable.parallel)
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._unreduced: dict[nn.Parameter, torch.Tensor] = {}

    def __getitem__(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of a parameter, in float32 at least; None if nothing was added."""
        return self._sums.get(parameter)

    def order(self, summed: Iterable[nn.Parameter], group: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Return the order in which the sums of a group must be formed. Under FSDP2 it includes all parameters, since
        every rank takes part in every sum, in the same order."""
        return group if self._trainable.shards else list(summed)[::-1]

    def add(self, parameter: nn.Parameter, parts: Iterable[torch.Tensor], *, may_wait: bool = False) -> None:
        """Add the sum of ``parts``, which are consumed and freed one after the other.

        Args:
            may_wait: Keep a sharded sum whole while :attr:`reduces` is False.
        """
        shards = self._trainable.shards
        total = self.total(parameter, parts, self._unreduced.pop(parameter, None))
        if may_wait and not self.reduces and shards:
            if total is not None:
                self._unreduced[parameter] = total
            return
        if total is None:
            shape, dtype = self._layout(parameter)
            total = torch.zeros(shape, dtype=dtype, device=self._trainable.device)
        if self._is_split:
            total = shards.summed(parameter, total) if shards else as_dtensor_like(total, parameter)
        before = self._sums.get(parameter)
        self._sums[parameter] = total if before is None else before.add_(total)

    def total(
        self, parameter: nn.Parameter, parts: Iterable[torch.Tensor], total: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the sum of ``parts`` and ``total`` on this rank; None if there are none."""
        shape, dtype = self._layout(parameter)
        for part in parts:
            part = part.to(dtype).view(shape)
            total = part.contiguous() if total is None else total.add_(part)
        return total

    def _layout(self, parameter: nn.Parameter) -> tuple[torch.Size, torch.dtype]:
        shape = self._trainable.parallel.shape(parameter) if self._is_split else parameter.shape
        return shape, sum_dtype(parameter)

    def clear(self) -> None:
        """Forget all that was added."""
        self._sums, self._unreduced = {}, {}

    # ---- p.grad ----

    def take_gradients(self) -> None:
        """Move ``p.grad`` of every parameter into the sums."""
        for p in self._trainable.parameters:
            if p.grad is not None:
                self._sums[p], p.grad = p.grad, None

    def become_gradients(self) -> None:
        """Move the sums into ``p.grad``, which is None if nothing was added."""
        for p in self._trainable.parameters:
            set_gradient(p, self._sums.pop(p, None))

    @contextmanager
    def in_gradients(self) -> Iterator[None]:
        """Keep the sums in ``p.grad`` inside the context, where FSDP2's own backward pass adds to them."""
        self.become_gradients()
        try:
            yield
        finally:
            self.take_gradients()
