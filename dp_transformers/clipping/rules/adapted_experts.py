"""Adapters on the weights of fused experts (peft's ``target_parameters``), which only ever use the sum of both.

Each ``ParamWrapper``, one around the other, adds a low-rank product to one weight of the experts while these run,

    W + s·L·R,   L (e, p, r), R (e, r, d).

With G the gradient of W, and so of the sum, the gradient of L is s·G·Rᵀ, and that of R is s·Lᵀ·G. G is never formed:
it is a sum of outer products over slots (:mod:`.experts`), and so are the two others. L and R are the weights of two
``nn.Linear`` that are never called, A of shape (e·r, in) and B of shape (out, r·e)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from ..errors import UnsupportedModuleError
from ..layer_rule import layer_rule
from ..parallel.dispatch import class_forward
from ..terms import Routed, Term
from .experts import Routing, are_fused_experts, settings_of_experts, tensors_of_experts, terms_by_name

_ADAPTED = {"gate_up_proj", "up_proj", "down_proj"}

if TYPE_CHECKING:
    from .experts import Experts

    class _Wrapper(nn.Module):
        """The attributes of peft's ``ParamWrapper`` besides its parameters."""

        base_layer: nn.Module
        parameter_name: str
        active_adapters: list[str]
        disable_adapters: bool
        merged: bool
        num_experts: int
        scaling: dict[str, float]


class _Adapter(NamedTuple):
    """One low-rank product, added to the weight called ``name``, times ``scaling``."""

    name: str
    a: nn.Parameter
    b: nn.Parameter
    a_erd: torch.Tensor  # d and p are the inputs and outputs of the weight, as peft understands it
    b_epr: torch.Tensor
    scaling: float
    outputs_first: bool  # True if the weight is (e, p, d), False if it is (e, d, p)


def _are_adapted_experts(module: nn.Module) -> bool:
    wrappers, inside = _unwrapped(module)
    if not wrappers or not are_fused_experts(inside) or not _ADAPTED.issuperset(w.parameter_name for w in wrappers):
        return False
    factors = {id(p) for wrapper in wrappers for a in _adapters(wrapper) for p in (a.a, a.b)}
    known = factors.union(map(id, inside.parameters()))
    return all(id(p) in known for p in module.parameters() if p.requires_grad)


def _unwrapped(module: nn.Module) -> tuple[list[_Wrapper], nn.Module]:
    """Return the wrappers, the outermost first, and the module inside."""
    # looked up among imported modules: this package does not depend on peft, and a model with a wrapper imported it
    wrapper_class = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    wrappers: list[_Wrapper] = []
    while wrapper_class is not None and class_forward(module) is wrapper_class.forward:
        wrappers.append(cast("_Wrapper", module))
        module = wrappers[-1].base_layer
    return wrappers, module


def _adapters(wrapper: _Wrapper) -> list[_Adapter]:
    """Return the active adapters."""
    lora_a, lora_b = cast(nn.ModuleDict, wrapper.lora_A), cast(nn.ModuleDict, wrapper.lora_B)
    found = []
    for name in wrapper.active_adapters:
        if name in lora_a:
            a, b = cast(nn.Parameter, lora_a[name].weight), cast(nn.Parameter, lora_b[name].weight)
            a_erd = a.detach().unflatten(0, (wrapper.num_experts, -1))
            b_epr = b.detach().unflatten(1, (-1, wrapper.num_experts)).movedim(2, 0)
            swapped = getattr(wrapper, "_did_swap_in_out_features", False)  # older releases never do
            found.append(_Adapter(wrapper.parameter_name, a, b, a_erd, b_epr, wrapper.scaling[name], swapped))
    return found


def _require_active(module: nn.Module) -> None:
    wrappers, inside = _unwrapped(module)
    for wrapper in wrappers:
        if getattr(inside, wrapper.parameter_name).requires_grad:
            raise ValueError(
                f"'{wrapper.parameter_name}' of {type(inside).__name__} is trained, and so are adapters on it "
                "(target_parameters): peft writes to that weight in every forward pass, which could hide private data "
                "in it. Freeze the weight (requires_grad_(False)), or train it without adapters."
            )
    if any(wrapper.disable_adapters or wrapper.merged for wrapper in wrappers):
        raise UnsupportedModuleError(
            "adapters on the weights of experts (target_parameters) are disabled or merged in a forward pass that is "
            "clipped, where they have no gradient: enable or unmerge them, or run that pass under torch.no_grad().",
            module,
        )


def _settings(module: nn.Module) -> dict[str, object]:
    """Return the scaling of each weight and active adapter, and the settings of the experts."""
    wrappers, inside = _unwrapped(module)
    scalings = {f"{w.parameter_name}.{name}": w.scaling[name] for w in wrappers for name in w.active_adapters}
    return scalings | settings_of_experts(inside)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the factors of active adapters, and the weights of the experts."""
    wrappers, inside = _unwrapped(module)
    factors = [p for wrapper in wrappers for adapter in _adapters(wrapper) for p in (adapter.a, adapter.b)]
    return factors + tensors_of_experts(inside)


@layer_rule(
    recognise=_are_adapted_experts,
    covers_children=True,
    require=_require_active,
    reads=_settings,
    reads_tensors=_tensors,
)
def adapted_experts(
    module: nn.Module, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    wrappers, inside = _unwrapped(module)
    adapters = [adapter for wrapper in wrappers for adapter in _adapters(wrapper)]
    weights = {name: p.detach() for name, p in inside.named_parameters()}
    for adapter in adapters:
        weights[adapter.name] = _added(weights[adapter.name], adapter)
    terms = terms_by_name(cast("Experts", inside), weights, activations, backprops)
    found = {p: terms[name] for name, p in inside.named_parameters() if p.requires_grad}
    for adapter in adapters:
        found |= _terms(adapter, cast(Routed, terms[adapter.name]))
    return found


def _added(weight: torch.Tensor, adapter: _Adapter) -> torch.Tensor:
    """Return the weight with the adapter, in the precision of the weight."""
    b_epr, a_erd = (factor.to(weight.dtype) for factor in (adapter.b_epr, adapter.a_erd))
    pair = (b_epr, a_erd) if adapter.outputs_first else (a_erd.mT, b_epr.mT)
    return torch.baddbmm(weight, *pair, alpha=adapter.scaling)


def _terms(adapter: _Adapter, whole: Routed) -> dict[nn.Parameter, Term]:
    out_bsp, in_bsd = (whole.left, whole.right) if adapter.outputs_first else (whole.right, whole.left)
    linear = Routing(whole.ids, whole.num_experts)
    reduced_out_bsr = linear(out_bsp, adapter.b_epr.float()) * adapter.scaling
    reduced_in_bsr = linear(in_bsd, adapter.a_erd.mT.float()) * adapter.scaling
    return {
        adapter.a: Routed(whole.ids, reduced_out_bsr, in_bsd, whole.num_experts),
        adapter.b: Routed(whole.ids, out_bsp, reduced_in_bsr, whole.num_experts, experts_last=True),
    }
