"""A search, before every clipped sum, for parameters that reach the losses past the taps in the autograd graph.

The checks of :mod:`.checks` see the model as it is called first. A way through its forward that is taken only later
may use a weight where no rule sees it, or take an activation out of a module before its tap; nothing would measure
that gradient. The graph shows it: walked from the losses to the inputs, it may reach a trainable parameter only inside
a call of its owner.

Autograd numbers its nodes in the order in which they are made. What a tap leads to and is not older than the call of
its module was computed inside that call. The walk takes a few microseconds for each module.

Reentrant activation checkpointing builds its graph only in backward, and so hides it from this walk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node

from .recorded_call import RecordedCall

LEAF = torch._C._functions.AccumulateGrad  # pyrefly: ignore[missing-attribute]  (torch's types leave it out)
_CAST = "ToCopyBackward0"


def parameter_outside_calls(
    roots: Iterable[torch.Tensor], taps: Collection[type], parameter_of: Mapping[torch.Tensor, nn.Parameter]
) -> nn.Parameter | None:
    """A trainable parameter with a way to losses, ``roots``, that no tap sees, or None.

    Args:
        taps: The types of the taps' nodes, whose ``call`` has ``parameters`` and the ``first_node`` of the call.
        parameter_of: For each tensor that modules hold for a trainable parameter, that parameter.
    """
    # and inside which calls it was computed
    todo: list[tuple[Node, tuple[RecordedCall, ...]]] = [(root.grad_fn, ()) for root in roots if root.grad_fn]
    seen = set()
    while todo:
        entry = node, inside = todo.pop()
        if entry in seen:
            continue
        seen.add(entry)
        if type(node) in taps:
            inside = (*inside, cast(Any, node).call)
        for before, _ in node.next_functions:
            if before is None:
                continue
            if (leaf := _leaf(before)) is not None:
                parameter = parameter_of.get(leaf)
                if parameter is not None and not any(parameter in call.parameters for call in inside):
                    return parameter
            elif inside:
                number = before._sequence_nr()
                todo.append((before, tuple(call for call in inside if call.first_node <= number)))
            else:
                todo.append((before, inside))
    return None


def dtypes_in_graph(losses: torch.Tensor) -> set[torch.dtype]:
    """Returns the dtypes of everything that the losses are computed from and that a gradient goes through."""
    todo, seen, found = [losses.grad_fn], set[Node](), {losses.dtype}
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found |= {metadata.dtype for metadata in node._input_metadata}
            todo += [before for before, _ in node.next_functions]
    return found


def _leaf(node: Any) -> torch.Tensor | None:
    """The leaf that a gradient is accumulated in here; autocast keeps a leaf's copy from one call for the next."""
    if type(node).__name__ == _CAST:
        node = node.next_functions[0][0]
    return node.variable if type(node) is LEAF else None
