"""Exact per-example gradient clipping for any PyTorch model; knows nothing of transformers, data or accountants.

Where parameters are split over ranks, :mod:`.parallel` speaks to them, and no other room.
"""

from importlib import import_module
from typing import Any

_WHERE = {
    "PerExampleClipper": "clipper",
    "check_model": "checks.check_model",
    "check_per_sample_gradients_are_correct": "checks.check_model",
    "register_grad_sampler": "rules",
    "register_norm_sampler": "rules",
}
__all__ = [
    "PerExampleClipper",
    "check_model",
    "check_per_sample_gradients_are_correct",
    "register_grad_sampler",
    "register_norm_sampler",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that :mod:`.clipping_functions` loads no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
