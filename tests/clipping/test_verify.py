"""The canary and the self-check: planted faults are caught, random state and gradients are left alone, nothing private is used."""

import re
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from models import SHORT, batch_for, build, losses_function
from torch import nn
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMultipleChoice,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)
from transformers.utils import ModelOutput

from dp_transformers import PerExampleClipper, check_model, check_per_sample_gradients_are_correct
from dp_transformers.clipping import layer_rule
from dp_transformers.clipping.checks.example_mixing import find_example_mixing
from dp_transformers.clipping.checks.synthetic import synthetic_inputs
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.clipping.layer_rule import LayerRule, rule_for
from dp_transformers.clipping.terms import Dense, Outer
from dp_transformers.losses import find_per_example_loss


class Bypass(nn.Module):
    """Uses a weight functionally, outside the forward of the module that owns it."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.other(x) + F.linear(x, self.linear.weight) + 0 * self.linear(x)


class MixesBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return torch.tanh(self.linear(x) - 0.1 * self.linear(x).mean(0))


class DropsBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return torch.tanh(self.linear(x.mean(0))) * x


class BatchNormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False, track_running_stats=False)

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "fast_gradient", "per_sample"])
def test_parameter_read_past_its_module_is_answered_for_by_the_parent(mode):
    model = Bypass()
    report = check_model(model, {"x": torch.randn(4, 5)}, mode=mode)
    assert max(report.norm_error, report.sum_error) <= 1e-5
    assert isinstance(model.linear._parameters["weight"], nn.Parameter)


def test_parameter_that_escapes():
    model = Bypass()

    def loss(x):
        return model(x).sum(1) + model.linear.weight.sum()

    for _ in range(2):  # a failed check does not count as one
        with pytest.raises(SelfCheckError, match=r"'linear.weight' of Linear is used where no module sees it"):
            check_model(model, {"x": torch.randn(4, 5)}, loss_function=loss)
    assert isinstance(model.linear._parameters["weight"], nn.Parameter)


@pytest.mark.parametrize("model", [MixesBatch, BatchNormalised])
@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_examples_that_influence_each_other(model, mode):
    with pytest.raises(SelfCheckError, match="another example"):
        check_model(model(), {"x": torch.randn(6, 5)}, mode=mode)


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_a_layer_that_drops_the_batch(mode):
    with pytest.raises(ValueError, match="mixes examples"):
        check_model(DropsBatch(), {"x": torch.randn(6, 5)}, mode=mode)


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "fast_gradient", "per_sample"])
def test_rule_that_is_wrong_by_a_percent(monkeypatch, mode):
    right = rule_for(nn.Linear(1, 1)).terms

    def wrong(module, activations, backprops):
        return {p: Outer(1.01 * t.left, t.right) if isinstance(t, Outer) else t for p, t in right(module, activations, backprops).items()}

    monkeypatch.setitem(layer_rule._RULES, nn.Linear.forward, LayerRule(wrong))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    with pytest.raises(SelfCheckError, match="not exact"):
        PerExampleClipper(model, 1.0, mode=mode).model(torch.randn(4, 3, 5))


def test_norm_cached_across_batches(monkeypatch):
    right, seen = rule_for(nn.Linear(1, 1)).terms, {}

    def stale(module, activations, backprops):
        terms = right(module, activations, backprops)
        key = (id(module), len(backprops))
        return seen.setdefault(key, terms)

    monkeypatch.setitem(layer_rule._RULES, nn.Linear.forward, LayerRule(stale))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    clipper = PerExampleClipper(model, 1.0)
    stale_batch = torch.randn(3, 4, 5)
    clipper.checked = True
    clipper.backward(model(stale_batch).sum((1, 2)))
    clipper.checked = False
    with pytest.raises(SelfCheckError):
        model(torch.randn(6, 4, 5))


def test_leaves_random_state_gradients_and_training_mode_alone():
    model = build("bert", dropout=0.1)
    batch = batch_for("bert", SHORT)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.bert.encoder.eval()
    modes = [m.training for m in model.modules()]
    state = torch.random.get_rng_state()
    clipper = PerExampleClipper(model, 0.7)
    with torch.no_grad():
        model(batch["input_ids"])
    assert not clipper.checked  # evaluation is not what is checked
    losses_function(model)(batch)
    assert clipper.checked
    assert clipper.max_grad_norm == 0.7
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    torch.random.set_rng_state(state)
    expected = torch.rand(3)
    torch.random.set_rng_state(state)
    clipper.detach()
    model.eval()
    PerExampleClipper(model, 0.7).model(batch["input_ids"])
    assert torch.equal(torch.rand(3), expected)


def test_synthetic_input_has_the_shape_but_nothing_of_the_content():
    model, batch = build("bert"), batch_for("bert", SHORT)
    batch["pixels"] = torch.full((5, 2, 2), 7.0)
    _, made = synthetic_inputs(model, (), batch)
    assert made["input_ids"].shape[1] == SHORT
    assert made["input_ids"].dtype == torch.long
    assert made["input_ids"].max() < 1000
    assert len({len(x) for x in made.values()}) == 1
    assert len(made["input_ids"]) not in (SHORT, 5, 2) or len(made["input_ids"]) == 3
    assert torch.equal(made["attention_mask"], batch["attention_mask"][torch.arange(len(made["attention_mask"])) % 5])
    assert (made["pixels"] != 7).all()
    torch.manual_seed(1)
    first = synthetic_inputs(model, (), batch)[1]
    batch["input_ids"] = batch["input_ids"].flip(0).clamp(min=2)
    torch.manual_seed(1)
    assert torch.equal(synthetic_inputs(model, (), batch)[1]["input_ids"], first["input_ids"])


def test_report_and_log(caplog):
    model, batch = build("gpt2"), batch_for("gpt2", SHORT)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    report = check_model(model, inputs)
    assert max(report.norm_error, report.sum_error) < 1e-5
    assert report.locality_error == 0
    assert not model._forward_hooks
    with caplog.at_level("INFO"):
        PerExampleClipper(model, 1.0)
        model(**inputs)
    assert "self-check passed in" in caplog.text


def test_batch_of_one_is_not_enough():
    with pytest.raises(ValueError, match="at least two"):
        check_model(nn.Linear(3, 2), {"input": torch.randn(1, 3)})


def test_a_rule_behind_a_weight_that_starts_at_zero_is_checked(monkeypatch):
    right = rule_for(nn.Linear(1, 1)).terms

    def wrong(module, activations, backprops):
        return {p: Outer(0.5 * t.left, t.right) if module.out_features == 7 and isinstance(t, Outer) else t
                for p, t in right(module, activations, backprops).items()}  # fmt: skip

    monkeypatch.setitem(layer_rule._RULES, nn.Linear.forward, LayerRule(wrong))
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 2))
    nn.init.zeros_(model[1].weight)
    with pytest.raises(SelfCheckError, match="not exact"):
        PerExampleClipper(model, 1.0).model(torch.randn(4, 3, 5))
    assert (model[1].weight == 0).all()


# ---- what trains in bf16 is checked in float32 ----

WAYS_TO_BF16 = ["autocast", "bf16 parameters"]
MODES_OF_BF16 = ["book_keeping", "ghost", "per_sample"]


class AttendsOverBatch(nn.Module):
    """What is given as (B, T, width) to attention over the first dimension."""

    def __init__(self, swap=True, residual=False, width=32):
        super().__init__()
        self.emb, self.fc, self.swap, self.residual = nn.Linear(8, width), nn.Linear(width, 4), swap, residual
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        h = self.emb(x).transpose(0, 1) if self.swap else self.emb(x)
        y = self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        y = h + y if self.residual else y
        return self.fc((y.transpose(0, 1) if self.swap else y).mean(1))


class FrozenEncoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.emb, self.fc = nn.Linear(8, 32), nn.Linear(32, 4)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first).requires_grad_(False)

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


class SubtractingHead(nn.Linear):
    def forward(self, x):
        return super().forward(x - 0.05 * x.mean(0))


def bert_with_a_head_that_mixes():
    model = build("bert")
    head = SubtractingHead(32, 3)
    head.load_state_dict(model.classifier.state_dict())
    model.classifier = head
    return model


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
     lambda: SubtractsFromHidden(0.2), lambda: SubtractsFromHidden(0.01), bert_with_a_head_that_mixes],
    ids=["attention over the batch", "with a residual", "batch_first forgotten", "a fifth of the mean", "a hundredth", "BERT's head"],
)  # fmt: skip
def test_examples_that_influence_each_other_in_bf16(make, way, mode):
    """Removing one of 32 examples moved the first three models' clipped sums by 5 to 9 C, and bf16's own tolerance is 10%."""
    x = torch.randint(0, 1000, (8, 6)) if make is bert_with_a_head_that_mixes else torch.randn(32, 6, 8)
    with pytest.raises(ValueError, match="another example|mixes examples|batch_first=True"):
        in_bf16(make, way, mode, x)


@pytest.mark.parametrize("mode", MODES_OF_BF16)
@pytest.mark.parametrize("way", WAYS_TO_BF16)
@pytest.mark.parametrize(
    "make", [lambda: AttendsOverBatch(swap=False), lambda: FrozenEncoder(True), lambda: SubtractsFromHidden(0.0), lambda: build("bert")]
)
def test_models_that_do_not_mix_train_in_bf16(make, way, mode, caplog):
    x = torch.randint(0, 1000, (8, 6)) if hasattr(make(), "config") else torch.randn(32, 6, 8)
    in_bf16(make, way, mode, x)
    assert "could not be checked" not in caplog.text


@pytest.mark.parametrize("mode", [*MODES_OF_BF16, "fast_gradient"])
@pytest.mark.parametrize("way", WAYS_TO_BF16)
def test_rule_that_is_wrong_by_eight_percent_in_bf16(monkeypatch, way, mode):
    right = rule_for(nn.Linear(1, 1)).terms

    def wrong(module, activations, backprops):
        return {p: Outer(0.92 * t.left, t.right) if isinstance(t, Outer) else t for p, t in right(module, activations, backprops).items()}

    monkeypatch.setitem(layer_rule._RULES, nn.Linear.forward, LayerRule(wrong))
    with pytest.raises(SelfCheckError, match="not exact"):
        in_bf16(lambda: nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4), Pooled()), way, mode, torch.randn(6, 3, 8))


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean(1)


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
    with pytest.raises(SelfCheckError, match="another example"):
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
    with pytest.raises(ValueError, match="another example|mixes examples"):
        PerExampleClipper(CastsByItself(inside, share=0.9).bfloat16(), 1.0).model(torch.randn(6, 3, 8).bfloat16())


def test_a_rule_that_is_wrong_in_bf16_alone(monkeypatch):
    right = rule_for(nn.Linear(1, 1)).terms

    def wrong(module, activations, backprops):
        factor = 0.7 if backprops.dtype == torch.bfloat16 else 1.0
        return {p: Outer(factor * t.left, t.right) if isinstance(t, Outer) else t for p, t in right(module, activations, backprops).items()}

    monkeypatch.setitem(layer_rule._RULES, nn.Linear.forward, LayerRule(wrong))
    for way in WAYS_TO_BF16:
        with pytest.raises(SelfCheckError, match=r"not exact.*allowed 1e-01"):
            in_bf16(lambda: nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4), Pooled()), way, "book_keeping", torch.randn(6, 3, 8))


def test_reduced_products_are_full_while_it_is_checked():
    """Once, and once more as they are when it trains."""
    setting, seen = torch.backends.mkldnn.matmul, []
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
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
    versions = {k: p._version for k, p in model.named_parameters() if not p.requires_grad}  # frozen weights are not even written to
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


# ---- refusals name the true cause ----


class Squeezes(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(5, width)

    def forward(self, x):
        return self.linear(x[:, None]).squeeze()


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
@pytest.mark.parametrize(("width", "dims"), [(1, "1 dimensions for 6 examples and 0"), (3, "2 dimensions for 6 examples and 1")])
def test_a_batch_of_one_that_is_squeezed(width, dims, mode):
    model = Squeezes(width)
    with pytest.raises(SelfCheckError, match=rf"{dims} for one: squeeze\(\)"):
        check_model(model, {"x": torch.randn(6, 5)}, mode=mode)


def test_a_batch_of_one_that_is_squeezed_before_the_loss():
    model = Squeezes(3)
    with pytest.raises(SelfCheckError, match=r"1 for one: squeeze\(\)"):
        check_model(
            model, {"x": torch.randn(6, 5)}, loss_function=lambda x: F.cross_entropy(model(x), torch.ones(len(x)).long(), reduction="none")
        )


class Encodes(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.emb, self.relative, self.head = nn.Linear(4, 8), part, nn.Linear(8, 2)

    def forward(self, x):
        x = self.emb(x)
        x = self.relative(x, x, x) if isinstance(self.relative, nn.MultiheadAttention) else self.relative(x)
        return self.head(x[0] if isinstance(x, tuple) else x)


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "per_sample"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda **options: nn.MultiheadAttention(8, 2, **options), "'part' (MultiheadAttention)"),
     (lambda **options: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, **options), "'part.self_attn' (MultiheadAttention)"),
     (lambda **options: nn.GRU(8, 8, **options), "'part' (GRU)")],
)  # fmt: skip
@pytest.mark.parametrize("frozen", [False, True])
def test_batch_first_that_was_forgotten(make, name, mode, frozen):
    with pytest.raises(SelfCheckError, match=re.escape(name) + r".*batch_first=True"):
        PerExampleClipper(Encodes(make().requires_grad_(not frozen)), 1.0, mode=mode).model(torch.randn(4, 6, 4))
    PerExampleClipper(Encodes(make(batch_first=True).requires_grad_(not frozen)), 1.0, mode=mode).model(torch.randn(4, 6, 4))


@pytest.mark.parametrize("kind", [dict, UserDict, BatchEncoding, OrderedDict])
def test_a_batch_as_collators_give_it(kind):
    batch = kind(batch_for("bert", SHORT))
    assert check_model(build("bert"), batch).sum_error < 1e-5


@dataclass
class Output:
    logits: torch.Tensor
    hidden: UserDict
    name: str = "?"


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(5, 3), kind

    def forward(self, x):
        y = self.linear(x)
        if self.kind == "dataclass":
            return Output(y, UserDict({"hidden": torch.tanh(y)}))
        if self.kind == "mapping":
            return UserDict({"logits": y})
        if self.kind == "object":
            return SimpleNamespace(logits=y)
        return ModelOutput(logits=y) if self.kind == "ModelOutput" else y.mean()


@pytest.mark.parametrize("kind", ["dataclass", "mapping", "ModelOutput"])
def test_outputs_that_are_looked_into(kind):
    report = check_model(Returns(kind), {"x": torch.randn(4, 5)})
    assert max(report.norm_error, report.sum_error) < 1e-5


@pytest.mark.parametrize(("kind", "name"), [("object", "SimpleNamespace"), ("scalar", "Tensor")])
def test_outputs_without_examples(kind, name):
    with pytest.raises(SelfCheckError, match=f"Returns returns {name}, in which there is no tensor of floating-point.*loss_function"):
        check_model(Returns(kind), {"x": torch.randn(4, 5)})


# ---- padding ----


class ReadsNames(nn.Module):
    """A recurrent classifier: of the last position whatever it is, of the last own one, or of packed names."""

    def __init__(self, reads, kind=nn.LSTM):
        super().__init__()
        self.embedding, self.rnn, self.head, self.reads = nn.Embedding(50, 12), kind(12, 16, batch_first=True), nn.Linear(16, 3), reads

    def forward(self, ids, lengths):
        x = self.embedding(ids)
        if self.reads == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.rnn(packed)[1][0][-1])
        states = self.rnn(x)[0]
        last = torch.full_like(lengths, ids.shape[1]) if self.reads == "last" else lengths
        return self.head(states[torch.arange(len(ids)), last - 1])


class ReadsTexts(nn.Module):
    """Embeddings averaged over all positions, or over those of a mask."""

    def __init__(self, masked):
        super().__init__()
        self.embedding, self.head, self.masked = nn.Embedding(1000, 12), nn.Linear(12, 3), masked

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        mask = attention_mask[..., None].to(x.dtype)
        return self.head((x * mask).sum(1) / mask.sum(1) if self.masked else x.mean(1))


class ReadsSounds(nn.Module):
    """Strided convolutions, and numbers for every frame."""

    def __init__(self, kernel=5, padding=0):
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 8, kernel, stride=2, padding=padding), nn.Linear(8, 3)

    def forward(self, input_values, scale=None):
        return self.head(torch.tanh(self.conv(input_values[:, None])).transpose(1, 2))


def own_positions(lengths, side="right"):
    positions = torch.arange(max(lengths))
    lengths = torch.tensor(lengths)[:, None]
    return positions < lengths if side == "right" else positions >= max(lengths) - lengths


def padded_ids(side="right", lengths=(5, 9, 12, 7), value=0):
    own_bt = own_positions(lengths, side)
    return {"input_ids": torch.randint(1, 1000, own_bt.shape).where(own_bt, value), "attention_mask": own_bt.long()}


def padding_of(model, args, kwargs, own_bt, loss_function=None, **options):
    with PerExampleClipper(model.train(), 1.0) as clipper:
        return clipper.check_padding(args, kwargs, own_bt, loss_function, **options)


def tiny_wav2vec2(norm):
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, feat_extract_norm=norm, classifier_proj_size=8, apply_spec_augment=False, layerdrop=0.0, do_stable_layer_norm=norm == "layer",
    )  # fmt: skip
    return Wav2Vec2ForSequenceClassification(config)


PADDED_BY_OTHERS = {  # model, side, whether others then decide an example's gradient
    "GPT-2": (lambda: build("gpt2", dropout=0.3), "right", False),
    "GPT-2 on the left": (lambda: build("gpt2", dropout=0.3), "left", True),
    "BERT": (lambda: build("bert"), "right", False),
    "BERT on the left": (lambda: build("bert"), "left", True),
    "average over padding": (lambda: ReadsTexts(masked=False), "right", True),
    "average without padding": (lambda: ReadsTexts(masked=True), "right", False),
    "average without padding on the left": (lambda: ReadsTexts(masked=True), "left", False),
    "T5's encoder": (lambda: T5EncoderModel(T5Config(**TINY_T5)), "right", False),
    "T5's encoder on the left": (lambda: T5EncoderModel(T5Config(**TINY_T5)), "left", False),  # its positions are relative
}
TINY_T5 = {"vocab_size": 1000, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", PADDED_BY_OTHERS)
def test_padding_to_each_others_length(case, dtype, caplog):
    make, side, is_refused = PADDED_BY_OTHERS[case]
    batch = padded_ids(side)
    if not is_refused:
        assert padding_of(make().to(dtype), (), batch, batch["attention_mask"]) <= 1e-5
        return
    with pytest.raises(SelfCheckError, match=f"padded on the {side} to the length of a longer one"):
        padding_of(make().to(dtype), (), batch, batch["attention_mask"])
    assert "could not be checked" not in caplog.text


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
@pytest.mark.parametrize("reads", ["last", "last own", "packed"])
def test_padding_of_recurrent_models(reads, kind):
    """From tuples, as a plain loop has them; what is read at the last position is that of padding."""
    if reads == "packed" and kind is nn.RNN:
        return  # its states come as a tensor
    lengths = [3, 9, 7, 5]
    own_bt = own_positions(lengths)
    args = (torch.randint(1, 50, own_bt.shape) * own_bt, torch.tensor(lengths))
    if reads != "last":
        assert padding_of(ReadsNames(reads, kind), args, {}, own_bt) <= 1e-5
        return
    with pytest.raises(SelfCheckError, match=r"padded on the right.*pack_padded_sequence"):
        padding_of(ReadsNames(reads, kind), args, {}, own_bt)


@pytest.mark.parametrize("reads_last", [True, False])
def test_padding_of_positions_that_come_first(reads_last):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            states = self.head(self.rnn(x)[0])
            return states[-1:] if reads_last else states

    own_bt = own_positions([3, 9, 7, 5])
    x = torch.randn(9, 4, 5) * own_bt.T[..., None]
    with PerExampleClipper(Reads(), 1.0, batch_first=False) as clipper:
        if not reads_last:
            assert clipper.check_padding((x,), {}, own_bt) <= 1e-5
            return
        with pytest.raises(SelfCheckError, match="padded on the right"):
            clipper.check_padding((x,), {}, own_bt)


def test_lengths_stay_true():
    """Also those that say how long the padded rows are, and those whose name does not tell."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 2)

        def forward(self, x, n):
            seen.append((n.tolist(), x.shape[1]))
            return self.head(x.cumsum(1)[torch.arange(len(x)), n.clamp(1, x.shape[1]) - 1][:, None])

    seen, lengths, x = [], [3, 9, 7, 5], torch.randn(4, 9)
    own_bt = own_positions(lengths)
    model = Counts()
    assert padding_of(model, (x * own_bt, torch.tensor(lengths)), {}, own_bt) <= 1e-5
    assert ([7], 7) in seen and ([7], 9) in seen and ([9], 7) not in seen
    model = Counts()
    with pytest.raises(SelfCheckError, match="padded on the right"):
        padding_of(model, (torch.randn(4, 9), torch.full((4,), 9)), {}, own_bt)
    assert ([7], 7) in seen and ([9], 9) in seen and ([9], 7) not in seen


@pytest.mark.parametrize(("norm", "is_refused"), [("group", True), ("layer", False)])
def test_padding_of_sounds(norm, is_refused):
    """A norm over all frames of a sound, padding included, is what the base models of wav2vec2 have."""
    own_bt = own_positions([301, 420, 640, 500])
    batch = {"input_values": torch.randn(own_bt.shape) * own_bt, "attention_mask": own_bt.long()}
    if not is_refused:
        assert padding_of(tiny_wav2vec2(norm), (), batch, own_bt) <= 1e-4
        return
    with pytest.raises(SelfCheckError, match="padded on the right"):
        padding_of(tiny_wav2vec2(norm), (), batch, own_bt)


def test_padding_of_frames_that_convolutions_make():
    own_bt = own_positions([9, 20, 13, 14])
    x = torch.randn(own_bt.shape) * own_bt
    assert padding_of(ReadsSounds(), (x,), {}, own_bt) <= 1e-5
    with pytest.raises(SelfCheckError, match="padded on the right"):
        padding_of(ReadsSounds(padding=2), (x + 3,), {}, own_bt)  # the convolution's own zeros are not the padding
    with pytest.raises(SelfCheckError, match="an example with 4 positions of its own, padded to 20, cannot be computed without"):
        padding_of(ReadsSounds(kernel=8), (x,), {}, own_positions([4, 20, 2, 20]))
    with pytest.raises(SelfCheckError, match="an example with 2 positions"):
        padding_of(ReadsSounds(kernel=8), (x,), {}, own_positions([9, 20, 2, 20]), row=2)


def test_padding_inside():
    """Positions that are nobody's between those that are, and a model that looks at them or not."""
    own_bt = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]]).bool()
    x = torch.randn(2, 6, 1)
    assert padding_of(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2)), (x,), {}, own_bt) <= 1e-5
    with pytest.raises(SelfCheckError, match="padded inside to the length of a longer one"):
        padding_of(Cumulated(), (x,), {}, own_bt)


class Cumulated(nn.Linear):
    def __init__(self):
        super().__init__(1, 4)

    def forward(self, x):
        return super().forward(x).cumsum(1)


@pytest.mark.parametrize("choices", [2, 3])
def test_padding_of_choices(choices):
    lengths = torch.tensor([[5, 3, 1], [2, 1, 1], [1, 2, 2]])[..., :choices]
    mask = (torch.arange(lengths.max()) < lengths[..., None]).long()
    if choices == 3:  # as many as positions
        mask = mask[1:, :, :3].flip(0)
        mask[0, 0, 2] = 1
    ids = torch.randint(1, 1000, mask.shape) * mask
    model = BertForMultipleChoice(
        BertConfig(vocab_size=1000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    batch = {"input_ids": ids, "attention_mask": mask}
    assert padding_of(model, (), batch, mask) <= 1e-5
    batch = {name: x.flip(-1) for name, x in batch.items()}
    with pytest.raises(SelfCheckError, match="padded on the left"):
        padding_of(model, (), batch, mask.flip(-1))


def test_padding_of_an_encoder_whose_targets_are_as_long():
    """They have a length of their own."""
    model, batch = T5ForConditionalGeneration(T5Config(**TINY_T5)), padded_ids()
    batch["labels"] = torch.randint(1, 1000, (4, 12))
    loss = find_per_example_loss(model)

    def losses_of(labels, **rows):
        return loss(model(**rows, labels=labels), labels)

    assert padding_of(model, (), batch, batch["attention_mask"], losses_of) <= 1e-5


def test_padding_is_looked_at_on_synthetic_content():
    """No number of an example's own decides, and where nothing is padded nothing is computed."""
    seen, batch = [], padded_ids()
    model = ReadsTexts(masked=True)
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        state = torch.get_rng_state()
        clipper.check_padding((), batch, batch["attention_mask"])
        assert torch.equal(torch.get_rng_state(), state) and model.training
        assert {len(x[0]) for x in seen} == {9, 12}
        assert all((x[0, :9] != batch["input_ids"][1, :9]).any() for x in seen)
        assert all((x[0, 9:] == 0).all() for x in seen)
        seen.clear()
        full = {name: x[2:3] for name, x in batch.items()}
        assert clipper.check_padding((), full, full["attention_mask"]) == 0 and not seen


class OnlyInTraining(nn.Module):
    """Mixes the batch in train mode only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        x = self.linear(x)
        return torch.tanh(x - x.mean(0)) if self.training else torch.tanh(x)


@pytest.mark.parametrize(
    "model", [OnlyInTraining, lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 2))]
)
def test_what_happens_only_in_training_is_seen(model):
    with pytest.raises(SelfCheckError, match="another example|keep private data"):
        check_model(model(), {"x" if model is OnlyInTraining else "input": torch.randn(6, 5)})


@pytest.mark.parametrize(
    "module", [lambda: nn.Embedding(9, 5, max_norm=0.1).requires_grad_(False), lambda: nn.InstanceNorm1d(3, track_running_stats=True)]
)
def test_frozen_state_that_moves_is_refused_and_put_back(module):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.relative, self.head = module(), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.relative(x))

    model = Model()
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    x = torch.randint(0, 9, (4, 3)) if isinstance(model.part, nn.Embedding) else torch.randn(4, 3, 5)
    with pytest.raises(SelfCheckError, match=r"'part\..*changes in the forward pass"):
        PerExampleClipper(model, 1.0).model(x)
    assert all(torch.equal(v, buffers[k]) for k, v in model.named_buffers())


# ---- examples that influence each other ----


class Attends(nn.Module):
    """Attention whose first dimension is positions, given a batch there, as happens."""

    def __init__(self, swap: bool):
        super().__init__()
        self.embed, self.attention, self.swap = nn.Embedding(9, 4), nn.MultiheadAttention(4, 2), swap

    def forward(self, ids):
        x = self.embed(ids)
        x = x.transpose(0, 1) if self.swap else x
        y = self.attention(x, x, x, need_weights=False)[0]
        return {"logits": y.transpose(0, 1) if self.swap else y}


class Centred(nn.Module):
    def forward(self, x, strength=1.0):
        return x - strength * x.mean(0)


class Tenth(nn.Module):
    """Example 1 reads example 0, by so little that rounding hides it."""

    def forward(self, x):
        return x + 1e-9 * torch.cat([x[:1] * 0, x[:1], x[:1] * 0 + x[2:] * 0])


class Limited(nn.Module):
    """The largest row gets through: no gradient of one with respect to another."""

    def forward(self, x):
        return x * (x.detach().sum(1).argsort(stable=True).argsort() == len(x) - 1)[:, None]


def every_pair(n):
    return [(i, j) for i in range(n) for j in range(n) if i != j]


def ids(n=4, t=3):
    return torch.stack([torch.randperm(9)[:t] for _ in range(n)])


@pytest.mark.parametrize(
    ("model", "x", "module"),
    [
        (nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.BatchNorm1d(5)), nn.Linear(5, 2)), torch.randn(4, 5), "'1.0' (BatchNorm1d)"),
        (nn.Sequential(nn.Linear(5, 5), nn.LeakyReLU(inplace=True), Centred()), torch.randn(4, 5), "'2' (Centred)"),
        (nn.Sequential(Centred(), nn.Linear(5, 2)), torch.randn(4, 5), "'0' (Centred)"),
        (Centred(), torch.randn(4, 5), "Centred"),
        (Attends(swap=False), ids(), "'attention' (MultiheadAttention)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mixing_is_found_where_it_happens(model, x, module):
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    mixing = find_example_mixing(model, x)
    assert mixing.pairs == every_pair(4)
    assert mixing.module == module
    assert str(mixing) == f"the output of example 0 depends on the input of example 1 (and 11 other pairs), first in {module}"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_which_examples_mix():
    x = torch.randn(4, 5)
    weak = find_example_mixing(Tenth(), x)  # seen by gradients alone
    assert (weak.pairs, weak.module) == ([(1, 0)], None)
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    limited = find_example_mixing(nn.Sequential(nn.Identity(), Limited()), x)  # seen by replacing alone
    assert (limited.pairs, limited.module) == ([(2, 3)], "'1' (Limited)")


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.LayerNorm(5)), torch.randn(4, 5)),
        (nn.BatchNorm1d(5).eval(), torch.randn(4, 5)),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)), (torch.randn(4, 5),)),
        (Attends(swap=True), {"ids": ids()}),
        (nn.GRU(5, 3, batch_first=True, dropout=0.5, num_layers=2), torch.randn(4, 6, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_that_do_not_mix(model, batch):
    if isinstance(model, nn.GRU):
        model = First(model)
    assert find_example_mixing(model, batch) is None


class First(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


@pytest.mark.parametrize("name", ["bert", "llama-tied"])
def test_transformers_do_not_mix_unless_their_loss_does(name):
    model, batch = build(name, dropout=0.1), batch_for(name, SHORT)
    assert find_example_mixing(model, {k: v for k, v in batch.items() if k != "labels"}) is None
    with pytest.raises(ValueError, match="leave the labels out"):
        find_example_mixing(model, batch)


def test_what_find_example_mixing_refuses():
    with pytest.raises(ValueError, match="at least two"):
        find_example_mixing(nn.Linear(5, 2), torch.randn(1, 5))
    with pytest.raises(ValueError, match=r"\[\(5,\)\] for 4 examples"):
        find_example_mixing(Mean(), torch.randn(4, 5))
    with pytest.raises(ValueError, match="finite"):
        find_example_mixing(nn.Linear(5, 2), torch.full((4, 5), float("nan")))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(0)


# ---- the check for your own layers ----


def test_per_sample_gradients_are_correct(caplog):
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    with caplog.at_level("INFO"):
        assert check_per_sample_gradients_are_correct(torch.randn(4, 3, 5), model)
    for mode in ("book_keeping", "ghost", "fast_gradient", "per_sample"):
        assert f"mode {mode}: worst relative error of per-example gradients" in caplog.text
    assert not model._forward_hooks
    assert check_per_sample_gradients_are_correct({"ids": ids()}, Attends(swap=True))
    bilinear, inputs = nn.Bilinear(5, 4, 2), (torch.randn(3, 5), torch.randn(3, 4))
    assert check_per_sample_gradients_are_correct(inputs, bilinear, loss_function=lambda a, b: bilinear(a, b).tanh().sum(1))


def test_per_sample_gradients_that_are_not_correct(monkeypatch, caplog):
    x, model = torch.randn(4, 3, 5), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    right = rule_for(nn.Linear(1, 1)).terms

    def rows_in_another_order(module, activations, backprops):
        """The norms of all parameters together stay; each example's gradient does not."""
        found = right(module, activations, backprops)
        return {p: Dense(t.instantiate().grad.flip(1)) for p, t in found.items()}

    monkeypatch.setitem(layer_rule._RULES, nn.Linear.forward, LayerRule(rows_in_another_order))
    assert not check_per_sample_gradients_are_correct(x, model, modes=["per_sample"])
    monkeypatch.setitem(
        layer_rule._RULES,
        nn.Linear.forward,
        LayerRule(lambda m, a, g: {p: Dense(t.instantiate().grad * 1.0001) for p, t in right(m, a, g).items()}),
    )
    for mode in ("book_keeping", "ghost", "fast_gradient", "per_sample"):
        assert not check_per_sample_gradients_are_correct(x, model, modes=[mode])
        assert check_per_sample_gradients_are_correct(x, model, modes=[mode], tolerance=1e-2)
    assert "allowed: 1e-05" in caplog.text
    monkeypatch.undo()
    assert not check_per_sample_gradients_are_correct(torch.randn(4, 5), MixesBatch())
    assert "mixes examples" in caplog.text
    with pytest.raises(ValueError, match="at least two"):
        check_per_sample_gradients_are_correct(x[:1], model)
    with pytest.raises(ValueError, match="no trainable parameter"):
        check_per_sample_gradients_are_correct(x, nn.Linear(5, 2).requires_grad_(False))
