"""The expectation that a loop's loss leaves the padding in a model's outputs alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from ..engine import ClippingEngine
from ..errors import SelfCheckError
from .outputs import floating_tensors, with_rows
from .rows import Sizes, columns_of, lengths_of


def expect_no_gradient_at_padding(
    engine: ClippingEngine, output: Any, lengths: Sizes, dims: Sequence[int | None]
) -> None:
    """Expect that a loss of what the model returned has no gradient where its shortest row is padding.

    Args:
        output: What the model returned for a batch.
        lengths: How the rows of the batch are padded, by columns.
        dims: In which dimension each output has padding, as :class:`.comparison.Comparison` has seen.
    """
    if not (lengths and any(dims) and engine.forward is not None and engine.batch_first):
        return
    own = [own for _, own in columns_of(lengths)]
    row = min(range(len(own[0])), key=lambda i: sum(each[i] for each in own))
    padded = lengths_of(lengths, row)

    def expect(gradient: torch.Tensor | None, at: tuple) -> None:
        if gradient is not None:  # else the loss does not read this output
            engine.conditions.expect(~(gradient[at].abs().max() > 0), _refuse_gradient)

    for x, d in zip([x for x in floating_tensors(with_rows(output)) if x.dim()], dims, strict=False):
        if d is None or not x.requires_grad or x.dim() <= d or len(x) != engine.forward.batch_size:
            continue
        side, own_length = padded.get(x.shape[d], ("right", x.shape[d]))
        if own_length < x.shape[d]:
            positions = slice(own_length, None) if side == "right" else slice(x.shape[d] - own_length)
            x.register_hook(partial(expect, at=(row, *[slice(None)] * (d - 1), positions)))


def _refuse_gradient() -> NoReturn:
    raise SelfCheckError(
        "the loss has a gradient at outputs for positions that are padding: examples are padded to the length of "
        "others, so every example has a say in the gradients of others, beyond the clipping bound. Leave these "
        "positions out of the loss (ignore_index, or a mask, in the mean too), or pad all examples to one length "
        "(padding='max_length')."
    )
