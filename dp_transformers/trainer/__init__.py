"""This package makes transformers' trainers private: DPTrainer, DPSeq2SeqTrainer, DPTrainerMixin and arguments."""

from .dp_config import DPSeq2SeqTrainingArguments, DPTrainingArguments
from .mixin import DPSeq2SeqTrainer, DPTrainer, DPTrainerMixin

__all__ = ["DPSeq2SeqTrainer", "DPSeq2SeqTrainingArguments", "DPTrainer", "DPTrainerMixin", "DPTrainingArguments"]
