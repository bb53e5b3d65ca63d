"""This package makes transformers' trainers private: DPTrainer, DPSeq2SeqTrainer, DPTrainerMixin and arguments."""

from .dp_config import DPSeq2SeqTrainingArguments, DPTrainingArguments
from .dp_trainer import DPSeq2SeqTrainer, DPTrainer
from .mixin import DPTrainerMixin

__all__ = ["DPSeq2SeqTrainer", "DPSeq2SeqTrainingArguments", "DPTrainer", "DPTrainerMixin", "DPTrainingArguments"]
