"""DPRewardTrainer is TRL's RewardTrainer with the private step of DPTrainerMixin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from trl import RewardConfig, RewardTrainer

from ..trainer import DPTrainingArguments
from .base import PairsMixin, refuse_trl_settings, sides


@dataclass
class DPRewardConfig(RewardConfig, DPTrainingArguments):
    """Arguments of [`DPRewardTrainer`]: those of TRL's RewardConfig, with its defaults, and the privacy parameters of
    [`DPTrainingArguments`].

    Example::

        >>> from dp_transformers import DPRewardConfig
        >>> args = DPRewardConfig(
        ...     "outputs", target_epsilon=8.0, target_delta=1e-6, expected_batch_size=256, use_cpu=True,
        ...     activation_checkpointing=True,
        ... )
        >>> args.learning_rate, args.expected_batch_size
        (0.0001, 256)
    """

    def __post_init__(self) -> None:
        refuse_trl_settings(self)
        super().__post_init__()


class DPRewardTrainer(PairsMixin, RewardTrainer):
    """TRL's RewardTrainer whose training is (ε, δ)-differentially private in the preferences.

    A preference is one example: the gradient of its loss, which depends on both texts, is clipped as a whole.

    Args:
        model, args, train_dataset, ...: As in RewardTrainer; `args` must be a [`DPRewardConfig`].
        per_example_loss_func (`Callable`, *optional*): As in [`DPTrainer`], instead of RewardTrainer's loss. Its
            batches hold (B, 2, T) tensors, the chosen text of each row before the rejected one.

    Raises:
        ValueError: at construction, for whatever would break the guarantee, with the way out.

    Example::

        >>> from dp_transformers import DPRewardTrainer
        >>> DPRewardTrainer.trains_privately
        True
    """

    config = DPRewardConfig
    args: DPRewardConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def example_losses(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Compute the (B,) losses of a training batch from the difference of the rewards of each row."""
        chosen_b, rejected_b = (
            model(**side, use_cache=False).logits.squeeze(-1).float()
            for side in sides(inputs, ["input_ids", "attention_mask"])
        )
        losses_b = -F.logsigmoid(chosen_b - rejected_b - inputs.get("margin", 0.0))
        if self.args.center_rewards_coefficient is not None:
            losses_b = losses_b + self.args.center_rewards_coefficient * (chosen_b + rejected_b) ** 2
        return losses_b
