"""Layer rules: how a module's inputs and output gradient give the terms of its parameters' per-example gradients.

A rule is a function ``rule(module, activations, backprops) -> {parameter: term}`` for the trainable parameters that
the module owns directly. ``activations`` are the tensors the module was called with, ``backprops`` is the gradient of
the summed losses with respect to its output, ``(B, ...)``. A plain tensor ``(B, *p.shape)`` stands for
:class:`~dp_transformers.clipping.terms.Dense`.

Rules are found by *what runs*, the ``forward`` of the module's class, never by name: a subclass that overrides
``forward`` needs its own rule, a subclass that does not (or a class swapped in by FSDP2) has the one of its parent.
"""

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
    """A module with a weight: torch's own types call some of its modules' parameters tensors, and of others say
    nothing."""

    weight: nn.Parameter


class HasWeightAndBias(HasWeight, Protocol):
    bias: nn.Parameter | None


# What a tap is to whoever calls it, a forward hook: (module, inputs, {}, outputs) -> the outputs to go on with, None
# for the same.
Tap = Callable[[nn.Module, tuple, dict, Any], Any]
ForwardContext = Callable[[nn.Module, Tap | None], AbstractContextManager]


@dataclass(frozen=True)
class LayerRule:
    """All that is known of one kind of layer.

    Attributes:
        terms: ``f(module, activations, backprops) -> {parameter: term}``; None where only norms are known.
        norms: ``f(module, activations, backprops) -> {parameter: (B,)}``, see :func:`register_norm_sampler`.
        takes_call: ``terms`` is ``f(call: RecordedCall)`` instead (:mod:`.recorded_call`), for modules with several
            inputs or outputs, or with the batch elsewhere than first; it provides the terms of all parameters below
            the module too.
        covers_children: ``terms`` provides the terms of all parameters below the module too. One that takes the call
            always does.
        forward_context: ``f(module, tap)``, a context that the module's forward runs in, for modules whose forward
            reads the weights of its parts. It calls the modules below as usual, and the tap (None where none of the
            module's own parameters is trained) on inputs and outputs, batch first, between which the weights are used.
        tapped_inside: ``terms`` gets what that tap was called with, instead of the module's own inputs and output
            gradient.
        channels_second: The second dimension is special, so examples may not come as flattened rows.
        backward_reads_output: Whether the module's own backward may need its output. False allows the model to
            overwrite that in place.
        require: ``f(module)``, asked at every call that is recorded, raises ValueError where the module is in a state
            that mixes examples.
        reads: ``f(module) -> {name: value}``, what the terms depend on besides tensors (:func:`settings`). It must be
            the same in the backward pass as at the call.
        reads_tensors: ``f(module) -> tensors``, which of the module's own tensors the terms are computed from anew.
            They must hold in the backward pass what they held at the call.
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
        return self.takes_call or self.covers_children


def settings(*names: str) -> Callable[[Any], dict[str, object]]:
    """``reads`` of a rule that looks at these attributes of its module."""

    def read(module: Any) -> dict[str, object]:
        return {name: getattr(module, name) for name in names}

    return read


_RULES: dict[Callable, LayerRule] = {}  # by the forward of a class
_RECOGNISED: list[tuple[Callable[[nn.Module], bool], LayerRule]] = []


def layer_rule(
    *module_classes: type[nn.Module], recognise: Callable[[nn.Module], bool] | None = None, **options: Any
) -> Callable[[Callable[..., Terms]], Callable[..., Terms]]:
    """Register the decorated function as ``terms`` of these classes, or of the modules without a rule that
    ``recognise`` says yes to.

    ``options`` are the other attributes of :class:`LayerRule`.
    """

    def register(function: Callable[..., Terms]) -> Callable[..., Terms]:
        rule = LayerRule(function, **options)
        for cls in module_classes:
            _RULES[cls.forward] = rule
        if recognise is not None:
            _RECOGNISED.append((recognise, rule))
        return function

    return register


def register_grad_sampler(*module_classes: type[nn.Module]) -> Callable[[GradSampler], GradSampler]:
    """Give your own layer a rule, found by the class's ``forward``. The last registration wins.

    The decorated function is called as ``f(layer, activations, backprops)`` with ``activations`` the list of tensors
    the layer was called with (batch first), ``backprops`` the gradient of the summed losses with respect to its
    output, and returns ``{parameter: tensor of shape (B, *parameter.shape)}`` for every trainable parameter that
    ``layer`` owns directly.

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
    """Give your own layer a way to its gradients' norms that needs no gradients. The last registration wins.

    The decorated function is called as one for :func:`register_grad_sampler`, and returns ``{parameter: tensor of
    shape (B,)}``, the L2 norm (not its square) of every example's gradient, for every trainable parameter that
    ``layer`` owns directly.

    Mode "ghost" measures with it, and compares with the gradients when these are summed: norms that are too small are
    refused. Where gradients themselves are needed they come from the layer's grad sampler, or
    without one from re-running the layer: for the sum, in the modes that keep or instantiate gradients, and for
    parameters used more than once in a forward pass (the norm of a sum does not follow from norms).

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
    """The rule for this module; without ``terms`` where there is none, and the fallback tries."""
    forward = class_forward(module)
    if forward is None:  # replaced on the instance: not what the class says
        return LayerRule()
    found = _RULES.get(forward, LayerRule())
    if found.terms is None:
        recognised = next((rule for recognise, rule in _RECOGNISED if recognise(module)), found)
        found = replace(recognised, norms=found.norms)
    return found


def forward_context_for(module: nn.Module) -> ForwardContext | None:
    """Returns the context that this module's forward must run in; none of the recognised rules has one, so this costs
    nothing."""
    forward = class_forward(module)
    return None if forward is None else _RULES.get(forward, LayerRule()).forward_context
