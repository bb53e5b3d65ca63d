"""Terms that hold per-example gradients, or only their norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..norms import DirectNorm, Measured
from .arithmetic import LastResultCache, Regrouping, flat_norm, zero_rows
from .gram import lengths_of

# Gradients of one parameter up to this size are concatenated with those of other parameters.
MAX_BATCHED_NUMEL = 2**14


@dataclass
class Dense:
    """The per-example gradients, ``(B, *p.shape)``.

    Attributes:
        parts: If the gradients were summed: the summed (B, ...) tensors, and the dimensions of the sums.
    """

    grad: torch.Tensor
    parts: tuple[tuple[torch.Tensor, tuple[int, ...]], ...] = ()

    store_instantiated = is_bf16 = False

    def __post_init__(self) -> None:
        if self.grad.dim() == 1:  # the parameter is a single number
            self.grad = self.grad[:, None]

    @property
    def flat(self) -> torch.Tensor:
        """The (B, n) gradients in float32."""
        flat = self.grad.flatten(1)
        return flat if flat.dtype == torch.float32 else flat.float()

    @property
    def _transposed(self) -> Dense | None:
        """The gradient of the transposed weight, if that is contiguous in memory, else None."""
        is_transposed = self.grad.dim() == 3 and not self.grad.is_contiguous() and self.grad.mT.is_contiguous()
        return Dense(self.grad.mT) if is_transposed else None

    @property
    def is_small(self) -> bool:
        return self.grad.numel() <= MAX_BATCHED_NUMEL

    def norm(self, *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
        return DirectNorm(flat_norm((self._transposed or self).flat))

    def position_norms(self, cache: LastResultCache | None) -> list[torch.Tensor]:
        return [lengths_of(x, dims, cache) for x, dims in self.parts]

    def instantiate(self) -> Dense:
        return Dense(self.grad) if self.parts else self

    def weighted_sum(self, coef_b: torch.Tensor, cache: LastResultCache | None = None) -> torch.Tensor:
        if (transposed := self._transposed) is not None:
            return transposed.weighted_sum(coef_b).t().contiguous()
        return torch.mv(self.flat.t(), coef_b).view(self.grad.shape[1:])

    def zero_examples(self, invalid_b: torch.Tensor) -> Dense:
        return Dense(zero_rows(self.grad, invalid_b))

    def regrouped(self, regrouping: Regrouping) -> Dense:
        grad = regrouping.apart(self.grad)
        parts = tuple((regrouping.apart(x), (1, *(dim + 1 for dim in dims))) for x, dims in self.parts)
        return Dense(grad.sum(1, dtype=torch.float32), parts or ((grad, (1,)),))


@dataclass
class NormOnly:
    """(B,) norms without gradients, for the only use of a parameter, in a pass that keeps nothing."""

    norm_b: torch.Tensor

    store_instantiated = is_bf16 = False

    def norm(self, *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
        return DirectNorm(self.norm_b.float())

    def position_norms(self, cache: LastResultCache | None) -> list[torch.Tensor]:
        return []

    def instantiate(self) -> Dense:
        raise TypeError(
            "a function registered with register_norm_sampler gave only norms, but gradients are needed: use "
            "clipping_mode='book_keeping', which asks for gradients, or register no norm sampler for this layer."
        )

    def weighted_sum(self, coef_b: torch.Tensor, cache: LastResultCache | None = None) -> torch.Tensor:
        return self.instantiate().weighted_sum(coef_b, cache)

    def zero_examples(self, invalid_b: torch.Tensor) -> NormOnly:
        return NormOnly(zero_rows(self.norm_b, invalid_b))

    def regrouped(self, regrouping: Regrouping) -> Dense:
        return self.instantiate()


def summed(x: torch.Tensor, dims: Sequence[int]) -> Dense:
    """Sum ``x`` (B, ...) over ``dims`` in float32: the gradient of a bias, or of an elementwise scale."""
    return Dense(x.sum(tuple(dims), dtype=torch.float32), ((x, tuple(dims)),)) if dims else Dense(x.float())
