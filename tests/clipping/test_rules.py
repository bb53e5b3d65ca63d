"""Every rule, option by option, in every mode; dispatch on what runs; the fallback and its refusals."""

import pytest
import torch
from oracle import assert_exact, clipped_sum, distance, length
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

from dp_transformers import PerExampleClipper, check_model, register_grad_sampler, register_norm_sampler
from dp_transformers.clipping.errors import SelfCheckError, UnsupportedModuleError
from dp_transformers.clipping.layer_rule import _RULES, LayerRule, rule_for
from dp_transformers.clipping.modes import MODES
from dp_transformers.clipping.rules.linear import linear
from dp_transformers.clipping.rules.normalization import _weight_only_rms_norm

ALL_MODES = sorted(MODES)


def weigh(model, x, seed=3):
    """(B,) a random non-linear function of each example's output."""
    out = model(x)
    weight = torch.randn(out[0].numel(), generator=torch.Generator().manual_seed(seed))
    return torch.tanh(out).flatten(1) @ weight


def check(model, x, mode):
    with PerExampleClipper(model, 1.0, mode=mode, self_check=True) as clipper:  # the self-check must pass as well
        assert_exact(model, clipper, lambda b: weigh(model, b["x"]), {"x": x})


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 5), (4, 2, 3, 5), (4, 40, 5), (1, 3, 5)], ids=str)
@pytest.mark.parametrize("train", ["both", "weight", "bias", "no bias"])
def test_linear(shape, train, mode):
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3, bias=train != "no bias"))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(train != "bias")
        if layer.bias is not None:
            layer.bias.requires_grad_(train != "weight")
    check(model, torch.randn(shape), mode)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_conv1d(mode):
    model = nn.Sequential(Conv1D(7, 5), nn.GELU(), Conv1D(3, 7))
    check(model, torch.randn(4, 6, 5), mode)


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
    with pytest.raises(ValueError, match=next(iter(option))):
        clipper.backward(weigh(model, torch.randint(0, 7, (4, 3))))


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LayerNorm(6),
        lambda: nn.LayerNorm(6, bias=False),
        lambda: nn.LayerNorm((3, 6)),
        lambda: nn.RMSNorm(6, eps=1e-5),
        lambda: nn.RMSNorm((3, 6)),
        lambda: LlamaRMSNorm(6, eps=1e-5),
        lambda: Gemma2RMSNorm(6, eps=1e-5),
        lambda: T5LayerNorm(6, eps=1e-5),
    ],
    ids=["layer", "layer no bias", "layer 2d", "rms", "rms 2d", "llama", "gemma", "t5"],
)
def test_norms(norm, mode):
    model = nn.Sequential(nn.Linear(6, 6), norm(), nn.Linear(6, 2))
    nn.init.normal_(model[1].weight)
    check(model, torch.randn(4, 3, 6), mode)


def test_rms_norms_are_recognised_by_what_they_compute():
    class LooksLikeOne(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) * 1.01

    assert rule_for(LlamaRMSNorm(6)).terms is _weight_only_rms_norm
    assert rule_for(Gemma2RMSNorm(6)).terms is _weight_only_rms_norm
    assert rule_for(LooksLikeOne(6)).terms is None


class LimitsItsInput(LlamaRMSNorm):
    """An RMS norm of what an input is limited to, above, below or in training."""

    def __init__(self, size, kind="above"):
        super().__init__(size)
        self.kind = kind

    def forward(self, hidden_states):
        x = hidden_states
        if self.kind == "below":
            x = x * (x.abs() > 1e-4)
        elif self.kind == "above" or self.training:
            x = x.clamp(-6, 6)
        return super().forward(x)


@pytest.mark.parametrize("kind", ["above", "below", "in training"])
def test_norms_of_a_limited_input_are_not_taken_for_plain_ones(kind):
    module = LimitsItsInput(6, kind)
    assert rule_for(module).terms is None and module.training
    assert rule_for(module.eval()).terms is None and not module.training


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_norm_that_limits_its_input_is_clipped(mode):
    """Taken for a plain one it saw none of the second column, and one example moved the sum of the two-pass modes by 70 C."""
    model = nn.Sequential(LimitsItsInput(8), nn.Linear(8, 3, bias=False))
    model[1].requires_grad_(False).weight[:, [0, *range(2, 8)]] = 0
    x = torch.tensor([[1e4, 100.0, 0, 0, 0, 0, 0, 0], [1.0, 2, 3, 4, 5, 6, 7, 8]])
    clipper = PerExampleClipper(model, 0.01, mode=mode)
    losses = torch.nn.functional.cross_entropy(30 * model(x), torch.tensor([0, 1]), reduction="none")
    clipper.backward(losses, torch.tensor([1.0, 0.0]))
    assert length([model[0].weight.grad]) <= 0.01 * 1.001


class GatedNorm(LlamaRMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x * torch.sigmoid(gate))


class UsesGatedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 5), GatedNorm(5)

    def forward(self, x):
        return self.norm(self.first(x), gate=x)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_gated_norm_is_not_taken_for_a_plain_one(mode):
    check(UsesGatedNorm(), torch.randn(4, 3, 5), mode)


def test_dispatch_is_by_what_runs():
    class OwnForward(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        pass

    patched = nn.Linear(2, 2)
    patched.forward = lambda x: 2 * x
    assert rule_for(Renamed(2, 2)).terms is linear
    assert rule_for(OwnForward(2, 2)).terms is None
    assert rule_for(patched).terms is None


class Scale(nn.Module):
    """No rule: a raw parameter, a keyword argument, two outputs."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 1))

    def forward(self, x, *, factor=1.0):
        return x * self.scale.exp() * factor, x.sum(-1, keepdim=True) + self.shift


class UsesScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(5, 5), Scale()

    def forward(self, x):
        a, b = self.scale(self.first(x), factor=0.5)
        return a + b


class Broadcast(nn.Module):
    """Parameters used without a batch dimension: position embeddings for (1, T), a raw token."""

    def __init__(self):
        super().__init__()
        self.positions, self.token = nn.Embedding(9, 5), Token()

    def forward(self, x):
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        return x + self.positions(positions) + self.token()


class Token(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.randn(1, 1, 5))

    def forward(self):
        return self.value * 2


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("model", [UsesScale, Broadcast])
def test_fallback_and_modules_without_a_batch(model, mode):
    check(model(), torch.randn(4, 3, 5), mode)


class Refused:
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return torch.dropout(x, 0.5, True) * self.w

    class Control(Random):
        def forward(self, x):
            return x * self.w if x.sum().item() > 0 else -x * self.w

    class State(Random):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return x * self.w * self.calls

    class Mixing(Random):
        def forward(self, x):
            return (x - x.mean(0)) * self.w

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            return self.linear(x.flatten(0, 1)).view_as(x)


@pytest.mark.parametrize("kind", ["State", "Mixing", "Control"])
def test_what_the_fallback_refuses(kind):
    model = nn.Sequential(nn.Linear(5, 5), getattr(Refused, kind)())
    clipper = PerExampleClipper(model, 1.0, self_check=False)
    x = torch.randn(4, 3, 5)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(5)), model[0].bias.zero_()
        x[0], x[1] = -5, 9  # the batch decides otherwise than its first example
    with pytest.raises(UnsupportedModuleError, match=rf"'1' \({kind}\).*Ways out: freeze.*register_grad_sampler"):
        clipper.backward(weigh(model, x))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_fallback_sees_the_random_numbers_that_were_drawn(mode):
    """Dropout inside the owning module: the same mask in forward, norms and sum, and the generator goes on as without a clipper."""
    model, x = nn.Sequential(nn.Linear(5, 5), Refused.Random()), torch.randn(4, 3, 5)
    torch.manual_seed(3)
    losses = weigh(model, x)
    after = torch.get_rng_state()
    gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    norms, total = clipped_sum(gradients, 0.5)
    torch.manual_seed(3)
    with PerExampleClipper(model, 0.5, mode=mode, self_check=False) as clipper:
        got = clipper.backward(weigh(model, x))
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(got.double(), torch.tensor(norms).double(), rtol=1e-5, atol=0)
    assert distance([p.grad for p in model.parameters()], total) <= 1e-5 * length(total)


class Branches(nn.Module):
    """Runs under no vmap, and treats its examples independently."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return torch.stack([row * self.w if row.sum().item() > 0 else row.flip(0) * self.w**2 for row in x])


@pytest.mark.parametrize("mode", ALL_MODES)
def test_what_vmap_cannot_run_is_run_one_by_one(mode):
    check(nn.Sequential(nn.Linear(5, 5), Branches()), torch.randn(4, 3, 5), mode)


WAYS_TO_ASSIGN = {
    "to": lambda inner: inner.to(torch.float32),
    "data": lambda inner: setattr(inner.weight, "data", inner.weight.data.clone()),
    "vector": lambda inner: nn.utils.vector_to_parameters(inner.weight.detach().flatten().clone(), [inner.weight]),
}


class Assigns(nn.Module):
    """Assigns to the data of its parameters in its forward pass, in one of the ways there are."""

    def __init__(self, way):
        super().__init__()
        self.way, self.w, self.inner = way, nn.Parameter(torch.randn(5)), nn.Linear(5, 5, bias=False)

    def forward(self, x):
        WAYS_TO_ASSIGN[self.way](self.inner)
        return nn.functional.linear(x * self.w, self.inner.weight)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("way", list(WAYS_TO_ASSIGN))
def test_modules_that_assign_to_data_do_not_crash_the_process(way, mode):
    check(nn.Sequential(nn.Linear(5, 5), Assigns(way)), torch.randn(4, 3, 5), mode)


class Scales(nn.Module):
    """In place, as a router's jitter does."""

    def forward(self, x):
        x *= 2
        return x


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("norm", [T5LayerNorm, LlamaRMSNorm, Gemma2RMSNorm])
def test_outputs_of_norms_may_be_overwritten(norm, mode):
    check(nn.Sequential(nn.Linear(6, 6), norm(6), Scales(), nn.Linear(6, 2)), torch.randn(4, 3, 6), mode)


class WritesToItsInput(nn.Module):
    """Zeroes padding in place, as speech encoders do: doing it twice changes nothing."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5))

    def forward(self, x):
        x[:, -1] = 0
        return x * self.w


class WritesToAnothersInput(nn.Module):
    """A sum needs neither of its parts to go back, so plain autograd lets them be overwritten."""

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(5))

        def forward(self, x):
            return x + self.w

    def __init__(self):
        super().__init__()
        self.adds = self.Adds()

    def forward(self, x):
        x = x * 2
        y = torch.tanh(self.adds(x))
        return x.mul_(3) + y


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("writes", [WritesToItsInput, WritesToAnothersInput])
def test_modules_that_write_to_inputs(writes, mode):
    check(nn.Sequential(nn.Linear(5, 5), writes()), torch.randn(4, 3, 5), mode)


def test_what_was_overwritten_is_refused_by_name_without_the_check():
    model = nn.Sequential(nn.Linear(5, 5), WritesToAnothersInput())
    with (
        PerExampleClipper(model, 1.0, self_check=False) as clipper,
        pytest.raises(UnsupportedModuleError, match=r"writes in place .* '1.adds' \(Adds\) .*x = x \+ y.*Ways out"),
    ):
        clipper.backward(weigh(model, torch.randn(4, 3, 5)))


class Remembers(nn.Module):
    """Keeps what it saw: in an attribute, in a buffer, in a module that it makes."""

    def __init__(self, dropout, loops):
        super().__init__()
        self.w, self.dropout, self.loops = nn.Parameter(torch.randn(5)), nn.Dropout(dropout), loops
        self.register_buffer("last", None)

    def forward(self, x):
        self.seen, self.last, self.made = x, x.detach(), nn.Identity()
        rows = [row for row in x if self.loops and row.sum().item() < torch.inf]  # which no vmap can run
        return self.dropout(torch.stack(rows) if rows else x) * self.w


@pytest.mark.parametrize(("dropout", "loops"), [(0.0, False), (0.0, True), (0.5, False)], ids=["vmap", "one by one", "masked"])
def test_a_re_run_leaves_nothing_behind(dropout, loops):
    model = nn.Sequential(nn.Linear(5, 5), Remembers(dropout, loops))
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        before = {**vars(model[1]), **model[1]._buffers, **model[1]._modules}
        clipper.backward(weigh(model, torch.randn(4, 3, 5)))
        after = {**vars(model[1]), **model[1]._buffers, **model[1]._modules}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in ("seen", "last", "made", "w", "dropout") if name in before)


def test_flattened_batch_is_refused_unless_it_has_settled():
    model, x = Refused.Flat(), torch.randn(4, 3, 5)
    with PerExampleClipper(model, 1.0, self_check=False) as clipper, pytest.raises(ValueError, match=r"'linear' .*neither the batch \(4\)"):
        clipper.backward(weigh(model, x))
    for mode in ALL_MODES:
        report = check_model(model, {"x": x}, mode=mode)
        assert max(report.norm_error, report.sum_error) <= 1e-5


@pytest.mark.parametrize("mode", ALL_MODES)
def test_own_rule(mode):
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(5))

        def forward(self, x):
            return x * self.w

    try:
        register_grad_sampler(Mine)(lambda layer, activations, backprops: {layer.w: torch.full((len(backprops), 5), float("nan"))})

        @register_grad_sampler(Mine)  # the last registration wins
        def mine(layer, activations, backprops):
            return {layer.w: (activations[0] * backprops).sum(1)}

        check(nn.Sequential(nn.Linear(5, 5), Mine()), torch.randn(4, 3, 5), mode)
    finally:
        _RULES.pop(Mine.forward)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_rule_that_forgets_a_parameter_is_named(mode):
    class Forgetful(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    try:
        register_grad_sampler(Forgetful)(lambda m, a, g: {m.weight: torch.einsum("btp,btd->bpd", g, a[0])})
        model = nn.Sequential(Forgetful(5, 3))
        clipper = PerExampleClipper(model, 1.0, mode=mode, self_check=False)
        with pytest.raises(ValueError, match=r"'0' \(Forgetful\) gives no gradient for its trainable \['bias'\]"):
            clipper.backward(weigh(model, torch.randn(4, 3, 5)))
    finally:
        _RULES.pop(Forgetful.forward)


# ---- norm samplers ----


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return x * self.w + self.b


@pytest.fixture
def asked():
    """Affine with both samplers, which note their names here when they are called."""
    called = []

    def gradients(layer, activations, backprops):
        called.append("gradients")
        return {layer.w: (activations[0] * backprops).sum(1), layer.b: backprops.sum(1)}

    def norms(layer, activations, backprops):
        called.append("norms")
        return {layer.w: (activations[0] * backprops).sum(1).norm(dim=1), layer.b: backprops.sum(1).norm(dim=1)}

    register_grad_sampler(Affine)(gradients)
    register_norm_sampler(Affine)(lambda *_: {})
    register_norm_sampler(Affine)(norms)  # the last registration wins
    yield called
    _RULES.pop(Affine.forward, None)


def asked_in_one_pass(asked, model, mode):
    clipper = PerExampleClipper(model, 1.0, mode=mode, self_check=False)
    asked.clear()
    clipper.backward(weigh(model, torch.randn(4, 3, 5)))
    clipper.detach()
    return asked


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("has_grad_sampler", [True, False])
def test_norm_sampler(asked, mode, has_grad_sampler):
    model = nn.Sequential(nn.Linear(5, 5), Affine(), nn.Tanh(), Affine())
    if not has_grad_sampler:
        _RULES[Affine.forward] = LayerRule(norms=_RULES[Affine.forward].norms)
    check(model, torch.randn(4, 3, 5), mode)
    expected = ["norms"] if mode == "ghost" else ["gradients"] if has_grad_sampler else []
    assert asked_in_one_pass(asked, model, mode) == expected * 2


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("has_grad_sampler", [True, False])
@pytest.mark.parametrize("kind", ["reused", "tied"])
def test_norms_are_not_asked_for_where_a_parameter_is_used_twice(asked, kind, mode, has_grad_sampler):
    one, other = Affine(), Affine()
    other.b = one.b
    model = nn.Sequential(nn.Linear(5, 5), one, nn.Tanh(), one if kind == "reused" else other)
    if not has_grad_sampler:
        _RULES[Affine.forward] = LayerRule(norms=_RULES[Affine.forward].norms)
    check(model, torch.randn(4, 3, 5), mode)
    assert asked_in_one_pass(asked, model, mode) == (["gradients"] * 2 if has_grad_sampler else [])


@pytest.mark.parametrize("has_grad_sampler", [True, False])
def test_norm_sampler_and_an_example_that_is_not_finite(asked, has_grad_sampler):
    model, x = nn.Sequential(nn.Linear(5, 5), Affine()), torch.randn(4, 3, 5)
    if not has_grad_sampler:
        _RULES[Affine.forward] = LayerRule(norms=_RULES[Affine.forward].norms)
    x[1, 0, 0] = float("inf")
    good = [0, 2, 3]
    with PerExampleClipper(model, 0.5, mode="ghost", self_check=False) as clipper:
        norms = clipper.backward(weigh(model, x))
        total = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        expected = clipper.backward(weigh(model, x[good]))
    assert not norms[1].isfinite()
    torch.testing.assert_close(norms[good], expected, rtol=1e-6, atol=0)
    assert distance(total, [p.grad for p in model.parameters()]) <= 1e-6 * length(total)


def test_norm_samplers_that_are_wrong(asked):
    model, x = nn.Sequential(nn.Linear(5, 5), Affine()), torch.randn(4, 3, 5)
    right = _RULES[Affine.forward].norms
    register_norm_sampler(Affine)(lambda *a: {p: n.square() for p, n in right(*a).items()})
    with pytest.raises(SelfCheckError, match="not exact"):
        check(model, x, "ghost")
    register_norm_sampler(Affine)(lambda layer, *a: {layer.w: right(layer, *a)[layer.w]})
    with PerExampleClipper(model, 1.0, mode="ghost", self_check=False) as clipper, pytest.raises(ValueError, match=r"trainable \['b'\]"):
        clipper.backward(weigh(model, x))
    register_norm_sampler(Affine)(lambda *a: {p: n[:, None] for p, n in right(*a).items()})
    with PerExampleClipper(model, 1.0, mode="ghost", self_check=False) as clipper, pytest.raises(ValueError, match=r"\(B,\).*\(4, 1\)"):
        clipper.backward(weigh(model, x))


def test_norm_sampler_is_found_by_what_runs(asked):
    class Other(Affine):
        def forward(self, x):
            return super().forward(x)

    class Same(Affine):
        pass

    assert rule_for(Same()).norms is rule_for(Affine()).norms is not None
    assert rule_for(Other()).norms is None
    replaced = Affine()
    replaced.forward = lambda x: x
    assert rule_for(replaced).norms is None
