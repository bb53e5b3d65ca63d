"""A private training in a loop of the user's: what optimizer.step() does in it, how it is resumed and how it ends."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..mechanism.accounting.accountants import require_small_delta
from ..mechanism.values import StepParameters
from ..step.checkpoint import PrivacyState
from ..step.order import BatchInHand
from ..step.step import PrivateStep
from .loader import PrivateLoader

SIGNATURE = "private_training"  # the key in the optimizer's state that names the engine which counts its steps
# by the id of the model, which its loop keeps alive
_ATTACHED: WeakValueDictionary[int, PrivateLoop] = WeakValueDictionary()


class PrivateLoop:
    """A private training whose batches, backward passes and steps the user's own code asks for.

    :class:`PrivateStep` knows which of them comes next. This class lets ``optimizer.step()`` release the draw, and
    keeps what belongs to the training as a whole: its plan, its end, and what a checkpoint says of it.

    Args:
        step: The private step of the model that is trained.
        optimizer: The optimizer that releases when it steps.
        loader: The loader that yields the batches of the draws.
    """

    def __init__(self, step: PrivateStep, optimizer: torch.optim.Optimizer, loader: PrivateLoader):
        self.step, self.optimizer, self.loader = step, optimizer, loader
        self.clipper, self.run = step.clipper, step.run
        # these are this engine's own, whichever run it resumes
        self._id, self._process, self._planned = self.run.state.run_id, os.getpid(), self.run.mechanism.steps
        self._stepped: BatchInHand | None = None  # the batch that the last step was for
        self._is_stepping = False  # the optimizer's step has begun and has not returned
        self._is_suspended = self._is_checkpointing = self._is_public = False
        self._shown: dict[str, float] = {}
        self._settings: tuple[int, dict[tuple, Any]] = (-1, {})  # the optimizer's in the last step, and its draw
        self._plan()
        self.run.begin()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._sign),
            optimizer.register_load_state_dict_pre_hook(self._require_own),
        ]
        self._show_parameters(0)
        _ATTACHED[id(self.clipper.model)] = self

    @staticmethod
    def of(model: nn.Module) -> PrivateLoop | None:
        """Return the loop that ``model`` is attached to, whoever still knows its engine; None if there is none."""
        return _ATTACHED.get(id(model))

    @property
    def has_stepped(self) -> bool:
        """True if the last step of the optimizer ended a draw."""
        return self._stepped is not None and self._stepped.last_of_draw

    def _plan(self, first_step: int = 0) -> None:
        if self._planned is not None:
            self.run.plan(max(0, self._planned - self.run.steps), first_step)

    def require_delta(self, delta: float) -> None:
        """Raise ValueError unless a guarantee at ``delta`` says something about one row of the data."""
        require_small_delta(delta, self.run.mechanism.sampling.num_examples)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """``(noise_multiplier, sample_rate, steps)`` of all counted steps, in order of first use."""
        counts: Counter[tuple[float, float]] = Counter()
        for segment in self.run.executed:
            for used, count in segment.items():
                counts[used.noise_multiplier, used.sample_rate] += count
        return [(sigma, q, count) for (sigma, q), count in counts.items()]

    def drop_draw(self) -> None:
        """Drop an unfinished draw, and count it as a step.

        Raises:
            ValueError: a batch of it left something behind in the model.
        """
        self._drop_draw()
        self.clipper.engine.deferred_checks.begin()

    def _drop_draw(self) -> None:
        if self.step.drop():
            self.run.spend_step(self.step.number)
        self.clipper.engine.end_draw()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the model is an ordinary one (:meth:`.PerExampleClipper.suspended`), and its optimizer does not
        step."""
        before, self._is_suspended = self._is_suspended, True
        try:
            with self.clipper.suspended():
                yield
        finally:
            self._is_suspended = before

    @contextlib.contextmanager
    def public(self) -> Iterator[None]:
        """Inside, the model and its optimizer are ordinary ones, for steps on public data.

        Raises:
            ValueError: a draw is unfinished, and its examples would meet two models.
        """
        if self.step.order.is_unfinished:
            raise ValueError(
                "a step on public data comes between two private ones: enter engine.public() after optimizer.step() "
                "('if engine.has_stepped:' with max_physical_batch_size), before the loader's next batch."
            )
        before, self._is_public = self._is_public, True
        try:
            with self.clipper.engine.suspended():
                yield
        finally:
            self._is_public = before
            self.optimizer.zero_grad()

    def detach(self) -> None:
        """Take all hooks off and close the ledger. An unfinished draw is dropped and counted.

        Raises:
            ValueError: there was an unfinished draw, or a batch of it left something behind in the model, and no
                other error is on its way.
        """
        unfinished = self.step.order.is_unfinished and self.run.steps_left > 0  # else no step followed
        _ATTACHED.pop(id(self.clipper.model), None)
        self.step.close()
        self.run.unfinished += unfinished
        self.clipper.detach()
        if self.run.ledger is not None:
            self.run.ledger.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for name in self._shown:
            vars(self.optimizer).pop(name, None)
        self._shown = {}
        if sys.exc_info()[1] is not None:
            return
        self.clipper.engine.deferred_checks.begin()
        if unfinished:
            raise ValueError(
                "engine.detach() was called between the loader's batch and optimizer.step(): the clipped sums of this "
                "draw were dropped, and epsilon counts it as a step. Call detach() after optimizer.step()."
            )

    # ---- checkpoints ----

    @property
    def _writer(self) -> str:
        """The name of this engine, the same on all ranks. A forked process has another one, since it counts on its
        own."""
        process = os.getpid()
        return self._id if process == self._process else f"{self._id}-{process}"

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint says of the training, for :meth:`restore`."""
        run = self.run
        executed = [[[*step, count] for step, count in segment.items()] for segment in run.executed]
        progress = {"steps": run.steps, "executed": executed, "next_step": self.step.number + 1}
        return {**run.state.to_dict(), **progress, "saved_by": self._writer, **run.facts()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with the run of a checkpoint. An unfinished draw is dropped, and counted as a step.

        Raises:
            PrivacyStateError: it is of another mechanism, or the ledger lacks steps.
        """
        if not self._handles:
            raise ValueError(
                "the engine was taken off with detach(): load the checkpoint into a new engine, after make_private."
            )
        mechanism = self.run.mechanism
        if mechanism.needs_every_draw and self.step.number >= 0:
            raise ValueError(
                f"this engine has taken draws already, and its noise {mechanism.noise.kind!r} and the turns of its "
                f"sampling {mechanism.sampling.kind!r} would go on from them, which epsilon is not computed for. Load "
                "the checkpoint into a new engine, right after make_private."
            )
        state = PrivacyState.from_dict(saved)
        state.require(self.run.state)
        if self.step.order.is_unfinished:  # its examples would meet two models
            self._drop_draw()
        executed = [
            Counter({StepParameters(*step): count for *step, count in segment}) for segment in saved["executed"]
        ]
        state = replace(state, mechanism=self.run.mechanism)  # its steps are those planned now
        self.run.resume(state, executed, is_own=saved.get("saved_by") == self._writer, facts=saved)
        next_step = int(saved["next_step"])
        self.run.agree(steps=self.run.steps, next_step=next_step)
        self.loader.start_at(next_step)
        self._settings = (-1, {})  # the number of its first draw may be that of the last one here
        self._plan(next_step)
        self.run.begin()

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Inside, the optimizer's state is read, or it takes over that of the training that :meth:`restore` goes on
        from. Torch lets a sharded optimizer that never stepped step on gradients of zero for that."""
        self._is_checkpointing = True
        try:
            yield
        finally:
            self._is_checkpointing = False

    def _sign(self, optimizer: torch.optim.Optimizer, state: dict) -> None:
        state[SIGNATURE] = self._writer

    def _require_own(self, optimizer: torch.optim.Optimizer, state: dict) -> None:
        """Raise ValueError if the optimizer is loaded with the state of steps that this engine does not count."""
        if not self._is_checkpointing and state.get(SIGNATURE) != self._writer:
            raise ValueError(
                "the private optimizer is loaded with the state of another training, whose steps this engine would "
                "not count. Save with engine.save_checkpoint and go on with engine.load_checkpoint; with accelerate, "
                "leave model and optimizer out of prepare and call accelerator.register_for_checkpointing(engine). A "
                "state of public data is loaded before make_private."
            )

    # ---- optimizer.step() ----

    def _show_parameters(self, step: int) -> None:
        """Let the optimizer's ``noise_multiplier``, ``max_grad_norm`` and ``expected_batch_size`` be those of this
        step, unless it has its own."""
        used = self.run.mechanism.at(step)._replace(max_grad_norm=self.run.clipping_at(step).sensitivity)
        for name in ("noise_multiplier", "max_grad_norm", "expected_batch_size"):
            if name in self._shown or not hasattr(self.optimizer, name):
                self._shown[name] = getattr(used, name)
                setattr(self.optimizer, name, self._shown[name])

    def _require_shown_parameters(self) -> None:
        for name, value in self._shown.items():
            if (found := getattr(self.optimizer, name, value)) != value:
                raise ValueError(
                    f"optimizer.{name} was set to {found}, but it only shows what the mechanism says, {value:g}. Set "
                    "it back, and give make_private a mechanism with a schedule (ScheduledNoise, ScheduledClipping, "
                    "ScheduledPoissonSampling) for a value that changes."
                )

    def _require_same_settings(self) -> None:
        """Raise ValueError if a setting of the optimizer is another one than for the physical batch of the same draw
        before this one: how many such batches there are is private, and a learning rate that follows their number
        tells."""
        draw, settings = self.step.number, _settings_of(self.optimizer)
        (last_draw, last_settings), self._settings = self._settings, (draw, settings)
        if draw != last_draw:
            return
        if changed := [k for k, v in last_settings.items() if k not in settings or settings[k] != v]:
            self._settings = last_draw, last_settings
            raise ValueError(
                f"'{changed[0][0]}' of the optimizer was changed between two physical batches of one draw, whose "
                "number is private. Set it back (or call engine.drop_draw()), and change settings when a draw has "
                "ended: 'if engine.has_stepped: scheduler.step()'. An optimizer that counts the calls of step() needs "
                "max_physical_batch_size=None, or DPTrainer."
            )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._is_checkpointing or self._is_public:
            return None
        if self._is_suspended:
            raise ValueError(
                "the private optimizer would step inside 'with engine.suspended():', where gradients have no noise. "
                "Step there with the optimizer of what else is trained, and with this one outside."
            )
        if self._stepped is not None and self._stepped is self.step.order.in_hand:
            self.step.gradients.refuse_unreleased(optimizer, also_own=True)
            if self._is_stepping:
                # the step of a base class, called by that of the optimizer's own; or again, after it raised
                return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args begin with the optimizer
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_shown_parameters()
        self._require_same_settings()
        self.step.finish_batch(optimizer)
        self._stepped, self._is_stepping = self.step.order.in_hand, True
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._is_stepping = False
        if not self.step.order.is_unfinished:
            self._show_parameters(self.step.number + 1)


def _settings_of(optimizer: torch.optim.Optimizer) -> dict[tuple[str, int], Any]:
    """Return what the optimizer's groups hold besides parameters, and the numbers among its own attributes."""
    plain = partial(tree_map, lambda x: x.tolist() if isinstance(x, (torch.Tensor, np.ndarray)) else x)
    groups = enumerate(optimizer.param_groups)
    settings = {(k, i): plain(v) for i, group in groups for k, v in group.items() if k != "params"}
    return settings | {(k, -1): v for k, v in vars(optimizer).items() if type(v) in (int, float)}
