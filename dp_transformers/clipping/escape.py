"""Searches the autograd graph, before every clipped sum, for parameters that reach the losses past the taps.

The checks of :mod:`.checks` run the model as it is called first. A later branch of its forward may use a weight
outside of all rules, or take an activation out of a module before its tap, and this gradient would not be measured.
The graph shows it: a walk from the losses to the inputs may reach a trainable parameter only inside a call of its
owner.

Autograd numbers its nodes in the order of their creation. A node before a tap was computed inside the call of the
tap's module if it is not older than the start of this call. The walk takes a few microseconds for each module.

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
    """Return a trainable parameter with a path to the ``roots`` past all taps; None if there is none.

    Args:
        roots: The losses.
        taps: Types of the taps' nodes. Their ``call`` has ``parameters`` and the ``first_node`` of the call.
        parameter_of: Maps the tensors in the graph to trainable parameters.
    """
    # nodes, and the calls inside which they were computed
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
            end: Any = before.next_functions[0][0] if type(before).__name__ == _CAST else before  # of autocast
            if type(end) is LEAF:
                parameter = parameter_of.get(end.variable)
                if parameter is not None and not any(parameter in call.parameters for call in inside):
                    return parameter
            elif inside:
                number = before._sequence_nr()
                todo.append((before, tuple([call for call in inside if call.first_node <= number])))
            else:
                todo.append((before, inside))
    return None


def dtypes_in_graph(losses: torch.Tensor) -> set[torch.dtype]:
    """Return the dtypes of all nodes in the graph of the losses."""
    todo, seen, found = [losses.grad_fn], set[Node](), {losses.dtype}
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found |= {metadata.dtype for metadata in node._input_metadata}
            todo += [before for before, _ in node.next_functions]
    return found
