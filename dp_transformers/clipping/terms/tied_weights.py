"""Terms of a parameter that is used several times, such as tied weights: its gradient is the sum of the terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ..norms import GhostNorm, Measured
from ..precision import factor
from . import Convolved, Dense, LastResultCache, Outer, Routed, Rows, Stacked, Term
from .arithmetic import chunks, norms_over
from .outer import sum_in_blocks

_Joined = TypeVar("_Joined", Rows, Routed)


def merge(terms: Sequence[Term]) -> list[Term]:
    """Return the same sum with at most one term of each kind, by concatenating factors along the positions. A single
    term of its kind is not copied: a copy of a head's factors would take as much memory as all logits.

    Convolutions are concatenated along the images if their shapes are equal; otherwise their instances are added.
    """
    if len(terms) == 1:
        return list(terms)
    merged: list[Term] = []
    if outers := [t for t in terms if isinstance(t, Outer | Stacked)]:
        merged.append(sum_in_blocks(outers) if len(outers) > 1 else outers[0])
    if rows := [t for t in terms if isinstance(t, Rows)]:
        merged.append(_joined(rows, "ids", "grad") if len(rows) > 1 else rows[0])
    if routed := [t for t in terms if isinstance(t, Routed)]:
        merged.append(_joined(routed, "ids", "left", "right") if len(routed) > 1 else routed[0])
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


def _joined(terms: Sequence[_Joined], *factors: str) -> _Joined:
    """Concatenate terms along the positions of these factors."""
    return replace(terms[0], **{name: torch.cat([getattr(t, name) for t in terms], 1) for name in factors})


def norm_of_sum(terms: Sequence[Term], *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
    """Return the norm per example, in float32, of the sum of ``terms``, all uses of one parameter.

    An embedding tied to the head that reads it out is E + H with ‖E+H‖² = ‖E‖² + ‖H‖² + 2⟨E, H⟩, and
    ⟨E, H⟩ = sum_{t,s} left_H[t, id_s]·⟨right_H[t], grad_E[s]⟩ needs no (V, d) tensor. Other mixtures are instantiated.
    """
    terms = terms if len(terms) == 1 else merge(terms)
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
    """Return the only term of a parameter if it is a small gradient, for which the number of calls counts; else
    None."""
    return terms[0] if len(terms) == 1 and isinstance(terms[0], Dense) and terms[0].is_small else None


def position_norms(terms: Sequence[Term], cache: LastResultCache | None = None) -> torch.Tensor | None:
    """Return the (B, n) norms of the positions' parts of the gradient; None if they are unknown, or there are none."""
    lengths = [x for term in terms for x in term.position_norms(cache) if x.shape[1]]
    return (torch.cat(lengths, 1) if len(lengths) > 1 else lengths[0]) if lengths else None
