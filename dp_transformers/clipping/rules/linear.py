"""nn.Linear, nn.Bilinear, nn.PReLU, and the transposed Conv1D of GPT-2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from ..layer_rule import HasWeightAndBias, layer_rule, settings
from ..terms import Outer, Term, summed
from .normalization import sum_per_channel


def _btd(x: torch.Tensor) -> torch.Tensor:
    """Reshape (B, d) or (B, *middle, d) to (B, T, d)."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def _affine(
    module: HasWeightAndBias, a_btd: torch.Tensor, g_btp: torch.Tensor, transposed: bool = False
) -> dict[nn.Parameter, Term]:
    terms: dict[nn.Parameter, Term] = {}
    if module.weight.requires_grad:
        terms[module.weight] = Outer(a_btd, g_btp) if transposed else Outer(g_btp, a_btd)
    if module.bias is not None and module.bias.requires_grad:
        terms[module.bias] = summed(g_btp, (1,))
    return terms


@layer_rule(nn.Linear, backward_reads_output=False)
def linear(
    module: HasWeightAndBias, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    return _affine(module, _btd(activations[0]), _btd(backprops))


def _is_conv1d(module: nn.Module) -> bool:
    # looked up among imported modules: this package does not depend on transformers, and such a model imported it
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    return pytorch_utils is not None and type(module).forward is pytorch_utils.Conv1D.forward


@layer_rule(recognise=_is_conv1d)
def conv1d(
    module: HasWeightAndBias, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    """Return the terms of transformers' Conv1D, a linear layer with a weight of shape (in, out)."""
    return _affine(module, _btd(activations[0]), _btd(backprops), transposed=True)


@layer_rule(nn.Bilinear, backward_reads_output=False)
def bilinear(
    module: HasWeightAndBias, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    first, second = (_btd(x).float() for x in activations)
    products_btd = (first.unsqueeze(3) * second.unsqueeze(2)).flatten(2)
    return _affine(module, products_btd, _btd(backprops))


@layer_rule(nn.PReLU, channels_second=True, backward_reads_output=False, reads=settings("num_parameters"))
def prelu(module: nn.PReLU, activations: Sequence[torch.Tensor], backprops: torch.Tensor) -> dict[nn.Parameter, Term]:
    if not module.weight.requires_grad:
        return {}
    slope = activations[0].float().clamp(max=0).mul_(backprops)
    if module.num_parameters == 1:
        slope = slope.unsqueeze(1)
        return {module.weight: summed(slope, range(2, slope.dim()))}
    return {module.weight: sum_per_channel(slope)}
