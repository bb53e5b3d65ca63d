"""Checks that a loop's loss does not compare rows of the batch (negatives from the batch, its hardest pair, its
statistics).

The Hessian of a sum of per-row losses, with respect to the outputs of the model, has no entries between two rows, and
the loss of one row has no gradient in the outputs of another.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge

from .loss_root import LoopGraph, kind, rows_dims, shape_of
from .recorded_call import ForwardPass

logger = logging.getLogger(__name__)

_SMALLEST = 1e-4  # least norm of the entries between rows, over the norm of all entries, that counts
# The operations of a cross-entropy, which need no check: two backward passes may take several times the logits' memory
_ROW_BY_ROW = {
    "NllLoss",
    "NllLoss2D",
    "LogSoftmax",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Slice",
    "Transpose",
    "ToCopy",
}


def expect_own_rows(graph: LoopGraph, roots: Sequence[torch.Tensor], forward: ForwardPass, seed: int) -> None:
    """Expect that losses do not compare rows. Differentiate (B,) losses once, and one loss twice, with respect to the
    outputs of the model, with random numbers for half of the rows: the result must be 0 at the other half.

    The graph is retained. If it cannot be differentiated twice, search it for operations on pairs of rows.

    Args:
        graph: The graph of the roots.
        roots: One loss, or (B,) losses.
        forward: Their forward pass, to which the condition is added.
        seed: Seed of the choice of rows and of the random numbers.
    """
    size = forward.batch_size
    shapes = {end: shape_of(*end) for end in graph.ends if size > 1 and rows_dims(shape_of(*end), size)}
    if not shapes or {kind(node) for node in graph.leads} <= _ROW_BY_ROW | {kind(node) for node, _ in shapes}:
        return
    edges, generator = [GradientEdge(*end) for end in shapes], torch.Generator().manual_seed(seed)
    half_b = torch.zeros(size).index_fill(0, torch.randperm(size, generator=generator)[: size // 2], 1.0)

    def of_half(x: torch.Tensor, dim: int) -> torch.Tensor:
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        return half_b.repeat_interleave(x.shape[dim] // size).view(shape).to(x)

    def gone_back(outputs: Sequence[torch.Tensor], begins: Sequence[Any] | None, twice: bool) -> Sequence[Any]:
        return torch.autograd.grad(outputs, edges, begins, retain_graph=True, create_graph=twice, allow_unused=True)

    def holds(dims: Sequence[int]) -> torch.Tensor:
        dims_of = [0] if is_each else dims
        given = [(x, dim) for x, dim in zip(outputs, dims_of, strict=True) if x is not None and x.requires_grad]
        begins = [torch.randn(x.shape, generator=generator).to(x) * of_half(x, dim) for x, dim in given]
        moved = gone_back([x for x, _ in given], begins, False) if given else []
        found = [(x.detach().float(), dim) for x, dim in zip(moved, dims, strict=False) if x is not None]
        zero = torch.zeros((), device=forward.probe.device)
        between = sum(((x * (1 - of_half(x, dim))).square().sum().to(zero) for x, dim in found), zero)
        whole = sum((x.square().sum().to(zero) for x, _ in found), zero)
        return ~(between > _SMALLEST**2 * whole)

    is_each = roots[0].dim() > 0
    if is_each and any(graph.pairs_rows(node, size) and math.prod(shape_of(node)) == size**2 for node in graph.leads):
        forward.deferred_checks.expect(torch.zeros(()), _refuse_comparing)  # each output met the targets of all rows
    try:
        with torch.enable_grad():
            outputs = roots if is_each else gone_back(roots, None, True)
            ways = itertools.zip_longest(*(rows_dims(shape, size) for shape in shapes.values()))
            first = [rows_dims(shape, size)[0] for shape in shapes.values()]
            held = [holds([a if b is None else b for a, b in zip(first, way, strict=True)]) for way in ways]
    except Exception as error:
        logger.info("a loss is not looked at by its Hessian: %s: %s", type(error).__name__, error)
        held = [torch.tensor(not any(_has_pairs(graph, node, size) for node in graph.leads))]
    forward.deferred_checks.expect(torch.stack(held).any(), _refuse_comparing)


def _has_pairs(graph: LoopGraph, node: Any, size: int) -> bool:
    """Return True if an operation makes an entry for each pair of rows, as distances do."""
    before = graph.sizes_before(node)
    return len(before) > 1 and shape_of(node).count(size) > max(shape.count(size) for shape in before)


def _refuse_comparing() -> NoReturn:
    raise ValueError(
        "the loss compares rows of the batch (negatives from the batch as in InfoNCE and CLIP, its hardest pair, its "
        "statistics, outputs of shape (B, 1) beside targets of shape (B,)), so what an example adds to the sum "
        "depends on others beyond the clipping bound, and no clipping of single rows can train it privately: let the "
        "data set give each row its own negatives or pairs, and compute its loss from that row alone."
    )
