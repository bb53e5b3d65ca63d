"""DPTrainer, DPTrainerMixin and DPTrainingArguments: transformers' Trainer with a differentially private step."""

from .dp_config import DPTrainingArguments
from .dp_trainer import DPTrainer
from .mixin import DPTrainerMixin

__all__ = ["DPTrainer", "DPTrainerMixin", "DPTrainingArguments"]
