"""A small ResNet whose batch norm is replaced, in batches of what fits the device, as in the tutorial on images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from . import made_up

BATCH_SIZE, DELTA = 64, 1e-5


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


class ResNet(nn.Sequential):
    def __init__(self):
        stem = (nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        blocks = (Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def plain(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    model = ResNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, None


def private(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from dp_transformers import ModuleValidator, PrivacyEngine

    model = ModuleValidator.fix(ResNet())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, epochs=epochs, target_epsilon=50.0, target_delta=DELTA,
        max_grad_norm=1.2, max_physical_batch_size=32,
    )  # fmt: skip
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, engine


def opacus(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(ResNet())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, epochs=epochs, target_epsilon=50.0, target_delta=DELTA,
        max_grad_norm=1.2,
    )  # fmt: skip
    for _ in range(epochs):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=32, optimizer=optimizer) as batches:
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        yield model, engine


def rows(number: int) -> TensorDataset:
    return TensorDataset(*made_up.images(number, 3, 32, 10))


def outcome(model: nn.Module, test: TensorDataset) -> float:
    return made_up.accuracy(model, *test.tensors)
