"""Checks of models and data before training."""

import pytest
import torch
from datasets import Dataset
from models import build
from torch import nn

from dp_transformers.validation import longest_input, validate_lengths, validate_model


def test_batch_norm_is_named():
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Sequential(nn.BatchNorm1d(2)))
    with pytest.raises(ValueError, match=r"'1.0' is a BatchNorm1d.*GroupNorm"):
        validate_model(model)
    validate_model(build("bert"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_modules_that_keep_private_data_without_noise_are_named():
    frozen = nn.Embedding(5, 3, max_norm=1.0).requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0' is a Embedding with max_norm"):
        validate_model(nn.Sequential(frozen, nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"'1' is a InstanceNorm1d with running statistics"):
        validate_model(nn.Sequential(nn.Linear(3, 2), nn.InstanceNorm1d(2, track_running_stats=True)))
    with pytest.raises(ValueError, match="compiled"):
        validate_model(torch.compile(nn.Linear(3, 2)))


def test_longest_input():
    assert longest_input(build("bert")) == 512
    assert longest_input(build("gpt2")) == 64
    assert longest_input(build("llama")) is None
    assert longest_input(build("gpt2", lora=True)) == 64


@pytest.mark.parametrize("kind", ["arrow", "torch format", "list"])
def test_too_long_an_example(kind):
    rows = [{"input_ids": [1] * n} for n in (3, 65, 7)]
    data = rows if kind == "list" else Dataset.from_list(rows)
    if kind == "torch format":
        data = data.with_format("torch")
    with pytest.raises(ValueError, match=r"65 tokens.*64 only.*max_length=64"):
        validate_lengths(build("gpt2"), data)
    validate_lengths(build("gpt2"), [rows[0]])
    validate_lengths(build("llama"), data)
    validate_lengths(build("gpt2"), [{"pixels": torch.zeros(3)}])
