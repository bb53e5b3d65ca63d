"""Any other module that owns trainable parameters: re-run it under vmap, one vector-Jacobian product per example.

Right for whatever treats its examples independently, and slow: it runs the module's forward and backward once more. The
re-computed output is compared with the recorded one, so that a module with randomness, with hidden state, or with tensors whose
first dimension is not what it seems is refused instead of trained wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..terms import Dense, Term

_EXAMPLES_AT_ONCE = 16


class UnsupportedModuleError(ValueError):
    """A module whose per-example gradients cannot be had; the message names it and the ways out."""


def ways_out(path: str, module: nn.Module) -> str:
    return (
        f"Ways out: freeze the parameters of '{path}' (requires_grad_(False)), train adapters such as LoRA instead, or register "
        f"a rule with dp_transformers.register_grad_sampler({type(module).__name__})."
    )


def vmapped_gradients(
    module: nn.Module,
    parameters: Sequence[tuple[str, nn.Parameter]],
    call: tuple,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    backprops: Sequence[torch.Tensor],
    path: str,
) -> dict[nn.Parameter, Term]:
    """Terms of ``parameters`` for one recorded call.

    Args:
        call: ``rebuild(tensors) -> (args, kwargs)``, ``flatten(output) -> list of tensors``.
        tensors, outputs, backprops: the recorded inputs, outputs and output gradients, each ``(B, ...)`` or ``(1, ...)`` or unbatched.
    """
    rebuild, flatten = call
    batch = len(backprops[0])
    in_dims = tuple(0 if t.dim() and len(t) == batch else None for t in tensors)
    values = {name: p.detach() for name, p in parameters}

    def one_example(gradients, *inputs):
        batched = [x.unsqueeze(0) if dim == 0 else x for x, dim in zip(inputs, in_dims, strict=True)]
        args, kwargs = rebuild(batched)

        def run(params):
            return tuple(flatten(torch.func.functional_call(module, params, args, kwargs, tie_weights=False)))

        out, vjp = torch.func.vjp(run, values)
        shaped = tuple(g.reshape(o.shape) for g, o in zip(gradients, out, strict=True))
        return vjp(shaped)[0], out

    try:
        with torch.enable_grad():
            grads, recomputed = torch.func.vmap(
                one_example, in_dims=((0,) * len(backprops), *in_dims), randomness="error", chunk_size=_EXAMPLES_AT_ONCE
            )(tuple(backprops), *[t.detach() for t in tensors])
    except Exception as error:
        raise UnsupportedModuleError(
            f"'{path}' ({type(module).__name__}) has no rule for per-example gradients, and re-running it one example at a time "
            f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). {ways_out(path, module)}"
        ) from error
    for before, after in zip(outputs, recomputed, strict=True):
        after = after.flatten(0, 1)
        before = before.expand(after.shape) if before.shape[1:] == after.shape[1:] and len(before) == 1 else before
        tolerance = 1e-4 if before.dtype == torch.float32 else 3e-2
        if before.shape != after.shape or not _close(before.float(), after.float(), tolerance):
            raise UnsupportedModuleError(
                f"'{path}' ({type(module).__name__}) has no rule for per-example gradients, and re-running it one example at a "
                f"time does not give the output it gave: it uses randomness, state, or mixes examples. {ways_out(path, module)}"
            )
    return {p: Dense(grads[name]) for name, p in parameters}


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Equal up to ``tolerance`` of the size of ``a``, over the entries that are finite."""
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return False
    a, b = a[finite], b[finite]
    return bool((a - b).norm() <= tolerance * a.norm())
