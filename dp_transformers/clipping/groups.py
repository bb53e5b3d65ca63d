"""Groups of parameters that are clipped separately, as the clipping function divides them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ..mechanism.clipping_functions import ClippingFunction
from .coefficients import checked_clipping
from .trainable import TrainableParameters


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
