"""Reviews told apart by the average of their words' embeddings, as in `examples/imdb.py`. All are padded to one
length: the average is over padding too, so that otherwise one review had a say in the averages of others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from . import made_up

BATCH_SIZE, DELTA = 64, 1e-5


class AverageOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10_000, 16)
        self.hidden, self.out = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, ids):
        return self.out(F.relu(self.hidden(self.embedding(ids).mean(1))))


def plain(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    model = AverageOfWords()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, None


def private(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from dp_transformers import PrivacyEngine

    model = AverageOfWords()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, engine


def opacus(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from opacus import PrivacyEngine

    model = AverageOfWords()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, engine


def rows(number: int) -> TensorDataset:
    return TensorDataset(*made_up.texts(number, 256, 1000, 2))


def outcome(model: nn.Module, test: TensorDataset) -> float:
    return made_up.accuracy(model, *test.tensors)
