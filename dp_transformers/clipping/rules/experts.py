"""Fused experts of transformers: the weights of all experts in 3-D parameters, and tokens routed to a few of them.

    out[t] = sum over k of weight[t, k] · down_e(gate(up_e(x[t]))),   e = index[t, k]

One token sent to one expert is a *slot*. For every kernel (a loop, grouped or batched products), the gradient of an
expert is a sum over the slots sent to it, so the inner activations are computed again, slot by slot.

Shape legend: b example, t position, k experts of one token, s slot of an example (t times k), e expert, d width, p
inner width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import UnsupportedModuleError, how_to_fix
from ..layer_rule import layer_rule
from ..terms import Routed, Rows, Term

_PARAMETERS = {"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"}


if TYPE_CHECKING:

    class Experts(nn.Module):
        """The attributes of a class that ``use_experts_implementation`` made, besides its parameters."""

        num_experts: int
        has_gate: bool
        has_bias: bool
        is_transposed: bool
        act_fn: Callable[[torch.Tensor], torch.Tensor]
        _apply_gate: Callable[[torch.Tensor], torch.Tensor]


def are_fused_experts(module: nn.Module) -> bool:
    """Return True for classes that ``use_experts_implementation`` made: they compute the formula above, by their
    attributes."""
    # looked up among imported modules: this package does not depend on transformers, and such a model imported it
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is None or getattr(type(module).forward, "__globals__", None) is not vars(moe):
        return False
    # parametrised weights, a norm behind each expert, an activation that learns: not supported here
    return _PARAMETERS.issuperset(name for name, _ in module.named_parameters())


def settings_of_experts(module: nn.Module) -> dict[str, object]:
    """Return the attributes that the gate and the activation may read, without those that hooks write."""
    gate = getattr(getattr(type(module), "_apply_gate", None), "__code__", None)
    names = set(() if gate is None else gate.co_names)
    own = {name: x for name, x in vars(module).items() if isinstance(x, (bool, int, float, str))}
    if any(callable(getattr(type(module), name, None)) for name in names):  # a method may read any attribute
        names |= set(own) - set(vars(nn.Module()))
    names |= {"has_gate", "has_bias", "is_transposed", "num_experts"}
    return {name: x for name, x in own.items() if name in names} | {"act_fn": getattr(module, "act_fn", None)}


def tensors_of_experts(module: nn.Module) -> list[torch.Tensor]:
    return [p for _, p in module.named_parameters()]


@layer_rule(recognise=are_fused_experts, reads=settings_of_experts, reads_tensors=tensors_of_experts)
def experts(module: Experts, activations: Sequence[torch.Tensor], backprops: torch.Tensor) -> dict[nn.Parameter, Term]:
    weights = {name: p.detach() for name, p in module.named_parameters()}
    terms = terms_by_name(module, weights, activations, backprops)
    return {getattr(module, name): term for name, term in terms.items()}


def terms_by_name(
    module: Experts, weights: Mapping[str, torch.Tensor], activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[str, Term]:
    """Return the terms of the experts' parameters, given their values ``weights``."""
    hidden_btd, index_btk, weight_btk = activations
    if (
        backprops.dim() != 3
        or hidden_btd.shape != backprops.shape
        or index_btk.is_floating_point()
        or weight_btk.shape != index_btk.shape
    ):
        raise UnsupportedModuleError(
            f"{type(module).__name__} was not called with hidden states of shape (tokens, width), then the experts of "
            "each token, then their weights, so its rule cannot be used. " + how_to_fix(module),
            module,
        )
    num_experts = module.num_experts
    ids_bs = index_btk.flatten(1)
    nowhere_bs1 = (ids_bs >= num_experts).unsqueeze(-1)  # sent to an expert that does not exist
    ids_bs = ids_bs.clamp(max=num_experts - 1)

    def to_slots(x_btd: torch.Tensor) -> torch.Tensor:
        return x_btd.float().repeat_interleave(index_btk.shape[2], 1)

    x_bsd = to_slots(hidden_btd)
    g_bsd = (to_slots(backprops) * weight_btk.flatten(1).unsqueeze(-1)).masked_fill_(nowhere_bs1, 0)
    up, up_bias = ("gate_up_proj", "gate_up_proj_bias") if module.has_gate else ("up_proj", "up_proj_bias")
    linear = Routing(ids_bs, num_experts)
    with torch.enable_grad():
        inner = linear(x_bsd, _columns(module, weights[up])).detach()
        if module.has_bias:
            inner += weights[up_bias][ids_bs]
        inner.requires_grad_()
        gated_bsp = (module._apply_gate if module.has_gate else module.act_fn)(inner)
    g_gated_bsp = linear(g_bsd, _columns(module, weights["down_proj"]).mT)
    (g_inner,) = torch.autograd.grad(gated_bsp, inner, g_gated_bsp)

    factors = {up: (g_inner, x_bsd), "down_proj": (g_bsd, gated_bsp.detach())}
    terms: dict[str, Term] = {}
    for name, (out, into) in factors.items():
        left, right = (into, out) if module.is_transposed else (out, into)
        terms[name] = Routed(ids_bs, left, right, num_experts)
        if module.has_bias:
            terms[name + "_bias"] = Rows(ids_bs, out, num_experts)
    return terms


def _columns(module: Experts, weight: torch.Tensor) -> torch.Tensor:
    """Return the weights of all experts as (E, in, out)."""
    weight = weight.float()
    return weight if module.is_transposed else weight.mT


class Routing:
    """Sorts the slots of all examples by expert, and multiplies each with the weight of its expert."""

    def __init__(self, ids_bs: torch.Tensor, num_experts: int):
        ids, self.order = ids_bs.flatten().sort()
        self.sizes = torch.bincount(ids, minlength=num_experts).tolist()

    def __call__(self, x_bsd: torch.Tensor, weight_edp: torch.Tensor) -> torch.Tensor:
        """Return (B, s, p), each slot times the weight of its expert."""
        x = x_bsd.flatten(0, 1)[self.order]
        out = x.new_empty(len(x), weight_edp.shape[2])
        start = 0
        for i, size in enumerate(self.sizes):
            if size:
                torch.mm(x[start : start + size], weight_edp[i], out=out[start : start + size])
            start += size
        return torch.empty_like(out).index_copy_(0, self.order, out).unflatten(0, x_bsd.shape[:2])
