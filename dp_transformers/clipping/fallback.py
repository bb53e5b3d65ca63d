"""Any other module that answers for trainable parameters: re-run it on what it was given, and ask for one gradient per example.

Slow, and right for whatever treats its examples independently. There are three ways:

* **vmap**: the vector-Jacobian product of one example, vectorised over the batch.
* **one by one**: the same in a loop, for what vmap cannot run (data-dependent control flow, in-place writes, sorted tokens).
* **masked**, for modules that use random numbers (dropout): re-run on the whole batch with the random numbers it had, and differentiated
  once for each example with the others' output gradients set to zero.

The re-computed output is compared with the recorded one, so that a module with hidden state, or (in the first two) one that mixes its
examples, is refused instead of trained wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..randomness import replayed
from .errors import UnsupportedModuleError, ways_out
from .layout import Layout
from .terms import Dense, Term

logger = logging.getLogger(__name__)

_EXAMPLES_AT_ONCE = 16
_SET_DATA = torch.Tensor.data.__set__


@dataclass
class Call:
    """One recorded call of a module, with the gradients of its outputs.

    ``inputs`` are its tensors; those with ``batched[i]`` are given as ``(B, ...)`` or, flat, ``(B, positions, ...)``, whatever their layout
    is (``layouts``); the others are the same for all examples. ``outputs`` and ``backprops`` are given likewise; an output may be
    ``(1, ...)``, the same for all.
    """

    rebuild: Callable[[Sequence[torch.Tensor]], tuple[tuple, dict]]
    flatten: Callable[[Any], list[torch.Tensor]]
    inputs: Sequence[torch.Tensor]
    batched: Sequence[bool]
    layouts: Sequence[Layout]
    outputs: Sequence[torch.Tensor]
    output_layouts: Sequence[Layout]
    backprops: Sequence[torch.Tensor]
    random_state: Any  # as at the start of the call; None where the call used no random numbers
    tolerance: float  # by how much a re-computed output may differ, relative to its size


def per_example_gradients(path: str, module: nn.Module, parameters: dict[nn.Parameter, str], call: Call) -> dict[nn.Parameter, Term]:
    """Dense terms of ``parameters`` (names relative to ``module``) for one recorded call.

    Raises:
        UnsupportedModuleError: re-running it fails, or gives other outputs than the call gave.
    """
    if len(call.backprops[0]) == 0:
        return {p: Dense(p.new_zeros(0, *p.shape)) for p in parameters}
    reasons = []
    for way in (_masked,) if call.random_state is not None else (_vmapped, _one_by_one):
        try:
            with without_fused_attention(), _unchanged(module):
                # on copies: the module may write to what it is given, which autograd still needs as it is
                gradients = way(module, parameters, replace(call, inputs=[x.clone() for x in call.inputs]))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        if way is not _vmapped:
            _say_once(type(module), reasons[0] if reasons else "it uses random numbers")
        return {p: Dense(gradients[name].detach()) for p, name in parameters.items()}
    raise UnsupportedModuleError(
        f"'{path}' ({type(module).__name__}) has no rule for per-example gradients, and re-running it one example at a time failed "
        f"({'; then '.join(reasons)}). If it fills a cache, call the model with use_cache=False. {ways_out(path, module)}",
        module,
    )


def _of_one_example(call: Call, inputs: Sequence[torch.Tensor]) -> tuple[tuple, dict]:
    """The arguments of the call for one example, whose ``inputs`` have no batch dimension."""
    kinds = zip(inputs, call.batched, call.layouts, strict=True)
    return call.rebuild([x.unsqueeze(layout.batch_dim) if batched and not layout.flat else x for x, batched, layout in kinds])


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Afterwards, ``module`` and what it contains hold what they held: no tensor of the re-run, which functorch would not let live on."""
    before = [(held, dict(held)) for owner in module.modules() for held in (vars(owner), owner._parameters, owner._buffers, owner._modules)]
    try:
        yield
    finally:
        for held, contents in before:
            held.clear()
            held.update(contents)


class _NoNewData(TorchFunctionMode):
    """Inside, an assignment of ``data`` raises.

    ``Module.to``, ``float`` and their like assign to parameters, even where nothing changes. For what stands in a parameter's place while
    functorch runs, torch does not refuse that: it leaves a tensor behind whose memory is gone, and the process crashes.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func == _SET_DATA:  # each look-up makes another object
            raise RuntimeError("its forward pass assigns to the data of a tensor, as Module.to does")
        return func(*args, **(kwargs or {}))


def _vmapped(module: nn.Module, parameters: dict[nn.Parameter, str], call: Call) -> dict[str, torch.Tensor]:
    values = {name: p.detach() for p, name in parameters.items()}

    def one_example(gradients, inputs):
        args, kwargs = _of_one_example(call, inputs)

        def run(values):
            with substituted(module, _pairs(parameters, values)), _NoNewData():
                return tuple(call.flatten(module(*args, **kwargs)))

        out, vjp = torch.func.vjp(run, values)
        return vjp(_as_outputs(gradients, out))[0], out

    in_dims = ((0,) * len(call.backprops), [0 if batched else None for batched in call.batched])
    with torch.enable_grad():
        over_examples = torch.func.vmap(one_example, in_dims, randomness="error", chunk_size=_EXAMPLES_AT_ONCE)
        gradients, recomputed = over_examples(tuple(call.backprops), [x.detach() for x in call.inputs])
    for before, after in zip(call.outputs, recomputed, strict=True):
        _require_same(before, after.reshape(len(after), *before.shape[1:]), call.tolerance)
    return gradients


def _one_by_one(module: nn.Module, parameters: dict[nn.Parameter, str], call: Call) -> dict[str, torch.Tensor]:
    values, batch = {name: p.detach().requires_grad_() for p, name in parameters.items()}, len(call.backprops[0])
    gradients = {name: p.new_zeros(batch, *p.shape) for p, name in parameters.items()}
    for i in range(batch):
        with torch.enable_grad():
            rows = [x.detach()[i] if batched else x.detach() for x, batched in zip(call.inputs, call.batched, strict=True)]
            args, kwargs = _of_one_example(call, rows)
            with substituted(module, _pairs(parameters, values)):
                out = tuple(call.flatten(module(*args, **kwargs)))
        for before, after in zip(call.outputs, out, strict=True):
            _require_same(before[i], after.detach().reshape(before.shape[1:]), call.tolerance)
        backprops = _as_outputs([g[i] for g in call.backprops], out)
        live = [(x, g) for x, g in zip(out, backprops, strict=True) if x.requires_grad]
        if live:
            _differentiate(*zip(*live, strict=True), values, gradients, i)
    return gradients


def _pairs(parameters: dict[nn.Parameter, str], values: dict[str, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
    return {p: values[name] for p, name in parameters.items()}


@contextmanager
def substituted(module: nn.Module, values: dict[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Inside, ``module`` and what it contains see ``values`` wherever they hold those parameters, under whatever name.

    (torch.func.functional_call does not put a parameter back whose module is held under two names.)
    """
    slots = [
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
    """Recurrent layers of torch read their weights from a list of their own."""
    weights = module._flat_weights if isinstance(module, nn.RNNBase) else []
    return weights, enumerate(weights)


def _as_outputs(gradients: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(g.reshape(x.shape).to(x.dtype) for g, x in zip(gradients, outputs, strict=True))


def _differentiate(outputs, backprops, values: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], i: int) -> None:
    """Write example i's gradients of ``values`` into ``gradients``."""
    found = torch.autograd.grad(outputs, list(values.values()), backprops, retain_graph=True, allow_unused=True)
    for name, g in zip(values, found, strict=True):
        if g is not None:
            gradients[name][i] = g


def _masked(module: nn.Module, parameters: dict[nn.Parameter, str], call: Call) -> dict[str, torch.Tensor]:
    values = {name: p.detach().requires_grad_() for p, name in parameters.items()}
    kinds = zip(call.inputs, call.batched, call.layouts, strict=True)
    inputs = [layout.restored(x.detach()) if batched else x.detach() for x, batched, layout in kinds]
    with torch.enable_grad(), replayed(call.random_state):
        args, kwargs = call.rebuild(inputs)
        with substituted(module, _pairs(parameters, values)):
            recomputed = call.flatten(module(*args, **kwargs))
        shaped = []
        for before, after, layout in zip(call.outputs, recomputed, call.output_layouts, strict=True):
            after = layout.batch_first(after, len(before))
            shaped.append(after.expand(before.shape) if len(after) == 1 else after.reshape(before.shape))
            _require_same(before, shaped[-1], call.tolerance)
    live = [(x, g.to(x.dtype)) for x, g in zip(shaped, call.backprops, strict=True) if x.requires_grad]
    batch = len(call.backprops[0])
    gradients = {name: p.new_zeros(batch, *p.shape) for p, name in parameters.items()}
    for i in range(batch if live else 0):
        masked = [torch.zeros_like(g) for _, g in live]
        for mask, (_, g) in zip(masked, live, strict=True):
            mask[i] = g[i]
        _differentiate([x for x, _ in live], masked, values, gradients, i)
    return gradients


def _require_same(before: torch.Tensor, after: torch.Tensor, tolerance: float) -> None:
    """The recomputed output is the recorded one, up to ``tolerance`` of its size, over the entries that are finite."""
    same = before.shape == after.shape
    if same:
        a, b = before.float(), after.float()
        finite = torch.isfinite(a)
        same = torch.equal(finite, torch.isfinite(b)) and bool((a[finite] - b[finite]).norm() <= tolerance * a[finite].norm())
    if not same:
        raise RuntimeError("it does not give the output it gave: it has hidden state, or mixes examples")


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """nn.MultiheadAttention has an inference path that is another computation, and knows no autocast on the CPU."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_SAID: set[type] = set()


def _say_once(cls: type, reason: str) -> None:
    if cls not in _SAID:
        _SAID.add(cls)
        logger.warning(
            "%s cannot be re-run by vmap (%s) and is differentiated once for each example of a physical batch: exact, and slow.",
            cls.__name__,
            reason,
        )
