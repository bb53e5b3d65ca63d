"""PerExampleClipper against one example at a time: modes, models, tying, sensitivity, locality, misuse."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from layers import ALL_MODES, Calls
from models import CHECKPOINTING, LONG, SHORT, Net, batch_for, build, losses_function, net_losses
from oracle import assert_exact, clipped_sum, distance, length, per_example_gradients, trainable
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.modes import MODES
from dp_transformers.clipping.recorded_call import ForwardPass
from dp_transformers.clipping.terms import Dense, Outer


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("layer", [nn.Embedding, nn.Linear])
def test_one_position_before_the_batch(layer, mode):
    """A first dimension of one is then that of the positions, and no output that all examples share."""
    torch.manual_seed(0)
    model = layer(7, 3)
    x = torch.randint(7, (1, 4)) if layer is nn.Embedding else torch.randn(1, 4, 7)  # (T, B, ...)
    gradients = [torch.autograd.grad(model(x[:, i : i + 1]).square().sum(), trainable(model)) for i in range(4)]
    bound = sorted(length(g) for g in gradients)[1]
    norms, total = clipped_sum(gradients, bound)
    clipper = PerExampleClipper(model, bound, mode=mode, batch_first=False)
    got = clipper.backward(model(x).square().sum((0, 2)))
    torch.testing.assert_close(got.double(), torch.tensor(norms).double(), rtol=1e-5, atol=0)
    assert distance([p.grad for p in trainable(model)], total) <= 1e-5 * length(total)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_locality(mode):
    """Another example's content, outlier or not, leaves an example's gradient as it is, to the bit."""
    model = build("gpt2")
    clipper = PerExampleClipper(model, 1.0, mode=mode, self_check=False)
    losses_of, batch = losses_function(model), batch_for("gpt2", SHORT)
    norms = clipper.backward(losses_of(batch))
    other = {k: torch.cat([v[:-1], batch_for("gpt2", SHORT, seed=9)[k][-1:]]) for k, v in batch.items()}
    moved = clipper.backward(losses_of(other))
    assert torch.equal(norms[:-1], moved[:-1])
    assert norms[-1] != moved[-1]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_backward_accumulates_and_forgets(mode):
    """Two physical batches add up to one of both; nothing of the first is left for the second; an unused forward
    changes nothing."""
    model = build("llama-tied")
    losses_of, batch = losses_function(model), batch_for("llama-tied", SHORT)
    with PerExampleClipper(model, 0.3, mode=mode, self_check=False) as clipper:
        clipper.backward(losses_of(batch))
        whole = [p.grad.clone() for p in trainable(model)]
        model.zero_grad()
        losses_of({k: v[:3] for k, v in batch.items()})  # a training forward whose losses are thrown away
        for part in (slice(0, 3), slice(3, 5)):
            clipper.backward(losses_of({k: v[part] for k, v in batch.items()}))
        assert distance([p.grad for p in trainable(model)], whole) <= 1e-6 * length(whole)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_dropout_is_the_same_for_norm_and_sum(mode):
    """With dropout on, the sum is the clipped sum of the very gradients that were measured."""
    model = build("bert", dropout=0.3)
    losses_of, batch = losses_function(model), batch_for("bert", SHORT)
    torch.manual_seed(5)
    with PerExampleClipper(model, 1e-3, mode=mode, self_check=False) as clipper:
        weights = torch.zeros(5)
        weights[3] = 1
        clipper.backward(losses_of(batch), weights)
    assert abs(length([p.grad for p in trainable(model)]) - 1e-3) <= 1e-8


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_activation_checkpointing_gives_the_same(mode, reentrant, lora):
    model = build("llama", lora=lora)
    losses_of, batch = losses_function(model), batch_for("llama", SHORT)
    with PerExampleClipper(model, 0.3, mode=mode, self_check=False) as clipper:
        norms = clipper.backward(losses_of(batch))
        grads = [p.grad.clone() for p in trainable(model)]
        model.zero_grad()
        base = model.get_base_model() if lora else model
        getattr(base, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})
        base.enable_input_require_grads()
        for p in trainable(model):  # what was there is added to, in every mode
            p.grad = torch.ones_like(p)
        again = clipper.backward(losses_of(batch))
        torch.testing.assert_close(again, norms, rtol=1e-6, atol=0)
        assert distance([p.grad - 1 for p in trainable(model)], grads) <= 1e-5 * length(grads)
    with PerExampleClipper(model, 0.3, mode=mode) as clipper:  # the self-check passes too
        model(**{k: v for k, v in batch.items() if k != "labels"})
    assert clipper.checked
    assert PerExampleClipper(model, 1.0, self_check=False).mode.name == "ghost"
    assert PerExampleClipper(build("llama"), 1.0).mode.name == "book_keeping"


@pytest.mark.parametrize(("tokens", "width", "out"), [(512, 64, 64), (64, 256, 256)])
def test_ghost_norm_never_comes_out_too_small(tokens, width, out):
    """Nearly constant activations against output gradients that sum to zero: the norm is a small difference of large
    numbers."""

    generator = torch.Generator().manual_seed(0)
    for jitter in (0.1, 0.01, 1e-3):
        activations = 1 + jitter * torch.randn(4, tokens, width, generator=generator)
        gradients = torch.randn(4, tokens, out, generator=generator)
        gradients -= gradients.mean(1, keepdim=True)
        exact = torch.bmm(gradients.double().mT, activations.double()).square().sum((1, 2))
        ghost = Outer(gradients, activations)
        chosen = ghost.norm().squared()
        assert (chosen.double() >= exact * (1 - 1e-5)).all(), (jitter, chosen / exact)


def test_model_is_left_as_it_was():
    model = build("bert")
    before = (type(model), list(model.state_dict()), set(vars(model)))
    batch = batch_for("bert", SHORT)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**inputs).logits
    clipper = PerExampleClipper(model, 1.0)
    clipper.backward(losses_function(model)(batch))
    assert (type(model), list(model.state_dict()), set(vars(model))) == before
    assert torch.equal(model(**inputs).logits, logits)
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, logits)
    clipper.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(pickle.loads(pickle.dumps(model))(**inputs).logits, logits)


def test_freezing_and_unfreezing_after_attaching_is_seen():
    model = build("bert")
    losses_of, batch = losses_function(model), batch_for("bert", SHORT)
    for p in model.bert.encoder.layer[0].parameters():
        p.requires_grad_(False)
    clipper = PerExampleClipper(model, 1.0, self_check=False)
    assert_exact(model, clipper, losses_of, batch)
    for p in model.bert.encoder.layer[0].parameters():
        p.requires_grad_(True)
    assert_exact(model, clipper, losses_of, batch)
    for p in model.bert.embeddings.parameters():
        p.requires_grad_(False)
    assert_exact(model, clipper, losses_of, batch)
    assert all(p.grad is None for p in model.bert.embeddings.parameters())


def before_it_was_attached(model, x):
    losses = model(x)[:, 0]
    clipper = PerExampleClipper(model, 1.0, self_check=False)
    with pytest.raises(ValueError, match="no forward pass"):
        clipper.backward(losses)
    model(x)
    clipper.backward(losses)


def attached(do, **options):
    return lambda model, x: do(PerExampleClipper(model, 1.0, **{"self_check": False, **options}), model, x)


def twice(clipper, model, x):
    losses = model(x)[:, 0]
    clipper.backward(losses)
    clipper.backward(losses)


MISUSE = {
    "the loss of the batch": (attached(lambda c, m, x: c.backward(m(x).mean())), r"shape \(B,\).*reduction='none'"),
    "too few losses": (attached(lambda c, m, x: c.backward(m(x)[:3, 0])), "3 losses for a batch of 4"),
    "a forward pass before": (before_it_was_attached, "before attach"),
    "no graph": (attached(lambda c, m, x: c.backward(m(x)[:, 0].detach())), "no graph"),
    "backward twice": (attached(twice), "once each"),
    "a weight above 1": (attached(lambda c, m, x: c.backward(m(x)[:, 0], torch.tensor([2.0, 1, 1, 1]))), "weight"),
    "a weight below 0": (attached(lambda c, m, x: c.backward(m(x)[:, 0], torch.tensor([-0.1, 1, 1, 1]))), "weight"),
    "no number as weight": (attached(lambda c, m, x: c.backward(m(x)[:, 0], torch.tensor([torch.nan, 1, 1, 1]))), "weight"),
    "too few weights": (attached(lambda c, m, x: c.backward(m(x)[:, 0], torch.ones(3))), "weight"),
    "an unknown mode": (lambda m, x: PerExampleClipper(m, 1.0, mode="magic"), "'magic' is unknown"),
    "nothing to train": (lambda m, x: PerExampleClipper(m.requires_grad_(False), 1.0), "no trainable parameter"),
    "two clippers": (attached(lambda c, m, x: PerExampleClipper(m, 1.0)), "another PerExampleClipper"),
    "batch second, unchecked": (lambda m, x: PerExampleClipper(m, 1.0, batch_first=False, self_check=False), "batch_first=False needs the self-check"),
    "losses of what is frozen": (attached(lambda c, m, x: (m(x), c.backward(m[0](x).detach().sum(1) + torch.ones(4, requires_grad=True)))), "depend on no"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISUSE)
def test_misuse(what):
    do, message = MISUSE[what]
    with pytest.raises(ValueError, match=message):
        do(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), torch.randn(4, 3))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_losses_of_other_calls(mode):
    """Of another batch, and of a part of the model by itself, which nobody may go back through."""
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), torch.randn(4, 3)
    clipper = PerExampleClipper(model, 1.0, mode=mode, self_check=False)
    first, second = model(torch.randn(5, 3))[:, 0], model(x)[:, 0]
    with pytest.raises(ValueError, match="earlier forward pass"):
        clipper.backward(first[:4] + second)
    for losses in (lambda: model(x)[:, 0] + model[0](x)[:, 0], lambda: model[1](model[0](x))[:, 0] + model(x)[:, 0]):
        with pytest.raises(ValueError, match=r"forward ran outside the model|was called outside"):
            clipper.backward(losses())
        assert all(p.grad is None for p in model.parameters())
    inner = model[0](x)
    with pytest.raises(ValueError, match=r"'0' .Linear. was called outside.*engine.suspended.*clipper.suspended"):
        F.relu(inner).sum().backward()
    with pytest.raises(ValueError, match=r"'0' .Linear. was called outside"):
        torch.autograd.grad(inner.sum(), model[0].weight)
    assert model[0].weight.grad is None


def test_bf16_autocast_respects_the_bound(bf16_products):
    """What is really summed stays within C in every mode, although forward and backward round to bf16."""
    model = build("llama")
    losses_of, batch = losses_function(model), batch_for("llama", LONG)
    for mode in ALL_MODES:
        with PerExampleClipper(model, 0.05, mode=mode, self_check=False) as clipper:
            for j in range(5):
                model.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    losses = losses_of(batch)
                weights = F.one_hot(torch.tensor(j), 5).float()
                norms = clipper.backward(losses, weights)
                assert norms.dtype == torch.float32
                assert norms[j] > 0.05
                assert length([p.grad for p in trainable(model)]) <= 0.05 * (1 + 1e-5), mode


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["embedding", "linear", "bias", "layer norm", "convolution", "attention", "recurrent"]
)
def test_parts_that_cancel(kind, dtype, size, mode, bf16_products):
    """Positions pull in opposite directions: what is left of them is rounding, and still bounded."""
    t, d = (512 if dtype == torch.float32 else 64), 4
    generator = torch.Generator().manual_seed(0)
    pulls = size * torch.randn(2, t, d, generator=generator)
    pulls -= pulls.mean(1, keepdim=True) - torch.randn(2, 1, d, generator=generator) * size**0.5 / t
    x = torch.ones(2, t, d)
    if kind == "embedding":
        model, x = nn.Embedding(3, d), torch.ones(2, t, dtype=torch.long)
    elif kind == "layer norm":
        model, x = nn.LayerNorm(d), torch.randn(2, 1, d, generator=generator).expand(2, t, d)
    elif kind == "convolution":
        model, x, pulls = nn.Conv1d(d, d, 3, padding=1), x.mT, pulls.mT
    elif kind == "attention":
        attention = nn.MultiheadAttention(d, 1, batch_first=True)  # to itself, each position to all
        model = Calls(lambda m, x: m.inner(x, x, x, need_weights=False)[0], inner=attention)
    elif kind == "recurrent":  # without memory: each output is its input, many times over
        model = Calls(
            lambda m, x: m.inner(x)[0], inner=nn.RNN(d, d, nonlinearity="relu", bias=False, batch_first=True)
        )
        model.inner.weight_hh_l0.requires_grad_(False).zero_()
        nn.init.constant_(model.inner.weight_ih_l0, 0.5)
    else:
        model = nn.Linear(d, d, bias=kind == "bias")
        model.weight.requires_grad_(kind == "linear")
    for j in range(2):
        with PerExampleClipper(model, 1.0, mode=mode, self_check=False) as clipper:
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
                losses = (model(x).float() * pulls).sum((1, 2))
            norms = clipper.backward(losses, F.one_hot(torch.tensor(j), 2).float())
            assert norms[j] > 1
            assert length([p.grad for p in trainable(model)]) <= 1 + 1e-5


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["embedding", "linear", "bias"])
def test_equal_parts_that_cancel(kind, dtype, mode, bf16_products):
    """Some positions pull three times as much as the others, against them: all are rounded alike, so what is left is
    no random walk."""
    t, d, bound = 4096, 8, 1e-3
    model = nn.Embedding(3, d) if kind == "embedding" else nn.Linear(d, d, bias=kind == "bias")
    if kind == "bias":
        model.weight.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.ones(2, t, dtype=torch.long)
        if kind == "embedding"
        else torch.randn(2, 1, d, generator=generator).expand(2, t, d)
    )
    pulls = torch.where(torch.arange(t) < t // 4, 3.0, -1.0)[:, None] * torch.randint(1, 8, (d,), generator=generator)
    for j in range(2):
        with PerExampleClipper(model, bound, mode=mode, self_check=False) as clipper:
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
                losses = (model(x).float() * pulls).sum((1, 2))
            norms = clipper.backward(losses, F.one_hot(torch.tensor(j), 2).float())
            assert norms.isfinite().all()
            assert length([p.grad for p in trainable(model)]) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("first", ["router", "up"])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_one_input_of_layers_in_two_precisions(mode, first, bf16_products):
    """A router that stays in fp32 inside an autocast region: what is known of the input rounded to bf16 says nothing
    of it unrounded."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.router = nn.Linear(64, 256, bias=False), nn.Linear(64, 300, bias=False)

        def forward(self, x):
            if first == "up":
                up = self.up(x)
            with torch.autocast("cpu", enabled=False):
                routed = self.router(x)
            return (self.up(x) if first == "router" else up).float().sum(2) + 7 * routed.sum(2)

    model, x = Routed(), torch.full((3, 4, 64), 1.0039)  # bf16 has 1 and 1.0078
    for j in range(3):
        with PerExampleClipper(model, 1.0, mode=mode, self_check=False) as clipper:
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = model(x).sum(1)
            assert clipper.backward(losses, F.one_hot(torch.tensor(j), 3).float())[j] > 1
            assert length([p.grad for p in trainable(model)]) <= 1 + 1e-5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_bf16_parameters(mode, tied, bf16_products):
    """Norms and sums are in fp32, over several batches too; the sum of one example is as long as it may be, and not
    longer."""
    model = build("llama-tied" if tied else "llama").bfloat16()
    losses_of, batch = losses_function(model), batch_for("llama", LONG)
    gradients = per_example_gradients(model, losses_of, batch)
    bound = sorted(length(g) for g in gradients)[2]
    norms = clipped_sum(gradients, bound)[0]
    with PerExampleClipper(model, bound, mode=mode) as clipper:
        model.zero_grad()
        got = clipper.backward(losses_of(batch))
        clipper.backward(losses_of(batch))
        assert all(p.grad.dtype == torch.float32 for p in trainable(model) if p.grad is not None)
        torch.testing.assert_close(got.double(), torch.tensor(norms, dtype=torch.float64), rtol=2e-2, atol=0)
        weights = [min(1.0, bound / n) / min(1.0, bound / exact) for n, exact in zip(got.tolist(), norms, strict=True)]
        total = clipped_sum(gradients, bound, weights)[1]
        assert distance([p.grad for p in trainable(model)], [2 * t for t in total]) <= 2e-2 * 2 * length(total)
        for j in range(5):
            model.zero_grad()
            clipper.backward(losses_of(batch), F.one_hot(torch.tensor(j), 5).float())
            assert length([p.grad for p in trainable(model)]) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_autocast_around_backward_does_not_reach_norms_and_sums(mode):
    """fp32 activations, backward called inside an autocast region: its matrix products must not be cast down."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2))
    x, y = torch.randn(4, 6, 40), torch.randn(4, 6, 2)
    results = []
    for inside in (False, True):
        model.zero_grad()
        with PerExampleClipper(model, 0.7, mode=mode, self_check=False) as clipper:
            losses = (model(x) * y).sum((1, 2))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                norms = clipper.backward(losses)
        results.append((norms, [p.grad.clone() for p in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert distance(results[0][1], results[1][1]) <= 1e-6


@pytest.mark.parametrize("mode", ALL_MODES)
def test_hooks_of_the_user_are_differentiated(mode):
    """A hook that changes a layer's output, registered before the clipper: the tap comes first, autograd does the
    rest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].register_forward_hook(lambda module, args, out: 3 * out)
    batch = {"x": torch.randn(4, 3, 4), "y": torch.randn(4, 3, 2)}
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        assert_exact(model, clipper, lambda b: (model(b["x"]) * b["y"]).sum((1, 2)), batch)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_float64_parameters(mode):
    """Measured in float32, and handed back in the dtype of the parameters."""
    torch.manual_seed(0)
    model = Net().double().train()
    ids = torch.randint(1, 50, (4, 9))
    batch = {"input_ids": ids, "labels": torch.randint(0, 50, ids.shape)}
    assert_exact(model, PerExampleClipper(model, 1.0, mode=mode), net_losses(model), batch)
    assert all(p.grad.dtype == torch.float64 for p in trainable(model))


@pytest.mark.parametrize("bound", [1e-24, 0.0, -1.0, float("nan"), float("inf"), "1"])
def test_bounds_that_bound_nothing_are_refused(bound):
    """At 1e-24 every squared norm was 0 in float32, and three examples moved the sum by 103 C."""
    with pytest.raises(ValueError, match="max_grad_norm must be a finite int or float of at least 1e-12"):
        PerExampleClipper(nn.Linear(2, 2), bound)


def test_a_copy_of_a_clipper_holds_nothing():
    model = nn.Linear(3, 2)
    model.clipper = clipper = PerExampleClipper(model, 1.0, self_check=False)
    clipper.backward(model(torch.randn(4, 3)).sum(1))
    assert vars(copy.deepcopy(model).clipper) == {} == vars(pickle.loads(pickle.dumps(clipper)))


@pytest.mark.parametrize("mode", MODES)
def test_what_a_pass_kept_is_freed_without_the_garbage_collector(mode):
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 2))

    def kept():
        return {id(x) for x in gc.get_objects() if type(x) in (Outer, Dense, ForwardPass)}

    gc.disable()
    try:
        before = kept()  # by other tests
        with PerExampleClipper(model, 1.0, mode=mode) as clipper:
            losses = model(torch.randn(4, 6, 5)).square().mean((1, 2))
            clipper.backward(losses)
            del losses
            assert kept() <= before
    finally:
        gc.enable()
