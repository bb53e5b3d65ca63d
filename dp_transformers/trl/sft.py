"""DPSFTTrainer is TRL's SFTTrainer with the private step of DPTrainerMixin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from trl import SFTConfig, SFTTrainer

from ..losses import IGNORE_INDEX, causal_lm_loss, next_token_losses
from ..trainer import DPTrainingArguments
from .base import TRLMixin, refuse_trl_settings


@dataclass
class DPSFTConfig(SFTConfig, DPTrainingArguments):
    """Arguments of [`DPSFTTrainer`]: those of TRL's SFTConfig, with its defaults, and the privacy parameters of
    [`DPTrainingArguments`].

    Example::

        >>> from dp_transformers import DPSFTConfig
        >>> args = DPSFTConfig(
        ...     "outputs", target_epsilon=8.0, target_delta=1e-6, expected_batch_size=256, use_cpu=True,
        ...     activation_checkpointing=True,
        ... )
        >>> args.learning_rate, args.max_length, args.expected_batch_size
        (2e-05, 1024, 256)
    """

    def __post_init__(self) -> None:
        refuse_trl_settings(self)
        super().__post_init__()


class DPSFTTrainer(TRLMixin, SFTTrainer):
    """TRL's SFTTrainer whose training is (ε, δ)-differentially private in the rows of the training data.

    TRL prepares the data: texts, chats, prompts with completions, and tokens; the loss may be that of completions or
    of the assistant alone. A row is an example. Its loss is the mean over its own tokens that count, where TRL divides
    by their number in the whole batch. Rows with images are refused.

    Args:
        model, args, train_dataset, ...: As in SFTTrainer; `args` must be a [`DPSFTConfig`].
        per_example_loss_func (`Callable`, *optional*): As in [`DPTrainer`], in the place of SFTTrainer's loss.

    Raises:
        ValueError: at construction, for whatever would break the guarantee, with the way out.

    Example::

        >>> from dp_transformers import DPSFTTrainer
        >>> DPSFTTrainer.trains_privately
        True
    """

    config = DPSFTConfig
    args: DPSFTConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self._is_vision_dataset:
            raise ValueError(
                "rows with images cannot be trained on privately yet: the self-check cannot make up images that fit "
                "the placeholders in a text, so nobody would know whether clipping is exact. Train on texts, or put "
                "what the images say into the texts."
            )

    def example_losses(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Compute the (B,) losses of a training batch: the mean over the tokens of each row that have a label."""
        logits = outputs.logits
        # prompt learning puts positions before the text, for which there are no labels
        labels = F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=IGNORE_INDEX)
        if self.args.loss_type != "dft":
            return causal_lm_loss(logits, labels, label_smoothing=self.args.label_smoothing_factor)
        losses_bt = next_token_losses(logits, labels)
        losses_bt = losses_bt * torch.exp(-losses_bt).detach()
        return losses_bt.sum(1) / (labels[:, 1:] != IGNORE_INDEX).sum(1).clamp(min=1)
