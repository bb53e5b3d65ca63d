"""nn.Linear and the transposed Conv1D of GPT-2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from ..layer_rule import HasWeightAndBias, layer_rule
from ..terms import Outer, Term, summed


def _btd(x: torch.Tensor) -> torch.Tensor:
    """(B, d) and (B, *middle, d) to (B, T, d)."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def _affine(
    module: HasWeightAndBias, a_btd: torch.Tensor, g_btp: torch.Tensor, transposed: bool
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
    return _affine(module, _btd(activations[0]), _btd(backprops), transposed=False)


def _is_conv1d(module: nn.Module) -> bool:
    # looked up among what is already imported: this package does not depend on transformers, and a model that has one
    # has it
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    return pytorch_utils is not None and type(module).forward is pytorch_utils.Conv1D.forward


@layer_rule(recognise=_is_conv1d)
def conv1d(
    module: HasWeightAndBias, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, Term]:
    """transformers' Conv1D: a linear layer whose weight is stored as (in, out)."""
    return _affine(module, _btd(activations[0]), _btd(backprops), transposed=True)
