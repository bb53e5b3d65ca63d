"""nn.Linear and Conv1D of GPT-2, option by option."""

import pytest
import torch
from layers import check
from torch import nn
from transformers.pytorch_utils import Conv1D


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 5), (4, 2, 3, 5), (4, 40, 5), (1, 3, 5)], ids=str)
@pytest.mark.parametrize("train", ["both", "weight", "bias", "no bias"])
def test_linear(shape, train):
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3, bias=train != "no bias"))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(train != "bias")
        if layer.bias is not None:
            layer.bias.requires_grad_(train != "weight")
    check(model, torch.randn(shape))


def test_conv1d():
    model = nn.Sequential(Conv1D(7, 5), nn.GELU(), Conv1D(3, 7))
    check(model, torch.randn(4, 6, 5))
