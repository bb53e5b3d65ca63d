"""DPTrainer: transformers' Trainer with a differentially private step. Overrides, and no maths."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as transformers_logging

from .. import distributed
from ..checkpoint import Ledger, PrivacyState, PrivacyStateError, find_checkpoint, rotate
from ..clipping import PerExampleClipper
from ..clipping.parallel.dtensor import full_tensors, is_dtensor
from ..data import LogicalBatch, LogicalBatches, draws_dataloader
from ..losses import PerExampleLoss, decoder_inputs, find_per_example_loss
from ..noise.generators import check_noise_source
from ..plan import describe, hopeless
from ..randomness import SecretSeeds, global_random_numbers, seed_worker
from ..run import PrivacySpent, PrivateRun
from ..sampling import DrawSampler
from ..step import PrivateStep
from ..validation import validate_lengths, validate_model, validate_optimizer, validate_training_data
from .dp_config import DPTrainingArguments
from .overrides import refuse_overrides

FSDP_FLAG = "ACCELERATE_USE_FSDP"  # what `accelerate launch` says in the environment

logger = logging.getLogger(__name__)
progress = transformers_logging.get_logger(f"transformers.{__name__}")  # shown as transformers' own messages are


class DPTrainer(Trainer):
    """[`~transformers.Trainer`] whose training is (ε, δ)-differentially private in the training examples.

    Swap `Trainer` for `DPTrainer` and `TrainingArguments` for [`DPTrainingArguments`]; everything else stays: data sets, collators,
    callbacks, PEFT models, evaluation, prediction, saving, resuming. One training step is one Poisson draw from the training set, of
    `expected_batch_size` examples on average; `global_step` counts draws.

    Args:
        model, args, data_collator, train_dataset, eval_dataset: As in Trainer; `args` must be [`DPTrainingArguments`] and
            `train_dataset` must have a length.
        per_example_loss_func (`Callable`, *optional*): `f(outputs, labels) -> (B,)` losses, each from its own example alone, for heads
            whose per-example loss is not built in, or class weights: see :mod:`dp_transformers.losses` for those that are.
        kwargs: Trainer's other arguments; `compute_loss_func` is refused, because it averages over the batch.

    Raises:
        ValueError: at construction, for whatever would break the guarantee, with the way out.
    """

    trains_privately = True
    loss_is_scaled_for_ga = True  # our step divides by the expected batch size, once

    def __init__(
        self,
        model: nn.Module | None = None,
        args: DPTrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        per_example_loss_func: PerExampleLoss | None = None,
        **kwargs: Any,
    ):
        if not isinstance(args, DPTrainingArguments):
            folder = getattr(args, "output_dir", None) or "outputs"
            raise ValueError(
                f"DPTrainer needs DPTrainingArguments, got {type(args).__name__}. Write for example: "
                f"args = DPTrainingArguments(output_dir={folder!r}, target_epsilon=8.0, target_delta=1e-6, ...)"
            )
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func returns one loss for the whole batch, from which no example's gradient can be clipped. Pass instead "
                "per_example_loss_func=f with f(outputs, labels) -> (B,)."
            )
        refuse_overrides(self, DPTrainer)
        if packs := [name for name in ("packing", "padding_free") if getattr(args, name, False)]:
            raise ValueError(
                f"{packs[0]}=True joins several examples in one row, so the norm of a row is not the norm of an example: set {packs[0]}=False."
            )
        validate_training_data(train_dataset, target_delta=args.target_delta, expected_batch_size=args.expected_batch_size)
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} devices in one process would train with nn.DataParallel, whose replicas cannot be clipped together. Start one "
                "process per device (accelerate launch or torchrun), or set CUDA_VISIBLE_DEVICES to one."
            )
        self._run: PrivateRun | None = None
        self._clipper: PerExampleClipper | None = None
        self._step: PrivateStep | None = None
        self._has_ended, self._first_step = False, 0
        super().__init__(
            model=model, args=args, data_collator=data_collator, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs
        )
        if self.get_tp_size() > 1 and args.expected_batch_size_is_derived:
            raise ValueError(
                f"expected_batch_size was derived from {args.world_size} processes, but every {self.get_tp_size()} of them, a tensor-parallel group, "
                "work on the same examples: set expected_batch_size in the arguments."
            )
        self._refuse_what_the_environment_adds()
        self._has_own_loss = per_example_loss_func is not None
        if self._has_own_loss and not self.label_names:
            self.label_names = ["labels"]
        validate_model(self.model)
        if eval_dataset is not None and eval_dataset is train_dataset:
            logger.warning(
                "eval_dataset is train_dataset: what evaluation prints is computed from private rows without noise; epsilon does not cover it."
            )
        if args.load_best_model_at_end:
            logger.warning("load_best_model_at_end chooses by the evaluation data; epsilon says nothing about those examples.")
        self._per_example_loss = per_example_loss_func or find_per_example_loss(self.model, args.label_smoothing_factor)
        self._ledger = Ledger(args.output_dir)
        if train_dataset is not None:
            # a base class may have made other rows of it
            validate_training_data(self.train_dataset, target_delta=args.target_delta, expected_batch_size=args.expected_batch_size)
            validate_lengths(self.model, self.train_dataset)
            self._run = self._new_run(self._plan())

    def _refuse_what_the_environment_adds(self) -> None:
        """`accelerate launch` and set_* methods can bring in what DPTrainingArguments refuses."""
        accelerator = self.accelerator
        refused = {
            "mixed precision fp16": (
                accelerator.mixed_precision == "fp16",
                "loss scaling changes the norms that are clipped; use bf16",
            ),
            "gradient accumulation": (
                max(self.args.gradient_accumulation_steps, accelerator.gradient_accumulation_steps) > 1,
                "set gradient_accumulation_steps to 1 in all of these, and expected_batch_size in the arguments, which is split into physical batches of "
                "per_device_train_batch_size on its own",
            ),
            "FSDP1": (
                self.is_fsdp_enabled and accelerator.state.fsdp_plugin.fsdp_version != 2,
                "its flat parameters hide which gradient is whose; use FSDP2 (fsdp_config={'version': 2} in the arguments, fsdp_version: 2 in "
                "accelerate's configuration). If you did not ask for FSDP at all, something "
                f"else in this process did: take {FSDP_FLAG} out of os.environ",
            ),
            "context or sequence parallelism": (
                self.get_cp_size() * self.get_sp_size() > 1,
                "the positions of an example would lie on several processes; use tensor parallelism or FSDP2",
            ),
            "DeepSpeed": (self.is_deepspeed_enabled, "its engine averages and clips gradients on its own; use FSDP2, or DDP"),
        }
        for name, (is_on, why) in refused.items():
            if is_on:
                raise ValueError(
                    f"{name} is switched on (by the arguments, accelerate's configuration or os.environ) and cannot be used with differential privacy: "
                    f"{why}."
                )

    def create_accelerator_and_postprocess(self) -> None:
        asked = os.environ.get(FSDP_FLAG)
        allow_meshes_on_cpu(self.args, self.model)
        super().create_accelerator_and_postprocess()
        forbid_meshes_on_cpu()
        if asked is None:  # accelerate sets it for arguments that ask for FSDP; the next trainer of this process may have others
            os.environ.pop(FSDP_FLAG, None)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if self.is_fsdp_enabled and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)

    # ---- the plan: q, σ, steps ----

    def _plan(self) -> PrivacyState:
        args, n = self.args, len(self.train_dataset)
        steps = self._planned_steps(args.expected_batch_size)
        if steps < 1:
            raise ValueError(
                f"num_train_epochs={args.num_train_epochs} and max_steps={args.max_steps} leave no step to train. Set one of them above 0."
            )
        return PrivacyState(PrivacyState.new_run_id(), args.mechanism_for(n, steps), args.target_delta, args.target_epsilon)

    def _steps_per_epoch(self, expected_batch_size: int) -> int:
        return max(1, round(len(self.train_dataset) / expected_batch_size))

    def _planned_steps(self, expected_batch_size: int) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * self._steps_per_epoch(expected_batch_size))

    def privacy_spent(self) -> PrivacySpent:
        """What has been spent until now, from the ledger's count of executed steps.

        Raises:
            ValueError: the trainer has no training data, so it cannot have spent anything.
        """
        if self._run is None:
            raise ValueError(
                "this trainer has no train_dataset, so there is no private training to account for: make a DPTrainer with train_dataset."
            )
        return self._run.spent()

    def _new_run(self, state: PrivacyState) -> PrivateRun:
        args = self.args
        check_noise_source(dp_seed=args.dp_seed, secure=args.secure_rng)
        return PrivateRun(state, args.accountant, self._ledger, dp_seed=args.dp_seed, verified=args.self_check)

    # ---- training ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """Train, or go on from a checkpoint. See [`~transformers.Trainer.train`].

        On resume the draws and the noise are fresh, and every step ever executed in this run counts towards ε, also those after the
        checkpoint. `resume_from_checkpoint=True` takes the newest checkpoint that was written to its end.

        Raises:
            PrivacyStateError: the checkpoint is not complete, its privacy state or the ledger is missing or disagrees with the arguments,
                or another process trains in the same output_dir.
            ValueError: the privacy budget is spent.
        """
        refuse_overrides(self, DPTrainer)
        if trial is not None:
            raise ValueError(
                "DPTrainer cannot search hyperparameters: every trial is a private training of its own, and what they spend adds up. Run each trial "
                "with train() of a DPTrainer of its own, and add up their epsilon."
            )
        if self.train_dataset is None:
            raise ValueError("training requires a train_dataset: pass one to DPTrainer, or call evaluate() or predict() only.")
        if resume_from_checkpoint and self.is_distributed_loading_by_transformers:
            raise ValueError(
                "a model that transformers splits while it loads (DistributedConfig) cannot be resumed: its optimizer is not saved. Load the saved "
                "model and start a new run; what both spend adds up."
            )
        distributed.on_rank_zero(self._ledger.open)
        try:
            if resume_from_checkpoint:
                resume_from_checkpoint = self._restore(resume_from_checkpoint)
            else:
                self._run.take_over(distributed.on_rank_zero(lambda: self._run.state), self._run.executed, is_own=True)
            self._budget(resume_from_checkpoint)
            self._begin()
            output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            self._ledger.close()
        spent = self._run.spent()
        metrics = {**output.metrics, "epoch": self.state.epoch, "epsilon": spent.epsilon, "delta": spent.delta}
        metrics["noise_multiplier"] = spent.noise_multiplier
        if self.args.log_train_loss:
            return output._replace(metrics=metrics)
        metrics.pop("train_loss", None)  # it was never computed: see log_train_loss
        return output._replace(training_loss=math.nan, metrics=metrics)

    def _begin(self) -> None:
        if earlier := distributed.on_rank_zero(lambda: self._ledger.other_steps(self._run.state.run_id)):
            logger.warning(
                "%s also holds %d steps of earlier runs, which epsilon does not count: it is that of this training. If this model starts "
                "from theirs, or several models trained on the same data are released, what they spent adds up. If nothing of those runs was kept, they "
                "cost nothing.",
                self._ledger.path, earlier,
            )  # fmt: skip
        self._run.begin()

    def _budget(self, checkpoint: str | None) -> None:
        """Set how many more steps the budget allows. None is an error, unless the checkpoint is that of a run which ended."""
        run, state = self._run, self._run.state
        planned = self._planned_steps(state.mechanism.at(0).expected_batch_size)
        done = 0 if checkpoint is None else TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).global_step
        self._has_ended = done >= planned  # Trainer itself would take a step more
        run.plan(planned, done)
        self._first_step = (
            done if self.args.ignore_data_skip else done - done % self._steps_per_epoch(state.mechanism.at(0).expected_batch_size)
        )
        if run.steps_left >= 1 and not self._has_ended:
            return
        if self._has_ended:
            self._say(f"this run has ended: {run.spent_in_words()}, and there is nothing left to train.")
            return
        whole = PrivateRun(state, self.args.accountant)
        whole.take_over(state, [*run.executed, state.mechanism.planned(done, planned - done)])
        raise ValueError(
            f"the privacy budget is spent: {run.spent_in_words()}, and one more would exceed target_epsilon={state.target_epsilon:g}. Nothing was "
            f"trained. All {planned - done} steps that are planned would make it {whole.spent().epsilon_per_person:.4g}. A run keeps its target: to go "
            "on, load the model that was trained and start a new run in another output_dir (with a target_epsilon or noise_multiplier of its own); what "
            "both spend adds up."
        )

    def _say(self, text: str) -> None:
        """Shown once, on the first process, also in scripts that configure no logging."""
        if self.is_world_process_zero():
            progress.warning(text)

    def _restore(self, checkpoint: str | bool) -> str:
        """Go on with the run that a checkpoint belongs to (True: the newest complete one), and return its folder."""
        args = self.args
        if checkpoint is True:
            checkpoint = distributed.on_rank_zero(lambda: find_checkpoint(args.output_dir))
        state, steps_at_save = PrivacyState.load(checkpoint)
        steps = self._planned_steps(state.mechanism.at(0).expected_batch_size)
        mechanism = args.mechanism_for(len(self.train_dataset), steps, saved=state.mechanism)
        wanted = replace(state, mechanism=mechanism, delta=args.target_delta, target_epsilon=args.target_epsilon)
        state.require(wanted)
        if os.path.abspath(os.path.dirname(os.path.normpath(checkpoint))) != os.path.abspath(args.output_dir):
            raise PrivacyStateError(
                f"checkpoint '{checkpoint}' does not lie in output_dir '{args.output_dir}'. The ledger of executed steps lies beside the checkpoints "
                "and must go on: set output_dir to the folder that holds the checkpoint."
            )
        if distributed.on_rank_zero(lambda: state) != state:
            raise PrivacyStateError(
                f"'{checkpoint}' on the machine of rank {distributed.rank()} belongs to another run than the folder of that name on the machine of rank 0. "
                "Copy rank 0's folder over it, or set output_dir to a folder that all machines share."
            )
        state = replace(state, mechanism=mechanism)  # with the steps and the unit of now
        self._run = self._new_run(state)
        at_least = [Counter({state.mechanism.at(0): steps_at_save})]
        self._run.take_over(state, at_least, reasons=PrivacyState.reasons(checkpoint))
        args.expected_batch_size = state.mechanism.at(0).expected_batch_size
        return checkpoint

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader]:
        prepared = super()._prepare_for_training(*args, **kwargs)
        # here the model is final: model_init has been called, a checkpoint loaded, parameters sharded
        args = self.args
        validate_optimizer(self.optimizer, self.model)
        self._clipper = PerExampleClipper(
            self.model, self._run.mechanism.clipping.at(0), mode=args.clipping_mode, self_check=self._run.verified
        )
        if self.is_fsdp_enabled and not self._clipper.shards:
            raise ValueError(
                "FSDP was asked for, but accelerate did not shard the model. Set fsdp=True and fsdp_config={'version': 2}, and start one process per "
                "device (accelerate launch or torchrun). If you want no FSDP, switch it off in the arguments and in accelerate's configuration."
            )
        self._refuse_groups()
        self._step = PrivateStep(
            self._clipper,
            self._run,
            self._run.mechanism.noise.source(self._clipper, dp_seed=self._run.dp_seed, secure=args.secure_rng),
            self._seeds,
            self._logical_batches,
            announce=self._say,
            label_names=self.label_names,
            reduce_every_batch=(args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch", True),
        )
        self._clipper.follow(self._step, None)
        steps, size = self._planned_steps(self._run.mechanism.at(0).expected_batch_size), sum(p.numel() for p in self._clipper.parameters)
        self._say(describe(self._run, steps, size, self._clipper.mode.name))
        if warning := hopeless(self._run, steps, size):
            self._say(warning)
        return prepared

    def _refuse_groups(self) -> None:
        """Ranks must be dealt to tensor-parallel groups as the sampler takes them to be, and every sum must be somebody's."""
        parallel, shards, size, world = self._clipper.parallel, self._clipper.shards, self.get_tp_size(), distributed.world_size()
        own = list(range(distributed.rank() // size * size, distributed.rank() // size * size + size))
        if (parallel.mesh.mesh.flatten().tolist() if parallel else own[:1]) != own:
            raise ValueError(
                f"the model says tp_size={size}, but its parameters are not split over the {size} processes {own} that this makes one group. Load it "
                "with from_pretrained(..., distributed_config=DistributedConfig(tp_size=...)), and do not split it by hand."
            )
        if (parallel or shards) and size * (shards.mesh.size() if shards else 1) != world:
            raise ValueError(
                f"some of the {world} processes hold the same parameters, and nothing adds up their gradients: load the model with "
                f"DistributedConfig(tp_size={size}, fsdp_size={world // size})."
            )

    def _data_rank(self) -> int:
        """Which share of the examples is this process's; a tensor-parallel group works on the same ones."""
        return distributed.rank() // self.get_tp_size()

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Equal on all ranks to start with. Trainer would also average their gradients here; a private step adds them up itself."""
        distributed.broadcast([p for p in model.parameters() if p.requires_grad and not is_dtensor(p)])

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        # an example's masks must not depend on which others are drawn, so no two ranks share theirs, but in a tensor-parallel group
        secret = distributed.shared_secret(self._run.dp_seed)
        self._seeds = SecretSeeds(secret, self._data_rank())
        try:
            with global_random_numbers([secret], self.args.device):  # args.seed is known, and would tell the masks of dropout
                return super()._inner_training_loop(*args, **kwargs)
        finally:
            if self._step is not None:
                self._step.close()  # a step that was cut off leaves no gradient without noise
                self._clipper.detach()
            self._clipper = self._step = None

    def training_step(self, model: nn.Module, inputs: LogicalBatch, num_items_in_batch: Any = None) -> torch.Tensor:
        """One private step: clipped sum over the draw, noise, division by the expected batch size. Leaves it in `.grad`."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        loss = torch.zeros((), device=self.args.device)
        for given in self._step.physical_batches(inputs):
            rows = self._prepare_inputs(given.batch.rows)
            self._step.check((), dict(rows), lambda **rows: self._per_example_losses(rows)[0])
            with self.compute_loss_context_manager():
                losses, outputs = self._per_example_losses(rows)
            self._refuse_losses_over_the_batch(losses, outputs, self._labels_of(rows))
            self._clipper.backward(losses)
            if self.args.log_train_loss and given.batch.weight:
                loss += losses.detach().nansum() / self._run.mechanism.at(self._step.number).expected_batch_size
        self._step.release()
        if self._run.steps_left < 1 and self.state.global_step + 1 < self.state.max_steps:
            logger.warning("the next step would exceed target_epsilon=%g: training stops here.", self._run.state.target_epsilon)
            self.control.should_training_stop = self.control.should_save = True
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The loss of evaluation and prediction: the model's own, or the mean of `per_example_loss_func`."""
        if not self._has_own_loss:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        losses, outputs = self._per_example_losses(inputs)
        return (losses.mean(), outputs) if return_outputs else losses.mean()

    def _per_example_losses(self, inputs: Any) -> tuple[torch.Tensor, Any]:
        """(B,) losses and the model's outputs, the labels kept out of the model."""
        inputs = dict(inputs)
        missing = [name for name in self.label_names if name not in inputs]
        if missing:
            raise ValueError(
                f"the training batches have no {missing}: the columns are {sorted(inputs)}. Rename the label column, set label_names, or use a "
                "collator that makes labels (DataCollatorForLanguageModeling)."
            )
        labels = self._labels_of(inputs)
        for name in self.label_names:
            del inputs[name]
        outputs = self.model(**{**decoder_inputs(self.model, labels), **inputs})  # decoder inputs that the batch has win
        losses = self._per_example_loss(outputs, labels)
        if losses.dim() != 1:
            raise ValueError(
                f"the per-example loss has shape {tuple(losses.shape)}; it must be (B,), one loss for each example (reduction='none'), averaged within the "
                "example where it has several."
            )
        return losses, outputs

    def _labels_of(self, inputs: Any) -> Any:
        labels = tuple(inputs[name] for name in self.label_names)
        return labels[0] if len(labels) == 1 else labels

    def _refuse_losses_over_the_batch(self, losses: torch.Tensor, outputs: Any, labels: Any) -> None:
        """The losses of half of the rows stay the same when all other rows are replaced by them; at first, and ever more rarely."""
        given, size = self._step.given, len(losses)
        if given is None or given.draw & (given.draw - 1) or size < 2:
            return
        half = (size + 1) // 2

        def with_half_replaced(x: Any) -> Any:
            has_rows = isinstance(x, torch.Tensor) and x.dim() and len(x) == size
            return torch.cat([x[:half], x[: size - half]]).detach() if has_rows else x

        each = []
        for rows in ((outputs, labels), tree_map(with_half_replaced, (outputs, labels))):
            with torch.no_grad(), global_random_numbers([given.draw], losses.device):  # a loss may draw them
                each.append(self._per_example_loss(*rows)[:half].float())
        if not torch.allclose(*each, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise ValueError(
                "an example's loss is another one when other examples share its batch: the loss compares them (the hardest of a batch, ranks, batch "
                "statistics). Let per_example_loss_func compute each loss from its own row of the outputs and labels alone."
            )

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """The norm of the noised gradient. It is not clipped again: `max_grad_norm` bounds each example."""
        alike = defaultdict(list)  # by how they lie, so that few numbers are sent
        for grad in [p.grad for p in model.parameters() if p.grad is not None]:
            alike[(grad.device_mesh, grad.placements) if is_dtensor(grad) else None].append(grad)
        return torch.stack(full_tensors(torch.nn.utils.get_total_norm(grads) for grads in alike.values())).norm()

    # ---- what Trainer asks of batches, which here are LogicalBatch ----

    def get_train_dataloader(self) -> DataLoader:
        """A loader of Poisson draws, each a [`~dp_transformers.data.LogicalBatch`]."""
        args, dataset, collator = self.args, self.train_dataset, self.data_collator
        if _is_datasets(dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        sampling = self._run.mechanism.sampling
        sampler = DrawSampler(
            sampling,
            self._steps_per_epoch(sampling.expected_batch_size),
            distributed.shared_secret(self._run.dp_seed),
            self._data_rank(),
            distributed.world_size() // self.get_tp_size(),
            first_step=self._first_step,
            ended=self._has_ended,
        )
        self._logical_batches = LogicalBatches(dataset, collator, args.per_device_train_batch_size, self._seeds)
        return draws_dataloader(
            self._logical_batches,
            sampler,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=seed_worker,
        )

    def get_total_train_batch_size(self, args: DPTrainingArguments) -> int:
        return args.expected_batch_size

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        return None  # no example's loss is divided by what the others contain

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the size of a draw is not released

    def _track_num_input_tokens(self, inputs: Any) -> None:
        return None

    # ---- logging and saving ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `epsilon` with every line, and the training loss only where `log_train_loss` asks for it."""
        if self._clipper is not None and not self.args.log_train_loss:
            logs = {k: v for k, v in logs.items() if k not in ("loss", "train_loss")}
        if self._run is not None and (self._clipper is not None or self._run.steps):
            if self._run.steps < self.state.global_step:
                raise RuntimeError(
                    f"{self.state.global_step} steps were taken, but only {self._run.steps} were clipped, noised and counted: a callback or other "
                    "code stepped the model or set state.global_step. This model has no valid epsilon: do not release it. Remove that code and "
                    "train again from the original model."
                )
            logs["epsilon"] = self._run.epsilon(self._run.state.delta)
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A checkpoint is complete when every rank has written its part, and only then may it push older ones out."""
        args, name = self.args, f"checkpoint-{self.state.global_step}"
        folder = os.path.join(args.output_dir, name)
        if args.should_save and os.path.exists(folder):
            shutil.rmtree(folder)  # half-written before a kill, or left by an earlier run: nothing of it may mix with the new one
        self.accelerator.wait_for_everyone()
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        self._complete(folder)
        if args.should_save and limit is not None and limit > 0:
            rotate(args.output_dir, limit, keep={name, os.path.basename(self.state.best_model_checkpoint or name)})

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing of what dropout has drawn or will draw: only what `args.seed` tells."""
        with global_random_numbers([self.args.seed], self.args.device):
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Random numbers are fresh on resume, as draws and noise are."""

    def _complete(self, checkpoint: str) -> None:
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._run.state.save(checkpoint, self._run.steps, self._run.not_private_because)
        self.accelerator.wait_for_everyone()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._complete(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)


def allow_meshes_on_cpu(args: DPTrainingArguments, model: nn.Module | None = None) -> None:
    """accelerate shards on accelerators only, and on CPUs would train with DDP without a word, or refuse a tensor-parallel model."""
    state = PartialState._shared_state
    is_split = (getattr(model, "tp_size", None) or 1) > 1
    asked = is_split or args.fsdp or os.environ.get(FSDP_FLAG, "false").lower() == "true"
    if asked and state.get("distributed_type") == DistributedType.MULTI_CPU:
        state["distributed_type"] = DistributedType.MULTI_GPU  # accelerate writes FSDP here when it has read its configuration


def forbid_meshes_on_cpu() -> None:
    """Where accelerate has not written FSDP, it takes gloo for NCCL from here on unless told otherwise."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state.get("distributed_type") == DistributedType.MULTI_GPU and state["device"].type == "cpu":
            state["distributed_type"] = DistributedType.MULTI_CPU


def _is_datasets(dataset: Any) -> bool:
    return type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "column_names")
