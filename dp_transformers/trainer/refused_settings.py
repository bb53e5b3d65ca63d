"""These functions refuse settings of transformers and accelerate that differential privacy cannot be combined with,
and trainers that would ignore the privacy parameters."""

from __future__ import annotations

from typing import Any, cast

from accelerate.utils import DynamoBackend
from transformers import Trainer, TrainingArguments
from transformers.debug_utils import DebugOption

RECORD_THE_CONSOLE = {"ClearMLCallback", "CometCallback", "NeptuneCallback", "SwanLabCallback", "WandbCallback"}
_COMPILED = "the compiler would trace the hooks that see an example's gradient, and norms would come out wrong"
_NEFTUNE = "its noise depends on the length the batch was padded to, so on the other examples; leave it None"
FSDP_FLAG = "ACCELERATE_USE_FSDP"  # `accelerate launch` sets this environment variable


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise ValueError if an argument of Trainer's is set that differential privacy cannot be combined with."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    # transformers before 5.23 knows the other name only
    renamed = hasattr(args, "activation_checkpointing_kwargs")
    checkpointing = "activation_checkpointing_kwargs" if renamed else "gradient_checkpointing_kwargs"
    # TrainingArguments have made dictionaries of texts
    fsdp_config = cast("dict[str, Any]", args.fsdp_config or {})
    refused = {
        "fp16": (
            args.fp16,
            "loss scaling changes the norms that are clipped and skips steps that were accounted for; use bf16=True",
        ),
        "dataloader_drop_last": (
            args.dataloader_drop_last,
            "a private draw has no last batch to drop, and dropping examples would change the sample rate; "
            "leave it False",
        ),
        "train_sampling_strategy": (
            args.train_sampling_strategy != "random",
            "the draws of a step are those that epsilon is computed for; leave it at 'random' (they "
            "are sorted by length anyway)",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "it restarts training on weights that noisy steps have already changed; lower "
            "per_device_train_batch_size, it has no influence on the result",
        ),
        "dataloader_in_order": (
            not args.dataloader_in_order,
            "draws must arrive in the order in which they were made; leave it True",
        ),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen != "no",
            "the number of tokens drawn is a function of private data and not covered by epsilon; leave it 'no'",
        ),
        "skip_memory_metrics": (
            not args.skip_memory_metrics,
            "the memory that a training takes tells how large single draws and how long their examples were, and "
            "metrics are saved; leave it True",
        ),
        "deepspeed": (args.deepspeed, "its engine averages and clips gradients on its own; use FSDP2, or DDP"),
        "fsdp_config": (
            args.fsdp and (fsdp_config.get("xla") or int(fsdp_config.get("version", 2)) != 2),
            "only FSDP2 is supported, whose gradients can be told apart by parameter: fsdp=True, "
            "fsdp_config={'version': 2}",
        ),
        "parallelism_config": (
            args.parallelism_config,
            "one example's gradient would lie on several processes; leave it out, and use FSDP2 or tensor "
            "parallelism (tp_size of DistributedConfig)",
        ),
        "torch_compile": (args.torch_compile, f"{_COMPILED}; leave it False"),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "its fused loss averages over the batch, so there is no loss per example; leave it False",
        ),
        "debug": (
            DebugOption.UNDERFLOW_OVERFLOW in args.debug,
            "on the first inf or nan it prints the range of all activations, which are private, and one example "
            "could stop the training; leave it out",
        ),
        "neftune_noise_alpha": (args.neftune_noise_alpha, _NEFTUNE),
        "optim": (
            optimizer.endswith("layerwise") or "lomo" in optimizer,
            f"{optimizer} updates parameters during backward, before noise is added; use for example adamw_torch",
        ),
        checkpointing: (
            (getattr(args, checkpointing) or {}).get("use_reentrant"),
            "reentrant checkpointing hides the graph that norms are taken from; use {'use_reentrant': False}",
        ),
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"{name}={getattr(args, name)!r} cannot be used with differential privacy: {why}.")


_READY_MADE = ("SFTTrainer", "DPOTrainer", "RewardTrainer")  # of TRL, which this package makes private


def is_ready_made(cls: type) -> bool:
    """Whether it is a trainer of TRL of which this package has a private one."""
    return cls.__module__.startswith("trl.") and cls.__name__ in _READY_MADE


def refuse_other_trainers(trainer: Any) -> None:
    """Raise ValueError if ``trainer`` is a Trainer that would train without privacy."""
    if isinstance(trainer, Trainer) and not getattr(trainer, "trains_privately", False):
        name = type(trainer).__name__
        way_out = f"Make it private: class Private{name}(DPTrainerMixin, {name})."
        if type(trainer) is Trainer or is_ready_made(type(trainer)):
            way_out = f"Make a DP{name} instead."
        raise ValueError(
            f"these are DPTrainingArguments (epsilon, noise, clipping), but {name} is no DPTrainer and would train "
            f"without privacy. {way_out} For evaluation alone use TrainingArguments."
        )


def refuse_settings(trainer: Trainer) -> None:
    """Raise ValueError if `accelerate launch` or a set_* method brought in what DPTrainingArguments refuses."""
    for name, (is_on, why) in _refused(trainer).items():
        if is_on:
            raise ValueError(
                f"{name} is switched on (by the arguments, accelerate's configuration or os.environ) and cannot be "
                f"used with differential privacy: {why}."
            )


def _refused(trainer: Trainer) -> dict[str, tuple[Any, str]]:
    accelerator = trainer.accelerator
    trackers = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
    fsdp_plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return {
        "mixed precision fp16": (
            accelerator.mixed_precision == "fp16",
            "loss scaling changes the norms that are clipped; use bf16",
        ),
        "gradient accumulation": (
            max(trainer.args.gradient_accumulation_steps, accelerator.gradient_accumulation_steps) > 1,
            "set gradient_accumulation_steps to 1 in all of these, and expected_batch_size in the arguments, which is "
            "split into physical batches of per_device_train_batch_size on its own",
        ),
        "FSDP1": (
            fsdp_plugin is not None and fsdp_plugin.fsdp_version != 2,
            "its flat parameters hide which gradient is whose; use FSDP2 (fsdp_config={'version': 2} in the "
            "arguments, fsdp_version: 2 in accelerate's configuration). If you did not ask for FSDP at all, something "
            f"else in this process did: take {FSDP_FLAG} out of os.environ",
        ),
        "splitting the model while it loads (DistributedConfig)": (
            getattr(trainer.model, "_device_mesh", None) is not None
            and not hasattr(trainer, "is_distributed_loading_by_transformers"),
            "Trainer of transformers before 5.19 does not know of it, and prepares the split model once more; install "
            "transformers>=5.19",
        ),
        "context or sequence parallelism": (
            trainer.get_cp_size() * trainer.get_sp_size() > 1,
            "the positions of an example would lie on several processes; use tensor parallelism or FSDP2",
        ),
        "log_raw_metrics beside a tracker that records the console": (
            getattr(trainer.args, "log_raw_metrics", False) and not trackers.isdisjoint(RECORD_THE_CONSOLE),
            "the losses without noise are shown there, and would be saved and pushed with it; give report_to a "
            "tracker that takes metrics alone (tensorboard, trackio, mlflow), or leave log_raw_metrics False",
        ),
        "torch.compile (dynamo_backend)": (
            getattr(accelerator.state.dynamo_plugin, "backend", DynamoBackend.NO) != DynamoBackend.NO,
            f"{_COMPILED}; set dynamo_backend to 'no' in accelerate's configuration",
        ),
        "NEFTune (neftune_noise_alpha)": (trainer.neftune_noise_alpha, _NEFTUNE),
        "DeepSpeed": (
            trainer.is_deepspeed_enabled,
            "its engine averages and clips gradients on its own; use FSDP2, or DDP",
        ),
    }
