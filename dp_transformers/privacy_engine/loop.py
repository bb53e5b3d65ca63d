"""The loop of a user: the order of batch, backward and step in it."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import distributed
from ..checkpoint import PrivacyState
from ..clipping import PerExampleClipper
from ..mechanism import Mechanism, PrivacyUnit
from ..noise import IndependentNoise
from ..plan import describe, hopeless
from ..randomness import SecretSeeds
from ..run import PrivateRun
from ..step import Given, PrivateStep
from ..validation import validate_optimizer
from ..values import StepParameters
from .criterion import PrivateCriterion
from .loader import PoissonLoader

logger = logging.getLogger(__name__)


class Loop:
    """A loop of the user's: the order of batch, backward and step in it, and what hangs on its model and optimizer."""

    def __init__(
        self,
        engine: Any,
        clipper: PerExampleClipper,
        optimizer: torch.optim.Optimizer,
        loader: PoissonLoader,
        criterion: PrivateCriterion | None,
        followed_reduction: str | None,
        delta: float | None,
        seeds: SecretSeeds,
    ):
        self._engine, self.clipper, self.optimizer, self.loader = engine, clipper, optimizer, loader
        self.criterion, self._delta, self._seeds, self._followed = criterion, delta, seeds, followed_reduction
        self.loss_reduction = criterion.reduction if criterion else followed_reduction
        self._handles: list[Any] = []
        self._stepped: Given | None = None  # the batch that the last step was for, and whether it has not returned
        self._is_stepping = False

    def mechanism(self, noise_multiplier: float, *, steps: int | None = None, rows: int = 1) -> Mechanism:
        """The mechanism of these numbers and of the loader."""
        return Mechanism(
            sampling=self.loader.sampler.sampling,
            clipping=self.clipper.clipping,
            noise=IndependentNoise(noise_multiplier),
            steps=steps,
            unit=PrivacyUnit(rows),
        )

    def begin(self, make_mechanism: Callable[[], Mechanism], *, target_epsilon: float | None = None) -> tuple:
        engine, loader, clipper = self._engine, self.loader, self.clipper
        try:
            mechanism = make_mechanism()
            state = PrivacyState(distributed.on_rank_zero(PrivacyState.new_run_id), mechanism, self._delta, target_epsilon)
            if engine._ledger is not None:
                distributed.on_rank_zero(engine._ledger.open)
            self.run = PrivateRun(state, engine._accountant, engine._ledger, dp_seed=engine._dp_seed, verified=clipper.self_check)
            noise = mechanism.noise.source(clipper, dp_seed=engine._dp_seed, secure=engine._secure)
            self.step = PrivateStep(clipper, self.run, noise, self._seeds, loader.logical_batches, at_least=1, own_optimizer=self.optimizer)
            clipper.follow(self.step, self._followed)
        except BaseException:
            self.detach()
            engine._loop = None
            raise
        steps = mechanism.steps
        self._id, self._planned = state.run_id, steps  # this engine's own, whatever runs it goes on with
        loader.hand_out_to(self.step)
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        self._plan()
        self.run.begin()
        self._seeds.reseed()
        size = sum(p.numel() for p in clipper.parameters)
        logger.info(describe(self.run, steps, size, clipper.mode.name))
        if warning := hopeless(self.run, steps or loader.steps_per_epoch, size):
            logger.warning(warning)
        parts = (clipper.model, self.optimizer, self.criterion, loader)
        return tuple(part for part in parts if part is not None)

    def _plan(self, first_step: int = 0) -> None:
        if self._planned is not None:
            self.run.plan(max(0, self._planned - self.run.steps), first_step)

    def detach(self) -> bool:
        """Whether a draw was unfinished; it is counted."""
        unfinished = False
        if hasattr(self, "step"):
            unfinished = self.step.is_unfinished
            self.step.close()
            self.run.unfinished += unfinished
        self.clipper.detach()
        if self._engine._ledger is not None:
            self._engine._ledger.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return unfinished

    def restore(self, saved: dict[str, Any]) -> None:
        if not self._handles:
            raise ValueError(
                "the engine was taken off with detach(): load the checkpoint before that, or after make_private of a new engine."
            )
        state = PrivacyState.from_dict(saved)
        state.require(self.run.state)
        executed = [Counter({StepParameters(*step): count for *step, count in segment}) for segment in saved.get("executed", ())]
        executed = executed or [Counter({state.mechanism.at(0): int(saved["steps"])})]  # version 1
        self.run.take_over(
            replace(state, mechanism=self.run.mechanism),  # with the steps and the unit of now
            executed,
            is_own=saved.get("saved_by") == self.writer,
            reasons=saved.get("not_private_because", ()),
        )
        next_step = int(saved.get("next_step", saved["steps"]))
        self.loader.sampler.start_at(next_step)
        self._plan(next_step)
        self.run.begin()

    @property
    def writer(self) -> str:
        """Who saves: this engine in this process. A fork of it counts on its own."""
        return f"{self._id}-{os.getpid()}"

    # ---- optimizer.step() ----

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._stepped is not None and self._stepped is self.step.given:
            self.step.refuse_unreleased(optimizer, also_own=True)
            if self._is_stepping:
                return None  # the step of a base class, called by that of the optimizer's own; or again, after it raised
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args begin with the optimizer
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_optimizer(optimizer, self.clipper.model)
        self.step.finish_batch()
        self._stepped, self._is_stepping = self.step.given, True
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._is_stepping = False

    # ---- states of the model and the optimizer, whole where they are sharded ----

    def states(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict, dict | None]:
        if not self.clipper.shards:
            return module.state_dict(), None if optimizer is None else optimizer.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        moments = None if optimizer is None else get_optimizer_state_dict(module, optimizer, options=whole)
        return get_model_state_dict(module, options=whole), moments

    def load_states(self, module: nn.Module, weights: dict, optimizer: torch.optim.Optimizer | None, moments: dict | None) -> None:
        if not self.clipper.shards:
            module.load_state_dict(weights)
            if optimizer is not None:
                optimizer.load_state_dict(moments)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(module, weights, options=whole)
        if optimizer is not None:
            set_optimizer_state_dict(module, optimizer, moments, options=whole)


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times for one step; take a first-order optimizer (SGD, AdamW).")
    names = {p: name for name, p in module.named_parameters()}
    held = {p for group in optimizer.param_groups for p in group["params"]}
    validate_optimizer(optimizer, module)
    if missed := [name for p, name in names.items() if p.requires_grad and p not in held]:
        raise ValueError(
            f"the optimizer misses {len(missed)} trainable parameters ({', '.join(missed[:3])}): they would take up the clipping bound without being "
            "trained. Freeze them (requires_grad_(False)) or give them to the optimizer."
        )
    if frozen := [names[p] for p in held if not p.requires_grad and p.grad is not None]:
        raise ValueError(f"'{frozen[0]}' is frozen, but has a gradient that the optimizer would use: set its grad to None.")
