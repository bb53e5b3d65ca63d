"""The errors that clipping raises, how their messages name the ways out, and warnings that are given once."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

from torch import nn

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


def how_to_fix(path: str, module: nn.Module) -> str:
    return (
        f"Ways out: freeze the parameters of '{path}' (requires_grad_(False)), train adapters such as LoRA instead, "
        f"or register a rule with dp_transformers.register_grad_sampler({type(module).__name__})."
    )


def warn_once(logger: logging.Logger, about: Hashable, message: str, *args: Any) -> None:
    """Log the warning unless there was one about the same in this process."""
    if about not in _WARNED:
        _WARNED.add(about)
        logger.warning(message, *args)
