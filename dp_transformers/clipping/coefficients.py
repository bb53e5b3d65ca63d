"""Clipping coefficients: the factor of each example's gradient, computed from its squared norm; and the groups of
parameters that are clipped separately, as the clipping function divides them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..mechanism.clipping_functions import ClippingFunction, FlatClipping, GroupedClipping
from .trainable import TrainableParameters

SMALLEST_BOUND = 1e-12


class Coefficients(NamedTuple):
    """(B,) gradient norms, (B,) factors of the gradients, and a (B,) mask of norms that are not finite (None: all
    are). Where rows are clipped by unit, these are (U,), and ``unit_of_row`` is (B,)."""

    norms_b: torch.Tensor
    of_sum_b: torch.Tensor
    invalid_b: torch.Tensor | None
    unit_of_row: torch.Tensor | None = None

    def of_rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the factor of each row of the batch, and the mask of those that are not finite."""
        if self.unit_of_row is None:
            return self.of_sum_b, self.invalid_b
        invalid_b = None if self.invalid_b is None else self.invalid_b[self.unit_of_row]
        return self.of_sum_b[self.unit_of_row], invalid_b


def coefficients(
    norm_sq_b: torch.Tensor,
    *,
    clipping: ClippingFunction | None,
    weights_b: torch.Tensor | None = None,
    unit_of_row: torch.Tensor | None = None,
) -> Coefficients:
    """Return each example's weight times the coefficient of ``clipping`` (None: 1, no clipping); 0 if the norm is not
    finite."""
    norms_b = norm_sq_b.sqrt()
    if clipping is None:
        coef_b = torch.ones_like(norms_b)
    else:  # bounded for any function, also at norms that it was not checked for, or that vanish in float32
        largest_b = clipping.sensitivity / norms_b.clamp(min=SMALLEST_BOUND)
        coef_b = torch.fmin(clipping.coefficients(norms_b), largest_b).clamp(min=0)
    coef_b = coef_b if weights_b is None else coef_b * weights_b
    invalid_b = None
    if not math.isfinite(norms_b.sum()):
        invalid_b = ~torch.isfinite(norms_b)
        coef_b = coef_b.masked_fill(invalid_b, 0.0)
    return Coefficients(norms_b, coef_b, invalid_b, unit_of_row)


def checked_clipping(clipping: float | ClippingFunction) -> ClippingFunction:
    """Return a clipping function, given itself or a bound. Raise ValueError if it is not a valid one."""
    bound = clipping.sensitivity if isinstance(clipping, ClippingFunction) else clipping
    if not (isinstance(bound, (int, float)) and SMALLEST_BOUND <= bound < float("inf")):
        raise ValueError(
            f"max_grad_norm must be a finite int or float of at least {SMALLEST_BOUND:g}, the bound on each example's "
            f"gradient (squares of smaller norms vanish in float32); got {bound!r}."
        )
    if not isinstance(clipping, ClippingFunction):
        return FlatClipping(float(bound))
    if isinstance(clipping, GroupedClipping):
        return clipping  # its groups are checked when they are made
    norms_b = torch.cat((torch.zeros(1, dtype=torch.float32), torch.logspace(-12, 12, 4801, dtype=torch.float32)))
    coef_b = clipping.coefficients(norms_b)
    if coef_b.shape != norms_b.shape or not bool(
        ((coef_b >= 0) & (coef_b * norms_b <= bound * (1 + 1e-5)) & coef_b.isfinite()).all()
    ):
        raise ValueError(
            f"the sensitivity of {clipping} is {bound:g}, but for some norm between 0 and 1e12 coefficient · norm is "
            "larger, or the coefficient is not a finite number of at least 0. Let coefficients(norms_b) return one "
            "such number for each norm, at 0 too."
        )
    alone_b = torch.cat([clipping.coefficients(some_b) for some_b in norms_b.split(700)])
    if alone_b.shape != coef_b.shape or not torch.allclose(alone_b, coef_b, rtol=1e-4, atol=0.0):
        raise ValueError(
            f"the coefficients of {clipping} depend on other norms of the batch, so one example would change what all "
            "others add. Let coefficients(norms_b) compute each number from its own norm alone; for a bound that "
            "follows a quantile of the norms take AdaptiveClipping."
        )
    return clipping


def checked_weights(weights: torch.Tensor | None, losses: torch.Tensor) -> torch.Tensor | None:
    """Return the weights as float32. Raise ValueError unless they are one number in [0, 1] for each loss."""
    if weights is None:
        return None
    weights = torch.as_tensor(weights, dtype=torch.float32)
    if weights.shape != losses.shape:
        raise ValueError(
            f"weights have shape {tuple(weights.shape)}, losses {tuple(losses.shape)}: give one weight for each "
            "example."
        )
    if not bool(((weights >= 0) & (weights <= 1)).all()):
        raise ValueError(
            "weights must lie in [0, 1]: a larger one would let an example contribute more than max_grad_norm."
        )
    return weights.to(losses.device)


class ParameterGroup(NamedTuple):
    """The parameters of one group.

    Attributes:
        clipping: The clipping function of their joint norm; None if nothing is clipped.
        noise_scale: Standard deviation of their noise over ``Mechanism.at(step).noise_std``.
    """

    parameters: Sequence[nn.Parameter]
    clipping: ClippingFunction | None = None
    noise_scale: float = 1.0


def parameter_groups(trainable: TrainableParameters, clipping: ClippingFunction) -> list[ParameterGroup]:
    """Divide the trainable parameters into the groups of ``clipping``.

    Raises:
        ValueError: a parameter is in no group or in several, or the noise does not cover the groups together.
    """
    by_name = {trainable.name_of(p): p for p in trainable.parameters}
    groups = clipping.groups({name: p.numel() for name, p in by_name.items()})
    counts = Counter(name for group in groups for name in group.names)
    if wrong := sorted(name for name in counts.keys() | by_name.keys() if counts[name] != (name in by_name)):
        raise ValueError(
            f"{clipping} has '{wrong[0]}' in {counts[wrong[0]]} of its groups: let groups(sizes) return each "
            "trainable parameter in one of its groups, and no other name."
        )
    together = math.hypot(*(group.clipping.sensitivity / group.noise_scale for group in groups))
    if not together <= clipping.sensitivity * (1 + 1e-6):
        raise ValueError(
            f"the sensitivity of {clipping} is {clipping.sensitivity:g}, but its groups together have {together:g}, "
            "the root of the sum of (sensitivity / noise_scale)²: the noise would be too little. Raise the "
            "noise_scale of its groups, or its sensitivity."
        )
    return [
        ParameterGroup([by_name[name] for name in group.names], checked_clipping(group.clipping), group.noise_scale)
        for group in groups
    ]
