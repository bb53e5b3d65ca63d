"""Per-example gradients that are there themselves, and norms without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..norms import Length, Measured
from .arithmetic import clean_rows, flat_norm
from .cache import Memo
from .gram import lengths_of

# Numbers of all examples' gradients of one parameter up to which they are laid side by side with others' rather than looked at alone.
SMALL = 2**14


@dataclass
class Dense:
    """The per-example gradient itself, ``(B, *p.shape)``; where it was summed, what ``parts`` (B, ...) over which dimensions."""

    grad: torch.Tensor
    parts: tuple[tuple[torch.Tensor, tuple[int, ...]], ...] = ()

    keeps_instance = is_bf16 = False

    def __post_init__(self) -> None:
        if self.grad.dim() == 1:  # the parameter is a single number
            self.grad = self.grad[:, None]

    @property
    def flat(self) -> torch.Tensor:
        """(B, n)."""
        flat = self.grad.flatten(1)
        return flat if flat.dtype == torch.float32 else flat.float()

    @property
    def is_small(self) -> bool:
        return self.grad.numel() <= SMALL

    def measure(self, *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
        return Length(flat_norm(self.flat))

    def lengths(self, memo: Memo | None) -> list[torch.Tensor]:
        return [lengths_of(x, dims, memo) for x, dims in self.parts]

    def instance(self) -> Dense:
        return Dense(self.grad) if self.parts else self

    def weighted_sum(self, coef_b: torch.Tensor, memo: Memo | None = None) -> torch.Tensor:
        return torch.mv(self.flat.t(), coef_b).view(self.grad.shape[1:])

    def clean(self, bad_b: torch.Tensor) -> Dense:
        return Dense(clean_rows(self.grad, bad_b))


@dataclass
class Norm:
    """A norm without the gradient it is of, ``(B,)``: the only use of its parameter, in a pass that keeps nothing."""

    norm_b: torch.Tensor

    is_bf16 = False

    def __post_init__(self) -> None:
        if self.norm_b.dim() != 1:
            raise ValueError(f"a norm sampler gives one norm for each example, (B,); got a tensor of shape {tuple(self.norm_b.shape)}.")

    def measure(self, *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
        return Length(self.norm_b.float())

    def lengths(self, memo: Memo | None) -> list[torch.Tensor]:
        return []


def summed(x: torch.Tensor, dims: Sequence[int]) -> Dense:
    """``x`` (B, ...) summed over ``dims`` in float32: the gradient of what is added, or scales one by one."""
    return Dense(x.sum(tuple(dims), dtype=torch.float32), ((x, tuple(dims)),)) if dims else Dense(x.float())
