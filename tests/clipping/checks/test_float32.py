"""What trains in bf16 is checked in float32."""

import pytest
import torch
import torch.nn.functional as F
from layers import Calls, scale_linear_rule
from models import build
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.errors import SelfCheckError

WAYS_TO_BF16 = ["autocast", "bf16 parameters"]
MODES_OF_BF16 = ["book_keeping", "ghost", "per_sample"]


class AttendsOverBatch(nn.Module):
    """What is given as (B, T, width) to attention over the first dimension."""

    def __init__(self, swap=True, residual=False, width=32):
        super().__init__()
        self.emb, self.swap, self.residual = nn.Linear(8, width), swap, residual
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc = nn.Linear(width, 4)

    def forward(self, x):
        h = self.emb(x).transpose(0, 1) if self.swap else self.emb(x)
        y = self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        y = h + y if self.residual else y
        return self.fc((y.transpose(0, 1) if self.swap else y).mean(1))


class FrozenEncoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.emb, self.fc = nn.Linear(8, 32), nn.Linear(32, 4)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first).requires_grad_(
            False
        )

    def forward(self, x):
        return self.fc(self.encoder(self.emb(x)).mean(1))


class SubtractsFromHidden(nn.Module):
    """A share of the batch's mean is taken off what the head reads."""

    def __init__(self, share):
        super().__init__()
        self.emb, self.fc, self.share = nn.Linear(8, 32), nn.Linear(32, 4), share

    def forward(self, x):
        h = torch.tanh(self.emb(x)).mean(1)
        return self.fc(h - self.share * h.mean(0))


def in_bf16(make, way, mode, x, **kwargs):
    """One clipped sum, after the self-check."""
    torch.manual_seed(0)
    model = make().bfloat16() if way == "bf16 parameters" else make()
    x = x.bfloat16() if way == "bf16 parameters" and x.is_floating_point() else x
    clipper = PerExampleClipper(model, 0.1, mode=mode)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        out = model(x, **kwargs)
    out = out.logits if hasattr(out, "logits") else out
    clipper.backward(F.cross_entropy(out.float(), torch.arange(len(x)) % 3, reduction="none"))
    return clipper


@pytest.mark.parametrize("mode", MODES_OF_BF16)
@pytest.mark.parametrize("way", WAYS_TO_BF16)
@pytest.mark.parametrize(
    "make",
    [AttendsOverBatch, lambda: AttendsOverBatch(residual=True), lambda: FrozenEncoder(False),
     lambda: SubtractsFromHidden(0.2), lambda: SubtractsFromHidden(0.01)],
    ids=["attention over the batch", "with a residual", "batch_first forgotten", "a fifth of the mean", "a hundredth"],
)  # fmt: skip
def test_examples_that_influence_each_other_in_bf16(make, way, mode):
    """Removing one of 32 examples moved the first three models' clipped sums by 5 to 9 C, and bf16's own tolerance is
    10%."""
    x = torch.randn(32, 6, 8)
    with pytest.raises(ValueError, match="another example|mixes examples|batch_first=True"):
        in_bf16(make, way, mode, x)


@pytest.mark.parametrize("mode", MODES_OF_BF16)
@pytest.mark.parametrize("way", WAYS_TO_BF16)
@pytest.mark.parametrize(
    "make",
    [
        lambda: AttendsOverBatch(swap=False),
        lambda: FrozenEncoder(True),
        lambda: SubtractsFromHidden(0.0),
        lambda: build("bert"),
    ],
)
def test_models_that_do_not_mix_train_in_bf16(make, way, mode, caplog):
    x = torch.randint(0, 1000, (8, 6)) if hasattr(make(), "config") else torch.randn(32, 6, 8)
    in_bf16(make, way, mode, x)
    assert "could not be checked" not in caplog.text


RULES = {"by eight percent": lambda module, backprops: 0.92, "in bf16 alone": lambda module, backprops: 0.7 if backprops.dtype == torch.bfloat16 else 1.0}  # fmt: skip


@pytest.mark.parametrize("mode", [*MODES_OF_BF16, "fast_gradient"])
@pytest.mark.parametrize("way", WAYS_TO_BF16)
@pytest.mark.parametrize("wrong", RULES)
def test_a_rule_that_is_wrong_in_bf16(monkeypatch, wrong, way, mode):
    scale_linear_rule(monkeypatch, RULES[wrong])
    layers = {"first": nn.Linear(8, 7), "last": nn.Linear(7, 4)}
    with pytest.raises(SelfCheckError, match="not exact"):
        in_bf16(
            lambda: Calls(lambda m, x: m.last(m.first(x).tanh()).mean(1), **layers), way, mode, torch.randn(6, 3, 8)
        )


class CastsByItself(nn.Module):
    """``inside``: autocast of its own (as accelerate puts around a model), or what no check can take away."""

    def __init__(self, inside, share=0.2):
        super().__init__()
        self.inner, self.inside = SubtractsFromHidden(share), inside
        if inside == "both":
            self.last = nn.Linear(4, 4, bias=False)
        if inside == "frozen":
            self.first = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.register_buffer("eye", torch.eye(4))

    def forward(self, x):
        if self.inside == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float()
        if self.inside == "buffer":  # which is in float32 when the rest is
            return F.linear(self.inner(x), self.eye)
        if self.inside == "both":
            return F.linear(self.inner(x).bfloat16(), self.last.weight.bfloat16()).to(x.dtype)
        if self.inside == "frozen":
            return self.inner(F.linear(x.bfloat16(), self.first.weight.bfloat16()).to(x.dtype))
        if self.inside == "weight":  # of another kind than the activations, once these are in float32
            return F.linear(self.inner(x), torch.eye(4, dtype=torch.bfloat16)).float()
        return self.inner(x.bfloat16()).float()


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_autocast_that_the_model_enters_is_off_too(mode, caplog):
    with pytest.raises(SelfCheckError, match="mixes examples"):
        PerExampleClipper(CastsByItself("autocast"), 1.0, mode=mode).model(torch.randn(6, 3, 8))
    PerExampleClipper(CastsByItself("autocast", share=0), 1.0, mode=mode).model(torch.randn(6, 3, 8))
    assert "could not be checked" not in caplog.text
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(2, 2)(torch.randn(1, 2)).dtype == torch.bfloat16  # torch's own is as it was


def test_buffers_are_in_float32_too(caplog):
    PerExampleClipper(CastsByItself("buffer", share=0).bfloat16(), 1.0).model(torch.randn(6, 3, 8).bfloat16())
    assert "could not be checked" not in caplog.text


@pytest.mark.parametrize("inside", ["weight", "cast", "both", "frozen"])
def test_what_does_not_run_in_float32_is_checked_as_it_trains(inside, caplog):
    """With bf16's tolerance and a warning, and still refused where it mixes by more than that."""
    model = CastsByItself(inside, share=0).bfloat16()
    PerExampleClipper(model, 1.0).model(torch.randn(6, 3, 8).bfloat16())
    assert "could not be checked in float32" in caplog.text
    with pytest.raises(ValueError, match="another example|mixes examples|other rows decides"):
        PerExampleClipper(CastsByItself(inside, share=0.9).bfloat16(), 1.0).model(torch.randn(6, 3, 8).bfloat16())


def test_reduced_products_are_full_while_it_is_checked():
    """Once, and once more as they are when it trains, when they may round by 2%."""
    setting, seen = torch.backends.mkldnn.matmul, []
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    model[0].register_forward_hook(
        lambda m, args, y: y * 1.02 if setting.fp32_precision == "bf16" and len(y) > 1 else y
    )
    model.register_forward_pre_hook(lambda module, args: seen.append(setting.fp32_precision))
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    try:
        PerExampleClipper(model, 1.0).model(torch.randn(4, 3, 5))
        assert setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = before
    assert seen[0] == "bf16" and seen[1] == "ieee" and "bf16" in seen[2:]  # the call itself, and those of the check


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_a_check_in_float32_puts_everything_back(mode, has_grad):
    model = build("llama-tied").bfloat16()
    model.lm_head.register_buffer("table", torch.randn(3).bfloat16())
    model.model.layers[0].requires_grad_(False)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for p in model.parameters():
        p.grad = torch.ones_like(p) if has_grad else None
    before = {k: (t.clone(), t.data_ptr(), t.dtype, t.grad_dtype) for k, t in tensors.items()}
    versions = {
        k: p._version for k, p in model.named_parameters() if not p.requires_grad
    }  # frozen weights are not even written to
    PerExampleClipper(model, 1.0, mode=mode).model(torch.randint(0, 1000, (4, 6)))
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, (value, pointer, dtype, grad_dtype) in before.items():
        t = after[name]
        assert t is tensors[name] and t.dtype == dtype and torch.equal(t, value), name
        assert (t.data_ptr(), t.grad_dtype) == (pointer, grad_dtype), name
        assert versions.get(name, t._version) == t._version, name
        assert (
            (t.grad is None)
            if not has_grad or name not in dict(model.named_parameters())
            else (t.grad.dtype == dtype and (t.grad == 1).all())
        ), name


class GoesBackInBf16Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if gradient.dtype != torch.bfloat16:
            raise RuntimeError(f"expected BFloat16, got {gradient.dtype}")
        return gradient


@pytest.mark.parametrize("mode", MODES_OF_BF16)
def test_a_model_that_goes_forward_in_float32_but_not_back(mode, caplog):
    class Model(nn.Linear):
        def forward(self, x):
            return GoesBackInBf16Alone.apply(super().forward(x))

    in_bf16(lambda: Model(8, 4), "bf16 parameters", mode, torch.randn(6, 8))
    assert "could not be checked in float32" in caplog.text


class Product(torch.autograd.Function):
    """A product in bf16 that no node of the graph shows, and whose rounding depends on how many rows there are."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight, width = weight.bfloat16(), x.shape[-1] // (2 if len(x) > 1 else 1)
        parts = zip(x.bfloat16().split(width, -1), ctx.weight.split(width, -1), strict=True)
        return sum(part @ columns.T for part, columns in parts).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.bfloat16() @ ctx.weight).to(gradient.dtype), None


class Quantised(nn.Module):
    """A frozen layer as bitsandbytes has it, on a CPU with AVX512-BF16, with an adapter in bf16: numbers of four bits,
    products in bf16, and in evaluation another order of the weights, with which nothing goes back."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(0, 16, (16, 16), dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state, self.support_avx512bf16_for_cpu = self, True

    def forward(self, x):
        if self.support_avx512bf16_for_cpu and not (self.training or x.requires_grad):
            self.weight.data, self.packing_format_for_cpu = self.weight.data.flip(0), True
        packed = getattr(self, "packing_format_for_cpu", False)
        return Product.apply(x.detach() if packed else x, (self.weight.flip(0) if packed else self.weight) / 15 - 0.5)


def adapted(model, x):
    for base, adapter in zip(model.base, model.adapters, strict=True):
        x = torch.tanh(base(x) + adapter(x.to(adapter.weight.dtype)).to(x.dtype))
    return x.mean(1)


def test_adapters_in_bf16_on_a_quantised_base_train(caplog):
    """Also after an evaluation, in which such a base would be packed; one that is packed already is refused."""
    torch.manual_seed(0)
    base, adapters = ([make(), make()] for make in (Quantised, lambda: nn.Linear(16, 16).bfloat16()))
    model = Calls(adapted, base=nn.ModuleList(base), adapters=nn.ModuleList(adapters))
    x, sums = torch.randn(8, 6, 16), []
    with PerExampleClipper(model, 0.1) as clipper:
        for _ in range(2):
            clipper.backward(F.cross_entropy(model(x), torch.arange(8) % 3, reduction="none"))
            sums.append([p.grad.clone() for p in clipper.parameters])
            model.zero_grad()
            with torch.no_grad():
                model.eval()(x)
            model.train()
    assert "could not be checked in float32" in caplog.text
    torch.testing.assert_close(*sums, rtol=0, atol=0)
    model.base[1].packing_format_for_cpu = False  # it was packed, and unpacked again
    with pytest.raises(ValueError, match=r"(?s)packed the weights of 'base.1'.*anew"):
        PerExampleClipper(model, 0.1).backward(F.cross_entropy(model(x), torch.arange(8) % 3, reduction="none"))
