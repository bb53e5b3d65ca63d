"""Rules: how a module's inputs and output gradient give the terms of its parameters' per-example gradients.

A rule is a function ``rule(module, activations, backprops) -> {parameter: term}`` for the trainable parameters that the module
owns directly. ``activations`` are the tensors the module was called with, ``backprops`` is the gradient of the summed losses with
respect to its output, ``(B, ...)``. A plain tensor ``(B, *p.shape)`` stands for :class:`~dp_transformers.clipping.terms.Dense`.

A *whole-call* rule, ``rule(call) -> {parameter: term}``, is for modules with several inputs or outputs, or with the batch elsewhere than
first: it gets a :class:`ModuleCall`, everything as the module was given it, and answers for all parameters below the module too.

An *inside* rule is for modules whose forward reads the weights of its parts: they are opened while they run, tapped where the rule can
use what passes, and a rule like any other gets what was tapped there.

Rules are found by *what runs*, the ``forward`` of the module's class, never by name: a subclass with a forward of its own is
somebody else, a subclass without one (or a class swapped in by FSDP2) is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..parallel.dispatch import class_forward
from ..terms import Dense, Term

Rule = Callable[[nn.Module, Sequence[torch.Tensor], torch.Tensor], Mapping[nn.Parameter, Term | torch.Tensor]]

NormSampler = Callable[[nn.Module, Sequence[torch.Tensor], torch.Tensor], Mapping[nn.Parameter, torch.Tensor]]


@dataclass
class ModuleCall:
    """One call of ``module`` on a batch of ``batch`` examples, every tensor detached and as it was given.

    ``arguments`` by the names of the parameters of its ``forward``; ``outputs`` are the floating-point tensors of what it returned, in
    order, ``backprops`` the gradients of the summed losses with respect to them. ``random_state`` is that of torch's generators at the
    start of the call where the call used them, else None. ``path`` is where the model has the module. ``input_gradients`` has a key
    for each tensor among the arguments that needs a gradient: a rule that can have them cheaply sets them all, and the backward of the
    module itself does not run where norms are measured.
    """

    module: nn.Module
    arguments: Mapping[str, Any]
    outputs: Sequence[torch.Tensor]
    backprops: Sequence[torch.Tensor]
    batch: int
    random_state: Any
    path: str
    input_gradients: dict[torch.Tensor, torch.Tensor | None]


# What a tap is to whoever calls it, a forward hook: (module, inputs, {}, outputs) -> the outputs to go on with, None for the same.
Tap = Callable[[nn.Module, tuple, dict, Any], Any]
Opening = Callable[[nn.Module, Tap | None], AbstractContextManager]

_RULES: dict[Callable, Rule] = {}
_NORM_SAMPLERS: dict[Callable, NormSampler] = {}
WHOLE_CALL: set[Callable | None] = set()
INSIDE: set[Rule | None] = set()
CHANNELS_SECOND: set[Rule | None] = set()  # rules of layers for which the second dimension is special, which flattened rows do not have
_OPENINGS: dict[Callable, Opening] = {}
DOES_NOT_SAVE_OUTPUT: set[Rule | None] = set()  # rules of torch's layers, whose backward reads their input only
_RECOGNISERS: list[Callable[[nn.Module], Rule | None]] = []


def rule(*module_classes: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register the rule of layers of torch whose backward does not read their output."""

    def register(function: Rule) -> Rule:
        DOES_NOT_SAVE_OUTPUT.add(function)
        return register_grad_sampler(*module_classes)(function)

    return register


def whole_call_rule(*module_classes: type[nn.Module]) -> Callable[[Callable], Callable]:
    """Register a whole-call rule."""

    def register(function: Callable[[ModuleCall], Mapping[nn.Parameter, Term]]) -> Callable:
        WHOLE_CALL.add(function)
        return register_grad_sampler(*module_classes)(function)

    return register


def channels_second(function: Rule) -> Rule:
    """Declare that ``function`` needs each example by itself in the first dimension, channels in the second."""
    CHANNELS_SECOND.add(function)
    return function


def inside_rule(module_class: type[nn.Module], *, opened: Opening) -> Callable[[Rule], Rule]:
    """Register the rule of a module that runs inside ``opened(module, tap)`` and there gives to the tap, batch first, what the rule takes.

    ``tap`` is None where no parameter that the module owns is trained; the modules below it must be called as usual all the same.
    """

    def register(function: Rule) -> Rule:
        INSIDE.add(function)
        _OPENINGS[module_class.forward] = opened
        return register_grad_sampler(module_class)(function)

    return register


def find_opening(module: nn.Module) -> Opening | None:
    """How this module is opened while it runs, or None."""
    return _OPENINGS.get(class_forward(module))


def recogniser(function: Callable[[nn.Module], Rule | None]) -> Callable[[nn.Module], Rule | None]:
    """Register a function that looks at a module no rule was registered for and may return one."""
    _RECOGNISERS.append(function)
    return function


def register_grad_sampler(*module_classes: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Give your own layer a rule, found by the class's ``forward``. The last registration wins.

    The decorated function is called as ``f(layer, activations, backprops)`` with ``activations`` the list of tensors the layer
    was called with (batch first), ``backprops`` the gradient of the summed losses with respect to its output, and returns
    ``{parameter: tensor of shape (B, *parameter.shape)}`` for every trainable parameter that ``layer`` owns directly.
    """

    def register(function: Rule) -> Rule:
        for cls in module_classes:
            _RULES[cls.forward] = function
        return function

    return register


def register_norm_sampler(*module_classes: type[nn.Module]) -> Callable[[NormSampler], NormSampler]:
    """Give your own layer a way to its gradients' norms that needs no gradients. The last registration wins.

    The decorated function is called as one for :func:`register_grad_sampler`, and returns ``{parameter: tensor of shape (B,)}``, the L2
    norm (not its square) of every example's gradient, for every trainable parameter that ``layer`` owns directly.

    Mode "ghost" measures with it. Where gradients themselves are needed they come from the layer's grad sampler, or without one from
    re-running the layer: in the modes that keep or instantiate them, for parameters used more than once in a forward pass (the norm
    of a sum does not follow from norms), and for a batch with a gradient that is not finite.
    """

    def register(function: NormSampler) -> NormSampler:
        for cls in module_classes:
            _NORM_SAMPLERS[cls.forward] = function
        return function

    return register


def find_norm_sampler(module: nn.Module) -> NormSampler | None:
    """What was registered for this module's class, if its forward is still the class's."""
    return _NORM_SAMPLERS.get(class_forward(module))


def find_rule(module: nn.Module) -> Rule | None:
    """The rule for this module, or None (then the fallback tries)."""
    forward = class_forward(module)
    if forward is None:  # replaced on the instance: not what the class says
        return None
    found = _RULES.get(forward)
    if found is not None:
        return found
    for recognise in _RECOGNISERS:
        if (found := recognise(module)) is not None:
            return found
    return None


def as_term(value: Term | torch.Tensor) -> Term:
    return Dense(value) if isinstance(value, torch.Tensor) else value


def require_batch(module: nn.Module, x: torch.Tensor, dims: int) -> None:
    """``x`` is (B, ..., channels, *spatial) with ``dims`` spatial dimensions, not the (channels, *spatial) that torch allows too."""
    if x.dim() < dims + 2:
        raise ValueError(
            f"nn.{type(module).__name__} was called without a batch dimension (a tensor of shape {tuple(x.shape)}), so gradients per "
            f"example cannot be told apart: call it with {dims + 2} dimensions, the batch first."
        )


from . import activation, attention, conv, embedding, experts, linear, norm, recurrent  # noqa: E402, F401  (they register themselves)
