"""PerExampleClipper: per-example losses in, the sum of clipped per-example gradients in ``p.grad`` out.

How it works. A forward hook passes the output of every module that owns trainable parameters through an identity, the *tap*
(:class:`_Tap`), together with a *probe*: a zero vector of shape (B,). When backward reaches a tap it holds the gradient g of the
module's output; with the module's input a, its rule gives the terms of the parameters' per-example gradients
(:mod:`~dp_transformers.clipping.terms`), whose norms the pass collects (:mod:`~dp_transformers.clipping.norms`). All taps lead to the
probe, so ``torch.autograd.grad(losses.sum(), probe)`` is the whole norm pass, and native layers are never asked for a weight
gradient. Nothing is wrapped or re-classed, native kernels stay, no activation is saved twice.

In a loop that calls ``loss.backward()`` itself (:meth:`PerExampleClipper.follow`) it is that call's backward pass which fills the probe.
Claimed parameters then ask for no gradient while their modules run, so autograd computes no unclipped weight gradient at all, and the
clipped sum lies in ``p.grad`` when ``backward`` returns.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..randomness import global_state, random_state, same_state, set_global_state
from . import norms
from . import terms as term_algebra
from .claims import Claim, announce, claim_parameters
from .errors import UnsupportedModuleError, ways_out
from .fallback import Call, per_example_gradients
from .graph import parameter_past_taps
from .layer_rule import ForwardContext, ModuleCall, Tap, forward_context_for
from .layout import BATCH_FIRST, Layout, batch_size_of, positions_of
from .model_state import ModelState
from .modes import REDUCED_FP32_SLACK, SECOND_PASS_SLACK, choose_mode
from .parallel.dtensor import like, local
from .parallel.fsdp2 import Shards
from .parallel.tensor_parallel import TensorParallel
from .precision import FULL_PRECISION, HALF, TRAINABLE, exact_arithmetic, product_settings, set_gradient, sum_dtype, without_autocast
from .terms import Dense, Norm, Term

logger = logging.getLogger(__name__)

SMALLEST_BOUND = 1e-12
_WRONG_BOUND = (
    f"max_grad_norm must be a finite number of at least {SMALLEST_BOUND:g}, the bound on each example's gradient (squares of smaller norms vanish in "
    "float32); got {!r}."
)
_NEEDS_NO_OUTPUT = {"AddBackward0", "AddmmBackward0", "MulBackward0"}  # nodes of autograd that save what they are given, at most


class Follower(Protocol):
    """Who follows a clipper from batch to batch (:meth:`PerExampleClipper.follow`)."""

    def before_forward(self, args: tuple, kwargs: dict) -> bool:
        """The model is called with these, by somebody who will go backward. Whether the self-check ran. May raise."""

    def current_batch(self) -> object:
        """What stands for the batch that is worked on; forward passes on several are not clipped as one."""

    def before_sum(self, batch_size: int) -> torch.Tensor | None:
        """The weights of a batch that goes backward; ``grad`` must hold what the clipped sum is to be added to. May raise."""

    def after_sum(self) -> None:
        """The clipped sum has been added to ``grad``."""


class _Tap(torch.autograd.Function):
    """Identity on a module's outputs; its backward reports their gradients to ``use``. A gradient of the probe says that one was reached."""

    @staticmethod
    def forward(ctx, use: _Use, probe: torch.Tensor, num_outputs: int, *tensors: torch.Tensor):
        outputs, saved = tensors[:num_outputs], tensors[num_outputs:]
        ctx.use = use
        ctx.save_for_backward(*saved)
        if use.allows_in_place:
            outputs = tuple(x.data for x in outputs)  # same memory, but not a view to autograd, which refuses in-place writes to those
        elif use.claim.is_rerun:
            outputs = tuple(x.clone() for x in outputs)  # the module may need its output, and so does the fallback
        return outputs if num_outputs > 1 else outputs[0]

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        if torch.is_grad_enabled():
            raise ValueError(
                "backward with create_graph=True (a gradient penalty, second derivatives) uses weights in a way that no rule sees, so per-example "
                "gradients would not be clipped: compute losses without gradients inside them."
            )
        ctx.use.begin_backward()  # before activation checkpointing recomputes what was saved
        grads = [g.contiguous() for g in grads]  # the layer's own backward would copy it too: let it have the copy
        saved, needed = [x.detach() for x in ctx.use.recorded(ctx)], ctx.needs_input_grad[3 + len(grads) :]
        ctx.use.note_recomputed(saved)
        input_gradients = {x: None for x, is_needed in zip(saved, needed, strict=True) if is_needed}
        reached = ctx.use.measure(saved, grads, input_gradients)
        if any(g is None for g in input_gradients.values()):
            input_gradients = {}
        elif input_gradients:  # the rule went back through the module, so autograd need not
            grads = [None] * len(grads)
        return None, reached, None, *grads, *map(input_gradients.get, saved)


class _Pass:
    """One forward pass of the model and the backward passes over it."""

    def __init__(self, batch_size: int, probe: torch.Tensor, counts: Callable[[nn.Parameter], bool] = lambda _: True):
        self.batch_size = batch_size
        self.counts = counts  # whether this process counts a parameter's norm
        self.probe = probe
        self.earlier_probes: list[torch.Tensor] = []  # of forward passes that no backward has used
        self.uses: Counter[nn.Parameter] = Counter()  # calls seen in forward: how many terms make up the gradient
        self.in_backward = False
        self.positions: set[int] = set()  # how many an example may have
        self.reentrant = False  # some module ran without a graph, to be re-run inside backward
        self.recomputes = False  # activation checkpointing runs modules again inside backward
        self.recomputed: list[dict[tuple[Claim, int], list[torch.Tensor]]] = []  # of each backward pass, sizes of what calls were given
        self.low_precision = torch.float32
        self.followed = False  # by a loss.backward() of somebody else
        self.given: object = None  # the batch of the follower that it ran on
        self.restart(measure=False)

    def restart(self, *, measure: bool, instantiate: bool = False, keep: bool = False) -> None:
        """Begin a backward pass that measures norms (instantiating always or by cost, keeping the terms or not), or does nothing."""
        self.measure, self.instantiate, self.keep = measure, instantiate, keep
        self.rounding = norms.FP32  # of the second pass, where there is one
        self.norms = norms.Norms()  # of the parameters all of whose uses were seen
        self.is_reached = False
        self.open: dict[nn.Parameter, list[Term]] = defaultdict(list)  # used several times, not all seen yet
        self.kept: dict[nn.Parameter, list[Term]] = {}
        self.small: dict[torch.device, dict[nn.Parameter, torch.Tensor]] = defaultdict(dict)  # (B, n), kept to be laid side by side
        self.together: list[tuple[list[nn.Parameter], list[int], Dense]] = []  # with each one's n
        self.memo = term_algebra.Memo()
        self.recomputed.append({})
        self.reached_calls: Counter[Claim] = Counter()

    def wants_only_norms_of(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether no gradient is needed: nothing is kept, and the norm of each one's only use is the norm of its gradient."""
        return not (self.keep or self.instantiate) and all(self.uses[p] == 1 for p in parameters)

    def reached(self) -> torch.Tensor | None:
        """A gradient for the probe, once."""
        if self.is_reached:
            return None
        self.is_reached = True
        return self.probe.detach()

    def add(self, parameter: nn.Parameter, term: Term) -> None:
        """Note one use, and at the last one the forward pass announced the norm of all together."""
        if parameter in self.kept:
            raise RuntimeError(
                "the forward pass was run again inside backward by something else than torch's activation checkpointing, so a parameter was used more "
                "often than was counted. Use torch.utils.checkpoint (gradient_checkpointing=True, use_reentrant=False), or switch re-running off."
            )
        seen = self.open[parameter]
        seen.append(term.instance() if self.keep and isinstance(term, Dense) else term)
        if len(seen) >= self.uses[parameter]:
            self.close(parameter)

    def close(self, parameter: nn.Parameter) -> None:
        terms = term_algebra.merge(self.open.pop(parameter))
        if self.keep:
            terms = term_algebra.merge([t.instance() if self.instantiate or t.keeps_instance else t for t in terms])
        counts, self.kept[parameter] = self.counts(parameter), []
        if self.keep and counts and not self.instantiate and (small := term_algebra.small_gradient(terms)) is not None:
            self.small[small.grad.device][parameter] = small.flat
            return
        if self.keep:
            self.kept[parameter] = terms
        if not counts:
            return
        measured = term_algebra.measure(terms, instantiate=self.instantiate, memo=self.memo)
        rounding = self.rounding
        if self.keep:  # the sum is of these very terms, and most norms know what it may be off by
            terms = [t for t in terms if t.is_bf16 or isinstance(t, term_algebra.Routed | term_algebra.Stacked)]
            rounding = norms.SPLIT if any(t.is_bf16 for t in terms) else norms.FP32
        self.norms.add(measured, term_algebra.position_lengths(terms, self.memo), rounding)

    def squared_norms(self) -> torch.Tensor:
        """(B,) of everything that was closed."""
        for small in self.small.values():
            together = Dense(torch.cat(list(small.values()), 1) if len(small) > 1 else next(iter(small.values())))
            self.together.append((list(small), [x.shape[1] for x in small.values()], together))
            self.norms.add(together.measure())
        self.small.clear()
        total_b = self.norms.total(self.probe.device)
        return torch.zeros_like(self.probe) if total_b is None else total_b

    def small_sums(self, coef_b: torch.Tensor, bad_b: torch.Tensor | None) -> dict[nn.Parameter, torch.Tensor]:
        """The clipped sums of small gradients, by one product for all of them."""
        sums = {}
        for parameters, sizes, gradients in self.together:
            total = _weighted_sum(gradients, coef_b, bad_b, gradients.grad.device)
            # .data: each counts its own changes
            sums |= {p: piece.data for p, piece in zip(parameters, total.split(sizes), strict=True)}
        return sums


def _weighted_sum(
    term: Term, coef_b: torch.Tensor, bad_b: torch.Tensor | None, device: torch.device, memo: term_algebra.Memo | None = None
) -> torch.Tensor:
    term = term if bad_b is None else term.clean(bad_b.to(device))
    return term.weighted_sum(coef_b.to(device), memo)


class _Use:
    """One call of a claimed module in one forward pass: what its tap knows."""

    def __init__(self, clipper: PerExampleClipper, claim: Claim, args: tuple, kwargs: dict, output: Any, started: int):
        self.clipper, self.claim, self.forward_pass = clipper, claim, clipper._pass
        self.started, self.claimed = started, claim.names
        leaves, self.input_spec = _flatten((args, kwargs))
        self.is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
        self.constants = [None if is_tensor else x for x, is_tensor in zip(leaves, self.is_tensor, strict=True)]
        self.inputs = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.output_leaves, self.output_spec = _flatten(output)
        self.outputs = [x for x in self.output_leaves if _differentiable(x)]
        if not self.outputs:
            raise ValueError(
                f"{claim} returns no tensor that a gradient could come from, but {type(output).__name__}. "
                + ways_out(claim.path, claim.module)
            )
        self.sums_positions = bool(clipper.parallel) and clipper.parallel.sums_positions(claim, self.inputs, self.outputs)
        if clipper.parallel:
            self.inputs, self.outputs = [local(x) for x in self.inputs], [local(x) for x in self.outputs]
        layouts = claim.layouts_of(self.inputs, self.outputs)
        self.input_layouts, self.output_layouts = layouts[: len(self.inputs)], layouts[len(self.inputs) :]
        if not claim.rule.takes_call:
            self.outputs = [self._with_batch(x, layout) for x, layout in zip(self.outputs, self.output_layouts, strict=True)]
        self.random_state = None
        if claim.may_be_rerun:
            device = self.outputs[0].device
            self.autocast = (device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))
            if not same_state(claim.random_state, random_state(device)):
                self.random_state = claim.random_state

    def _with_batch(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """A module that runs once for the whole batch returns (1, ...): give each example its copy, so that g comes per example."""
        batch = self.forward_pass.batch_size
        if layout.holds_examples(x, batch) and (not layout.flat or self._holds_all_positions(x)):
            return x
        if x.dim() and len(x) == 1 and layout == BATCH_FIRST:
            return x.expand(batch, *x.shape[1:])
        raise UnsupportedModuleError(  # which the self-check has answered by a parent
            f"{self.claim} returns a tensor of shape {tuple(x.shape)}, whose first dimension is neither the batch ({batch}) nor 1, so "
            "gradients per example cannot be told apart. " + ways_out(self.claim.path, self.claim.module),
            self.claim.module,
        )

    def _holds_all_positions(self, x: torch.Tensor) -> bool:
        positions, rest = divmod(len(x), self.forward_pass.batch_size)
        return rest == 0 and (positions == 1 or positions in self.forward_pass.positions)

    def tapped_output(self) -> Any:
        # a whole-call rule may give the gradients of the inputs, so there the tap hangs on them too
        saved = list(self.inputs) if self.claim.rule.takes_call else [x.detach() for x in self.inputs]
        if self.claim.may_be_rerun:
            saved += [x.detach() for x in self.outputs]  # to compare what is recomputed with, or to compute from
        forward_pass = self.forward_pass
        if any(x.dtype in HALF for x in self.outputs):
            forward_pass.low_precision = next(x.dtype for x in self.outputs if x.dtype in HALF)
        probe = forward_pass.probe
        self.allows_in_place = not self.claim.rule.backward_reads_output or self._ends_in_arithmetic()
        outputs = _Tap.apply(self, probe, len(self.outputs), *self.outputs, *saved)
        tapped = iter(outputs if isinstance(outputs, tuple) else (outputs,))
        leaves = [like(next(tapped), x) if _differentiable(x) else x for x in self.output_leaves]
        del self.inputs, self.outputs, self.output_leaves  # autograd holds what is needed, and frees it
        return leaves[0] if self.output_spec is None else tree_unflatten(leaves, self.output_spec)

    def _ends_in_arithmetic(self) -> bool:
        """Whether a module of somebody else, whose rule does not run it again, needs its only output no more than torch's layers do."""
        return not self.claim.may_be_rerun and len(self.outputs) == 1 and type(self.outputs[0].grad_fn).__name__ in _NEEDS_NO_OUTPUT

    def _rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple, dict]:
        given = iter(tensors)
        leaves = [next(given) if is_tensor else x for x, is_tensor in zip(self.constants, self.is_tensor, strict=True)]
        return (tuple(leaves), {}) if self.input_spec is None else tree_unflatten(leaves, self.input_spec)

    def _flatten_output(self, output: Any) -> list[torch.Tensor]:
        return [x for x in _flatten(output)[0] if _differentiable(x)]

    def recorded(self, ctx: Any) -> tuple[torch.Tensor, ...]:
        """What the tap saved, if that is still what the module was given and gave."""
        try:
            return ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            claim = self.claim
            raise UnsupportedModuleError(  # which the self-check has answered by a parent
                f"the model writes in place to a tensor that {claim} was given or returned, after it ran, so its per-example gradients cannot "
                "be computed from that any more. Make it a copy there (x = x + y instead of x += y). " + ways_out(claim.path, claim.module),
                claim.module,
            ) from error

    def _terms(self, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], input_gradients: dict) -> dict[nn.Parameter, Term]:
        claim, shards = self.claim, self.clipper.shards
        if claim.rule.norms is not None and self.forward_pass.wants_only_norms_of(claim.names):
            sampled = claim.rule.norms(claim.module, *self._by_example(saved, grads))
            found = {p: Norm(norm_b) for p, norm_b in sampled.items()}
        elif claim.is_rerun:
            found = self._rerun(saved, grads)
        elif claim.rule.takes_call:
            found = claim.rule.terms(self._whole_call(saved, grads, input_gradients))
        else:
            found = claim.rule.terms(claim.module, *self._by_example(saved, grads))
        found = {shards.shard(p): Dense(term) if isinstance(term, torch.Tensor) else term for p, term in found.items()}
        if missing := [name for p, name in claim.names.items() if p not in found]:
            raise ValueError(
                f"the rule of {claim} gives no gradient for its trainable {missing}. Let the rule you registered (register_grad_sampler) return one for "
                "every trainable parameter of the module, or freeze those (requires_grad_(False))."
            )
        parallel = self.clipper.parallel
        return {p: parallel.part(claim, p, found[p], self.sums_positions) if parallel else found[p] for p in claim.names}

    def _by_example(self, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        claim, batch = self.claim, self.forward_pass.batch_size
        if claim.rule.channels_second and any(layout.flat for layout in self.output_layouts):
            reason = f"{claim} was called on positions of examples as if they were examples, and its rule cannot tell them from channels. "
            raise UnsupportedModuleError(reason + ways_out(claim.path, claim.module), claim.module)
        inputs = [layout.batch_first(x, batch) for x, layout in zip(saved[: len(self.input_layouts)], self.input_layouts, strict=True)]
        inputs = [x.expand(batch, *x.shape[1:]) if x.dim() and len(x) == 1 else x for x in inputs]
        grads = [layout.batch_first(g, batch) for g, layout in zip(grads, self.output_layouts, strict=True)]
        return inputs, grads[0] if len(grads) == 1 else grads

    def _whole_call(self, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], input_gradients: dict) -> ModuleCall:
        module, num_inputs = self.claim.module, len(self.input_layouts)
        args, kwargs = self._rebuild(saved[:num_inputs])
        arguments = inspect.signature(module.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        batch, path = self.forward_pass.batch_size, self.claim.path
        return ModuleCall(module, arguments.arguments, saved[num_inputs:], grads, batch, self.random_state, path, input_gradients)

    def _rerun(self, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> dict[nn.Parameter, Term]:
        claim, batch, num_inputs = self.claim, self.forward_pass.batch_size, len(self.input_layouts)
        inputs, outputs = saved[:num_inputs], saved[num_inputs:]
        device, dtype, enabled = self.autocast
        call = Call(
            self._rebuild,
            self._flatten_output,
            [layout.batch_first(x, batch) for x, layout in zip(inputs, self.input_layouts, strict=True)],
            batched=[layout.holds_examples(x, batch) for x, layout in zip(inputs, self.input_layouts, strict=True)],
            layouts=self.input_layouts,
            outputs=[layout.batch_first(x, batch) for x, layout in zip(outputs, self.output_layouts, strict=True)],
            output_layouts=self.output_layouts,
            backprops=[layout.batch_first(g, batch) for g, layout in zip(grads, self.output_layouts, strict=True)],
            random_state=self.random_state,
            tolerance=3e-2 if enabled or any(x.dtype in HALF for x in saved) else 1e-4,
        )
        with self.clipper._suspended(), torch.autocast(device, dtype=dtype, enabled=enabled):
            names = {whole: name for p, name in claim.names.items() for whole in self.clipper.shards.wholes(p)}
            return per_example_gradients(claim.path, claim.module, names, call)

    def begin_backward(self) -> None:
        """Where somebody else called backward, its first tap has its end looked after."""
        forward_pass = self.forward_pass
        if forward_pass.followed and not forward_pass.in_backward and forward_pass is self.clipper._pass:
            forward_pass.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(partial(self.clipper._finish, forward_pass))

    def note_recomputed(self, saved: Sequence[torch.Tensor]) -> None:
        """Two passes must see the same activations, or one gradient is measured and another one summed."""
        forward_pass = self.forward_pass
        if forward_pass.keep:
            return
        call = self.claim, forward_pass.reached_calls[self.claim]
        forward_pass.reached_calls[self.claim] += 1
        if forward_pass.recomputes:
            forward_pass.recomputed[-1][call] = [torch.linalg.vector_norm(x.float(), 1) for x in saved if x.is_floating_point()]

    def measure(self, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], input_gradients: dict) -> torch.Tensor | None:
        """Add what this call contributes; a gradient for the probe, if it is the first one in a pass that measures.

        ``input_gradients`` is for whole-call rules, see :class:`~dp_transformers.clipping.rules.ModuleCall`.
        """
        forward_pass = self.forward_pass
        if forward_pass is not self.clipper._pass:
            raise ValueError(
                f"the losses also depend on an earlier forward pass (of {forward_pass.batch_size} examples), or backward ran over it before, so "
                "their gradients would not be clipped together. Compute losses from forward passes of one batch size, and call backward once."
            )
        if not forward_pass.measure:
            return None
        reached = forward_pass.reached()
        with exact_arithmetic(forward_pass.probe.device):
            for parameter, term in self._terms(saved, grads, input_gradients).items():
                forward_pass.add(parameter, term)
        return reached


class PerExampleClipper:
    """Clips every example's gradient to an L2 norm of at most ``max_grad_norm`` over all trainable parameters together, and sums.

    Attached on construction; ``detach()`` or leaving a ``with`` block removes every trace of it from the model, ``attach()`` puts it back.

    Args:
        model: The module whose ``forward`` is called for the losses; its inputs have the batch in their first dimension. It is
            hooked, not wrapped: type, state dict, ``generate`` and pickling stay as they are.
        max_grad_norm: The clipping bound C. Noise must be scaled by this same number: read it here.
        mode: "auto", "book_keeping", "ghost", "fast_gradient" or "per_sample", see :mod:`dp_transformers.clipping.modes`.
        self_check: Before the first training forward pass, check on synthetic input of the same shapes that every trainable
            parameter is covered and that norms and sums equal one-example-at-a-time gradients, see
            :mod:`dp_transformers.clipping.checks.self_check`. The losses themselves are yours and come later: compute them from the model's
            outputs alone. One that uses a parameter directly (weight decay, say) is refused.
        batch_first: False where the model's inputs and outputs of two and more dimensions have the batch in the second.

    Raises:
        ValueError: nothing to train, unknown mode, or a bound that is not a number, or too small.

    Example::

        clipper = PerExampleClipper(model, max_grad_norm=1.0)
        losses = F.cross_entropy(model(x), y, reduction="none")      # (B,)
        norms = clipper.backward(losses)                             # p.grad += sum of clipped gradients; norms (B,)
    """

    _is_copy = False

    def __init__(self, model: nn.Module, max_grad_norm: float, mode: str = "auto", *, self_check: bool = True, batch_first: bool = True):
        if not (batch_first or self_check):
            raise ValueError("batch_first=False needs the self-check, which learns where every module has its examples.")
        if not (isinstance(max_grad_norm, (int, float)) and SMALLEST_BOUND <= max_grad_norm < float("inf")):
            raise ValueError(_WRONG_BOUND.format(max_grad_norm))
        self._follower: Follower | None = None
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.mode = choose_mode(mode, model)
        self.self_check = self_check
        self.batch_first = batch_first
        self.reduce_now = True  # under FSDP2: False lets modes that keep terms hold whole sums here until a backward that finds True
        self._handles: list[Any] = []
        self._pass: _Pass | None = None
        self._opened: list[tuple[nn.Module, contextlib.AbstractContextManager]] = []
        self._tapping = False
        self._paused = False
        self._signature: list[int] = []  # of the trainable parameters, and the modules, when it was attached
        self._modules: list[nn.Module] = []
        self._summing = False  # autograd may fill gradients, for the second of two passes
        self._loss_reduction: str | None = None  # of the losses that others call backward on
        self._hidden: set[nn.Parameter] = set()  # ask for no gradient while the module that uses them runs
        self.attach()
        logger.info("clipping mode %s (asked for: %s), C = %g", self.mode.name, mode, self.max_grad_norm)

    @property
    def max_grad_norm(self) -> float:
        """The clipping bound C. It may be set between batches where nobody accounts for it, but not in a private training."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, bound: float) -> None:
        if not (isinstance(bound, (int, float)) and (bound >= SMALLEST_BOUND or bound == 0)):
            raise ValueError(_WRONG_BOUND.format(bound))
        if self._follower is not None:
            raise ValueError(
                f"max_grad_norm is {self._max_grad_norm:g} for the whole of a private training: the noise and epsilon are made for it. Start another "
                "training with another bound (make_private, DPTrainingArguments)."
            )
        self._max_grad_norm = float(bound)

    # ---- attaching ----

    def attach(self) -> None:
        """Hook the modules that own trainable parameters. Does nothing if attached."""
        if self._handles:
            return
        refuse_attached(self.model)
        if self._is_as_detached():
            self._state = ModelState(self.model, watch_parameters=not self.shards)
            self._hook()
            return
        self.shards = Shards(self.model)
        self.parallel = TensorParallel(self.model, self.shards)
        if self.parallel and self.mode.name == "per_sample":
            raise ValueError(
                "clipping mode 'per_sample' hands out whole gradients, which no process of a tensor-parallel model has. Use clipping_mode='auto' or "
                "'book_keeping'."
            )
        self._unreduced: dict[nn.Parameter, torch.Tensor] = {}
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("the model has no trainable parameter: set requires_grad on what shall be trained, or add adapters.")
        for name, p in self.model.named_parameters():
            if p.requires_grad and (p.dtype not in TRAINABLE or (p.dtype == torch.bfloat16 and (self.shards or self.parallel))):
                raise ValueError(
                    f"parameter '{name}' is {p.dtype}{', and sharded' if self.shards or self.parallel else ''}: load the model with dtype=torch.float32 "
                    "(frozen parameters may stay as they are) and use bf16 autocast, or MixedPrecisionPolicy under FSDP2, for speed."
                )
        self._parameter_of = {whole: p for p in self.parameters for whole in self.shards.wholes(p)}
        half = [p.dtype for p in self.model.parameters() if p.dtype in HALF]
        self.low_precision = half[0] if half else torch.float32  # a frozen body in bf16 rounds the gradients that pass through it
        self.convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in self.model.modules())
        self._signature, self._modules = self._trainable(), list(self.model.modules())
        self._state = ModelState(self.model, watch_parameters=not self.shards)
        self.claims = claim_parameters(self.model)
        self.checked = not self.self_check  # they settle in the check, so it must run again
        self._hook()
        if not self.self_check:
            announce(self.claims)

    def _is_as_detached(self) -> bool:
        """Whether the model is the one that was attached before, so that nothing needs to be found out again."""
        return self._signature == self._trainable() and self._modules == list(self.model.modules())

    def _hook(self) -> None:
        for handle in self._handles:
            handle.remove()
        # FSDP2's own hook gathers parameters; a check runs the model, which must not happen inside that
        self._handles = [self.model.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=bool(self.shards))]
        for claim in self.claims:
            self.parallel.refuse(claim, is_rerun=claim.may_be_rerun or claim.rule.tapped_inside)
            self._handles.append(claim.module.register_forward_pre_hook(partial(self._before_module, claim), prepend=True))
            if claim.rule.tapped_inside:
                continue
            if claim.is_rerun:
                self.shards.refuse_rerun(claim.path, claim.module)
            # before the user's hooks, so that what they do to the output happens after the tap and is differentiated by autograd
            hook = partial(self._after_module, claim)
            self._handles.append(claim.module.register_forward_hook(hook, with_kwargs=True, prepend=True))
            if claim.may_be_rerun:
                self._handles.append(claim.module.register_forward_pre_hook(partial(self._before_fallback, claim)))
        self._handles += [p.register_post_accumulate_grad_hook(self._refuse_native_gradient) for p in self.parameters]
        if self._loss_reduction is not None:
            self._handles += [claim.module.register_forward_pre_hook(partial(self._hide, claim)) for claim in self.claims]
        taps = {claim.module: partial(self._after_module, claim) for claim in self.claims if claim.rule.tapped_inside}
        for module in self.model.modules():
            opening = forward_context_for(module)
            if opening and any(p.requires_grad for p in module.parameters()):
                self._handles.append(module.register_forward_pre_hook(partial(self._open, opening, taps.get(module))))
                self._handles.append(module.register_forward_hook(self._close, always_call=True, prepend=True))
        self._handles.append(self.model.register_forward_hook(self._after_model, always_call=True))

    def detach(self) -> None:
        """Remove the hooks and everything that was kept."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._pass = [], None
        self._close_all()
        self._unreduced.clear()
        for p in self.parameters:
            if hasattr(p, "grad_sample"):
                del p.grad_sample

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles of a hooked model carry hooks that do nothing: no data, no gradient and no secret goes with them."""
        return {"_is_copy": True, "_paused": True, "_tapping": False, "_pass": None, "_hidden": set(), "_opened": [], "claims": []}

    def follow(self, follower: Follower, loss_reduction: str | None) -> None:
        """Ask ``follower`` before every clipped sum for the examples' weights, and tell it afterwards.

        With a ``loss_reduction`` ("mean" or "sum") the clipped sum is formed by an ordinary ``loss.backward()``, where ``loss`` is that
        reduction of the examples' losses over the batch. Only modes that keep what the sum is formed from can do that.
        """
        if loss_reduction is not None and not self.mode.keep:
            raise ValueError(
                f"clipping mode '{self.mode.name}' goes back over the losses a second time, so it needs them one for each example: hand over "
                "the criterion, call backward(losses) of the clipper yourself, or use clipping_mode='book_keeping'."
            )
        if loss_reduction is not None and self.shards:
            raise ValueError(
                "the model is sharded (fully_shard), and there loss.backward() cannot be followed: hand over the criterion, or take "
                'loss_reduction="none" and call backward(losses) of the clipper yourself.'
            )
        self._follower, self._loss_reduction = follower, loss_reduction
        self._hook()

    def __enter__(self) -> PerExampleClipper:
        self.attach()
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def recheck_if_changed(self) -> None:
        """Let the self-check run again if the model may compute otherwise than the one that was checked."""
        if self._state.runs_otherwise() and self.self_check and self.checked:
            logger.warning("a class, method, hook or switch of the model was changed since it was checked; it is checked again.")
            self.checked = False

    def require_same_parameters(self) -> None:
        """Raise ValueError if other parameters are trainable than when the clipper was attached."""
        if not self._handles:
            raise ValueError(
                "the clipper was taken off the model (detach()), so nothing bounds gradients: attach() it before the next batch."
            )
        if self._trainable() != self._signature:
            names = {id(p): name for name, p in self.model.named_parameters()}
            now, before = set(self._trainable()), set(self._signature)
            frozen, added = (
                sorted(names.get(i, "a parameter that was replaced") for i in before - now),
                sorted(names[i] for i in now - before),
            )
            what = (
                f"'{frozen[0]}' was frozen or taken out"
                if frozen
                else f"'{added[0]}' became trainable"
                if added
                else "their order is another one"
            )
            raise ValueError(
                f"the set of trainable parameters changed since make_private (or since train() began): {what}. Freeze, unfreeze, replace and add layers "
                "and adapters before it, and build the optimizer from what is then trainable."
            )

    def _trainable(self) -> list[int]:
        """Of every step, so without the bookkeeping of names in ``model.parameters()``."""
        found, seen, todo = [], set(), [self.model]
        while todo:
            module = todo.pop()
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                found += [id(p) for p in module._parameters.values() if p is not None and p.requires_grad]
                todo += module._modules.values()
        return found

    # ---- forward ----

    def _before_model(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not torch.is_grad_enabled() or self._paused:
            return
        if self._pass is not None and self._pass.in_backward:
            if _in_backward():
                return
            self._pass = None  # that backward raised before its end
        self._show()
        self._close_all()
        self.shards.reshard()
        if self._follower is not None:
            self.require_same_parameters()
        elif self._trainable() != self._signature:  # something was frozen or unfrozen since
            logger.warning("the set of trainable parameters changed since the clipper was attached; it is attached anew.")
            self.detach()
            self.attach()
        if self._follower is not None:
            self.recheck_if_changed()
        batch_size = batch_size_of(self.model, args, kwargs, self.batch_first)
        just_checked = not self.checked and batch_size > 0  # an empty batch shows no shapes to check, and adds nothing
        if just_checked:
            from .checks.self_check import self_check

            self_check(self, args, kwargs)
        if self._follower is not None and self._follower.before_forward(args, kwargs):
            just_checked = True
        self._state.before_forward()
        given = None if self._follower is None else self._follower.current_batch()
        if self._pass is None or self._pass.batch_size != batch_size or self._pass.given is not given:
            unused = self._pass
            self._pass = self._new_pass(batch_size)
            self._pass.given = given
            if unused is not None:  # fine if its losses are thrown away; backward looks whether they are
                self._pass.earlier_probes = [*unused.earlier_probes, unused.probe][-8:]
        if self.batch_first:
            self._pass.positions |= positions_of(args, kwargs, batch_size)
        self._tapping = True
        if just_checked:  # hooks that the check gave to the model itself come too late for the call that is going on
            for claim in [claim for claim in self.claims if claim.module is module]:
                self._before_module(claim, module, args)
                if claim.may_be_rerun:
                    self._before_fallback(claim, module, args)
                if self._loss_reduction is not None:
                    self._hide(claim, module, args)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.shards.whole(self.parameters[0]).device

    def _new_pass(self, batch_size: int) -> _Pass:
        probe = torch.zeros(batch_size, device=self.device, dtype=torch.float32, requires_grad=True)
        forward_pass = _Pass(batch_size, probe, self.parallel.counts)
        if self._loss_reduction is not None:
            forward_pass.restart(measure=True, instantiate=self.mode.instantiate, keep=True)
            forward_pass.followed = True
        return forward_pass

    def _open(self, opening: ForwardContext, tap: Tap | None, module: nn.Module, args: tuple) -> None:
        opened = opening(module, tap)
        opened.__enter__()
        self._opened.append((module, opened))

    def _close(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._opened and self._opened[-1][0] is module:
            self._opened.pop()[1].__exit__(None, None, None)

    def _close_all(self) -> None:
        """After an interrupt inside a module that is tapped from the inside."""
        while self._opened:
            self._opened.pop()[1].__exit__(None, None, None)

    def _after_model(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._tapping = False
        self._show()
        for claim in self.claims:
            claim.started.clear()  # of calls that raised

    def _hide(self, claim: Claim, module: nn.Module, args: tuple) -> None:
        if self._paused or not torch.is_grad_enabled() or self._pass is None or not (self._tapping or self._pass.in_backward):
            return
        for p in claim.names:
            p.requires_grad_(False)
            self._hidden.add(p)

    def _show(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        if not self._hidden:
            return
        for p in list(self._hidden) if parameters is None else parameters:
            p.requires_grad_(True)
            self._hidden.discard(p)

    def _before_module(self, claim: Claim, module: nn.Module, args: tuple) -> None:
        claim.started.append(torch.autograd._get_sequence_nr())

    def _before_fallback(self, claim: Claim, module: nn.Module, args: tuple) -> None:
        if not self._paused:
            claim.random_state = random_state(next(iter(claim.names)).device)

    def _after_module(self, claim: Claim, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        forward_pass, started = self._pass, claim.started.pop()
        self._show(claim.names)
        if self._paused or not (self._tapping or (forward_pass is not None and forward_pass.in_backward)):
            if torch.is_grad_enabled() and not self._paused:
                raise ValueError(
                    f"'{claim.path}' was called outside the forward of the model that is being clipped, so a gradient through it would not "
                    "be clipped. Call the model itself, or use torch.no_grad(), or detach() the clipper first."
                )
            return None
        if forward_pass.followed and (forward_pass.reentrant and forward_pass.in_backward):
            raise ValueError(
                f"'{claim.path}' runs under reentrant activation checkpointing, which loss.backward() cannot be followed through: use "
                "use_reentrant=False."
            )
        if forward_pass.in_backward:  # activation checkpointing recomputes a call that was counted
            forward_pass.recomputes = True
        else:
            for p in claim.names:
                forward_pass.uses[p] += 1
        if not torch.is_grad_enabled():
            forward_pass.reentrant = True
            return None
        use = _Use(self, claim, args, kwargs, output, started)
        claim.random_state = None  # of no use any more, and nobody shall find it in a saved model
        return use.tapped_output()

    @contextlib.contextmanager
    def _suspended(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ---- backward ----

    def backward(self, losses: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Add ``sum_i weights[i] · min(1, C / ‖g_i‖) · g_i`` to the ``grad`` of every trainable parameter, g_i = ∇ losses[i].

        An example whose gradient is not finite contributes zero and leaves the others untouched.

        Args:
            losses: (B,), each computed from its own example alone, with graph. Not averaged over the batch.
            weights: (B,) in [0, 1], default all ones; 0 takes an example out.

        Returns:
            (B,) float32: the gradient norms ‖g_i‖ before clipping and weighting.

        Raises:
            ValueError: wrong shapes, weights outside [0, 1], losses without a graph or with one from before ``attach``, or a parameter
                that reaches the losses past the modules that own it.
        """
        forward_pass = self._checked_pass(losses)
        weights_b = _checked_weights(weights, losses)
        hooked = [p for p in self.parameters if (p._backward_hooks or p._post_accumulate_grad_hooks) and self._has_foreign_hook(p)]
        if hooked:
            raise ValueError(
                f"trainable parameter '{self._name_of(hooked[0])}' has a gradient hook, which could change or use gradients that are not private yet. "
                "Remove it: call remove() of the handle that register_hook returned."
            )
        forward_pass.in_backward, forward_pass.followed = True, False
        try:
            weights_b = self._begin_sum(forward_pass, weights_b)
            self._summing = True
            with without_autocast(losses.device):
                norms_b = self._backward(forward_pass, losses, weights_b)
        finally:
            self._summing = False
            self._pass = None  # used up, whatever happened
        self._end_sum()
        return norms_b

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next((name for name, p in self.model.named_parameters() if p is parameter), "?")

    def _has_foreign_hook(self, p: nn.Parameter) -> bool:
        own = 1 + self.parallel.native_hooks(p)
        return bool(p._backward_hooks) or len(p._post_accumulate_grad_hooks or ()) > own

    def _begin_sum(self, forward_pass: _Pass, weights_b: torch.Tensor | None) -> torch.Tensor | None:
        """The examples' weights, None where all are one."""
        given = None if self._follower is None else self._follower.before_sum(forward_pass.batch_size)
        if given is None or weights_b is None:
            return weights_b if given is None else given.to(forward_pass.probe)
        return weights_b * given.to(weights_b)

    def _end_sum(self) -> None:
        try:
            self._state.require_unchanged()
        except ValueError:
            self._drop_gradients()
            raise
        if self._follower is not None:
            self._follower.after_sum()

    def _finish(self, forward_pass: _Pass) -> None:
        """The end of somebody else's ``loss.backward()``."""
        try:
            if forward_pass is not self._pass:
                raise ValueError(
                    "the model was called again while loss.backward() was going on, so the first call's gradients cannot be clipped. Call the model "
                    "only before backward or after it, not in a gradient hook."
                )
            scale = forward_pass.batch_size if self._loss_reduction == "mean" else 1
            device = forward_pass.probe.device
            if forward_pass.probe.grad is None:
                raise ValueError(
                    "the model's outputs were differentiated by something else than loss.backward() (torch.autograd.grad, or inputs=...), so "
                    "no gradient was clipped. Do that on a deepcopy of the model, which has no clipper."
                )
            weights_b = self._begin_sum(forward_pass, None)
            with without_autocast(device), torch.no_grad():
                self._sum_kept(forward_pass, self._squared_norms(forward_pass), weights_b, scale)
        finally:
            self._pass = None
        self._end_sum()

    def _drop_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    def _refuse_native_gradient(self, parameter: nn.Parameter) -> None:
        """Autograd filled a gradient by itself, which is not clipped."""
        if self._summing or self._paused:
            return
        parameter.grad = None
        if self._loss_reduction is None:
            raise ValueError(
                "loss.backward() was called on a model with a PerExampleClipper attached, which would leave gradients that are not clipped. Call "
                "clipper.backward(losses) with losses of shape (B,) (reduction='none'), or use the criterion that make_private returned; for a loss that is not the private one (a generator's, "
                "an adversarial input's) call clipper.detach() before and clipper.attach() after it, or use a deepcopy of the model."
            )
        self._refuse_past_taps(parameter)

    def _refuse_past_taps(self, parameter: nn.Parameter) -> None:
        answering = max((claim for claim in self.claims if parameter in claim.names), key=lambda claim: len(claim.path))
        raise UnsupportedModuleError(  # which the self-check has answered by a parent, where there is one that sees it
            f"parameter '{self._name_of(parameter)}' got a gradient that did not come through its module's call, so it cannot be clipped. Either the loss "
            "uses the parameter directly (a weight penalty: use the optimizer's weight_decay), or forward ran outside the model that is clipped, or "
            "forward read the weight or an inner activation without calling the module. Call the module for it, or freeze the parameter "
            "(requires_grad_(False)).",
            answering.module,
        )

    def _backward(self, forward_pass: _Pass, losses: torch.Tensor, weights_b: torch.Tensor | None) -> torch.Tensor:
        mode = self.mode
        forward_pass.recomputed.clear()
        forward_pass.restart(measure=True, instantiate=mode.instantiate, keep=mode.keep)
        numbers = None if mode.keep else global_state(losses.device)
        if any(dtype in HALF for dtype in (losses.dtype, forward_pass.low_precision, self.low_precision)):
            forward_pass.rounding = norms.BF16
        gradients = [(p.grad, None if p.grad is None else p.grad._version) for p in self.parameters]
        norm_sq_b = self._measure(forward_pass, losses, retain_graph=not mode.keep)
        for p, (grad, version) in zip(self.parameters, gradients, strict=True):
            if p.grad is not grad or (grad is not None and grad._version != version):  # some Function's own backward wrote to it
                p.grad = None
                self._refuse_past_taps(p)
        if (parameter := parameter_past_taps(losses, _Tap._backward_cls, self._parameter_of)) is not None:
            self._refuse_past_taps(parameter)
        if mode.keep:
            return self._sum_kept(forward_pass, norm_sq_b, weights_b)
        norms_b, coef_b, bad_b = self._coefficients(norm_sq_b, weights_b)
        if self.shards.anywhere(bad_b is not None, norms_b.device):
            # 0 · NaN is NaN in a native backward, so the factors are needed to take the bad rows out
            forward_pass.restart(measure=True, keep=True)
            self._measure(forward_pass, losses, retain_graph=False)
            self._add_kept(forward_pass, coef_b, bad_b)
        else:
            forward_pass.restart(measure=False)
            coef_b = coef_b * (1.0 - self._second_pass_slack(forward_pass, losses))
            for p in self.parameters:
                if p.grad is None and not self.shards:
                    p.grad_dtype = sum_dtype(p)
            only = None if forward_pass.reentrant else [whole for p in self.parameters for whole in self.shards.wholes(p)]
            set_global_state(losses.device, numbers)  # checkpointed blocks draw again what they drew when they were measured
            with self.shards.native_sum(), self.parallel.native_sum(self.parameters):
                torch.autograd.backward(losses, coef_b.to(losses.dtype), inputs=only)
            self._require_same_activations(forward_pass)
        return norms_b

    def _require_same_activations(self, forward_pass: _Pass) -> None:
        """Of what checkpointing recomputed in the two passes. A generator that nobody restores gives other masks in the second."""
        first, second = forward_pass.recomputed
        calls = [call for call in first if call in second]  # those before the first that was recomputed are in one of them only
        if not calls:
            return
        a, b = (torch.stack([x.to(forward_pass.probe.device) for call in calls for x in sizes[call]]) for sizes in (first, second))
        same = bool(((a == b) | (a - b).abs().le(1e-5 * a) | ~torch.isfinite(a)).all())
        if self.shards.anywhere(not same, forward_pass.probe.device):
            self._drop_gradients()
            raise ValueError(
                f"activation checkpointing recomputed other activations in the second backward pass of clipping mode '{self.mode.name}' than in the "
                "first, so the gradient that is summed is not the one whose norm was measured: a checkpointed module draws random numbers from a "
                "generator of its own. Use clipping_mode='book_keeping', which goes back once, or torch's global generator."
            )

    def _coefficients(
        self, norm_sq_b: torch.Tensor, weights_b: torch.Tensor | None, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(B,) each: the norms, what each example's gradient is multiplied with, and which examples are not finite (None: none)."""
        norms_b = norm_sq_b.sqrt() if scale == 1 else norm_sq_b.sqrt() * scale
        coef_b = (self.max_grad_norm / norms_b).clamp(max=1.0)
        coef_b = coef_b if weights_b is None else coef_b * weights_b
        if math.isfinite(norms_b.sum()):
            return norms_b, coef_b, None
        bad_b = ~torch.isfinite(norms_b)
        return norms_b, coef_b.masked_fill(bad_b, 0.0), bad_b

    def _sum_kept(self, forward_pass: _Pass, norm_sq_b: torch.Tensor, weights_b: torch.Tensor | None, scale: float = 1.0) -> torch.Tensor:
        """Clip and add up what was kept, which is each example's gradient divided by ``scale``; (B,) the norms."""
        norms_b, coef_b, bad_b = self._coefficients(norm_sq_b, weights_b, scale)
        if self.mode.name == "per_sample":
            for p, terms in forward_pass.kept.items():
                gradients = terms[0].grad.view(len(norms_b), *p.shape)
                p.grad_sample = gradients if scale == 1 else gradients * scale
        self._add_kept(forward_pass, coef_b if scale == 1 else coef_b * scale, bad_b, reduce_now=self.reduce_now or not self.shards)
        return norms_b

    def _measure(self, forward_pass: _Pass, losses: torch.Tensor, *, retain_graph: bool) -> torch.Tensor:
        """(B,) squared norms, by one backward pass that computes no weight gradient."""
        probes = [forward_pass.probe, *forward_pass.earlier_probes]
        if forward_pass.reentrant and (self.shards or self.parallel):
            raise ValueError("reentrant activation checkpointing does not go with split parameters here: use use_reentrant=False.")
        if forward_pass.reentrant:
            reached = self._gradient_of_probe(forward_pass, losses, retain_graph=retain_graph)
        else:
            reached = torch.autograd.grad(losses, probes, torch.ones_like(losses), retain_graph=retain_graph, allow_unused=True)[0]
        if reached is None:
            raise ValueError(
                "the losses do not come from a forward pass through the attached model: it ran before attach(), under no_grad(), "
                "or through a submodule instead of the model given to PerExampleClipper."
            )
        return self._squared_norms(forward_pass)

    def _squared_norms(self, forward_pass: _Pass) -> torch.Tensor:
        """(B,) over all parameters, with those of announced uses that the losses do not depend on."""
        with exact_arithmetic(forward_pass.probe.device):
            for parameter in list(forward_pass.open):
                forward_pass.close(parameter)
            return self.parallel.added(forward_pass.squared_norms())

    def _gradient_of_probe(self, forward_pass: _Pass, losses: torch.Tensor, *, retain_graph: bool) -> torch.Tensor | None:
        """What autograd.grad would give, where reentrant checkpointing allows only a backward that fills every ``grad``."""
        before = [p.grad for p in self.parameters]
        try:
            for p in self.parameters:
                p.grad = None
            losses.sum().backward(retain_graph=retain_graph)
            reached, forward_pass.probe.grad = forward_pass.probe.grad, None
            return reached
        finally:
            for p, grad in zip(self.parameters, before, strict=True):
                set_gradient(p, grad)  # what backward left there is not clipped

    def _add_kept(self, forward_pass: _Pass, coef_b: torch.Tensor, bad_b: torch.Tensor | None, *, reduce_now: bool = True) -> None:
        memo = term_algebra.Memo()
        with exact_arithmetic(coef_b.device):
            small = forward_pass.small_sums(coef_b, bad_b)
            # under FSDP2 every process takes part in every sum, in one order, whatever its examples used
            for parameter in self.parameters if self.shards else list(forward_pass.kept)[::-1]:
                total = self._unreduced.pop(parameter, None)
                if parameter in forward_pass.kept:  # a record is freed as soon as its sum is formed
                    terms = forward_pass.kept.pop(parameter)
                    device = self.shards.whole(parameter).device
                    parts = (_weighted_sum(term, coef_b, bad_b, device, memo) for term in terms)
                    for part in [small[parameter]] if parameter in small else parts:
                        part = part.to(sum_dtype(parameter)).view(self.parallel.shape(parameter))
                        total = part.contiguous() if total is None else total.add_(part)
                if not reduce_now and total is not None:
                    self._unreduced[parameter] = total
                elif reduce_now:
                    if total is None:
                        total = torch.zeros(self.parallel.shape(parameter), dtype=sum_dtype(parameter), device=self.device)
                    total = self.shards.summed(parameter, total) if self.shards else like(total, parameter)
                    set_gradient(parameter, total if parameter.grad is None else parameter.grad.add_(total))

    def _second_pass_slack(self, forward_pass: _Pass, losses: torch.Tensor) -> float:
        matmul, conv = (setting.fp32_precision for setting in product_settings(losses.device))
        used = {matmul, conv} if self.convolves else {matmul}  # cuDNN's convolutions use TF32 unless told otherwise
        precise = used <= FULL_PRECISION
        seen = (losses.dtype, forward_pass.low_precision, self.low_precision)
        return max(0.0 if precise else REDUCED_FP32_SLACK, *(SECOND_PASS_SLACK[dtype] for dtype in seen))

    def _checked_pass(self, losses: torch.Tensor) -> _Pass:
        if not isinstance(losses, torch.Tensor) or losses.dim() != 1:
            shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(
                f"losses must be a tensor of shape (B,), one loss for each example, not {shape}: compute them with "
                "reduction='none' and average inside each example only."
            )
        if not self._handles or self._pass is None:
            raise ValueError(
                "no forward pass to go back over: call attach() first, then the model, then backward(losses), once each. Losses of one batch are "
                "added up before backward(), not after."
            )
        if not losses.requires_grad:
            raise ValueError("losses have no graph: the forward pass ran under no_grad(), or they were detached.")
        if len(losses) != self._pass.batch_size:
            raise ValueError(
                f"{len(losses)} losses for a batch of {self._pass.batch_size} examples: give one loss for each example. Losses of positions, (B, T), are "
                "averaged or summed within each example first; do not flatten them to (B·T,)."
            )
        return self._pass


def refuse_attached(model: nn.Module) -> None:
    """Raise ValueError if a clipper, that of an engine or a trainer included, is attached to ``model`` or a part of it."""
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, PerExampleClipper) and not owner._is_copy:
                where = f"'{path}' of the model" if path else "this model"
                raise ValueError(
                    f"another PerExampleClipper is attached to {where}, of an earlier make_private or made by hand: call detach() of that engine "
                    "or clipper first, or go on with it."
                )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _flatten(structure: Any) -> tuple[list[Any], Any]:
    """Leaves and spec of an output, or of (args, kwargs); None is the spec of the usual cases, a tensor and one positional tensor."""
    if isinstance(structure, torch.Tensor):
        return [structure], None
    if isinstance(structure, tuple) and len(structure) == 2 and structure[1] == {}:
        args = structure[0]
        if isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], torch.Tensor):
            return [args[0]], None
    return tree_flatten(structure)


def _checked_weights(weights: torch.Tensor | None, losses: torch.Tensor) -> torch.Tensor | None:
    if weights is None:
        return None
    weights = torch.as_tensor(weights, dtype=torch.float32, device=losses.device)
    if weights.shape != losses.shape:
        raise ValueError(f"weights have shape {tuple(weights.shape)}, losses {tuple(losses.shape)}: give one weight for each example.")
    if not bool(((weights >= 0) & (weights <= 1)).all()):
        raise ValueError("weights must lie in [0, 1]: a larger one would let an example contribute more than max_grad_norm.")
    return weights
