"""nn.MultiheadAttention, tapped inside, where it consists of linear layers.

Its forward passes all weights, also those of ``out_proj``, to one function. A rule from the outside would have to
compute queries, keys, values and the whole attention a second time, forward and backward. Instead, this function is
replaced while the module runs, by the same computation with a tap right after the input projections and with a call of
``out_proj`` as a linear layer. Everything in between (masks, dropout, attention weights) is plain autograd.

Shape legend: b example, l query position, s key position, h head, e features of a head, p projected features (all
heads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..layer_rule import Tap, layer_rule
from ..terms import Dense, Outer, Stacked, Term


class _TappedAttention(TorchFunctionMode):
    """Replaces ``F.multi_head_attention_forward`` by :func:`_attend` while a module runs."""

    def __init__(self, module: nn.MultiheadAttention, tap: Tap | None):
        super().__init__()
        self.module, self.tap = module, tap

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and type(self.module.out_proj).forward is nn.Linear.forward:
            return _attend(self.module, self.tap, *args, **kwargs)
        return func(*args, **kwargs)


class _Projections(Protocol):
    """A module with input projections, in one or in three parameters, and biases that are added to keys and values."""

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter
    bias_v: nn.Parameter


@layer_rule(nn.MultiheadAttention, forward_context=_TappedAttention, tapped_inside=True)
def multihead_attention(
    module: _Projections, activations: Sequence[torch.Tensor], backprops: torch.Tensor | Sequence[torch.Tensor]
) -> dict[nn.Parameter, Term]:
    """Return the terms of the input projections and their biases.

    Args:
        activations: Inputs of the projections, one for each block of rows with the same input.
        backprops: Gradients of their outputs, then those of each example's copy of ``bias_k`` and ``bias_v``,
            (B, 1, p).
    """
    grads = [backprops] if isinstance(backprops, torch.Tensor) else list(backprops)
    projected, added = grads[: len(activations)], grads[len(activations) :]
    terms: dict[nn.Parameter, Term] = {}
    blocks = [Outer(g_btp, x_btd) for g_btp, x_btd in zip(projected, activations, strict=True)]
    if module.in_proj_weight is not None:
        terms[module.in_proj_weight] = blocks[0] if len(blocks) == 1 else Stacked(blocks)
    else:
        terms |= dict(zip((module.q_proj_weight, module.k_proj_weight, module.v_proj_weight), blocks, strict=True))
    if module.in_proj_bias is not None:
        terms[module.in_proj_bias] = Dense(
            torch.cat([g_btp.sum(1, dtype=torch.float32) for g_btp in projected], 1),
            tuple((g_btp, (1,)) for g_btp in projected),
        )
    if added:
        terms |= {p: Dense(g_b1p.unsqueeze(1)) for p, g_b1p in zip((module.bias_k, module.bias_v), added, strict=True)}
    return terms


def _attend(
    module: nn.MultiheadAttention,
    tap: Tap | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: None = None,
    static_v: None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``F.multi_head_attention_forward`` for the arguments that ``nn.MultiheadAttention`` passes: positions
    first, masks as floats."""
    if is_causal and attn_mask is None:
        raise ValueError(
            "nn.MultiheadAttention needs attn_mask when is_causal=True is given: it is only a hint about that mask."
        )
    is_batched = F._mha_shape_check(  # pyrefly: ignore[missing-attribute]  (torch's types list public names)
        query, key, value, key_padding_mask, attn_mask, num_heads
    )
    if use_separate_proj_weight:
        inputs, weights = [query, key, value], cast(list[torch.Tensor], [q_proj_weight, k_proj_weight, v_proj_weight])
    else:
        inputs = [query] if query is key is value else [query, key] if key is value else [query, key, value]
        weights = cast(torch.Tensor, in_proj_weight).split(
            [embed_dim_to_check * n for n in {1: [3], 2: [1, 2], 3: [1, 1, 1]}[len(inputs)]]
        )
    biases = [None] * len(inputs) if in_proj_bias is None else in_proj_bias.split([len(w) for w in weights])
    inputs = [x.transpose(0, 1) if is_batched else x.unsqueeze(0) for x in inputs]
    batch = len(inputs[0])
    outputs = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    outputs += [x.expand(batch, 1, -1) for x in (bias_k, bias_v) if x is not None]
    if tap is not None:
        outputs = tap(module, tuple(inputs), {}, outputs) or outputs

    q_blp, k_bsp, v_bsp = (part for x in outputs[: len(inputs)] for part in x.split(embed_dim_to_check, -1))
    if added := outputs[len(inputs) :]:
        k_bsp, v_bsp = (torch.cat(pair, 1) for pair in zip((k_bsp, v_bsp), added, strict=True))
    q, k, v = (x.unflatten(-1, (num_heads, module.head_dim)).transpose(1, 2) for x in (q_blp, k_bsp, v_bsp))
    if add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))

    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = (
        None
        if is_causal or attn_mask is None
        else attn_mask
        if attn_mask.dim() == 2
        else attn_mask.unflatten(0, (-1, num_heads))
    )
    if key_padding_mask is not None:
        padding = key_padding_mask.view(-1, 1, 1, key_padding_mask.shape[-1])
        mask = padding if mask is None else mask + padding
    if mask is not None:
        mask = F.pad(mask, (0, bool(added) + add_zero_attn))  # added keys are never masked

    dropout_p = dropout_p if training else 0.0
    if need_weights:
        scores_bhls = (q * module.head_dim**-0.5) @ k.mT
        weights_bhls = F.softmax(scores_bhls if mask is None else scores_bhls + mask, dim=-1)
        weights_bhls = F.dropout(weights_bhls, dropout_p)
        context = weights_bhls @ v
        shown = weights_bhls.mean(1) if average_attn_weights else weights_bhls
    else:
        context, shown = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal), None
    out_blp = module.out_proj(context.transpose(1, 2).flatten(2))
    if is_batched:
        return out_blp.transpose(0, 1), shown
    if len(out_blp) != 1:
        raise ValueError(
            f"nn.MultiheadAttention got an unbatched query in a forward pass of {len(out_blp)} "
            "examples: give it three dimensions, the batch among them."
        )
    return out_blp[0], None if shown is None else shown[0]
