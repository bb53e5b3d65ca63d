"""These functions refuse classes and attributes that replace a method which the guarantee stands on."""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer

from .refused_settings import is_ready_made

logger = logging.getLogger(__name__)

# DPTrainerMixin replaces these. A class that comes before it in the order of bases would undo that.
_OF_MIXIN = {
    "training_step": "it clips, adds noise and counts the step. To watch training, use a callback "
    "(on_pre_optimizer_step sees the noised gradients)",
    "compute_loss": "it returns one loss for the whole batch and is not used in private training. Pass "
    "per_example_loss_func=f with f(outputs, labels) -> (B,), or f(model, inputs) -> (B,)",
    "get_train_dataloader": "it draws the batches by the sampling that epsilon is computed for. Pass "
    "train_dataset and data_collator",
    "_get_train_sampler": "batches are drawn by the sampling that epsilon is computed for, with the same "
    "probability for every row. Let per_example_loss_func weigh the losses",
    "_clip_grad_norm": "the gradient that it sees has noise already, and examples are clipped before. Set "
    "max_grad_norm",
    "_get_num_items_in_batch": "no example's loss may be divided by what the others contain. Pass "
    "per_example_loss_func for a loss of your own",
    "floating_point_ops": "it would save how many examples were drawn, which is private. Use Trainer, on public data, "
    "to count operations",
    "_track_num_input_tokens": "it would save how many tokens were drawn, which is private. Use Trainer, on public "
    "data, to count tokens",
    "_save_rng_state": "a checkpoint must not hold the random numbers of dropout",
    "_load_rng_state": "random numbers must be fresh on resume",
}
# DPTrainerMixin calls these, or Trainer calls them around it. No other class may replace them, whatever the order of
# bases.
_OF_THE_LOOP = {
    "train": "it opens the ledger, and goes on from everything that was spent. Give another name to a method of "
    "your own that calls it",
    "_inner_training_loop": "it is the loop whose every step is clipped, noised and counted. Use callbacks",
    "_prepare_for_training": "it attaches the clipper, and refuses optimizers that step without noise",
    "_run_epoch": "it runs one private step for each draw. Use callbacks",
    "get_batch_samples": "it takes draws one after the other, each as a whole",
    "_prepare_input": "a batch must keep one row for each example. Change batches in data_collator",
    "_get_collator_with_removed_columns": "it hands the batch to data_collator, where rows are looked at",
    "_prepare_inputs": "a batch must keep one row for each example. Change batches in data_collator",
}
_TRUSTED = ("dp_transformers.", "transformers.")
# Trainers of TRL whose losses, or whose batches, are not made of one row each.
_OVER_THE_BATCH = {
    "KTOTrainer": "it measures a divergence over the whole batch, on completions under the prompts of other rows. "
    "Train on pairs with DPDPOTrainer, or on the desired completions with DPSFTTrainer",
    "GRPOTrainer": "advantages are compared within a group of sampled completions, which the trainer repeats and "
    "shuffles over batches, so a row of a batch is no example. Make pairs of completions, and train with DPDPOTrainer",
    "RLOOTrainer": "rewards are compared within a group of sampled completions, which the trainer repeats and "
    "shuffles over batches, so a row of a batch is no example. Make pairs of completions, and train with DPDPOTrainer",
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
        owner = next((c for c in checked if name in vars(c) and not c.__module__.startswith(_TRUSTED)), None)
        patched = next(
            (c for c in checked if name in vars(c) and not _module_of(vars(c)[name]).startswith(_TRUSTED)), None
        )
        if owner is None and patched is not None:
            patch = vars(patched)[name]
            where = f"{_module_of(patch)}.{getattr(patch, '__qualname__', patch)}"
            raise ValueError(
                f"{patched.__name__}.{name} was replaced by {where}, but {whose} "
                f"needs the original: {why}. Undo that patch before the trainer is made."
            )
        if owner is not None:
            if name in _OF_MIXIN and owner in cls.__bases__ and not issubclass(owner, mixin):
                first = next(c.__name__ for c in cls.__bases__ if issubclass(c, mixin))
                others = [c.__name__ for c in cls.__bases__ if c.__name__ != first]
                way_out = f"Put {first} first: class {cls.__name__}({', '.join([first, *others])})."
            else:
                way_out = f"Delete {owner.__name__}.{name}" + (
                    "." if owner is cls else ", or derive from a class without it."
                )
            raise ValueError(f"{owner.__name__} overrides {name}, but {whose} needs its own: {why}. {way_out}")


def refuse_unknown_loss(cls: type, mixin: type) -> None:
    """Raise ValueError if a class behind ``mixin`` has a ``compute_loss`` of its own: it does not tell the loss of
    each example."""
    if owner := replaced_owner(cls, mixin, "compute_loss"):
        if is_ready_made(owner):
            raise ValueError(
                f"{owner.__name__} has a compute_loss of its own, which returns one loss for the whole batch. Use "
                f"dp_transformers.DP{owner.__name__} with DP{owner.__name__.replace('Trainer', 'Config')}: that is "
                f"{owner.__name__} with a loss for each example."
            )
        raise ValueError(
            f"{owner.__name__} has a compute_loss of its own, which returns one loss for the whole batch, from which "
            "no example's gradient can be clipped. Pass per_example_loss_func=f with f(outputs, labels) -> (B,), the "
            "same loss for each example, or f(model, inputs) -> (B,) for one without labels. If it is the loss of the "
            "model's head, f = dp_transformers.losses.heads.find_per_example_loss(model). Evaluation goes on to use "
            f"{owner.__name__}.compute_loss."
        )


def warn_about_replaced(cls: Any, mixin: type) -> None:
    """Warn about methods that ``mixin`` replaces in the classes behind it, which are therefore not called."""
    for name in ("training_step", "get_train_dataloader"):
        if name in cls.replaced_knowingly:
            continue
        if owner := replaced_owner(cls, mixin, name):
            logger.warning(
                "%s.%s is not called: %s replaces it. %s.",
                owner.__name__,
                name,
                _private_class(cls).__name__,
                _OF_MIXIN[name],
            )


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
