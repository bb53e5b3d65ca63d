"""Noise and dropout on a device: drawn there, from streams of their own, and drawn again where it must be."""

import pytest
import torch
import torch.nn.functional as F

from dp_transformers.noise.generators import GaussianNoise
from dp_transformers.runtime.randomness import (
    SecretSeeds,
    global_state,
    random_state,
    replayed,
    same_state,
    seeded_global_generators,
    set_global_state,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:dp_seed")]


def noise_of(source, device, number=20_000):
    tensors = [torch.zeros(number, device=device), torch.zeros(3, 5, device=device)]
    source.add_(tensors, std=2.0)
    return [x.cpu() for x in tensors]


def dropped(device):
    return F.dropout(torch.ones(1000, device=device)).cpu()


def test_noise_of_a_device_is_drawn_from_its_own_stream(device):
    before = random_state(device)
    (large, small), again = (noise_of(GaussianNoise(dp_seed=3), device) for _ in range(2))
    assert torch.equal(large, again[0]) and torch.equal(small, again[1])
    assert same_state(before, random_state(device))  # whoever seeds torch's generators knows nothing of it
    others = [GaussianNoise(dp_seed=4), GaussianNoise(), GaussianNoise(dp_seed=3).of_step(0)]
    for other in (*(noise_of(source, device)[0] for source in others), large.roll(15)):
        assert abs(torch.corrcoef(torch.stack((large, other)))[0, 1]) < 0.03
    assert large.std() == pytest.approx(2.0, rel=0.03) and abs(large.mean()) < 0.06
    if device.type != "cpu":
        assert not torch.equal(large, noise_of(GaussianNoise(dp_seed=3), "cpu")[0])


def test_a_stream_goes_on(device):
    source = GaussianNoise(dp_seed=3)
    first, second = noise_of(source, device), noise_of(source, device)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(noise_of(source.of_step(7), device)[0], noise_of(source.of_step(7), device)[0])


def test_secure_noise_is_that_of_the_cpu(device):
    pytest.importorskip("cryptography")
    a, b = (noise_of(GaussianNoise(secure=True, entropy=[5]), where, 100)[0] for where in (device, "cpu"))
    assert torch.equal(a, b)


def test_what_a_module_drew_is_drawn_again(device):
    state, everything = random_state(device), global_state(device)
    assert len(state) == (1 if device.type == "cpu" else 2)
    first, second = dropped(device), dropped(device)
    assert not torch.equal(first, second)
    with replayed(state):
        assert torch.equal(dropped(device), first) and torch.equal(dropped(device), second)
    after = dropped(device)
    set_global_state(device, everything)
    assert torch.equal(dropped(device), first) and not torch.equal(after, first)


def test_dropout_is_seeded_from_the_secret(device):
    seeds = SecretSeeds(1)
    before, masks = random_state(device), []
    with seeded_global_generators([1], device):
        for secret in (1, 1, 2):
            SecretSeeds(secret).reseed()
            masks.append(dropped(device))
        for _ in range(2):
            seeds.reseed()
            masks.append(dropped(device))
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[3])
    assert not torch.equal(masks[0], masks[2]) and not torch.equal(masks[3], masks[4])
    assert same_state(before, random_state(device))
