"""DPTrainerMixin makes any subclass of transformers' Trainer private, as DPTrainer and DPSeq2SeqTrainer. It replaces
methods of Trainer, and computes nothing itself."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Trainer
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as transformers_logging

from ..auditing.canaries import AuditConfig, CanaryAudit
from ..checks.validation import refuse_repeated_rows, validate_lengths, validate_model, validate_training_data
from ..clipping.hooks import keep_unpacked
from ..clipping.parallel.dtensor import full_tensors, is_dtensor
from ..clipping.parallel.fsdp2 import reshard
from ..data.stored_rows import have_rows_in_common
from ..data.units import Units, owners_in, units_of
from ..losses.example_losses import ExampleLosses, runs_the_model
from ..losses.heads import PerExampleLoss, default_loss_bound, find_per_example_loss, predicts_next_token
from ..mechanism.mechanism import PrivacyUnit
from ..reports.certificate import circumstances
from ..reports.digest import describe_data
from ..reports.pages import add_to
from ..runtime import distributed
from ..runtime.randomness import seeded_global_generators
from ..step.checkpoint import rotate
from ..step.releases import loss_release
from ..step.run import PrivacySpent, PrivateRun
from .dp_config import DPTrainingArguments
from .patches import meshes_on_cpu, reduce_in_float32, show_spent
from .refused import (
    refuse_arguments,
    refuse_order_of_bases,
    refuse_overrides,
    refuse_settings,
    refuse_trainers_over_the_batch,
    refuse_unknown_loss,
    replaced_owner,
    warn_about_replaced,
)
from .trainer_run import TrainerRun

if TYPE_CHECKING:

    class Base(Trainer):
        """The class behind the mixin, after `__init__`: it refuses other arguments, and Trainer makes the model."""

        args: DPTrainingArguments  # pyrefly: ignore[bad-override-mutable-attribute]
        model: nn.Module  # pyrefly: ignore[bad-override-mutable-attribute]
else:
    Base = object

_OTHER_MODEL = (
    "trainer.model was replaced by a model that this trainer was not made for: load weights into the model that is "
    "there (load_state_dict), or make another trainer with the new one."
)
HOW_TO_SEARCH = (
    "DPTrainer cannot search hyperparameters: every trial is a private training of its own. Run each trial with "
    "train() of a DPTrainer of its own, and add up their epsilon."
)

logger = logging.getLogger(__name__)
progress = transformers_logging.get_logger(f"transformers.{__name__}")  # shown as transformers' own messages are


class DPTrainerMixin(Base):
    """Makes the training of a [`~transformers.Trainer`] subclass (ε, δ)-differentially private in the training
    examples.

    It comes first in the order of bases: `class DPSeq2SeqTrainer(DPTrainerMixin, Seq2SeqTrainer)`. It replaces the
    training step and the train dataloader of the class, and leaves evaluation, prediction and saving to it. A class
    with a `compute_loss` of its own keeps it for evaluation; in training `per_example_loss_func` takes its place and
    must be given.

    Args:
        model, args, data_collator, train_dataset, eval_dataset: As in Trainer; `args` must be [`DPTrainingArguments`]
            and `train_dataset` must have a length.
        per_example_loss_func (`Callable`, *optional*): `f(outputs, labels) -> (B,)` losses, each from its own example
            alone, for heads whose per-example loss is not built in, or class weights: see
            :mod:`dp_transformers.losses.heads` for those that are. A function whose first parameter is called `model`
            is given the model and the batch instead, for losses without labels or of several forward passes:
            `f(model, inputs) -> (B,)`. What its first call of the model returns are the predictions of evaluation.
        audit ([`AuditConfig`], *optional*): Audits the training by canaries; see `trainer.audit.result` afterwards.
        kwargs: The other arguments of the class; `compute_loss_func` is refused, because it averages over the batch.

    Raises:
        TypeError: when a class is defined in whose order of bases Trainer comes before the mixin.
        ValueError: at construction, for whatever would break the guarantee, with the way out.

    Example::

        >>> from transformers import Seq2SeqTrainer
        >>> from dp_transformers import DPTrainerMixin
        >>> class DPSeq2SeqTrainer(DPTrainerMixin, Seq2SeqTrainer):
        ...     pass
        >>> DPSeq2SeqTrainer.trains_privately
        True
    """

    trains_privately = True
    loss_is_scaled_for_ga = True  # our step divides by the expected batch size, once
    replaced_knowingly: ClassVar[frozenset[str]] = frozenset()  # methods of a base class that need not be called

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_order_of_bases(cls, DPTrainerMixin)
        refuse_trainers_over_the_batch(cls)

    def __init__(
        self,
        model: nn.Module | None = None,
        args: DPTrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        per_example_loss_func: PerExampleLoss | None = None,
        audit: AuditConfig | None = None,
        **kwargs: Any,
    ):
        refuse_overrides(self, DPTrainerMixin)
        args = _private_arguments(args, kwargs)
        self._owners: str | Sequence[Any] | None = args.privacy_unit_column
        train_dataset, units = self._rows_and_units(args, train_dataset)
        _validate_rows(args, train_dataset, units)
        if per_example_loss_func is None:
            refuse_unknown_loss(type(self), DPTrainerMixin)
        warn_about_replaced(type(self), DPTrainerMixin)
        self._training: TrainerRun | None = None
        self._labels_of_loss: list[str] = []  # columns that a loss of (model, inputs) may take from the batch
        self._raw = torch.zeros(2)  # the sum of the losses since the last line of the log, and their number
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **kwargs,
        )
        if self.get_tp_size() > 1 and args.expected_batch_size_is_derived:
            raise ValueError(
                f"expected_batch_size was derived from {args.world_size} processes, but every {self.get_tp_size()} of "
                "them, a tensor-parallel group, work on the same examples: set expected_batch_size in the arguments."
            )
        refuse_settings(self)
        show_spent(self)
        self._name_labels(per_example_loss_func)
        validate_model(self.model)
        _warn_about_evaluation(args, train_dataset, eval_dataset)
        # here the data sets are those that were given; TRL makes others of them
        self._was_given_training_rows = _evaluates_on(train_dataset, eval_dataset, args.metric_for_best_model)
        loss = per_example_loss_func or find_per_example_loss(self.model, args.label_smoothing_factor)
        predicts_next = per_example_loss_func is None and predicts_next_token(self.model)
        self._example_losses = ExampleLosses(loss, self.label_names, predicts_next=predicts_next)
        self._evaluates_by_mean = per_example_loss_func is not None and not replaced_owner(
            type(self), DPTrainerMixin, "compute_loss"
        )
        if train_dataset is not None:
            # a base class may have made other rows of it
            self.audit = None if audit is None else CanaryAudit(audit, self)  # leaves some of the canaries out
            made: Any = self.train_dataset
            column = args.privacy_unit_column
            if column is not None and column not in getattr(made, "column_names", [column]):
                self._owners = owners_in(train_dataset, column)
            _refuse_more_rows(len(made), len(train_dataset), args.privacy_unit)
            dataset, units = self._rows_and_units(args, made)
            _validate_rows(args, dataset, units)
            validate_lengths(self.model, dataset)
            number = len(dataset if units is None else units)
            self._training = TrainerRun(
                args, number, self._say, self._about, loss_bound=default_loss_bound(self.model)
            )

    def _rows_and_units(self, args: DPTrainingArguments, dataset: Any) -> tuple[Any, Units | None]:
        """Return the training data without rows beyond a person's bound, and what a draw chooses in the place of
        rows."""
        if dataset is None:
            return None, None
        return units_of(dataset, args.privacy_unit, self._owners, args.augmentation_multiplicity)

    def _name_labels(self, per_example_loss_func: PerExampleLoss | None) -> None:
        """Set which columns hold labels for a loss of the user's, where the arguments leave it open."""
        if per_example_loss_func is None:
            return
        if not runs_the_model(per_example_loss_func):
            self.label_names = self.label_names or ["labels"]
        elif self.args.label_names is None:
            # evaluation then asks for the loss without labels
            self._labels_of_loss, self.label_names, self.can_return_loss = self.label_names, [], True

    def create_accelerator_and_postprocess(self) -> None:
        with meshes_on_cpu(self.args, self.model):
            keep_unpacked(self.model)  # it may evaluate before it trains
            super().create_accelerator_and_postprocess()
        reduce_in_float32(self)
        self.accelerator.register_save_state_pre_hook(_refuse_state_of_accelerate)
        self.accelerator.register_load_state_pre_hook(_refuse_state_of_accelerate)

    @property
    def _private(self) -> TrainerRun:
        if self._training is None:
            raise ValueError(
                "this trainer has no train_dataset, so there is no private training to account for: make a DPTrainer "
                "with train_dataset."
            )
        return self._training

    @property
    def _run(self) -> PrivateRun:
        return self._private.run

    def privacy_spent(self) -> PrivacySpent:
        """Return what has been spent until now, by the ledger's count of executed steps.

        Raises:
            ValueError: the trainer has no training data, so it cannot have spent anything.
        """
        return self._run.spent()

    # ---- training ----

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or go on from a checkpoint. See [`~transformers.Trainer.train`].

        On resume the draws and the noise are fresh, and every step ever executed in this run counts towards ε, also
        those after the checkpoint. `resume_from_checkpoint=True` takes the newest checkpoint that was written to its
        end.

        Raises:
            PrivacyStateError: the checkpoint is not complete, its privacy state or the ledger is missing or disagrees
                with the arguments, or another process trains in the same output_dir.
            ValueError: the privacy budget is spent.
        """
        refuse_overrides(self, DPTrainerMixin)
        refuse_arguments(self.args)
        refuse_settings(self)
        if trial is not None:
            raise ValueError(HOW_TO_SEARCH)
        if self.accelerator.unwrap_model(self.model_wrapped) not in list(self.model.modules()):
            raise ValueError(_OTHER_MODEL)
        if self._training is None or self.train_dataset is None:
            raise ValueError(
                "training requires a train_dataset: pass one to DPTrainer, or call evaluate() or predict() only."
            )
        # train_dataset may have been replaced since __init__
        if not self.args.privacy_unit.is_person:
            refuse_repeated_rows(self.train_dataset, self.args.max_examples_per_person)
        # Trainer has no such attribute before transformers 5.19, where refuse_settings refuses such a model
        if resume_from_checkpoint and getattr(self, "is_distributed_loading_by_transformers", False):
            raise ValueError(
                "a model that transformers splits while it loads (DistributedConfig) cannot be resumed: its optimizer "
                "is not saved. Load the saved model and start a new run; what both spend adds up."
            )
        choices, metric = self._chosen_by_evaluation, self.args.metric_for_best_model
        is_on_training_rows = _evaluates_on(self.train_dataset, self.eval_dataset, metric)
        if choices and (is_on_training_rows or self._was_given_training_rows):
            raise ValueError(
                f"the training rows would choose {' and '.join(choices)} without noise, since eval_dataset has them, "
                "and epsilon would not hold. Evaluate on other rows, or leave that choice out."
            )
        with self._training.recorded(resume_from_checkpoint) as checkpoint:
            output = super().train(checkpoint, trial, ignore_keys_for_eval)
        spent = self._run.spent()
        metrics = {**output.metrics, "epoch": self.state.epoch, "epsilon": spent.epsilon, "delta": spent.delta}
        metrics["noise_multiplier"] = spent.noise_multiplier
        if self._run.mechanism.unit.max_examples_per_person > 1:
            metrics["epsilon_per_person"] = spent.epsilon_per_person
        if self._logs_loss:
            return output._replace(metrics=metrics)
        metrics.pop("train_loss", None)
        return output._replace(training_loss=math.nan, metrics=metrics)

    @property
    def _logs_loss(self) -> bool:
        """True if the losses of training have noise, or nothing of it is private for want of noise."""
        return loss_release(self._run.mechanism) is not None or self._run.mechanism.is_silent

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial is a private training of its own."""
        raise ValueError(HOW_TO_SEARCH)

    def _about(self) -> dict[str, Any]:
        """Return what the ledger holds of a training besides its mechanism."""
        args, dataset = self.args, self.train_dataset
        assert dataset is not None and args.output_dir is not None, "there is no training without them"
        return circumstances(
            accountant=args.accountant,
            data=describe_data(dataset, args.output_dir, self._run.say_copies, wanted=args.data_digest),
            model=self.model,
            also_released=_also_released(args, self.eval_dataset, self._chosen_by_evaluation),
        )

    @property
    def _chosen_by_evaluation(self) -> list[str]:
        """Say in words what of the training follows the metrics of evaluation."""
        stops = any(isinstance(each, EarlyStoppingCallback) for each in self.callback_handler.callbacks)
        return [
            *_choices(self.args, self.lr_scheduler),
            *(["when training stops (EarlyStoppingCallback)"] if stops else []),
        ]

    def _say(self, text: str) -> None:
        """Show a sentence once, on rank 0, also in scripts that configure no logging."""
        if self.is_world_process_zero():
            progress.warning(text)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader]:
        reshard(self.model)  # evaluation leaves some whole, and an optimizer of those would train nothing
        prepared = super()._prepare_for_training(*args, **kwargs)
        # here the model is final: model_init has been called, a checkpoint loaded, parameters sharded
        self._private.attach(self.model, self.optimizer, is_fsdp_enabled=self.is_fsdp_enabled)
        self._private.step.clipper.watch("loss", self._example_losses.loss)
        return prepared

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Broadcast them from rank 0. Trainer would also average their gradients over ranks; the private step adds
        them up itself."""
        distributed.broadcast([p for p in model.parameters() if p.requires_grad and not is_dtensor(p)])

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        with self._private.running(self.get_tp_size()):
            return super()._inner_training_loop(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Take one private step: clip and sum the draw, add noise, divide by the expected batch size. `p.grad` then
        holds the result. Returns the private loss; 0 where none is released, and the true one without noise."""
        assert self.optimizer is not None, "Trainer has made it"
        model.train()
        if callable(train_mode := getattr(self.optimizer, "train", None)):
            train_mode()
        raw, step = torch.zeros(2, device=self.args.device), self._private.step
        is_silent = step.run.mechanism.is_silent
        if self.model is not step.clipper.model:
            raise ValueError(_OTHER_MODEL)
        if self.args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps was set to {self.args.gradient_accumulation_steps} while training "
                "runs, so the optimizer would never see some releases that are paid for: leave it at 1, and set "
                "expected_batch_size, the number of examples in a step."
            )
        for given in step.physical_batches(inputs):
            rows = self._prepare_inputs(given.batch.rows)
            if not isinstance(rows, Mapping):
                raise ValueError(
                    f"the collator returns a {type(rows).__name__}, and the model is called with the names of its "
                    "arguments: let it return a dictionary of tensors."
                )
            step.check((), dict(rows), self._losses_of)
            with self.compute_loss_context_manager():
                losses, _ = self._example_losses(self.model, rows)
            step.add(losses)
            if self.args.log_raw_metrics or is_silent:
                own_losses = losses.detach()[: given.batch.examples]
                raw += torch.stack([own_losses.nansum(), torch.isfinite(own_losses).sum()])
        step.release(self.optimizer)
        if step.run.steps_left < 1 and self.state.global_step + 1 < self.state.max_steps:
            logger.warning(
                "the next step would exceed target_epsilon=%g: training stops here.", step.run.state.target_epsilon
            )
            self.control.should_training_stop = self.control.should_save = True
        if is_silent or self.args.log_raw_metrics:
            distributed.sum_over_ranks([raw])
            self._raw = self._raw.to(raw) + raw
        if is_silent:
            return raw[0] / raw[1].clamp(min=1)
        return torch.zeros_like(raw[0]) if step.loss is None else step.loss.to(raw.device)

    def _losses_of(self, **rows: Any) -> torch.Tensor:
        """Compute the (B,) losses of some rows of a batch, for which clipping is compared with one at a time."""
        with self.compute_loss_context_manager():
            return self._example_losses(self.model, rows)[0]

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Compute the loss of evaluation and prediction: by the class or the model, or else as the mean of
        `per_example_loss_func`."""
        if not self._evaluates_by_mean:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        losses, outputs = self._example_losses.evaluated(self.model, inputs)
        return (losses.mean(), outputs) if return_outputs else losses.mean()

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Return the loss, predictions and labels of a batch of evaluation data: those labels, too, that a loss of
        (model, inputs) takes from the batch itself."""
        inputs = self._prepare_inputs(inputs)
        loss, predictions, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if not self._evaluates_by_mean:
            return loss, predictions, labels
        if self.compute_metrics is not None and isinstance(predictions, tuple) and not predictions:
            raise ValueError(
                "compute_metrics has no predictions, since per_example_loss_func calls parts of the model alone: call "
                "model(...) in it, or leave compute_metrics out."
            )
        if labels == () and all(name in inputs for name in self._labels_of_loss):
            own = tuple(inputs[name] for name in self._labels_of_loss)
            labels = own[0] if len(own) == 1 else own
        return loss, predictions, labels

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm of the noised gradient. It is not clipped again: `max_grad_norm` bounds each example."""
        groups = defaultdict(list)  # those of one mesh are reduced together, so that ranks send few numbers
        for grad in (p.grad for p in model.parameters() if p.grad is not None):
            groups[(grad.device_mesh, grad.placements) if is_dtensor(grad) else None].append(grad)
        return torch.stack(full_tensors(map(torch.nn.utils.get_total_norm, groups.values()))).norm()

    # ---- batches: Trainer gets a LogicalBatch where it expects a batch ----

    def get_train_dataloader(self) -> DataLoader:
        """Make a loader of the draws, each a [`~dp_transformers.data.draws.LogicalBatch`]."""
        dataset, units = self._rows_and_units(self.args, self.train_dataset)
        collator = self.training_collator()
        if _is_datasets(dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        return self._private.loader(dataset, collator, units)

    def training_collator(self) -> Callable[[list[Any]], Any]:
        """Return what makes a training batch, with a row for each example, of a list of examples."""
        assert self.data_collator is not None, "Trainer has a default"
        return self.data_collator

    def get_total_train_batch_size(self, args: Any) -> int:
        return args.expected_batch_size

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        return None  # no example's loss is divided by what the others contain

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the size of a draw is not released

    def _track_num_input_tokens(self, inputs: Any) -> None:
        return None

    # ---- logging and saving ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `epsilon` with every line, and a training loss only where it has noise, or nothing has. That of
        `log_raw_metrics` is shown on the console; callbacks, trackers and `log_history` do not get it."""
        training = self._training
        is_running = training is not None and training.is_running
        if is_running and not self._logs_loss:
            if "loss" in logs and self.args.log_raw_metrics:
                refuse_settings(self)  # a tracker that records the console may have been added since
                raw, self._raw = float(self._raw[0] / self._raw[1]), torch.zeros(2)
                self._say(f"step {self.state.global_step}: raw_loss {raw:.4g} (NOT PRIVATE, not saved)")
            logs = {name: value for name, value in logs.items() if name not in ("loss", "train_loss")}
        if training is not None and (is_running or self._run.steps):
            training.require_counted(self.state.global_step)
            logs["epsilon"] = training.epsilon
            if self._run.mechanism.unit.max_examples_per_person > 1:
                logs["epsilon_per_person"] = self._run.spent().epsilon_per_person
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint. It is complete when every rank has written its part, and only then are older ones
        deleted."""
        args, name = self.args, f"checkpoint-{self.state.global_step}"
        output_dir = self._get_output_dir(trial)
        folder = os.path.join(output_dir, name)
        if args.should_save and os.path.exists(folder):
            # half-written before a kill, or left by an earlier run: nothing of it may mix with the new one
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:  # those of safetensors and torch have no class in common
            when = "When there is room again" if isinstance(error, OSError) else "When that is mended"
            logger.error(
                "'%s' could not be written: %s. The ledger counts all %d steps, also those after the last complete "
                "checkpoint. %s, go on from there with resume_from_checkpoint=True.",
                folder, str(error).rstrip("."), self._run.steps, when,
            )  # fmt: skip
            raise
        finally:
            args.save_total_limit = limit
        self._complete(folder)
        if args.should_save and limit is not None and limit > 0:
            rotate(output_dir, limit, keep={name, os.path.basename(self.state.best_model_checkpoint or name)})

    def _save_rng_state(self, output_dir: str) -> None:
        """Save states that `args.seed` gives, and not the secret ones that dropout draws from."""
        with seeded_global_generators([self.args.seed], self.args.device):
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load nothing: random numbers are fresh on resume, as draws and noise are."""

    def _complete(self, checkpoint: str) -> None:
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._run.state.save(checkpoint, self._run.steps, self._run.facts())
            self._private.write_certificate()
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and say in its README, which peft writes, what was spent."""
        super().save_model(output_dir, _internal_call)
        if not _internal_call:
            self._say_privacy_in(output_dir)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card, with what was spent."""
        super().create_model_card(*args, **kwargs)
        self._say_privacy_in(None)

    def _say_privacy_in(self, folder: str | None) -> None:
        output_dir = self.args.output_dir
        if self.is_world_process_zero() and output_dir is not None:
            add_to(Path(folder or output_dir) / "README.md", output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._complete(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)


class DPTrainer(DPTrainerMixin, Trainer):
    """[`~transformers.Trainer`] whose training is (ε, δ)-differentially private in the training examples.

    Swap `Trainer` for `DPTrainer` and `TrainingArguments` for [`DPTrainingArguments`]; everything else stays: data
    sets, collators, callbacks, PEFT models, evaluation, prediction, saving, resuming. One training step is one Poisson
    draw from the training set, of `expected_batch_size` examples on average; `global_step` counts draws.
    [`DPTrainerMixin`] describes the arguments, and makes any other subclass of Trainer private.

    Example::

        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from dp_transformers import DPTrainer, DPTrainingArguments
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        ... )
        >>> rows = [{"input_ids": [i % 30, 1, 2], "labels": i % 2} for i in range(100)]
        >>> args = DPTrainingArguments(
        ...     "outputs", target_epsilon=8.0, target_delta=1e-3, expected_batch_size=20, max_steps=5, use_cpu=True,
        ...     disable_tqdm=True,
        ... )
        >>> trainer = DPTrainer(BertForSequenceClassification(config), args, train_dataset=rows)
        >>> result = trainer.train()
        {'train_runtime': ...}
        >>> spent = trainer.privacy_spent()
        >>> spent.steps, spent.epsilon <= 8.0
        (5, True)
    """


class DPSeq2SeqTrainer(DPTrainerMixin, Seq2SeqTrainer):
    """[`~transformers.Seq2SeqTrainer`] with the private training of [`DPTrainer`]: it evaluates by generating, if
    `predict_with_generate` of its [`DPSeq2SeqTrainingArguments`] says so.

    Example::

        >>> from transformers import Seq2SeqTrainer
        >>> from dp_transformers import DPSeq2SeqTrainer
        >>> issubclass(DPSeq2SeqTrainer, Seq2SeqTrainer), DPSeq2SeqTrainer.trains_privately
        (True, True)
    """


def _is_datasets(dataset: Any) -> bool:
    return type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "column_names")


def _private_arguments(args: Any, others: Mapping[str, Any]) -> DPTrainingArguments:
    """Return the arguments of the trainer, or raise ValueError where they, or its other arguments, are none for
    private training."""
    if not isinstance(args, DPTrainingArguments):
        folder = getattr(args, "output_dir", None) or "outputs"
        raise ValueError(
            f"DPTrainer needs DPTrainingArguments, got {type(args).__name__}. Write for example: "
            f"args = DPTrainingArguments(output_dir={folder!r}, target_epsilon=8.0, target_delta=1e-6, ...). For "
            "evaluation alone use Trainer."
        )
    if others.get("compute_loss_func") is not None:
        raise ValueError(
            "compute_loss_func returns one loss for the whole batch, from which no example's gradient can be clipped. "
            "Pass instead per_example_loss_func=f with f(outputs, labels) -> (B,), or f(model, inputs) -> (B,)."
        )
    if packs := [name for name in ("packing", "padding_free") if getattr(args, name, False)]:
        raise ValueError(
            f"{packs[0]}=True joins several examples in one row, so the norm of a row is not the norm of an example: "
            f"set {packs[0]}=False."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} devices in one process would train with nn.DataParallel, whose replicas cannot be clipped "
            "together. Start one process per device (accelerate launch or torchrun)."
        )
    return args


def _validate_rows(args: DPTrainingArguments, dataset: Any, units: Units | None) -> None:
    assert args.expected_batch_size is not None, "it is derived when the arguments are made"
    validate_training_data(
        dataset,
        units,
        target_delta=args.target_delta,
        expected_batch_size=args.expected_batch_size,
        unit=args.privacy_unit,
    )


def _refuse_more_rows(made: int, given: int, unit: PrivacyUnit) -> None:
    """Raise ValueError if a base class made more rows of the given ones than the guarantee is for."""
    max_examples_per_person = unit.max_examples_per_person if unit.column is None else 1
    if made > given * max_examples_per_person and not unit.is_person:
        least = -(-made // given)
        raise ValueError(
            f"the trainer made {made} rows of the {given} of train_dataset, but max_examples_per_person="
            f"{max_examples_per_person}: epsilon would be for one row that was made. Let it keep one row of each, or "
            f"set max_examples_per_person to the rows that it makes of one ({least} or more)."
        )


def _refuse_state_of_accelerate(*args: Any) -> None:
    raise ValueError(
        "accelerate's save_state and load_state know nothing of the steps that were taken, which epsilon is made of. "
        "Let the trainer save (save_strategy, or control.should_save = True in a callback), and go on with "
        "trainer.train(resume_from_checkpoint=...)."
    )


def _warn_about_evaluation(args: DPTrainingArguments, train_dataset: Any, eval_dataset: Any) -> None:
    if _evaluates_on(train_dataset, eval_dataset):
        logger.warning(
            "eval_dataset has the rows of train_dataset: what evaluation prints is computed from private rows without "
            "noise; epsilon does not cover it."
        )
    elif choices := _choices(args):
        logger.warning("the evaluation data choose %s; epsilon says nothing about their rows.", " and ".join(choices))


def _evaluates_on(train_dataset: Any, eval_dataset: Any, metric: str | None = None) -> bool:
    """Return True if some of the evaluation data are rows of ``train_dataset``, as far as it is known where rows are
    stored; of several data sets, those that ``metric`` is of, if it is given and of one of them."""
    several = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    of_metric = [name for name in several if metric and metric.removeprefix("eval_").startswith(f"{name}_")]
    return any(have_rows_in_common(train_dataset, several[name]) for name in of_metric or several)


_FOLLOW_METRICS = {"ReduceLROnPlateau", "GreedyLR"}  # schedulers that Trainer steps with a metric


def _choices(args: DPTrainingArguments, scheduler: Any = None) -> list[str]:
    """Say in words what of a training with these arguments, and with a scheduler that was handed over, follows the
    metrics of evaluation."""
    schedule, saves = (str(getattr(x, "value", x)) for x in (args.lr_scheduler_type, args.save_strategy))
    own = next((cls.__name__ for cls in type(scheduler).__mro__ if cls.__name__ in _FOLLOW_METRICS), None)
    keeps_best = args.metric_for_best_model is not None and args.save_total_limit is not None and saves != "no"
    choices = {
        "the best checkpoint (load_best_model_at_end)": args.load_best_model_at_end,
        'which checkpoints are kept (save_strategy="best")': saves == "best",
        "which checkpoints are kept (metric_for_best_model with save_total_limit)": keeps_best
        and not args.load_best_model_at_end,
        f"the learning rate (lr_scheduler_type={schedule!r})": schedule in ("reduce_lr_on_plateau", "greedy"),
        f"the learning rate ({own})": own is not None,
    }
    return [what for what, follows in choices.items() if follows]


def _also_released(args: DPTrainingArguments, eval_dataset: Any, choices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what leaves the training besides the noised gradients, and whether epsilon covers it."""
    if args.log_raw_metrics:
        yield {"what": "the loss of training batches, without noise (log_raw_metrics)", "covered": False}
    if eval_dataset is not None:
        yield {"what": "metrics on evaluation data, which tell of the rows of that data", "covered": False}
    for choice in choices:
        yield {"what": f"{choice}, by evaluation data", "covered": False}
