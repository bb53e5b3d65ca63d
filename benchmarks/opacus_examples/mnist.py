"""Digits told apart by two convolutions, as in `examples/mnist.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from . import made_up

BATCH_SIZE, DELTA = 64, 1e-5


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Conv2d(16, 32, 4, stride=2)
        self.fc1, self.fc2 = nn.Linear(512, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, stride=1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, stride=1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def plain(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, None


def private(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from dp_transformers import PrivacyEngine

    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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

    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    return TensorDataset(*made_up.images(number, 1, 28, 10))


def outcome(model: nn.Module, test: TensorDataset) -> float:
    return made_up.accuracy(model, *test.tensors)
