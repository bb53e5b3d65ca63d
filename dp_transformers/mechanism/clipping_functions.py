"""Clipping functions as values: they bound what one example adds to the sum of gradients. Free of torch.

To write your own, derive a frozen dataclass from :class:`ClippingFunction`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .schedules import Schedule
from .values import Value, require_positive

if TYPE_CHECKING:
    from torch import Tensor


class ClippingFunction(Value):
    """Maps the norm of an example's gradient to the coefficient that multiplies this gradient.

    Attributes:
        sensitivity: Largest L2 norm of coefficient · gradient, over all gradients. Noise is scaled by it.
        release_noise_multipliers: Noise multipliers of further releases in each step that the function adapts to. ε
            covers them too.
    """

    sensitivity: float
    release_noise_multipliers: tuple[float, ...] = ()

    def at(self, step: int) -> ClippingFunction:
        """Return the function of a step, counted from 0. A function that changes over the steps overrides this."""
        return self

    def coefficients(self, norms_b: Tensor) -> Tensor:
        """Return the (B,) coefficients of gradients with norms ``norms_b``: coefficient · norm is at most
        ``sensitivity``."""
        raise NotImplementedError(f"{type(self).__name__} must define coefficients(norms_b).")

    def scaled_to(self, sensitivity: float) -> ClippingFunction:
        """Return the same function with another sensitivity."""
        return replace(self, sensitivity=sensitivity)  # pyrefly: ignore[bad-argument-type]  (a dataclass)

    def groups(self, sizes: Mapping[str, int]) -> Sequence[Group]:
        """Divide the trainable parameters, given by name and number of coordinates, into groups that are clipped
        separately. By default there is one group."""
        return [Group(tuple(sizes), self)]


class Group(NamedTuple):
    """Parameters that are clipped together.

    Attributes:
        names: Their names in the model.
        clipping: The clipping function of their joint norm.
        noise_scale: Standard deviation of their noise, over noise multiplier times the sensitivity of all groups
            together. That sensitivity is the root of the sum of (sensitivity / noise_scale)² over the groups.
    """

    names: Sequence[str]
    clipping: ClippingFunction
    noise_scale: float = 1.0


@dataclass(frozen=True)
class BoundedNorm(ClippingFunction):
    """Base of functions with one bound C (``max_grad_norm``) on the norm over all trainable parameters."""

    max_grad_norm: float

    def __post_init__(self) -> None:
        if not (isinstance(self.max_grad_norm, (int, float)) and 0 < self.max_grad_norm < float("inf")):
            raise ValueError(
                "max_grad_norm is the bound on the norm of an example's gradient and must be a positive, finite int "
                f"or float, got {self.max_grad_norm!r}; 1.0 is common. Only noise_multiplier=0 goes without one (inf)."
            )

    @property
    # pyrefly: ignore[bad-override]  (the class is frozen)
    def sensitivity(self) -> float:
        return self.max_grad_norm

    def scaled_to(self, sensitivity: float) -> ClippingFunction:
        return replace(self, max_grad_norm=sensitivity)


@dataclass(frozen=True)
class FlatClipping(BoundedNorm):
    """min(1, C / norm): gradients longer than C are scaled to norm C (Abadi et al. 2016, arXiv 1607.00133).

    Example::

        >>> import torch
        >>> from dp_transformers import FlatClipping
        >>> FlatClipping(1.0).coefficients(torch.tensor([0.5, 1.0, 4.0]))
        tensor([1.0000, 1.0000, 0.2500])
    """

    kind: ClassVar[str] = "flat"

    def coefficients(self, norms_b: Tensor) -> Tensor:
        return (self.max_grad_norm / norms_b).clamp(max=1.0)


NOT_CLIPPED = FlatClipping(1e30)  # no gradient is so long, and JSON has no infinity


@dataclass(frozen=True)
class AutomaticClipping(BoundedNorm):
    """C / (norm + γ), AUTO-S: gradients longer than γ get a norm of nearly C, also those shorter than C, so that C
    only scales the learning rate (Bu et al. 2023, arXiv 2206.07136).

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
                f"gamma of {type(self).__name__} must be a positive, finite number, got {self.gamma!r}; 0.01 is "
                "common, and NormalisedClipping has none."
            )

    def coefficients(self, norms_b: Tensor) -> Tensor:
        return self.max_grad_norm / (norms_b + self.gamma)


@dataclass(frozen=True)
class NormalisedClipping(BoundedNorm):
    """C / norm, AUTO-V: every gradient but 0 gets norm C (Bu et al. 2023, arXiv 2206.07136). Norms below 1e-12, whose
    squares are near the limit of float32, are scaled by C / 1e-12.

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
    """C / (norm + r / (norm + r)), DP-PSAC: long gradients get a norm of nearly C, and the shortest, which carry
    little information, are multiplied by C only (Xia et al. 2023, arXiv 2212.00328).

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
            raise ValueError(
                f"r of {type(self).__name__} must be above 0 and at most 1, got {self.r!r}; 0.1 is common."
            )

    def coefficients(self, norms_b: Tensor) -> Tensor:
        return self.max_grad_norm / (norms_b + self.r / (norms_b + self.r))


@dataclass(frozen=True)
class AdaptiveClipping(FlatClipping):
    """min(1, C / norm) with a bound that follows a quantile of the norms: after each step, C becomes C · exp(-η(b̃ -
    γ)), where b̃ is the noised share of norms in the draw that were at most C (Andrew et al. 2021, arXiv 1905.03871).

    An example moves the centred count by ½. With noise of standard deviation σ_b on the count and σ on the gradient, a
    step costs as much as one with noise (σ⁻² + (2σ_b)⁻²)^(-½) on the gradient alone.

    Args:
        max_grad_norm: C in the first step.
        count_noise: σ_b; a twentieth of the expected batch size is common.
        quantile: γ, the share of norms that C should not exceed.
        learning_rate: η.

    Example::

        >>> from dp_transformers import AdaptiveClipping
        >>> clipping = AdaptiveClipping(1.0, count_noise=51.2)
        >>> round(clipping.moved(0.9).max_grad_norm, 3), round(clipping.moved(0.1).max_grad_norm, 3)
        (0.923, 1.083)
    """

    kind: ClassVar[str] = "adaptive"
    count_noise: float
    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "count_noise", "learning_rate")
        require_positive(self, "quantile", limit=1.0)

    @property
    # pyrefly: ignore[bad-override]  (as above)
    def release_noise_multipliers(self) -> tuple[float, ...]:
        return (2 * self.count_noise,)

    def moved(self, share: float) -> AdaptiveClipping:
        """Return the function of the next step, given the noised share b̃ of this one. C stays in [1e-10, 1e10]."""
        exponent = math.log(self.max_grad_norm) - self.learning_rate * (share - self.quantile)
        return replace(self, max_grad_norm=math.exp(min(max(exponent, math.log(1e-10)), math.log(1e10))))


CLIPPING_FUNCTIONS: dict[str, type[BoundedNorm]] = {
    function.kind: function
    for function in (FlatClipping, AutomaticClipping, NormalisedClipping, PerSampleAdaptiveClipping)
}


def clipping_of(kind: str, max_grad_norm: float, noise_multiplier: float) -> ClippingFunction:
    """Return the clipping function of this kind, with a bound as its only required argument. Without noise, for a
    comparison, the bound may be infinite.

    Raises:
        ValueError: there is no such kind, or the bound is not a positive number.
    """
    if max_grad_norm == math.inf and noise_multiplier == 0:
        return NOT_CLIPPED
    if kind not in CLIPPING_FUNCTIONS:
        raise ValueError(
            f"clipping {kind!r} is unknown; choose one of {list(CLIPPING_FUNCTIONS)}, or give a mechanism (with "
            "PerLayerClipping, PerGroupClipping, AdaptiveClipping, or a clipping function of your own)."
        )
    return CLIPPING_FUNCTIONS[kind](max_grad_norm)


def least_noise(bounds: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return the noise scale of each group that minimises the total noise Σ d_k s_k² over all coordinates.

    By Lagrange multipliers, the constraint Σ (C_k / s_k)² = 1/σ² gives s_k = σ · √(C_k / √d_k · Σ_j C_j √d_j): groups
    of many coordinates get less noise on each. The total is σ² · (Σ_j C_j √d_j)².
    """
    total = sum(bound * math.sqrt(size) for bound, size in zip(bounds, sizes, strict=True))
    together = math.hypot(*bounds)
    return [math.sqrt(bound / math.sqrt(size) * total) / together for bound, size in zip(bounds, sizes, strict=True)]


class GroupedClipping(ClippingFunction):
    """Base of functions that clip groups of parameters separately. An example adds at most √(Σ C_k²), and the noise
    scale differs between groups (:func:`least_noise`)."""

    def divided(self, names: Sequence[str]) -> Sequence[tuple[ClippingFunction, Sequence[str]]]:
        """Return the function of each group, and the names of its parameters."""
        raise NotImplementedError

    def groups(self, sizes: Mapping[str, int]) -> Sequence[Group]:
        functions, members = zip(*self.divided(list(sizes)), strict=True)
        scales = least_noise(
            [f.sensitivity for f in functions], [max(1, sum(sizes[n] for n in names)) for names in members]
        )
        return [Group(*group) for group in zip(members, functions, scales, strict=True)]

    def coefficients(self, norms_b: Tensor) -> Tensor:
        raise NotImplementedError("each group has coefficients of its own")


@dataclass(frozen=True)
class PerLayerClipping(GroupedClipping):
    """``function`` on the gradient of each layer separately, with 1/√K of its bound for each of K layers. A layer is a
    module that holds trainable parameters. Its clipped sum is formed as soon as the backward pass has left it, so
    nothing is kept until the end.

    Example::

        >>> from dp_transformers import FlatClipping, PerLayerClipping
        >>> clipping = PerLayerClipping(FlatClipping(1.0))
        >>> [(group.names, group.clipping) for group in clipping.groups({"a.weight": 9, "a.bias": 3, "b.weight": 3})]
        [(['a.weight', 'a.bias'], FlatClipping(max_grad_norm=0.7071...)), (['b.weight'], FlatClipping(...))]
    """

    kind: ClassVar[str] = "per_layer"
    function: ClippingFunction

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", _read(self.function, but=_NOT_IN_GROUPS))

    @property
    # pyrefly: ignore[bad-override]  (as above)
    def sensitivity(self) -> float:
        return self.function.sensitivity

    def scaled_to(self, sensitivity: float) -> ClippingFunction:
        return replace(self, function=self.function.scaled_to(sensitivity))

    def divided(self, names: Sequence[str]) -> Sequence[tuple[ClippingFunction, Sequence[str]]]:
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        function = self.function.scaled_to(self.sensitivity / math.sqrt(len(layers)))
        return [(function, members) for members in layers.values()]


@dataclass(frozen=True)
class PerGroupClipping(GroupedClipping):
    """A function for each group of parameters, given as pairs of a regular expression and a function. A parameter
    belongs to the first pair with an expression that matches a part of its name.

    Example::

        >>> from dp_transformers import AutomaticClipping, FlatClipping, PerGroupClipping
        >>> clipping = PerGroupClipping((("embed", FlatClipping(0.3)), ("", AutomaticClipping(0.4))))
        >>> clipping.sensitivity
        0.5
    """

    kind: ClassVar[str] = "per_group"
    functions: tuple[tuple[str, ClippingFunction], ...]

    def __post_init__(self) -> None:
        pairs = tuple((pattern, _read(function, but=_NOT_IN_GROUPS)) for pattern, function in self.functions)
        if not pairs:
            raise ValueError(
                "functions of PerGroupClipping must be pairs of a regular expression and a clipping function, got "
                "none. Give (('', FlatClipping(1.0)),) for one group of all parameters."
            )
        object.__setattr__(self, "functions", pairs)

    @property
    # pyrefly: ignore[bad-override]  (as above)
    def sensitivity(self) -> float:
        return math.hypot(*(function.sensitivity for _, function in self.functions))

    def scaled_to(self, sensitivity: float) -> ClippingFunction:
        factor = sensitivity / self.sensitivity
        return replace(
            self, functions=tuple((pattern, f.scaled_to(f.sensitivity * factor)) for pattern, f in self.functions)
        )

    def divided(self, names: Sequence[str]) -> Sequence[tuple[ClippingFunction, Sequence[str]]]:
        members: list[list[str]] = [[] for _ in self.functions]
        for name in names:
            found = [k for k, (pattern, _) in enumerate(self.functions) if re.search(pattern, name)]
            if not found:
                raise ValueError(
                    f"parameter '{name}' matches none of the expressions of PerGroupClipping, so nothing would clip "
                    "it. End functions with a pair for the rest, ('', FlatClipping(1.0))."
                )
            members[found[0]].append(name)
        if unused := [pattern for (pattern, _), own in zip(self.functions, members, strict=True) if not own]:
            raise ValueError(
                f"no trainable parameter is left for the expression {unused[0]!r} of PerGroupClipping: correct it, or "
                "leave it out, since noise is added for its bound too."
            )
        return [(function, own) for (_, function), own in zip(self.functions, members, strict=True)]


@dataclass(frozen=True)
class ScheduledClipping(ClippingFunction):
    """``function`` with its bound multiplied by ``schedule.at(t)`` in step t.

    Example::

        >>> from dp_transformers import FlatClipping, ScheduledClipping, StepSchedule
        >>> ScheduledClipping(FlatClipping(1.0), StepSchedule(0.5, every=100)).at(100)
        FlatClipping(max_grad_norm=0.5)
    """

    kind: ClassVar[str] = "scheduled"
    function: ClippingFunction
    schedule: Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", _read(self.function, but=(ScheduledClipping, AdaptiveClipping)))
        object.__setattr__(self, "schedule", Schedule.read(self.schedule))

    @property
    # pyrefly: ignore[bad-override]  (as above)
    def sensitivity(self) -> float:
        return self.function.sensitivity

    def coefficients(self, norms_b: Tensor) -> Tensor:
        raise ValueError(
            "the bound of ScheduledClipping depends on the step. Give PerExampleClipper the function of the first "
            "step, clipping.at(0), and call clipper.backward(losses, clipping=clipping.at(step)) in each step."
        )

    def scaled_to(self, sensitivity: float) -> ClippingFunction:
        return replace(self, function=self.function.scaled_to(sensitivity))

    def at(self, step: int) -> ClippingFunction:
        return self.function.scaled_to(self.function.sensitivity * self.schedule.at(step))


def _read(given: Any, *, but: tuple[type, ...]) -> ClippingFunction:
    """Return a clipping function, given itself or the dictionary that ``to_dict`` wrote, unless it is one of
    ``but``."""
    function = ClippingFunction.from_dict(given) if isinstance(given, Mapping) else given
    if not isinstance(function, ClippingFunction) or isinstance(function, but):
        raise ValueError(
            "the function of a group or schedule must be a ClippingFunction with a fixed bound on one norm, such as "
            f"FlatClipping(1.0), got {given!r}."
        )
    return function


_NOT_IN_GROUPS = (GroupedClipping, ScheduledClipping, AdaptiveClipping)
