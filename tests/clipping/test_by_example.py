"""Modules without a rule, one example at a time in the forward pass: exact, once, and nothing of vmap stays behind."""

import copy
import pickle

import pytest
import torch
from layers import ALL_MODES, Calls, D, Norm, check, weigh
from oracle import assert_exact, clipped_sum, distance, length, per_example_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.errors import UnsupportedModuleError


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3.0


class Router(nn.Module):
    """Rows of all positions in, the layer as a function, numbers and indices out."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, D)), nn.Parameter(torch.randn(4))

    def forward(self, rows):
        scores = nn.functional.linear(rows, self.weight, self.bias).softmax(-1)
        values, chosen = scores.topk(2)
        return scores, values, chosen


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = Router(), nn.Linear(D, 4 * D)

    def forward(self, x):
        rows = x.reshape(-1, D)
        scores, values, chosen = self.router(rows)
        experts = self.experts(x).view(-1, 4, D)
        picked = experts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, D))
        return ((picked * values.unsqueeze(-1)).sum(1) + scores.sum(-1, keepdim=True) * rows).view_as(x)


class Sinks(nn.Module):
    """Attention with a raw parameter between layers that have rules, and a table of positions without a batch."""

    def __init__(self, kind="math"):
        super().__init__()
        self.kind, self.sinks, self.table = kind, nn.Parameter(torch.randn(2)), nn.Embedding(9, 2)
        self.qkv, self.out, self.inner = nn.Linear(D, 3 * D), nn.Linear(D, D), Norm()

    def forward(self, x, mask=None):
        batch, positions, _ = x.shape
        q, k, v = self.qkv(self.inner(x)).view(batch, positions, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        at = torch.arange(positions)
        bias = self.table((at[:, None] - at).clamp(-4, 4) + 4).permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            bias = bias + mask[:, None, None] * -3.0
        if self.kind == "fused":
            bias = bias + self.sinks.view(1, 2, 1, 1) * at
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = torch.cat(
                [q @ k.transpose(-1, -2) + bias, self.sinks.view(1, 2, 1, 1).expand(batch, 2, positions, 1)], -1
            )
            mixed = scores.softmax(-1)[..., :-1] @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, positions, D)), None


def first(inner):
    """The first of what a module returns."""
    return Calls(lambda m, *inputs: m.inner(*inputs)[0], inner=inner)


class Tokens(nn.Module):
    """A class token and positions, added to a layer's output; both with a dimension for the batch."""

    def __init__(self):
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, 9, D))
        self.project = nn.Linear(D, D)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.project(x)], 1)
        return x + self.positions[:, : x.shape[1]]


class ReadsAChild(nn.Module):
    """The weight of a layer that is called as well, and one that never is."""

    def __init__(self):
        super().__init__()
        self.called, self.read = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.called(x) + x @ self.read.weight.T * self.called.weight.diagonal() + self.read.bias


class Twice(nn.Module):
    """Called on two inputs, one with the batch in the second dimension; its weight is a layer and a number."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(3))

    def forward(self, x, factor=1.0):
        return nn.functional.linear(x, self.weight) * self.weight.diagonal() * factor


class Tied(nn.Module):
    """A scaled embedding whose weight is that of the last layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = ScaledEmbedding(11, D, padding_idx=0), Norm(), nn.Linear(D, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def floats(batch=4):
    return torch.randn(batch, 3, D)


def ids(batch=4):
    return torch.randint(0, 11, (batch, 3))


CASES = {
    "norm": (lambda: nn.Sequential(nn.Linear(D, D), Norm()), floats),
    "router": (Routed, floats),
    "sinks": (lambda: first(Sinks()), floats),
    "fused attention": (lambda: first(Sinks("fused")), floats),
    "tokens": (lambda: nn.Sequential(nn.Linear(D, D), Tokens()), floats),
    "child": (lambda: nn.Sequential(nn.Linear(D, D), ReadsAChild()), floats),
    "twice": (lambda: nn.Sequential(nn.Linear(D, D), Calls(lambda m, x: m.inner(x) + m.inner(x.tanh(), factor=0.5), inner=Twice())), floats),
    "tied": (Tied, ids),
}  # fmt: skip


def same(model, clipper, losses, norms, total):
    model.zero_grad()
    torch.testing.assert_close(clipper.backward(losses()), torch.tensor(norms), rtol=1e-5, atol=0)
    assert distance([p.grad for p in model.parameters()], total) <= 1e-5 * length(total)


def count_forwards(model, monkeypatch):
    """How often each class of module without a rule runs."""
    counts = {}
    for cls in {type(m) for m in model.modules() if type(m).__module__ in (__name__, "layers")}:

        def counted(self, *args, forward=cls.forward, **kwargs):
            counts[type(self)] = counts.get(type(self), 0) + 1
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", counted)
    return counts


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", list(CASES))
def test_exact_and_run_once(name, mode, monkeypatch):
    make, draw = CASES[name]
    model, x = make(), draw()
    counts = count_forwards(model, monkeypatch)
    model(x)
    once = dict(counts)
    with PerExampleClipper(model, 1.0, mode=mode, self_check=True) as clipper:
        for batch in (x, draw(), draw(1), draw(7)):
            assert_exact(model, clipper, lambda b: weigh(model(b["x"])), {"x": batch})
        assert any(owner.runs_by_example for owner in clipper.owners)
        assert not any(owner.is_rerun for owner in clipper.owners)
        counts.clear()
        clipper.backward(weigh(model(x)))
        assert counts == once, "nothing runs a second time"


@pytest.mark.parametrize("mode", ALL_MODES)
def test_calls_with_and_without_a_mask(mode):
    """The check sees a batch whose mask hides nothing, and so a call without one; a later batch has padding."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.attention = nn.Linear(D, D), Sinks()

        def forward(self, x, attention_mask):
            mask = 1.0 - attention_mask.float()
            return self.attention(self.first(x), *([mask] if mask.any() else []))[0]

    model, whole, padded = Masked(), torch.ones(4, 3, dtype=torch.long), torch.ones(4, 3, dtype=torch.long)
    padded[0, 2] = padded[2, 1:] = 0
    with PerExampleClipper(model, 1.0, mode=mode, self_check=True) as clipper:
        for mask in (whole, padded, whole):
            batch = {"x": floats(), "attention_mask": mask}
            assert_exact(model, clipper, lambda b: weigh(model(**b)), batch)
            assert [type(owner.module) for owner in clipper.owners if owner.is_rerun] == []


class Fussy(nn.Module):
    """Runs by vmap until a batch has a number that is larger than 5."""

    def __init__(self):
        super().__init__()
        self.w, self.limit, self.inner = nn.Parameter(torch.randn(D)), 5.0, nn.Linear(D, D)

    def forward(self, x):
        x = self.inner(x) * self.w
        if self.training and self.limit < 5.0:
            return torch.stack([row if row.sum().item() > 0 else 2 * row for row in x])
        return x


@pytest.mark.parametrize("mode", ALL_MODES)
def test_what_vmap_cannot_run_later_is_run_again(mode):
    """The layers that the try has reached count once."""
    model, x = nn.Sequential(nn.Linear(D, D), Fussy()), floats()
    with PerExampleClipper(model, 1.0, mode=mode, self_check=True) as clipper:
        assert_exact(model, clipper, lambda b: weigh(model(b["x"])), {"x": x})
        assert any(owner.runs_by_example for owner in clipper.owners)
    model[1].limit = 1.0
    with PerExampleClipper(model, 1.0, mode=mode, self_check=False) as clipper:
        assert_exact(model, clipper, lambda b: weigh(model(b["x"])), {"x": x})


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.inner = nn.Parameter(torch.randn(D)), nn.Linear(D, D)

    def forward(self, x):
        return nn.functional.dropout(self.inner(x), 0.5, self.training) * self.w


@pytest.mark.parametrize("mode", ALL_MODES)
def test_random_numbers_are_each_examples_own_and_the_same_in_both_passes(mode):
    """The sum is of the gradients whose norms were measured: at a bound below them all its parts have that length."""
    model, x = nn.Sequential(nn.Linear(D, D), Drops()), floats(1).expand(5, -1, -1).clone()
    with PerExampleClipper(model, 1e-3, mode=mode, self_check=True) as clipper:
        output = model(x)
        rows = [output[i] == 0 for i in range(5)]
        assert not any(torch.equal(rows[0], other) for other in rows[1:])
        kept = torch.zeros(5)
        kept[2] = 1.0
        norms = clipper.backward(weigh(output), weights=kept)
        assert length([p.grad for p in model.parameters()]) == pytest.approx(1e-3, rel=1e-4)
        assert norms.unique().numel() == 5


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.saves = nn.Linear(D, D), nn.Sequential(Norm(), Routed(), Drops()), False

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.block, x, use_reentrant=False) if self.saves else self.block(x)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_below_activation_checkpointing(mode):
    model, x = Checkpointed().eval(), floats()
    norms, total = clipped_sum(per_example_gradients(model, lambda b: weigh(model(b["x"])), {"x": x}), 4.4)
    assert min(norms) < 4.4 < max(norms)
    model.saves = True
    with PerExampleClipper(model, 4.4, mode=mode, self_check=True) as clipper:
        for _ in range(2):
            same(model, clipper, lambda: weigh(model(x)), norms, total)
        assert any(owner.runs_by_example for owner in clipper.owners)
        assert not any(owner.is_rerun for owner in clipper.owners)


@pytest.mark.parametrize("limits", [(1.0, 1.0), (5.0, 1.0)], ids=["at once", "later"])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_what_vmap_cannot_run_below_activation_checkpointing(mode, limits):
    """What is run again in the backward pass must save as many tensors as were saved before, by a try that fails,
    too."""
    model, x = Checkpointed(), floats()
    model.block = nn.Sequential(Norm(), Fussy(), nn.Linear(D, 3))
    plain, model.saves = copy.deepcopy(model), True
    with PerExampleClipper(model, 1.0, mode=mode, self_check=True) as clipper:
        for limit in limits:
            model.block[1].limit = plain.block[1].limit = limit
            norms, total = clipped_sum(per_example_gradients(plain, lambda b: weigh(plain(b["x"])), {"x": x}), 1.0)
            same(model, clipper, lambda: weigh(model(x)), norms, total)
        assert [owner for owner in clipper.owners if owner.is_rerun]


class ChecksInside(nn.Module):
    """A raw parameter, and parts that are checkpointed."""

    def __init__(self):
        super().__init__()
        self.token, self.part = nn.Parameter(torch.randn(1, 1, D)), nn.Sequential(nn.Linear(D, D), nn.Tanh())

    def forward(self, x):
        x = x + self.token
        return checkpoint(self.part, x, use_reentrant=False) if torch.is_grad_enabled() else self.part(x)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_activation_checkpointing_inside_is_no_matter_of_vmap(mode):
    """It would run a part again when vmap has ended."""
    model, x = nn.Sequential(nn.Linear(D, D), ChecksInside()), floats()
    norms, total = clipped_sum(per_example_gradients(model, lambda b: weigh(model(b["x"])), {"x": x}), 4.0)
    with PerExampleClipper(model, 4.0, mode=mode, self_check=True) as clipper:
        same(model, clipper, lambda: weigh(model(x)), norms, total)


class Scaled(nn.Module):
    """``positions`` (T,) are the same for all examples, ``scale`` (B,) is one number for each."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(D))

    def forward(self, x, positions=None, scale=None):
        x = x * self.w
        if positions is not None and len(positions) == 3:
            x = x + positions[:, None]
        elif positions is not None:
            scale = positions
        if scale is not None:
            x = x * (scale if len(scale) == len(x) else scale.mean().expand(len(x)))[:, None, None]
        return x


@pytest.mark.parametrize("by_name", [True, False])
def test_a_tensor_of_another_role_is_not_given_to_every_example(by_name):
    """Each would see the numbers of all others: such a call is of another kind, and compared anew."""

    def run(m, x, scale=None):
        how = {"scale": scale} if by_name and scale is not None else {}
        return m.head(m.inner(x, *([] if how else [torch.arange(3.0) if scale is None else scale]), **how))

    model, x, scale = Calls(run, inner=Scaled(), head=nn.Linear(D, 3)), floats(), torch.rand(4)
    with PerExampleClipper(model, 1.0, self_check=True) as clipper:
        clipper.backward(weigh(model(x)))
        assert any(owner.runs_by_example for owner in clipper.owners)
        norms_b = clipper.backward(weigh(model(x, scale)))
    for i, norm in enumerate(norms_b):
        grads = torch.autograd.grad(weigh(model(x, scale))[i], list(model.parameters()))
        torch.testing.assert_close(norm, torch.cat([g.flatten() for g in grads]).norm())


class AddsPositions(nn.Module):
    """``table`` (T, D) is the same for all examples."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(D))

    def forward(self, x, table):
        return (x + self.w * table) * self.w


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_table_of_one_row_when_the_check_looked_is_not_divided_among_the_examples(mode):
    model = Calls(lambda m, x: m.head(m.inner(x, m.table[: x.shape[1]])), inner=AddsPositions(), head=nn.Linear(D, 3))
    model.register_buffer("table", torch.randn(9, D))
    loss = lambda batch: weigh(model(batch["x"]))  # noqa: E731
    with PerExampleClipper(model, 1.0, mode=mode, self_check=True) as clipper:
        for length_of_rows in (1, 3, 2):
            batch = {"x": torch.randn(4, length_of_rows, D)}
            same(model, clipper, lambda b=batch: loss(b), *clipped_sum(per_example_gradients(model, loss, batch), 1.0))
        with pytest.raises(UnsupportedModuleError, match="gives another output"):  # whose rows these are, nobody knows
            clipper.backward(weigh(model(torch.randn(4, 4, D))))


class Stores(Norm):
    def forward(self, x):
        self.seen = super().forward(x)
        return self.seen


class Collects(Norm):
    """Appends to a list that the model reads and empties."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(super().forward(x))
        return self.seen[-1]


class ReadsCollected(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(D, D), Collects()

    def forward(self, x):
        x = self.inner(self.first(x))
        total = sum(self.inner.seen)
        self.inner.seen.clear()
        return x + total


class Keeps(Norm):
    """Puts its output under a key of a dictionary that the model reads."""

    def __init__(self, kept, key):
        super().__init__()
        self.kept, self.key = kept, key

    def forward(self, x):
        self.dictionary()[self.key] = super().forward(x)
        return self.dictionary()[self.key]

    def dictionary(self):
        return self.kept[0] if isinstance(self.kept, list) else self.kept


def reads_kept(kept):
    return Calls(lambda m, x: m.inner(m.first(x)) + m.inner.dictionary()["output"].tanh(), first=nn.Linear(D, D), inner=Keeps(kept, "output"))  # fmt: skip


class Caches(Norm):
    """Writes to an object that lives on."""

    class Cache:
        def __init__(self):
            self.tensors = []

    def forward(self, x, cache):
        x = super().forward(x)
        cache.tensors.append(x)
        return x


def with_cache():
    def run(m, x):
        cache = Caches.Cache()
        return m.inner(m.first(x), cache) + cache.tensors[0]

    return Calls(run, first=nn.Linear(D, D), inner=Caches())


@pytest.mark.parametrize(
    "model",
    [lambda: nn.Sequential(nn.Linear(D, D), Stores()), ReadsCollected, lambda: reads_kept({}), lambda: reads_kept([{}]), with_cache],
    ids=["attribute", "list", "dictionary", "dictionary in a list", "object"],
)  # fmt: skip
def test_tensors_of_one_example_do_not_stay(model):
    """Where they would, the module is run again in backward instead."""
    model = model()
    check(model, floats(), "book_keeping")
    for module in model.modules():
        for value in vars(module).values():
            assert (
                not torch._C._functorch.is_functorch_wrapped_tensor(value) if isinstance(value, torch.Tensor) else True
            )


def test_the_forward_of_the_class_comes_back(tmp_path):
    model, x = nn.Sequential(nn.Linear(D, D), Norm()), floats()
    expected = model(x)
    clipper = PerExampleClipper(model, 1.0)
    with clipper:
        clipper.backward(weigh(model(x)))
        assert "forward" in vars(model[1])
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            weigh(other(x)).sum().backward()
            assert all(p.grad is not None for p in other.parameters()), "plain autograd, without a clipper"
            torch.testing.assert_close(other(x), expected)
            check(other, x, "book_keeping")
            assert "forward" not in vars(other[1])
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        with clipper.suspended():
            assert torch.equal(model(x), expected)
    assert "forward" not in vars(model[1])


def test_an_interrupt_inside_leaves_no_vmap_open(monkeypatch):
    model, x = nn.Sequential(nn.Linear(D, D), Norm()), floats()
    with PerExampleClipper(model, 1.0, self_check=True) as clipper:
        clipper.backward(weigh(model(x)))
        with monkeypatch.context() as patch:
            patch.setattr(Norm, "forward", lambda self, x: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model(x)
        assert not torch._C._functorch.maybe_current_level()
        assert_exact(model, clipper, lambda b: weigh(model(b["x"])), {"x": x})
        assert any(owner.runs_by_example for owner in clipper.owners)


class AdaptedWords(nn.Module):
    """Words with the transposed tables of an adapter, and an id of theirs that learns nothing, as peft adapts them."""

    def __init__(self, padding_idx):
        super().__init__()
        self.words, self.padding_idx = nn.Embedding(9, D, padding_idx=padding_idx).requires_grad_(False), padding_idx
        self.a, self.b = nn.Parameter(torch.randn(2, 9)), nn.Parameter(torch.randn(D, 2))

    def forward(self, ids):
        lookup = nn.functional.embedding(ids, self.a.T, self.padding_idx)
        return self.words(ids) + lookup @ self.b.T


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("padding_idx", [0, -2, None])
def test_the_padding_id_of_a_transposed_table_learns_nothing_in_any_row(padding_idx, mode):
    """vmap itself leaves its gradient out for the first row alone."""
    torch.manual_seed(0)
    model = nn.Sequential(AdaptedWords(padding_idx), nn.Flatten(), nn.Linear(5 * D, 3))
    ids = torch.randint(0, 9, (4, 5))
    ids[:, 1:3] = 0
    ids[:, 3] = 7
    check(model, ids, mode=mode)
