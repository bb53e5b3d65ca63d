"""Checks in float32, whatever precision a model trains in."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..engine import ClippingEngine
from ..loss_graph import dtypes_in_graph
from ..precision import HALF, full_products, product_settings, without_autocast
from .without_dropout import evaluating

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def _in_float32(engine: ClippingEngine) -> Iterator[list[str]]:
    """Inside, what trains in less computes in float32: bf16's rounding would hide a tenth of a batch's influence on an
    example.

    Autocast is off, also where the model enters it, products are full float32, and parameters and buffers in bf16 or
    fp16 have float32 values, for which memory must hold both for a moment. Afterwards each is the tensor it was. Left
    alone are quantised weights, tensors of other classes, and the weights of a model that is split over processes.
    Call it with the gradients put aside (:meth:`ClippingEngine.trial`).

    The list that is given names what was replaced, as far as the model has run.
    """
    trainable, device, enter = engine.trainable, engine.trainable.device, torch.autocast.__enter__
    half = [t for t in (*engine.model.parameters(), *engine.model.buffers()) if t.dtype in HALF]
    kept = [(t, t.data) for t in half if type(t.data) is torch.Tensor and not _is_split(engine)]
    replaced = ["weights"] * bool(kept) + ["autocast"] * torch.is_autocast_enabled(device.type)
    low_precision, settings = trainable.low_precision, product_settings(device)[: 1 + trainable.convolves]

    def enter_disabled(region: torch.autocast) -> torch.autocast:
        enabled, region._enabled = region._enabled, False
        replaced.extend(["autocast"] * enabled)
        try:
            return enter(region)
        finally:
            region._enabled = enabled

    with without_autocast(device), full_products(settings) as were_reduced:
        replaced += ["products"] * were_reduced
        # pyrefly: ignore[bad-assignment]  (the argument's name is another one)
        torch.autocast.__enter__ = enter_disabled
        try:
            trainable.drop_gradients()
            for t, data in kept:
                t.data = data.float()
            is_half = any(p.dtype in HALF for p in engine.model.parameters())
            trainable.low_precision = torch.bfloat16 if is_half else torch.float32
            with engine.state.during_check(anew=True) if kept else contextlib.nullcontext():
                yield replaced
        finally:
            torch.autocast.__enter__ = enter
            trainable.low_precision = low_precision
            trainable.drop_gradients()
            for t, data in kept:
                t.data = data


def in_float32_if_possible(
    engine: ClippingEngine, losses: Callable[[], torch.Tensor], compare: Callable[[], Any]
) -> tuple[Any, list[str]]:
    """Return what ``compare`` gives in float32 (None where the model does not run in it), and what was replaced to
    make it run. The ``losses`` of float32 inputs show whether it runs; those of one example do, since what a module
    casts does not depend on how many there are."""
    try:
        with _in_float32(engine) as replaced:
            if _stays_in_float32(engine, losses, replaced):
                return compare(), replaced
    except torch.OutOfMemoryError:  # a large model in bf16 may fit once, and not in float32 as well
        pass
    logger.warning(
        "%s could not be checked in float32 (it casts by itself, is quantised or split over processes, or does not "
        "fit), so small influences of one example on another may hide in its rounding.",
        type(engine.model).__name__,
    )
    return None, []


def _is_split(engine: ClippingEngine) -> bool:
    return bool(engine.trainable.shards or engine.trainable.parallel)


def _stays_in_float32(engine: ClippingEngine, losses: Callable[[], torch.Tensor], replaced: list[str]) -> bool:
    """Return True if the model runs in float32 now, without casting to less by itself: the graph that one pass leaves
    shows it. Where something was ``replaced``, it must also be able to go backward like that."""
    trainable = engine.trainable
    is_quantised = not all(p.is_floating_point() for p in engine.model.parameters())
    if trainable.low_precision in HALF or ("weights" in replaced and is_quantised):  # it casts where no graph shows it
        return False
    frozen = [p for p in engine.model.parameters() if p.is_floating_point() and not p.requires_grad]
    frozen = [] if _is_split(engine) else frozen
    try:
        with engine.suspended(), evaluating(engine.model):
            for p in frozen:
                p.requires_grad_()  # so that the graph shows what they compute in
            losses_b = losses()
            low = dtypes_in_graph(losses_b) & {*HALF}
            if losses_b.requires_grad and replaced:
                wholes = [whole for p in trainable.parameters for whole in trainable.shards.all_unsharded(p)]
                torch.autograd.grad(losses_b.sum(), wholes, allow_unused=True)
        return not low
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # anything else is what the comparison will stumble over too, and say
        trainable.shards.recover()
        return not re.search("d(ata )?type|BFloat16|Half|bf16|fp16", str(error.__cause__ or error))
    finally:
        for p in frozen:
            p.requires_grad_(False)
