"""Clipping functions as values: how much of an example's gradient enters the sum, and what one example can add to it.
Free of torch.

A function of your own is a frozen dataclass derived from :class:`ClippingFunction`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..values import Value

if TYPE_CHECKING:
    from torch import Tensor


class ClippingFunction(Value):
    """Says what each example's gradient is multiplied with, given its norm.

    Attributes:
        sensitivity: The largest L2 norm that coefficient · gradient can have, for any gradient. Noise is scaled by it.
    """

    sensitivity: float

    def at(self, step: int) -> ClippingFunction:
        """The function of a step, counted from 0; one that changes on the way overrides this."""
        return self

    def coefficients(self, norms_b: Tensor) -> Tensor:
        """(B,) the coefficients of gradients with the norms ``norms_b``; coefficient · norm is ``sensitivity`` at
        most."""
        raise NotImplementedError


@dataclass(frozen=True)
class FlatClipping(ClippingFunction):
    """min(1, C / norm), with one bound C on the norm over all trainable parameters (Abadi et al. 2016, arXiv
    1607.00133).

    Example::

        >>> import torch
        >>> from dp_transformers import FlatClipping
        >>> FlatClipping(1.0).coefficients(torch.tensor([0.5, 1.0, 4.0]))
        tensor([1.0000, 1.0000, 0.2500])
    """

    kind: ClassVar[str] = "flat"
    max_grad_norm: float

    def __post_init__(self) -> None:
        if not (isinstance(self.max_grad_norm, (int, float)) and 0 < self.max_grad_norm < float("inf")):
            raise ValueError(
                "max_grad_norm is the bound on the norm of an example's gradient and must be a positive, finite "
                f"number, got {self.max_grad_norm!r}; 1.0 is common."
            )

    @property
    # pyrefly: ignore[bad-override]  (of a frozen class, where nobody assigns to either)
    def sensitivity(self) -> float:
        return self.max_grad_norm

    def coefficients(self, norms_b: Tensor) -> Tensor:
        return (self.max_grad_norm / norms_b).clamp(max=1.0)
