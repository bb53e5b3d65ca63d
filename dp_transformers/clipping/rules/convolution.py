"""nn.Conv1d, nn.Conv2d and nn.Conv3d with every option. Transposed convolutions are left to the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..layer_rule import HasWeightAndBias, layer_rule, settings
from ..terms import Convolution, Convolved, Outer, Term
from .normalization import require_batch, sum_per_channel


class _Convolution(HasWeightAndBias, Protocol):
    """Conv1d, Conv2d or Conv3d: each option has one number for each dimension of the image."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    padding: tuple[int, ...] | str
    _reversed_padding_repeated_twice: list[int]  # for F.pad: last dimension first, left and right


def _is_native_convolution(module: nn.Module) -> bool:
    # forward is a call of _conv_forward, which a subclass may have replaced
    runs = (type(module).forward, getattr(type(module), "_conv_forward", None))
    return runs in {(cls.forward, cls._conv_forward) for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}


_SETTINGS = ("kernel_size", "stride", "padding", "_reversed_padding_repeated_twice", "dilation", "groups")


@layer_rule(recognise=_is_native_convolution, backward_reads_output=False, reads=settings("padding_mode", *_SETTINGS))
def convolution(
    module: _Convolution, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    terms: dict[nn.Parameter, Term] = {}
    dims = len(module.kernel_size)
    require_batch(module, activations[0], dims)
    if module.weight.requires_grad:
        image, how = _padded(module, _images(activations[0], dims))
        terms[module.weight] = _weight_term(image, _images(backprops, dims), how)
    if module.bias is not None and module.bias.requires_grad:
        terms[module.bias] = sum_per_channel(backprops, backprops.dim() - dims - 1)
    return terms


def _images(x: torch.Tensor, dims: int) -> torch.Tensor:
    """Reshape (b, c, *spatial), or (b, ..., c, *spatial) if frames of the examples were the layer's batch, to
    (b, n, c, *spatial)."""
    return x.flatten(1, -dims - 2) if x.dim() > dims + 2 else x.unsqueeze(1)


def _padded(module: _Convolution, image: torch.Tensor) -> tuple[torch.Tensor, Convolution]:
    """Return the image as the native kernel gets it, and the options of the kernel."""
    widths = module._reversed_padding_repeated_twice
    if module.padding_mode == "zeros" and isinstance(module.padding, tuple):
        padding = module.padding
    elif module.padding_mode == "zeros" and widths[::2] == widths[1::2]:
        padding = tuple(reversed(widths[::2]))
    else:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        image = F.pad(image.flatten(0, 1), widths, mode).unflatten(0, image.shape[:2])
        padding = (0,) * len(module.stride)
    return image, Convolution(module.weight.shape, module.stride, padding, module.dilation, module.groups)


def _weight_term(image: torch.Tensor, grad: torch.Tensor, how: Convolution) -> Term:
    kernel, dims = how.shape[2:], len(how.stride)
    disjoint = (
        how.stride == kernel
        and not any(how.padding)
        and all(k == 1 or d == 1 for k, d in zip(kernel, how.dilation, strict=True))
    )
    if not disjoint or how.groups > 1:
        return Convolved(image, grad, how)
    # Disjoint patches take as much memory as the image, and the layer is linear in them.
    patches = how.patches(image).movedim(2, 2 + dims)
    return Outer(grad.movedim(2, -1).flatten(1, -2), patches.flatten(2 + dims).flatten(1, -2))
