"""Whether a parameter reaches the losses past the taps, read off the autograd graph before every backward pass.

The checks of :mod:`.verify` see the model as it is called first. A way through its forward that is taken only later may use a weight
where no rule sees it, or take an activation out of a module before its tap; nothing would measure that gradient. The graph shows it:
walked from the losses to the inputs, with what lies between a tap and its module's inputs left out, it must not reach a trainable
parameter. That takes about a microsecond for each operation between the modules.

Reentrant activation checkpointing builds its graph only in backward, and so hides it from this walk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import Node

_LEAF = torch._C._functions.AccumulateGrad


class TappedCall(Protocol):
    """One call of a module, as its tap knows it: where its inputs came from, a leaf being its own source, and what it answers for."""

    sources: set[Node | torch.Tensor]
    claimed: Mapping[nn.Parameter, str]
    has_modules: bool


def parameter_past_taps(losses: torch.Tensor, tap: type, parameter_of: Mapping[torch.Tensor, nn.Parameter]) -> nn.Parameter | None:
    """A trainable parameter with a way to ``losses`` that no tap sees, or None.

    Args:
        tap: The type of the taps' nodes, whose ``use`` is the :class:`TappedCall`.
        parameter_of: For each tensor that modules hold for a trainable parameter, that parameter.
    """
    todo: list[tuple[Node | torch.Tensor | None, tuple[TappedCall, ...]]] = [(losses.grad_fn, ())]  # and inside which calls it was computed
    seen = set()
    while todo:
        entry = node, inside = todo.pop()
        if node is None or entry in seen or (inside and node in inside[-1].sources):
            continue
        seen.add(entry)
        if type(node) is tap:
            call = node.use
            todo += [(source, inside) for source in call.sources]
            if not call.has_modules:  # all that is trained in there is claimed by this call
                continue
            inside = (*inside, call)
        leaf = node if isinstance(node, torch.Tensor) else node.variable if type(node) is _LEAF else None
        if leaf is None:
            todo += [(before, inside) for before, _ in node.next_functions]
        elif (parameter := parameter_of.get(leaf)) is not None and not any(parameter in call.claimed for call in inside):
            return parameter
    return None
