"""Clipping checked on public rows of yours: of a model, and of a layer or rule of your own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..engine import ClippingEngine
from ..errors import SelfCheckError, UnsupportedModuleError
from ..modes import MODES, choose_mode
from .oracle import Oracle
from .rows import LossFunction, Rows, arguments_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckReport:
    """Worst relative errors of one comparison: of per-example norms, of the clipped sum (all parameters together), and
    of losses. A model or loss that mixes examples shows in all of them."""

    norm_error: float
    sum_error: float
    loss_error: float


def check_model(
    model: nn.Module, batch: Any, *, mode: str = "auto", loss_function: LossFunction | None = None
) -> CheckReport:
    """Check on your own (public) batch that clipping is exact for ``model``.

    Args:
        model: The model as it will be trained.
        batch: Keyword arguments of its forward in a dict, as a collator gives them, positional ones in a tuple, or one
            tensor; the batch first, at least two examples.
        mode: The clipping mode to check.
        loss_function: ``f(**batch) -> (B,)`` per-example losses; default: a random linear function of every output.

    Returns:
        The worst relative errors seen.

    Raises:
        SelfCheckError: a parameter escapes, or norms, sums or losses are others than those of one example at a time.

    Example::

        >>> import torch
        >>> from dp_transformers import check_model
        >>> report = check_model(torch.nn.Linear(3, 2), {"input": torch.randn(4, 3)})
        >>> report.norm_error < 1e-5
        True
    """
    engine = ClippingEngine(model, choose_mode(mode, model))
    engine.attach()
    try:
        return run_check(Oracle(engine), *arguments_of(batch), loss_function)
    finally:
        engine.detach()


def check_per_sample_gradients_are_correct(
    inputs: Any,
    module: nn.Module,
    *,
    modes: Sequence[str] = tuple(MODES),
    tolerance: float = 1e-5,
    loss_function: LossFunction | None = None,
) -> bool:
    """Check that per-example norms and clipped sums of ``module`` equal one example at a time, in every mode.

    For your own layers and rules; :func:`check_model` raises instead and returns the figures. They are logged here,
    the reason of a refusal as a warning.

    Args:
        inputs: The module's input, as of :func:`check_model`.
        module: What to check, not attached to a clipper; left as it is.
        modes: The clipping modes to check.
        tolerance: Largest relative error accepted: of each example's norm, and of the clipped sum, over all parameters
            together.
        loss_function: As of :func:`check_model`.

    Returns:
        False if an error is larger, examples influence each other, or a parameter is out of reach.

    Raises:
        ValueError: fewer than two examples, or nothing to train.

    Example::

        >>> import torch
        >>> from dp_transformers import check_per_sample_gradients_are_correct
        >>> check_per_sample_gradients_are_correct(torch.randn(4, 3), torch.nn.Linear(3, 2))
        True
    """
    for mode in modes:
        try:
            report = check_model(module, inputs, mode=mode, loss_function=loss_function)
        except (SelfCheckError, UnsupportedModuleError) as error:
            logger.warning("mode %s: %s", mode, error)
            return False
        is_right = max(report.norm_error, report.sum_error) <= tolerance
        logger.log(
            logging.INFO if is_right else logging.WARNING, "mode %s: %s (allowed: %.0e)", mode, report, tolerance
        )
        if not is_right:
            return False
    return True


def run_check(oracle: Oracle, args: tuple, kwargs: dict, loss_function: LossFunction | None = None) -> CheckReport:
    """Compare all examples of exactly this input. Gradients, training mode and the clipping bound are left as they
    were.

    The errors reported are those in float32, where the model runs in it.
    """
    engine = oracle.engine
    rows = Rows.of(engine.model, args, kwargs, batch_first=engine.batch_first)
    if rows.size < 2:
        raise ValueError("the check needs at least two examples: locality cannot be seen with one.")
    errors = oracle.compare(None, rows, rows.size, {}, loss_function)
    return CheckReport(float(errors.norm_b.max()), errors.sum, float(errors.loss_b.max()))
