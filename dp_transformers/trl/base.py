"""The common part of the private trainers of TRL: their mixins, and the arguments that they need or refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ..losses.heads import PerExampleLoss
from ..trainer import DPTrainerMixin, DPTrainingArguments

if TYPE_CHECKING:
    from trl.trainer.base_trainer import _BaseTrainer

    class Base(DPTrainerMixin, _BaseTrainer):  # pyrefly: ignore[inconsistent-inheritance]
        """The class behind the mixin: every trainer of TRL keeps these."""

        _metrics: dict[str, Any]
else:
    Base = DPTrainerMixin


class TRLMixin(Base):
    """Private training for a trainer of TRL.

    Args:
        model, args, data_collator, train_dataset, eval_dataset, kwargs: As in the trainer; `args` must be of the class
            `config`.
        per_example_loss_func: As in [`DPTrainer`], in the place of the loss of the trainer.
    """

    config: ClassVar[type[DPTrainingArguments]]
    # TRL's method adds only offloading of activations, which is refused
    replaced_knowingly: ClassVar[frozenset[str]] = frozenset({"training_step"})

    def __init__(
        self,
        model: str | nn.Module | None = None,
        args: DPTrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        per_example_loss_func: PerExampleLoss | None = None,
        **kwargs: Any,
    ):
        name = self.config.__name__
        if not isinstance(args, self.config):
            folder = getattr(args, "output_dir", None) or "outputs"
            raise ValueError(
                f"{type(self).__name__} needs {name}, got {type(args).__name__}. Write for example: "
                f"args = {name}(output_dir={folder!r}, target_epsilon=8.0, target_delta=1e-6, ...)"
            )
        super().__init__(
            # pyrefly: ignore[bad-argument-type]  (TRL's trainers load a model by its name)
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            per_example_loss_func=per_example_loss_func or self.example_losses,
            **kwargs,
        )
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                f"the loss of {type(self.model).__name__} has a part for its router that is computed over all tokens "
                "of the batch, not per example: set router_aux_loss_coef=0.0 in the arguments."
            )

    def example_losses(self, first: Any, second: Any, /) -> torch.Tensor:
        """Compute the (B,) losses of a training batch from (outputs, labels) or (model, inputs), as
        `per_example_loss_func` does."""
        raise NotImplementedError

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `epsilon` with every line, and TRL's metrics of evaluation data. Metrics of training batches (entropy,
        accuracy, rewards, number of tokens) are not computed, since they would reveal private rows without noise."""
        self._metrics["eval"].pop("num_tokens", None)  # of the training data, whose tokens are not counted
        super().log(logs, start_time)


def refuse_trl_settings(args: Any) -> None:
    """Raise ValueError if an argument of TRL is set that cannot be combined with differential privacy."""
    refused = {
        "packing": "it joins several examples in one row, so the norm of a row is not the norm of an example; set "
        "packing=False",
        "eval_packing": "it is for evaluation beside packing=True, which is refused; leave it None",
        "padding_free": "it joins the examples of a batch in one row, so the norm of a row is not the norm of an "
        "example; set padding_free=False",
        "router_aux_loss_coef": "the loss of a router is computed over all tokens of the batch, not per example; set "
        "router_aux_loss_coef=0.0",
        "activation_offloading": "it moves activations that clipping needs to another device; set "
        "activation_offloading=False, and use gradient_checkpointing",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            raise ValueError(f"{name}={getattr(args, name)!r} cannot be used with differential privacy: {why}.")


class PairsAsRows:
    """A collator for preferences that makes one row of each pair.

    TRL's collators return (2B, T) tensors, all chosen texts before all rejected ones. This one makes them (B, 2, T),
    so that a row is an example.

    Args:
        collate: TRL's collator.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]):
        self.collate = collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        size = len(examples)
        batch = self.collate(examples)
        return {name: torch.stack(x.chunk(2), 1) if len(x) == 2 * size else x for name, x in batch.items()}


class PairsMixin(TRLMixin):
    """Private training for a trainer with preferences as rows: both texts of a pair are clipped together."""

    def training_collator(self) -> Callable[[list[Any]], Any]:
        """Return the collator of the class, with a row for each pair."""
        return PairsAsRows(super().training_collator())


def sides(inputs: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the (B, T) columns of the chosen texts, and those of the rejected texts."""
    chosen, rejected = ({name: inputs[name][:, side] for name in names} for side in (0, 1))
    return chosen, rejected
