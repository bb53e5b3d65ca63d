"""PrivacyEngine: the private step of DPTrainer for a loop of your own."""

from __future__ import annotations

import copy
import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from . import distributed
from .accounting import PrivacyAccountant, calibrate_noise_multiplier
from .checkpoint import Ledger, PrivacyState, PrivacyStateError
from .clipping import PerExampleClipper
from .clipping.precision import set_gradient
from .clipping.shards import local
from .mechanism import LayoutNoise, privatise
from .noise import GaussianNoise, forget_seeds, seed_worker
from .sampling import LogicalBatch, PoissonSampler, poisson_dataloader
from .validation import validate_model, validate_optimizer, validate_training_data

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

    * After ``loss.backward()``, ``p.grad`` holds the sum of the clipped per-example gradients of the draw so far (in mode "per_sample",
      ``p.grad_sample`` of shape (B, *p.shape) those before clipping, until the step); ``optimizer.step()`` adds the noise, divides by the expected batch
      size and then steps; afterwards ``p.grad`` is what was stepped with.
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
        self.accountant = PrivacyAccountant(accountant)
        self._noise: GaussianNoise | LayoutNoise = GaussianNoise(secure=secure_rng, dp_seed=dp_seed)
        self._dp_seed, self._secure = dp_seed, secure_rng
        self._ledger = None if ledger_dir is None else Ledger(ledger_dir)
        self._run: _Run | None = None

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
        noise_multiplier: float,
        max_grad_norm: float,
        criterion: nn.Module | None = None,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        max_physical_batch_size: int | None = None,
        clipping_mode: str = "auto",
        poisson_sampling: bool = True,
        self_check: bool = True,
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

        Returns:
            ``(module, optimizer, data_loader)``, or ``(module, optimizer, criterion, data_loader)`` if a criterion was given.

        Raises:
            ValueError: whatever cannot be trained privately like this, with the way out.
        """
        run = self._prepare(
            module, optimizer, data_loader, criterion, loss_reduction, batch_first, max_physical_batch_size, clipping_mode, poisson_sampling,
            self_check, max_grad_norm,
        )  # fmt: skip
        return run.begin(noise_multiplier)

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
    ) -> tuple:
        """:meth:`make_private` with the least noise such that ``epochs`` passes over the loader spend ``target_epsilon`` at ``target_delta``.

        A step that would exceed the target raises RuntimeError and leaves the model as it is.
        """
        run = self._prepare(
            module, optimizer, data_loader, criterion, loss_reduction, batch_first, max_physical_batch_size, clipping_mode, poisson_sampling,
            self_check, max_grad_norm, target_delta,
        )  # fmt: skip
        steps = math.ceil(epochs * run.loader.steps_per_epoch)
        sigma = calibrate_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=run.loader.sample_rate,
            steps=steps,
            accountant=self.accountant.accountant,
        )
        logger.info("noise multiplier %.4f for epsilon %g at delta %g after %d steps", sigma, target_epsilon, target_delta, steps)
        return run.begin(sigma, target_epsilon=target_epsilon, steps=steps)

    def _prepare(
        self, module, optimizer, data_loader, criterion, loss_reduction, batch_first, max_physical_batch_size, clipping_mode, poisson_sampling,
        self_check, max_grad_norm, delta=None,
    ) -> _Run:  # fmt: skip
        if self._run is not None:
            raise ValueError("this engine is already used: take another PrivacyEngine for another training; what both spend adds up.")
        if not poisson_sampling:
            raise ValueError("poisson_sampling=False is not supported: epsilon is computed for Poisson sampling and would be too small.")
        if loss_reduction not in (*_REDUCTIONS, "none"):
            raise ValueError(f"loss_reduction must be 'mean', 'sum' or 'none', not {loss_reduction!r}.")
        _check_module(module)
        _check_loader(data_loader)
        _check_optimizer(optimizer, module)
        validate_training_data(data_loader.dataset, target_delta=delta, expected_batch_size=data_loader.batch_size)
        distributed.broadcast(t for t in (*module.parameters(), *module.buffers()) if local(t) is t)
        loader = PoissonLoader(data_loader, distributed.shared_secret(self._dp_seed), max_physical_batch_size)
        clipper = PerExampleClipper(module, max_grad_norm, mode=clipping_mode, self_check=self_check, batch_first=batch_first)
        try:
            if clipper.parallel:
                raise ValueError(
                    "the model is tensor-parallel, for which PrivacyEngine does not draw batches: use DPTrainer, or PerExampleClipper with "
                    "LayoutNoise in a loop that gives each group its examples (docs/scaling.md)."
                )
            if clipper.shards:
                self._noise = LayoutNoise(clipper, dp_seed=self._dp_seed, secure=self._secure)
            private_criterion = None if criterion is None else PrivateCriterion(criterion, clipper, loss_reduction)
            self._run = _Run(self, clipper, optimizer, loader, private_criterion, delta)
            clipper.follow(self._run, loss_reduction if criterion is None and loss_reduction != "none" else None)
        except BaseException:
            self._run = None
            clipper.detach()
            raise
        if self._dp_seed is None:
            forget_seeds()
        return self._run

    def get_epsilon(self, delta: float) -> float:
        """ε at ``delta`` of every step taken so far."""
        return self.accountant.epsilon(delta)

    def check_loss(self, loss_function: Callable[..., torch.Tensor], outputs: torch.Tensor, targets: Any) -> None:
        """Check on public or made-up ``outputs`` and ``targets`` that a loss is the mean (or sum) over rows it is taken for.

        Raises:
            ValueError: the gradient of some row is not that of the row by itself.
        """
        reduction = self._made_private().loss_reduction
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
                    "with loss_reduction='none'."
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
        run, content = self._made_private(), dict(checkpoint_dict or {})
        content["module"], content["optimizer"] = run.states(module, optimizer)
        content["privacy"] = {**asdict(run.state), "steps": run.steps, "saved_by": run.writer}
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
        run = self._made_private()
        content = torch.load(path, map_location=map_location, weights_only=True)
        if "privacy" not in content:
            raise PrivacyStateError(f"'{path}' says nothing of what was spent: load a file that PrivacyEngine.save_checkpoint wrote.")
        moments = content.pop("optimizer", None)
        if optimizer is not None and moments is None:
            raise ValueError(f"'{path}' was saved without the optimizer: save it with save_checkpoint(..., optimizer=optimizer).")
        run.restore(dict(content.pop("privacy")))
        run.load_states(module, content.pop("module"), optimizer, moments)
        return content

    def detach(self) -> None:
        """Take every hook off the model and the optimizer, which are then ordinary ones again, and close the ledger. ε stays counted."""
        self._made_private().detach()

    def _made_private(self) -> _Run:
        if self._run is None:
            raise ValueError("call make_private or make_private_with_epsilon first.")
        return self._run


class PoissonLoader:
    """The batches of Poisson draws: what your DataLoader yielded, collated by its collate_fn, of random size.

    A draw of more than ``max_physical_batch_size`` examples comes in several batches, an empty one as a single row of weight zero, so that
    every draw is stepped.

    Attributes:
        sample_rate: q, the probability of each example to be in a draw.
        expected_batch_size: q · N.
        steps_per_epoch: Draws in one pass, ``round(1 / q)``.
    """

    def __init__(self, loader: DataLoader, secret: int, max_physical_batch_size: int | None):
        if max_physical_batch_size is not None and max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size must be a positive number of examples, got {max_physical_batch_size}.")
        self.dataset, self.collate_fn, self.batch_size = loader.dataset, loader.collate_fn, loader.batch_size
        self.expected_batch_size, self.max_physical_batch_size = loader.batch_size, max_physical_batch_size
        self.sample_rate = loader.batch_size / len(loader.dataset)
        self.steps_per_epoch = max(1, round(1 / self.sample_rate))
        options = {name: getattr(loader, name) for name in _REPEATED_OPTIONS if hasattr(loader, name)}
        options["worker_init_fn"] = options.get("worker_init_fn") or seed_worker
        sampler = PoissonSampler(
            len(self.dataset), self.sample_rate, self.steps_per_epoch, secret, distributed.rank(), distributed.world_size()
        )
        largest = max_physical_batch_size or len(self.dataset)
        self._logical_batches = poisson_dataloader(self.dataset, self.collate_fn, largest, sampler, **options)
        self._run: _Run | None = None

    def __len__(self) -> int:
        if self.max_physical_batch_size is not None:
            raise TypeError(
                "how many physical batches a pass has is random with max_physical_batch_size; loader.steps_per_epoch is the number of "
                "optimizer steps."
            )
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        before = None
        for logical in self._logical_batches:
            for batch, given in self._run.physical_batches(logical):
                given.passed_over = before is not None and not before.summed
                before = self._run.given = given
                yield batch


class PrivateCriterion:
    """The loss module handed to ``make_private``; ``backward`` on its result clips per example. Under no_grad an ordinary loss."""

    def __init__(self, criterion: nn.Module, clipper: PerExampleClipper, loss_reduction: str):
        reduction = getattr(criterion, "reduction", None)
        if reduction not in _REDUCTIONS or reduction != loss_reduction:
            raise ValueError(
                f"criterion {type(criterion).__name__} has reduction={reduction!r} and loss_reduction is {loss_reduction!r}: both must be 'mean', "
                "or both 'sum'. Compute other losses per example and call engine.clipper.backward(losses), with loss_reduction='none'."
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
            raise ValueError("backward was called twice on one loss.")
        if float(grad) != 1:
            raise ValueError("the loss of a private criterion was scaled or combined before backward: call backward on the loss itself.")
        with torch.enable_grad():
            ctx.clipper.backward(ctx.losses.pop())
        return None, None, None, None


@dataclass
class _Given:
    """The batch that the loop is working on."""

    draw: int
    rows: int
    weight: float
    last_of_draw: bool
    passed_over: bool = False  # the batch before, without a backward
    summed: bool = False
    stepped: bool = False


class _Run:
    """One private training: from the loader's batches over the clipped sums to the noised step."""

    def __init__(
        self,
        engine: PrivacyEngine,
        clipper: PerExampleClipper,
        optimizer: torch.optim.Optimizer,
        loader: PoissonLoader,
        criterion: PrivateCriterion | None,
        delta: float | None,
    ):
        self.engine, self.clipper, self.optimizer, self.loader = engine, clipper, optimizer, loader
        self.criterion, self.delta = criterion, delta
        self.steps, self.steps_left = 0, math.inf
        self.counted: Counter[str] = Counter()  # the steps of each run, by its id
        self._handles: list[Any] = []
        self.given: _Given | None = None
        self.draw = -1  # that the sums below belong to
        self.draw_is_complete = False  # and waits for its step
        self.stepping: _Given | None = None
        self.sums: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}  # with the version they had
        self.loader._run = self

    @property
    def loss_reduction(self) -> str | None:
        return self.criterion.reduction if self.criterion else self.clipper._loss_reduction

    def begin(self, noise_multiplier: float, target_epsilon: float | None = None, steps: float = math.inf) -> tuple:
        try:
            self.state = PrivacyState(
                run_id=distributed.on_rank_zero(PrivacyState.new_run_id),
                num_examples=len(self.loader.dataset),
                expected_batch_size=self.loader.expected_batch_size,
                noise_multiplier=_checked_noise_multiplier(noise_multiplier),
                max_grad_norm=self.clipper.max_grad_norm,
                delta=self.delta,
                target_epsilon=target_epsilon,
                sampling="poisson",
            )
            if self.engine._ledger is not None:
                distributed.on_rank_zero(self.engine._ledger.open)
        except ValueError:
            self.detach()
            self.engine._run = None
            raise
        self.id = self.state.run_id  # this engine's own, whatever runs it goes on with
        if noise_multiplier == 0:
            logger.warning("noise_multiplier is 0: NOTHING IS PRIVATE in this run (epsilon is infinite).")
        self.steps_left = steps
        self._handles = [
            self.optimizer.register_step_pre_hook(self.before_step),
            self.optimizer.register_step_post_hook(self.after_step),
            register_optimizer_step_pre_hook(partial(_refuse_unnoised_gradients, weakref.ref(self))),
        ]
        self._begin_ledger()
        parts = (self.clipper.model, self.optimizer, self.criterion, self.loader)
        return tuple(part for part in parts if part is not None)

    def _begin_ledger(self) -> None:
        ledger = self.engine._ledger
        if ledger is not None:
            distributed.on_rank_zero(lambda: ledger.begin(self.state))

    def detach(self) -> None:
        self.clipper.detach()
        if self.engine._ledger is not None:
            self.engine._ledger.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def restore(self, saved: dict[str, Any]) -> None:
        if not self._handles:
            raise ValueError(
                "the engine was taken off with detach(): load the checkpoint before that, or after make_private of a new engine."
            )
        steps = int(saved.pop("steps"))
        state = PrivacyState(**{f.name: saved[f.name] for f in fields(PrivacyState)})
        state.require({name: value for name, value in asdict(self.state).items() if name != "run_id"})
        ledger = self.engine._ledger
        executed = steps if ledger is None else distributed.on_rank_zero(lambda: ledger.steps(state.run_id))
        if executed < max(steps, self.counted[state.run_id] * (ledger is not None)):
            raise PrivacyStateError(
                f"the ledger '{ledger.path}' holds {executed} steps of this run, but the checkpoint was saved after {steps}: lines are missing, so "
                "what was spent is not known. Restore the file, or start a new run."
            )
        self.state = state
        if ledger is not None:
            executed -= self.counted[state.run_id]  # the ledger holds them all, and its lines only become more
        elif saved.get("saved_by") == self.writer:
            executed = 0  # all counted when they were taken
        self._count(executed)
        self._begin_ledger()

    def _count(self, steps: int) -> None:
        self.steps += steps
        self.counted[self.state.run_id] += steps
        self.steps_left -= steps
        self.engine.accountant.step(noise_multiplier=self.state.noise_multiplier, sample_rate=self.loader.sample_rate, steps=steps)

    @property
    def writer(self) -> str:
        """Who saves: this engine in this process. A fork of it counts on its own."""
        return f"{self.id}-{os.getpid()}"

    # ---- batches ----

    def physical_batches(self, logical: LogicalBatch) -> Iterator[tuple[Any, _Given]]:
        for batch, is_padded in zip(logical.physical_batches, logical.padded, strict=True):
            if is_padded and not bool(batch["attention_mask"][..., 0].all()):
                raise ValueError(
                    "examples were padded on the left to the length of a longer one of their batch, where most models let the padding, and so the other "
                    "examples, decide their gradients. Pad on the right (padding_side of the tokenizer), or all to one length (padding='max_length')."
                )
        batches = [(batch, size, 1.0) for batch, size in zip(logical.physical_batches, logical.sizes, strict=True)]
        rounds = distributed.largest(len(batches), self.clipper.device) if self.clipper.shards else len(batches)
        while len(batches) < max(1, rounds):  # every draw is stepped, and every rank takes part in every sum of shards
            batches.append((self.loader.collate_fn([self.loader.dataset[0]]), 1, 0.0))
        for i, (batch, size, weight) in enumerate(batches):
            yield batch, _Given(logical.number, size, weight, last_of_draw=i == len(batches) - 1)

    def current_batch(self) -> _Given | None:
        return self.given

    # ---- clipped sums (Follower) ----

    def before_sum(self, batch_size: int) -> torch.Tensor:
        given = self.given
        if given is None:
            raise ValueError("backward on data that did not come from the loader that make_private returned: iterate over that loader.")
        if given.passed_over:
            raise ValueError(
                "the loader was asked for this batch before the one before it went backward. Take batches one at a time, without prefetching "
                "(num_workers does that), and leave none out: which examples take part in a step must not depend on data."
            )
        if given.summed:
            raise ValueError(
                "backward ran a second time on one batch: an example's gradient would be added twice. Add the losses up first."
            )
        if batch_size != given.rows:
            raise ValueError(
                f"the model was called with {batch_size} rows, but the loader's batch has {given.rows} examples. One row for each example: no "
                "augmentation into several rows, no packing, no part of the batch, and no data of another loader."
            )
        if given.draw != self.draw:
            if self.draw_is_complete:
                raise ValueError(
                    "backward on a new draw before optimizer.step() on the last one. Every draw is one step; for larger batches raise the "
                    "DataLoader's batch_size and set max_physical_batch_size."
                )
            self.draw, self.sums = given.draw, {}
        for p in self.clipper.parameters:
            set_gradient(p, self._sum_so_far(p))
        return torch.full((batch_size,), given.weight)

    def after_sum(self) -> None:
        self.given.summed, self.draw_is_complete = True, self.given.last_of_draw
        self.sums = {p: (p.grad, local(p.grad)._version) for p in self.clipper.parameters if p.grad is not None}

    def _sum_so_far(self, p: nn.Parameter) -> torch.Tensor | None:
        total, version = self.sums.get(p, (None, None))
        if total is not None and local(total)._version != version:
            raise ValueError(
                "the gradient sum of an unfinished draw was overwritten in place: use optimizer.zero_grad(set_to_none=True), and change no "
                "gradient before optimizer.step()."
            )
        return total

    # ---- the step ----

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self.stepping is not None and self.stepping is self.given:
            return None  # the step of a base class, called by that of the optimizer's own
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args begin with the optimizer
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = self.given
        if given is None or not given.summed or given.stepped:
            raise ValueError(
                "optimizer.step() without a backward on a batch of the private loader since the last step: one backward, one step, for every "
                "batch of the loader."
            )
        _check_optimizer(optimizer, self.clipper.model)
        for p in self.clipper.parameters:
            if p.grad is not self._sum_so_far(p):
                raise ValueError(
                    "a gradient was replaced between backward() and optimizer.step(). Noise is added in step() to the sum that was clipped: call "
                    "zero_grad() before backward(), and drop further clipping, scaling or averaging of gradients."
                )
        if given.last_of_draw:
            self._privatise()
        else:
            for p in self.clipper.parameters:
                p.grad = None  # torch's optimizers leave such parameters, and their state, as they are
        given.stepped, self.stepping = True, given
        return None if closure is None else ((optimizer, lambda: loss), {})

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if self.given.last_of_draw:
            self.sums, self.draw_is_complete = {}, False
        self.stepping = None

    def _privatise(self) -> None:
        """p.grad = (sum over ranks + σ·C·N(0, I)) / expected batch size, and the step is counted before that exists."""
        if self.steps_left < 1:
            raise RuntimeError(
                f"the privacy budget is spent: {self.steps} steps were planned for target_epsilon={self.state.target_epsilon:g}. The model was not "
                "changed."
            )
        ledger, clipper = self.engine._ledger, self.clipper
        if ledger is not None and distributed.rank() == 0:
            ledger.add_step(self.state.run_id, self.steps + 1)
        if clipper.shards:
            distributed.largest(self.steps, clipper.device)  # wait: each rank adds its own noise, and none before the line is there
        self._count(1)
        std = self.state.noise_multiplier * clipper.max_grad_norm
        privatise(clipper.parameters, self.engine._noise, std=std, divisor=self.loader.expected_batch_size, sharded=bool(clipper.shards))

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


def _refuse_unnoised_gradients(run: weakref.ref[_Run], optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """A hook of every optimizer there is: sums without noise are for the private one alone."""
    run = run()
    if run is None or optimizer is run.optimizer or not run.sums:
        return
    if any(p in run.sums and p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"{type(optimizer).__name__} would step with gradients that have no noise yet: it holds parameters of the private model, but is not the "
            "optimizer that make_private was given."
        )


def _check_module(module: nn.Module) -> None:
    if not module.training:
        raise ValueError("the model is in evaluation mode: call model.train() before make_private.")
    validate_model(module)


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ValueError(f"data_loader must be a torch DataLoader, not {type(loader).__name__}.")
    if loader.batch_size is None:
        raise ValueError(
            "data_loader has no batch_size (batch_sampler= or batch_size=None), which is the expected size of a draw: give it one."
        )
    sampler = getattr(loader, "sampler", None)
    if sampler is not None and not isinstance(sampler, (RandomSampler, SequentialSampler, torch.utils.data.DistributedSampler)):
        raise ValueError(
            f"data_loader has a {type(sampler).__name__}: private training draws every example with the same probability. Leave the sampler out."
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times for one step; take a first-order optimizer.")
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


def _checked_noise_multiplier(value: Any) -> float:
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise ValueError(f"noise_multiplier must be a finite number >= 0, got {value!r}.")
    return float(value)
