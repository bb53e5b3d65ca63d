"""Terms: the factors of one parameter's per-example gradients. :class:`GradientTerm` is their interface.

A rule does not return a gradient of shape ``(B, *p.shape)`` unless that is the cheapest form. It returns a *term*:
factors that give the squared norm per example, the instantiated gradient, and the weighted sum over examples.

Shape legend: b example, t and s positions, p rows and d columns of the parameter, v vocabulary, e experts; n images of
an example, c channels, k kernel.

=========  ==============================  ======================================================
term       factors                         per-example gradient
=========  ==============================  ======================================================
Outer      left_btp, right_btd             sum_t left[b, t, :] ⊗ right[b, t, :]     (p, d)
Stacked    one Outer for each block        the blocks' gradients, one below the other            (p, d)
Rows       ids_bt, grad_btd, num_rows      row v: sum of grad[b, t] over t with ids[b, t] == v   (v, d)
Routed     ids_bs, left_bsp, right_bsd     e: sum of left ⊗ right over s with ids[b, s] == e     (e, p, d)
Convolved  image_bnc.., grad_bnp.., how    Outer of grad and the patches of image it came from   (p, c, k...)
Dense      grad_b...                       itself
NormOnly   norm_b                          not known
=========  ==============================  ======================================================

The gradient of a parameter that is used several times is the *sum* of its uses' terms; its norm is the norm of that
sum (adding squared norms is wrong in both directions), which :func:`.tied_weights.norm_of_sum` computes for any
mixture.

All norms accumulate in fp32. Ghost norms follow Li et al. 2021 (arXiv 2110.05679, sec. 4).
:mod:`.arithmetic` decides when the gradient is instantiated instead.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..norms import Measured
from .arithmetic import LastResultCache, Regrouping
from .convolution import Convolution, Convolved
from .dense import Dense, NormOnly, summed
from .embedding import Rows
from .experts import Routed
from .outer import Outer, Stacked

__all__ = [
    "Convolution",
    "Convolved",
    "Dense",
    "GradientTerm",
    "LastResultCache",
    "NormOnly",
    "Outer",
    "Routed",
    "Rows",
    "Stacked",
    "Term",
    "summed",
]


class GradientTerm(Protocol):
    """The per-example gradients of one use of a parameter.

    To add a family of terms, write a class with these members in a new file of this folder, and add a case to
    :func:`.tied_weights.merge`.

    Attributes:
        is_bf16: True if factors are multiplied in bf16, so that sums have its rounding error.
        store_instantiated: True if the gradients take no more memory than the factors, and are kept instead.
    """

    is_bf16: bool
    store_instantiated: bool

    def norm(self, *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
        """Return the (B,) norms in float32, computed in the cheaper way, or from the gradients if ``instantiate``."""

    def position_norms(self, cache: LastResultCache | None) -> list[torch.Tensor]:
        """Return (B, n) norms of the positions' parts, if the gradients are sums over positions."""

    def instantiate(self) -> Dense:
        """Return the gradients."""

    def weighted_sum(self, coef_b: torch.Tensor, cache: LastResultCache | None = None) -> torch.Tensor:
        """Return the sum over examples of ``coef_b`` times their gradients, in the shape of the parameter, or flat."""

    def zero_examples(self, invalid_b: torch.Tensor) -> GradientTerm:
        """Return the same term with zeros for the examples in ``invalid_b``, whose numbers are not finite."""

    def regrouped(self, regrouping: Regrouping) -> GradientTerm:
        """Return the term of units, the sum of the terms of their rows."""


Term = Dense | NormOnly | Outer | Stacked | Rows | Routed | Convolved
