"""PerExampleClipper: per-example losses in, the sum of clipped per-example gradients out.

How it works. A forward hook (:mod:`.hooks`) passes the output of every module that owns trainable parameters through
an identity, the tap (:mod:`.tap`). When backward reaches a tap it holds the gradient g of the module's output; with
the module's input a (:mod:`.recorded_call`), its rule (:mod:`.rules`) gives the terms of the parameters' per-example
gradients (:mod:`.terms`). The mode (:mod:`.modes`) measures their norms (:mod:`.norms`), and forms the clipped sums
(:mod:`.gradient_sums`). The engine (:mod:`.engine`) leads from one to the next; here are the bound, and the checks
that it is tried out with (:mod:`.checks`).
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ..mechanism.clipping_functions import ClippingFunction
from .batch_dims import batch_size_of
from .boundary import Boundary, follow, unfollow
from .checks.beside_others import draw_for_all_rows, looks_at_calls, require_same_beside_others
from .checks.locality import require_own_rows, require_own_rows_of_outputs
from .checks.padding import check_padding, expect_no_gradient_at_padding
from .checks.rare_looks import RareLooks
from .checks.self_check import CheckReport, self_check
from .checks.synthetic import LossFunction
from .coefficients import checked_clipping
from .conditions import Conditions
from .engine import ClippingEngine, TrainingLoop
from .gradient_sums import GradientSums
from .loss_graph import BatchLoss
from .measured_budget import MeasuredBudget, memory_budget_of
from .modes import Mode, choose_mode
from .owners import Owner, warn_about_fallback
from .parallel.fsdp2 import Shards
from .parallel.tensor_parallel import TensorParallel
from .recorded_call import ForwardPass, ModelCall, autocast_state

logger = logging.getLogger(__name__)


class PerExampleClipper:
    """Clips every example's gradient to an L2 norm of at most ``max_grad_norm`` over all trainable parameters
    together, and sums.

    Attached on construction; ``detach()`` or leaving a ``with`` block removes every trace of it from the model,
    ``attach()`` puts it back.

    Args:
        model: The module whose ``forward`` is called for the losses; its inputs have the batch in their first
            dimension. It is hooked, not wrapped: type, state dict, ``generate`` and pickling stay as they are.
        max_grad_norm: The clipping bound C, or a function of the norm (:mod:`.clipping_functions`), whose
            sensitivity it then is, for calls of :meth:`backward` that give no other. Noise must be scaled by this
            same number: read it here, and :attr:`noise_scales` where the function clips groups of parameters by
            themselves. In a private training the step gives the function of each step.
        mode: "auto", "book_keeping", "ghost", "fast_gradient" or "per_sample", see
            :mod:`dp_transformers.clipping.modes`.
        self_check: Before the first training forward pass, check on synthetic input of the same shapes that every
            trainable parameter is covered and that norms and sums equal one-example-at-a-time gradients, see
            :mod:`dp_transformers.clipping.checks.self_check`. The losses themselves are yours and come later: compute
            them from the model's outputs alone. One that uses a parameter directly (weight decay, say) is refused.
        batch_first: False where the model's inputs and outputs of two and more dimensions have the batch in the
            second.
        memory_budget: How many bytes a backward pass may keep beyond what the mode keeps ("auto", "book_keeping" or
            "ghost"), to save time, see :mod:`dp_transformers.clipping.memory`. "auto" is half of what the device has
            free after some steps, and at most a quarter of what was in use
            (:mod:`dp_transformers.clipping.measured_budget`).

    Raises:
        ValueError: nothing to train, unknown mode, or a bound that is not a number, or too small.

    Example::

        >>> import torch
        >>> from dp_transformers import PerExampleClipper
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.randint(2, (8,))
        >>> clipper = PerExampleClipper(model, max_grad_norm=1.0)
        >>> losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> clipper.backward(losses).shape  # the norms; p.grad holds the sum of clipped gradients
        torch.Size([8])
        >>> model.weight.grad.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        max_grad_norm: float | ClippingFunction,
        mode: str = "auto",
        *,
        self_check: bool = True,
        batch_first: bool = True,
        memory_budget: float | str | None = None,
    ):
        if not (batch_first or self_check):
            raise ValueError(
                "batch_first=False needs the self-check, which learns where every module has its examples."
            )
        self.clipping = checked_clipping(max_grad_norm)
        self._self_check, self.asked_mode = self_check, mode
        self.checked = False
        self._modules: list[tuple[nn.Module, type]] = []  # that were checked, with their classes
        self.checks_begun = 0  # how often all that was checked of the model had to be checked anew
        self._looks, self._model_looks = RareLooks(), RareLooks(_RATE)
        self._drawn_for_all_rows = list[str]()  # in the model: the modules that do, or generators
        self._drawn_in_losses = dict[str, None]()  # an ordered set
        self._boundary: Boundary | None = None  # between the model and a loop of the user's
        self._steps, self._versions = 0, -1  # of an optimizer that no loop tells of; how often it wrote to parameters
        self._engine = ClippingEngine(
            model,
            choose_mode(mode, model, self.clipping),
            clipping=self.clipping,
            batch_first=batch_first,
            before_forward=self._before_forward,
            memory=memory_budget_of(memory_budget),
        )
        self._engine.on_outputs = self._after_forward
        self.attach()

    @property
    def max_grad_norm(self) -> float:
        """The clipping bound C of the function that this clipper was made with."""
        return self.clipping.sensitivity

    @property
    def self_check(self) -> bool:
        """Whether this clipper compares itself with one example at a time."""
        return self._self_check

    @self_check.setter
    def self_check(self, value: bool) -> None:
        raise AttributeError(
            f"self_check is {self.self_check} for the whole of a training, whose reports say so. Give it where the "
            "training is set up (make_private, DPTrainingArguments, PerExampleClipper)."
        )

    @property
    def model(self) -> nn.Module:
        return self._engine.model

    @property
    def mode(self) -> Mode:
        return self._engine.mode

    @property
    def batch_first(self) -> bool:
        return self._engine.batch_first

    @property
    def draw_for_all_rows(self) -> list[str]:
        """What draws random numbers that all rows share, modules or generators, as far as it was looked at."""
        return list(dict.fromkeys([*self._drawn_for_all_rows, *self._drawn_in_losses]))

    def note_shared_numbers(self, names: Sequence[str]) -> None:
        """Such numbers are drawn while losses are computed, by what is called so."""
        self._drawn_in_losses |= dict.fromkeys(names)

    @property
    def dropouts_for_all_rows(self) -> Sequence[nn.Module]:
        """Modules whose numbers all rows share, and which draw the same in all physical batches of a draw."""
        return self._engine.dropouts_for_all_rows

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return self._engine.trainable.parameters

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self._engine.trainable.device

    @property
    def shards(self) -> Shards:
        return self._engine.trainable.shards

    @property
    def parallel(self) -> TensorParallel:
        return self._engine.trainable.parallel

    @property
    def norms(self) -> torch.Tensor:
        """(B,) the gradient norms of the examples of the last backward pass, before clipping, also where
        ``loss.backward()`` ran it. They are private data, and no noise is in them: look at them to debug on public
        examples, and neither publish them nor choose the bound by them (:class:`.AdaptiveClipping` does that
        privately)."""
        if not hasattr(self._engine, "norms_b"):
            raise ValueError("there are no norms before the first backward pass: ask for them after one.")
        return self._engine.norms_b

    @property
    def noise_scales(self) -> list[float]:
        """:meth:`noise_scales_of` the function that this clipper was made with."""
        return self.noise_scales_of(self.clipping)

    def noise_scales_of(self, clipping: ClippingFunction) -> list[float]:
        """Return, for each of :attr:`parameters`, the standard deviation of its noise over that of a group of all of
        them, where ``clipping`` clips."""
        scales = {p: group.noise_scale for group in self._engine.groups_of(clipping) for p in group.parameters}
        return [scales[p] for p in self.parameters]

    def empty_sums(self) -> GradientSums:
        """Make sums for :meth:`backward` to add to, out of reach of what reads or writes ``p.grad``."""
        return GradientSums(self._engine.trainable)

    @property
    def owners(self) -> list[Owner]:
        return self._engine.owners

    # ---- attaching ----

    def attach(self) -> None:
        """Hook the modules that own trainable parameters, and let the model be checked anew. Does nothing if
        attached."""
        if self._engine.is_attached:
            return
        is_other = self._engine.attach()
        self._check_anew()  # owners are found in the check, and nobody looked at the model meanwhile
        self._follow_backward()
        if is_other and not self.self_check:
            warn_about_fallback(self.owners)

    def _check_anew(self) -> None:
        """Let everything that was checked of the model be checked again: it may compute otherwise now."""
        self.checked, self.checks_begun = not self.self_check, self.checks_begun + 1
        self._looks, self._model_looks = RareLooks(), RareLooks(_RATE)
        self._drawn_for_all_rows = []

    def detach(self) -> None:
        """Remove the hooks and everything that was kept."""
        if self._boundary is not None:
            unfollow(self._boundary)
        self._engine.detach()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the model and its parts run and go backward as if no clipper were attached: for a loss that trains
        something else through the model (a generator's, an adversarial input's), or a saliency map.

        At the end every trainable parameter has the ``grad`` that it had before, so that what the block added is
        thrown away. What else the block computes of private examples is not private.

        Raises:
            ValueError: the block changed a parameter, a buffer or an attribute of the model; or, where it happens,
                losses from before the block go backward in it, or losses from the block after it.
        """
        engine = self._engine
        engine.forget()
        with engine.state.aside():
            grads = [(p, p.grad) for p in self.parameters]
            engine.trainable.drop_gradients()
            try:
                with engine.suspended():
                    yield
            finally:
                for p, grad in grads:
                    p.grad = grad

    def __enter__(self) -> PerExampleClipper:
        self.attach()
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def follow(self, loop: TrainingLoop, loss_reduction: str | None) -> None:
        """Let the loop look at every forward pass, and clip what no sums are given for.

        Args:
            loop: It is asked.
            loss_reduction: In a loop of the user's own "mean" or "sum", by which an ordinary ``loss.backward()`` clips
                where ``loss`` is that reduction of the examples' losses over the batch, or "none", where it does not.
                None in any other loop.
        """
        engine = self._engine
        self._boundary = None if loss_reduction is None else Boundary(engine, loss_reduction, loop.add)
        engine.loop, engine.follows = loop, self._boundary is not None and self._boundary.follows
        engine.install_hooks()
        self._follow_backward()

    def _follow_backward(self) -> None:
        if self._boundary is not None:
            follow(self._boundary)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, with a model that holds it, is of nothing: no data, no gradient and no secret goes with it."""
        return {}

    # ---- checks ----

    def check(self, args: tuple, kwargs: dict, loss_function: LossFunction | None = None) -> CheckReport:
        """Check on synthetic input shaped like ``args`` and ``kwargs`` that clipping is exact; see
        :func:`.checks.self_check.self_check`."""
        self.checked = False
        with self._engine.state.during_check():
            report = self_check(self._engine, args, kwargs, loss_function)
        self.checked = True
        return report

    def check_padding(
        self,
        args: tuple,
        kwargs: dict,
        own_bt: torch.Tensor,
        loss_function: LossFunction | None = None,
        row: int | None = None,
        padded_dims: Mapping[str, Sequence[int]] | None = None,
    ) -> float:
        """Check that padding leaves gradients alone; see :func:`.checks.padding.check_padding`."""
        if not self.checked:
            self.check(args, kwargs, loss_function)
        with self._engine.state.during_check():
            return check_padding(self._engine, args, kwargs, own_bt, loss_function, row, padded_dims)

    @property
    def position_dims(self) -> list[int | None]:
        """Which dimension of each output is that of the positions that :meth:`check_padding` was about last."""
        return self._engine.position_dims

    def expect_no_gradient_at_padding(
        self, output: Any, row: int, own_t: torch.Tensor, dims: Sequence[int | None]
    ) -> None:
        """Expect that the loss has no gradient at positions of ``output`` that are no own ones of a row; see
        :func:`.checks.padding.expect_no_gradient_at_padding`."""
        expect_no_gradient_at_padding(self._engine, output, row, own_t, dims)

    def recheck_if_changed(self) -> None:
        """Let all checks run again if the model has other modules, or modules of other classes, than before."""
        if self._engine.state.is_watching:
            return
        modules, before = [(module, type(module)) for module in self.model.modules()], self._modules
        if modules != before:
            self._modules = modules
            if before:
                self._check_anew()

    def begin_draw(self, numbers: int | None) -> None:
        """The model may have been written to since the last draw, and from now on not before the next one.

        Args:
            numbers: What dropout draws where all rows share a mask, secret and of this draw alone;
                None where it draws as it comes.
        """
        self._engine.begin_draw(numbers)

    def begin_pass(self) -> None:
        """A physical batch is about to be worked on: let the model and the losses that are watched be what they were
        when its draw began."""
        self._engine.state.before_forward()

    def end_draw(self) -> None:
        """The draw is released or dropped: put back what its passes left in the model, which from now on is the user's
        to change."""
        self._engine.end_draw()

    def end_pass(self) -> None:
        """Put back now what a pass that has not gone backward left in the model: before somebody reads it."""
        self._engine.state.end_pass()

    def again(self) -> contextlib.AbstractContextManager:
        """Inside, losses may be computed again from what the pass under way began with; afterwards everything is as
        it is now."""
        return self._engine.state.again()

    def watch(self, name: str, loss: Callable[..., Any]) -> None:
        """Put back what passes leave in ``loss``, too: in a module or an object, or in that whose method it is."""
        while isinstance(loss, partial):
            loss = loss.func
        owner = getattr(loss, "__self__", loss)
        if not isinstance(owner, types.FunctionType):
            self._engine.watch(name, owner)

    @property
    def conditions(self) -> Conditions:
        """What must hold before anything is released, and only the device can tell."""
        return self._engine.conditions

    def require_same_parameters(self) -> None:
        """Raise ValueError if other parameters are trainable than when the clipper was attached, or somebody else
        looks at their gradients."""
        if not self._engine.is_attached:
            raise ValueError(
                "the clipper was taken off the model (detach()), so nothing bounds gradients: attach() it before the "
                "next batch."
            )
        self._engine.trainable.require_same()
        self._engine.trainable.refuse_gradient_hooks()

    def _before_forward(self, args: tuple, kwargs: dict) -> None:
        loop = self._engine.loop
        if loop is not None:
            self.require_same_parameters()
        else:
            if not self._engine.trainable.are_the_same():  # something was frozen or unfrozen since
                logger.warning(
                    "the set of trainable parameters changed since the clipper was attached; it is attached anew."
                )
                self.detach()
                self.attach()
            self._count_steps()
        self.recheck_if_changed()
        if not self.checked and batch_size_of(self.model, args, kwargs, self.batch_first) > 0:
            self.check(args, kwargs)  # an empty batch shows no shapes to check, and adds nothing
        if loop is not None:
            loop.before_forward(args, kwargs)
        else:
            self._versions = self._written()  # the check writes to parameters too

    # ---- memory ----

    def look_at_memory(self, steps: int, least: Callable[[int], int]) -> None:
        """With ``memory_budget="auto"``: after 2, 4, 8, ... steps of the optimizer look whether most passes since the
        first were no larger than those before. If so, plan with what the device has to spare.

        Args:
            steps: How many steps there were. All ranks call this after the same ones.
            least: Returns the least of all ranks' numbers.
        """
        budget = self._engine.memory
        if not isinstance(budget, MeasuredBudget) or budget.is_settled or steps < 1 or steps & (steps - 1):
            return
        if steps == 1:
            budget.forget()
        elif (limit := least(budget.offer())) >= 0:
            budget.settle(limit)
            logger.info("from step %d on a backward pass may keep %.1f MB more, to save time", steps + 1, limit / 1e6)

    def _count_steps(self) -> None:
        """The steps of a loop that nobody follows are seen by what they write to the parameters."""
        if self._versions not in (-1, self._written()):
            self._steps += 1
            self.look_at_memory(self._steps, partial(self.shards.least, device=self.device))

    def _written(self) -> int:
        """How often parameters were written to; -1 where nobody needs to know."""
        budget = self._engine.memory
        is_open = isinstance(budget, MeasuredBudget) and not budget.is_settled
        return sum(p._version for p in self.parameters) if is_open else -1

    # ---- backward ----

    def require_forward(self, losses: torch.Tensor | BatchLoss) -> ForwardPass:
        """Return the forward pass that losses come from. Raise ValueError if they cannot come from the last
        one."""
        return self._engine.require_forward(losses)

    def backward(
        self,
        losses: torch.Tensor | BatchLoss,
        weights: torch.Tensor | None = None,
        *,
        clipping: ClippingFunction | None = None,
        into: GradientSums | None = None,
    ) -> torch.Tensor:
        """Add ``sum_i weights[i] · min(1, C / ‖g_i‖) · g_i`` to the ``grad`` of every trainable parameter, g_i = ∇
        losses[i], or what another clipping function says. In a private training it is added to the sums of the step.

        An example whose gradient is not finite (that of a group, where groups are clipped by themselves) contributes
        zero and leaves the others untouched.

        Args:
            losses: (B,), each computed from its own example alone, with graph. Not averaged over the batch, but for
                the loss of a batch that a loop went backward from.
            weights: (B,) in [0, 1], default all ones; 0 takes an example out.
            clipping: What clips, default the function that this clipper was made with.
            into: Sums to add to in the place of ``grad`` (:meth:`empty_sums`), which is None afterwards.

        Returns:
            (B,) float32: the gradient norms ‖g_i‖ before clipping and weighting.

        Raises:
            ValueError: wrong shapes, weights outside [0, 1], losses without a graph or with one from before
                ``attach``, or a parameter that reaches the losses past the modules that own it.
            SelfCheckError: an example's loss has a gradient in the rows of another.
        """
        if into is None and self._engine.loop is not None:
            return self._engine.loop.add(losses, weights)
        losses_b = None if isinstance(losses, BatchLoss) else losses
        if losses_b is not None and not self._engine.follows and self._takes_look():
            require_own_rows(self._engine, losses_b, self._looks.number)
        if losses_b is not None and self._boundary is not None:
            self._boundary.look_at(losses_b)
        if self._engine.forward is not None:
            self._look_at_calls(self._engine.forward, losses_b)
        groups = self._engine.groups_of(self.clipping if clipping is None else clipping)
        return self._engine.backward(losses, weights=weights, groups=groups, into=into)

    def _takes_look(self) -> bool:
        """Count this pass over a real batch, and return whether it is looked at whose rows are whose in it: at first,
        ever more rarely, and where a module was called otherwise than in the self-check, which did not learn where its
        examples are.

        Raises:
            ValueError: a module was called so where ranks share parameters.
        """
        is_due, forward = self._looks.is_due() and self.self_check, self._engine.forward
        unknown = None if forward is None or not self.self_check else forward.unknown
        if unknown is not None and (self.shards or self.parallel):  # a rank that looked alone would wait for others
            raise ValueError(
                f"{unknown} is called otherwise than in the self-check, which did not learn where its examples are: "
                "on other rows than those of the batch, or for some batches only. Where ranks share parameters that "
                "is not looked at. Call it in every forward pass, on all rows, and mask what it is not for."
            )
        return is_due or unknown is not None

    def _after_forward(self, args: tuple, kwargs: dict, output: Any) -> Any:
        """The end of a forward pass, maybe of a loop that goes back itself, over losses that are not known here. What
        that is given instead of ``output``, None for the same."""
        forward = cast(ForwardPass, self._engine.forward)
        is_due = self._model_looks.is_due() or forward.unknown is not None
        if is_due and self.self_check and not (self.shards or self.parallel):  # ranks would have to look together
            forward.calls.append(ModelCall(args, kwargs, output, autocast_state(self.device)))
        if self._boundary is None:
            return None
        if self._boundary.follows and self._takes_look():
            require_own_rows_of_outputs(self._engine, output, self._looks.number)
        return self._boundary.hand_out(args, kwargs, output)

    def _look_at_calls(self, forward: ForwardPass, losses: torch.Tensor | None = None) -> None:
        """Run the model again beside other rows, on what it was called with in a forward pass that is looked at."""
        if forward.calls:
            looks = looks_at_calls(self._engine, forward, self._model_looks.number)
            drawn = draw_for_all_rows(self._engine, looks)
            self._drawn_for_all_rows = list(dict.fromkeys(self._drawn_for_all_rows + drawn))
            require_same_beside_others(self._engine, looks, losses)


_RATE = 1 / 128  # how often the model is looked at beside other rows, besides the first passes and ever rarer ones
