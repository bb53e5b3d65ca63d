"""DPTrainer: transformers' Trainer made private."""

from __future__ import annotations

from transformers import Trainer

from .mixin import DPTrainerMixin


class DPTrainer(DPTrainerMixin, Trainer):
    """[`~transformers.Trainer`] whose training is (ε, δ)-differentially private in the training examples.

    Swap `Trainer` for `DPTrainer` and `TrainingArguments` for [`DPTrainingArguments`]; everything else stays: data sets, collators,
    callbacks, PEFT models, evaluation, prediction, saving, resuming. One training step is one Poisson draw from the training set, of
    `expected_batch_size` examples on average; `global_step` counts draws. [`DPTrainerMixin`] describes the arguments, and makes any other
    subclass of Trainer private.
    """
