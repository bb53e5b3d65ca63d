"""A TrainerRun is the private training of one trainer: the plan that its arguments make, the run that counts its steps
and is resumed from checkpoints, and, while Trainer's loop runs, the draws and the private step."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import AcceleratorConfig

from ..clipping import PerExampleClipper
from ..data.draws import LogicalBatches, draws_dataloader
from ..data.units import Units
from ..mechanism.sampling import DrawSampler, steps_of_epochs, steps_per_epoch
from ..noise.generators import check_noise_source
from ..reports import certificate
from ..runtime import distributed
from ..runtime.randomness import SecretSeeds, seed_worker, seeded_global_generators
from ..step.checkpoint import PrivacyState, find_checkpoint
from ..step.ledger import Ledger, PrivacyStateError
from ..step.run import PrivateRun
from ..step.startup_message import describe, warnings
from ..step.step import PrivateStep
from .dp_config import DPTrainingArguments


class TrainerRun:
    """Plans the steps of a trainer, counts them, and holds the draws and the private step while Trainer's loop runs.

    Args:
        args: The trainer's arguments. What they say of privacy is read here, once.
        num_examples: The number of rows of the training data, or of the persons that draws choose.
        say: Shows a sentence to the user, once over all processes.
        about: What the ledger is to hold of the run besides its mechanism.
        loss_bound: The loss that an example counts with at most, where the arguments leave it open.

    Attributes:
        run: Counts the steps.
        self_check: Whether this trainer checks that clipping is exact. A resumed run is verified only if all of its
            trainers did.
        secure: Whether draws and noise come from a cryptographic generator.
    """

    def __init__(
        self,
        args: DPTrainingArguments,
        num_examples: int,
        say: Callable[[str], None],
        about: Callable[[], Mapping[str, Any]],
        *,
        loss_bound: float,
    ):
        # None is replaced or refused when the arguments are made
        assert args.output_dir is not None and args.target_delta is not None and args.expected_batch_size is not None
        self._args, self._num_examples, self._say, self._about = args, num_examples, say, about
        self._output_dir, self._delta, self._loss_bound = args.output_dir, args.target_delta, loss_bound
        self._ledger, self.secure = Ledger(self._output_dir), args.secure_rng
        self._first_step, self._skipped, self._has_ended, self.self_check = 0, 0, False, args.self_check
        self._tp_size = 1  # how many ranks work on the same examples, as one tensor-parallel group
        self._seeds: SecretSeeds | None = None  # while Trainer's loop runs, as are the draws and the step
        self._draws: LogicalBatches | None = None
        self._step: PrivateStep | None = None
        if math.isinf(args.num_train_epochs):
            args.max_steps = args.steps_until_spent(num_examples, loss_bound=loss_bound)
        steps = self._planned_steps(args.expected_batch_size)
        if steps < 1:
            given = f"num_train_epochs={args.num_train_epochs} and max_steps={args.max_steps}"
            raise ValueError(f"{given} leave no step to train. Set one of them above 0.")
        mechanism = args.mechanism_for(num_examples, steps, loss_bound=loss_bound)
        self.run = self._run_of(PrivacyState(PrivacyState.new_run_id(), mechanism, self._delta, args.target_epsilon))

    def _run_of(self, state: PrivacyState) -> PrivateRun:
        args = self._args
        check_noise_source(dp_seed=args.dp_seed, secure=self.secure)
        options: dict[str, Any] = {"dp_seed": args.dp_seed, "verified": self.self_check, "about": self._about}
        return PrivateRun(state, args.accountant, self._ledger, **options)

    @property
    def epsilon(self) -> float:
        """ε of every step that was taken until now."""
        return self.run.epsilon(self._delta)

    @property
    def steps_per_epoch(self) -> int:
        """The number of draws in one pass over the data."""
        return steps_per_epoch(self._num_examples, self.run.mechanism.at(0).expected_batch_size)

    @property
    def planned_steps(self) -> int:
        """The number of steps of the whole training, of which some may have been taken before it was resumed from a
        checkpoint."""
        return self._planned_steps(self.run.mechanism.at(0).expected_batch_size)

    def _planned_steps(self, expected_batch_size: float) -> int:
        if self._args.max_steps > 0:
            return self._args.max_steps
        return steps_of_epochs(self._args.num_train_epochs, self._num_examples, expected_batch_size)

    @contextmanager
    def recorded(self, checkpoint: str | bool | None) -> Iterator[str | None]:
        """Open the ledger and begin the run, or resume it from a checkpoint (True: the newest complete one), and yield
        the checkpoint's folder.

        Raises:
            PrivacyStateError: the checkpoint is not complete, or does not go with the arguments or the ledger.
            ValueError: the privacy budget is spent, or the processes have other arguments.
        """
        self.run.agree(secure_rng=self.secure)
        distributed.call_on_rank_zero(self._ledger.open)
        try:
            folder = self.restore(None if checkpoint is True else checkpoint) if checkpoint else None
            if folder is None:
                self.run.resume(self.run.state, self.run.executed, is_own=True)
            self._set_budget(folder)
            self.run.begin()
            yield folder
            distributed.call_on_rank_zero(self._ledger.require_own_file)
        finally:
            try:
                self.write_certificate()
            finally:  # torch raises that a worker died wherever the program is
                self._ledger.close()

    def write_certificate(self) -> None:
        """Write ``privacy.json`` by what the ledger holds now, on rank 0. Training does not end where that fails."""
        if distributed.rank() == 0:
            certificate.write_or_warn(self._output_dir)

    def restore(self, checkpoint: str | None) -> str:
        """Go on with the run that a checkpoint belongs to (None: the newest complete one), and return its folder."""
        args = self._args
        if checkpoint is None:
            checkpoint = distributed.call_on_rank_zero(lambda: find_checkpoint(self._output_dir))
        state, steps_at_save = PrivacyState.load(checkpoint)
        steps = self._planned_steps(state.mechanism.at(0).expected_batch_size)
        mechanism = args.mechanism_for(self._num_examples, steps, saved=state.mechanism, loss_bound=self._loss_bound)
        wanted = replace(state, mechanism=mechanism, delta=self._delta, target_epsilon=args.target_epsilon)
        state.require(wanted)
        if os.path.abspath(os.path.dirname(os.path.normpath(checkpoint))) != os.path.abspath(self._output_dir):
            raise PrivacyStateError(
                f"checkpoint '{checkpoint}' does not lie in output_dir '{self._output_dir}', where the ledger must go "
                "on: set output_dir to the folder that holds the checkpoint."
            )
        if distributed.call_on_rank_zero(lambda: state) != state:
            raise PrivacyStateError(
                f"'{checkpoint}' on the machine of rank {distributed.rank()} belongs to another run than that of rank "
                "0: copy rank 0's folder over it, or set output_dir to a folder that all machines share."
            )
        state = replace(state, mechanism=mechanism)  # with the steps of now
        self.run = self._run_of(state)
        beside = distributed.call_on_rank_zero(lambda: state.most_steps_beside(self._output_dir))
        at_least = [Counter({state.mechanism.at(0): max(steps_at_save, beside)})]
        self.run.resume(state, at_least, facts=PrivacyState.facts(checkpoint))
        # The flag is a whole number, as HfArgumentParser reads `int | None` alone, but a mechanism's need not be one.
        # pyrefly: ignore[bad-assignment]
        args.expected_batch_size = state.mechanism.at(0).expected_batch_size
        return checkpoint

    def _set_budget(self, checkpoint: str | None) -> None:
        """Set how many more steps the budget allows. It is an error if it allows none, unless the run has taken all of
        its steps."""
        run, state, planned = self.run, self.run.state, self.planned_steps
        done = 0
        if checkpoint is not None:
            done = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).global_step
        self._has_ended = done >= planned  # Trainer would take one step more
        run.plan(planned, done)
        self._skipped = 0 if self._args.ignore_data_skip else done % self.steps_per_epoch  # as Trainer does
        self._first_step = done - self._skipped
        if self._has_ended:
            self._say(f"this run has ended: {run.spent_in_words()}, and there is nothing left to train.")
        elif run.steps_left < 1:
            whole = PrivateRun(state, self._args.accountant)
            whole.resume(state, [*run.executed, state.mechanism.planned(done, planned - done)])
            raise ValueError(
                f"the privacy budget is spent: {run.spent_in_words()}, and one more would exceed "
                f"target_epsilon={state.target_epsilon:g}. Nothing was trained. All {planned - done} steps that are "
                f"planned would make it {whole.spent().epsilon_per_person:.4g}. A run keeps its target: load the "
                "trained model and start a new run in another output_dir; what both spend adds up."
            )

    def require_counted(self, steps: int) -> None:
        """Raise RuntimeError if Trainer took more steps than the run counted."""
        if self.run.steps < steps:
            raise RuntimeError(
                f"{steps} steps were taken, but only {self.run.steps} were clipped, noised and counted: a callback or "
                "other code stepped the model or set state.global_step. Do not release this model. Remove that code "
                "and train again from the original one."
            )

    # ---- while Trainer's loop runs: it asks for the loader first, and attaches the step when the model is final ----

    @property
    def is_running(self) -> bool:
        """True while Trainer's loop runs."""
        return self._seeds is not None

    @contextmanager
    def running(self, tp_size: int) -> Iterator[None]:
        """Seed the global generators from a secret while Trainer's loop runs, and drop the private step when it
        ends.

        Args:
            tp_size: How many ranks are one tensor-parallel group. They work on the same examples.
        """
        self._tp_size, secret = tp_size, distributed.shared_secret(self.run.dp_seed)
        # ranks with different examples draw different dropout masks; a tensor-parallel group draws the same ones
        self._seeds = SecretSeeds(secret, distributed.rank() // tp_size)
        try:
            with seeded_global_generators([secret], self._args.device):  # args.seed is known, and would tell the masks
                yield
        finally:
            step, self._seeds, self._draws, self._step = self._step, None, None, None
            if step is not None:
                step.close()  # one that was cut off leaves no gradient without noise
                step.clipper.detach()

    @property
    def step(self) -> PrivateStep:
        """The private step of the model that is trained."""
        if self._step is None:
            raise RuntimeError("private steps exist only while train() runs: call train().")
        return self._step

    def sampler(self, rank: int, world_size: int) -> DrawSampler:
        """Make the sampler of the draws that are left, on this rank of ``world_size`` data-parallel ranks. All ranks
        call this together."""
        return DrawSampler(
            self.run.mechanism.sampling,
            self.steps_per_epoch,
            distributed.shared_secret(self.run.dp_seed),
            rank,
            world_size,
            first_step=self._first_step,
            skipped=self._skipped,
            ended=self._has_ended,
            secure=self.secure,
        )

    def loader(self, dataset: Any, collator: Callable[[list[Any]], Any], units: Units | None = None) -> DataLoader:
        """Make the loader of the draws, each a [`~dp_transformers.data.draws.LogicalBatch`]. All ranks call this
        together.

        Args:
            units: What the draws choose, if not rows.
        """
        if self._seeds is None:
            raise RuntimeError("draws exist only while train() runs: call train().")
        number, unit = len(dataset if units is None else units), self.run.mechanism.unit
        if number != self._num_examples:
            raise ValueError(
                f"train_dataset has {number} {unit.noun}s, but had {self._num_examples} when the trainer was made, "
                "which is what epsilon is computed for: make another trainer with this train_dataset."
            )
        args, size = self._args, self._tp_size
        sampler = self.sampler(distributed.rank() // size, distributed.world_size() // size)
        self._draws = LogicalBatches(
            dataset,
            collator,
            args.per_device_train_batch_size,
            self._seeds,
            fill=args.fill_physical_batches,
            largest_draw=sampler.largest_draw,
            copies=unit.max_examples_per_person,
            units=units,
        )
        return draws_dataloader(
            self._draws,
            sampler,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=seed_worker,
        )

    def attach(self, model: nn.Module, optimizer: Optimizer | None, *, is_fsdp_enabled: bool) -> None:
        """Attach the clipper to the model, make the private step, and say what is about to be trained.

        Raises:
            ValueError: the parameters are not split over ranks as the arguments say.
        """
        assert self._draws is not None and self._seeds is not None, "Trainer makes its loader before"
        args, run = self._args, self.run
        assert isinstance(args.accelerator_config, AcceleratorConfig), "TrainingArguments make it of what is given"
        clipper = PerExampleClipper(
            model,
            run.mechanism.clipping.at(0),
            mode=args.clipping_mode,
            self_check=self.self_check,
            memory_budget=args.memory_budget,
        )
        _refuse_groups(clipper, self._tp_size, is_fsdp_enabled=is_fsdp_enabled)
        self._step = PrivateStep(
            clipper,
            run,
            self._seeds,
            self._draws,
            secure=self.secure,
            announce=self._say,
            reduce_every_batch=(args.accelerator_config.gradient_accumulation_kwargs or {}).get(
                "sync_each_batch", True
            ),
        )
        clipper.follow(self._step, None)
        steps = self.planned_steps
        for text in (describe(run, steps, clipper), *warnings(run, steps, clipper, optimizer)):
            self._say(text)


def _refuse_groups(clipper: PerExampleClipper, size: int, *, is_fsdp_enabled: bool) -> None:
    """Raise ValueError if FSDP was asked for and did not shard the model, if the tensor-parallel group of this process
    is not ``size`` consecutive ranks, or if ranks hold the same parameters and nothing sums their gradients."""
    parallel, shards, world = clipper.trainable.parallel, clipper.trainable.shards, distributed.world_size()
    if is_fsdp_enabled and not shards:
        raise ValueError(
            "FSDP was asked for, but accelerate did not shard the model: set fsdp=True, fsdp_config={'version': 2} "
            "and start one process per device, or switch FSDP off in the arguments and accelerate's configuration."
        )
    first = distributed.rank() // size * size
    own = list(range(first, first + size))
    if (parallel.mesh.mesh.flatten().tolist() if parallel else own[:1]) != own:
        raise ValueError(
            f"the model says tp_size={size}, but its parameters are not split over the {size} processes {own}: load "
            "it with from_pretrained(..., distributed_config=DistributedConfig(tp_size=...))."
        )
    if (parallel or shards) and size * (shards.mesh.size() if shards else 1) != world:
        raise ValueError(
            f"some of the {world} processes hold the same parameters, and nothing adds up their gradients: load the "
            f"model with DistributedConfig(tp_size={size}, fsdp_size={world // size})."
        )
