"""The forward that runs when a module is called: its class's, or that wrapped by tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import has_class_forward

STYLES = "transformers.distributed.tensor_parallel"
PLAIN = {"TensorParallelLayer", "ColwiseParallel", "RowwiseParallel", "EmbeddingParallel"}
REPLICATED_WITH_GRAD_ALLREDUCE = "ReplicatedWithGradAllReduce"


def class_forward(module: nn.Module) -> Callable | None:
    """Return the forward of the module's class if it is the one that runs; None if the instance has another.

    transformers' tensor parallelism gives the instance a function that moves tensors before and after the class's
    forward.
    """
    if has_class_forward(module):
        return type(module).forward
    forward, original = type(module).forward, closure_of(module).get("original_forward")
    return (
        forward
        if style_of(module) in {*PLAIN, REPLICATED_WITH_GRAD_ALLREDUCE}
        and getattr(original, "__func__", None) is forward
        else None
    )


def closure_of(module: nn.Module) -> dict[str, Any]:
    function = vars(module).get("forward")
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return dict(zip(names, (cell.cell_contents for cell in getattr(function, "__closure__", None) or ()), strict=True))


def style_of(module: nn.Module) -> str | None:
    """Return the name of transformers' parallel style that set this module's forward; None if there is none."""
    function = vars(module).get("forward")
    owner, _, rest = getattr(function, "__qualname__", "").partition(".")
    if (
        not getattr(function, "__module__", "").startswith("transformers.distributed.")
        or rest != "install_forward.<locals>.tp_forward"
    ):
        return None
    return type(closure_of(module)["self"]).__name__ if owner == "TensorParallelLayer" else owner
