"""DPSFTTrainer is TRL's SFTTrainer with the private step of DPTrainerMixin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from trl import SFTConfig, SFTTrainer

from ..losses.heads import IGNORE_INDEX, causal_lm_loss, next_token_losses
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

    TRL prepares the data: texts, chats, prompts with completions, and tokens. The loss may cover completions or
    assistant turns only. A row is an example. Its loss is the mean over its own labelled tokens, where TRL divides by
    their number in the whole batch. A row may have one image, for which the processor must make one row.

    Args:
        model, args, train_dataset, ...: As in SFTTrainer; `args` must be a [`DPSFTConfig`].
        per_example_loss_func (`Callable`, *optional*): As in [`DPTrainer`], instead of SFTTrainer's loss.

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
            token = getattr(self.processing_class, "image_token_id", None)
            if token is None:
                raise ValueError(
                    f"{type(self.processing_class).__name__} has no image_token_id, so images cannot be assigned to "
                    "texts. Use a processor that has one, or train on texts."
                )
            self.data_collator = partial(one_image_each, self.data_collator, token)

    def example_losses(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Compute the (B,) losses of a training batch: the mean over the labelled tokens of each row."""
        logits = outputs.logits
        # prompt learning puts positions without labels before the text
        labels = F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=IGNORE_INDEX)
        if self.args.loss_type != "dft":
            return causal_lm_loss(logits, labels, label_smoothing=self.args.label_smoothing_factor)
        losses_bt = next_token_losses(logits, labels)
        losses_bt = losses_bt * torch.exp(-losses_bt).detach()
        return losses_bt.sum(1) / (labels[:, 1:] != IGNORE_INDEX).sum(1).clamp(min=1)


def one_image_each(
    collate: Callable[[list[dict]], dict[str, Any]], placeholder: int, examples: list[dict]
) -> dict[str, Any]:
    """Return ``collate(examples)``. Raise ValueError unless each image is the row of its example.

    Models put the parts of all images, one after the other, at the ``placeholder`` tokens of the texts. So each text
    must have as many placeholders as its own image has parts.
    """
    for example in examples:
        if (number := _number_of_images(example)) != 1:
            raise ValueError(
                f"a row of train_dataset has {number} images, and private training needs exactly one, so that images "
                "can be assigned to examples. Keep the rows with one image, or put several images side by side into "
                "one."
            )
    batch = collate(examples)
    for name, x in batch.items():
        if isinstance(x, torch.Tensor) and (not x.dim() or len(x) != len(examples)):
            raise ValueError(
                f"the processor makes '{name}' of shape {tuple(x.shape)} for {len(examples)} rows: it joins the parts "
                "of all images, so these cannot be assigned to examples. Use a model with a processor that makes one "
                "row of each image, as LLaVA's does."
            )
    parts_b = (batch["input_ids"] == placeholder).sum(1)
    if (parts_b != parts_b[0]).any():
        raise ValueError(
            f"the texts of a batch have from {int(parts_b.min())} to {int(parts_b.max())} image tokens, so a part of "
            "one example's image could be put into another's text. Resize all images to one size, write no image "
            "tokens into the texts, and do not truncate them (max_length=None)."
        )
    return batch


def _number_of_images(example: dict) -> int:
    """Return the number of images of a row."""
    images = example["images"] if "images" in example else [example.get("image")]
    each = [x if isinstance(x, (list, tuple)) else [x] for x in images or ()]
    return sum(x is not None for some in each for x in some)
