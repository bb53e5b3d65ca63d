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
sum (adding squared norms is wrong in both directions), which :func:`norm_of_sum` gives for any mixture.

All norms accumulate in fp32. Ghost norms follow Li et al. 2021 (arXiv 2110.05679, sec. 4); the rule for when
instantiating is cheaper is by floating-point operations: T²(d+p) against T·d·p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..norms import GhostNorm, Measured
from ..precision import factor
from .arithmetic import chunks, norms_over
from .cache import LastResultCache
from .convolution import Convolution, Convolved
from .dense import Dense, NormOnly, summed
from .embedding import Rows
from .experts import Routed
from .outer import Outer, Stacked, sum_in_blocks

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
    "merge",
    "norm_of_sum",
    "position_norms",
    "small_gradient",
    "summed",
]


class GradientTerm(Protocol):
    """The per-example gradients of one use of a parameter.

    A term of a new family is a class with these members, a file beside the others and a case in :func:`merge`.

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


def merge(terms: Sequence[Term]) -> list[Term]:
    """The same sum with at most one term of each kind: factors of equal kind concatenate along the positions.

    Convolutions do along the images, where these are alike; else their instances are added.
    """
    if len(terms) == 1:
        return list(terms)
    merged: list[Term] = []
    if outers := [t for t in terms if isinstance(t, Outer | Stacked)]:
        merged.append(sum_in_blocks(outers))
    if rows := [t for t in terms if isinstance(t, Rows)]:
        ids, grad = torch.cat([t.ids for t in rows], 1), torch.cat([t.grad for t in rows], 1)
        merged.append(Rows(ids, grad, rows[0].num_rows))
    if routed := [t for t in terms if isinstance(t, Routed)]:
        ids, left, right = (
            torch.cat(parts, 1) for parts in zip(*((t.ids, t.left, t.right) for t in routed), strict=True)
        )
        merged.append(Routed(ids, left, right, routed[0].num_experts))
    dense = [t for t in terms if isinstance(t, Dense)]
    if convolved := [t for t in terms if isinstance(t, Convolved)]:
        if len({(t.image.shape, t.how) for t in convolved}) == 1:
            image, grad = torch.cat([t.image for t in convolved], 1), torch.cat([t.grad for t in convolved], 1)
            merged.append(Convolved(image, grad, convolved[0].how))
        else:
            dense += [t.instantiate() for t in convolved]
    if dense:
        grads = [t.grad.view_as(dense[0].grad) for t in dense]  # an instance may be flat, as (b, p, d)
        parts = tuple(x for t in dense for x in t.parts)
        merged.append(Dense(torch.stack(grads).sum(0), parts) if len(dense) > 1 else dense[0])
    return merged


def norm_of_sum(terms: Sequence[Term], *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
    """The norm per example of the sum of ``terms``, all uses of one parameter, in float32.

    An embedding tied to the head that reads it out is E + H with ‖E+H‖² = ‖E‖² + ‖H‖² + 2⟨E, H⟩, and
    ⟨E, H⟩ = sum_{t,s} left_H[t, id_s]·⟨right_H[t], grad_E[s]⟩ needs no (V, d) tensor. Other mixtures are instantiated.
    """
    terms = merge(terms)
    if len(terms) == 1:
        return terms[0].norm(instantiate=instantiate, cache=cache)
    outer, rows, *others = terms
    if instantiate or others or not (isinstance(outer, Outer) and isinstance(rows, Rows)):
        total = terms[0].instantiate().grad.flatten(1)
        for term in terms[1:]:
            total = total + term.instantiate().grad.flatten(1)
        return Dense(total).norm()
    cross_b, lengths = [], []
    (b, t), s, (p, _d) = outer.left.shape[:2], rows.ids.shape[1], (outer.left.shape[2], outer.right.shape[2])
    for chunk in chunks(b, 4 * (2 * t * s + (t * p if outer.left.dtype != torch.float32 else 0))):
        left, right = (factor(x[chunk], bf16=outer.is_bf16).float() for x in (outer.left, outer.right))
        grad, ids = rows.grad[chunk].float(), rows.ids[chunk]
        picked_bts = left.gather(2, ids[:, None, :].expand(-1, t, -1))
        cross_b.append((picked_bts * torch.bmm(right, grad.mT)).sum((1, 2)))
        lengths.append(torch.cat([norms_over(left, [2]) * norms_over(right, [2]), norms_over(grad, [2])], 1))
    norm_sq_b = outer.norm().squared() + rows.norm().squared() + 2 * torch.cat(cross_b)
    return GhostNorm.between(norm_sq_b, torch.cat(lengths))  # the two uses may cancel


def small_gradient(terms: Sequence[Term]) -> Dense | None:
    """The one term of a parameter, if that is a gradient so small that calls count more than numbers."""
    return terms[0] if len(terms) == 1 and isinstance(terms[0], Dense) and terms[0].is_small else None


def position_norms(terms: Sequence[Term], cache: LastResultCache | None = None) -> torch.Tensor | None:
    """(B, n): how long every position's part of the gradient is; None where that is not known, or there are no
    positions."""
    lengths = [x for term in terms for x in term.position_norms(cache) if x.shape[1]]
    return (torch.cat(lengths, 1) if len(lengths) > 1 else lengths[0]) if lengths else None
