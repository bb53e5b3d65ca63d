"""What the private trainers of TRL have in common: the arguments that they need and refuse, and what they log."""

from __future__ import annotations

from collections.abc import Callable
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
    # what TRL's method adds is offloading of activations, which is refused
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
                f"the loss of {type(self.model).__name__} has a part for its router that is taken over all tokens of "
                "the batch, and is no example's own: set router_aux_loss_coef=0.0 in the arguments."
            )

    def example_losses(self, first: Any, second: Any, /) -> torch.Tensor:
        """Compute the (B,) losses of a training batch: of (outputs, labels), or of (model, inputs), as
        `per_example_loss_func` does."""
        raise NotImplementedError

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `epsilon` with every line, and TRL's metrics of evaluation data. Those of training batches (entropy,
        accuracy, rewards, the number of tokens) are not computed: they tell of private rows without noise."""
        self._metrics["eval"].pop("num_tokens", None)  # that of the training, which nobody counts
        super().log(logs, start_time)


def refuse_trl_settings(args: Any) -> None:
    """Raise ValueError if an argument of TRL's is set that differential privacy cannot be combined with."""
    refused = {
        "packing": "it joins several examples in one row, so the norm of a row is not the norm of an example; set "
        "packing=False",
        "eval_packing": "it is for evaluation beside packing=True, which is refused; leave it None",
        "padding_free": "it joins the examples of a batch in one row, so the norm of a row is not the norm of an "
        "example; set padding_free=False",
        "router_aux_loss_coef": "the loss of a router is taken over all tokens of the batch, and is no example's own; "
        "set router_aux_loss_coef=0.0",
        "activation_offloading": "it moves what clipping keeps of the forward pass to another device; set "
        "activation_offloading=False, and use gradient_checkpointing",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            raise ValueError(f"{name}={getattr(args, name)!r} cannot be used with differential privacy: {why}.")
