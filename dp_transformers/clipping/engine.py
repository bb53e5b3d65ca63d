"""One forward pass → per-example norms → coefficients → clipped sums. The engine knows no checks: it is what they try
out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError

from ..mechanism.clipping_functions import ClippingFunction
from ..runtime.randomness import random_state, set_random_state
from . import rules  # noqa: F401  (so that every layer has its rule)
from .batch_dims import batch_size_of, positions_of
from .by_example import ExamplesApart, UnknownCall
from .coefficients import ParameterGroup, checked_weights, coefficients, parameter_groups
from .deferred_checks import DeferredChecks
from .errors import warn_once
from .gradient_sums import GradientSums
from .hooks import HookedModel, configurations, refuse_attached, without_caches
from .loss_graph import BatchLoss, LossGraph
from .memory import MemoryBudget, Plan
from .model_state import ModelState
from .modes import MODES, Mode
from .owners import Owner, assign_owners, refuse_escape
from .parallel.dispatch import class_forward
from .precision import without_autocast
from .recorded_call import ForwardPass, RecordedCall
from .tap import tapped
from .trainable import TrainableParameters
from .units import Units

logger = logging.getLogger(__name__)


class TrainingLoop(Protocol):
    """What a clipper asks and tells the training loop that it follows (:meth:`.clipper.PerExampleClipper.follow`). In
    a private training a ``PrivateStep`` answers for the loop."""

    def before_forward(self, args: tuple, kwargs: dict) -> None:
        """The model is called with these, by somebody who will go backward. May raise, or check the clipper."""

    def after_forward(self, output: Any) -> None:
        """The model has returned this, to somebody who will go backward."""

    def current_batch(self) -> object | None:
        """Returns what stands for the batch that is worked on, None between batches. Forward passes on several batches
        are not clipped as one."""

    def add(self, losses: torch.Tensor | BatchLoss, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Called for the loss that an ordinary ``loss.backward()`` goes back from. Clips it into the sums of the loop,
        and returns the (B,) norms. May raise."""


class ClippingEngine:
    """Clips and sums the per-example gradients of ``model``, while it is attached.

    Args:
        model: It is hooked, not wrapped.
        mode: How norms are measured and sums formed.
        clipping: What gradients are multiplied with; None clips nothing.
        batch_first: False where inputs and outputs of two and more dimensions have the batch in the second.
        before_forward: ``f(args, kwargs)``, before every forward pass that is recorded; may raise, check the model or
            attach it anew.
        memory: What may be kept beyond what the mode keeps; None is nothing.

    Attributes:
        trainable, owners, state: What :meth:`attach` found out.
        parts: The model, which is called "", and what computes losses and may keep something of them, by name.
        deferred_checks: What must hold before anything is released, and only the device can tell.
        groups: The parameters that are clipped together where :meth:`backward` is given no others.
        forward: The forward pass that a backward pass would use.
        loop: It says which batch is worked on, and looks at forward passes.
        norms_b: The gradient norms of the examples of the last backward pass.
        on_outputs: ``f(args, kwargs, output)``, after a forward pass that is recorded: the output that the user gets.
        follows: Whether a loop's own ``loss.backward()`` is led here, so that autograd reaches no tap by itself.
    """

    trainable: TrainableParameters
    state: ModelState
    groups: Sequence[ParameterGroup]
    norms_b: torch.Tensor

    def __init__(
        self,
        model: nn.Module,
        mode: Mode,
        *,
        clipping: ClippingFunction | None = None,
        batch_first: bool = True,
        before_forward: Callable[[tuple, dict], None] = lambda args, kwargs: None,
        memory: MemoryBudget | None = None,
    ):
        self.model, self.mode, self.batch_first, self._before_forward = model, mode, batch_first, before_forward
        self.memory = memory
        self.owners: list[Owner] = []
        self.parts: dict[str, Any] = {"": model}
        self._clipping, self.deferred_checks = clipping, DeferredChecks()
        self._divided: tuple[ClippingFunction | None, Sequence[ParameterGroup]] = (None, ())
        self.forward: ForwardPass | None = None
        self.loop: TrainingLoop | None = None
        self.follows = False
        self.rows_second = set[int]()  # the numbers of the model's outputs that have rows in their second dimension
        self.on_outputs: Callable[[tuple, dict, Any], Any] = lambda args, kwargs, output: output
        self._hooks = HookedModel(model, self)
        self._apart = ExamplesApart(self._record_whole)
        self._on_trial = False
        self._fills_gradients = False  # autograd may, for the second of two passes

    @property
    def _releases(self) -> bool:
        """Whether what is summed is handed out as it is: where no loop goes on with it, and no check throws it
        away."""
        return self.loop is None and not self._on_trial

    # ---- attaching ----

    @property
    def is_attached(self) -> bool:
        return self._hooks.are_installed

    def attach(self) -> bool:
        """Hook the model. Whether it is another one than was attached before, of which everything had to be found
        out."""
        refuse_attached(self.model)
        is_known = bool(self.owners) and self.trainable.are_of_the_same_model()
        if not is_known:
            trainable = TrainableParameters(self.model)
            self.mode.refuse(trainable)
            if self.memory is not None:
                self.memory.refuse(self.mode.name, trainable)
            self.trainable, self._divided = trainable, (None, ())
            self.owners, self._apart = assign_owners(self.model), ExamplesApart(self._record_whole)
            self.groups = (
                [ParameterGroup(trainable.parameters)] if self._clipping is None else self.groups_of(self._clipping)
            )
        trained = {self.trainable.name_of(p): p for p in self.trainable.parameters}
        self.state = ModelState(self.parts, self.deferred_checks, trained if self.trainable.shards else None)
        self.install_hooks()
        return not is_known

    def begin_anew(self) -> None:
        """Let every module own the parameters it holds, as at first, and forget what a try has left."""
        self.forget()
        self.trainable.thaw()
        self._drop_instances()
        self.owners = assign_owners(self.model)

    def groups_of(self, clipping: ClippingFunction) -> Sequence[ParameterGroup]:
        """Divide the parameters into those that ``clipping`` clips together. The last division is kept."""
        if clipping != self._divided[0]:
            groups = parameter_groups(self.trainable, clipping)
            if len(groups) > 1 and not self.mode.one_pass:
                raise ValueError(
                    f"clipping mode '{self.mode.name}' goes back over the losses a second time, each times its "
                    f"coefficient, but {clipping} has {len(groups)} coefficients for each example: use "
                    "clipping_mode='book_keeping', which keeps a group no longer than it is worked on, or 'auto'."
                )
            self._divided = clipping, groups
        return self._divided[1]

    def install_hooks(self) -> None:
        """Hook the model anew, after owners changed.

        Raises:
            ValueError: a module owns parameters that are split over ranks in a way that its rule, or the fallback,
                cannot deal with.
        """
        shards, parallel = self.trainable.shards, self.trainable.parallel
        for owner in self.owners:
            parallel.refuse(owner, is_rerun=owner.may_be_rerun or owner.rule.tapped_inside)
            if shards or parallel or class_forward(owner.module) is None:
                owner.needs_whole_batch = True
            if owner.is_rerun:
                shards.refuse_rerun(owner.path, owner.module)
        self._hooks.install(self.owners, self.trainable.parameters, gathers=bool(shards))

    def detach(self) -> None:
        """Remove the hooks and everything that was kept. What a private batch left in the model is put back."""
        try:
            if self.is_attached and self.loop is not None:
                self._hooks.reset()
                self.end_draw()
        finally:
            self._hooks.remove()
            self.forget()
            self._drop_instances()

    def _drop_instances(self) -> None:
        for p in self.trainable.parameters:
            if hasattr(p, "grad_sample"):
                del p.grad_sample

    def suspended(self) -> contextlib.AbstractContextManager:
        """Inside, the model runs as if it were not attached."""
        return self._hooks.suspended()

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Inside, the engine may be tried out: nobody is asked or told, and gradients, training mode and forward pass
        are put back at the end."""
        trainable = self.trainable
        trainable.shards.reshard()
        grads = [(p.grad, p.grad_dtype) for p in trainable.parameters]
        on_trial, self._on_trial = self._on_trial, True
        loop, self.loop, forward, self.forward = self.loop, None, self.forward, None
        try:
            with torch.enable_grad(), without_caches(configurations(self.model)), self.state.during_check():
                yield
        finally:
            self._on_trial = on_trial
            self.forget()
            self.loop, self.forward = loop, forward
            trainable.shards.reshard()
            trainable.thaw()
            for p, (grad, dtype) in zip(trainable.parameters, grads, strict=True):
                p.grad = None
                if p.grad_dtype != dtype:
                    p.grad_dtype = dtype
                p.grad = grad
            self._drop_instances()

    # ---- forward ----

    def begin_draw(self) -> None:
        """What was summed before is released or dropped, and with it what was refused of it. What was written to the
        model since is the user's own doing."""
        self.deferred_checks.begin()
        self.state.begin_draw()

    def end_draw(self) -> None:
        """The draw is released or dropped: put back what its passes left in the model. What is written from now on is
        the user's own doing."""
        self.state.end_draw()

    def forget(self, then: ForwardPass | None = None) -> None:
        """Let go of the forward pass: it is used up, or its losses are thrown away. Go on with another."""
        if self.forward is not None:
            for owner in self.forward.whole:
                owner.needs_whole_batch = True
            self.forward.is_current = False
            self.forward.backward = None  # they hold each other
        self.forward, self._hooks.in_backward = then, False

    def begin_forward(self, args: tuple, kwargs: dict) -> bool:
        """The model is called with a graph; False if activation checkpointing calls it inside backward."""
        if self._hooks.in_backward:
            if torch._C._current_graph_task_id() != -1:
                return False
            self.forget()  # that backward raised before its end
        self._hooks.reset()
        self.trainable.shards.reshard()
        if not self._on_trial:
            self._before_forward(args, kwargs)
        batch = None if self.loop is None else self.loop.current_batch()
        if self._releases and not self.state.is_watching:
            self.begin_draw()
        if self.loop is None or batch is not None:
            self.state.before_forward()
        batch_size = batch_size_of(self.model, args, kwargs, self.batch_first)
        forward = self.forward
        if forward is None or forward.batch_size != batch_size or forward.batch is not batch:
            unused, forward = forward, self._new_forward(batch_size, batch)
            self.forget(forward)
            if unused is not None:  # fine if its losses are thrown away; backward looks whether they are
                forward.earlier_probes = [*unused.earlier_probes, unused.probe][-8:]
        if self.batch_first:
            forward.positions |= positions_of(args, kwargs, batch_size)
        return True

    def without_graph(self) -> contextlib.AbstractContextManager:
        """Return a context for a pass without a graph. Over a private batch it may leave something in the model, which
        would tell later batches of it as a pass with a graph would."""
        is_private = self.loop is not None and self.loop.current_batch() is not None
        return self.state.aside() if is_private else contextlib.nullcontext()

    def _new_forward(self, batch_size: int, batch: object) -> ForwardPass:
        probe = torch.zeros(batch_size, device=self.trainable.device, dtype=torch.float32, requires_grad=True)
        return ForwardPass(
            batch_size,
            probe,
            self.trainable,
            suspended=self._hooks.suspended,
            batch=batch,
            follows=self.follows,
            deferred_checks=self.deferred_checks,
        )

    def run_by_example(self, owner: Owner, function: Callable, args: tuple, kwargs: dict) -> tuple[bool, Any]:
        """Whether the module could run one example at a time, and what it returned. One that could not is re-run from
        now on; in this forward pass it is tried at every call, since activation checkpointing must meet what it met
        before."""
        forward, is_outermost = cast(ForwardPass, self.forward), not self._apart.is_running
        device = forward.probe.device
        uses, numbers = forward.uses.copy(), random_state(device)
        try:
            if forward.batch_size:
                return True, self._apart.run(forward, owner, function, args, kwargs)
        except (torch.OutOfMemoryError, _StopRecomputationError):  # the latter ends what checkpointing recomputes
            raise
        except Exception as error:
            if not is_outermost:  # which can run on the whole batch
                raise
            if not isinstance(error, UnknownCall):
                forward.whole.add(owner)
            forward.uses = uses
            told = logger.info if self._on_trial else partial(warn_once, logger, type(owner.module))
            told("%s is re-run: it cannot run one example at a time (%s: %s)", owner, type(error).__name__, error)
        owner.random_state = numbers
        set_random_state(device, numbers)
        return False, function(*args, **kwargs)

    def record(self, owner: Owner, args: tuple, kwargs: dict, output: Any, first_node: int) -> Any:
        if self._apart.is_running:
            return self._apart.record(owner, args, kwargs, output, first_node)
        return self._record_whole(owner, args, kwargs, output, first_node)

    def _record_whole(self, owner: Owner, args: tuple, kwargs: dict, output: Any, first_node: int) -> Any:
        if owner.rule.require is not None:
            owner.rule.require(owner.module)
        forward = cast(ForwardPass, self.forward)  # calls are passed on only after begin_forward
        forward.record_call(owner)
        if not torch.is_grad_enabled():
            forward.reentrant = True
            return output
        call = RecordedCall(owner, forward, args, kwargs, output, first_node)
        if forward.backward is None and self.memory is not None:
            for p in owner.names:
                forward.returned[p] += call.outputs[0].numel()
        owner.random_state = None  # of no use any more, and nobody shall find it in a saved model
        return tapped(call)

    def end_forward(self, args: tuple, kwargs: dict, output: Any) -> Any:
        if self._on_trial:
            return output
        given = self.on_outputs(args, kwargs, output)
        if self.loop is not None:  # the last, since it follows the user's gradients alone
            self.loop.after_forward(given)
        return given

    # ---- backward ----

    def require_forward(self, losses: torch.Tensor | BatchLoss) -> ForwardPass:
        """The forward pass that ``losses`` must come from. Raises ValueError if they cannot."""
        if isinstance(losses, BatchLoss) and self.forward is not None:
            return self.forward  # which it was found to come from
        if not isinstance(losses, torch.Tensor) or losses.dim() != 1:
            shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(
                f"losses must be a tensor of shape (B,), one loss for each example, not {shape}: compute them with "
                "reduction='none' and average inside each example only."
            )
        if not self.is_attached or self.forward is None:
            raise ValueError(
                "no forward pass to go back over: call attach() first, then the model, then backward(losses), once "
                "each. Losses of one batch are added up before backward(), not after."
            )
        if not losses.requires_grad:
            raise ValueError(
                "the losses have no graph: they depend on no trainable parameter (adapters are disabled or merged, "
                "say), or were detached, or the forward pass ran under no_grad(), or reentrant activation "
                "checkpointing was given inputs that need no gradient. Compute them with gradients from what is "
                "trained, and checkpoint with use_reentrant=False."
            )
        if len(losses) != self.forward.batch_size:
            raise ValueError(
                f"{len(losses)} losses for a batch of {self.forward.batch_size} examples: give one loss for each "
                "example. Losses of positions, (B, T), are averaged or summed within each example first; do not "
                "flatten them to (B·T,). A criterion is called with logits of shape (B, V, T), "
                "logits.transpose(1, 2), and labels (B, T), not with logits.view(-1, V)."
            )
        return self.forward

    def backward(
        self,
        losses: torch.Tensor | BatchLoss,
        *,
        groups: Sequence[ParameterGroup] | None = None,
        weights: torch.Tensor | None = None,
        units: Units | None = None,
        into: GradientSums | None = None,
        norms_only: bool = False,
        trial_limit: float = 0.0,
    ) -> torch.Tensor:
        """Add the examples' clipped gradients, times their weights, to sums; (B,) the norms before that.

        Args:
            groups: Clip these in the place of :attr:`groups`.
            into: The sums, which keep ``p.grad`` None. Without them the sum is added to ``p.grad``.
            norms_only: Add nothing.
            trial_limit: How many bytes a pass on trial keeps that has a ``memory_budget``.
        """
        forward = self.require_forward(losses)
        weights_b, unit_of_row = checked_weights(weights, forward.probe if units is None else units.zeros()), None
        if units is not None and units.are_rows:
            weights_b = None if weights_b is None else weights_b[units.of_row]
        elif units is not None:
            forward.units, unit_of_row = units, units.of_row
        graph = LossGraph(losses, forward)
        self.trainable.refuse_gradient_hooks()
        sums, groups = GradientSums(self.trainable) if into is None else into, groups or self.groups
        try:
            if into is None:
                sums.take_gradients()
            self._fills_gradients = True
            with without_autocast(graph.device):
                clip = partial(coefficients, weights_b=weights_b, unit_of_row=unit_of_row)
                plan = self.plan(forward, groups, trial_limit)
                mode = MODES["book_keeping"] if plan is not None and plan.one_pass else self.mode
                backward = mode.begin(forward, groups, clip, None if norms_only else sums, graph, plan)
                forward.go_back(backward)
                self._hooks.in_backward = True
                self.trainable.drop_gradients()
                graph.go_back(retain_graph=not mode.one_pass)
                self._refuse_escapes(graph)
                norms_b = backward.finish()
                self.norms_b = norms_b if units is None or not units.are_rows else units.in_order(norms_b)
            self._end_sum(sums)
        finally:
            self._fills_gradients = False
            if into is None:
                sums.become_gradients()
            self.forget()  # used up, whatever happened
        return self.norms_b

    def _end_sum(self, sums: GradientSums) -> None:
        """Let the model be as before; where no loop does so later, require all that was expected."""
        self.state.end_pass()
        if self._releases:
            self.end_draw()
            try:
                self.deferred_checks.require()
            except ValueError:
                sums.clear()
                raise

    def plan(self, forward: ForwardPass, groups: Sequence[ParameterGroup], trial_limit: float = 0.0) -> Plan | None:
        """What to keep; None leaves that to the mode: without a budget, and for groups that are clipped by themselves,
        of which nothing is kept for long."""
        if self.memory is None or len(groups) > 1:
            return None
        shards = self.trainable.shards
        limit = trial_limit if self._on_trial else None
        plan = self.memory.plan(forward, one_pass=self.mode.one_pass, limit=limit)
        if shards and not self.mode.one_pass and shards.any_rank(not plan.one_pass, forward.probe.device):
            return replace(plan, one_pass=False, instances={})  # FSDP2 reduces what its units have taken
        return plan

    # ---- gradients that no tap saw ----

    def _refuse_escapes(self, graph: LossGraph) -> None:
        written = self.trainable.find_gradient()  # by some Function's own backward
        if (parameter := graph.find_escape() if written is None else written) is not None:
            parameter.grad = None
            self._refuse_escape(parameter)

    def _refuse_escape(self, parameter: nn.Parameter) -> None:
        refuse_escape(self.owners, parameter, self.trainable.name_of(parameter))

    def refuse_native_gradient(self, parameter: nn.Parameter) -> None:
        """Autograd filled a gradient by itself, which is not clipped."""
        if self._fills_gradients:
            return
        parameter.grad = None
        if self.follows:
            self._refuse_escape(parameter)
        raise ValueError(
            "loss.backward() was called on a model with a PerExampleClipper attached, which would leave gradients "
            "that are not clipped. Call engine.backward(losses) (of a PerExampleClipper: clipper.backward(losses)) "
            "with losses of shape (B,) (reduction='none'), or use the criterion that make_private returned; for a "
            "loss that is not the private one (a generator's, an adversarial input's) go forward and backward inside "
            "'with engine.suspended():' (of a PerExampleClipper: clipper.suspended())."
        )
