"""Tensors that a forward pass leaves in attributes and whose gradient no tap would see.

Where a loop's own ``loss.backward()`` clips, parameters ask for no gradient while their modules run, so the gradient
of a loss that reads such a tensor would be lost without a word. In its place stands a copy whose backward raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from .graph import parameter_outside_calls
from .places import kept_values
from .tap import TAPS

Untapped = Mapping[str, nn.Parameter]  # by the path of what is kept: a parameter that it was computed with


class _Refused(torch.autograd.Function):
    """A copy that asks for a gradient, whose backward raises."""

    @staticmethod
    def forward(ctx, refuse: Callable[[], NoReturn], probe: torch.Tensor, x: torch.Tensor):
        ctx.refuse = refuse
        return x.detach()

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        ctx.refuse()


def graph_tensors(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """The tensors that the model's modules keep and that have a graph, by the path of what holds them."""
    kept = {path: [x for x in tree_leaves(value) if _has_graph(x)] for path, _, _, value in kept_values(model)}
    return {path: tensors for path, tensors in kept.items() if tensors}


def find_untapped(
    model: nn.Module, parameter_of: Mapping[torch.Tensor, nn.Parameter], run: Callable[[], torch.Tensor]
) -> tuple[Untapped, torch.Tensor]:
    """What of it ``run()``, a forward pass with taps and parameters that ask for gradients, computes from a parameter
    inside a call of its module and keeps; and what ``run()`` returns."""
    before = graph_tensors(model)
    old = {id(x) for tensors in before.values() for x in tensors}  # of earlier passes; kept alive by ``before``
    losses = run()
    new = {path: [x for x in tensors if id(x) not in old] for path, tensors in graph_tensors(model).items()}
    found = {
        path: next((p for x in tensors if (p := parameter_outside_calls(x, TAPS, parameter_of)) is not None), None)
        for path, tensors in new.items()
    }
    return {path: p for path, p in found.items() if p is not None}, losses


def refuse_gradients(
    model: nn.Module, untapped: Untapped, probe: torch.Tensor, name_of: Callable[[nn.Parameter], str]
) -> None:
    """Put copies in the place of tensors that are kept there now."""

    def refuse(path: str) -> NoReturn:
        raise ValueError(
            f"the loss depends on '{path}', which a module keeps in an attribute and does not return, so that part of "
            f"the gradient of '{name_of(untapped[path])}' could not be clipped in loss.backward(). Let the model "
            "return what the loss needs."
        )

    def copied(path: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return _Refused.apply(lambda: refuse(path), probe, x)

    for path, holder, key, value in list(kept_values(model)) if untapped else ():
        if path in untapped:
            holder[key] = tree_map(lambda x, path=path: copied(path, x), value)


def _has_graph(x: Any) -> bool:
    is_tensor = isinstance(x, torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    return is_tensor and x.grad_fn is not None
