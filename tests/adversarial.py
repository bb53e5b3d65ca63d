"""Clipping functions as formulas, and batches of losses of any size."""

from __future__ import annotations

import math

import torch
from torch import nn

from dp_transformers.mechanism.clipping_functions import (
    AutomaticClipping,
    FlatClipping,
    NormalisedClipping,
    PerSampleAdaptiveClipping,
)

SIZE = 6
# of a norm above 0, in Python's numbers
COEFFICIENTS = {
    FlatClipping(0.7): lambda n: min(1.0, 0.7 / n),
    AutomaticClipping(0.7): lambda n: 0.7 / (n + 0.01),
    AutomaticClipping(30.0, gamma=1e-4): lambda n: 30 / (n + 1e-4),
    NormalisedClipping(0.7): lambda n: 0.7 / max(n, 1e-12),
    PerSampleAdaptiveClipping(0.7): lambda n: 0.7 * (n + 0.1) / (n * n + 0.1 * n + 0.1),
    PerSampleAdaptiveClipping(0.02, r=1.0): lambda n: 0.02 * (n + 1) / (n * n + n + 1),
}


class Net(nn.Module):
    """A table tied to the head, and a layer that is called twice, over positions."""

    def __init__(self):
        super().__init__()
        self.table, self.twice, self.norm = nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.table.weight

    def forward(self, ids, scale):
        hidden = self.twice(self.twice(self.table(ids)).tanh())
        return self.head(self.norm(hidden).mean(1)).square().sum(1) * scale


def adversarial(seed):
    """Ids, and by how much each loss is multiplied: any size, none, not finite, or all examples alike."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 7, (SIZE, 3), generator=generator)
    scale = 10 ** (24 * torch.rand(SIZE, generator=generator) - 12)
    if seed % 4 == 1:
        ids, scale = ids[:1].expand(SIZE, 3).clone(), scale[:1].expand(SIZE).clone()
    if seed % 4 == 2:
        scale[seed % SIZE] = 0.0
    if seed % 4 == 3:
        scale[seed % SIZE] = (math.inf, math.nan, -math.inf)[seed // 4 % 3]
    return {"ids": ids, "scale": scale}
