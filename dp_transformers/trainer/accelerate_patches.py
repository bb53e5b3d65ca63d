"""Settings of accelerate that private training changes."""

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
from .refused import FSDP_FLAG


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
    plugin: Any = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)
