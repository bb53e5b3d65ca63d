"""ExampleLosses computes the losses of a training batch, one for each example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..batch_checks import refuse_losses_of_other_rows
from ..losses import PerExampleLoss, decoder_inputs


class ExampleLosses:
    """Runs a model on batches of a trainer, with the labels kept out of it, and takes the loss of each example.

    Args:
        loss: Returns (B,) losses from the model's outputs and the labels.
        label_names: The columns of a batch that hold labels.
    """

    def __init__(self, loss: PerExampleLoss, label_names: Sequence[str]):
        self._loss, self._label_names = loss, label_names

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """Return the (B,) losses, and the model's outputs."""
        inputs = dict(inputs)
        missing = [name for name in self._label_names if name not in inputs]
        if missing:
            raise ValueError(
                f"the training batches have no {missing}: the columns are {sorted(inputs)}. Rename the label column, "
                "set label_names, or use a collator that makes labels (DataCollatorForLanguageModeling)."
            )
        labels = self._labels_of(inputs)
        for name in self._label_names:
            del inputs[name]
        outputs = model(**{**decoder_inputs(model, labels), **inputs})  # decoder inputs that the batch has win
        losses = self._loss(outputs, labels)
        if losses.dim() != 1:
            raise ValueError(
                f"the per-example loss has shape {tuple(losses.shape)}; it must be (B,), one loss for each example "
                "(reduction='none'), averaged within the example where it has several."
            )
        return losses, outputs

    def _labels_of(self, inputs: Mapping[str, Any]) -> Any:
        labels = tuple(inputs[name] for name in self._label_names)
        return labels[0] if len(labels) == 1 else labels

    def refuse_losses_over_the_batch(
        self, losses: torch.Tensor, outputs: Any, inputs: Mapping[str, Any], seed: int
    ) -> None:
        """Raise ValueError if the losses of half of the rows change when these rows replace all others.

        Args:
            seed: Seeds the random numbers that a loss may draw, so that both computations draw the same.
        """
        refuse_losses_of_other_rows(self._loss, (outputs, self._labels_of(inputs)), losses, seed)
