"""The fallback: re-runs a module without a rule on its recorded inputs, and differentiates each example's output.

It is slow, and exact for every module that treats its examples independently. There are three ways:

* **vmap**: the vector-Jacobian product of one example, vectorised over the batch.
* **one by one**: the same in a loop, for modules that vmap cannot run (data-dependent control flow, in-place writes,
  sorted tokens).
* **masked**, for modules that use random numbers (dropout): re-run on the whole batch with the same random numbers,
  and differentiated once for each example, with the output gradients of all other examples set to zero.

The recomputed output is compared with the recorded one, so that a module with hidden state, or (in the first two ways)
one that mixes its examples, is refused instead of trained wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..runtime.randomness import replayed
from .batch_dims import PackedRows
from .errors import HOW_TO_DO_WITHOUT, UnsupportedModuleError, how_to_fix, warn_once
from .model_state import Held
from .precision import HALF
from .recorded_call import RecordedCall, differentiable_leaves
from .terms import Dense, Term

logger = logging.getLogger(__name__)

_EXAMPLES_AT_ONCE = 16
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__


def per_example_gradients(call: RecordedCall, parameters: dict[nn.Parameter, str]) -> dict[nn.Parameter, Term]:
    """Compute dense terms of ``parameters`` (with names relative to the module) for a call that backward has reached.

    Raises:
        UnsupportedModuleError: re-running the module fails, or gives other outputs than the call.
    """
    owner, module = call.owner, call.module
    if call.batch_size == 0:
        return {p: Dense(p.new_zeros(0, *p.shape)) for p in parameters}
    reasons = []
    for way in _ways(call):
        try:
            with without_fused_attention(), restored(module):
                # on copies, since the module may modify its inputs, which autograd still needs
                gradients = way(call, [x.clone() for x in call.inputs_by_example()], parameters)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            reasons += [] if reason in reasons else [reason]
            continue
        if way is not _vmapped:
            warn_once(
                logger,
                type(module),
                "%s cannot be re-run by vmap (%s) and is differentiated once for each example of a physical batch: "
                "exact, and slow.",
                type(module).__name__,
                reasons[0] if reasons else _why_not_by_vmap(call),
            )
        return {p: Dense(gradients[name].detach()) for p, name in parameters.items()}
    of_a_child = f"the parameter '{next(iter(parameters.values()))}' of a module in it"
    what = of_a_child if owner.covers_children else "per-example gradients"
    raise UnsupportedModuleError(
        f"{owner} has no rule for {what}, and re-running it one example at a time failed ({'; then '.join(reasons)}). "
        + ("Its gradient must be dense: embed with sparse=False. " if "Sparse" in "".join(reasons) else _WHAT_DIFFERS)
        + (HOW_TO_DO_WITHOUT if owner.covers_children else how_to_fix(module)),
        module,
    )


_WHAT_DIFFERS = (
    "If it fills a cache, call the model with use_cache=False; if it draws random numbers by NumPy (SpecAugment of "
    "speech models), switch that off (config.apply_spec_augment=False). "
)


def _ways(call: RecordedCall) -> tuple[Callable, ...]:
    if call.random_state is not None:
        return (_masked,)
    return (_one_by_one,) if call.is_ragged else (_vmapped, _one_by_one)


def _why_not_by_vmap(call: RecordedCall) -> str:
    return "its examples have different lengths" if call.is_ragged else "it uses random numbers"


def _of_one_example(call: RecordedCall, inputs: Sequence[torch.Tensor]) -> tuple[tuple, dict]:
    """Return the arguments of the call for one example, given its ``inputs`` without batch dimension."""
    kinds = zip(inputs, call.input_has_examples(), call.input_batch_dims, strict=True)
    return call.rebuilt(
        [x.unsqueeze(batch_dim.dim or 0) if batched and not batch_dim.flat else x for x, batched, batch_dim in kinds]
    )


@contextmanager
def restored(module: nn.Module, *, but_flags: bool = False) -> Iterator[list[Any]]:
    """Restore what ``module`` and the modules in it hold afterwards: a tensor of functorch is invalid outside of it.
    Yields a list, to which the changes are added at the end.

    With ``but_flags``, attributes that were set to True or False keep the new value: they depend on no example, and
    transformers records so that it has registered the hooks which capture hidden states.
    """
    held, changed = Held({"": module}, hooks=False), list[Any]()
    try:
        yield changed
    finally:
        changed += held.restore(lambda name, x: but_flags and isinstance(x, bool))


def refuse_new_data(func: Callable) -> None:
    """Raise RuntimeError if ``func`` assigns to ``data`` of a tensor.

    ``Module.to``, ``float`` and others assign to parameters, even if nothing changes. torch does not refuse this for
    the tensors that replace a parameter inside functorch: they are left with freed memory, and the process crashes.
    """
    if func == _SET_DATA:  # not "is": each look-up makes another object
        raise RuntimeError("its forward pass assigns to the data of a tensor, as Module.to does")


class _NoNewData(TorchFunctionMode):
    """Refuses an assignment to ``data`` inside the context."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        refuse_new_data(func)
        return func(*args, **(kwargs or {}))


def _vmapped(
    call: RecordedCall, inputs: list[torch.Tensor], parameters: dict[nn.Parameter, str]
) -> dict[str, torch.Tensor]:
    module, backprops = call.module, call.backprops_by_example()
    values = {name: p.detach() for p, name in parameters.items()}

    def one_example(gradients, inputs):
        args, kwargs = _of_one_example(call, inputs)

        def run(values):
            with substituted(module, _pairs(parameters, values)), _NoNewData():
                return tuple(differentiable_leaves(module(*args, **kwargs)))

        out, vjp = torch.func.vjp(run, values)[:2]
        return vjp(_as_outputs(gradients, out))[0], out

    in_dims = ((0,) * len(backprops), [0 if batched else None for batched in call.input_has_examples()])
    with torch.enable_grad(), without_vmap_warnings():
        over_examples = torch.func.vmap(one_example, in_dims, randomness="error", chunk_size=_EXAMPLES_AT_ONCE)
        gradients, recomputed = over_examples(tuple(backprops), inputs)
    for before, after in zip(call.outputs_by_example(), recomputed, strict=True):
        _require_same(before, after.reshape(len(after), *before.shape[1:]), call)
    return gradients


def _one_by_one(
    call: RecordedCall, inputs: list[torch.Tensor], parameters: dict[nn.Parameter, str]
) -> dict[str, torch.Tensor]:
    module, batch, batched = call.module, call.batch_size, call.input_has_examples()
    outputs, backprops = call.outputs_by_example(), call.backprops_by_example()
    values = {name: p.detach().requires_grad_() for p, name in parameters.items()}
    gradients = {name: p.new_zeros(batch, *p.shape) for p, name in parameters.items()}
    for i in range(batch):
        with torch.enable_grad():
            rows = [x[i] if has_examples else x for x, has_examples in zip(inputs, batched, strict=True)]
            args, kwargs = _of_one_example(call, rows)
            with substituted(module, _pairs(parameters, values)):
                out = tuple(differentiable_leaves(module(*args, **kwargs)))
        own = [
            len(x) if isinstance(batch_dim, PackedRows) else None
            for x, batch_dim in zip(out, call.output_batch_dims, strict=True)
        ]
        for before, after, length in zip(outputs, out, own, strict=True):
            row = before[i][:length] if length is not None else before[i]
            _require_same(row, after.detach().reshape(row.shape), call)
        gradients_i = _as_outputs(
            [g[i][:length] if length is not None else g[i] for g, length in zip(backprops, own, strict=True)], out
        )
        live = [(x, g) for x, g in zip(out, gradients_i, strict=True) if x.requires_grad]
        if live:
            outputs_i, backprops_i = zip(*live, strict=True)
            _differentiate(outputs_i, backprops_i, values, gradients, i)
    return gradients


def _pairs(parameters: dict[nn.Parameter, str], values: dict[str, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
    return {p: values[name] for p, name in parameters.items()}


@contextmanager
def substituted(module: nn.Module, values: dict[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Replace parameters by ``values`` inside the context, in ``module`` and all modules in it, under every name.

    (torch.func.functional_call does not restore a parameter of a module that is registered under two names.)
    """
    slots: list[tuple[Any, Any, nn.Parameter]] = [  # a dictionary or a list, and a key or an index
        (slot, key, p)
        for owner in module.modules()
        for slot, items in ((owner._parameters, owner._parameters.items()), _flat_weights(owner))
        for key, p in items
        if p in values
    ]
    try:
        for slot, key, p in slots:
            slot[key] = values[p]
        yield
    finally:
        for slot, key, p in slots:
            slot[key] = p


def _flat_weights(module: nn.Module) -> tuple[list, Iterator]:
    """Return the list from which recurrent layers of torch read their weights, and its items."""
    weights = module._flat_weights if isinstance(module, nn.RNNBase) else []
    return weights, enumerate(weights)


def _as_outputs(gradients: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(g.reshape(x.shape).to(x.dtype) for g, x in zip(gradients, outputs, strict=True))


def _differentiate(
    outputs: Sequence[torch.Tensor],
    backprops: Sequence[torch.Tensor],
    values: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    i: int,
) -> None:
    """Write example i's gradients of ``values`` into ``gradients``."""
    found = torch.autograd.grad(outputs, list(values.values()), backprops, retain_graph=True, allow_unused=True)
    for name, g in zip(values, found, strict=True):
        if g is not None:
            gradients[name][i] = g


def _masked(
    call: RecordedCall, inputs: list[torch.Tensor], parameters: dict[nn.Parameter, str]
) -> dict[str, torch.Tensor]:
    module, batch, backprops = call.module, call.batch_size, call.backprops_by_example()
    values = {name: p.detach().requires_grad_() for p, name in parameters.items()}
    kinds = zip(inputs, call.input_has_examples(), call.input_batch_dims, strict=True)
    inputs = [batch_dim.restored(x) if batched else x for x, batched, batch_dim in kinds]
    with torch.enable_grad(), replayed(call.random_state):
        args, kwargs = call.rebuilt(inputs)
        with substituted(module, _pairs(parameters, values)):
            recomputed = differentiable_leaves(module(*args, **kwargs))
        shaped = []
        for before, after, batch_dim in zip(
            call.outputs_by_example(), recomputed, call.output_batch_dims, strict=True
        ):
            after = batch_dim.batch_first(after, len(before))
            shaped.append(after.expand(before.shape) if len(after) == 1 else after.reshape(before.shape))
            _require_same(before, shaped[-1], call)
    live = [(x, g.to(x.dtype)) for x, g in zip(shaped, backprops, strict=True) if x.requires_grad]
    gradients = {name: p.new_zeros(batch, *p.shape) for p, name in parameters.items()}
    for i in range(batch if live else 0):
        masked = [torch.zeros_like(g) for _, g in live]
        for mask, (_, g) in zip(masked, live, strict=True):
            mask[i] = g[i]
        _differentiate([x for x, _ in live], masked, values, gradients, i)
    return gradients


def _require_same(before: torch.Tensor, after: torch.Tensor, call: RecordedCall) -> None:
    """Raise RuntimeError unless the recomputed output equals the recorded one, up to rounding relative to its size, in
    the entries that are finite."""
    is_half = call.autocast[2] or any(x.dtype in HALF for x in (*call.inputs, *call.outputs))
    tolerance = 3e-2 if is_half else 1e-4
    same = before.shape == after.shape
    if same:
        a, b = before.float(), after.float()
        finite = torch.isfinite(a)
        same = torch.equal(finite, torch.isfinite(b)) and bool(
            (a[finite] - b[finite]).norm() <= tolerance * a[finite].norm()
        )
    if not same:
        raise RuntimeError("it gives another output than in the forward pass: it has hidden state, or mixes examples")


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """Switch off the inference path of nn.MultiheadAttention, which computes differently and ignores autocast on the
    CPU."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def without_vmap_warnings() -> Iterator[None]:
    """Silence vmap's warnings of operations that torch cannot vectorise yet. (A filter of ``warnings`` would reset
    Python's record of warnings that were shown once.)"""
    functorch: Any = torch._C._functorch  # private functions, unknown to torch's types
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)
