"""LayerNorm, GroupNorm, InstanceNorm, batch normalization with fixed statistics, nn.RMSNorm, and every module that
computes an RMS norm (recognised by what it computes, not by its name)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import HOW_BATCH_NORM_MIXES
from ..fallback import substituted
from ..layer_rule import HasWeight, layer_rule, settings
from ..terms import Dense, Term, summed


def _sum_positions(x: torch.Tensor, keep_dims: int) -> Dense:
    """Sum (B, *middle, *shape) to (B, *shape), with ``keep_dims`` = len(shape)."""
    return summed(x, range(1, x.dim() - keep_dims))


@layer_rule(nn.LayerNorm, backward_reads_output=False, reads=settings("normalized_shape", "eps"))
def layer_norm(
    module: nn.LayerNorm, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    terms: dict[nn.Parameter, Term] = {}
    dims = len(module.normalized_shape)
    if module.weight is not None and module.weight.requires_grad:
        normalised = F.layer_norm(activations[0].to(backprops.dtype), module.normalized_shape, eps=module.eps)
        terms[module.weight] = _sum_positions(normalised.mul_(backprops), dims)
    if module.bias is not None and module.bias.requires_grad:
        terms[module.bias] = _sum_positions(backprops, dims)
    return terms


@layer_rule(nn.RMSNorm, backward_reads_output=False, reads=settings("normalized_shape", "eps"))
def rms_norm(
    module: nn.RMSNorm, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    if module.weight is None or not module.weight.requires_grad:
        return {}
    normalised = F.rms_norm(activations[0].to(backprops.dtype), module.normalized_shape, eps=module.eps)
    return {module.weight: _sum_positions(normalised.mul_(backprops), len(module.normalized_shape))}


def require_batch(module: object, x: torch.Tensor, dims: int) -> None:
    """Raise ValueError unless ``x`` is (B, ..., channels, *spatial) with ``dims`` spatial dimensions. torch allows
    (channels, *spatial) too."""
    if x.dim() < dims + 2:
        raise ValueError(
            f"nn.{type(module).__name__} was called without a batch dimension (a tensor of shape {tuple(x.shape)}), "
            f"so gradients per example cannot be told apart: call it with {dims + 2} dimensions, the batch first."
        )


def sum_per_channel(x: torch.Tensor, channel_dim: int = 1) -> Dense:
    """Sum (B, ..., C, ...) to (B, C)."""
    return summed(x, [dim for dim in range(1, x.dim()) if dim != channel_dim])


class _Affine(Protocol):
    @property
    def weight(self) -> nn.Parameter | None: ...

    @property
    def bias(self) -> nn.Parameter | None: ...


class _InstanceNorm(_Affine, Protocol):
    """InstanceNorm1d, InstanceNorm2d or InstanceNorm3d."""

    training: bool
    track_running_stats: bool
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    eps: float

    def _get_no_batch_dim(self) -> int: ...


def _has_fixed_statistics(module: _InstanceNorm) -> bool:
    return module.track_running_stats and not module.training


def _per_channel(
    module: _Affine, normalised: Callable[[], torch.Tensor], backprops: torch.Tensor, channel_dim: int = 1
) -> dict[nn.Parameter, Term]:
    terms: dict[nn.Parameter, Term] = {}
    if module.weight is not None and module.weight.requires_grad:
        terms[module.weight] = sum_per_channel(normalised().view_as(backprops).mul_(backprops), channel_dim)
    if module.bias is not None and module.bias.requires_grad:
        terms[module.bias] = sum_per_channel(backprops, channel_dim)
    return terms


@layer_rule(nn.GroupNorm, channels_second=True, backward_reads_output=False, reads=settings("num_groups", "eps"))
def group_norm(
    module: nn.GroupNorm, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    def normalised() -> torch.Tensor:
        return F.group_norm(activations[0].float(), module.num_groups, eps=module.eps)

    return _per_channel(module, normalised, backprops)


@layer_rule(
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    backward_reads_output=False,
    reads=lambda module: {"eps": module.eps, "fixed statistics": _has_fixed_statistics(module)},
    reads_tensors=lambda module: _statistics(module) if _has_fixed_statistics(module) else [],
)
def instance_norm(
    module: _InstanceNorm, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    dims = module._get_no_batch_dim() - 1
    require_batch(module, activations[0], dims)

    def normalised() -> torch.Tensor:
        x = activations[0].float().flatten(0, -dims - 2)
        if _has_fixed_statistics(module):
            return F.instance_norm(x, module.running_mean, module.running_var, use_input_stats=False, eps=module.eps)
        return F.group_norm(x, x.shape[1], eps=module.eps)  # the same, and faster than F.instance_norm

    return _per_channel(module, normalised, backprops, backprops.dim() - dims - 1)


def _statistics(module: _InstanceNorm | _BatchNorm) -> list[torch.Tensor]:
    return [cast(torch.Tensor, module.running_mean), cast(torch.Tensor, module.running_var)]


def _require_fixed_statistics(module: _BatchNorm) -> None:
    if module.training or module.running_mean is None or module.running_var is None:
        raise ValueError(f"a {type(module).__name__} {HOW_BATCH_NORM_MIXES}")


@layer_rule(
    _BatchNorm,
    channels_second=True,
    backward_reads_output=False,
    require=_require_fixed_statistics,
    reads=settings("eps"),
    reads_tensors=lambda module: _statistics(module),
)
def batch_norm(
    module: _BatchNorm, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    def normalised() -> torch.Tensor:
        mean, variance = (cast(torch.Tensor, x).float() for x in (module.running_mean, module.running_var))
        return F.batch_norm(activations[0].float(), mean, variance, eps=module.eps)

    return _per_channel(module, normalised, backprops)


def _eps(module: object) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _computes_rms_norm(module: nn.Module) -> bool:
    """Return True if the module computes an RMS norm. Models of transformers have their own classes for it: x̂·w, or
    x̂·(1+w) in Gemma. d out/d w is x̂ in both.

    The module must own nothing but a 1-d ``weight``, and compute either formula on random inputs, small and large (to
    detect clamping), with a random weight, in training and in evaluation.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or module._modules or not _eps(module):
        return False
    if len(inspect.signature(type(module).forward).parameters) != 2:  # self and x: a gate would change the gradient
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, len(weight), generator=generator).to(weight.device)
    w = torch.randn(len(weight), generator=generator).to(weight.device)
    spiked = x.clone()
    spiked[..., 0] = 1e4
    inputs, training = [x, 1e-3 * x, 1e3 * x, spiked], module.training
    try:
        with torch.no_grad(), substituted(module, {weight: w}):
            # the forward of its class, since hooks of the module itself would record this as a forward pass
            outputs = [(x, type(module).forward(module.train(mode), x)) for mode in (True, False) for x in inputs]
    except Exception:  # another signature: not an RMS norm
        return False
    finally:
        module.train(training)
    scales = [
        scale for scale in (w, 1 + w) if all(_is_scaled_rms_norm(x, out, scale, _eps(module)) for x, out in outputs)
    ]
    return bool(scales)


def _is_scaled_rms_norm(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, eps: float | None) -> bool:
    if not isinstance(out, torch.Tensor) or out.shape != x.shape:
        return False
    return torch.allclose(out.float(), F.rms_norm(x, scale.shape, eps=eps) * scale, rtol=1e-5, atol=1e-6)


@layer_rule(recognise=_computes_rms_norm, reads=lambda module: {"eps": _eps(module)})
def _weight_only_rms_norm(
    module: HasWeight, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    normalised = F.rms_norm(activations[0].float(), module.weight.shape, eps=_eps(module))
    return {module.weight: _sum_positions(normalised.mul_(backprops), 1)}
