"""Dropout switched off, and every random number of torch the same, in the mode that a model is in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_USUAL = 0.6


_INSTEAD: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"), lambda x, *args, **kwargs: x),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), lambda x, *args, **kwargs: x),
    **dict.fromkeys(
        ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
        lambda x, *args, **kwargs: x.fill_(_USUAL),
    ),
    "bernoulli_": lambda x, *args, **kwargs: x.fill_(1.0),
    "bernoulli": lambda x, *args, **kwargs: torch.ones_like(x),
    **dict.fromkeys(("rand_like", "randn_like"), lambda x, **kwargs: torch.empty_like(x, **kwargs).fill_(_USUAL)),
}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # their only float is their dropout


class without_dropout(TorchFunctionMode):
    """Inside, dropout returns what it is given, and draws of torch return a constant, so that a row has the same
    numbers alone as in its batch. Draws of integers and orders, those of Python and NumPy, and those that this library
    makes from generators of its own, stay as they are."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "generator" in kwargs and sys._getframe(1).f_globals.get("__name__", "").startswith("dp_transformers."):
            return func(*args, **kwargs)
        if func in (torch.autograd.backward, torch.autograd.grad):
            with self._during_backward():
                return func(*args, **kwargs)
        if name in _INSTEAD and args:
            return _INSTEAD[name](*args, **kwargs)
        if name in ("rand", "randn"):
            kwargs.pop("generator", None)
            return torch.empty(*args, **kwargs).fill_(_USUAL)
        if name == "normal" and len(args) == 2 and not kwargs:
            return args[0] + _USUAL * args[1]
        if func is F.scaled_dot_product_attention:
            kwargs |= {} if len(args) > 4 else {"dropout_p": 0.0}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if func is F.multi_head_attention_forward:
            kwargs["training"] = False
        if name in _RECURRENT:
            args = tuple(0.0 if isinstance(x, float) else x for x in args)
        return func(*args, **kwargs)

    @contextmanager
    def _during_backward(self) -> Iterator[None]:
        """Inside, autograd goes back in this mode, too, for what runs again there. (torch leaves a mode for as long as
        a function runs that it has shown to it.)"""
        run = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]

        def run_in_mode(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        torch.autograd._engine_run_backward = run_in_mode  # pyrefly: ignore[missing-attribute]
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = run  # pyrefly: ignore[missing-attribute]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, all modules evaluate."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for m, training in modes.items():
            m.training = training
