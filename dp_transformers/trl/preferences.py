"""DPDPOTrainer and DPRewardTrainer are TRL's trainers on preferences, with the private step of DPTrainerMixin.

Shape legend: B preferences, T positions, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import nn
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.trainer.utils import use_adapter

from ..losses.heads import IGNORE_INDEX, next_token_losses
from ..trainer import DPTrainingArguments
from .base import PairsMixin, refuse_trl_settings, sides
from .dpo_losses import LOSSES, Preferences, divergence_score

Pair = tuple[torch.Tensor, torch.Tensor]  # of the chosen texts, and of the rejected ones


@dataclass
class DPDPOConfig(DPOConfig, DPTrainingArguments):
    """Arguments of [`DPDPOTrainer`]: those of TRL's DPOConfig, with its defaults, and the privacy parameters of
    [`DPTrainingArguments`].

    Example::

        >>> from dp_transformers import DPDPOConfig
        >>> args = DPDPOConfig(
        ...     "outputs", target_epsilon=8.0, target_delta=1e-6, expected_batch_size=256, use_cpu=True,
        ...     activation_checkpointing=True,
        ... )
        >>> args.learning_rate, args.beta, args.expected_batch_size
        (1e-06, 0.1, 256)
    """

    def __post_init__(self) -> None:
        refuse_trl_settings(self)
        super().__post_init__()
        if unknown := [kind for kind in self.loss_type if kind not in LOSSES]:
            raise ValueError(
                f"loss_type={unknown[0]!r} cannot be used with differential privacy, which needs a loss of each "
                f"preference alone: choose among {', '.join(LOSSES)}. ('aot' and 'aot_unpaired' sort the log-ratios "
                "of the batch, so one preference changes the loss of another.)"
            )


class DPDPOTrainer(PairsMixin, DPOTrainer):
    """TRL's DPOTrainer whose training is (ε, δ)-differentially private in the preferences.

    A preference (prompt, chosen, rejected) is one example: the gradient of its loss, which depends on both texts, is
    clipped as a whole. The log-probabilities of the reference are computed before the training
    (`precompute_ref_log_probs`), or for each batch by the model without its adapter or by `ref_model`.

    Args:
        model, args, train_dataset, ...: As in DPOTrainer; `args` must be a [`DPDPOConfig`].
        per_example_loss_func (`Callable`, *optional*): As in [`DPTrainer`], instead of DPOTrainer's loss. Its batches
            hold (B, 2, T) tensors, the chosen text of each row before the rejected one.

    Raises:
        ValueError: at construction, for whatever would break the guarantee, with the way out.

    Example::

        >>> from dp_transformers import DPDPOTrainer
        >>> DPDPOTrainer.trains_privately
        True
    """

    config = DPDPOConfig
    args: DPDPOConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self._is_vision_dataset:
            raise ValueError(
                "TRL's collator does not lay out the images of preferences by example, so they cannot be assigned to "
                "rows: train on preferences of texts."
            )
        if self.ref_model is None and isinstance(self.model, PeftModel):
            with self._as_reference(self.model):  # so that peft records the trained adapter as it will after a batch
                pass

    def example_losses(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Compute the (B,) losses of a training batch."""
        return self._losses(model, inputs, self._reference(model, inputs))

    def _losses(self, model: nn.Module, inputs: Mapping[str, Any], reference: Pair | None) -> torch.Tensor:
        """Compute the (B,) losses, given the reference's log-probabilities of the texts (None: the model's own)."""
        texts = _texts(inputs)
        logits = [_logits(model, text) for text in texts]
        tokens = [_log_probabilities(x, text) for x, text in zip(logits, texts, strict=True)]
        chosen, rejected = self._totals(tokens, texts)
        ref_chosen, ref_rejected = (chosen.detach(), rejected.detach()) if reference is None else reference
        ratios = chosen - ref_chosen, rejected - ref_rejected
        preferences = Preferences(
            log_ratios=ratios,
            scores=(divergence_score(ratios[0], self.args), divergence_score(ratios[1], self.args)),
            counts=(_count(texts[0]), _count(texts[1])),
            means=(_mean(tokens[0], texts[0]), _mean(tokens[1], texts[1])),
        )
        losses_b = torch.zeros_like(chosen)
        for kind, weight in zip(self.loss_types, self.loss_weights, strict=True):
            losses_b = losses_b + weight * LOSSES[kind](preferences, self.args)
        if self.use_weighting:
            typicality = [_typicality(*of) for of in zip(logits, tokens, texts, strict=True)]
            losses_b = losses_b * torch.exp(typicality[0] + typicality[1])
        return losses_b

    def _reference(self, model: nn.Module, inputs: Mapping[str, Any]) -> Pair:
        """Return the reference's (B,) log-probabilities of both texts, from the columns or computed now."""
        if self.precompute_ref_logps:
            return inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        texts = _texts(inputs)
        with torch.no_grad(), self._as_reference(model) as reference:
            tokens = [_log_probabilities(_logits(reference, text), text) for text in texts]
        return self._totals(tokens, texts)

    @contextmanager
    def _as_reference(self, model: Any) -> Iterator[Any]:
        """Yield the reference: `ref_model`, or the model with its adapter disabled, or with the adapter "ref"."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        trainable = [(p, p.requires_grad) for p in model.parameters()]  # peft sets it for a whole adapter
        with use_adapter(model, "ref" if "ref" in model.peft_config else None):
            yield model
        for p, requires_grad in trainable:
            p.requires_grad_(requires_grad)

    def _totals(self, tokens: Sequence[torch.Tensor], texts: Sequence[Mapping[str, torch.Tensor]]) -> Pair:
        """Return the (B,) log-probabilities of both texts from those of their tokens. `ld_alpha` weights the tokens of
        a text beyond the length of the other text."""
        if self.ld_alpha is None:
            return tokens[0].sum(1), tokens[1].sum(1)
        masks = [_predicted(text) for text in texts]
        shared_b1 = torch.minimum(masks[0].sum(1), masks[1].sum(1))[:, None]
        weights = [torch.where(mask.cumsum(1) <= shared_b1, 1.0, self.ld_alpha) for mask in masks]
        return (tokens[0] * weights[0]).sum(1), (tokens[1] * weights[1]).sum(1)


def _texts(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return sides(inputs, ["input_ids", "attention_mask", "completion_mask"])


def _logits(model: nn.Module, text: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return (B, T, V) logits, without the positions that prompt learning puts before the text."""
    ids = text["input_ids"]
    return model(input_ids=ids, attention_mask=text["attention_mask"], use_cache=False).logits[:, -ids.shape[1] :]


def _log_probabilities(logits: torch.Tensor, text: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the (B, T) log-probability of the token at t + 1 by the logits at t; 0 outside the completion."""
    labels = text["input_ids"].masked_fill(text["completion_mask"] == 0, IGNORE_INDEX)
    return -next_token_losses(logits, labels)


def _predicted(text: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a (B, T) mask: 1 if the token at t + 1 belongs to the completion."""
    return F.pad(text["completion_mask"][:, 1:], (0, 1))


def _count(text: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return text["completion_mask"].sum(1).clamp(min=1)


def _mean(tokens_bt: torch.Tensor, text: Mapping[str, torch.Tensor]) -> torch.Tensor:
    mask = _predicted(text)
    return (tokens_bt * mask).sum(1) / mask.sum(1).clamp(min=1)


@torch.no_grad()
def _typicality(logits: torch.Tensor, tokens_bt: torch.Tensor, text: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the (B,) mean over the completion of the log-probability of its tokens, minus that expected of tokens
    that the model would draw."""
    drawn_bt = torch.logsumexp(2 * logits.float().log_softmax(-1), -1)
    return _mean(tokens_bt - drawn_bt, text)


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
