"""PrivacyEngine runs the private step of DPTrainer in a loop of your own."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..clipping import PerExampleClipper
from ..mechanism.accounting.accountants import Accountant, check_accountant
from ..mechanism.mechanism import Mechanism
from ..mechanism.sampling import steps_of_epochs
from ..noise.generators import check_noise_source
from ..reports import certificate
from ..reports.certificate import circumstances
from ..reports.digest import count_rows, describe_data
from ..runtime import distributed
from ..step.checkpoint import PrivacyState
from ..step.ledger import Ledger
from ..step.run import PrivacySpent, PrivateRun
from ..step.startup_message import describe, warnings
from .checkpoints import go_on_from, save, state_of
from .loop import PrivateLoop
from .opacus_names import MADE_PRIVATE, OfOpacus, refuse_unknown
from .plain_loop import LoopOptions, PlainLoop

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)


class PrivacyEngine:
    """Makes a plain PyTorch loop (ε, δ)-differentially private in its training examples.

    The loop stays as it is, but for ``engine.backward(losses)`` with one loss for each row; an ordinary
    ``loss.backward()`` does the same where ``loss`` is a plain mean over the rows. ``make_private`` gives back the
    same model and the same optimizer, with hooks, and a private loader in the place of the old one.

    * Either adds the clipped per-example gradients to sums that are kept apart: ``p.grad`` is None from
      the loader's batch to ``optimizer.step()`` (in mode "per_sample", ``p.grad_sample`` of shape (B, *p.shape) holds
      the gradients of the batch before clipping, until the step). Nothing that is done to ``p.grad`` in between
      (``zero_grad``, ``clip_grad_norm_``) changes what is released. ``optimizer.step()`` adds the noise, divides by
      the expected batch size and then steps; afterwards ``p.grad`` is what was stepped with.
    * In several processes each has the model, and makes the same calls: the loader hands out every draw among them,
      and ``optimizer.step()`` adds up their sums.
    * Steps are counted when their noise is drawn. :meth:`get_epsilon` is the ε of those.
    * Dropout and augmentation must be as unknown as the noise, so ``make_private`` seeds Python's, numpy's and torch's
      global generators anew. Do not set their seeds after it, nor save their states.

    Args:
        accountant: "pld", "rdp" or one of your own, see :mod:`dp_transformers.mechanism.accounting`.
        secure_rng: Whether draws and noise come from a cryptographic generator (extra ``secure``).
        ledger_dir: A folder for an append-only record of every step, written before the step's noise exists, by one
            process at a time. With it, a training resumed from a checkpoint also accounts for the steps taken after
            that checkpoint. Without it those steps are forgotten.
        dp_seed: A fixed seed of draws and noise, for tests. The run is then not private, and says so.
        without_privacy: Whether to train the twin for comparison: the same loop and draws, without noise and without
            clipping. The run says that nothing is private.

    Example::

        >>> import torch
        >>> from dp_transformers import PrivacyEngine
        >>> model, rows = torch.nn.Linear(3, 2), [(torch.randn(3), i % 2) for i in range(100)]
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(rows, batch_size=20)
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     engine.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
        ...     optimizer.step()
        >>> round(engine.get_epsilon(delta=1e-3), 2)
        2.27
    """

    get_compatible_module = OfOpacus("take ModuleValidator.fix(model)")
    is_compatible = OfOpacus("take ModuleValidator.is_valid(model)")
    get_privacy_spent = OfOpacus("take engine.get_epsilon(delta)")
    attach = OfOpacus(MADE_PRIVATE)

    def __init__(
        self,
        *positional: Any,
        accountant: str | Accountant = "pld",
        secure_rng: bool = False,
        ledger_dir: str | os.PathLike | None = None,
        dp_seed: int | None = None,
        without_privacy: bool = False,
        **unknown: Any,
    ):
        names = ["module"] if positional else [*unknown]
        refuse_unknown(
            names, "PrivacyEngine", ("accountant", "secure_rng", "ledger_dir", "dp_seed", "without_privacy")
        )
        check_noise_source(dp_seed=dp_seed, secure=secure_rng)
        self._accountant = check_accountant(accountant)
        self._dp_seed, self._secure, self._without_privacy = dp_seed, secure_rng, without_privacy
        self._ledger = None if ledger_dir is None else Ledger(ledger_dir)
        self._loop: PrivateLoop | None = None

    @property
    def accountant(self) -> PrivacyEngine:
        """The engine itself, which shows what was spent as in Opacus: ``steps``, ``history``,
        ``get_epsilon(delta)``."""
        return self

    @property
    def steps(self) -> int:
        """The number of steps counted until now."""
        return 0 if self._loop is None else self._loop.run.steps

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """``(noise_multiplier, sample_rate, steps)`` of all steps counted until now, in order of first use. An
        accountant of Poisson draws makes ε of them only where the mechanism has these, independent noise and no
        release of the loss."""
        return [] if self._loop is None else self._loop.history

    @property
    def has_stepped(self) -> bool:
        """True if the last ``optimizer.step()`` ended a draw, and so changed the model. With
        ``max_physical_batch_size`` it is False after a part of a draw: count steps, and step a learning rate schedule,
        where it is True."""
        return self._made_private().has_stepped

    @property
    def private_loss(self) -> float | None:
        """The mean of the last step's losses, with the noise that the mechanism plans for it (``loss_bound``). None
        before the first step, and where no loss is released."""
        loss = self._made_private().step.loss
        return None if loss is None else float(loss)

    @property
    def clipper(self) -> PerExampleClipper:
        """The clipper of the private model."""
        return self._made_private().clipper

    def backward(self, losses: torch.Tensor) -> None:
        """Clip the gradient of each row's loss, and add them to the sums of the draw. It takes the place of
        ``loss.backward()``, for losses of every form and in every clipping mode, whatever ``loss_reduction`` says.

        Args:
            losses: (B,) with graph: the loss of each row of the loader's batch, from that row alone
                (``reduction="none"``). They are neither averaged nor divided by anything.

        Raises:
            ValueError: the losses are no such ones, or the batch was gone back over before.
        """
        self._made_private().step.add(losses)

    def clipped_sums(self) -> dict[str, torch.Tensor]:
        """Return copies of the clipped sums of the draw that is not stepped yet, by the names of the parameters: the
        sum over its examples, in float32 at least, before noise and division. Under FSDP2 they are DTensors; of
        several processes without it each has the sum of its own examples.

        They are private data that ε does not cover: look at them to debug on public examples.
        """
        return self._made_private().step.clipped_sums()

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float | None = None,
        max_grad_norm: float | None = None,
        mechanism: Mechanism | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        **options: Unpack[LoopOptions],
    ) -> tuple:
        """Attach to ``module`` and ``optimizer``, and replace ``data_loader`` by one of private draws.

        Args:
            module: The model whose ``forward`` your loop calls. It is hooked, not wrapped: use the object you have. In
                several processes all start from rank 0's weights.
            optimizer: An optimizer of torch, but not LBFGS, of exactly the trainable parameters of ``module``.
            data_loader: A DataLoader of a map-style data set. Its batch size becomes the expected batch size (of all
                processes together) and batch size / N the sample rate; collate_fn, workers and pinning are kept.
            noise_multiplier: σ. The noise on the summed gradients has standard deviation σ · max_grad_norm.
            max_grad_norm: The bound C on each example's gradient norm.
            mechanism: Sampling, clipping, noise and what else ε depends on, in the place of ``noise_multiplier``,
                ``max_grad_norm``, ``clipping``, ``max_examples_per_person``, ``rows_per_unit``, ``loss_bound`` and
                ``loss_noise_factor``, from which a mechanism is built otherwise. It must be for this data set and
                batch size.
            criterion: A loss module with ``reduction``. It comes back as one whose result is differentiated per
                example.
            loss_reduction: "mean" or "sum": how a loss on which you call ``backward()`` is reduced over the *rows of
                the batch*, and that is all it may do with them. A mean over what is left by ``ignore_index``, or
                weighted by class, lets one row change the weight of another: for those take :meth:`backward`. With
                "none" nothing else is possible, and each row's loss is known (``loss_bound``).
            batch_first: False where the batch is the second dimension of the model's inputs (and outputs).
            max_physical_batch_size: Draws of more examples come in several batches; ``optimizer.step()`` does nothing
                before the last.
            fill_physical_batches: Whether every batch has just ``max_physical_batch_size`` rows (without that, as many
                as the largest draw of the mechanism's sampling). Rows that are missing are copies of others, whose
                gradients have weight 0. They come last, and a metric of your own should leave them out. Under a
                sampling with a largest draw every step has the same number of batches too.
            clipping: What an example's gradient is multiplied with: "flat" bounds long gradients, "auto_s" and
                "normalised" make all nearly equally long, "dp_psac" all but the shortest. Others are given by a
                mechanism.
            clipping_mode: "auto", "book_keeping", "per_sample", "ghost" or "fast_gradient". See
                :mod:`dp_transformers.clipping.modes`.
            memory_budget: How many bytes of each device a backward pass may keep beyond what the clipping mode keeps,
                to save time. "auto" is half of what the device has free after some steps, and at most a quarter of
                what was in use. The modes are "auto", "book_keeping" and "ghost".
            poisson_sampling: It must be True, since ε is that of Poisson sampling.
            self_check: Whether clipping is compared with one example at a time, on rows of the first batch and of
                others that are new.
            max_examples_per_person: How many rows of the data one person may have. ε protects one row;
                :meth:`privacy_spent` then also says what protects all rows of one person.
            unit_column: The column that names the owner of a row, or the owner of each row. ε then protects a person:
                draws choose persons (of whom the loader's batch size counts), take at most ``rows_per_unit`` rows of
                each, and the mean of their gradients is clipped. With ``max_examples_per_person`` above 1 draws choose
                rows, and of each person that many are kept at most. It needs losses of examples.
            rows_per_unit: How many rows of a drawn person take part in a step at most, chosen at random; 4 by default.
            augmentation_multiplicity: How many times K each drawn row is loaded, under random numbers of its own. The
                mean of the K gradients is clipped (De et al. 2022), at no cost in ε. It needs losses of examples.
            loss_bound: With it :attr:`private_loss` is released in each step: the mean of the losses, each clipped to
                [0, ``loss_bound``], with noise of its own that ε covers. It needs losses of examples: a ``criterion``
                or ``loss_reduction="none"``.
            loss_noise_factor: The noise multiplier of that loss, over ``noise_multiplier``. At 10 and the same ε,
                gradients take 0.5% more noise.
            target_epsilon, target_delta: With both, the loader yields in one pass as many draws as stay within ε for
                all rows of one person: ``for batch in loader`` ends when the budget is spent, ``len(loader)`` is the
                number of steps.

        Returns:
            ``(module, optimizer, data_loader)``, or ``(module, optimizer, criterion, data_loader)`` if a criterion was
            given.

        Raises:
            ValueError: the loop cannot be trained privately as it is. The message says what to do.
        """
        if (target_epsilon is None) != (target_delta is None):
            raise ValueError("target_epsilon and target_delta go together: give both, or neither.")
        loop = self._plain_loop("make_private", module, optimizer, data_loader, options, mechanism)
        loop = replace(loop, is_one_pass=target_epsilon is not None)

        def planned() -> Mechanism:
            loop.require_trainable(delta=target_delta)
            if target_epsilon is None or target_delta is None:
                return described()
            return described().until_spent(
                target_epsilon=target_epsilon, target_delta=target_delta, accountant=self._accountant
            )

        def described() -> Mechanism:
            if mechanism is None:
                if noise_multiplier is None or max_grad_norm is None:
                    raise ValueError(
                        "make_private needs noise_multiplier and max_grad_norm, or a mechanism that says both."
                    )
                return loop.mechanism(noise_multiplier, max_grad_norm)
            of_loop = (loop.clipping, loop.loss_bound, loop.loss_noise_factor)
            of_unit = (loop.max_examples_per_person, loop.rows_per_unit)
            if (noise_multiplier, max_grad_norm, *of_unit, *of_loop) != (None, None, 1, None, "flat", None, 10.0):
                raise ValueError(
                    "noise_multiplier, max_grad_norm, clipping, max_examples_per_person, rows_per_unit, loss_bound or "
                    "loss_noise_factor is given beside a mechanism, which says them: leave them out."
                )
            return mechanism

        return self._start(loop, planned, delta=target_delta, target_epsilon=target_epsilon)

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
        **options: Unpack[LoopOptions],
    ) -> tuple:
        """Do what :meth:`make_private` does, with the least noise such that ``epochs`` passes over the loader spend
        ``target_epsilon`` at ``target_delta``.

        A step that would exceed the target raises RuntimeError and leaves the model as it is. With
        ``max_examples_per_person`` the target is met for all rows of one person together.

        Args:
            target_epsilon: The ε that all planned steps spend together, at most.
            target_delta: The δ that it is stated at, between 0 and 1/N for N training examples.
            epochs: The number of passes over the loader that is planned.
            max_grad_norm: The bound C on each example's gradient norm.
            options: ``max_examples_per_person``, ``unit_column``, ``rows_per_unit``, ``augmentation_multiplicity``,
                ``criterion``, ``loss_reduction``, ``batch_first``, ``max_physical_batch_size``,
                ``fill_physical_batches``, ``clipping``, ``clipping_mode``, ``memory_budget``, ``poisson_sampling``,
                ``self_check``, ``loss_bound`` and ``loss_noise_factor``, as in :meth:`make_private`.
        """
        if not 0 < epochs < math.inf:
            raise ValueError(
                f"noise cannot be calibrated for epochs={epochs}: give the number of passes over the loader, above 0. "
                "If you do not know it, call make_private(noise_multiplier=...), and read engine.get_epsilon(delta)."
            )
        loop = self._plain_loop("make_private_with_epsilon", module, optimizer, data_loader, options)

        def planned() -> Mechanism:
            loop.require_trainable(delta=target_delta)
            steps = steps_of_epochs(epochs, loop.sampling.num_examples, loop.sampling.expected_batch_size)
            return loop.mechanism(1.0, max_grad_norm, steps).calibrated(
                target_epsilon=target_epsilon, target_delta=target_delta, accountant=self._accountant
            )

        return self._start(loop, planned, delta=target_delta, target_epsilon=target_epsilon)

    def _plain_loop(
        self,
        where: str,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        options: Any,
        mechanism: Mechanism | None = None,
    ) -> PlainLoop:
        """Return the loop that the engine is given, of which nothing is checked but the names of options."""
        if self._loop is not None:
            raise ValueError("this engine is already used: take another PrivacyEngine; what both spend adds up.")
        known = LoopOptions.__annotations__
        refuse_unknown((name for name in options if name not in known), where, known)
        return PlainLoop(module, optimizer, data_loader, mechanism, **options)

    def _start(
        self,
        loop: PlainLoop,
        planned: Callable[[], Mechanism],
        delta: float | None = None,
        target_epsilon: float | None = None,
    ) -> tuple:
        """Begin the run, and return what the loop is to use from now on."""
        mechanism = distributed.made_on_all(planned)
        mechanism = mechanism.without_privacy() if self._without_privacy else mechanism
        state = PrivacyState(PrivacyState.new_run_id(), mechanism, delta, target_epsilon)
        run = PrivateRun(
            state,
            self._accountant,
            self._ledger,
            dp_seed=self._dp_seed,
            verified=loop.self_check,
            about=lambda: self._about(loop, run),
        )
        own = loop.sampling
        sizes = {"len(data_loader.dataset)": own.num_examples, "batch_size": own.expected_batch_size}
        run.agree(secure_rng=self._secure, **sizes)
        with contextlib.ExitStack() as undo:
            if self._ledger is not None:
                undo.callback(self._ledger.close)
                distributed.call_on_rank_zero(self._ledger.open)
            self._loop, criterion = loop.attach(run, secure=self._secure, announce=_say)
            undo.pop_all()
        clipper, loader = self._loop.clipper, self._loop.loader
        if self._ledger is None:
            distributed.call_on_rank_zero(lambda: run.say_copies(count_rows(loop.data_loader.dataset)))
        steps, further = mechanism.steps, () if loop.criterion is not None else (_LOSSES_ARE_NOT_SEEN,)
        _say(describe(run, steps, clipper, *further))
        of_a_pass, passes = loader.steps_per_epoch, 1 if steps else 100
        for warning in warnings(run, steps or of_a_pass, clipper, loop.optimizer, passes=passes):
            _say(warning)
        given_back = (loop.module, loop.optimizer)
        return (*given_back, loader) if criterion is None else (*given_back, criterion, loader)

    def _about(self, loop: PlainLoop, run: PrivateRun) -> dict[str, Any]:
        """Return what the ledger holds of a training besides its mechanism."""
        assert self._ledger is not None, "it is asked for by the ledger"
        data = describe_data(loop.data_loader.dataset, self._ledger.path.parent, run.say_copies)
        return circumstances(accountant=self._accountant, data=data, model=loop.module)

    def get_epsilon(self, delta: float) -> float:
        """Return ε at ``delta`` of every step taken so far, and of a draw that the loop was given and did not step. It
        is infinite where the run is not private.

        Raises:
            ValueError: ``delta`` is not between 0 and 1/N for N training examples.
        """
        if self._loop is None:
            return 0.0
        self._loop.require_delta(delta)
        return self._loop.run.epsilon(delta)

    def epsilon_after(self, steps: int = 1, *, delta: float | None = None) -> float:
        """Return what ε will be at ``delta`` (default: ``target_delta``) after ``steps`` more steps, for a loop that
        stops before it exceeds a budget."""
        loop = self._made_private()
        if delta is not None:
            loop.require_delta(delta)
        return loop.run.epsilon_after(steps, delta)

    def privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """Return what has been spent until now at ``delta`` (default: ``target_delta``), with the mechanism and what
        it protects."""
        loop = self._made_private()
        if delta is not None:
            loop.require_delta(delta)
        return loop.run.spent(delta)

    def write_certificate(self, delta: float | None = None) -> None:
        """Write ``privacy.json`` into ``ledger_dir``: what was spent by all runs in that folder, at ``delta``
        (default: the ``target_delta`` of each), on which data, with which code.

        ``dp-transformers report`` makes a page of it. Call it on all ranks, after training.

        Raises:
            ValueError: there is no ``ledger_dir``, or no delta is known.
            PrivacyStateError: somebody else changed the ledger.
        """
        run = self._made_private().run
        if run.ledger is None:
            raise ValueError(
                "a certificate is a summary of a ledger, and this engine keeps none: PrivacyEngine(ledger_dir=...)."
            )
        distributed.call_on_rank_zero(run.ledger.require_own_file)
        folder, unfinished = run.ledger.path.parent, {run.state.run_id: run.unfinished}
        distributed.call_on_rank_zero(lambda: certificate.write(folder, delta=delta, unfinished=unfinished))

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the private model is an ordinary one, for a loss that trains something else through it, as a GAN's
        generator, or asks for the gradient of an input::

            with engine.suspended():
                generator_loss(discriminator(generator(z))).backward()
            generator_optimizer.step()

        The gradients that the block gives to the private parameters are thrown away at its end, and no optimizer may
        step with them: neither this one, nor another that holds private parameters.

        ε covers what the private optimizer released, and whatever follows from it and from public or random input, as
        ``z`` is. What the block computes of private examples (their saliency, their losses) is not private.

        Raises:
            ValueError: losses go backward on the other side of the block than the model ran, or the block changes the
                model.
        """
        return self._made_private().suspended()

    def public(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model and its optimizer are ordinary ones, for steps on *public* data between private ones, of
        the same parameters::

            optimizer.step()  # a private one
            with engine.public():
                optimizer.zero_grad()
                cross_entropy(model(public_x), public_y).backward()
                optimizer.step()

        Nothing private may enter the block: what it steps with gets no noise, and ε does not count it.

        Raises:
            ValueError: it is entered between a batch of the loader and the step that ends its draw.
        """
        return self._made_private().public()

    def drop_draw(self) -> None:
        """Give up the draw that the loop was stopped in, and count it as a step.

        Call it after an interrupt, or an error that has nothing to do with the examples. Whether a draw is stepped
        must not depend on the examples, and that the step is counted does not make up for it. Of several processes all
        must give up the same draw: the next release is refused otherwise.
        """
        self._made_private().drop_draw()

    def save_checkpoint(
        self,
        path: str | os.PathLike | IO[bytes],
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
    ) -> None:
        """Write model, optimizer, what was spent and ``checkpoint_dict`` into one file, completely or not at all; or
        into a file object that is open for writing bytes.

        Of several processes the first writes. The others must call this too where they hold shards. They should wait
        for the first before they load.
        """
        save(path, state_of(self._made_private(), module, optimizer, checkpoint_dict or {}))

    def load_checkpoint(
        self,
        path: str | os.PathLike | IO[bytes],
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        map_location: Any = None,
    ) -> dict[str, Any]:
        """Go on from a checkpoint of the same mechanism, and return the rest of the file's dictionary. Call this after
        ``make_private``.

        What the checkpoint's run spent is added to what this engine counts, except for steps that it counts already.
        Those are its own if it goes back to a file that it saved, and with a ledger all that it knows of the run.

        Raises:
            PrivacyStateError: the file holds no privacy state, or one of another mechanism, or the ledger lacks steps.
        """
        loop, content = self._made_private(), torch.load(path, map_location=map_location, weights_only=True)
        return go_on_from(content, f"'{path}'", loop, module, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`save_checkpoint` writes: the state of the model, of the optimizer, and what was spent.
        With ``accelerator.register_for_checkpointing(engine)`` accelerate saves and loads it."""
        loop = self._made_private()
        return state_of(loop, loop.clipper.model, loop.optimizer, {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned, as :meth:`load_checkpoint` does."""
        loop = self._made_private()
        go_on_from(state, "the state", loop, loop.clipper.model, loop.optimizer)

    def detach(self, module: nn.Module | None = None) -> None:
        """Take every hook off the model and the optimizer, which are then ordinary ones again, and close the ledger.
        What was spent stays counted.

        Args:
            module: The model whose engine is meant, if it is another one than this: a notebook may have lost its name.

        Raises:
            ValueError: a draw is unfinished. The hooks are removed nevertheless, and the clipped sums, which have no
                noise, are dropped.
        """
        ((PrivateLoop.of(module) if module is not None else None) or self._made_private()).detach()

    def _made_private(self) -> PrivateLoop:
        if self._loop is None:
            raise ValueError("this engine trains nothing yet: call make_private or make_private_with_epsilon first.")
        return self._loop


_LOSSES_ARE_NOT_SEEN = (
    "your loop computes the losses: each must come from its own row alone, without negatives or statistics from "
    "the batch (what does not show in the graph of the loss is seen with criterion= alone)"
)


def _say(text: str) -> None:
    """Show a sentence once over all processes, also in scripts that configure no logging."""
    if distributed.rank() == 0:
        logger.warning(text)
