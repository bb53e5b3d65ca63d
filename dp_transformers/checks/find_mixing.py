"""A search for examples of a batch that influence each other, and for the module in which they do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..clipping.checks.rows import Rows, arguments_of, floating_tensors, has_batch, projected, with_rows
from ..clipping.ragged import Ragged
from ..runtime.randomness import forked_generators


@dataclass(frozen=True)
class ExampleMixing:
    """Examples of a batch that influence each other's outputs.

    Attributes:
        pairs: (i, j): the output of example i depends on the input of example j.
        module: Path and class of the first module to finish whose output shows it; None where only gradients do.
    """

    pairs: list[tuple[int, int]]
    module: str | None

    def __str__(self) -> str:
        first, others = self.pairs[0], f" (and {len(self.pairs) - 1} other pairs)" if len(self.pairs) > 1 else ""
        where = f", first in {self.module}" if self.module else ""
        return f"the output of example {first[0]} depends on the input of example {first[1]}{others}{where}"


def find_example_mixing(model: nn.Module, batch: Any) -> ExampleMixing | None:
    """Find examples that influence each other in one forward pass of ``model``, in the training mode it is in.

    Seen are any gradient of output i with respect to input j (with respect to the embeddings' outputs for integers),
    and any change of output i, larger than rounding, when example j is replaced by its neighbour, which also shows
    what no gradient does: limited places, sorting, rounding. Costs one backward and one forward pass for each example.
    Parameters, their gradients, buffers and random state stay as they are.

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
    pairs, modules = _pairs_by_gradient(model, rows), {}
    outputs = _projected_outputs(model, rows)
    for j in range(rows.size):
        moved = _projected_outputs(model, _with_copy(rows, j, (j + 1) % rows.size))
        for number, ((where, out_b), (_, moved_b)) in enumerate(zip(outputs, moved, strict=False)):
            differs_b = ~torch.isclose(out_b, moved_b, rtol=1e-4, atol=1e-5 * float(out_b.abs().max()))
            differs_b[j] = False
            if differs_b.any():
                modules[number] = where
                if number == len(outputs) - 1:  # the model itself
                    pairs |= {(i, j) for i in differs_b.nonzero().flatten().tolist()}
    return ExampleMixing(sorted(pairs), modules[min(modules)] if modules else None) if pairs else None


def _with_copy(rows: Rows, row: int, source: int) -> Rows:
    """Example ``row`` becomes a copy of another, so that its content is valid whatever it is."""

    def change(path: tuple, x: Any) -> Any:
        if isinstance(x, Ragged):  # as long as it was, so that random numbers stay where they are
            return replace(x, padded=change(path, x.padded))
        return torch.cat([x[:row], x[source : source + 1], x[row + 1 :]]) if has_batch(x, rows.size) else x

    return rows.changed(change)


@contextlib.contextmanager
def _on_trial(model: nn.Module, hooked: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Inside, modules have forward hooks, and random numbers are those of every such pass. No trace of it is left:
    every buffer has the content it had."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    buffers = [(t, t.clone()) for t in model.buffers()]
    with forked_generators(device), contextlib.ExitStack() as stack:
        for module, hook in hooked:
            stack.callback(module.register_forward_hook(hook).remove)
        torch.manual_seed(0)
        try:
            yield
        finally:
            with torch.no_grad():
                for t, content in buffers:
                    if not torch.equal(t, content):  # a graph may need one that has it
                        t.copy_(content)


def _pairs_by_gradient(model: nn.Module, rows: Rows) -> set[tuple[int, int]]:
    inputs: list[torch.Tensor] = []

    def watched(x: Any) -> Any:
        if has_batch(x, rows.size) and x.is_floating_point():
            inputs.append(x.detach().clone().requires_grad_())
            return inputs[-1] * 1  # a leaf must not be written to
        return x

    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    hooks = [(table, lambda module, args, output: watched(output)) for table in tables]
    with torch.enable_grad(), _on_trial(model, hooks):
        given = rows.changed(
            lambda path, x: replace(x, padded=watched(x.padded)) if isinstance(x, Ragged) else watched(x)
        )
        outputs = floating_tensors(with_rows(given.call(model)))
        if not outputs or not all(has_batch(x, rows.size) and bool(torch.isfinite(x).all()) for x in outputs):
            shapes = [tuple(x.shape) for x in outputs]
            raise ValueError(
                f"the model returns floating-point tensors of shapes {shapes} for {rows.size} examples, and their "
                "rows must be the examples' own and finite. (A loss of the whole batch depends on all of them: leave "
                "the labels out.)"
            )
        out_b, pairs = projected(outputs), set()
        for i in range(rows.size if inputs and out_b.requires_grad else 0):
            found = torch.autograd.grad(out_b[i], inputs, retain_graph=True, allow_unused=True)
            moving = [g.flatten(1).ne(0).any(1).nonzero().flatten().tolist() for g in found if g is not None]
            pairs |= {(i, j) for each in moving for j in each if j != i}
    return pairs


def _projected_outputs(model: nn.Module, rows: Rows) -> list[tuple[str, torch.Tensor]]:
    """Module and (B,) projection of its output, in the order in which the modules end; the model itself is the
    last."""
    found: list[tuple[str, torch.Tensor]] = []

    def note(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        if tensors := [x for x in floating_tensors(with_rows(output)) if has_batch(x, rows.size)]:
            name = type(module).__name__
            found.append((f"'{path}' ({name})" if path else name, projected(tensors)))

    with torch.no_grad(), _on_trial(model, [(module, partial(note, path)) for path, module in model.named_modules()]):
        rows.call(model)
    return found
