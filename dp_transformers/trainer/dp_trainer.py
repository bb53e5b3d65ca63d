"""DPTrainer and DPSeq2SeqTrainer are transformers' trainers with the private step of DPTrainerMixin."""

from __future__ import annotations

from transformers import Seq2SeqTrainer, Trainer

from .mixin import DPTrainerMixin


class DPTrainer(DPTrainerMixin, Trainer):
    """[`~transformers.Trainer`] whose training is (ε, δ)-differentially private in the training examples.

    Swap `Trainer` for `DPTrainer` and `TrainingArguments` for [`DPTrainingArguments`]; everything else stays: data
    sets, collators, callbacks, PEFT models, evaluation, prediction, saving, resuming. One training step is one Poisson
    draw from the training set, of `expected_batch_size` examples on average; `global_step` counts draws.
    [`DPTrainerMixin`] describes the arguments, and makes any other subclass of Trainer private.

    Example::

        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from dp_transformers import DPTrainer, DPTrainingArguments
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        ... )
        >>> rows = [{"input_ids": [i % 30, 1, 2], "labels": i % 2} for i in range(100)]
        >>> args = DPTrainingArguments(
        ...     "outputs", target_epsilon=8.0, target_delta=1e-3, expected_batch_size=20, max_steps=5, use_cpu=True,
        ...     disable_tqdm=True,
        ... )
        >>> trainer = DPTrainer(BertForSequenceClassification(config), args, train_dataset=rows)
        >>> result = trainer.train()
        {'train_runtime': ...}
        >>> spent = trainer.privacy_spent()
        >>> spent.steps, spent.epsilon <= 8.0
        (5, True)
    """


class DPSeq2SeqTrainer(DPTrainerMixin, Seq2SeqTrainer):
    """[`~transformers.Seq2SeqTrainer`] with the private training of [`DPTrainer`]: it evaluates by generating, if
    `predict_with_generate` of its [`DPSeq2SeqTrainingArguments`] says so.

    Example::

        >>> from transformers import Seq2SeqTrainer
        >>> from dp_transformers import DPSeq2SeqTrainer
        >>> issubclass(DPSeq2SeqTrainer, Seq2SeqTrainer), DPSeq2SeqTrainer.trains_privately
        (True, True)
    """
