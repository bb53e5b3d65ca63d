"""Layer rules: the terms of a module's per-example gradients, computed from its inputs and its output gradient.

A rule is a function ``rule(module, activations, backprops) -> {parameter: term}`` for the trainable parameters that
the module owns directly. ``activations`` are the input tensors of the module, ``backprops`` is the gradient of the
summed losses with respect to its output, ``(B, ...)``. A plain tensor ``(B, *p.shape)`` counts as
:class:`~dp_transformers.clipping.terms.Dense`.

Rules are found by the code that runs, the ``forward`` of the module's class, never by a name: a subclass that
overrides ``forward`` needs its own rule; a subclass that does not (or a class that FSDP2 makes) uses its parent's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from .parallel.dispatch import class_forward
from .terms import Term

Terms = Mapping[nn.Parameter, Term | torch.Tensor]
GradSampler = Callable[[nn.Module, Sequence[torch.Tensor], torch.Tensor], Terms]
NormSampler = Callable[[nn.Module, Sequence[torch.Tensor], torch.Tensor], Mapping[nn.Parameter, torch.Tensor]]


class HasWeight(Protocol):
    """A module with a weight that is a parameter, which torch's own types do not guarantee."""

    weight: nn.Parameter


class HasWeightAndBias(HasWeight, Protocol):
    bias: nn.Parameter | None


# A forward hook: (module, inputs, {}, outputs) -> the outputs to continue with, or None for the same.
Tap = Callable[[nn.Module, tuple, dict, Any], Any]
ForwardContext = Callable[[nn.Module, Tap | None], AbstractContextManager]


@dataclass(frozen=True)
class LayerRule:
    """The rule of one kind of layer.

    Attributes:
        terms: ``f(module, activations, backprops) -> {parameter: term}``; None if only norms are known.
        norms: ``f(module, activations, backprops) -> {parameter: (B,)}``, see :func:`register_norm_sampler`.
        takes_call: ``terms`` is ``f(call: RecordedCall)`` instead (:mod:`.recorded_call`), for modules with several
            inputs or outputs, or with a batch dimension that is not the first. It provides the terms of all parameters
            below the module too.
        covers_children: ``terms`` provides the terms of all parameters below the module too.
        forward_context: ``f(module, tap)``, a context for the module's forward, for modules whose forward reads the
            weights of its submodules. It calls these as usual, and the tap (None if none of the module's own
            parameters is trained) on the tensors, batch first, before and after the use of the weights.
        tapped_inside: ``terms`` gets the arguments of that tap instead of the module's own inputs and output gradient.
        channels_second: The second dimension is special, so examples may not be flattened into rows.
        backward_reads_output: True if the module's own backward may need its output. False lets the model overwrite
            the output in place.
        require: ``f(module)``, called at every recorded call, raises ValueError if the module mixes examples.
        reads: ``f(module) -> {name: value}``, the attributes on which the terms depend (:func:`settings`). They must
            be the same in the backward pass as at the call.
        reads_tensors: ``f(module) -> tensors``, the module's own tensors from which the terms are computed. They must
            hold the same numbers in the backward pass as at the call.
    """

    terms: Callable[..., Terms] | None = None
    norms: Callable[..., Mapping[nn.Parameter, torch.Tensor]] | None = None
    takes_call: bool = False
    covers_children: bool = False
    forward_context: ForwardContext | None = None
    tapped_inside: bool = False
    channels_second: bool = False
    backward_reads_output: bool = True
    require: Callable[[Any], None] | None = None
    reads: Callable[[Any], Mapping[str, object]] | None = None
    reads_tensors: Callable[[Any], Sequence[torch.Tensor]] | None = None

    @property
    def covers_subtree(self) -> bool:
        """True if ``terms`` provides the terms of all parameters below the module too."""
        return self.takes_call or self.covers_children


def settings(*names: str) -> Callable[[Any], dict[str, object]]:
    """Return ``reads`` for a rule that depends on these attributes of its module."""

    def read(module: Any) -> dict[str, object]:
        return {name: getattr(module, name) for name in names}

    return read


_RULES: dict[Callable, LayerRule] = {}  # by the forward of a class
_RECOGNISED: list[tuple[Callable[[nn.Module], bool], LayerRule]] = []


def layer_rule(
    *module_classes: type[nn.Module], recognise: Callable[[nn.Module], bool] | None = None, **options: Any
) -> Callable[[Callable[..., Terms]], Callable[..., Terms]]:
    """Register the decorated function as ``terms`` of these classes, or of modules without a rule for which
    ``recognise`` returns True. ``options`` are the other attributes of :class:`LayerRule`."""

    def register(function: Callable[..., Terms]) -> Callable[..., Terms]:
        rule = LayerRule(function, **options)
        for cls in module_classes:
            _RULES[cls.forward] = rule
        if recognise is not None:
            _RECOGNISED.append((recognise, rule))
        return function

    return register


def register_grad_sampler(*module_classes: type[nn.Module]) -> Callable[[GradSampler], GradSampler]:
    """Register a rule for a layer of your own, found by its class's ``forward``. The last registration wins.

    The decorated function is called as ``f(layer, activations, backprops)``: ``activations`` is the list of input
    tensors (batch first), ``backprops`` the gradient of the summed losses with respect to the output. It returns
    ``{parameter: tensor of shape (B, *parameter.shape)}`` for every trainable parameter that ``layer`` owns directly.

    Example::

        >>> import torch
        >>> from dp_transformers import check_per_sample_gradients_are_correct, register_grad_sampler
        >>> class Scale(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.randn(3))
        ...
        ...     def forward(self, x):
        ...         return self.weight * x
        >>> @register_grad_sampler(Scale)
        ... def scale(layer, activations, backprops):
        ...     return {layer.weight: activations[0] * backprops}
        >>> check_per_sample_gradients_are_correct(torch.randn(4, 3), Scale())
        True
    """

    def register(function: GradSampler) -> GradSampler:
        for cls in module_classes:
            known = _RULES.get(cls.forward, LayerRule())
            _RULES[cls.forward] = LayerRule(function, norms=known.norms, forward_context=known.forward_context)
        return function

    return register


def register_norm_sampler(*module_classes: type[nn.Module]) -> Callable[[NormSampler], NormSampler]:
    """Register a function for the norms of a layer of your own, without gradients. The last registration wins.

    The decorated function is called like one for :func:`register_grad_sampler`, and returns ``{parameter: tensor of
    shape (B,)}``, the L2 norm (not its square) of every example's gradient, for every trainable parameter that
    ``layer`` owns directly.

    Mode "ghost" measures with it, compares with the gradients when they are summed, and refuses norms that are too
    small. Gradients come from the layer's grad sampler, or from re-running the layer: for the sum, in the modes that
    keep or instantiate gradients, and for parameters used more than once in a forward pass (the norm of a sum does not
    follow from norms).

    Example::

        >>> import torch
        >>> from dp_transformers import check_per_sample_gradients_are_correct, register_norm_sampler
        >>> class Shift(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.bias = torch.nn.Parameter(torch.randn(3))
        ...
        ...     def forward(self, x):
        ...         return self.bias + x
        >>> @register_norm_sampler(Shift)
        ... def shift(layer, activations, backprops):
        ...     return {layer.bias: backprops.norm(dim=1)}
        >>> check_per_sample_gradients_are_correct(torch.randn(4, 3), Shift(), modes=["ghost"])
        True
    """

    def register(function: NormSampler) -> NormSampler:
        for cls in module_classes:
            _RULES[cls.forward] = replace(_RULES.get(cls.forward, LayerRule()), norms=function)
        return function

    return register


def rule_for(module: nn.Module) -> LayerRule:
    """Return the rule for this module, without ``terms`` if there is none (the fallback is used then)."""
    forward = class_forward(module)
    if forward is None:  # the instance has another forward than its class
        return LayerRule()
    found = _RULES.get(forward, LayerRule())
    if found.terms is None:
        recognised = next((rule for recognise, rule in _RECOGNISED if recognise(module)), found)
        found = replace(recognised, norms=found.norms)
    return found


def forward_context_for(module: nn.Module) -> ForwardContext | None:
    """Return the context for this module's forward, if it needs one. (No recognised rule has one, so none is
    tried.)"""
    forward = class_forward(module)
    return None if forward is None else _RULES.get(forward, LayerRule()).forward_context
