"""The tap: an identity behind every module that owns parameters, whose backward turns the module's call into terms.

All taps lead to the *probe*, a zero vector of shape (B,), so ``torch.autograd.grad(losses.sum(), probe)`` reaches all
of them, and native layers compute no weight gradient. No module is wrapped or re-classed, native kernels are used, and
no activation is saved twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import HOW_TO_DO_WITHOUT, UnsupportedModuleError, how_to_fix
from .fallback import per_example_gradients
from .layer_rule import Terms
from .owners import Owner
from .parallel.dtensor import as_dtensor_like
from .precision import exact_arithmetic, sum_dtype
from .recorded_call import BackwardPass, ForwardPass, RecordedCall, is_differentiable
from .terms import Dense, NormOnly, Term

# nodes of autograd that save at most their inputs
_NEEDS_NO_OUTPUT = {"AddBackward0", "AddmmBackward0", "MulBackward0"}


class Tap(torch.autograd.Function):
    """Identity on a module's outputs; its backward passes their gradients to ``call``. A gradient of the probe shows
    that a tap was reached."""

    @staticmethod
    def forward(
        ctx, call: RecordedCall, in_place: bool, probe: torch.Tensor, num_outputs: int, *tensors: torch.Tensor
    ):
        outputs, saved = tensors[:num_outputs], tensors[num_outputs:]
        ctx.call = call
        ctx.save_for_backward(*saved)
        if in_place:
            # the same memory, but not a view, since autograd refuses in-place writes to views
            outputs = tuple(x.data for x in outputs)
        elif not call.owner.has_rule:
            outputs = tuple(x.clone() for x in outputs)  # the module may need its output, and the fallback does
        return outputs if num_outputs > 1 else outputs[0]

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        call, forward = ctx.call, ctx.call.forward
        backward, saved = _reached(ctx)
        backprops = [g.contiguous() for g in grads]  # the layer's own backward, which would copy it too, gets the copy
        needed = ctx.needs_input_grad[4 + len(grads) :]
        input_gradients = {x: None for x, is_needed in zip(saved, needed, strict=True) if is_needed}
        reached = None
        if backward is not None:
            reached = forward.probe_gradient()
            call.restore(saved, backprops, input_gradients)
            try:
                with exact_arithmetic(forward.probe.device, forward.reduced):
                    for parameter, term in _terms(call, backward).items():
                        backward.add(parameter, term)
            finally:
                call.release()
        if input_gradients and all(g is not None for g in input_gradients.values()):
            # the rule computed them, so autograd need not
            return None, None, reached, None, *[None] * len(grads), *map(input_gradients.get, saved)
        return None, None, reached, None, *backprops, *[None] * len(saved)


def _reached(ctx: Any) -> tuple[BackwardPass | None, list[torch.Tensor]]:
    """Return the pass that needs the terms of the call whose tap was reached (None if none does), and the tensors that
    the tap saved.

    Raises:
        UnsupportedModuleError: one of these was modified since.
    """
    if torch.is_grad_enabled():
        raise ValueError(
            "backward with create_graph=True (a gradient penalty, second derivatives) uses weights outside of all "
            "rules, so per-example gradients would not be clipped: compute losses without gradients inside them."
        )
    call, forward = ctx.call, ctx.call.forward
    forward.require_clipper()  # before activation checkpointing recomputes the saved tensors
    try:
        saved = [x.detach() if x.requires_grad else x for x in ctx.saved_tensors]
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise UnsupportedModuleError(  # the self-check then makes a parent own the parameters
            f"the model writes in place to an input or output of {call.owner} after it ran, so its per-example "
            "gradients cannot be computed. Make a copy there (x = x + y instead of x += y). " + HOW_TO_DO_WITHOUT,
            call.owner.module,
        ) from error
    if not forward.is_current:
        raise ValueError(
            f"the losses also depend on an earlier forward pass (of {forward.batch_size} examples), or backward "
            "ran over it before, so their gradients would not be clipped together. Compute losses from forward "
            "passes of one batch size, and call backward once."
        )
    if forward.backward is not None:
        forward.backward.on_call(call.owner, saved)
    return forward.backward, saved


@dataclass(frozen=True)
class CopiedParameters:
    """The parameters of ``owner`` in one call that runs one example at a time.

    Attributes:
        first_node: autograd's sequence number at the start of the call.
    """

    owner: Owner
    forward: ForwardPass
    first_node: int

    @property
    def parameters(self) -> dict[nn.Parameter, str]:
        return self.owner.names


class ParameterTap(torch.autograd.Function):
    """Makes a copy of every parameter for each example, (B, *p.shape). The gradient of the copies is the term."""

    @staticmethod
    def forward(ctx, call: CopiedParameters, probe: torch.Tensor, number: int, *tensors: torch.Tensor):
        parameters, saved = tensors[:number], tensors[number:]
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return tuple(p.data.expand(len(probe), *p.shape) for p in parameters)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        call, forward = ctx.call, ctx.call.forward
        backward, saved = _reached(ctx)
        found = {p: g for p, g in zip(call.parameters, grads, strict=True) if g is not None}
        reached, sums = None, {}
        if backward is None:
            sums = {p: g.sum(0, dtype=sum_dtype(p)).to(p.dtype) for p, g in found.items()}
        else:
            reached = forward.probe_gradient()
            with exact_arithmetic(forward.probe.device, forward.reduced):
                for parameter, g in found.items():
                    backward.add(parameter, Dense(g))
        return None, reached, None, *map(sums.get, call.parameters), *[None] * len(saved)


def tapped(call: RecordedCall) -> Any:
    """Return the output of the call, behind the tap."""
    owner, forward, outputs = call.owner, call.forward, call.outputs
    # a rule that takes the call may give the gradients of the inputs, so the tap depends on them too
    saved = [x.detach() if x.requires_grad and not owner.rule.takes_call else x for x in call.inputs]
    if owner.may_be_rerun:
        saved += [x.detach() for x in outputs]  # to compare with recomputed outputs, or to compute from
    in_place = not owner.rule.backward_reads_output or _ends_in_arithmetic(call)
    tensors = Tap.apply(call, in_place, forward.probe, len(outputs), *outputs, *saved)
    given = iter(tensors if isinstance(tensors, tuple) else (tensors,))
    leaves = [as_dtensor_like(next(given), x) if is_differentiable(x) else x for x in call.output_leaves]
    call.inputs = call.outputs = call.output_leaves = ()  # autograd holds and frees the saved tensors
    return call.rebuilt_output(leaves)


def _ends_in_arithmetic(call: RecordedCall) -> bool:
    """Return True if the module, which is never re-run, has one output, and autograd does not save it."""
    return (
        not call.owner.may_be_rerun
        and len(call.outputs) == 1
        and type(call.outputs[0].grad_fn).__name__ in _NEEDS_NO_OUTPUT
    )


TAPS = (Tap._backward_cls, ParameterTap._backward_cls)  # types of their graph nodes


def _terms(call: RecordedCall, backward: BackwardPass) -> dict[nn.Parameter, Term]:
    owner, rule, trainable = call.owner, call.owner.rule, call.forward.trainable
    call.require_as_called()
    if rule.norms is not None and backward.wants_only_norms_of(owner.names):
        found = {p: NormOnly(norm_b) for p, norm_b in rule.norms(owner.module, *_by_example(call)).items()}
        if shapes := [tuple(term.norm_b.shape) for term in found.values() if term.norm_b.shape != (call.batch_size,)]:
            raise ValueError(
                f"the function registered for {owner} with register_norm_sampler returned a tensor of shape "
                f"{shapes[0]}. Let it return for every parameter one norm for each of the {call.batch_size} examples, "
                f"a tensor of shape ({call.batch_size},)."
            )
    elif rule.terms is None:
        found = _rerun(call)
    elif rule.takes_call:
        found = rule.terms(call)
    else:
        found = _by_rule(call, rule.terms)
    if trainable.shards:
        found = {trainable.shards.sharded(p): term for p, term in found.items()}
    if missing := [name for p, name in owner.names.items() if p not in found]:
        what = "norms" if any(isinstance(term, NormOnly) for term in found.values()) else "gradients"
        raise ValueError(
            f"the rule of {owner} gives no {what} for its trainable {missing}. Let the rule you registered "
            f"(register_{'norm' if what == 'norms' else 'grad'}_sampler) return them for every trainable parameter of "
            "the module, or freeze these (requires_grad_(False))."
        )
    terms = {p: Dense(term) if isinstance(term := found[p], torch.Tensor) else term for p in owner.names}
    if trainable.parallel:
        return {p: trainable.parallel.local_part(owner, p, t, call.sums_positions) for p, t in terms.items()}
    return terms


def _by_rule(call: RecordedCall, rule: Callable[..., Terms]) -> Terms:
    """Call the rule and check its result: terms, or gradients."""
    activations, backprops = _by_example(call)
    try:
        found = rule(call.module, activations, backprops)
    except UnsupportedModuleError:  # the self-check then makes a parent own the parameters
        raise
    except ValueError as error:  # rules do not know the module's path
        raise ValueError(f"{call.owner}: {error}") from error
    for p, gradient in found.items() if not call.forward.trainable.parallel else ():
        if isinstance(gradient, torch.Tensor) and gradient.shape != (wanted := (call.batch_size, *p.shape)):
            raise ValueError(
                f"the rule of {call.owner} gives a gradient of shape {tuple(gradient.shape)}. Let the rule you "
                f"registered (register_grad_sampler) return one for each of the {call.batch_size} examples, a tensor "
                f"of shape {wanted}."
            )
    return found


def _by_example(call: RecordedCall) -> tuple[list[torch.Tensor], torch.Tensor | Sequence[torch.Tensor]]:
    """Return ``activations`` and ``backprops`` for a rule, batch first."""
    owner, batch = call.owner, call.batch_size
    if owner.rule.channels_second and any(batch_dim.flat for batch_dim in call.output_batch_dims):
        reason = (
            f"{owner} was called with a row for every position, (B * T, C, ...), and its rule takes the second "
            "dimension for channels: call it on (B, C, ...), with one row for each example. "
        )
        raise UnsupportedModuleError(reason + how_to_fix(owner.module), owner.module)
    inputs, grads = call.inputs_by_example(), call.backprops_by_example()
    inputs = [x.expand(batch, *x.shape[1:]) if x.dim() and len(x) == 1 else x for x in inputs]
    return inputs, grads[0] if len(grads) == 1 else grads


def _rerun(call: RecordedCall) -> dict[nn.Parameter, Term]:
    device, dtype, enabled = call.autocast
    with call.forward.suspended(), torch.autocast(device, dtype=dtype, enabled=enabled):
        names = {
            whole: name
            for p, name in call.parameters.items()
            for whole in call.forward.trainable.shards.all_unsharded(p)
        }
        return per_example_gradients(call, names)
