"""The errors that clipping raises, how their messages name the ways out, and warnings that are given once."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

HOW_TO_DO_WITHOUT = (  # where no rule would help
    "Ways out: freeze the module's parameters (requires_grad_(False)), or train adapters such as LoRA instead."
)

HOW_TO_UNCOMPILE = (
    "which traces the hooks that see an example's gradient and calls them otherwise, so that norms would come out "
    "wrong. Pass the module as it was before (the _orig_mod of what torch.compile returned); after module.compile() "
    "set module._compiled_call_impl = None. Functions that own no parameters may be compiled."
)

HOW_BATCH_NORM_MIXES = (
    "is in training mode or keeps no running statistics, so it mixes examples (batch statistics): replace it "
    "(GroupNorm), or keep the statistics of pretraining and call its eval() after every model.train()."
)

_WARNED: set[Hashable] = set()


class UnsupportedModuleError(ValueError):
    """A ``module`` whose per-example gradients cannot be had; the message names it and the ways out."""

    def __init__(self, message: str, module: nn.Module):
        super().__init__(message)
        self.module = module


class UnownedParameterError(ValueError):
    """A trainable parameter is used outside the calls of every module that could own it."""


class SelfCheckError(ValueError):
    """Per-example clipping is not exact for this model; nothing was trained."""


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` returned this module, or ``module.compile()`` was called."""
    return hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None


def has_class_forward(module: nn.Module) -> bool:
    """Returns True if it is its class's ``forward`` that runs: the instance has none of its own, or one of a clipper
    that calls the class's."""
    own = vars(module).get("forward")
    return own is None or getattr(own, "calls_class_forward", False)


def refuse_tracing() -> None:
    """Raise ValueError if torch.compile traces the caller, a hook, as part of whatever it compiles: a forward, a
    function around the model, a step."""
    if torch.compiler.is_compiling():
        _refuse_traced()


def _refuse_traced() -> None:
    raise ValueError(
        "a forward pass that is clipped runs inside of what torch.compile compiled (a module's forward, or a function "
        f"that calls the model), {HOW_TO_UNCOMPILE}"
    )


# As torch.compiler.disable marks a function, without the time of importing the compiler: it is called and not traced,
# since the compiler would leave out what raises, and go on.
vars(_refuse_traced)["_torchdynamo_disable"] = True


def named(path: str, module: nn.Module) -> str:
    """A module, as messages call it."""
    return f"'{path}' ({type(module).__name__})" if path else f"the model ({type(module).__name__})"


def how_to_fix(module: nn.Module) -> str:
    """The ways out where no rule gives the gradients of ``module``."""
    if not has_class_forward(module):  # which rules do not know
        return HOW_TO_DO_WITHOUT
    cls, base, *others = type(module).__mro__
    if base.__name__ == "FSDPModule":  # fully_shard made a class of its own, which nobody can name
        cls = others[0]
    return (
        "Ways out: freeze the module's parameters (requires_grad_(False)), train adapters such as LoRA instead, or "
        f"register a rule with dp_transformers.register_grad_sampler({cls.__name__})."
    )


def warn_once(logger: logging.Logger, about: Hashable, message: str, *args: Any) -> None:
    """Log the warning unless there was one about the same in this process."""
    if about not in _WARNED:
        _WARNED.add(about)
        logger.warning(message, *args)
