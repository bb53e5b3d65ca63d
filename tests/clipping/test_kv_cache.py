"""Caches are off while batches are clipped, and on again everywhere else."""

import pytest
import torch
import transformers as hf
from oracle import errors, per_example_gradients
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.modes import MODES

SEEN = []  # outside of the model, where no watch on it looks


class Block(nn.Module):
    """Has no rule, and cannot be re-run once it has filled a cache."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x, cache):
        if cache is None:
            return torch.fmax(x, self.weight)
        cache.append(torch.fmax(x, self.weight))
        return torch.stack(cache).sum(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = hf.LlamaConfig(use_cache=True)
        self.first, self.block = nn.Linear(3, 3), Block()

    def forward(self, x, use_cache=None, past_key_values=None):
        used = self.config.use_cache if use_cache is None else use_cache
        SEEN.append(used)
        return self.block(self.first(x), [] if used else None)


def used(model, *args, **kwargs):
    """Whether the model fills a cache."""
    model(*args, **kwargs)
    return SEEN[-1]


@pytest.mark.parametrize("self_check", [True, False])
def test_off_in_clipped_passes_alone(self_check):
    model, x = Model(), torch.randn(4, 3)
    with PerExampleClipper(model, 1.0, self_check=self_check) as clipper:
        assert used(model, x) is False and model.config.use_cache
        assert used(model, x, use_cache=True) is True
        assert used(model, x, past_key_values=object()) is True
        with torch.no_grad():
            assert used(model, x) is True
        with clipper.suspended():
            assert used(model, x) is True
    assert model.config.use_cache


def test_on_again_after_a_pass_that_raised():
    model = Model()
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(4, 2))
        assert model.config.use_cache
        clipper.backward(model(torch.randn(4, 3)).sum(1))


def test_a_layer_that_fills_a_cache_is_re_run_by_itself():
    model, x = Model(), torch.randn(4, 3)
    oracle = per_example_gradients(model, lambda b: model(b["x"]).sum(1), {"x": x})
    for mode in sorted(MODES):
        norm_error, sum_error, owners = errors(model, mode, {"x": x}, lambda b: model(b["x"]).sum(1), oracle)
        assert max(norm_error, sum_error) <= 1e-5
        assert [owner.path for owner in owners if not owner.has_rule] == ["block"]


def test_the_memories_of_xlnet_are_no_outputs():
    """They come in evaluation alone, with the choices of all examples in one dimension."""
    sizes = {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "dropout": 0.0}
    model = hf.XLNetForMultipleChoice(hf.XLNetConfig(**sizes))
    ids = torch.randint(5, 50, (3, 2, 7))
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.backward(torch.logsumexp(model(ids).logits, 1))
    assert model.config.use_mems_eval
