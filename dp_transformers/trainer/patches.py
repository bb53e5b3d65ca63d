"""What private training changes of accelerate, and of the progress that Trainer shows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import nn
from transformers import ProgressCallback, Trainer

from .dp_config import DPTrainingArguments
from .refused import FSDP_FLAG


@contextmanager
def meshes_on_cpu(args: DPTrainingArguments, model: nn.Module | None) -> Iterator[None]:
    """Let the accelerator that is made inside shard models on CPUs, and leave the environment as it was."""
    asked = os.environ.get(FSDP_FLAG)
    allow_meshes_on_cpu(args, model)
    try:
        yield
    finally:
        # where accelerate has not written FSDP, it would take gloo for NCCL
        for state in (PartialState._shared_state, AcceleratorState._shared_state):
            if state.get("distributed_type") == DistributedType.MULTI_GPU and state["device"].type == "cpu":
                state["distributed_type"] = DistributedType.MULTI_CPU
        # accelerate sets it for arguments that ask for FSDP; the next trainer of this process may have others
        if asked is None:
            os.environ.pop(FSDP_FLAG, None)


def allow_meshes_on_cpu(args: DPTrainingArguments, model: nn.Module | None = None) -> None:
    """Let accelerate shard on CPUs, where it would train with DDP without a warning, or refuse a tensor-parallel
    model."""
    state = PartialState._shared_state
    is_split = (getattr(model, "tp_size", None) or 1) > 1
    asked = is_split or args.fsdp or os.environ.get(FSDP_FLAG, "false").lower() == "true"
    if asked and state.get("distributed_type") == DistributedType.MULTI_CPU:
        # accelerate writes FSDP here when it has read its configuration
        state["distributed_type"] = DistributedType.MULTI_GPU


def reduce_in_float32(trainer: Trainer) -> None:
    """Let FSDP2 add gradients over ranks in float32, whatever precision the model computes in."""
    plugin: Any = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


_NAMES = ("epsilon", "epsilon_per_person")


def show_spent(trainer: Trainer) -> None:
    """Let the trainer's progress bar show ε beside its target, or its table in a notebook have columns for it."""
    replacements = {"ProgressCallback": lambda: PrivateProgress, "NotebookProgressCallback": private_notebook_progress}
    for callback in list(trainer.callback_handler.callbacks):
        name = type(callback).__name__
        if name in replacements and type(callback).__module__.startswith("transformers."):
            trainer.remove_callback(callback)
            trainer.add_callback(replacements[name]())


class PrivateProgress(ProgressCallback):
    """Trainer's bar, with ε behind it: of all rows of a person where a person may have several."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=logs, **kwargs)
        spent = _spent(logs or {})
        if self.training_bar is not None and spent:
            target = "" if args.target_epsilon is None else f" of {args.target_epsilon:g}"
            self.training_bar.set_postfix_str(f"epsilon {list(spent.values())[-1]:.3g}{target}")


def private_notebook_progress() -> type:
    """Return Trainer's table for notebooks, with columns for ε. It can be made where IPython is installed."""
    from transformers.utils.notebook import NotebookProgressCallback

    class PrivateNotebookProgress(NotebookProgressCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            super().on_log(args, state, control, logs=logs, **kwargs)
            table = self.training_tracker
            if args.eval_strategy == "no" and table is not None and (spent := _spent(logs or {})):
                table.write_line({"Step": state.global_step, **{_title(name): value for name, value in spent.items()}})

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            # the title of a column is the name without what stands before its first underscore
            shown = {f"eval_{name}" if name in _NAMES else name: value for name, value in (metrics or {}).items()}
            super().on_evaluate(args, state, control, metrics=shown, **kwargs)

    return PrivateNotebookProgress


def _spent(logs: Mapping[str, float]) -> dict[str, float]:
    return {name: logs[name] for name in _NAMES if name in logs}


def _title(name: str) -> str:
    return " ".join(word.capitalize() for word in name.split("_"))
