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
import secrets
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ..mechanism.clipping_functions import ClippingFunction
from .batch_dims import BATCH_FIRST, batch_size_of
from .boundary import Boundary, follow, unfollow
from .checks.check_model import CheckReport, run_check
from .checks.losses import expect_no_gradient_at_padding
from .checks.oracle import Oracle
from .checks.rows import LossFunction, Rows, Sizes
from .checks.witness import Schedule, Witness
from .coefficients import checked_clipping
from .engine import ClippingEngine, TrainingLoop
from .errors import SelfCheckError
from .gradient_sums import GradientSums
from .loss_graph import BatchLoss
from .measured_budget import MeasuredBudget, memory_budget_of
from .modes import Mode, choose_mode
from .owners import Owner, warn_about_fallback
from .recorded_call import ForwardPass
from .trainable import TrainableParameters
from .units import Units

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
        self_check: Before the first training forward pass, and when something about a batch is new, check on some of
            its rows that norms and sums equal one-example-at-a-time gradients
            (:mod:`dp_transformers.clipping.checks.oracle`), and in some batches that a row gives what it gives alone
            (:mod:`dp_transformers.clipping.checks.witness`). The losses themselves are yours and come later: compute
            them from the model's outputs alone. One that uses a parameter directly (weight decay, say) is refused.
        batch_first: False where the model's inputs and outputs of two and more dimensions have the batch in the
            second.
        memory_budget: How many bytes a backward pass may keep beyond what the mode keeps ("auto", "book_keeping" or
            "ghost"), to save time, see :mod:`dp_transformers.clipping.memory`. "auto" is half of what the device has
            free after some steps, and at most a quarter of what was in use
            (:mod:`dp_transformers.clipping.measured_budget`).

    Attributes:
        engine: The engine that clips. A private step begins and ends its draws.

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
        self._modules: list[tuple[nn.Module, type]] = []  # that were compared, with their classes
        self._schedule, self._witness = Schedule(), cast("Witness | None", None)
        self._learn_owners: Callable[[], None] = lambda: None  # from what the model was called with last
        self.compares_rows = False
        self._boundary: Boundary | None = None  # between the model and a loop of the user's
        self._steps = 0  # begun by a loop that nobody follows
        self.engine = ClippingEngine(
            model,
            choose_mode(mode, model, self.clipping),
            clipping=self.clipping,
            batch_first=batch_first,
            before_forward=self._before_forward,
            memory=memory_budget_of(memory_budget),
        )
        self.engine.on_outputs, self._oracle = self._after_forward, Oracle(self.engine)
        self.attach()

    @property
    def max_grad_norm(self) -> float:
        """The clipping bound C of the function that this clipper was made with."""
        return self.clipping.sensitivity

    @property
    def self_check(self) -> bool:
        """Whether this clipper compares itself with one example at a time."""
        return self._self_check

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    @property
    def mode(self) -> Mode:
        return self.engine.mode

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return self.trainable.parameters

    @property
    def trainable(self) -> TrainableParameters:
        """They know their device, and how they are split over ranks."""
        return self.engine.trainable

    @property
    def norms(self) -> torch.Tensor:
        """(B,) the gradient norms of the examples of the last backward pass, before clipping, also where
        ``loss.backward()`` ran it. They are private data, and no noise is in them: look at them to debug on public
        examples, and neither publish them nor choose the bound by them (:class:`.AdaptiveClipping` does that
        privately)."""
        if not hasattr(self.engine, "norms_b"):
            raise ValueError("there are no norms before the first backward pass: ask for them after one.")
        return self.engine.norms_b

    @property
    def noise_scales(self) -> list[float]:
        """:meth:`noise_scales_of` the function that this clipper was made with."""
        return self.noise_scales_of(self.clipping)

    def noise_scales_of(self, clipping: ClippingFunction) -> list[float]:
        """Return, for each of :attr:`parameters`, the standard deviation of its noise over that of a group of all of
        them, where ``clipping`` clips."""
        scales = {p: group.noise_scale for group in self.engine.groups_of(clipping) for p in group.parameters}
        return [scales[p] for p in self.parameters]

    def empty_sums(self) -> GradientSums:
        """Make sums for :meth:`backward` to add to, out of reach of what reads or writes ``p.grad``."""
        return GradientSums(self.engine.trainable)

    @property
    def owners(self) -> list[Owner]:
        return self.engine.owners

    # ---- attaching ----

    def attach(self) -> None:
        """Hook the modules that own trainable parameters, and let the model be checked anew. Does nothing if
        attached."""
        if self.engine.is_attached:
            return
        is_other = self.engine.attach()
        self._oracle.begin_anew()  # owners are found in the check, and nobody looked at the model meanwhile
        self._follow_backward()
        if is_other and not self.self_check:
            warn_about_fallback(self.owners)

    def detach(self) -> None:
        """Remove the hooks and everything that was kept."""
        if self._boundary is not None:
            unfollow(self._boundary)
        self.engine.detach()

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
        engine = self.engine
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
        engine = self.engine
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

    @property
    def checked(self) -> bool:
        """Whether the model as it is was compared with one example at a time, if it is to be."""
        return self._oracle.has_compared or not self.self_check

    def check(self, args: tuple, kwargs: dict, loss_function: LossFunction | None = None) -> CheckReport:
        """Check that clipping is exact for all examples of a batch, of public data of yours.

        Args:
            args, kwargs: What the model is called with.
            loss_function: ``f(*args, **kwargs) -> (B,)`` losses; default: a random linear function of every output.

        Raises:
            SelfCheckError: norms, sums or losses are others than those of one example at a time.
        """
        self._oracle.begin_anew()
        return run_check(self._oracle, args, kwargs, loss_function)

    def compare(
        self,
        args: tuple,
        kwargs: dict,
        losses_of: LossFunction | None = None,
        lengths: Sizes | None = None,
        sizes_of: Callable[[tuple, dict], Sizes] = lambda args, kwargs: {},
        secret: int | None = None,
    ) -> float | None:
        """Compare rows of a batch with each alone if something about them is new, and choose by chance whether one of
        them is run alone once more, when the batch was computed.

        Args:
            args, kwargs: What the model, or ``losses_of``, is called with.
            losses_of: ``f(*args, **kwargs) -> (B,)``; None for a random function of the model's own outputs.
            lengths: How the batch is padded, by its columns.
            sizes_of: Returns it by the paths of arguments.
            secret: Chooses the row; the same on all ranks that have these rows.

        Returns:
            How many seconds it took; None where the model was compared before.

        Raises:
            SelfCheckError: clipping is not exact for these rows.
        """
        self._witness = None
        if not self.self_check:
            return None
        self.recheck_if_changed()
        size, lengths = batch_size_of(self.model, args, kwargs, self.engine.batch_first), lengths or {}
        if not size:  # it shows nothing, and adds nothing
            return None
        kind = (len(args), tuple(kwargs), losses_of is None)

        def rows_of_call() -> Rows:
            return Rows.of(self.model, args, kwargs, sizes_of(args, kwargs), batch_first=self.engine.batch_first)

        self._learn_owners = lambda: self._oracle.compare_owners(kind, rows_of_call(), lengths, losses_of)
        count = self._oracle.is_new(kind, size, lengths)
        is_looked_at = self._schedule.is_due(together=bool(self.trainable.shards or self.trainable.parallel))
        self.compares_rows = bool(count) or is_looked_at
        if not self.compares_rows:
            return None
        rows = rows_of_call()
        start, is_first = time.perf_counter(), not self._oracle.has_compared
        if count:
            self._oracle.compare(kind, rows, count, lengths, losses_of)
        if is_looked_at:
            secret = secrets.randbits(64) if secret is None else secret
            self._witness = Witness(self.engine, rows, losses_of, secret)
        return time.perf_counter() - start if is_first else None

    def expect_no_gradient_at_padding(self, output: Any, lengths: Sizes) -> None:
        """Expect that the loss has no gradient at positions of ``output`` that are padding; see
        :func:`.checks.losses.expect_no_gradient_at_padding`."""
        expect_no_gradient_at_padding(self.engine, output, lengths, self._oracle.position_dims)

    def recheck_if_changed(self) -> None:
        """Let rows be compared again if the model has other modules, or modules of other classes, than before."""
        if self.engine.state.is_watching:
            return
        modules, before = [(module, type(module)) for module in self.model.modules()], self._modules
        if modules != before:
            self._modules = modules
            self._oracle.begin_anew()

    def watch(self, name: str, loss: Callable[..., Any]) -> None:
        """Put back what passes leave in ``loss``, too: in a module or an object, or in that whose method it is."""
        while isinstance(loss, partial):
            loss = loss.func
        owner = getattr(loss, "__self__", loss)
        if not isinstance(owner, types.FunctionType):
            self.engine.parts[name] = owner

    def require_same_parameters(self) -> None:
        """Raise ValueError if other parameters are trainable than when the clipper was attached, or somebody else
        looks at their gradients."""
        if not self.engine.is_attached:
            raise ValueError(
                "the clipper was taken off the model (detach()), so nothing bounds gradients: attach() it before the "
                "next batch."
            )
        self.engine.trainable.require_same()
        self.engine.trainable.refuse_gradient_hooks()

    def _before_forward(self, args: tuple, kwargs: dict) -> None:
        if self.engine.loop is not None:
            self.engine.loop.before_forward(args, kwargs)
        else:
            if not self.engine.trainable.are_the_same():  # something was frozen or unfrozen since
                logger.warning(
                    "the set of trainable parameters changed since the clipper was attached; it is attached anew."
                )
                self.detach()
                self.attach()
        if self.engine.loop is None or not self.checked:
            self.compare(args, kwargs)
        if self._witness is not None:
            self._witness.begin()

    # ---- memory ----

    def look_at_memory(self, steps: int, least: Callable[[int], int]) -> None:
        """With ``memory_budget="auto"``: after 2, 4, 8, ... steps of the optimizer look whether most passes since the
        first were no larger than those before. If so, plan with what the device has to spare.

        Args:
            steps: How many steps there were. All ranks call this after the same ones.
            least: Returns the least of all ranks' numbers.
        """
        budget = self.engine.memory
        if not isinstance(budget, MeasuredBudget) or budget.is_settled or steps < 1 or steps & (steps - 1):
            return
        if steps == 1:
            budget.forget()
        elif (limit := least(budget.offer())) >= 0:
            budget.settle(limit)
            logger.info("from step %d on a backward pass may keep %.1f MB more, to save time", steps + 1, limit / 1e6)

    # ---- backward ----

    def backward(
        self,
        losses: torch.Tensor | BatchLoss,
        weights: torch.Tensor | None = None,
        *,
        unit_ids: torch.Tensor | None = None,
        clipping: ClippingFunction | None = None,
        into: GradientSums | None = None,
    ) -> torch.Tensor:
        """Add ``sum_i weights[i] · min(1, C / ‖g_i‖) · g_i`` to the ``grad`` of every trainable parameter, g_i = ∇
        losses[i], or what another clipping function says.

        An example whose gradient is not finite (that of a group, where groups are clipped by themselves) contributes
        zero and leaves the others untouched.

        Args:
            losses: (B,), each computed from its own example alone, with graph. Not averaged over the batch, but for
                the loss of a batch that a loop went backward from.
            weights: (B,) in [0, 1], default all ones; 0 takes an example out. With ``unit_ids`` (U,), one for each
                unit.
            unit_ids: (B,) integers. Rows with the same one are clipped together, as one example: g_i is the sum of
                their gradients. Of rows that are averaged, hand over losses that are divided by their number.
            clipping: What clips, default the function that this clipper was made with.
            into: Sums to add to in the place of ``grad`` (:meth:`empty_sums`), which is None afterwards.

        Returns:
            (B,) float32: the gradient norms ‖g_i‖ before clipping and weighting. With ``unit_ids`` (U,), for the units
            in ascending order of their ids.

        Raises:
            ValueError: wrong shapes, weights outside [0, 1], losses without a graph or with one from before
                ``attach``, or a parameter that reaches the losses past the modules that own it.
            SelfCheckError: an example's loss is another one alone.
        """
        if into is None and self.engine.loop is not None:  # a private training, which has sums of its own
            if clipping is not None or unit_ids is not None:
                raise ValueError("a private training clips by its mechanism: leave clipping= and unit_ids= out here.")
            return self.engine.loop.add(losses, weights)
        if self.engine.loop is None and self.trainable.find_gradient() is None:  # else it adds batches up
            self.look_at_memory(self._steps, partial(self.trainable.shards.least, device=self.trainable.device))
            self._steps += 1
        losses_b = None if isinstance(losses, BatchLoss) else losses
        if losses_b is not None and self._boundary is not None:
            self._boundary.look_at(losses_b)
        if self.engine.forward is not None:
            self._require_known(self.engine.forward)
        if losses_b is not None:
            self._look(losses_b, of_losses=True)
        groups = self.engine.groups_of(self.clipping if clipping is None else clipping)
        units = None if unit_ids is None else Units(unit_ids, self.engine.require_forward(losses).probe)
        return self.engine.backward(losses, weights=weights, units=units, groups=groups, into=into)

    def _require_known(self, forward: ForwardPass) -> None:
        """Compare once more where a module was called otherwise than in the rows that were compared, so that nobody
        learned where its examples are.

        Raises:
            SelfCheckError: its examples are not where this pass took them to be, or ranks share parameters.
        """
        unknown = forward.unknown
        if unknown is None or not self.self_check:
            return
        if not (self.trainable.shards or self.trainable.parallel):  # a rank that compared alone would wait for others
            before = self._learned()
            self._learn_owners()
            if before == self._learned():
                return
        self.engine.forget()
        raise SelfCheckError(
            f"{unknown} is called otherwise than on the rows that were compared before the first step: only in some "
            "batches, and on other rows than those of the batch, as an expert that takes some positions of each. So "
            "nobody knew whose gradients it has in this batch. Call it in every forward pass, on all rows, and mask "
            "what it is not for, or let check() compare public rows that reach it before training."
        )

    def _learned(self) -> dict[nn.Module, tuple]:
        """Return what each owner owns, and where it has its examples unless they come first, as is taken for granted
        of calls of which nothing was learned."""
        return {
            owner.module: (
                set(owner.names),
                {key: dims for key, dims in owner.batch_dims.items() if any(dim != BATCH_FIRST for dim in dims)},
            )
            for owner in self.owners
        }

    def _after_forward(self, args: tuple, kwargs: dict, output: Any) -> Any:
        """The end of a forward pass, maybe of a loop that goes back itself, over losses that are not known here.
        Return what that is given."""
        self._look(output, of_losses=False)
        return output if self._boundary is None else self._boundary.hand_out(args, kwargs, output)

    def _look(self, given: Any, *, of_losses: bool) -> None:
        """Let the witness of this batch compare what it is about."""
        if self._witness is not None and (self._witness.losses_of is not None) == of_losses:
            witness, self._witness = self._witness, None
            with self._schedule.looking():
                witness.look(given)
