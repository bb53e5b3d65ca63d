"""The rules of all layers that have one. Each file registers its own with
:func:`~dp_transformers.clipping.layer_rule.layer_rule`.

The functions that register a user's rules are re-exported here, so that the rules of this library are registered
first."""

from ..layer_rule import register_grad_sampler, register_norm_sampler
from . import adapted_experts, attention, convolution, embedding, experts, linear, normalization, recurrent

__all__ = [
    "adapted_experts", "attention", "convolution", "embedding", "experts", "linear", "normalization", "recurrent",
    "register_grad_sampler", "register_norm_sampler",
]  # fmt: skip
