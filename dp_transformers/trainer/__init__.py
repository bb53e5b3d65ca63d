"""DPTrainer and DPTrainingArguments: transformers' Trainer with a differentially private step."""

from .mixin import DPTrainer

__all__ = ["DPTrainer"]
