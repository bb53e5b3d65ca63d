"""A search for examples of a batch that influence each other, and for the module in which they do."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..clipping.checks.rows import Rows, arguments_of, floating_tensors, has_batch, projected, with_rows
from ..clipping.checks.without_dropout import without_dropout
from ..runtime.randomness import forked_generators


@dataclass(frozen=True)
class ExampleMixing:
    """Examples of a batch that influence each other's outputs.

    Attributes:
        pairs: (i, j): the output of example i depends on the input of example j.
        module: Path and class of the first module to finish whose output shows it.
    """

    pairs: list[tuple[int, int]]
    module: str

    def __str__(self) -> str:
        first, others = self.pairs[0], f" (and {len(self.pairs) - 1} other pairs)" if len(self.pairs) > 1 else ""
        what = f"the output of example {first[0]} depends on the input of example {first[1]}"
        return f"{what}{others}, first in {self.module}"


def find_example_mixing(model: nn.Module, batch: Any) -> ExampleMixing | None:
    """Find examples that influence each other in one forward pass of ``model``, in the training mode it is in.

    Seen is any change of output i, larger than rounding, when example j is replaced by its neighbour. Costs one
    forward pass for each example, without dropout. Parameters, buffers and random state stay as they are.

    Args:
        model: Called with the batch; every floating-point tensor it returns has the examples in its first dimension,
            as have its inputs.
        batch: Public examples, at least two, all different: keyword arguments in a dict, positional ones in a tuple,
            or one tensor. A batch size that no other dimension has, or modules may be named that work on positions
            first.

    Returns:
        The pairs and the module; None if there is no such pair.

    Raises:
        ValueError: fewer than two examples, or outputs that are not finite or have another first dimension.
    """
    rows = Rows.of(model, *arguments_of(batch))
    if rows.size < 2:
        raise ValueError("examples that influence each other cannot be seen in a batch of one: give at least two.")
    outputs, pairs, numbers = _projected_outputs(model, rows), [], set[int]()
    for j in range(rows.size):
        # a copy of its neighbour, so that its content is valid whatever it is
        moved = _projected_outputs(model, rows.only([*range(j), (j + 1) % rows.size, *range(j + 1, rows.size)]))
        for number, ((_, out_b), (_, moved_b)) in enumerate(zip(outputs, moved, strict=False)):
            differs_b = ~torch.isclose(out_b, moved_b, rtol=1e-4, atol=1e-5 * float(out_b.abs().max()))
            differs_b[j] = False
            if differs_b.any():
                numbers.add(number)
                if number == len(outputs) - 1:  # the model itself
                    pairs += [(i, j) for i in differs_b.nonzero().flatten().tolist()]
    return ExampleMixing(sorted(pairs), outputs[min(numbers)][0]) if pairs else None


def _projected_outputs(model: nn.Module, rows: Rows) -> list[tuple[str, torch.Tensor]]:
    """Return each module and a (B,) projection of its output, in the order in which the modules end; the model itself
    is the last. Every buffer has the content it had afterwards."""
    found: list[tuple[str, torch.Tensor]] = []

    def note(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        tensors = floating_tensors(with_rows(output))
        are_rows = tensors and all(has_batch(x, rows.size) and bool(x.isfinite().all()) for x in tensors)
        if module is model and not are_rows:
            raise ValueError(
                f"the model returns floating-point tensors of shapes {[tuple(x.shape) for x in tensors]} for "
                f"{rows.size} examples, and their rows must be the examples' own and finite. (A loss of the whole "
                "batch depends on all of them: leave the labels out.)"
            )
        if tensors := [x for x in tensors if has_batch(x, rows.size)]:
            name = type(module).__name__
            found.append((f"'{path}' ({name})" if path else name, projected(tensors)))

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    buffers = [(t, t.clone()) for t in model.buffers()]
    with torch.no_grad(), forked_generators(device), contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_hook(partial(note, path)).remove)
        torch.manual_seed(0)
        try:
            with without_dropout():
                rows.call(model)
        finally:
            for t, content in buffers:
                t.copy_(content)
    return found
