"""Settings of accelerate: those that private training changes, and those that it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import nn
from transformers import Trainer

from .dp_config import DPTrainingArguments

FSDP_FLAG = "ACCELERATE_USE_FSDP"  # `accelerate launch` sets this environment variable


@contextmanager
def meshes_on_cpu(args: DPTrainingArguments, model: nn.Module | None) -> Iterator[None]:
    """Let the accelerator that is made inside shard models on CPUs, and leave the environment as it was."""
    asked = os.environ.get(FSDP_FLAG)
    allow_meshes_on_cpu(args, model)
    try:
        yield
    finally:
        forbid_meshes_on_cpu()
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


def forbid_meshes_on_cpu() -> None:
    """Undo :func:`allow_meshes_on_cpu` where accelerate has not written FSDP: it would take gloo for NCCL
    otherwise."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state.get("distributed_type") == DistributedType.MULTI_GPU and state["device"].type == "cpu":
            state["distributed_type"] = DistributedType.MULTI_CPU


def reduce_in_float32(trainer: Trainer) -> None:
    """Let FSDP2 add gradients over ranks in float32, whatever precision the model computes in."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


def refuse_settings(trainer: Trainer) -> None:
    """Raise ValueError if `accelerate launch` or a set_* method brought in what DPTrainingArguments refuses."""
    for name, (is_on, why) in _refused(trainer).items():
        if is_on:
            raise ValueError(
                f"{name} is switched on (by the arguments, accelerate's configuration or os.environ) and cannot be "
                f"used with differential privacy: {why}."
            )


def _refused(trainer: Trainer) -> dict[str, tuple[Any, str]]:
    accelerator = trainer.accelerator
    return {
        "mixed precision fp16": (
            accelerator.mixed_precision == "fp16",
            "loss scaling changes the norms that are clipped; use bf16",
        ),
        "gradient accumulation": (
            max(trainer.args.gradient_accumulation_steps, accelerator.gradient_accumulation_steps) > 1,
            "set gradient_accumulation_steps to 1 in all of these, and expected_batch_size in the arguments, which is "
            "split into physical batches of per_device_train_batch_size on its own",
        ),
        "FSDP1": (
            trainer.is_fsdp_enabled and accelerator.state.fsdp_plugin.fsdp_version != 2,
            "its flat parameters hide which gradient is whose; use FSDP2 (fsdp_config={'version': 2} in the "
            "arguments, fsdp_version: 2 in accelerate's configuration). If you did not ask for FSDP at all, something "
            f"else in this process did: take {FSDP_FLAG} out of os.environ",
        ),
        "context or sequence parallelism": (
            trainer.get_cp_size() * trainer.get_sp_size() > 1,
            "the positions of an example would lie on several processes; use tensor parallelism or FSDP2",
        ),
        "DeepSpeed": (
            trainer.is_deepspeed_enabled,
            "its engine averages and clips gradients on its own; use FSDP2, or DDP",
        ),
    }
