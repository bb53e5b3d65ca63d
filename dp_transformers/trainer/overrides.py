"""Which methods of a trainer the guarantee stands on, and who may not replace them."""

from __future__ import annotations

from typing import Any

# Replaced by DPTrainer; whoever comes before it in the order of bases would undo that.
_OF_DP_TRAINER = {
    "training_step": "it clips, adds noise and counts the step. To watch training, use a callback (on_pre_optimizer_step sees the noised gradients)",
    "compute_loss": "it returns one loss for the whole batch and is not used in private training. Pass per_example_loss_func=f with "
    "f(outputs, labels) -> (B,)",
    "get_train_dataloader": "it draws the batches by Poisson sampling, which epsilon is computed for. Pass train_dataset and data_collator",
    "_clip_grad_norm": "the gradient that it sees has noise already, and examples are clipped before. Set max_grad_norm",
    "_get_num_items_in_batch": "no example's loss may be divided by what the others contain. Pass per_example_loss_func for a loss of your own",
    "_save_rng_state": "a checkpoint must not hold the random numbers of dropout",
    "_load_rng_state": "random numbers must be fresh on resume",
}
# Called by DPTrainer, or by Trainer around it: no class but theirs may replace them, whatever the order of bases.
_OF_THE_LOOP = {
    "train": "it opens the ledger, and goes on from everything that was spent. Give another name to a method of your own that calls it",
    "_inner_training_loop": "it is the loop whose every step is clipped, noised and counted. Use callbacks",
    "_prepare_for_training": "it attaches the clipper, and refuses optimizers that step without noise",
    "_run_epoch": "it runs one private step for each draw. Use callbacks",
    "get_batch_samples": "it takes draws one after the other, each as a whole",
    "_prepare_input": "a batch must keep one row for each example. Change batches in data_collator",
    "_get_collator_with_removed_columns": "it hands the batch to data_collator, where rows are looked at",
    "_prepare_inputs": "a batch must keep one row for each example. Change batches in data_collator",
}
_TRUSTED = ("dp_transformers.", "transformers.")


def refuse_overrides(trainer: Any, base: type) -> None:
    """Raise ValueError if a class or an attribute of ``trainer`` replaces a method of ``base`` (DPTrainer) that the guarantee stands on."""
    cls = type(trainer)
    for name, why in {**_OF_DP_TRAINER, **_OF_THE_LOOP}.items():
        if name in vars(trainer):
            raise ValueError(f"'{name}' was set on this {cls.__name__}, but {base.__name__} needs its own: {why}. Remove that assignment.")
        before = cls.__mro__[: cls.__mro__.index(base) + 1] if name in _OF_DP_TRAINER else cls.__mro__
        owner = next((c for c in before if name in vars(c) and not c.__module__.startswith(_TRUSTED)), None)
        patched = next((c for c in before if name in vars(c) and not vars(c)[name].__module__.startswith(_TRUSTED)), None)
        if owner is None and patched is not None:
            patch = vars(patched)[name]
            raise ValueError(
                f"{patched.__name__}.{name} was replaced by {patch.__module__}.{patch.__qualname__}, but {base.__name__} needs the original: {why}. "
                "Undo that patch before the trainer is made."
            )
        if owner is not None:
            if name in _OF_DP_TRAINER and owner in cls.__bases__ and not issubclass(owner, base):
                first = next(c.__name__ for c in cls.__bases__ if issubclass(c, base))
                way_out = f"Put {first} first: class {cls.__name__}({first}, {owner.__name__})."
            else:
                way_out = f"Delete {owner.__name__}.{name}" + ("." if owner is cls else ", or derive from a class without it.")
            raise ValueError(f"{owner.__name__} overrides {name}, but {base.__name__} needs its own: {why}. {way_out}")
