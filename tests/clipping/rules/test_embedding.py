"""nn.Embedding and nn.EmbeddingBag, option by option."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import ALL_MODES, Calls, assert_exact_by_rule, check, drawn, overwritten, weigh
from torch import nn

from dp_transformers import ModuleValidator, PerExampleClipper
from dp_transformers.clipping.errors import SelfCheckError


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 2, 5)], ids=str)
def test_embedding(shape, padding_idx):
    model = nn.Sequential(nn.Embedding(7, 5, padding_idx=padding_idx), nn.Linear(5, 2))
    ids = torch.randint(0, 4, shape)
    ids[0] = 1
    if padding_idx is not None:
        ids[1, ...] = padding_idx
    check(model, ids)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
def test_options_that_are_refused(layer, option):
    model = nn.Sequential(layer(7, 5, **{option: 1.0 if option == "max_norm" else True}), nn.Linear(5, 2))
    clipper = PerExampleClipper(model, 1.0, self_check=False)
    with pytest.raises(
        ValueError, match=rf"'0' \({layer.__name__}\): .*{option}|EmbeddingBag\({option}=...\) cannot be"
    ):
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
    model = (
        Calls(lambda m, ids, w: m.layer(ids, per_sample_weights=w), layer=layer) if weighted else overwritten(layer)
    )
    every = data.draw(st.sampled_from(ALL_MODES))
    assert_exact_by_rule(model, ids, *([torch.randn(batch, n)] if weighted else []), mode=every)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_of_padding_and_a_frozen_bag(mode):
    layer = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=2)
    ids = torch.tensor([[2, 2, 2], [1, 2, 1], [0, 3, 4]])
    with PerExampleClipper(layer, 1.0) as clipper:
        assert clipper.backward(weigh(layer(ids)))[0] == 0 and not layer.weight.grad[2].any()
    assert_exact_by_rule(layer, ids[1:])
    model = nn.Sequential(layer.requires_grad_(False), nn.Linear(3, 2))
    assert_exact_by_rule(model, ids)


class MadeInside(nn.Module):
    def __init__(self, per_example=1):
        super().__init__()
        self.bag, self.per_example = nn.EmbeddingBag(7, 5), per_example

    def forward(self, ids):
        n = ids.shape[1] // self.per_example
        return self.bag(ids.flatten(), torch.arange(0, ids.numel(), n)).view(len(ids), -1)


@pytest.mark.parametrize("per_example", [1, 2])
def test_offsets_that_the_model_makes(per_example):
    model = MadeInside(per_example)
    assert_exact_by_rule(model, torch.randint(0, 7, (4, 6)))
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.backward(weigh(model(torch.randint(0, 7, (4, 6)))))


def test_bags_that_are_no_example_s():
    class Dropped(MadeInside):
        def forward(self, ids):
            return self.bag(ids.flatten(), torch.tensor([0, 3, 5])).sum(0).expand(len(ids), 5)

    model = Dropped()
    with PerExampleClipper(model, 1.0) as clipper, pytest.raises(ValueError, match="(?s)EmbeddingBag|mixes|not exact"):
        clipper.backward(weigh(model(torch.randint(0, 7, (4, 3)))))


class Bags(nn.Module):
    """As in torch's own tutorial of text classification."""

    def __init__(self, **options):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(11, 5, **options), nn.Linear(5, 3)

    def forward(self, text, offsets, per_sample_weights=None):
        return self.out(self.bag(text, offsets, per_sample_weights))


def alone(text, offsets, weights=None, *, all_offsets=False):
    """The arguments of each example by itself."""
    starts = offsets.tolist() if all_offsets else [*offsets.tolist(), len(text)]
    for first, end in pairwise(starts):
        own = torch.tensor([0, end - first] if all_offsets else [0])
        yield (text[first:end], own) if weights is None else (text[first:end], own, weights[first:end])


@drawn
@given(st.data())
def test_ids_and_offsets_as_input(data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    kind, all_offsets = data.draw(st.sampled_from(["sum", "mean", "max"])), data.draw(st.booleans())
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)))
    lengths[0] += 1
    weighted = kind == "sum" and data.draw(st.booleans())
    text, ends = torch.randint(0, 11, (int(lengths.sum()),)), lengths.cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends])[: None if all_offsets else -1]
    given = (text, offsets, torch.randn(len(text))) if weighted else (text, offsets)
    padding_idx = data.draw(st.sampled_from([None, 2]))
    model = Bags(mode=kind, include_last_offset=all_offsets, padding_idx=padding_idx)
    singles = []
    for one in alone(*given, all_offsets=all_offsets):
        grads = torch.autograd.grad(weigh(model(*one)).sum(), list(model.parameters()))
        singles.append(torch.cat([g.flatten() for g in grads]))
    norms = torch.stack(singles).norm(dim=1)
    bound = float(norms.median())
    expected = sum(g * min(1.0, bound / float(n)) for g, n in zip(singles, norms, strict=True))
    for mode in ALL_MODES:
        model.zero_grad()
        with PerExampleClipper(model, bound, mode=mode, self_check=False) as clipper:
            found = clipper.backward(weigh(model(*given)))
        torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-6)
        total = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


class Neighbours(Bags):
    def forward(self, text, offsets):
        y = self.bag(text, offsets)
        return self.out(y + 0.1 * y.roll(1, 0))


def test_a_bag_that_reads_another_is_refused():
    batch = {"text": torch.randint(0, 11, (9,)), "offsets": torch.tensor([0, 2, 5, 6])}
    assert ModuleValidator.find_mixing(Bags(), batch) is None
    assert ModuleValidator.find_mixing(Neighbours(), batch) is not None
    model = Neighbours()
    with PerExampleClipper(model, 1.0) as clipper, pytest.raises(SelfCheckError, match="moved by|not exact"):
        clipper.backward(weigh(model(torch.randint(0, 11, (9,)), torch.tensor([0, 2, 5]))))
