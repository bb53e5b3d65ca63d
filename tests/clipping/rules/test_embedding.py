"""nn.Embedding and nn.EmbeddingBag, option by option, in every mode."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import ALL_MODES, assert_exact_in_all_modes, check, drawn, overwritten, weigh
from torch import nn

from dp_transformers import PerExampleClipper


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 2, 5)], ids=str)
def test_embedding(shape, padding_idx, mode):
    model = nn.Sequential(nn.Embedding(7, 5, padding_idx=padding_idx), nn.Linear(5, 2))
    ids = torch.randint(0, 4, shape)
    ids[0] = 1
    if padding_idx is not None:
        ids[1, ...] = padding_idx
    check(model, ids, mode)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_embedding_options_that_are_refused(option):
    model = nn.Sequential(nn.Embedding(7, 5, **option), nn.Linear(5, 2))
    clipper = PerExampleClipper(model, 1.0, self_check=False)
    with pytest.raises(ValueError, match=rf"^'0' \(Embedding\): .*{next(iter(option))}"):
        clipper.backward(weigh(model(torch.randint(0, 7, (4, 3)))))


@drawn
@given(st.data())
def test_embedding_bags(data):
    torch.manual_seed(0)
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]))
    rows, d, batch, n = (data.draw(st.integers(low, 6)) for low in (2, 1, 1, 1))
    padding_idx = data.draw(st.sampled_from([None, 0, 1]))
    layer = nn.EmbeddingBag(rows, d, mode=mode, padding_idx=padding_idx)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=batch * n, max_size=batch * n))).view(
        batch, n
    )
    ids[:, 0] = 0 if padding_idx != 0 else 1  # no gradient at all would show nothing
    weighted = mode == "sum" and data.draw(st.booleans())
    model = WeightedBag(layer) if weighted else overwritten(layer)
    assert_exact_in_all_modes(model, ids, *([torch.randn(batch, n)] if weighted else []))


class WeightedBag(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, ids, weights):
        return self.layer(ids, per_sample_weights=weights)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_of_padding_and_a_frozen_bag(mode):
    layer = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=2)
    ids = torch.tensor([[2, 2, 2], [1, 2, 1], [0, 3, 4]])
    with PerExampleClipper(layer, 1.0) as clipper:
        assert clipper.backward(weigh(layer(ids)))[0] == 0 and not layer.weight.grad[2].any()
    assert_exact_in_all_modes(layer, ids[1:])
    model = nn.Sequential(layer.requires_grad_(False), nn.Linear(3, 2))
    assert_exact_in_all_modes(model, ids)


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"sparse": True, "mode": "sum"}, {"scale_grad_by_freq": True}], ids=str
)
def test_embedding_bag_options_that_are_refused(option):
    layer = nn.EmbeddingBag(7, 5, **option)
    clipper = PerExampleClipper(layer, 1.0, self_check=False)
    with pytest.raises(ValueError, match=rf"EmbeddingBag\({next(iter(option))}=...\) cannot be trained privately"):
        clipper.backward(weigh(layer(torch.randint(0, 7, (4, 3)))))


def test_embedding_bags_with_offsets_are_refused():
    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(7, 5)

        def forward(self, ids):
            return self.bag(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1]))

    model = Ragged()
    for self_check in (False, True):
        with (
            PerExampleClipper(model, 1.0, self_check=self_check) as clipper,
            pytest.raises(ValueError, match=r"ids of shape \(B, n\)"),
        ):
            clipper.backward(weigh(model(torch.randint(0, 7, (4, 3)))))
