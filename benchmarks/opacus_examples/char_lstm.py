"""The language of a name, read by an LSTM over its letters, as in `examples/char-lstm-classification.py` and in the
tutorial on names. All are padded to one length: the LSTM's last output is looked at, which padding to the longest name
of a batch would change."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from . import made_up

BATCH_SIZE, DELTA = 64, 1e-5


class NameClassifier(nn.Module):
    def __init__(self, lstm):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(100, 64), lstm(64, 128, batch_first=True)
        self.out = nn.Linear(128, 5)

    def forward(self, ids):
        return self.out(self.lstm(self.embedding(ids))[0][:, -1])


def plain(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    model = NameClassifier(nn.LSTM)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, None


def private(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from dp_transformers import PrivacyEngine

    model = NameClassifier(nn.LSTM)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.5
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, engine


def opacus(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from opacus import PrivacyEngine
    from opacus.layers import DPLSTM

    model = NameClassifier(DPLSTM)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.5
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, engine


def rows(number: int) -> TensorDataset:
    return TensorDataset(*made_up.texts(number, 15, 100, 5))


def outcome(model: nn.Module, test: TensorDataset) -> float:
    return made_up.accuracy(model, *test.tensors)
