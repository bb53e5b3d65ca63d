"""The loop given to ``make_private``: it is checked, and made a private one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..checks.validation import validate_model, validate_optimizer, validate_training_data
from ..clipping import PerExampleClipper
from ..clipping.hooks import refuse_attached
from ..clipping.parallel.dtensor import to_local
from ..data.draws import LogicalBatches, draws_dataloader
from ..data.units import Units, units_of
from ..mechanism.clipping_functions import clipping_of
from ..mechanism.mechanism import Mechanism, PrivacyUnit, Release
from ..mechanism.noise import IndependentNoise
from ..mechanism.sampling import DrawSampler, PoissonSampling, steps_per_epoch
from ..runtime import distributed
from ..runtime.randomness import SecretSeeds, seed_worker
from ..step.releases import LOSS
from ..step.run import PrivateRun
from ..step.step import PrivateStep
from .criterion import REDUCTIONS, PrivateCriterion
from .loader import PrivateLoader, check_loader
from .loop import PrivateLoop

logger = logging.getLogger(__name__)

_REPEATED_OPTIONS = (  # "generator" is left out, since it seeds the workers, and its seed may be known
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers", "pin_memory_device",
)  # fmt: skip


class LoopOptions(TypedDict, total=False):
    """The options of a :class:`PlainLoop`, which have defaults."""

    max_examples_per_person: int
    unit_column: str | Sequence[Any] | None
    rows_per_unit: int | None
    augmentation_multiplicity: int
    criterion: nn.Module | None
    loss_reduction: str
    batch_first: bool
    max_physical_batch_size: int | None
    fill_physical_batches: bool
    clipping: str
    clipping_mode: str
    memory_budget: float | str | None
    poisson_sampling: bool
    self_check: bool
    loss_bound: float | None
    loss_noise_factor: float


@dataclass(frozen=True)
class PlainLoop:
    """The model, optimizer, data and loss of a loop, and the options of clipping.

    The arguments are those of :meth:`.PrivacyEngine.make_private`.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    data_loader: DataLoader
    given_mechanism: Mechanism | None
    max_examples_per_person: int = 1
    unit_column: str | Sequence[Any] | None = None
    rows_per_unit: int | None = None
    augmentation_multiplicity: int = 1
    criterion: nn.Module | None = None
    loss_reduction: str = "mean"
    batch_first: bool = True
    max_physical_batch_size: int | None = None
    fill_physical_batches: bool = False
    clipping: str = "flat"
    clipping_mode: str = "auto"
    memory_budget: float | str | None = None
    poisson_sampling: bool = True
    self_check: bool = True
    loss_bound: float | None = None
    loss_noise_factor: float = 10.0
    is_one_pass: bool = False  # the loader yields all the steps of the mechanism

    def __post_init__(self) -> None:
        """Take the loader and the criterion behind private ones, which a notebook has in a cell that runs twice."""
        for name in ("data_loader", "criterion"):
            if isinstance(private := getattr(self, name), (PrivateLoader, PrivateCriterion)):
                object.__setattr__(self, name, private.given)

    @property
    def unit(self) -> PrivacyUnit:
        """The privacy unit, which the mechanism says, or else the options."""
        if self.given_mechanism is not None:
            return self.given_mechanism.unit
        owners = self.unit_column
        column = owners if owners is None or isinstance(owners, str) else "owner"
        return PrivacyUnit.of(self.max_examples_per_person, column, self.rows_per_unit)

    @cached_property
    def rows(self) -> tuple[Any, Units | None]:
        """The training data, and what draws choose, if not rows."""
        return units_of(self.data_loader.dataset, self.unit, self.unit_column, self.augmentation_multiplicity)

    @property
    def sampling(self) -> PoissonSampling:
        """Poisson draws in the place of the loader's batches. :func:`.check_loader` must have passed."""
        (dataset, units), size = self.rows, self.data_loader.batch_size
        assert size is not None
        return PoissonSampling(len(dataset if units is None else units), size)

    def mechanism(self, noise_multiplier: float, max_grad_norm: float, steps: int | None = None) -> Mechanism:
        """Return the mechanism that clips the examples of this loop to one bound and adds independent noise, also to
        their losses if ``loss_bound`` is given."""
        releases: tuple[Release, ...] = ()
        if self.loss_bound is not None:
            sigma = self.loss_noise_factor * noise_multiplier
            releases = (Release.within(LOSS, 0.0, self.loss_bound, noise_multiplier=sigma),)
        return Mechanism(
            sampling=self.sampling,
            clipping=clipping_of(self.clipping, max_grad_norm, noise_multiplier),
            noise=IndependentNoise(noise_multiplier),
            steps=steps,
            releases=releases,
            unit=self.unit,
        )

    def require_trainable(self, *, delta: float | None = None) -> None:
        """Raise ValueError for a loop that no mechanism could train privately, or not at ``delta``. Nothing is
        changed."""
        if not self.poisson_sampling:
            raise ValueError(
                "poisson_sampling=False is not supported, since epsilon is computed for Poisson sampling. Leave it "
                "True, or give mechanism= with RandomAllocationSampling, which takes every example in one random step "
                "of every pass."
            )
        if self.loss_reduction not in (*REDUCTIONS, "none"):
            raise ValueError(f"loss_reduction must be 'mean', 'sum' or 'none', not {self.loss_reduction!r}.")
        _take_over(self.module)
        if not self.module.training:
            raise ValueError("the model is in evaluation mode: call model.train() before make_private.")
        validate_model(self.module)
        check_loader(loader := self.data_loader)
        if self.unit.is_person and self.unit_column is None:
            raise ValueError("the mechanism protects persons: say who owns each row, by unit_column=.")
        assert loader.batch_size is not None
        validate_training_data(*self.rows, target_delta=delta, expected_batch_size=loader.batch_size, unit=self.unit)
        if not hasattr(self.optimizer, "_optimizer_step_pre_hooks"):  # one that wraps another may have its own
            raise ValueError(
                f"optimizer is a {type(self.optimizer).__name__} around another one. Hand over the one inside: with "
                "accelerate call make_private before accelerator.prepare."
            )
        validate_optimizer(self.optimizer, self.module)

    def attach(
        self, run: PrivateRun, *, secure: bool, announce: Callable[[str], None]
    ) -> tuple[PrivateLoop, PrivateCriterion | None]:
        """Hook the model and the optimizer, and begin ``run``. If something is refused, nothing stays attached.

        Args:
            secure: True to draw examples and noise from a cryptographic generator.
            announce: A function of a sentence, called when the self-check has passed.

        Returns:
            The private loop, and the private criterion if a criterion was given.
        """
        module, mechanism = self.module, run.mechanism
        distributed.broadcast(t for t in (*module.parameters(), *module.buffers()) if to_local(t) is t)
        secret = distributed.shared_secret(run.dp_seed)
        seeds = SecretSeeds(secret, distributed.rank())
        draws = self._draws(mechanism, secret, seeds, secure=secure)
        clipper = PerExampleClipper(
            module,
            mechanism.clipping.at(0),
            mode=self.clipping_mode,
            self_check=self.self_check,
            batch_first=self.batch_first,
            memory_budget=self.memory_budget,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(clipper.detach)
            self._require_supported(clipper, mechanism)
            step = PrivateStep(
                clipper,
                run,
                seeds,
                cast(LogicalBatches, draws.dataset),
                secure=secure,
                announce=announce,
                at_least=1,
                own_optimizer=self.optimizer,
            )
            undo.callback(step.close)
            criterion = (
                None if self.criterion is None else PrivateCriterion.of(self.criterion, step, self.loss_reduction)
            )
            clipper.follow(step, self.loss_reduction if criterion is None else "none")
            loader = PrivateLoader(draws, step, self.data_loader, self.max_physical_batch_size, self.is_one_pass)
            loop = PrivateLoop(step, self.optimizer, loader)
            undo.pop_all()
        seeds.reseed()
        return loop, criterion

    def _draws(self, mechanism: Mechanism, secret: int, seeds: SecretSeeds, *, secure: bool) -> DataLoader:
        """Return a DataLoader of the mechanism's draws. The data set, collate_fn, workers and pinning are the loop's.

        Args:
            secret: The seed of the draws, the same on all ranks.
            seeds: The seeds of augmentation and random collators.
            secure: True to draw from a cryptographic generator.

        Raises:
            ValueError: the mechanism is for other data or another batch size, or filled batches have no size.
        """
        loader, sampling, size = self.data_loader, mechanism.sampling, self.max_physical_batch_size
        if size is not None and size < 1:
            raise ValueError(f"max_physical_batch_size must be a positive number of examples, got {size}.")
        own = self.sampling
        off = abs(sampling.expected_batch_size - own.expected_batch_size)  # the former may be no whole number
        if sampling.num_examples != own.num_examples or off >= 1:
            raise ValueError(
                f"the mechanism is for {sampling.num_examples} {mechanism.unit.noun}s and an expected batch size of "
                f"{sampling.expected_batch_size:g}, but data_loader has {own.num_examples} and "
                f"batch_size={loader.batch_size}. Build both for the same data, and give the DataLoader "
                f"batch_size={round(sampling.expected_batch_size)}."
            )
        draws_of_pass = steps_per_epoch(sampling.num_examples, sampling.expected_batch_size)
        if self.is_one_pass and mechanism.steps is not None:
            draws_of_pass = mechanism.steps
        sampler = DrawSampler(
            sampling, draws_of_pass, secret, distributed.rank(), distributed.world_size(), secure=secure
        )
        largest = sampler.largest_draw
        if self.fill_physical_batches and size is None and largest is None:
            raise ValueError(
                f"fill_physical_batches=True needs a size to fill batches up to, and draws of sampling "
                f"{sampling.kind!r} may have any: give max_physical_batch_size as well, or a sampling with a largest "
                "draw (TruncatedPoissonSampling, FixedOrderSampling)."
            )
        dataset, units = self.rows
        draws = LogicalBatches(
            dataset,
            loader.collate_fn,
            size or (largest or sampling.num_examples) * (1 if units is None else units.largest),
            seeds,
            fill=self.fill_physical_batches,
            largest_draw=largest,
            copies=mechanism.unit.max_examples_per_person,
            units=units,
        )
        options = {name: getattr(loader, name) for name in _REPEATED_OPTIONS if hasattr(loader, name)}
        options["worker_init_fn"] = options.get("worker_init_fn") or seed_worker
        return draws_dataloader(draws, sampler, **options)

    def _require_supported(self, clipper: PerExampleClipper, mechanism: Mechanism) -> None:
        if clipper.trainable.parallel:
            raise ValueError(
                "the model is tensor-parallel, for which PrivacyEngine does not draw batches: use DPTrainer, or "
                "PerExampleClipper with ShardedNoise in a loop that gives each group its examples (docs/scaling.md)."
            )
        units = self.rows[1]
        if units is not None and units.largest > 1 and self.criterion is None and self.loss_reduction != "none":
            raise ValueError(
                "rows of a unit are averaged before they are clipped, but loss.backward() hands over one loss for the "
                "batch. Give make_private a criterion, or loss_reduction='none' and call engine.backward(losses) with "
                "losses of shape (B,)."
            )
        releases_loss = [release.name for release in mechanism.releases] == [LOSS]  # the step refuses others
        if releases_loss and self.criterion is None and self.loss_reduction != "none":
            raise ValueError(
                "the loss is to be released, but loss.backward() hands over one loss for the batch. Give make_private "
                "a criterion, or loss_reduction='none' and call engine.backward(losses) with losses of shape (B,)."
            )


def _take_over(model: nn.Module) -> None:
    """Take off an earlier engine of ``model`` that was given no draw, as that of a notebook's cell which runs again.

    Raises:
        ValueError: it has begun to train, or a clipper or a trainer is attached.
    """
    if (loop := PrivateLoop.of(model)) is not None:
        if loop.step.number >= 0:
            raise ValueError(
                f"an engine that took {loop.run.steps} steps is attached to this model: go on with it, or call "
                "engine.detach(model) of any engine and then make_private again. What both spend adds up."
            )
        loop.detach()
        logger.warning("an engine that was attached to this model and took no step is taken off it.")
    refuse_attached(model)
