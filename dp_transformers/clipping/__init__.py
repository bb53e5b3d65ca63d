"""Exact per-example gradient clipping for any PyTorch model; knows nothing of transformers, data, accountants or ranks."""

from .clipper import PerExampleClipper
from .rules import register_grad_sampler, register_norm_sampler
from .verify import check_model

__all__ = ["PerExampleClipper", "check_model", "register_grad_sampler", "register_norm_sampler"]
