"""``p.grad += sum of clipped gradients``: in float32, reduce-scattered where parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .parallel.dtensor import as_dtensor_like
from .precision import set_gradient, sum_dtype
from .trainable import TrainableParameters


class GradientSums:
    """Adds clipped sums to the ``grad`` of the trainable parameters.

    Under FSDP2 sums may wait here, whole and for several physical batches, until one of them is reduced.
    """

    def __init__(self, trainable: TrainableParameters):
        self._trainable = trainable
        self._unreduced: dict[nn.Parameter, torch.Tensor] = {}
        self._watched: dict[
            nn.Parameter, tuple[torch.Tensor | None, int | None]
        ] = {}  # every grad and its version, while a backward pass runs

    def order(self, summed: Iterable[nn.Parameter], group: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The order in which the sums of these parameters of a group must be formed.

        Under FSDP2 every rank takes part in every sum, in one order, whatever its examples used.
        """
        return group if self._trainable.shards else list(summed)[::-1]

    def add(self, parameter: nn.Parameter, parts: Iterable[torch.Tensor], *, reduce: bool = True) -> None:
        """Add what ``parts`` come to; they are taken one after the other, and freed."""
        shards, parallel = self._trainable.shards, self._trainable.parallel
        total = self.total(parameter, parts, self._unreduced.pop(parameter, None))
        if shards and not reduce:
            if total is not None:
                self._unreduced[parameter] = total
            return
        if total is None:
            total = torch.zeros(parallel.shape(parameter), dtype=sum_dtype(parameter), device=self._trainable.device)
        total = shards.summed(parameter, total) if shards else as_dtensor_like(total, parameter)
        grad = total if parameter.grad is None else parameter.grad.add_(total)
        set_gradient(parameter, grad)
        if self._watched:
            self._watched[parameter] = grad, grad._version

    def total(
        self, parameter: nn.Parameter, parts: Iterable[torch.Tensor], total: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """What ``parts`` come to with ``total``, on this rank; None if there are none."""
        for part in parts:
            part = part.to(sum_dtype(parameter)).view(self._trainable.parallel.shape(parameter))
            total = part.contiguous() if total is None else total.add_(part)
        return total

    def watch(self) -> None:
        """Look from now on whether somebody else writes to a ``grad``."""
        self._watched = {p: (p.grad, None if p.grad is None else p.grad._version) for p in self._trainable.parameters}

    def find_foreign(self) -> nn.Parameter | None:
        """The first parameter whose ``grad`` somebody else wrote to since :meth:`watch`."""
        for p, (grad, version) in self._watched.items():
            if p.grad is not grad or (grad is not None and grad._version != version):
                return p
        return None

    def end_watch(self) -> None:
        self._watched = {}

    def clear(self) -> None:
        self._unreduced.clear()
