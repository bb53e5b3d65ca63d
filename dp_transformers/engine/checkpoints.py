"""A checkpoint of a PrivacyEngine holds the model, the optimizer and what was spent, in one dictionary or file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from ..runtime import distributed
from ..step.ledger import PrivacyStateError
from .loop import PrivateLoop

_Optimizer = torch.optim.Optimizer | None


def state_of(loop: PrivateLoop, module: nn.Module, optimizer: _Optimizer, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds. All ranks that hold shards call this."""
    loop.clipper.engine.state.end_pass()
    with loop.checkpointing():
        weights, moments = _full_states(module, optimizer, is_sharded=bool(loop.clipper.trainable.shards))
    return {**others, "module": weights, "optimizer": moments, "privacy": loop.to_dict()}


def save(path: str | os.PathLike | IO[bytes], content: Mapping[str, Any]) -> None:
    """Write the file completely or not at all; into a file object, as far as that goes. Rank 0 writes."""
    if distributed.rank() != 0:
        return
    if not isinstance(path, (str, os.PathLike)):
        torch.save(content, path)
        return
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def go_on_from(
    state: Mapping[str, Any], where: str, loop: PrivateLoop, module: nn.Module, optimizer: _Optimizer
) -> dict[str, Any]:
    """Go on from what :func:`state_of` returned, and return the rest of it. ``where`` it is from, for messages."""
    content = dict(state)
    if "privacy" not in content:
        raise PrivacyStateError(
            f"{where} says nothing of what was spent: load what PrivacyEngine.save_checkpoint or state_dict gave."
        )
    moments = content.pop("optimizer", None)
    if optimizer is not None and moments is None:
        raise ValueError(
            f"{where} was saved without the optimizer. Call load_checkpoint without optimizer= and let the optimizer "
            "start anew; next time save with save_checkpoint(..., optimizer=optimizer)."
        )
    loop.restore(dict(content.pop("privacy")))
    with loop.checkpointing():
        _load(module, content.pop("module"), optimizer, moments, is_sharded=bool(loop.clipper.trainable.shards))
    return content


def _full_states(module: nn.Module, optimizer: _Optimizer, *, is_sharded: bool) -> tuple[dict, dict | None]:
    """Return the states of the model and the optimizer, unsharded."""
    if not is_sharded:
        return module.state_dict(), None if optimizer is None else optimizer.state_dict()
    from torch.distributed.checkpoint import state_dict as sharded

    full = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = None if optimizer is None else sharded.get_optimizer_state_dict(module, optimizer, options=full)
    return sharded.get_model_state_dict(module, options=full), moments


def _load(module: nn.Module, weights: dict, optimizer: _Optimizer, moments: Any, *, is_sharded: bool) -> None:
    """Load what :func:`_full_states` returned; shards take their parts of it."""
    if not is_sharded:
        module.load_state_dict(weights)
        if optimizer is not None:
            optimizer.load_state_dict(moments)
        return
    from torch.distributed.checkpoint import state_dict as sharded

    full = sharded.StateDictOptions(full_state_dict=True)
    sharded.set_model_state_dict(module, weights, options=full)
    if optimizer is not None:
        # torch asks for a tensor to see the device by, and an optimizer without moments has none
        options = full if moments["state"] else sharded.StateDictOptions()
        sharded.set_optimizer_state_dict(module, optimizer, moments, options=options)
