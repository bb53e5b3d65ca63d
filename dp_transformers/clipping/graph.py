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
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node

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


def weights_in_means(nodes: Iterable[Any], batch_size: int) -> Iterator[torch.Tensor]:
    """Yields, for each mean of a negative log-likelihood among ``nodes``, (B,) the weights in it of each example's
    targets together: ones, or those of their classes, and 0 where they are ignored."""
    for node in nodes:
        if type(node).__name__ not in _NLL or node._saved_reduction != _MEAN:
            continue
        target, weight = node._saved_target, node._saved_weight
        if target.numel() % max(batch_size, 1):  # which targets are whose is not known
            continue
        counts = target != (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # saved without its sign
        own = counts.float() if weight is None else weight[target.where(counts, 0)].float() * counts
        yield own.reshape(batch_size, -1).sum(1)


def numbers_in_means(nodes: Iterable[Any], batch_size: int, rows_in: int) -> Iterator[int]:
    """Yields of how many numbers, or targets, each mean among ``nodes`` is that is one number. That of a few losses,
    each of the whole batch, is none over examples, nor is one of columns whose rows, in dimension ``rows_in``, were
    added up before."""
    for node in nodes:
        if not _is_one_number(node):
            continue
        if type(node).__name__ in _MEANS:
            before = node.next_functions[0][0]
            of_losses = type(before).__name__ in _JOINED and all(_is_one_number(x) for x, _ in before.next_functions)
            if node._saved_self_sym_sizes and not of_losses and not _adds_rows(before, batch_size, rows_in):
                yield node._saved_self_sym_numel
        elif type(node).__name__ in _NLL and node._saved_reduction == _MEAN:
            yield node._saved_target.numel()
        elif type(node).__name__ in _DIFFERENCES and node._saved_reduction == _MEAN:
            yield node._saved_self.numel()


def _adds_rows(node: Any, batch_size: int, rows_in: int) -> bool:
    """Whether a few nodes before this one, in a row, there is a sum or a mean over the examples."""
    for _ in range(_FEW):
        if node is None:
            return False
        if type(node).__name__ in _ADDED:
            sizes = node._saved_self_sym_sizes
            dims = [dim if dim < len(sizes) else dim - 2**64 + len(sizes) for dim in node._saved_dim]
            if (not dims or rows_in in dims) and sizes[rows_in : rows_in + 1] == (batch_size,):
                return True
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return False


def _is_one_number(node: Any) -> bool:
    return node is None or math.prod(node._input_metadata[0].shape) == 1


def low_precision_of_one_number(nodes: Iterable[Any]) -> torch.dtype | None:
    """The dtype of less than float32 in which something among ``nodes`` is that is one number, such as a mean."""
    dtypes = (x.dtype for node in nodes for x in node._input_metadata if math.prod(x.shape) == 1)
    return next((dtype for dtype in dtypes if dtype in HALF), None)


_ADDED, _FEW = ("MeanBackward1", "SumBackward1"), 8
_MEANS, _JOINED = ("MeanBackward0", "MeanBackward1"), ("StackBackward0", "CatBackward0")
_NLL, _MEAN = ("NllLossBackward0", "NllLoss2DBackward0"), 1
_DIFFERENCES = (
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)


def _leaf(node: Any) -> torch.Tensor | None:
    """The leaf that a gradient is accumulated in here; autocast keeps a leaf's copy from one call for the next."""
    if type(node).__name__ == _CAST:
        node = node.next_functions[0][0]
    return node.variable if type(node) is _LEAF else None
