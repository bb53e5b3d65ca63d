"""What a ``loss.backward()`` of the user's begins from.

Autograd tells a node that a backward pass reached it, and not of which loss. ``torch.Tensor.backward`` calls
``torch.autograd.backward``, so while somebody follows such calls a function stands in its place that says so first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol
from weakref import WeakSet

import torch


class Follower(Protocol):
    def during_backward(self, roots: Sequence[Any], gradients: Sequence[Any]) -> AbstractContextManager[int | None]:
        """A context for a backward pass from ``roots``, which begins with these ``gradients`` (None: 1). It gives the
        number that they shall be multiplied with, None where it does not matter."""
        ...


_followers = WeakSet[Follower]()
_replaced: Callable[..., None] | None = None  # torch's own function, while another one is in its place


def follow(follower: Follower) -> None:
    """Tell this follower of every backward pass that the user asks for, until :func:`unfollow`."""
    global _replaced
    _followers.add(follower)
    if _replaced is None:
        _replaced = torch.autograd.backward
        torch.autograd.backward = functools.wraps(_replaced)(_backward)


def unfollow(follower: Follower) -> None:
    """Put torch's own function back where this was the last follower, and nobody has replaced it since."""
    global _replaced
    _followers.discard(follower)
    if not _followers and _replaced is not None and torch.autograd.backward is _backward:
        torch.autograd.backward, _replaced = _replaced, None


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    assert _replaced is not None
    roots = _sequence(tensors)
    gradients = [None] * len(roots) if grad_tensors is None else _sequence(grad_tensors)
    with ExitStack() as stack:
        asked = [stack.enter_context(follower.during_backward(roots, gradients)) for follower in list(_followers)]
        factors = {factor for factor in asked if factor is not None}
        if len(factors) > 1:
            raise ValueError(
                f"one loss is the mean over batches of several private models that have {sorted(factors)} rows: go "
                "backward over a loss for each model, or over sums (loss_reduction='sum')."
            )
        for factor in factors - {1}:
            grad_tensors = [_multiplied(*each, factor) for each in zip(roots, gradients, strict=True)]
        _replaced(tensors, grad_tensors, *args, **kwargs)


def _sequence(tensors: Any) -> Sequence[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _multiplied(root: torch.Tensor, gradient: torch.Tensor | None, factor: int) -> torch.Tensor | None:
    """The gradient to begin with, times ``factor``. None where torch refuses to begin without one."""
    if gradient is not None:
        return gradient * factor
    return torch.full_like(root, factor) if root.numel() == 1 else None
