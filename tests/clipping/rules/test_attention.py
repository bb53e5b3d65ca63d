"""nn.MultiheadAttention, option by option, against one example at a time."""

import contextlib
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Calls
from oracle import assert_exact_in_modes, clipped_sum, distance, errors, length, trainable
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.modes import MODES
from dp_transformers.clipping.rules.attention import multihead_attention

ALL_MODES = sorted(MODES)
HEADS, WIDTH = 2, 8


class Attention(nn.Module):
    """One attention between a layer before and a random function after it, everything it may be given made from ``x``
    and ``y``.

    inputs: "x,x,x" self-attention, "x,y,y", "x,y,z" and so on, z being another projection of y; mask: None, or what is
    built below.
    """

    def __init__(
        self, inputs="x,x,x", mask=None, padding=None, causal=False, need_weights=False, average=True, **options
    ):
        super().__init__()
        self.inputs, self.mask, self.padding, self.causal = inputs.split(","), mask, padding, causal
        self.need_weights, self.average = need_weights, average
        options = {"batch_first": True, **options}
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.before = nn.ModuleDict(
            {"x": nn.Linear(5, WIDTH), "y": nn.Linear(5, options.get("kdim") or WIDTH), "z": nn.Linear(5, options.get("vdim") or WIDTH)},
        )  # fmt: skip
        with torch.no_grad():
            for p in self.attention.parameters():
                p.copy_(0.5 * torch.randn_like(p))

    def attend(self, x, y):
        given = {"x": self.before["x"](x), "y": self.before["y"](y), "z": self.before["z"](y)}
        if not self.attention.batch_first:
            given = {name: t.transpose(0, 1) for name, t in given.items()}
        q, k, v = (given[name] for name in self.inputs)
        size = (x.shape[1], (x if self.inputs[1] == "x" else y).shape[1])
        of_example = y[:, :1, 0]  # (B, 1), decides its mask
        masks = {
            None: None,
            "bool": ~torch.ones(size, dtype=torch.bool).tril(),
            "float": torch.linspace(-1, 1, size[0] * size[1]).view(size),
            "bool of its own": (of_example[:, :, None, None] * torch.arange(1.0, size[1] + 1).cos().expand(HEADS, *size) > 0.3).flatten(0, 1),
            "float of its own": (of_example[:, :, None, None] * torch.linspace(-1, 1, HEADS * size[0] * size[1]).view(1, HEADS, *size)).flatten(0, 1),
        }  # fmt: skip
        mask = masks["bool" if self.causal else self.mask]
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.clone()
            mask[..., 0] = False  # nobody is left with nothing to look at
        kept = torch.arange(size[1]) <= (of_example * 3).abs()
        paddings = {None: None, "bool": ~kept, "float": torch.zeros_like(kept, dtype=x.dtype).masked_fill(~kept, -5.0)}
        return self.attention(
            q, k, v, attn_mask=mask, key_padding_mask=paddings[self.padding], is_causal=self.causal,
            need_weights=self.need_weights, average_attn_weights=self.average,
        )  # fmt: skip

    def forward(self, x, y):
        out, weights = self.attend(x, y)
        if not self.attention.batch_first:
            out = out.transpose(0, 1)
        return out if weights is None else (out, weights)


def losses_of(model):
    """(B,): a random non-linear function of each example's outputs, the attention weights among them."""

    def losses(batch):
        outputs = model(batch["x"], batch["y"])
        total = 0
        for i, out in enumerate([outputs] if isinstance(outputs, torch.Tensor) else outputs):
            weight = torch.randn(out.shape[1:].numel(), generator=torch.Generator().manual_seed(i))
            total = total + torch.tanh((1 + 2 * i) * out).flatten(1) @ weight
        return total

    return losses


def batch_of(size=4, queries=5, keys=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, queries, 5, generator=generator), "y": torch.randn(size, keys, 5, generator=generator)}  # fmt: skip


def check(model, batch, modes=("book_keeping",), answers=multihead_attention):
    """Norms and clipped sums, by the rules alone; the self-check passes too."""
    owners = assert_exact_in_modes(model, losses_of(model), batch, modes)
    rules = {owner.module: owner.rule.terms for owner in owners}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and any(
            p.requires_grad for p in module.parameters(recurse=False)
        ):
            assert rules.get(module) is answers
        elif answers is not None:
            assert rules.get(module, answers) is not None, f"{type(module).__name__} went through the fallback"


OPTIONS = {
    "plain": {},
    "positions first": {"batch_first": False},
    "no bias": {"bias": False},
    "weights": {"need_weights": True},
    "weights of each head": {"need_weights": True, "average": False},
    "weights, positions first": {"need_weights": True, "batch_first": False},
    "causal": {"causal": True},
    "causal with weights": {"causal": True, "need_weights": True},
    "causal with padding": {"causal": True, "padding": "bool"},
    "added": {"add_bias_kv": True, "add_zero_attn": True},
    "added, causal": {"add_bias_kv": True, "causal": True},
    "added, no bias, with weights": {"add_bias_kv": True, "bias": False, "need_weights": True},
    "added zero": {"add_zero_attn": True, "mask": "bool", "padding": "bool"},
    "added, cross, masks": {"add_bias_kv": True, "add_zero_attn": True, "inputs": "x,y,y", "mask": "float", "padding": "float"},
    "cross": {"inputs": "x,y,y"},
    "cross, positions first": {"inputs": "x,y,y", "batch_first": False, "need_weights": True},
    "three inputs": {"inputs": "x,y,z", "padding": "bool"},
    "query is key": {"inputs": "x,x,z"},
    "query is value": {"inputs": "x,z,x"},
    "own widths": {"inputs": "x,y,z", "kdim": 6, "vdim": 3},
    "own widths, added, no bias": {"inputs": "x,y,z", "kdim": 6, "vdim": 3, "add_bias_kv": True, "bias": False},
    "own widths, positions first": {"inputs": "x,y,z", "kdim": 6, "vdim": 3, "batch_first": False, "need_weights": True},
    "bool mask": {"mask": "bool", "padding": "bool"},
    "float mask": {"mask": "float", "padding": "float", "need_weights": True},
    "bool mask of its own": {"mask": "bool of its own", "padding": "bool"},
    "float mask of its own": {"mask": "float of its own", "need_weights": True},
    "float mask of its own, cross": {"mask": "float of its own", "inputs": "x,y,y", "padding": "float"},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option):
    check(Attention(**OPTIONS[option]), batch_of(queries=4 if "query is" not in option else 5))


@pytest.mark.parametrize("option", OPTIONS)
def test_output_and_gradients_are_those_of_the_layer(option):
    """Attached or not, with dropout and the same random numbers: the same outputs and input gradients."""
    model, batch = Attention(**OPTIONS[option], dropout=0.4), batch_of(queries=4 if "query is" not in option else 5)
    x = batch["x"].requires_grad_()

    def run():
        torch.manual_seed(1)
        return losses_of(model)(batch)

    expected = run()
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    with PerExampleClipper(model, 1.0, self_check=False):
        got = run()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout(mode, need_weights):
    """The gradients of the masks that were drawn."""
    model, batch = Attention(dropout=0.5, need_weights=need_weights, add_bias_kv=True), batch_of()
    torch.manual_seed(3)
    losses = losses_of(model)(batch)
    gradients = [torch.autograd.grad(loss, trainable(model), retain_graph=True, allow_unused=True) for loss in losses]
    gradients = [
        [torch.zeros_like(p) if g is None else g for p, g in zip(trainable(model), row, strict=True)]
        for row in gradients
    ]
    bound = float(torch.tensor([length(g) for g in gradients]).median())
    norms, total = clipped_sum(gradients, bound)
    for p in (model.before["y"], model.before["z"]):
        p.requires_grad_(False)
    names = [i for i, p in enumerate(model.parameters()) if p.requires_grad]
    torch.manual_seed(3)
    with PerExampleClipper(model, bound, mode=mode, self_check=False) as clipper:
        got = clipper.backward(losses_of(model)(batch))
    torch.testing.assert_close(got.double(), torch.tensor(norms).double(), rtol=1e-5, atol=0)
    assert distance([p.grad for p in trainable(model)], [total[i] for i in names]) <= 1e-5 * length(total)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    size=st.integers(2, 5), queries=st.integers(1, 24), keys=st.integers(1, 24), seed=st.integers(0, 10**6), mode=st.sampled_from(ALL_MODES),
    inputs=st.sampled_from(["x,x,x", "x,y,y", "x,y,z"]), batch_first=st.booleans(), bias=st.booleans(), add_bias_kv=st.booleans(),
    add_zero_attn=st.booleans(), need_weights=st.booleans(), mask=st.sampled_from([None, "bool", "float of its own"]),
)  # fmt: skip
def test_any_shape(size, queries, keys, seed, mode, **options):
    torch.manual_seed(seed)
    check(Attention(**options), batch_of(size, queries, keys, seed), [mode])


FROZEN = {
    "in": lambda name: name.startswith("attention.in_proj"),
    "in_proj_weight": lambda name: name == "attention.in_proj_weight",
    "out": lambda name: "out_proj" in name,
    "all but bias_k": lambda name: name != "attention.bias_k",
    "all but out_proj.bias": lambda name: name != "attention.out_proj.bias",
    "attention": lambda name: name.startswith("attention"),
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts(frozen):
    model = Attention(add_bias_kv=True, inputs="x,y,y")
    for name, p in model.named_parameters():
        p.requires_grad_(not FROZEN[frozen](name))
    check(model, batch_of())


def of_one_attention(call, **parts):
    """Between a layer before and what ``call`` makes of both."""
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    return Calls(call, attention=attention, before=nn.Linear(5, WIDTH), **parts)


def twice(m, x, y):
    """One attention for both: the blocks of rows of its packed weight are not the same in the two calls."""
    x, y = m.before(x), m.before(y)
    x = x + m.attention(x, x, x, need_weights=False)[0]
    return x + m.attention(x, y, y.flip(1))[0] + m.attention(x, y, y)[0]


class Checkpointed(Attention):
    def __init__(self, use_reentrant, **options):
        super().__init__(**options)
        self.use_reentrant = use_reentrant

    def forward(self, x, y):
        if len(x) == 1:  # the oracle's forward passes
            return super().forward(x, y)
        return checkpoint(super().forward, x.requires_grad_(self.use_reentrant), y, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize(
    "build", [lambda: of_one_attention(twice), lambda: Checkpointed(True, inputs="x,y,y"), lambda: Checkpointed(False, add_bias_kv=True)],
)  # fmt: skip
def test_several_calls_and_checkpointing(build):
    check(build(), batch_of(queries=3))


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, **options)
        self.before, self.layers = (
            nn.Linear(5, WIDTH),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor="bias" not in options and "batch_first" in options),
        )
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 12, **options)
        self.batch_first = options.get("batch_first", False)

    def forward(self, x, y):
        padding = torch.arange(y.shape[1]) > (y[:, :1, 0] * 3).abs()
        x, y = self.before(x), self.before(y)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        encoded = self.layers(y, src_key_padding_mask=padding)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1 if self.batch_first else 0])
        out = self.decoder(x, encoded, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding.float())
        return out if self.batch_first else out.transpose(0, 1)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "options", [{"batch_first": True}, {}, {"batch_first": True, "norm_first": True, "bias": False}], ids=str
)
def test_transformer_layers(options, train):
    """Also in evaluation mode, where they have a fast path that no rule sees."""
    check(Encoder(dropout=0.0, **options).train(train), batch_of())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("without_graph", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("is_suspended", [False, True], ids=["", "suspended"])
@pytest.mark.parametrize("build", [lambda: Encoder(batch_first=True), Attention], ids=["encoder", "attention"])
def test_the_fast_path_runs_in_evaluation(build, is_suspended, without_graph):
    """Without a graph there is nothing to tap, and torch packs rows into nested tensors, which other paths refuse."""
    model, batch = build().eval(), batch_of()
    with without_graph():
        expected = losses_of(model)(batch)
    with PerExampleClipper(model, 1.0) as clipper:
        before, twin = clipper.backward(losses_of(model)(batch)), copy.deepcopy(model)
        with clipper.suspended() if is_suspended else contextlib.nullcontext(), without_graph():
            torch.testing.assert_close(losses_of(model)(batch), expected, rtol=0, atol=0)
            torch.testing.assert_close(losses_of(twin)(batch), expected, rtol=0, atol=0)
        model.zero_grad()
        assert torch.equal(clipper.backward(losses_of(model)(batch)), before)


def windows(m, x, y):
    """Attention inside windows, (B·windows, T, d): nobody there sees the batch."""
    x_wtd = m.before(x).unflatten(1, (-1, 2)).flatten(0, 1)
    return m.attention(x_wtd, x_wtd, x_wtd, need_weights=False)[0].unflatten(0, (len(x), -1)).flatten(1, 2)


def shared(batched):
    """The same attention for all examples, with and without a batch dimension."""

    def call(m, x, y):
        table = m.table[None] if batched else m.table
        table = m.attention(table, table, table, need_weights=False)[0]
        return m.before(x) * (table if batched else table[None])

    return of_one_attention(call, table=nn.Parameter(torch.randn(4, WIDTH)))


@pytest.mark.parametrize(
    "build",
    [lambda: of_one_attention(windows), lambda: shared(True), lambda: shared(False)],
    ids=["windows", "shared", "no batch"],
)
def test_calls_without_the_batch_are_answered_by_the_model(build):
    check(build(), batch_of(queries=4), answers=None)


def test_unbatched_calls_that_come_later_are_refused():
    """A model that squeezes: what the self-check saw had a batch."""
    model = shared(False)
    clipper = PerExampleClipper(model, 1.0, mode="ghost", self_check=False)
    with pytest.raises(ValueError, match="unbatched query in a forward pass of 4 examples"):
        clipper.backward(losses_of(model)(batch_of(queries=4)))
    assert not torch.overrides._get_current_function_mode_stack()  # closed although it raised


def test_bf16_autocast():
    """Norms are those of one example at a time under autocast, to the precision of bf16."""
    model, batch = Attention(inputs="x,y,y", need_weights=True), batch_of()

    def in_bf16(rows):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return losses_of(model)(rows)

    norm_error, sum_error, _ = errors(model, "book_keeping", batch, in_bf16)
    assert max(norm_error, sum_error) <= 2e-2
