"""Errors of clipping, common parts of their messages, and warnings that are logged once."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

HOW_TO_DO_WITHOUT = (  # if no rule would help
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
    """Raised if per-example gradients of a ``module`` cannot be computed."""

    def __init__(self, message: str, module: nn.Module):
        super().__init__(message)
        self.module = module


class UnownedParameterError(ValueError):
    """Raised if a trainable parameter is used outside the calls of every module that could own it."""


class SelfCheckError(ValueError):
    """Raised if per-example clipping is not exact for this model. Nothing was trained."""


def is_compiled(module: nn.Module) -> bool:
    """Return True if ``torch.compile(module)`` returned this module, or ``module.compile()`` was called."""
    return hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None


def has_class_forward(module: nn.Module) -> bool:
    """Return True if the ``forward`` of the module's class runs: the instance has none, or a clipper's, which calls
    the class's."""
    own = vars(module).get("forward")
    return own is None or getattr(own, "calls_class_forward", False)


def refuse_tracing() -> None:
    """Raise ValueError if torch.compile traces the caller, a hook, as part of a compiled function."""
    if torch.compiler.is_compiling():
        _refuse_traced()


def _refuse_traced() -> None:
    raise ValueError(
        "a forward pass that is clipped runs inside a function that torch.compile compiled (a module's forward, or a "
        f"function that calls the model), {HOW_TO_UNCOMPILE}"
    )


# Marked as by torch.compiler.disable, without importing the compiler: it is called instead of traced, since the
# compiler would remove code that raises, and continue.
vars(_refuse_traced)["_torchdynamo_disable"] = True


def named(path: str, module: nn.Module) -> str:
    """Return the name of a module for messages."""
    return f"'{path}' ({type(module).__name__})" if path else f"the model ({type(module).__name__})"


def how_to_fix(module: nn.Module) -> str:
    """Return the ways out if no rule gives the gradients of ``module``."""
    if not has_class_forward(module):  # rules are found by the forward of a class
        return HOW_TO_DO_WITHOUT
    cls, base, *bases = type(module).__mro__
    if base.__name__ == "FSDPModule":  # fully_shard made a new class, which users cannot name
        cls = bases[0]
    return (
        "Ways out: freeze the module's parameters (requires_grad_(False)), train adapters such as LoRA instead, or "
        f"register a rule with dp_transformers.register_grad_sampler({cls.__name__})."
    )


def warn_once(logger: logging.Logger, about: Hashable, message: str, *args: Any) -> None:
    """Log a warning once in this process for each ``about``."""
    if about not in _WARNED:
        _WARNED.add(about)
        logger.warning(message, *args)
