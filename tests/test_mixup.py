"""What a loop does with rows before it calls the model: MixUp and CutMix are recognised, and nothing else refused."""

import pytest
import torch

from dp_transformers.data.refused import refuse_mixed


def erased(x):
    x = x.clone()
    x[:, :, 2:6, 2:6] = 0
    return x


OWN = {
    "as they are": lambda x: x,
    "copied": torch.clone,
    "normalised": lambda x: (x - 0.5) / 0.2,
    "with noise": lambda x: x + 0.1 * torch.randn_like(x),
    "flipped": lambda x: x.flip(3),
    "shifted": lambda x: x.roll(2, 3),
    "erased": erased,
    "sorted": lambda x: x[x.flatten(1).sum(1).argsort()],
    "sorted and normalised": lambda x: (x[x.flatten(1).sum(1).argsort()] - 0.5) / 0.2,
    "in half precision": lambda x: x.half().float(),
}


def images(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(12, 3, 8, 8, generator=generator)
    return x if kind == "photos" else torch.where(x > 0.8, x, 0)  # mostly black, as written digits


@pytest.mark.parametrize("kind", ["photos", "digits"])
@pytest.mark.parametrize("change", OWN)
def test_rows_of_their_own_are_taken(change, kind):
    x = images(kind)
    is_other = refuse_mixed([x, torch.arange(12)], ((), {"x": OWN[change](x)}), 12)
    assert is_other == (change not in ("as they are", "copied"))
