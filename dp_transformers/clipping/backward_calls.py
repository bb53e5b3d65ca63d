"""Passes the ``loss.backward()`` of a plain loop to the clipper of the model that the loss comes from.

``torch.Tensor.backward`` calls ``torch.autograd.backward``, which is replaced while there is a follower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from .boundary import Boundary

_followers = WeakSet[Boundary]()
_replaced: Callable[..., None] | None = None  # torch's own function, while it is replaced


def follow(follower: Boundary) -> None:
    """Pass every backward pass over a forward pass of the follower's model to it, until :func:`unfollow`."""
    global _replaced
    _followers.add(follower)
    if _replaced is None:
        _replaced = torch.autograd.backward
        torch.autograd.backward = functools.wraps(_replaced)(_backward)


def unfollow(follower: Boundary) -> None:
    """Restore torch's own function if this was the last follower, and other code has not replaced it since."""
    global _replaced
    _followers.discard(follower)
    if not _followers and _replaced is not None and torch.autograd.backward is _backward:
        torch.autograd.backward, _replaced = _replaced, None


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    assert _replaced is not None
    roots = _sequence(tensors)
    graphs = [(follower, graph) for follower in _followers if (graph := follower.graph_of(roots)) is not None]
    if not graphs or create_graph or inputs is not None:  # the model's taps refuse the latter two
        _replaced(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        return
    gradients = [None] * len(roots) if grad_tensors is None else _sequence(grad_tensors)
    for follower, graph in graphs:
        is_last = follower is graphs[-1][0]
        follower.go_back(graph, roots, gradients, retain_graph=bool(retain_graph), is_last=is_last)


def _sequence(tensors: Any) -> Sequence[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors
