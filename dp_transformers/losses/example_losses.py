"""The losses of a training batch of a model of transformers, one for each example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from .heads import (
    PerExampleLoss,
    decoder_inputs,
    find_per_example_loss,
    label_columns,
    predicts_next_token,
    without_targets_of_padding,
)


def runs_the_model(loss: Callable[..., torch.Tensor]) -> bool:
    """Return True for a loss ``f(model, inputs)``, by the name of its first parameter. It calls the model itself, and
    batches need no labels. Any other loss is ``f(outputs, labels)``."""
    try:
        names = list(inspect.signature(loss).parameters)
    except ValueError:  # some functions that are written in C
        return False
    return names[:1] == ["model"]


def find_example_losses(model: nn.Module, label_smoothing: float = 0.0) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """Return a function that runs ``model`` on a batch, and returns the (B,) losses of its examples.

    It takes the place of ``model(**batch).loss`` in a loop with [`PrivacyEngine`]. For most heads that is a mean over
    all tokens of the batch, so the weight of an example would depend on the others. The mean of these losses is a mean
    over rows, as the engine assumes. On a batch of one they are the model's own loss.

    Args:
        model: A model of transformers, or one of peft around it. Batches are moved to its device.
        label_smoothing: As ``TrainingArguments.label_smoothing_factor``, applied within each example.

    Raises:
        ValueError: the losses of the head are not known; the message says what to do instead.

    Example::

        >>> import torch
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> from dp_transformers import find_example_losses
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        ... )
        >>> model = BertForMaskedLM(config)
        >>> example_losses = find_example_losses(model)
        >>> example_losses({"input_ids": torch.ones(4, 5).long(), "labels": torch.ones(4, 5).long()}).shape
        torch.Size([4])
    """
    loss = find_per_example_loss(model, label_smoothing)
    losses_of = ExampleLosses(loss, label_columns(model), predicts_next=predicts_next_token(model))

    def example_losses(batch: Mapping[str, Any]) -> torch.Tensor:
        device = next(model.parameters()).device
        return losses_of(model, send_to_device(dict(batch), device))[0]

    return example_losses


class ExampleLosses:
    """Runs a model on batches, and takes the loss of each example.

    Args:
        loss: A function of the model's outputs and the labels, which are kept out of the model; or of the model and
            the batch, if its parameters are called ``model`` and ``inputs``. It returns (B,) losses.
        label_names: The columns of a batch that hold labels, for a loss of outputs and labels.
        predicts_next: True if the position before predicts a label. Labels that padding would predict are left out.
    """

    def __init__(self, loss: PerExampleLoss, label_names: Sequence[str], *, predicts_next: bool = False):
        self.loss, self._label_names, self._predicts_next = loss, label_names, predicts_next
        self._runs_the_model = runs_the_model(loss)

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """Return the (B,) losses and the model's outputs; no outputs (``{}``) if the loss calls the model."""
        loss: Callable[..., torch.Tensor] = self.loss
        if self._runs_the_model:
            losses, outputs = loss(model, dict(inputs)), {}
        else:
            outputs, labels = self._outputs_and_labels(model, dict(inputs))
            losses = loss(outputs, labels)
        if losses.dim() != 1:
            raise ValueError(
                f"the per-example loss has shape {tuple(losses.shape)}; it must be (B,), one loss for each example "
                "(reduction='none'), averaged within the example if it has several."
            )
        return losses, outputs

    def evaluated(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """Return the (B,) losses, and the outputs of the first call of the model in a form in which Trainer finds the
        predictions: a dictionary, or a tuple with None in the place of the loss. It is empty if the loss calls only
        parts of the model."""
        kept: list[Any] = []

        def keep(module: nn.Module, args: tuple, output: Any) -> None:
            if not kept:
                kept.append(output)

        with model.register_forward_hook(keep):
            losses = self(model, inputs)[0]
        outputs = kept[0] if kept else {}
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        return losses, outputs if isinstance(outputs, dict) else (None, *outputs)

    def _outputs_and_labels(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Any]:
        missing = [name for name in self._label_names if name not in inputs]
        if missing:
            raise ValueError(
                f"the training batches have no {missing}: the columns are {sorted(inputs)}. Rename the label column, "
                "set label_names, or use a collator that makes labels (DataCollatorForLanguageModeling). A loss that "
                "needs no labels is per_example_loss_func=f with f(model, inputs) -> (B,), which calls the model."
            )
        mask, columns = inputs.get("attention_mask"), tuple(inputs.pop(name) for name in self._label_names)
        labels = columns[0] if len(columns) == 1 else columns
        labels = without_targets_of_padding(labels, mask) if self._predicts_next else labels
        inputs = {**decoder_inputs(model, labels), **inputs}  # decoder inputs that the batch has win
        return model(**inputs), labels
