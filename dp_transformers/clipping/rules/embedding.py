"""nn.Embedding and nn.EmbeddingBag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ..layer_rule import HasWeight, layer_rule
from ..terms import Rows, Term


class _Table(HasWeight, Protocol):
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None


class _BagsOfRows(_Table, Protocol):
    mode: str


def _refuse_options(module: _Table) -> None:
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option):
            why = {
                "max_norm": "it rewrites the weights in the forward pass, for whoever is in the batch",
                "sparse": "the noised gradient is dense",
                "scale_grad_by_freq": "it scales one example's gradient by what the others contain",
            }[option]
            name = type(module).__name__
            raise ValueError(f"nn.{name}({option}=...) cannot be trained privately: {why}. Build it without {option}.")


@layer_rule(nn.Embedding, backward_reads_output=False)
def embedding(
    module: _Table, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    _refuse_options(module)
    if not module.weight.requires_grad:
        return {}
    ids_bt = activations[0].flatten(1) if activations[0].dim() > 1 else activations[0].unsqueeze(1)
    grad_btd = backprops.reshape(*ids_bt.shape, backprops.shape[-1])
    if module.padding_idx is not None:
        grad_btd = grad_btd.masked_fill((ids_bt == module.padding_idx).unsqueeze(-1), 0)
    return {module.weight: Rows(ids_bt, grad_btd, module.num_embeddings)}


@layer_rule(nn.EmbeddingBag, backward_reads_output=False)
def embedding_bag(
    module: _BagsOfRows, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    _refuse_options(module)
    ids, *offsets = [x for x in activations if not x.is_floating_point()]  # (B, ..., n), and the output is (B, ..., d)
    if offsets:
        raise ValueError(
            "nn.EmbeddingBag was called with offsets, where the ids of all examples lie in one row and no dimension "
            "is the batch. Give it ids of shape (B, n); fill up shorter bags with an id that is the layer's "
            "padding_idx."
        )
    if not module.weight.requires_grad:
        return {}
    grad = backprops.unsqueeze(-2).expand(*ids.shape, module.embedding_dim)
    real = None if module.padding_idx is None else (ids != module.padding_idx).unsqueeze(-1)
    if module.mode == "max":  # each column comes from one id
        values = module.weight[ids] if real is None else module.weight[ids].masked_fill(~real, float("-inf"))
        grad = torch.zeros_like(grad).scatter_(-2, values.argmax(-2, keepdim=True), backprops.unsqueeze(-2))
    elif module.mode == "mean":
        grad = grad / (ids.shape[-1] if real is None else real.sum(-2, keepdim=True).clamp(min=1))
    elif weights := [x for x in activations if x.is_floating_point()]:  # per_sample_weights
        grad = grad * weights[0].unsqueeze(-1)
    if real is not None:
        grad = grad.masked_fill(~real, 0)
    return {module.weight: Rows(ids.flatten(1), grad.flatten(1, -2), module.num_embeddings)}
