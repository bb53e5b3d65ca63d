"""Per-example losses of the transformers heads, from logits, with the labels kept out of the model.

A model's own loss is a mean over the batch (often over all its tokens), so one example's gradient would depend on how long the others
are. Here example i's loss uses example i alone: a token loss is divided by the example's own number of counted tokens.

Shape legend: B examples, T positions, V classes or vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IGNORE_INDEX = -100

PerExampleLoss = Callable[[Any, torch.Tensor], torch.Tensor]  # (model outputs, labels) -> (B,)


def sequence_classification_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, problem_type: str | None = None, label_smoothing: float = 0.0
) -> torch.Tensor:
    """(B,) losses from logits (B, V): cross-entropy, binary cross-entropy averaged over classes, or squared error.

    Without ``problem_type`` it is inferred as transformers does: one output is regression, integer labels are single-label,
    float labels multi-label classification.
    """
    logits = logits.float()
    if problem_type is None:
        if logits.shape[-1] == 1:
            problem_type = "regression"
        else:
            problem_type = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    if problem_type == "single_label_classification":
        return F.cross_entropy(logits, labels.view(-1), reduction="none", ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing)
    if problem_type == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
    if problem_type == "regression":
        return F.mse_loss(logits.flatten(1), labels.float().view(len(logits), -1), reduction="none").mean(1)
    raise ValueError(
        f"config.problem_type is {problem_type!r}, which is none of regression, single_label_classification, multi_label_classification."
    )


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """(B,) mean cross-entropy of the next token over the example's own labels that are not -100; 0 where it has none.

    Args:
        logits: (B, T, V); labels: (B, T), not shifted (the logits at t predict the label at t + 1).
    """
    if logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not go with labels of shape {tuple(labels.shape)}: (B, T, V) and (B, T) expected."
        )
    targets_bt = labels[:, 1:]
    token_losses_bt = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1),
        targets_bt.flatten(),
        reduction="none",
        ignore_index=IGNORE_INDEX,
        label_smoothing=label_smoothing,
    ).view(targets_bt.shape)
    return token_losses_bt.sum(1) / (targets_bt != IGNORE_INDEX).sum(1).clamp(min=1)


def find_per_example_loss(model: nn.Module, label_smoothing: float = 0.0) -> PerExampleLoss:
    """The per-example loss of ``model``'s head.

    Args:
        model: A transformers model, or a PEFT model around one.
        label_smoothing: As ``TrainingArguments.label_smoothing_factor``, applied within each example.

    Raises:
        ValueError: a head whose per-example loss is not known; the message names it and says what to pass instead.
    """
    from transformers.models.auto import modeling_auto as auto

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = next((c.__name__ for c in type(base).__mro__ if _kind(c.__name__, auto)), None)
    kind = _kind(head, auto) if head else None
    if kind == "causal_lm":
        return lambda outputs, labels: causal_lm_loss(outputs.logits, labels, label_smoothing=label_smoothing)
    if kind == "sequence_classification":
        problem_type = getattr(base.config, "problem_type", None)
        if label_smoothing and problem_type not in (None, "single_label_classification"):
            raise ValueError(f"label_smoothing_factor has no meaning for {problem_type}: set it to 0.")
        return lambda outputs, labels: sequence_classification_loss(
            outputs.logits, labels, problem_type=problem_type, label_smoothing=label_smoothing
        )
    raise ValueError(
        f"no per-example loss is known for the head {type(base).__name__}. Pass per_example_loss_func=f to DPTrainer, with "
        "f(outputs, labels) -> tensor of shape (B,), each entry computed from its own example alone (reduction='none', averaged "
        "inside the example only)."
    )


def _kind(class_name: str, auto: Any) -> str | None:
    for kind, mapping in (
        ("causal_lm", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("sequence_classification", auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    ):
        for names in mapping.values():
            if class_name in (names if isinstance(names, (tuple, list)) else (names,)):
                return kind
    return None
