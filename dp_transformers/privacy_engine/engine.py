"""PrivacyEngine: the private step of DPTrainer for a loop of your own."""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from .. import distributed
from ..accounting import check_accountant
from ..checkpoint import Ledger, PrivacyState, PrivacyStateError
from ..clipping import PerExampleClipper
from ..clipping.functions import ClippingFunction
from ..clipping.hooks import refuse_attached
from ..clipping.parallel.dtensor import to_local
from ..data import LogicalBatches, draws_dataloader
from ..mechanism import Mechanism, PrivacyUnit
from ..noise import IndependentNoise
from ..noise.generators import check_noise_source
from ..plan import describe, hopeless
from ..randomness import SecretSeeds, seed_worker
from ..run import PrivacySpent, PrivateRun
from ..sampling import DrawSampler, PoissonSampling, Sampling
from ..step import Given, PrivateStep
from ..validation import validate_model, validate_optimizer, validate_training_data
from ..values import StepParameters

logger = logging.getLogger(__name__)

_REDUCTIONS = ("mean", "sum")
_REPEATED_OPTIONS = (  # not "generator": it seeds the workers, and may be known
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers",
    "pin_memory_device",
)  # fmt: skip


class PrivacyEngine:
    """Makes a plain PyTorch loop (ε, δ)-differentially private in its training examples.

    The loop stays as it is: ``loss.backward(); optimizer.step(); optimizer.zero_grad()``. ``make_private`` gives back the same model and the
    same optimizer, with hooks, and a loader of Poisson draws in the place of the old one.

    * After the ``loss.backward()`` that ends a draw, ``p.grad`` holds the sum of its clipped per-example gradients, and None after those before
      it (in mode "per_sample", ``p.grad_sample`` of shape (B, *p.shape) those of the batch before clipping, until the step); ``optimizer.step()``
      adds the noise, divides by the expected batch size and then steps; afterwards ``p.grad`` is what was stepped with.
    * In several processes each has the model, and makes the same calls: the loader hands out every draw among them, and ``optimizer.step()``
      adds up their sums. Models under ``fully_shard`` (FSDP2) need losses of shape (B,): a ``criterion``, or ``loss_reduction="none"`` and
      ``engine.clipper.backward(losses)``.
    * Steps are counted when their noise is drawn. :meth:`get_epsilon` is the ε of those.
    * Dropout and augmentation must be as unknown as the noise, so ``make_private`` seeds Python's, numpy's and torch's global generators
      anew. Do not set their seeds after it, nor save their states.

    Args:
        accountant: "pld" or "rdp", see :mod:`dp_transformers.accounting`.
        secure_rng: Noise from a cryptographic generator (extra ``secure``).
        ledger_dir: Folder for an append-only record of every step, written before the step's noise exists, by one process at a time. With it, a training resumed
            from a checkpoint also accounts for the steps taken after that checkpoint; without it they are forgotten.
        dp_seed: Fixed seed of draws and noise, for tests: the run is then not private, and says so.

    Example::

        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        print(engine.get_epsilon(delta=1e-6))
    """

    def __init__(
        self,
        *,
        accountant: str = "pld",
        secure_rng: bool = False,
        ledger_dir: str | os.PathLike | None = None,
        dp_seed: int | None = None,
    ):
        check_noise_source(dp_seed=dp_seed, secure=secure_rng)
        self._accountant = check_accountant(accountant)
        self._dp_seed, self._secure = dp_seed, secure_rng
        self._ledger = None if ledger_dir is None else Ledger(ledger_dir)
        self._loop: _Loop | None = None

    @property
    def steps(self) -> int:
        """Steps counted until now."""
        return 0 if self._loop is None else self._loop.run.steps

    @property
    def clipper(self) -> PerExampleClipper:
        """The clipper of the private model, for losses that are no plain mean or sum: ``engine.clipper.backward(losses)``, (B,) losses."""
        return self._made_private().clipper

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float | None = None,
        max_grad_norm: float | None = None,
        mechanism: Mechanism | None = None,
        criterion: nn.Module | None = None,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        max_physical_batch_size: int | None = None,
        clipping_mode: str = "auto",
        poisson_sampling: bool = True,
        self_check: bool = True,
        max_examples_per_person: int = 1,
    ) -> tuple:
        """Attach to ``module`` and ``optimizer``, and replace ``data_loader`` by a loader of Poisson draws.

        Args:
            module: The model whose ``forward`` your loop calls. It is hooked, not wrapped: use the object you have. In several processes
                all start from rank 0's weights.
            optimizer: Any torch optimizer (LBFGS excepted) of exactly the trainable parameters of ``module``.
            data_loader: A DataLoader of a map-style data set. Its batch size becomes the expected batch size (of all processes together)
                and batch size / N the sample rate; collate_fn, workers and pinning are kept.
            noise_multiplier: σ; the noise on the summed gradients has standard deviation σ · max_grad_norm.
            max_grad_norm: The bound C on each example's gradient norm.
            mechanism: Sampling, clipping, noise and what else ε depends on, in the place of ``noise_multiplier``, ``max_grad_norm`` and
                ``max_examples_per_person``, from which a mechanism is built otherwise. It must be for this data set and batch size.
            criterion: A loss module with ``reduction``. It comes back as one whose result is differentiated per example, which the
                clipping modes "ghost" and "fast_gradient" need.
            loss_reduction: "mean" or "sum": how your loss is reduced over the *rows of the batch*, and that is all it may do with them. A mean
                over what is left by ``ignore_index``, or weighted by class, lets one row change the weight of another: for those take
                ``engine.clipper.backward(losses)`` with losses of shape (B,), and say "none" here. :meth:`check_loss` tells.
            batch_first: False where the batch is the second dimension of the model's inputs (and outputs).
            max_physical_batch_size: Draws of more examples come in several batches; ``optimizer.step()`` does nothing before the last.
            clipping_mode: "auto" (book-keeping), "book_keeping", "per_sample"; with a ``criterion`` or ``loss_reduction="none"`` also
                "ghost" and "fast_gradient". See :mod:`dp_transformers.clipping.modes`.
            poisson_sampling: Only True: ε is that of Poisson sampling.
            self_check: Compare with one example at a time on synthetic input before the first step.
            max_examples_per_person: How many rows of the data one person may have. ε protects one row; :meth:`privacy_spent` then also says what
                protects all rows of one person.

        Returns:
            ``(module, optimizer, data_loader)``, or ``(module, optimizer, criterion, data_loader)`` if a criterion was given.

        Raises:
            ValueError: whatever cannot be trained privately like this, with the way out.
        """
        if mechanism is None and None in (noise_multiplier, max_grad_norm):
            raise ValueError("make_private needs noise_multiplier and max_grad_norm, or a mechanism that says both.")
        if mechanism is not None and (noise_multiplier, max_grad_norm, max_examples_per_person) != (None, None, 1):
            raise ValueError(
                "noise_multiplier, max_grad_norm or max_examples_per_person is given beside a mechanism, which says them: leave them out."
            )
        clipping = max_grad_norm if mechanism is None else mechanism.clipping.at(0)
        loop = self._prepare(
            module, optimizer, data_loader, criterion, loss_reduction, batch_first, max_physical_batch_size, clipping_mode, poisson_sampling,
            self_check, clipping, sampling=None if mechanism is None else mechanism.sampling,
        )  # fmt: skip
        return loop.begin(lambda: mechanism or loop.mechanism(noise_multiplier, rows=max_examples_per_person))

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float,
        criterion: nn.Module | None = None,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        max_physical_batch_size: int | None = None,
        clipping_mode: str = "auto",
        poisson_sampling: bool = True,
        self_check: bool = True,
        max_examples_per_person: int = 1,
    ) -> tuple:
        """:meth:`make_private` with the least noise such that ``epochs`` passes over the loader spend ``target_epsilon`` at ``target_delta``.

        A step that would exceed the target raises RuntimeError and leaves the model as it is. With ``max_examples_per_person`` the target is met
        for all rows of one person together.
        """
        loop = self._prepare(
            module, optimizer, data_loader, criterion, loss_reduction, batch_first, max_physical_batch_size, clipping_mode, poisson_sampling,
            self_check, max_grad_norm, target_delta,
        )  # fmt: skip
        steps = math.ceil(epochs * loop.loader.steps_per_epoch)

        def calibrated() -> Mechanism:
            mechanism = loop.mechanism(1.0, steps=steps, rows=max_examples_per_person)
            return mechanism.calibrated(target_epsilon=target_epsilon, target_delta=target_delta, accountant=self._accountant)

        return loop.begin(calibrated, target_epsilon=target_epsilon)

    def _prepare(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        criterion: nn.Module | None,
        loss_reduction: str,
        batch_first: bool,
        max_physical_batch_size: int | None,
        clipping_mode: str,
        poisson_sampling: bool,
        self_check: bool,
        max_grad_norm: float | ClippingFunction,
        delta: float | None = None,
        sampling: Sampling | None = None,
    ) -> _Loop:
        if self._loop is not None:
            raise ValueError("this engine is already used: take another PrivacyEngine for another training; what both spend adds up.")
        if not poisson_sampling:
            raise ValueError(
                "poisson_sampling=False is not supported: epsilon is computed for Poisson sampling and would be too small. Leave it True."
            )
        if loss_reduction not in (*_REDUCTIONS, "none"):
            raise ValueError(f"loss_reduction must be 'mean', 'sum' or 'none', not {loss_reduction!r}.")
        refuse_attached(module)
        _check_module(module)
        _check_loader(data_loader)
        _check_optimizer(optimizer, module)
        validate_training_data(data_loader.dataset, target_delta=delta, expected_batch_size=data_loader.batch_size)
        distributed.broadcast(t for t in (*module.parameters(), *module.buffers()) if to_local(t) is t)
        secret = distributed.shared_secret(self._dp_seed)
        seeds = SecretSeeds(secret, distributed.rank())
        sampling = sampling or PoissonSampling(len(data_loader.dataset), data_loader.batch_size)
        loader = PoissonLoader(data_loader, sampling, secret, seeds, max_physical_batch_size)
        clipper = PerExampleClipper(module, max_grad_norm, mode=clipping_mode, self_check=self_check, batch_first=batch_first)
        try:
            if clipper.parallel:
                raise ValueError(
                    "the model is tensor-parallel, for which PrivacyEngine does not draw batches: use DPTrainer, or PerExampleClipper with "
                    "LayoutNoise in a loop that gives each group its examples (docs/scaling.md)."
                )
            private_criterion = None if criterion is None else PrivateCriterion(criterion, clipper, loss_reduction)
            reduction = loss_reduction if criterion is None and loss_reduction != "none" else None
            self._loop = _Loop(self, clipper, optimizer, loader, private_criterion, reduction, delta, seeds)
        except BaseException:
            clipper.detach()
            raise
        return self._loop

    def get_epsilon(self, delta: float) -> float:
        """ε at ``delta`` of every step taken so far, and of a draw that was shown and not stepped; infinite where the run is not private."""
        return 0.0 if self._loop is None else self._loop.run.epsilon(delta)

    def privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """What has been spent until now, at ``delta`` (default: ``target_delta``), with the mechanism and what it protects."""
        run = self._made_private().run
        if delta is None and run.state.delta is None:
            raise ValueError("privacy_spent needs a delta: give the one that your guarantee is stated for (1e-6 is common, below 1/N).")
        return run.spent(delta)

    def drop_draw(self) -> None:
        """Give up the draw that the loop was stopped in, and count it as a step.

        For interrupts and errors that have nothing to do with the examples. Whether a draw is stepped must not depend on them: counting does
        not mend that.
        """
        loop = self._made_private()
        if loop.step.drop():
            loop.run.spend_step(loop.step.number)

    def check_loss(self, loss_function: Callable[..., torch.Tensor], outputs: torch.Tensor, targets: Any) -> None:
        """Check on public or made-up ``outputs`` and ``targets`` that a loss is the mean (or sum) over rows it is taken for.

        Raises:
            ValueError: the gradient of some row is not that of the row by itself.
        """
        reduction = self._made_private().loss_reduction or "mean"
        outputs = outputs.detach().requires_grad_()
        together = torch.autograd.grad(loss_function(outputs, targets), outputs)[0]
        share = 1 / len(outputs) if reduction == "mean" else 1.0
        for i in range(len(outputs)):
            row = outputs.detach()[i : i + 1].requires_grad_()
            alone = torch.autograd.grad(loss_function(row, targets[i : i + 1]), row)[0]
            if not torch.allclose(together[i : i + 1], alone * share, rtol=1e-4, atol=1e-7):
                raise ValueError(
                    f"the loss is not the plain {reduction} of its rows' losses: the gradient of row {i} depends on the other rows, or is scaled. "
                    "Compute losses of shape (B,) with reduction='none' and call engine.clipper.backward(losses) instead of loss.backward(), "
                    "with make_private(..., loss_reduction='none')."
                )

    def save_checkpoint(
        self,
        path: str | os.PathLike,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
    ) -> None:
        """Write model, optimizer, what was spent and ``checkpoint_dict`` into one file, completely or not at all.

        Of several processes the first writes; the others need to call it only where they hold shards, and should wait for it before they load.
        """
        loop, content = self._made_private(), dict(checkpoint_dict or {})
        content["module"], content["optimizer"] = loop.states(module, optimizer)
        run = loop.run
        executed = [[[*step, count] for step, count in segment.items()] for segment in run.executed]
        facts = {"steps": run.steps, "executed": executed, "next_step": loop.step.number + 1}
        facts |= {"saved_by": loop.writer, "not_private_because": list(run.not_private_because)}
        content["privacy"] = {**run.state.to_dict(), **facts}
        if distributed.rank() != 0:
            return
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def load_checkpoint(
        self, path: str | os.PathLike, *, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, map_location: Any = None
    ) -> dict[str, Any]:
        """Go on from a checkpoint of the same mechanism; call it after ``make_private``. Returns the rest of the file's dictionary.

        What the checkpoint's run spent is added to what this engine counts, but for steps that it counts already: its own, when it goes back
        to a file that it saved, and with a ledger all that it knows of the run.

        Raises:
            PrivacyStateError: the file holds no privacy state, or one of another mechanism, or the ledger lacks steps.
        """
        loop = self._made_private()
        content = torch.load(path, map_location=map_location, weights_only=True)
        if "privacy" not in content:
            raise PrivacyStateError(f"'{path}' says nothing of what was spent: load a file that PrivacyEngine.save_checkpoint wrote.")
        moments = content.pop("optimizer", None)
        if optimizer is not None and moments is None:
            raise ValueError(
                f"'{path}' was saved without the optimizer. Call load_checkpoint without optimizer= and let the optimizer start anew; next time save with "
                "save_checkpoint(..., optimizer=optimizer)."
            )
        loop.restore(dict(content.pop("privacy")))
        loop.load_states(module, content.pop("module"), optimizer, moments)
        return content

    def detach(self) -> None:
        """Take every hook off the model and the optimizer, which are then ordinary ones again, and close the ledger. ε stays counted.

        Raises:
            ValueError: a draw is unfinished. The engine is off nevertheless, and the clipped sums, which have no noise, are dropped.
        """
        if not self._made_private().detach():
            return
        if sys.exc_info()[1] is None:  # an error that is on its way says more
            raise ValueError(
                "engine.detach() was called between the loader's batch and optimizer.step(): the draw is not finished. Its clipped sums have no noise and were "
                "dropped (p.grad is None), and epsilon counts the draw as a step. Call detach() after optimizer.step()."
            )

    def _made_private(self) -> _Loop:
        if self._loop is None:
            raise ValueError("this engine trains nothing yet: call make_private or make_private_with_epsilon first.")
        return self._loop


class PoissonLoader:
    """The batches of Poisson draws: what your DataLoader yielded, collated by its collate_fn, of random size.

    A draw of more than ``max_physical_batch_size`` examples comes in several batches, an empty one as a single row of weight zero, so that
    every draw is stepped.

    Attributes:
        sample_rate: q, the probability of each example to be in a draw.
        expected_batch_size: q · N.
        steps_per_epoch: Draws in one pass, ``round(1 / q)``.
    """

    def __init__(self, loader: DataLoader, sampling: Sampling, secret: int, seeds: SecretSeeds, max_physical_batch_size: int | None):
        if max_physical_batch_size is not None and max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size must be a positive number of examples, got {max_physical_batch_size}.")
        self.dataset, self.collate_fn, self.batch_size = loader.dataset, loader.collate_fn, loader.batch_size
        self.expected_batch_size, self.max_physical_batch_size = loader.batch_size, max_physical_batch_size
        if (sampling.num_examples, sampling.expected_batch_size) != (len(loader.dataset), loader.batch_size):
            raise ValueError(
                f"the mechanism is for {sampling.num_examples} examples and an expected batch size of {sampling.expected_batch_size:g}, but data_loader has "
                f"{len(loader.dataset)} and batch_size={loader.batch_size}: epsilon is computed for those numbers. Build both for the same data."
            )
        self.sample_rate = sampling.sample_rate
        self.steps_per_epoch = max(1, round(1 / self.sample_rate))
        options = {name: getattr(loader, name) for name in _REPEATED_OPTIONS if hasattr(loader, name)}
        options["worker_init_fn"] = options.get("worker_init_fn") or seed_worker
        self.sampler = DrawSampler(sampling, self.steps_per_epoch, secret, distributed.rank(), distributed.world_size())
        self.logical_batches = LogicalBatches(self.dataset, self.collate_fn, max_physical_batch_size or len(self.dataset), seeds)
        self._draws = draws_dataloader(self.logical_batches, self.sampler, **options)
        self._step: PrivateStep | None = None

    def hand_out_to(self, step: PrivateStep) -> None:
        """Tell ``step`` of every batch before the loop sees it."""
        self._step = step

    def __len__(self) -> int:
        if self.max_physical_batch_size is not None:
            raise TypeError(
                "how many physical batches a pass has is random with max_physical_batch_size; loader.steps_per_epoch is the number of "
                "optimizer steps."
            )
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        for draw in self._draws:
            for given in self._step.physical_batches(draw):
                yield given.batch.rows


class PrivateCriterion:
    """The loss module handed to ``make_private``; ``backward`` on its result clips per example. Under no_grad an ordinary loss."""

    def __init__(self, criterion: nn.Module, clipper: PerExampleClipper, loss_reduction: str):
        reduction = getattr(criterion, "reduction", None)
        if reduction not in _REDUCTIONS or reduction != loss_reduction:
            raise ValueError(
                f"criterion {type(criterion).__name__} has reduction={reduction!r} and loss_reduction is {loss_reduction!r}: both must be 'mean', "
                "or both 'sum'. Compute other losses per example and call engine.clipper.backward(losses), with loss_reduction='none' and without criterion."
            )
        self.criterion, self.reduction, self._clipper = copy.copy(criterion), reduction, clipper
        self.criterion.reduction = "none"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        each = self.criterion(*args, **kwargs)
        if each.dim() > 1 and not self._clipper.batch_first:
            each = each.movedim(1, 0)
        losses_b = each if each.dim() == 1 else getattr(each.flatten(1), self.reduction)(1)
        loss = getattr(losses_b, self.reduction)(0)
        if not loss.requires_grad:
            return loss
        return _ClippedBackward.apply(torch.zeros((), device=loss.device, requires_grad=True), loss.detach(), [losses_b], self._clipper)


class _ClippedBackward(torch.autograd.Function):
    """The value of a loss, whose backward is the clipper's on the losses of the examples."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, loss: torch.Tensor, losses: list[torch.Tensor], clipper: PerExampleClipper) -> torch.Tensor:
        ctx.losses, ctx.clipper = losses, clipper  # in a list, so that autograd does not go on to them by itself
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        if not ctx.losses:
            raise ValueError(
                "backward was called twice on one loss of the private criterion, which would add every example's gradient twice. Call it once, and "
                "compute a new loss from the next batch of the loader."
            )
        if float(grad) != 1:
            raise ValueError(
                "the loss of a private criterion was scaled or combined with another before backward. Call backward on the loss itself, without "
                "GradScaler and without dividing by accumulation steps. For other losses compute losses of shape (B,) and call "
                "engine.clipper.backward(losses), with make_private(..., loss_reduction='none') and without criterion."
            )
        with torch.enable_grad():
            ctx.clipper.backward(ctx.losses.pop())
        return None, None, None, None


class _Loop:
    """A loop of the user's: the order of batch, backward and step in it, and what hangs on its model and optimizer."""

    def __init__(
        self,
        engine: PrivacyEngine,
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
        _check_optimizer(optimizer, self.clipper.model)
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


def _check_module(module: nn.Module) -> None:
    if not module.training:
        raise ValueError("the model is in evaluation mode: call model.train() before make_private.")
    validate_model(module)


def _check_loader(loader: Any) -> None:
    if isinstance(loader, PoissonLoader):
        raise ValueError("data_loader is the private loader of an earlier make_private: hand over the DataLoader that you made at first.")
    if not isinstance(loader, DataLoader):
        raise ValueError(f"data_loader must be a torch DataLoader, not {type(loader).__name__}.")
    if loader.batch_size is None:
        raise ValueError(
            "data_loader has no batch_size (batch_sampler= or batch_size=None), which is the expected size of a draw: give it one. (With accelerate call "
            "make_private before accelerator.prepare.)"
        )
    sampler = getattr(loader, "sampler", None)
    if sampler is not None and not isinstance(sampler, (RandomSampler, SequentialSampler, torch.utils.data.DistributedSampler)):
        raise ValueError(
            f"data_loader has a {type(sampler).__name__}: private training draws every example with the same probability. Build the DataLoader "
            "without sampler=."
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
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
