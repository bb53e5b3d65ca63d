"""This package makes transformers' Trainer private: DPTrainer, DPTrainerMixin and DPTrainingArguments."""

from .dp_config import DPTrainingArguments
from .dp_trainer import DPTrainer
from .mixin import DPTrainerMixin

__all__ = ["DPTrainer", "DPTrainerMixin", "DPTrainingArguments"]
