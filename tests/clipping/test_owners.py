"""Claims discover_owners: whatever a module's calls look like, each parameter ends with somebody who sees all of its
uses, or is refused."""

import re
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from layers import ALL_MODES, Calls
from oracle import assert_exact, length, per_example_gradients
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.batch_dims import FLAT
from dp_transformers.clipping.errors import UnsupportedModuleError


def weigh(model, batch):
    out = model(**batch)
    weight = torch.randn(out[0].numel(), generator=torch.Generator().manual_seed(3))
    return torch.tanh(out).flatten(1) @ weight


def owner_of(clipper, name):
    return next(
        owner.path
        for owner in clipper.owners
        for p in owner.names
        if p is dict(clipper.model.named_parameters())[name]
    )


def packs(m, x, attention_mask):
    """Drops the padding before it computes: the rows of one example are found by the mask alone."""
    kept = attention_mask.bool()
    return torch.zeros_like(x).masked_scatter(kept[..., None], torch.tanh(m.linear(x[kept])))


def past(m, x):
    """Reads a weight past the module that owns it."""
    return x + F.linear(torch.tanh(x), m.linear.weight, m.linear.bias)


def collects(m, x, hidden_states):
    """Takes hidden states out of an encoder past its output, whose first layer's weight only the encoder sees."""
    hidden_states.append(F.linear(torch.tanh(x), m.linear.weight, m.linear.bias))
    return m.last(torch.tanh(hidden_states[-1]))


def reads_collected(m, x):
    hidden_states = []
    return m.head(m.encoder(x, hidden_states) + hidden_states[0])


def transposed(m, x):
    """Positions first, as recurrent networks like it."""
    return m.inner(x.transpose(0, 1)).transpose(0, 1)


def gate(dropout=0.0):
    """Of the whole sequence, without a rule, with or without random numbers."""
    inner = Calls(lambda m, x: m.dropout(x * torch.sigmoid(m.w * x.mean(0))), w=weight(), dropout=nn.Dropout(dropout))
    return Calls(transposed, inner=inner)


def repeats(m, x):
    """What the embedding returns without a batch is repeated by the model, so no copy may be given to each example
    before."""
    return m.linear(torch.cat([m.prompt(torch.arange(2).unsqueeze(0)).repeat(len(x), 1, 1), x], 1))


def reads_a_copy(last):
    """A bias table is computed once for the whole batch, and flattened: an index into its copies finds the same one
    for all examples."""

    def reads(m, x):
        table = m.table(torch.linspace(-1, 1, 8).view(1, 4, 2)).reshape(-1, 3)
        return x.unsqueeze(-1) * table[torch.tensor([0, 3, 3, 1]) + last * (len(table) - 4)]

    block = Calls(reads, table=nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)))
    return Calls(lambda m, x: m.head(torch.tanh(m.block(x))), block=block, head=nn.Linear(3, 2))


def shares():
    """A parameter of a container, used by two modules."""
    bank = nn.ParameterDict({"w": weight()})
    one, two = (Calls(lambda m, x: x * m.bank["w"] + m.scale, bank=bank, scale=weight()) for _ in range(2))
    return Calls(lambda m, x: m.two(torch.tanh(m.one(x))), bank=bank, one=one, two=two)


def routes(m, x):
    """Tokens of all examples, sorted by expert."""
    flat = x.flatten(0, 1)
    chosen = flat[:, :3].argmax(1)
    out = torch.zeros_like(flat)
    for e, expert in enumerate(m.experts):
        out[chosen == e] = expert(flat[chosen == e])
    return out.view_as(x)


def weight():
    return nn.Parameter(torch.randn(4))


def square(out=4):
    return nn.Linear(4, out)


BUILDS = {
    "reads past": lambda: Calls(lambda m, x: m.head(m.block(x)), block=Calls(past, linear=square()), head=square(2)),
    "collects": lambda: Calls(reads_collected, encoder=Calls(collects, linear=square(), last=square()), head=square(2)),
    "transposed": lambda: Calls(transposed, inner=square(3)),
    "transposed, no rule": gate,
    "repeats": lambda: Calls(repeats, prompt=nn.Embedding(2, 4), linear=square(3)),
    "one copy": lambda: reads_a_copy(0),
    "last copy": lambda: reads_a_copy(1),
    "shares": shares,
    "routes": lambda: Calls(routes, experts=nn.ModuleList(square() for _ in range(3))),
}  # fmt: skip


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(
    ("build", "name", "answers"),
    [
        ("reads past", "block.linear.weight", "block"),
        ("collects", "encoder.linear.weight", ""),
        ("collects", "encoder.last.weight", "encoder.last"),
        ("transposed", "inner.weight", "inner"),
        ("transposed, no rule", "inner.w", "inner"),
        ("repeats", "prompt.weight", ""),
        ("one copy", "block.table.0.weight", "block"),
        ("one copy", "block.table.2.bias", "block"),
        ("last copy", "block.table.0.weight", "block"),
        ("shares", "bank.w", ""),
        ("routes", "experts.0.weight", ""),
    ],
)
def test_who_answers_and_that_it_is_exact(build, name, answers, mode):
    model = BUILDS[build]()
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        for _ in range(2):
            assert_exact(model, clipper, lambda b: weigh(model, b), {"x": torch.randn(4, 5, 4)})
        assert owner_of(clipper, name) == answers


def adds_positions(m, x):
    """A table of positions is added, and a scale multiplied, for the whole batch at once: each example reads its own
    copy of either."""
    x = x + m.positions(torch.arange(x.shape[1]).unsqueeze(0))
    return m.head(torch.tanh(x * m.scale(torch.ones(1, 1, 2))))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_copies_that_are_read_by_their_own_examples_stay_with_their_modules(mode):
    scale = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    model = Calls(adds_positions, positions=nn.Embedding(5, 4), scale=scale, head=square(2))
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        assert_exact(model, clipper, lambda b: weigh(model, b), {"x": torch.randn(4, 5, 4)})
        assert owner_of(clipper, "positions.weight") == "positions"


def test_swin_with_positions_computed_once():
    torch.manual_seed(0)
    sizes = dict(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, num_labels=3
    )
    model = hf.Swinv2ForImageClassification(hf.Swinv2Config(**sizes, initializer_range=0.2))
    with PerExampleClipper(model, 1.0) as clipper:
        assert_exact(
            model.eval(), clipper, lambda b: weigh(lambda **b: model(**b).logits, b), {"pixel_values": torch.randn(3, 3, 32, 32)},
        )  # fmt: skip


def sorts(m, x, chosen):
    """Tokens are sorted by expert inside a module of its own."""
    out = torch.zeros_like(x)
    for e, linear in enumerate(m.linears):
        if (chosen == e).any():
            out[chosen == e] = linear(x[chosen == e])
    return out


def sorts_rarely(m, x):
    flat = x.flatten(0, 1)
    return m.experts(flat, (flat[:, 0] > 1).long()).view_as(x)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_tokens_that_were_as_many_as_examples_or_positions_by_chance(mode):
    """With this seed they are in both batches that owners discover_owners on: the check's next batch shows that they
    are not."""
    torch.manual_seed(15)
    model = Calls(sorts_rarely, experts=Calls(sorts, linears=nn.ModuleList(square() for _ in range(2))))
    x = torch.randn(4, 5, 4)
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        assert_exact(model, clipper, lambda b: weigh(model, b), {"x": x})
        assert owner_of(clipper, "experts.linears.0.weight") == "experts"


def chosen_by_layer(m, x):
    """Experts of hidden states, chosen by a layer, of which each has a position's own number as a part."""
    hidden = m.first(x)
    chosen = m.router(hidden + m.positions(torch.arange(x.shape[1])).detach()).argmax(-1)
    return m.last(sorted_into(m.experts, hidden, chosen))


def sorted_into(experts, x, chosen):
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        if (chosen == e).any():
            out[chosen == e] = expert(x[chosen == e])
    return out


def same(size):
    layer = nn.Linear(size, size)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


GATHERED = {
    "of the inputs": (lambda m, x: m.last(sorted_into(m.experts, x, x.argmax(-1))), {}),
    "of hidden states": (chosen_by_layer, {"first": lambda: same(3), "router": lambda: same(3), "positions": lambda: nn.Embedding(3, 3)}),
    "by an id": (lambda m, x, ids: m.last(sorted_into(m.experts, x, ids)), {}),
    "by a mask": (lambda m, x, marked: m.last(sorted_into(m.experts, x, torch.where(marked, 0, 9))), {}),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["book_keeping", "per_sample"])
@pytest.mark.parametrize("name", GATHERED)
def test_positions_that_are_gathered_where_each_row_had_exactly_one_at_first(name, mode):
    """Later a module gets as many positions as there are rows by chance: all of them from one row, none from another."""
    forward, parts = GATHERED[name]
    torch.manual_seed(0)
    model = Calls(forward, experts=nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), last=nn.Linear(3, 2), **{k: make() for k, make in parts.items()})  # fmt: skip

    def batch_of(chosen):
        x = 0.01 * torch.randn(3, 3, 3) + 3 * F.one_hot(chosen, 3)
        return {"x": x} | {"by an id": {"ids": chosen}, "by a mask": {"marked": chosen == 0}}.get(name, {})

    alone = deepcopy(model)
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        for chosen in ([[0, 1, 2], [1, 2, 0], [2, 0, 1]], [[0, 0, 0], [1, 1, 1], [2, 2, 2]]):
            batch = batch_of(torch.tensor(chosen))
            norms = [length(g) for g in per_example_gradients(alone, lambda b: weigh(alone, b), batch)]
            assert clipper.backward(weigh(model, batch)).tolist() == pytest.approx(norms, rel=1e-5)
        assert owner_of(clipper, "experts.0.weight") == ""


def test_positions_that_are_gathered_where_each_row_had_all_of_its_own_at_first():
    """Later as many as there are rows, all of one row: they are no row each."""
    inside = lambda m, x: m.last(sorted_into([m.inner], x, torch.where(x[..., 0] > 0, 0, 9)))  # noqa: E731
    model = Calls(inside, inner=nn.Linear(4, 4), last=nn.Linear(4, 2))
    with PerExampleClipper(model, 1.0) as clipper:
        x = torch.randn(3, 3, 4).abs()
        clipper.backward(weigh(model, {"x": x}))
        x[1:, :, 0] *= -1
        with pytest.raises(UnsupportedModuleError, match=r"'inner' \(Linear\) returns a tensor of shape \(3, 4\)"):
            clipper.backward(weigh(model, {"x": x}))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_packed_rows_are_not_taken_for_flattened_ones(mode):
    """The first batch has no padding, so that its packed rows look like flattened ones; the second one's divide by the
    batch, too."""
    model = Calls(packs, linear=square())
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        for lengths in ([6, 6, 6, 6], [6, 2, 3, 1]):
            mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
            assert_exact(
                model, clipper, lambda b: weigh(model, b), {"x": torch.randn(4, 6, 4), "attention_mask": mask}
            )


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_clipper_that_is_attached_again_settles_again(mode):
    model = BUILDS["reads past"]()
    clipper = PerExampleClipper(model, 1.0, mode=mode)
    for _ in range(2):
        with clipper:
            assert_exact(model, clipper, lambda b: weigh(model, b), {"x": torch.randn(4, 5, 4)})


def test_layouts():
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 2), nn.Unflatten(0, (-1, 5)))
    with PerExampleClipper(model, 1.0) as clipper:
        model(torch.randn(4, 5, 4))
        assert [list(owner.batch_dims.values()) for owner in clipper.owners] == [[[FLAT, FLAT]]]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_random_numbers_are_replayed_where_positions_come_first(mode):
    model, x = gate(dropout=0.5), torch.randn(4, 5, 4)
    torch.manual_seed(1)
    expected = torch.autograd.grad(weigh(model, {"x": x}).sum(), model.inner.w)[0]
    with PerExampleClipper(
        model, 1e6, mode=mode
    ) as clipper:  # nothing is clipped, so the sum is the ordinary gradient
        weigh(model, {"x": x})
        torch.manual_seed(1)
        clipper.backward(weigh(model, {"x": x}))
    torch.testing.assert_close(model.inner.w.grad, expected)


class WithOtherWeights(nn.Module):
    """Calls a layer with weights that are frozen or computed for this call: always, or for long inputs alone."""

    def __init__(self, how, longer_than):
        super().__init__()
        self.first, self.last, self.how, self.longer_than = nn.Linear(3, 3), nn.Linear(3, 2), how, longer_than

    def forward(self, x):
        if x.shape[1] <= self.longer_than:
            return self.last(self.first(x).tanh())
        if self.how == "frozen":
            self.first.requires_grad_(False)
            try:
                return self.last(self.first(x).tanh())
            finally:
                self.first.requires_grad_(True)
        weights = {name: p.detach() if self.how == "detached" else 2 * p for name, p in self.first.named_parameters()}
        return self.last(torch.func.functional_call(self.first, weights, (x,)).tanh())


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("how", ["frozen", "detached", "computed"])
def test_layers_that_are_called_with_other_weights_later(how, mode):
    """The rule gave them a gradient that does not exist: sums were 7 to 50% off."""
    model = WithOtherWeights(how, longer_than=4)
    with PerExampleClipper(model, 0.3, mode=mode) as clipper:
        clipper.backward(model(torch.randn(4, 3, 3)).square().sum((1, 2)))
        with pytest.raises(UnsupportedModuleError, match=r"'first' \(Linear\) is called with 'weight' frozen or repl"):
            model(torch.randn(4, 6, 3))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_layers_that_are_always_called_with_computed_weights_are_those_of_their_parent(mode):
    torch.manual_seed(0)
    model = WithOtherWeights("computed", longer_than=0)
    with PerExampleClipper(model, 0.3, mode=mode) as clipper:
        assert_exact(model, clipper, lambda batch: weigh(model, batch), {"x": torch.randn(4, 6, 3)})


class Transformer(nn.Module):
    """Positions as people write them: looked up without a batch dimension, or with one, or held as a parameter."""

    def __init__(self, way, returns_loss=False):
        super().__init__()
        self.embed, self.pos, self.head = nn.Embedding(9, 4), nn.Embedding(6, 4), nn.Linear(4, 3)
        self.noisy = nn.Dropout(0.5)  # which vmap cannot re-run
        self.way, self.returns_loss = way, returns_loss
        if way == "parameter":
            self.start, self.table = nn.Parameter(torch.randn(4)), nn.ParameterList([nn.Parameter(torch.randn(4))])
        if way == "module":
            table = nn.ParameterList([weight()])
            self.positions = Calls(lambda m, x: x + m.start + m.table[0], start=weight(), table=table)
        self.pos.requires_grad_(way not in ("parameter", "module"))

    def forward(self, ids):
        assert int(ids.sum()) >= 0, "the model itself cannot run by vmap"
        x, t = self.embed(ids), torch.arange(ids.shape[1])
        if self.way in ("parameter", "module"):
            x = x + self.start + self.table[0] if self.way == "parameter" else self.positions(x)
        else:
            x = x + self.pos({"bare": t, "unsqueezed": t.unsqueeze(0), "expanded": t.expand(len(ids), -1)}[self.way])
        y = self.head(self.noisy(torch.tanh(x)))
        return (y.logsumexp(-1).mean(), y) if self.returns_loss else y


CALL_POS = r"Call 'pos' with ids that have a batch dimension, positions too: pos\(ids.unsqueeze\(0\)\)"
USE_START = r"Use 'start' in a small module of its own.*return x \+ self.pos. Use 'table.0' in a small module"


@pytest.mark.parametrize(("way", "told"), [("bare", CALL_POS), ("parameter", USE_START)])
def test_what_is_slow_is_told_with_the_way_out(way, told, caplog):
    with PerExampleClipper(Transformer(way), 1.0, mode="book_keeping") as clipper:
        clipper.backward(clipper.model(torch.randint(0, 9, (4, 6))).tanh().sum((1, 2)))
    assert re.search("slower. In code of your own that can be avoided. " + told, caplog.text)


@pytest.mark.parametrize("way", ["unsqueezed", "expanded", "module"])
@pytest.mark.parametrize("returns_loss", [False, True])
def test_the_ways_out_are_fast(way, returns_loss, caplog):
    with PerExampleClipper(Transformer(way, returns_loss), 1.0, mode="book_keeping") as clipper:
        output = clipper.model(torch.randint(0, 9, (4, 6)))
        clipper.backward((output[1] if returns_loss else output).tanh().sum((1, 2)))
        assert not any(owner.is_rerun for owner in clipper.owners)
    assert "slower" not in caplog.text


def test_positions_of_a_model_that_returns_its_loss_are_refused_with_the_way_out():
    clipper = PerExampleClipper(Transformer("bare", returns_loss=True), 1.0)
    with pytest.raises(ValueError, match=CALL_POS + ".*compute the losses outside"):
        clipper.model(torch.randint(0, 9, (4, 6)))


def test_layers_that_do_nothing_but_use_their_weight_are_told_without(caplog):
    scale = Calls(lambda m, x: x * m.weight if x.sum() > 1e9 else x * m.weight * 2, weight=weight())
    with PerExampleClipper(nn.Sequential(nn.Linear(4, 4), scale), 1.0, mode="book_keeping") as clipper:
        clipper.backward(clipper.model(torch.randn(3, 4)).sum(1))
    assert "slower." in caplog.text and "avoided" not in caplog.text
