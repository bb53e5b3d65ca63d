"""Terms hold what one parameter's per-example gradient is made of; :class:`GradientTerm` lists what is asked of them.

A rule never returns a gradient of shape ``(B, *p.shape)`` unless that is the cheapest thing to have. It returns a
*term*: factors from which the squared norm per example, the instantiated gradient, and the weighted sum over examples
follow.

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
sum (adding squared norms is wrong in both directions), which :func:`.tied_weights.norm_of_sum` gives for any mixture.

All norms accumulate in fp32. Ghost norms follow Li et al. 2021 (arXiv 2110.05679, sec. 4); when the gradient is
instantiated instead is decided in :mod:`.ghost_or_instantiate`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..norms import Measured
from .cache import LastResultCache
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

    A term of a new family is a class with these members, a file beside the others and a case in
    :func:`.tied_weights.merge`.

    Attributes:
        is_bf16: Whether it is multiplied in bf16, so that sums may be off by its rounding.
        store_instantiated: Whether the gradients themselves take no more memory than the factors, and are kept in
            their place.
    """

    is_bf16: bool
    store_instantiated: bool

    def norm(self, *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
        """The norm of each example's gradient, in float32: by the cheaper way, or from the gradients themselves."""

    def position_norms(self, cache: LastResultCache | None) -> list[torch.Tensor]:
        """(B, n) each: the norms of the parts, by position, that the gradients are sums of."""

    def instantiate(self) -> Dense:
        """The gradients themselves."""

    def weighted_sum(self, coef_b: torch.Tensor, cache: LastResultCache | None = None) -> torch.Tensor:
        """The sum over examples of ``coef_b`` times their gradients, shaped like the parameter (or flat where that is
        told from it)."""

    def zero_examples(self, invalid_b: torch.Tensor) -> GradientTerm:
        """The same with zeros for the examples in ``invalid_b``, whose numbers are not finite."""


Term = Dense | NormOnly | Outer | Stacked | Rows | Routed | Convolved
