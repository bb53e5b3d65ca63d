"""A search for examples of a batch that influence each other, and for the module in which they do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..clipping.batch_dims import batch_size_of
from ..clipping.checks.outputs import arguments_of, floating_tensors, has_batch, kept_buffers, projected, with_rows
from ..clipping.ragged import Ragged, is_ragged, packed, unpacked
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

    args, kwargs = arguments_of(batch)
    size = batch_size_of(model, args, kwargs)
    if size < 2:
        raise ValueError("examples that influence each other cannot be seen in a batch of one: give at least two.")
    args, kwargs = unpacked(model, args, kwargs)
    pairs = _pairs_by_gradient(model, args, kwargs, size)
    outputs = _projected_outputs(model, args, kwargs, size)
    modules: dict[int, str] = {}
    for j in range(size):
        moved = _projected_outputs(model, *_with_copy(args, kwargs, size, j, (j + 1) % size), size)
        for number, ((where, out_b), (_, moved_b)) in enumerate(zip(outputs, moved, strict=False)):
            differs_b = ~torch.isclose(out_b, moved_b, rtol=1e-4, atol=1e-5 * float(out_b.abs().max()))
            differs_b[j] = False
            if differs_b.any():
                modules[number] = where
                if number == len(outputs) - 1:  # the model itself
                    pairs |= {(i, j) for i in differs_b.nonzero().flatten().tolist()}
    return ExampleMixing(sorted(pairs), modules[min(modules)] if modules else None) if pairs else None


def _with_copy(args: tuple, kwargs: dict, size: int, row: int, source: int) -> tuple[tuple, dict]:
    """Example ``row`` becomes a copy of another, so that its content is valid whatever it is."""

    def change(x: Any) -> Any:
        if isinstance(x, Ragged):  # as long as it was, so that random numbers stay where they are
            return replace(x, padded=change(x.padded))
        return torch.cat([x[:row], x[source : source + 1], x[row + 1 :]]) if has_batch(x, size) else x

    return tree_map(change, (args, kwargs), is_leaf=is_ragged)


@contextlib.contextmanager
def _forward_on_trial(model: nn.Module) -> Iterator[None]:
    """Random numbers as in every such pass, and no trace of it afterwards."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with forked_generators(device), kept_buffers(model):
        torch.manual_seed(0)
        yield


def _pairs_by_gradient(model: nn.Module, args: tuple, kwargs: dict, size: int) -> set[tuple[int, int]]:
    inputs: list[torch.Tensor] = []

    def watched(x: Any) -> Any:
        if has_batch(x, size) and x.is_floating_point():
            inputs.append(x.detach().clone().requires_grad_())
            return inputs[-1] * 1  # a leaf must not be written to
        return x

    with contextlib.ExitStack() as stack, torch.enable_grad():
        stack.enter_context(_forward_on_trial(model))
        for module in model.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                stack.callback(module.register_forward_hook(lambda module, args, output: watched(output)).remove)
        args, kwargs = packed(tree_map(watched, (args, kwargs)))
        outputs = floating_tensors(with_rows(model(*args, **kwargs)))
        if not outputs or not all(has_batch(x, size) and bool(torch.isfinite(x).all()) for x in outputs):
            raise ValueError(
                f"the model returns floating-point tensors of shapes {[tuple(x.shape) for x in outputs]} for {size} "
                "examples, and their rows must be the examples' own and finite. (A loss of the whole batch depends on "
                "all of them: leave the labels out.)"
            )
        out_b, pairs = projected(outputs), set()
        for i in range(size if inputs and out_b.requires_grad else 0):
            found = torch.autograd.grad(out_b[i], inputs, retain_graph=True, allow_unused=True)
            for g in found:
                if g is not None:
                    pairs |= {(i, j) for j in g.flatten(1).ne(0).any(1).nonzero().flatten().tolist() if j != i}
    return pairs


def _projected_outputs(model: nn.Module, args: tuple, kwargs: dict, size: int) -> list[tuple[str, torch.Tensor]]:
    """Module and (B,) projection of its output, in the order in which the modules end; the model itself is the
    last."""
    found: list[tuple[str, torch.Tensor]] = []
    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.enter_context(_forward_on_trial(model))
        for path, module in model.named_modules():

            def note(module: nn.Module, args: tuple, output: Any, path: str = path) -> None:
                tensors = [x for x in floating_tensors(with_rows(output)) if has_batch(x, size)]
                if tensors:
                    found.append(
                        (f"'{path}' ({type(module).__name__})" if path else type(module).__name__, projected(tensors))
                    )

            stack.callback(module.register_forward_hook(note).remove)
        args, kwargs = packed((args, kwargs))
        model(*args, **kwargs)
    return found
