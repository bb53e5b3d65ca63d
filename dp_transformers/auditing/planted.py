"""Faults that are planted in a private step, to see which of them an audit notices at its cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..mechanism.clipping_functions import NOT_CLIPPED, ClippingFunction, FlatClipping, PerGroupClipping
from ..noise.generators import GaussianNoise
from .one_step import OneStep

Tensors = list[torch.Tensor]


def _noise(one: OneStep, add: Callable[[Any, Tensors, float], None]) -> None:
    """Let ``add(source, tensors, std)`` add the noise of each step, in the place of the source."""

    class Faulty:
        source = one.step._noise

        def add_(self, grads: Sequence[torch.Tensor], /, std: float) -> None:
            add(self.source, list(grads), std)

    one.step._noise = Faulty()


def _drawn(source: Any, tensors: Tensors, std: float) -> Tensors:
    noise = [torch.zeros_like(x) for x in tensors]
    source.add_(noise, std)
    return noise


def _halved(one: OneStep) -> None:
    _noise(one, lambda source, tensors, std: source.add_(tensors, std / 2))


def _reused(one: OneStep) -> None:
    kept: Tensors = []

    def add(source: Any, tensors: Tensors, std: float) -> None:
        kept[:] = kept or _drawn(source, tensors, std)
        torch._foreach_add_(tensors, kept)

    _noise(one, add)


def _rank_without_noise(one: OneStep) -> None:
    """Leave the second half of every parameter without noise, as if the second of two ranks that hold shards added
    none."""

    def add(source: Any, tensors: Tensors, std: float) -> None:
        for x, noise in zip(tensors, _drawn(source, tensors, std), strict=True):
            x.view(-1)[: (x.numel() + 1) // 2] += noise.view(-1)[: (x.numel() + 1) // 2]

    _noise(one, add)


def _known_seed(one: OneStep) -> None:
    one.step._noise = GaussianNoise(entropy=[42])


def _clipping(one: OneStep, other: Callable[[ClippingFunction], ClippingFunction]) -> None:
    """Clip by another function than the one that noise is made for."""
    clipper: Any = one.step.clipper
    backward = clipper.backward
    clipper.backward = lambda *args, clipping, **options: backward(*args, clipping=other(clipping), **options)


def _unclipped(one: OneStep) -> None:
    """Leave the largest parameter out of norms and clipping."""
    named = [(name, p.numel()) for name, p in one.step.clipper.model.named_parameters() if p.requires_grad]
    largest = re.escape(max(named, key=lambda each: each[1])[0])
    _clipping(one, lambda f: PerGroupClipping(((f"^{largest}$", NOT_CLIPPED), ("", FlatClipping(f.sensitivity)))))


def _twice(one: OneStep) -> None:
    one.copies = 2


def _fixed_batches(one: OneStep) -> None:
    one.sizes = [round(one.step.run.mechanism.sampling.expected_batch_size)] * len(one.sizes)


FAULTS: dict[str, Callable[[OneStep], None]] = {
    "noise halved": _halved,
    "noise reused in every step": _reused,
    "a rank without noise": _rank_without_noise,
    "noise from a known seed": _known_seed,
    "clipping off": lambda one: _clipping(one, lambda clipping: NOT_CLIPPED),
    "clipped at 2C, noise for C": lambda one: _clipping(one, lambda f: f.scaled_to(2 * f.sensitivity)),
    "an unclipped parameter": _unclipped,
    "a row twice in a draw": _twice,
    "fixed batches": _fixed_batches,
}
