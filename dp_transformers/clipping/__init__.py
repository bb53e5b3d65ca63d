"""Exact per-example gradient clipping for any PyTorch model; knows nothing of transformers, data or accountants.

Where parameters are split over ranks, :mod:`.parallel` speaks to them, and no other room.
"""

from . import rules  # noqa: F401  (every layer has its rule)
from .checks.self_check import check_model, check_per_sample_gradients_are_correct
from .clipper import PerExampleClipper
from .layer_rule import register_grad_sampler, register_norm_sampler

__all__ = ["PerExampleClipper", "check_model", "check_per_sample_gradients_are_correct", "register_grad_sampler", "register_norm_sampler"]
