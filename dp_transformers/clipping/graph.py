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

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node

from .loss_rows import shape_of
from .precision import HALF
from .recorded_call import RecordedCall

_LEAF = torch._C._functions.AccumulateGrad  # pyrefly: ignore[missing-attribute]  (torch's types leave it out)
_CAST = "ToCopyBackward0"


def parameter_outside_calls(
    losses: torch.Tensor, taps: Collection[type], parameter_of: Mapping[torch.Tensor, nn.Parameter]
) -> nn.Parameter | None:
    """A trainable parameter with a way to ``losses`` that no tap sees, or None.

    Args:
        taps: The types of the taps' nodes, whose ``call`` has ``parameters`` and the ``first_node`` of the call.
        parameter_of: For each tensor that modules hold for a trainable parameter, that parameter.
    """
    # and inside which calls it was computed
    todo: list[tuple[Node, tuple[RecordedCall, ...]]] = [(cast(Node, losses.grad_fn), ())]
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


def nodes_of_losses(roots: Iterable[Node | None], taps: Collection[type]) -> list[Any]:
    """The nodes that ``roots`` lead to, as far as the first taps on each way, these among them."""
    todo, seen = list(roots), dict[Node, None]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        if type(node) not in taps:
            todo += [before for before, _ in node.next_functions]
    return [*seen]


def leaves_of_losses(roots: Iterable[Node | None]) -> set[torch.Tensor]:
    """The tensors that a backward pass from ``roots`` gives a gradient."""
    return {node.variable for node in nodes_of_losses(roots, ()) if type(node) is _LEAF}


def low_precision_of_one_number(nodes: Iterable[Any]) -> torch.dtype | None:
    """The dtype of less than float32 in which something among ``nodes`` is that is one number, such as a mean."""
    dtypes = (x.dtype for node in nodes for x in node._input_metadata if math.prod(shape_of(x)) == 1)
    return next((dtype for dtype in dtypes if dtype in HALF), None)


def _leaf(node: Any) -> torch.Tensor | None:
    """The leaf that a gradient is accumulated in here; autocast keeps a leaf's copy from one call for the next."""
    if type(node).__name__ == _CAST:
        node = node.next_functions[0][0]
    return node.variable if type(node) is _LEAF else None
