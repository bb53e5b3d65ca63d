"""nn.Embedding and nn.EmbeddingBag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import nn

from ..errors import UnsupportedModuleError, how_to_fix
from ..layer_rule import HasWeight, layer_rule, settings
from ..ragged import bag_lengths, own_positions, padded_rows
from ..recorded_call import RecordedCall
from ..terms import Rows, Term


class _Table(HasWeight, Protocol):
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None


class _BagsOfRows(_Table, Protocol):
    mode: str
    include_last_offset: bool


_REFUSED = ("max_norm", "sparse", "scale_grad_by_freq")


def _refuse_options(module: _Table) -> None:
    for option in _REFUSED:
        if getattr(module, option):
            why = {
                "max_norm": "it changes the weights in the forward pass, depending on the batch",
                "sparse": "the noised gradient is dense",
                "scale_grad_by_freq": "it scales one example's gradient by the contents of other examples",
            }[option]
            name = type(module).__name__
            raise ValueError(f"nn.{name}({option}=...) cannot be trained privately: {why}. Build it without {option}.")


def _padding_of(module: _Table) -> int:
    """Return the padding id as a nonnegative number."""
    return cast(int, module.padding_idx) % module.num_embeddings


@layer_rule(nn.Embedding, backward_reads_output=False, reads=settings("num_embeddings", "padding_idx", *_REFUSED))
def embedding(
    module: _Table, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    _refuse_options(module)
    if not module.weight.requires_grad:
        return {}
    ids_bt = activations[0].flatten(1) if activations[0].dim() > 1 else activations[0].unsqueeze(1)
    grad_btd = backprops.reshape(*ids_bt.shape, backprops.shape[-1])
    if module.padding_idx is not None:
        grad_btd = grad_btd.masked_fill((ids_bt == _padding_of(module)).unsqueeze(-1), 0)
    return {module.weight: Rows(ids_bt, grad_btd, module.num_embeddings)}


@layer_rule(
    nn.EmbeddingBag,
    takes_call=True,
    backward_reads_output=False,
    reads=settings("num_embeddings", "embedding_dim", "padding_idx", "mode", "include_last_offset", *_REFUSED),
)
def embedding_bag(call: RecordedCall) -> dict[nn.Parameter, Term]:
    """Return the terms of bags that are rows of a matrix of ids, or are divided by offsets. An example may have
    several consecutive bags."""
    module, batch = cast(_BagsOfRows, call.module), call.batch_size
    _refuse_options(module)
    if not module.weight.requires_grad:
        return {}
    given, backprops = call.arguments, call.backprops[0]
    ids, weights, offsets = given["input"], given["per_sample_weights"], given["offsets"]
    is_own = torch.ones_like(ids, dtype=torch.bool)
    if ids.dim() == 1:
        starts = offsets if module.include_last_offset else torch.cat([offsets, offsets.new_tensor([len(ids)])])
        lengths = bag_lengths(starts, len(ids))
        ids, weights = padded_rows(ids, lengths), None if weights is None else padded_rows(weights, lengths)
        is_own = own_positions(lengths, ids.shape[1])
    bags = len(ids) // max(1, batch)  # of each example
    if len(ids) != bags * batch:
        raise UnsupportedModuleError(
            f"{call.owner} was called on {len(ids)} bags in a batch of {batch} examples, so bags cannot be assigned "
            f"to examples. Give every example equally many bags. {how_to_fix(call.module)}",
            call.module,
        )
    if module.padding_idx is not None:
        is_own = is_own & (ids != _padding_of(module))
    is_own, grad = is_own.unsqueeze(-1), backprops.unsqueeze(-2).expand(*ids.shape, module.embedding_dim)
    if module.mode == "max":  # each column comes from one id
        values = module.weight.detach()[ids].masked_fill(~is_own, float("-inf"))
        grad = torch.zeros_like(grad).scatter_(-2, values.argmax(-2, keepdim=True), backprops.unsqueeze(-2))
    elif module.mode == "mean":
        grad = grad / is_own.sum(-2, keepdim=True).clamp(min=1)
    elif weights is not None:
        grad = grad * weights.detach().unsqueeze(-1)
    grad = grad.masked_fill(~is_own, 0)
    number = bags * ids.shape[1:].numel()
    return {
        module.weight: Rows(
            ids.view(batch, number), grad.reshape(batch, number, grad.shape[-1]), module.num_embeddings
        )
    }
