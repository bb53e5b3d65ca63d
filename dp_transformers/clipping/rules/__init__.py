"""The rules of all layers that have one. Each file registers its own with :func:`~dp_transformers.clipping.layer_rule.layer_rule`."""

from . import activation, attention, convolution, embedding, experts, linear, normalization, recurrent

__all__ = ["activation", "attention", "convolution", "embedding", "experts", "linear", "normalization", "recurrent"]
