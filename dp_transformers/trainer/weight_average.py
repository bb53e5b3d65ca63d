"""A moving average of the weights, released in their place, whose noise is the average of that of many steps."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..clipping.parallel.dtensor import to_local
from ..runtime import distributed


class WeightAverage(TrainerCallback):
    """Keeps an exponential moving average of the trained weights, as ``callbacks=[WeightAverage(0.999)]`` of a
    trainer.

    After step t it is ``average + (1 - d)·(weights - average)`` with d = min(decay, (1 + t)/(10 + t)), in float32, as
    De et al. 2022 (arXiv 2204.13650) train with. It costs no ε, since it is made of what is released anyway. The model
    holds the average whenever something is done between two steps, such as evaluating or saving, and at the end. Each
    step goes on from the weights themselves. Checkpoints hold both.

    Args:
        decay: At least 0 and below 1. About 1/(1 - decay) steps are averaged.

    Example::

        >>> from dp_transformers import WeightAverage
        >>> average = WeightAverage(0.999)  # trainer = DPTrainer(..., callbacks=[average])
        >>> average.decay
        0.999
    """

    def __init__(self, decay: float):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay!r}: 0.999 averages about 1,000 steps.")
        self.decay, self._average = decay, list[torch.Tensor]()
        self._weights: list[torch.Tensor] = []  # what the steps go on from, while the model holds the average

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._weights, self._average = [], [t.to(torch.float32, copy=True) for t in _trained(kwargs["model"])]
        if os.path.isfile(file := _file(args, state)):
            self._weights, self._average = torch.load(file, map_location=args.device, weights_only=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._weights:
            torch._foreach_copy_(_trained(kwargs["model"]), self._weights)
            self._weights = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained, t = _trained(kwargs["model"]), state.global_step
        self._weights = [each.clone() for each in trained]
        for average, now in zip(self._average, trained, strict=True):
            average.lerp_(now.float(), 1 - min(self.decay, (1 + t) / (10 + t)))
        torch._foreach_copy_(trained, self._average)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.save([self._weights, self._average], _file(args, state))


def _trained(model: nn.Module) -> list[torch.Tensor]:
    """Return what this rank holds of the trained weights."""
    return [to_local(p.detach()) for p in model.parameters() if p.requires_grad]


def _file(args: TrainingArguments, state: TrainerState) -> str:
    folder = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    return f"{folder}/weight_average_{distributed.rank()}.pt"
