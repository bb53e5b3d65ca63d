"""Causes that people know by another name than the check that fails because of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...runtime.randomness import global_state, same_global_state
from ..errors import HOW_BATCH_NORM_MIXES, SelfCheckError, named
from .case import Case
from .synthetic import evaluating, floating_tensors, kept_buffers


@contextlib.contextmanager
def true_causes(case: Case) -> Iterator[None]:
    """Inside, a check that fails for a reason which people know by another name raises an error that says that
    name."""
    engine = case.engine
    try:
        yield
    except Exception as error:
        if "offsets[" in str(error) and not isinstance(error, SelfCheckError):  # of torch, about made-up input
            raise SelfCheckError(
                "the model calls an nn.EmbeddingBag with offsets that it is given, under a name from which it is not "
                "known that they divide its ids: name that argument of the model's forward 'offsets', and the weights "
                "of ids 'per_sample_weights'. Or give the model ids of shape (B, n), shorter bags filled up with an "
                "id that is the layer's padding_idx."
            ) from error
        if "escaped from inside a function being vmapped" in str(error):
            raise SelfCheckError(
                "the model, or its loss, reads a tensor that a module has put away in a forward pass, neither in what "
                "it returns nor in an attribute, list or dictionary of its own (in a global variable, or in another "
                "object). Let the module return it."
            ) from error
        if "checkpoint" in str(error).lower() and ".grad()" in str(error):  # of torch
            raise SelfCheckError(
                "a part of the model runs under reentrant activation checkpointing, through which autograd gives no "
                "gradients of one example: call torch.utils.checkpoint.checkpoint with use_reentrant=False."
            ) from error
        norm = next((m for m in engine.model.named_modules() if isinstance(m[1], _BatchNorm) and m[1].training), None)
        if norm is not None and not isinstance(error, SelfCheckError):
            raise SelfCheckError(f"{named(norm[0], norm[1])} {HOW_BATCH_NORM_MIXES}") from error
        if (
            engine.trainable.shards or engine.trainable.parallel or not engine.batch_first
        ):  # where a pass of this process's own would leave others waiting
            raise
        dims, wrong_way = _seen_in_forward(case)
        of_one, _ = _seen_in_forward(case.only([0]))
        lost = [(a, b) for a, b in zip(dims, of_one, strict=False) if b < a]
        if wrong_way:
            raise SelfCheckError(
                f"{wrong_way[0]} has batch_first=False and is given a tensor with the batch first, so it takes "
                "examples for positions, and mixes them: build it with batch_first=True."
            ) from error
        if lost:
            raise SelfCheckError(
                f"the model's output has {lost[0][0]} dimensions for {case.batch} examples and {lost[0][1]} for one: "
                "squeeze() takes the dimension of the batch too where it is 1. Name the dimension, as in squeeze(-1)."
            ) from error
        raise


def draws_in_evaluation(case: Case) -> bool:
    """Returns True if the model, or its loss, draws random numbers where it evaluates; False, too, where a pass of
    this process's own would leave others waiting."""
    engine = case.engine
    if engine.trainable.shards or engine.trainable.parallel:
        return False
    before = global_state(engine.trainable.device)
    with contextlib.suppress(Exception), engine.suspended(), evaluating(engine.model), kept_buffers(engine.model):
        case.losses()
    return not same_global_state(global_state(engine.trainable.device), before)


def _seen_in_forward(case: Case) -> tuple[list[int], list[str]]:
    """Returns how many dimensions the model's outputs have, and the modules that expect the batch second and are given
    it first."""
    engine = case.engine
    dims: list[int] = []
    wrong_way: list[str] = []

    def note_output(module: nn.Module, args: tuple, output: Any) -> None:
        dims.extend(x.dim() for x in floating_tensors(output))

    def note_input(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if x is not None and x.dim() == 3 and x.shape[0] == case.batch != x.shape[1]:
            wrong_way.append(named(path, module))

    with contextlib.ExitStack() as stack:
        for path, module in engine.model.named_modules():
            if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and not module.batch_first:
                stack.callback(module.register_forward_pre_hook(partial(note_input, path), with_kwargs=True).remove)
        stack.callback(engine.model.register_forward_hook(note_output).remove)
        stack.enter_context(engine.suspended())
        stack.enter_context(kept_buffers(engine.model))
        with contextlib.suppress(Exception):  # what the model does before it fails is enough
            case.losses()
    return dims, wrong_way
