"""Made-up examples of classes that can be learned, and how many are told apart."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

PADDING, BEGIN = 0, 1  # tokens of `texts`
State: TypeAlias = tuple[
    nn.Module, Any
]  # after an epoch: what is trained, and the engine of whichever library, or None


def images(rows: int, channels: int, size: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, channels, size, size) images, each one of `classes` coarse patterns under noise, and (rows,) classes."""
    fixed = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(classes, channels, size // 4, size // 4, generator=fixed), scale_factor=4.0)
    labels = torch.randint(classes, (rows,))
    return patterns[labels] + torch.randn(rows, channels, size, size), labels


def texts(rows: int, length: int, vocabulary: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, length) tokens, the ends padded, and (rows,) classes: every other token, on average, is one of a tenth of
    the vocabulary that its class prefers."""
    labels = torch.randint(classes, (rows,))
    tenth = vocabulary // 10
    preferred = BEGIN + 1 + labels[:, None] * tenth + torch.randint(tenth - 2, (rows, length))
    tokens = torch.where(
        torch.rand(rows, length) < 0.5, preferred, torch.randint(BEGIN + 1, vocabulary, (rows, length))
    )
    tokens[:, 0] = BEGIN
    ends = torch.randint(length // 2, length + 1, (rows, 1))
    return tokens.masked_fill(torch.arange(length) >= ends, PADDING), labels


@torch.no_grad()
def accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of inputs whose largest logit is that of their label; the model goes on in training mode."""
    model.eval()
    right = (model(inputs).argmax(1) == labels).float().mean().item()
    model.train()
    return right
