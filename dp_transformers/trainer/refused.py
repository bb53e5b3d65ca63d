"""Refusals of trainers: settings of transformers and accelerate that differential privacy cannot be combined with, and
classes and attributes that replace a method which the guarantee stands on."""

from __future__ import annotations

import logging
from typing import Any, cast

from accelerate.utils import DynamoBackend
from transformers import Trainer, TrainingArguments
from transformers.debug_utils import DebugOption

logger = logging.getLogger(__name__)

# ---- arguments ----

RECORD_THE_CONSOLE = {"ClearMLCallback", "CometCallback", "NeptuneCallback", "SwanLabCallback", "WandbCallback"}
FSDP_FLAG = "ACCELERATE_USE_FSDP"  # `accelerate launch` sets this environment variable
_COMPILED = "the compiler would trace the hooks that see an example's gradient, and norms would come out wrong"
_NEFTUNE = "its noise depends on the length the batch was padded to, so on the other examples; leave it None"
_ENGINE = "its engine averages and clips gradients on its own; use FSDP2, or DDP"
_READY_MADE = ("SFTTrainer", "DPOTrainer", "RewardTrainer")  # of TRL, which this package makes private

# Arguments of Trainer's that must be false, or what _ALLOWED says, and why.
_ARGUMENTS = {
    "fp16": "loss scaling changes the norms that are clipped; use bf16=True",
    "dataloader_drop_last": "a private draw has no last batch to drop; leave it False",
    "train_sampling_strategy": "the draws of a step are those that epsilon is computed for; leave it at 'random'",
    "auto_find_batch_size": "it restarts training on changed weights; lower per_device_train_batch_size",
    "dataloader_in_order": "draws must arrive in the order in which they were made; leave it True",
    "include_num_input_tokens_seen": "the number of tokens drawn is private and not covered by epsilon; leave it 'no'",
    "skip_memory_metrics": "the memory that is taken tells how large single draws were; leave it True",
    "deepspeed": _ENGINE,
    "parallelism_config": "one example's gradient would lie on several processes; use FSDP2 or tensor parallelism",
    "torch_compile": f"{_COMPILED}; leave it False",
    "use_liger_kernel": "its fused loss averages over the batch, so there is no loss per example; leave it False",
    "neftune_noise_alpha": _NEFTUNE,
    "fsdp_config": "FSDP1 mixes the gradients of parameters; set fsdp=True, fsdp_config={'version': 2}",
    "debug": "it prints the range of private activations, and one example could stop the training; leave it out",
    "optim": "it updates parameters during backward, before noise is added; use for example adamw_torch",
    "checkpointing": "reentrant checkpointing hides the graph that norms are taken from; use {'use_reentrant': False}",
}
_ALLOWED = {
    "train_sampling_strategy": "random",
    "dataloader_in_order": True,
    "include_num_input_tokens_seen": "no",
    "skip_memory_metrics": True,
}


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise ValueError if an argument of Trainer's is set that differential privacy cannot be combined with."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    # transformers before 5.23 knows the other name only
    renamed = hasattr(args, "activation_checkpointing_kwargs")
    checkpointing = "activation_checkpointing_kwargs" if renamed else "gradient_checkpointing_kwargs"
    # TrainingArguments have made dictionaries of texts
    fsdp_config = cast("dict[str, Any]", args.fsdp_config or {})
    looked_into = {
        "fsdp_config": args.fsdp and (fsdp_config.get("xla") or int(fsdp_config.get("version", 2)) != 2),
        "debug": DebugOption.UNDERFLOW_OVERFLOW in args.debug,
        "optim": optimizer.endswith("layerwise") or "lomo" in optimizer,
        "checkpointing": (getattr(args, checkpointing) or {}).get("use_reentrant"),
    }
    for known, why in _ARGUMENTS.items():
        name = checkpointing if known == "checkpointing" else known
        value = getattr(args, name)
        is_refused = value != _ALLOWED[known] if known in _ALLOWED else looked_into.get(known, value)
        if is_refused:
            raise ValueError(f"{name}={value!r} cannot be used with differential privacy: {why}.")


def is_ready_made(cls: type) -> bool:
    """Return True for a trainer of TRL of which this package has a private one."""
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


# What `accelerate launch`, a set_* method or os.environ may bring in besides, and why it is refused.
_SETTINGS = {
    "mixed precision fp16": "loss scaling changes the norms that are clipped; use bf16",
    "gradient accumulation": "set gradient_accumulation_steps to 1 in all of these, and expected_batch_size in the "
    "arguments, which is split into physical batches on its own",
    "FSDP1": "its flat parameters hide which gradient is whose; use FSDP2 (fsdp_config={'version': 2}, or "
    f"fsdp_version: 2 in accelerate's configuration). If you asked for no FSDP, take {FSDP_FLAG} out of os.environ",
    "splitting the model while it loads (DistributedConfig)": "Trainer of transformers before 5.19 does not know of "
    "it; install transformers>=5.19",
    "context or sequence parallelism": "an example would lie on several processes; use tensor parallelism or FSDP2",
    "log_raw_metrics beside a tracker that records the console": "it would save and push the losses without noise; "
    "give report_to tensorboard, trackio or mlflow, or leave log_raw_metrics False",
    "torch.compile (dynamo_backend)": f"{_COMPILED}; set dynamo_backend to 'no' in accelerate's configuration",
    "NEFTune (neftune_noise_alpha)": _NEFTUNE,
    "DeepSpeed": _ENGINE,
}


def refuse_settings(trainer: Trainer) -> None:
    """Raise ValueError if `accelerate launch` or a set_* method brought in what DPTrainingArguments refuses."""
    args, accelerator = trainer.args, trainer.accelerator
    plugin, dynamo = getattr(accelerator.state, "fsdp_plugin", None), accelerator.state.dynamo_plugin
    trackers = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
    are_on = (
        accelerator.mixed_precision == "fp16",
        max(args.gradient_accumulation_steps, accelerator.gradient_accumulation_steps) > 1,
        plugin is not None and plugin.fsdp_version != 2,
        getattr(trainer.model, "_device_mesh", None) is not None
        and not hasattr(trainer, "is_distributed_loading_by_transformers"),
        trainer.get_cp_size() * trainer.get_sp_size() > 1,
        getattr(args, "log_raw_metrics", False) and not trackers.isdisjoint(RECORD_THE_CONSOLE),
        getattr(dynamo, "backend", DynamoBackend.NO) != DynamoBackend.NO,
        trainer.neftune_noise_alpha,
        trainer.is_deepspeed_enabled,
    )
    for (name, why), is_on in zip(_SETTINGS.items(), are_on, strict=True):
        if is_on:
            raise ValueError(
                f"{name} is switched on (by the arguments, accelerate's configuration or os.environ) and cannot be "
                f"used with differential privacy: {why}."
            )


# ---- classes ----

_BY_SAMPLING = "batches are drawn by the sampling that epsilon is computed for"
# DPTrainerMixin replaces these. A class that comes before it in the order of bases would undo that.
_OF_MIXIN = {
    "training_step": "it clips, adds noise and counts the step. Watch training in on_pre_optimizer_step of a callback",
    "compute_loss": "it returns one loss for the whole batch and is not used in private training. Pass "
    "per_example_loss_func=f with f(outputs, labels) -> (B,), or f(model, inputs) -> (B,)",
    "get_train_dataloader": f"{_BY_SAMPLING}. Pass train_dataset and data_collator",
    "_get_train_sampler": f"{_BY_SAMPLING}. Let per_example_loss_func weigh the losses",
    "_clip_grad_norm": "the gradient has noise already, and examples are clipped before. Set max_grad_norm",
    "_get_num_items_in_batch": "no example's loss may be divided by what others contain. Pass per_example_loss_func",
    "floating_point_ops": "it would save how many examples were drawn. Count operations with Trainer, on public data",
    "_track_num_input_tokens": "it would save how many tokens were drawn. Count tokens with Trainer, on public data",
    "_save_rng_state": "a checkpoint must not hold the random numbers of dropout",
    "_load_rng_state": "random numbers must be fresh on resume",
}
_ONE_ROW = "a batch must keep one row for each example. Change batches in data_collator"
# DPTrainerMixin calls these, or Trainer calls them around it. No other class may replace them, whatever the order of
# bases.
_OF_THE_LOOP = {
    "train": "it opens the ledger, and goes on from what was spent. Give another name to a method that calls it",
    "_inner_training_loop": "it is the loop whose every step is clipped, noised and counted. Use callbacks",
    "_prepare_for_training": "it attaches the clipper, and refuses optimizers that step without noise",
    "_run_epoch": "it runs one private step for each draw. Use callbacks",
    "get_batch_samples": "it takes draws one after the other, each as a whole",
    "_prepare_input": _ONE_ROW,
    "_get_collator_with_removed_columns": _ONE_ROW,
    "_prepare_inputs": _ONE_ROW,
}
_TRUSTED = ("dp_transformers.", "transformers.")
_REWARDS = "it compares rewards within a group of sampled completions. Make pairs of them for DPDPOTrainer"
# Trainers of TRL whose losses, or whose batches, are not made of one row each.
_OVER_THE_BATCH = {
    "KTOTrainer": "it measures a divergence over the whole batch. Train on pairs with DPDPOTrainer, or on the desired "
    "completions with DPSFTTrainer",
    "GRPOTrainer": _REWARDS,
    "RLOOTrainer": _REWARDS,
}


def refuse_order_of_bases(cls: type, mixin: type) -> None:
    """Raise TypeError if Trainer comes before ``mixin`` in the order of bases: ``cls`` would train without privacy."""
    order = cls.__mro__
    if Trainer not in order or order.index(mixin) < order.index(Trainer):
        return
    private = [base.__name__ for base in cls.__bases__ if issubclass(base, mixin)]
    others = [base.__name__ for base in cls.__bases__ if not issubclass(base, mixin)]
    first = next(base.__name__ for base in cls.__bases__ if issubclass(base, Trainer))
    raise TypeError(
        f"{first} comes before {private[0]} in the order of bases of {cls.__name__}, so its training without privacy "
        f"would be used. Put {private[0]} first: class {cls.__name__}({', '.join([*private, *others])})."
    )


def refuse_trainers_over_the_batch(cls: type) -> None:
    """Raise TypeError if ``cls`` derives from a trainer of TRL whose loss compares the examples of a batch."""
    for base in cls.__mro__:
        if base.__module__.startswith("trl.") and base.__name__ in _OVER_THE_BATCH:
            raise TypeError(
                f"{base.__name__} of TRL cannot be made private ({cls.__name__} tries to): "
                f"{_OVER_THE_BATCH[base.__name__]}."
            )


def refuse_overrides(trainer: Any, mixin: type) -> None:
    """Raise ValueError if a class or an attribute of ``trainer`` replaces a method that the guarantee of ``mixin``
    stands on."""
    cls = type(trainer)
    order, whose = cls.__mro__, _private_class(cls).__name__
    if not isinstance(trainer, Trainer):
        raise ValueError(
            f"{cls.__name__} is no Trainer. Give it one to make private: class {cls.__name__}({whose}, Trainer)."
        )
    for name, why in {**_OF_MIXIN, **_OF_THE_LOOP}.items():
        if name in vars(trainer):
            raise ValueError(
                f"'{name}' was set on this {cls.__name__}, but {whose} needs its own: {why}. Remove that assignment."
            )
        checked = order[: order.index(mixin) + 1] if name in _OF_MIXIN else order
        having = [c for c in checked if name in vars(c)]
        if foreign := [c for c in having if not c.__module__.startswith(_TRUSTED)]:
            way_out = _way_out(cls, mixin, name, foreign[0])
            raise ValueError(f"{foreign[0].__name__} overrides {name}, but {whose} needs its own: {why}. {way_out}")
        if patched := [c for c in having if not _module_of(vars(c)[name]).startswith(_TRUSTED)]:
            patch = vars(patched[0])[name]
            raise ValueError(
                f"{patched[0].__name__}.{name} was replaced by {_module_of(patch)}."
                f"{getattr(patch, '__qualname__', patch)}, but {whose} needs the original: {why}. Undo that patch "
                "before the trainer is made."
            )


def _way_out(cls: type, mixin: type, name: str, owner: type) -> str:
    if name in _OF_MIXIN and owner in cls.__bases__ and not issubclass(owner, mixin):
        first = next(c.__name__ for c in cls.__bases__ if issubclass(c, mixin))
        others = [c.__name__ for c in cls.__bases__ if c.__name__ != first]
        return f"Put {first} first: class {cls.__name__}({', '.join([first, *others])})."
    return f"Delete {owner.__name__}.{name}" + ("." if owner is cls else ", or derive from a class without it.")


def refuse_unknown_loss(cls: type, mixin: type) -> None:
    """Raise ValueError if a class behind ``mixin`` has a ``compute_loss`` of its own: it does not tell the loss of
    each example."""
    if owner := replaced_owner(cls, mixin, "compute_loss"):
        if is_ready_made(owner):
            raise ValueError(
                f"{owner.__name__} has a compute_loss of its own, which returns one loss for the whole batch. Use "
                f"dp_transformers.DP{owner.__name__} with DP{owner.__name__.replace('Trainer', 'Config')}."
            )
        raise ValueError(
            f"{owner.__name__} has a compute_loss of its own, which returns one loss for the whole batch, from which "
            "no example's gradient can be clipped. Pass per_example_loss_func=f with f(outputs, labels) -> (B,), or "
            "f(model, inputs) -> (B,) for one without labels. If it is the loss of the model's head, f = "
            "dp_transformers.losses.heads.find_per_example_loss(model)."
        )


def warn_about_replaced(cls: Any, mixin: type) -> None:
    """Warn about methods that ``mixin`` replaces in the classes behind it, which are therefore not called."""
    for name in ("training_step", "get_train_dataloader"):
        if name in cls.replaced_knowingly:
            continue
        if owner := replaced_owner(cls, mixin, name):
            replaced, why = f"{owner.__name__}.{name}", _OF_MIXIN[name]
            logger.warning("%s is not called: %s replaces it. %s.", replaced, _private_class(cls).__name__, why)


def replaced_owner(cls: type, mixin: type, name: str) -> type | None:
    """Return the class behind ``mixin`` in the order of bases, other than those of transformers, that defines this
    method."""
    behind = cls.__mro__[cls.__mro__.index(mixin) + 1 :]
    return next((c for c in behind if name in vars(c) and not c.__module__.startswith(_TRUSTED)), None)


def _private_class(cls: type) -> type:
    """Return the class of this package that ``cls`` derives from. Messages use its name."""
    return next(c for c in cls.__mro__ if c.__module__.startswith("dp_transformers."))


def _module_of(method: Any) -> str:
    """Return the module in which a method was written, or that of its type, as for a partial."""
    return getattr(method, "__module__", None) or type(method).__module__
