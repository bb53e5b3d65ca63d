"""Fused experts of transformers, class by class, kernel by kernel, against one example at a time."""

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_exact, assert_exact_in_modes
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.layer_rule import rule_for
from dp_transformers.clipping.modes import MODES
from dp_transformers.clipping.rules.experts import experts

ALL_MODES = sorted(MODES)
KERNELS = ["eager", "grouped_mm", "batched_mm"]
MADE_BY = {  # gated (two); interleaved, transposed and with bias; without gate
    "Mixtral": lambda e, d, p: MixtralExperts(hf.MixtralConfig(num_local_experts=e, hidden_size=d, intermediate_size=p)),
    "Qwen3-MoE": lambda e, d, p: Qwen3MoeExperts(hf.Qwen3MoeConfig(num_experts=e, hidden_size=d, moe_intermediate_size=p)),
    "GPT-OSS": lambda e, d, p: GptOssExperts(hf.GptOssConfig(num_local_experts=e, hidden_size=d, intermediate_size=p)),
    "Nemotron-H": lambda e, d, p: NemotronHExperts(hf.NemotronHConfig(n_routed_experts=e, hidden_size=d, moe_intermediate_size=p)),
}  # fmt: skip


class Routed(nn.Module):
    """A router over the tokens of all examples and its experts; ``idle`` experts are never chosen, ``nowhere`` sends
    tokens to none."""

    def __init__(
        self,
        name="Mixtral",
        kernel="eager",
        num_experts=4,
        top_k=2,
        width=8,
        inner=4,
        *,
        idle=0,
        nowhere=False,
        packed=False,
    ):
        super().__init__()
        self.before, self.router = nn.Linear(5, width), nn.Linear(width, num_experts - idle)
        self.experts = MADE_BY[name](num_experts, width, inner)
        self.experts.config._experts_implementation = kernel
        self.top_k, self.nowhere, self.packed, self.calls = top_k, nowhere, packed, 1
        with torch.no_grad():
            for p in self.experts.parameters():
                p.copy_(0.5 * torch.randn_like(p))

    def forward(self, x):
        hidden = torch.tanh(self.before(x))
        kept = x[..., 0] < 1 if self.packed else torch.ones_like(x[..., 0], dtype=torch.bool)
        for _ in range(self.calls):
            tokens = hidden[kept] if self.packed else hidden.flatten(0, 1)
            weights, index = self.router(tokens).softmax(-1).topk(self.top_k, -1)
            if self.nowhere:
                index = index.masked_fill(weights < 0.3, self.experts.num_experts)
            hidden = hidden.masked_scatter(kept.unsqueeze(-1), self.experts(tokens, index, weights))
        return hidden


def losses_of(model):
    def losses(batch):
        out = model(batch["x"])
        weight = torch.randn(out.shape[1:].numel(), generator=torch.Generator().manual_seed(0))
        return torch.tanh(out).flatten(1) @ weight

    return losses


def batch_of(size=4, length=6, seed=0):
    return {"x": torch.randn(size, length, 5, generator=torch.Generator().manual_seed(seed))}


def check(model, batch, modes=("book_keeping",), *, by_rule=True):
    """Norms and clipped sum; the self-check passes too."""
    owners = assert_exact_in_modes(model, losses_of(model), batch, modes)
    assert (experts in {owner.rule.terms for owner in owners}) is by_rule


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MADE_BY)
def test_every_class_and_kernel(name, kernel):
    check(Routed(name, kernel), batch_of())


@pytest.mark.parametrize("name", MADE_BY)
def test_idle_experts_and_one_that_gets_everything(name):
    check(Routed(name, idle=2), batch_of())
    check(Routed(name, num_experts=3, top_k=1, idle=2), batch_of(length=40))


def test_tokens_that_go_nowhere():
    check(Routed("Mixtral", nowhere=True), batch_of())


@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
def test_experts_that_are_called_twice(name):
    model = Routed(name)
    model.calls = 2
    check(model, batch_of())


@pytest.mark.parametrize("name", ["GPT-OSS", "Nemotron-H"])
def test_frozen_parts(name):
    for only in [n for n, _ in Routed(name).experts.named_parameters()]:
        model = Routed(name)
        for n, p in model.experts.named_parameters():
            p.requires_grad_(n == only)
        check(model, batch_of())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(MADE_BY)), kernel=st.sampled_from(KERNELS), mode=st.sampled_from(ALL_MODES), seed=st.integers(0, 10**6),
    size=st.integers(2, 5), positions=st.integers(2, 24), num_experts=st.integers(2, 9), top_k=st.integers(1, 2), width=st.sampled_from([4, 8, 12]),
    inner=st.sampled_from([4, 8, 20]),
)  # fmt: skip
def test_any_shape(name, kernel, mode, seed, size, positions, num_experts, top_k, width, inner):
    torch.manual_seed(seed)
    check(Routed(name, kernel, num_experts, top_k, width, inner), batch_of(size, positions, seed), [mode])


def test_dropped_padding_is_answered_by_the_model():
    """The rows of one example are found by a mask alone, so positions say nothing."""
    check(Routed(packed=True), batch_of(), by_rule=False)


def test_dropped_padding_that_comes_later_is_refused():
    """The self-check saw all positions; a batch where some are missing has no rule that knows whose they are."""

    class Later:  # decided where nobody sees that the model was changed
        packs = False

        def __bool__(self):
            return self.packs

    model = Routed(packed=True)
    model.packed = Later()
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.backward(losses_of(model)(batch_of()))
        Later.packs = True
        with pytest.raises(ValueError, match=r"neither the batch \(4\) nor 1"):
            losses_of(model)(batch_of())


def test_only_what_computes_the_formula_is_recognised():
    class OwnForward(MixtralExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return 2 * super().forward(hidden_states, top_k_index, top_k_weights)

    config = hf.MixtralConfig(num_local_experts=2, hidden_size=4, intermediate_size=4)
    plain, normed, parametrised = MixtralExperts(config), MixtralExperts(config), MixtralExperts(config)
    normed.post_expert_norm = nn.LayerNorm(4)
    nn.utils.parametrize.register_parametrization(parametrised, "down_proj", nn.Identity())
    assert rule_for(plain).terms is experts
    assert rule_for(OwnForward(config)).terms is None
    assert rule_for(normed).terms is None
    assert rule_for(parametrised).terms is None


SWITCH = dict(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4, pad_token_id=0,
              dropout_rate=0.0, decoder_start_token_id=0, router_jitter_noise=0.0)  # fmt: skip


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
@pytest.mark.parametrize(
    "options",
    [
        # a cache makes the decoder be re-run, whose routers convert themselves in every forward pass
        dict(use_cache=True, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
        # some experts are called on so few tokens that their number is the batch's, until it is not
        dict(use_cache=False, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2),
    ],
    ids=["converts itself", "few tokens"],
)
def test_switch_transformers(options, mode):
    torch.manual_seed(0)
    model = hf.SwitchTransformersForConditionalGeneration(hf.SwitchTransformersConfig(**SWITCH, **options))
    for p in model.parameters():
        nn.init.normal_(p.data, std=0.2)
    generator = torch.Generator().manual_seed(1)
    names = {"input_ids": 9, "decoder_input_ids": 7}
    batch = {name: torch.randint(1, 50, (3, length), generator=generator) for name, length in names.items()}
    weight = torch.randn(7 * 50, generator=generator)
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        assert_exact(model, clipper, lambda b: torch.tanh(model(**b).logits).flatten(1) @ weight, batch)
