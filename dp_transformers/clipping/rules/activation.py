"""nn.PReLU and nn.Bilinear."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..layer_rule import HasWeightAndBias, layer_rule, settings
from ..terms import Outer, Term, summed
from .normalization import sum_per_channel


@layer_rule(nn.PReLU, channels_second=True, backward_reads_output=False, reads=settings("num_parameters"))
def prelu(module: nn.PReLU, activations: Sequence[torch.Tensor], backprops: torch.Tensor) -> dict[nn.Parameter, Term]:
    if not module.weight.requires_grad:
        return {}
    slope = activations[0].float().clamp(max=0).mul_(backprops)
    if module.num_parameters == 1:
        slope = slope.unsqueeze(1)
        return {module.weight: summed(slope, range(2, slope.dim()))}
    return {module.weight: sum_per_channel(slope)}


@layer_rule(nn.Bilinear, backward_reads_output=False)
def bilinear(
    module: HasWeightAndBias, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    terms: dict[nn.Parameter, Term] = {}
    first, second, grad_btp = (x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2) for x in (*activations, backprops))
    if module.weight.requires_grad:
        products_btd = (first.float().unsqueeze(3) * second.float().unsqueeze(2)).flatten(2)
        terms[module.weight] = Outer(grad_btp, products_btd)
    if module.bias is not None and module.bias.requires_grad:
        terms[module.bias] = summed(grad_btp, (1,))
    return terms
