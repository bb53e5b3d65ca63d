"""Norms of many parameters, added up together."""

import weakref

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_exact
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.norms import FP32, SPLIT, DirectNorm, GhostNorm, NormAccumulator
from dp_transformers.clipping.terms import dense

CPU = torch.device("cpu")
VIEWS = {"view", "t", "transpose", "detach", "unsqueeze", "diagonal", "_unsafe_view", "expand", "split", "slice", "alias"}  # fmt: skip


def weigh(out):
    """(B,): a loss of which no gradient is zero."""
    weight = torch.randn(out.shape[1:].numel(), generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    return torch.tanh(out).flatten(1) @ weight


measured = st.tuples(st.sampled_from(["length", "product"]), st.sampled_from([None, FP32, SPLIT]), st.integers(1, 3))


def some(kind, rounding, positions, b, g):
    if kind == "length":
        found = DirectNorm(torch.rand(b, generator=g))
    else:
        found = GhostNorm(torch.rand(b, generator=g) - 0.1, *(1 + torch.rand(2, b, generator=g)))
    return (found, None, None) if rounding is None else (found, 100 * torch.rand(b, positions, generator=g), rounding)


@settings(max_examples=80, deadline=None)
@given(members=st.lists(measured, min_size=1, max_size=9), b=st.integers(0, 4), seed=st.integers(0, 10**6))
def test_together_they_are_what_they_are_one_by_one(members, b, seed):
    g = torch.Generator().manual_seed(seed)
    together, added = NormAccumulator(), torch.zeros(b, dtype=torch.float64)
    for member in members:
        alone, of_one = NormAccumulator(), some(*member, b, g)
        alone.add(*of_one)
        together.add(*of_one)
        added += alone.total(CPU)
    torch.testing.assert_close(together.total(CPU).double(), added, rtol=1e-6, atol=0)


def test_of_nothing_there_is_no_norm():
    assert NormAccumulator().total(CPU) is None


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 7, bias=False), nn.RMSNorm(7), nn.Linear(7, 3)]
    return nn.Sequential(*layers).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("small", [0, 4 * 5, 2**30], ids=["none", "some", "all"])
@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "per_sample"])
def test_small_gradients_side_by_side(mode, small, dtype, monkeypatch):
    """Norms, sums and what is added to, however many are taken together; with weights, and an example that is not
    finite."""
    monkeypatch.setattr(dense, "MAX_BATCHED_NUMEL", small)
    model = small_model(dtype)
    batch = {"x": torch.randn(4, 3, 6, dtype=dtype)}
    with PerExampleClipper(model, 0.05, mode=mode, self_check=False) as clipper:
        for _ in range(2):
            assert_exact(model, clipper, lambda batch: weigh(model(batch["x"])), batch)
        reference = {}
        for bad in (False, True):
            model.zero_grad()
            weights = torch.tensor([1.0, 0.5, 0.0, 1.0]) if bad else torch.tensor([1.0, 0.5, 0.0, 0.0])
            x = batch["x"].clone()
            if bad:
                x[3] = float("nan")
            for _ in range(2):  # the second is added to what lies in grad
                clipper.backward(weigh(model(x)), weights)
            reference[bad] = [p.grad for p in model.parameters()]
    for without, taken_out in zip(*reference.values(), strict=True):
        assert without.dtype == dtype and without.abs().sum() > 0
        torch.testing.assert_close(without, taken_out, rtol=1e-5, atol=1e-7)


def test_gradients_that_were_summed_together_are_changed_one_by_one():
    model = small_model()
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.backward(weigh(model(torch.randn(4, 3, 6))))
    grads = [p.grad for p in model.parameters()]
    before = [(g.clone(), g._version) for g in grads]
    grads[1].add_(1)
    for i, (grad, (was, version)) in enumerate(zip(grads, before, strict=True)):
        assert (torch.equal(grad, was) and grad._version == version) == (i != 1)
        assert grad.is_contiguous() and grad.grad_fn is None and not grad.requires_grad


class Tagger(nn.Module):
    """Scores of every position, padding too, as extractive question answering has them; what is padding reaches the
    norm as zeros."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(50, width, padding_idx=0)
        self.proj, self.norm, self.head = (nn.Linear(width, width, bias=False), nn.RMSNorm(width, eps=1e-6), nn.Linear(width, 1))  # fmt: skip

    def forward(self, ids):
        return self.head(self.norm(self.proj(self.embed(ids)))).squeeze(-1)


def padded(vocabulary, lengths, generator):
    ids = torch.randint(1, vocabulary, (len(lengths), max(lengths)), generator=generator)
    is_token = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids * is_token, is_token.long()


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "per_sample"])
def test_gradients_of_padding_do_not_lengthen_norms(mode):
    torch.manual_seed(0)
    model = Tagger()
    batch = {"ids": padded(50, [16, 12, 8], torch.Generator().manual_seed(0))[0], "y": torch.tensor([1, 3, 2])}
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        assert_exact(
            model, clipper, lambda b: nn.functional.cross_entropy(model(b["ids"]), b["y"], reduction="none"), batch
        )


QWEN = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, pad_token_id=0, initializer_range=0.2)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
NEXT = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
# the models that read answers out of every position, with the kinds of layers that give zeros for padding
READ_OUT = {
    "Qwen3": lambda: hf.Qwen3ForQuestionAnswering(hf.Qwen3Config(**QWEN)),
    "Qwen3-Next": lambda: hf.Qwen3NextForQuestionAnswering(hf.Qwen3NextConfig(**QWEN, **EXPERTS, **NEXT, full_attention_interval=2)),
    "Gemma 3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**QWEN, sliding_window=4)),
    "Olmo 3": lambda: hf.Olmo3ForCausalLM(hf.Olmo3Config(**QWEN, sliding_window=4)),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
@pytest.mark.parametrize("name", list(READ_OUT))
def test_architectures_whose_padding_is_zero(name, mode):
    """The loss reads every position. Inputs of zero come of embeddings, masked convolutions, and rows of sliding
    windows that see nothing."""
    torch.manual_seed(0)
    model = READ_OUT[name]()
    model.config.use_cache = False
    ids, mask = padded(60, [12, 9, 6], torch.Generator().manual_seed(0))

    def losses(batch):
        found = model(**batch)
        return weigh(
            torch.stack([found.start_logits, found.end_logits], 1) if "start_logits" in found else found.logits
        )

    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        assert_exact(model, clipper, losses, {"input_ids": ids, "attention_mask": mask})


class Calls(TorchDispatchMode):
    """Counts what computes something."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func._schema.name.split("::")[1] not in VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "times_plain"), [("book_keeping", 3), ("ghost", 6)])
def test_a_layer_costs_few_calls(mode, times_plain):
    """Where models are small or devices fast, the number of calls is what a step costs: 6 of a Linear and a LayerNorm
    without privacy."""

    def calls(depth, mode):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(depth)])
        x = torch.randn(4, 5, 8)
        if mode == "plain":
            losses = weigh(model(x))
            with Calls() as count:
                losses.sum().backward()
            return count.number
        with PerExampleClipper(model, 1.0, mode=mode) as clipper:
            for _ in range(4):  # the rows of the last one are not looked at
                losses = weigh(model(x))
                model.zero_grad()
                with Calls() as count:
                    clipper.backward(losses)
        return count.number

    plain, ours = ((calls(8, m) - calls(4, m)) / 4 for m in ("plain", mode))
    assert 0 < ours <= times_plain * (plain + 2)  # and 2 of the forward pass


def test_many_positions_are_not_held():
    """As many as a parametric ReLU has on images: with eight of them a pass took 128 MiB for 76."""
    norms, norm_b, total_b = NormAccumulator(), torch.rand(4), torch.zeros(4)
    for positions in (2, 2**13):
        lengths_bt = torch.rand(4, positions)
        norms.add(DirectNorm(norm_b), lengths_bt, FP32)
        total_b += FP32.inflate(norm_b, lengths_bt).square()
    held = weakref.ref(lengths_bt)
    del lengths_bt
    assert held() is None
    assert torch.allclose(norms.total(norm_b.device), total_b, rtol=1e-6, atol=0)
