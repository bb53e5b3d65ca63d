"""nn.Embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..terms import Rows, Term
from . import rule


@rule(nn.Embedding)
def embedding(module: nn.Embedding, activations: Sequence[torch.Tensor], backprops: torch.Tensor) -> dict[nn.Parameter, Term]:
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option):
            why = {
                "max_norm": "it rewrites the weights in the forward pass, for whoever is in the batch",
                "sparse": "the noised gradient is dense",
                "scale_grad_by_freq": "it scales one example's gradient by what the others contain",
            }[option]
            raise ValueError(f"nn.Embedding({option}=...) cannot be trained privately: {why}. Build it without {option}.")
    if not module.weight.requires_grad:
        return {}
    ids_bt = activations[0].reshape(len(backprops), -1)
    grad_btd = backprops.reshape(*ids_bt.shape, -1)
    if module.padding_idx is not None:
        grad_btd = grad_btd.masked_fill((ids_bt == module.padding_idx).unsqueeze(-1), 0)
    return {module.weight: Rows(ids_bt, grad_btd, module.num_embeddings)}
