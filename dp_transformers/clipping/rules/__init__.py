"""The rules of all layers that have one. Each file registers its own with
:func:`~dp_transformers.clipping.layer_rule.layer_rule`.

The doors for rules of your own are here too, so that these are registered before yours, which then win.
"""

from ..layer_rule import register_grad_sampler, register_norm_sampler
from . import activation, adapted_experts, attention, convolution, embedding, experts, linear, normalization, recurrent

__all__ = [
    "activation", "adapted_experts", "attention", "convolution", "embedding", "experts", "linear", "normalization",
    "recurrent", "register_grad_sampler", "register_norm_sampler",
]  # fmt: skip
