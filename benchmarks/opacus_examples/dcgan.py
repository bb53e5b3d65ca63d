"""A generator of digits against a private discriminator, as in `examples/dcgan.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from . import made_up

BATCH_SIZE, DELTA, LATENT = 64, 1e-5, 32


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Linear(LATENT, 1024), nn.Unflatten(1, (64, 4, 4))),
            *(nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.GroupNorm(8, 32), nn.ReLU()),
            *(nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.GroupNorm(8, 16), nn.ReLU()),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        )


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(16, 32, 4, stride=2, padding=1), nn.GroupNorm(8, 32), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.GroupNorm(8, 64), nn.LeakyReLU(0.2)),
            *(nn.Flatten(), nn.Linear(1024, 1), nn.Flatten(0)),
        )


def plain(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    generator, discriminator = Generator(), Discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    for _ in range(epochs):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), LATENT))
            optimizer_d.zero_grad()
            losses = F.softplus(-discriminator(real)) + F.softplus(discriminator(fake.detach()))
            losses.mean().backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            F.softplus(-discriminator(fake)).mean().backward()
            optimizer_g.step()
        yield generator, None


def private(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from dp_transformers import PrivacyEngine

    generator, discriminator = Generator(), Discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    discriminator, optimizer_d, loader = engine.make_private(
        module=discriminator, optimizer=optimizer_d, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for _ in range(epochs):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), LATENT))
            optimizer_d.zero_grad()
            losses = F.softplus(-discriminator(real)) + F.softplus(discriminator(fake.detach()))
            losses.mean().backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            with engine.suspended():
                F.softplus(-discriminator(fake)).mean().backward()
            optimizer_g.step()
        yield generator, engine


def opacus(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from opacus import PrivacyEngine

    generator, discriminator = Generator(), Discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    discriminator, optimizer_d, loader = engine.make_private(
        module=discriminator, optimizer=optimizer_d, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for _ in range(epochs):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), LATENT))
            optimizer_d.zero_grad()
            losses = F.softplus(-discriminator(real)) + F.softplus(discriminator(fake.detach()))
            losses.mean().backward()
            optimizer_d.step()
            optimizer_d.zero_grad()
            optimizer_g.zero_grad()
            F.softplus(-discriminator(fake)).mean().backward()
            optimizer_g.step()
        yield generator, engine


def rows(number: int) -> TensorDataset:
    return TensorDataset(made_up.images(number, 1, 32, 1)[0])


@torch.no_grad()
def outcome(generator: nn.Module, test: TensorDataset) -> float:
    """How far the average generated picture is from the average real one, by the root mean square of its pixels."""
    (real,) = test.tensors
    return (generator(torch.randn(256, LATENT)).mean(0) - real.mean(0)).square().mean().sqrt().item()
