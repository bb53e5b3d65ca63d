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
class BoundedNorm(ClippingFunction):
    """A base of functions with one bound C on the norm over all trainable parameters, ``max_grad_norm``."""

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


@dataclass(frozen=True)
class FlatClipping(BoundedNorm):
    """min(1, C / norm): what is longer than C becomes C long (Abadi et al. 2016, arXiv 1607.00133).

    Example::

        >>> import torch
        >>> from dp_transformers import FlatClipping
        >>> FlatClipping(1.0).coefficients(torch.tensor([0.5, 1.0, 4.0]))
        tensor([1.0000, 1.0000, 0.2500])
    """

    kind: ClassVar[str] = "flat"

    def coefficients(self, norms_b: Tensor) -> Tensor:
        return (self.max_grad_norm / norms_b).clamp(max=1.0)


@dataclass(frozen=True)
class AutomaticClipping(BoundedNorm):
    """C / (norm + γ), AUTO-S: gradients that are longer than γ become nearly C long, short ones too, so that C is no
    more than a factor of the learning rate (Bu et al. 2023, arXiv 2206.07136).

    Example::

        >>> import torch
        >>> from dp_transformers import AutomaticClipping
        >>> AutomaticClipping(1.0).coefficients(torch.tensor([0.0, 0.49, 3.99]))
        tensor([100.0000,   2.0000,   0.2500])
    """

    kind: ClassVar[str] = "auto_s"
    gamma: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma < float("inf"):
            raise ValueError(
                f"gamma must be a positive, finite number, got {self.gamma!r}; 0.01 is common, and NormalisedClipping "
                "has none."
            )

    def coefficients(self, norms_b: Tensor) -> Tensor:
        return self.max_grad_norm / (norms_b + self.gamma)


@dataclass(frozen=True)
class NormalisedClipping(BoundedNorm):
    """C / norm, AUTO-V: every gradient becomes C long, unless it is 0 (Bu et al. 2023, arXiv 2206.07136). Those below
    1e-12, whose squares come near to the end of float32, stay in proportion.

    Example::

        >>> import torch
        >>> from dp_transformers import NormalisedClipping
        >>> NormalisedClipping(1.0).coefficients(torch.tensor([0.5, 1.0, 4.0]))
        tensor([2.0000, 1.0000, 0.2500])
    """

    kind: ClassVar[str] = "normalised"

    def coefficients(self, norms_b: Tensor) -> Tensor:
        return self.max_grad_norm / norms_b.clamp(min=1e-12)


@dataclass(frozen=True)
class PerSampleAdaptiveClipping(BoundedNorm):
    """C / (norm + r / (norm + r)), DP-PSAC: long gradients become nearly C long, and the shortest, whose directions
    say little, are multiplied with C alone (Xia et al. 2023, arXiv 2212.00328).

    Example::

        >>> import torch
        >>> from dp_transformers import PerSampleAdaptiveClipping
        >>> PerSampleAdaptiveClipping(1.0, r=0.5).coefficients(torch.tensor([0.0, 0.5, 99.5]))
        tensor([1.0000, 1.0000, 0.0100])
    """

    kind: ClassVar[str] = "dp_psac"
    r: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.r <= 1:
            raise ValueError(f"r must be above 0 and at most 1, got {self.r!r}; 0.1 is common.")

    def coefficients(self, norms_b: Tensor) -> Tensor:
        return self.max_grad_norm / (norms_b + self.r / (norms_b + self.r))


CLIPPING_FUNCTIONS: dict[str, type[BoundedNorm]] = {
    function.kind: function
    for function in (FlatClipping, AutomaticClipping, NormalisedClipping, PerSampleAdaptiveClipping)
}
