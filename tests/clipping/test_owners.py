"""Claims discover_owners: whatever a module's calls look like, each parameter ends with somebody who sees all of its
uses, or is refused."""

import re

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from oracle import assert_exact
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.batch_dims import FLAT
from dp_transformers.clipping.errors import UnsupportedModuleError
from dp_transformers.clipping.modes import MODES

ALL_MODES = sorted(MODES)


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


class Packs(nn.Module):
    """Drops the padding before it computes: the rows of one example are found by the mask alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, attention_mask):
        kept = attention_mask.bool()
        return torch.zeros_like(x).masked_scatter(kept[..., None], torch.tanh(self.linear(x[kept])))


class ReadsPast(nn.Module):
    """Reads a weight past the module that owns it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return x + F.linear(torch.tanh(x), self.linear.weight, self.linear.bias)

    def __init__(self):
        super().__init__()
        self.block, self.head = self.Block(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.block(x))


class Collects(nn.Module):
    """Takes hidden states out of an encoder past its output, whose first layer's weight only the encoder sees."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, hidden_states):
            hidden_states.append(F.linear(torch.tanh(x), self.linear.weight, self.linear.bias))
            return self.last(torch.tanh(hidden_states[-1]))

    def __init__(self):
        super().__init__()
        self.encoder, self.head = self.Encoder(), nn.Linear(4, 2)

    def forward(self, x):
        hidden_states = []
        return self.head(self.encoder(x, hidden_states) + hidden_states[0])


class Transposed(nn.Module):
    """Positions first, as recurrent networks like it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x.transpose(0, 1)).transpose(0, 1)


class TransposedOwn(nn.Module):
    """The same, and what it calls has no rule: a gate of the whole sequence, with or without random numbers."""

    class Gate(nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.w, self.dropout = nn.Parameter(torch.randn(4)), nn.Dropout(dropout)

        def forward(self, x_tbd):
            return self.dropout(x_tbd * torch.sigmoid(self.w * x_tbd.mean(0)))

    def __init__(self, dropout=0.0):
        super().__init__()
        self.gate = self.Gate(dropout)

    def forward(self, x):
        return self.gate(x.transpose(0, 1)).transpose(0, 1)


class Repeats(nn.Module):
    """What the embedding returns without a batch is repeated by the model, so no copy may be given to each example
    before."""

    def __init__(self):
        super().__init__()
        self.prompt, self.linear = nn.Embedding(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        prompt = self.prompt(torch.arange(2).unsqueeze(0)).repeat(len(x), 1, 1)
        return self.linear(torch.cat([prompt, x], 1))


class ReadsOneCopy(nn.Module):
    """A bias table is computed once for the whole batch, and flattened: an index into its copies finds the same one
    for all examples."""

    class Block(nn.Module):
        def __init__(self, offset):
            super().__init__()
            self.table, self.offset = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), offset

        def forward(self, x):
            table = self.table(torch.linspace(-1, 1, 8).view(1, 4, 2)).reshape(-1, 3)
            return x.unsqueeze(-1) * table[torch.tensor([0, 3, 3, 1]) + self.offset * (len(table) - 4)]

    def __init__(self, offset=0):
        super().__init__()
        self.block, self.head = self.Block(offset), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.block(x)))


class ReadsLastCopy(ReadsOneCopy):
    def __init__(self):
        super().__init__(offset=1)


class Shares(nn.Module):
    """A parameter of a container, used by two modules."""

    def __init__(self):
        super().__init__()
        self.bank = nn.ParameterDict({"w": nn.Parameter(torch.randn(4))})
        self.one, self.two = Uses(self.bank), Uses(self.bank)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Uses(nn.Module):
    def __init__(self, bank):
        super().__init__()
        self.bank, self.scale = bank, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.bank["w"] + self.scale


class Routes(nn.Module):
    """Tokens of all examples, sorted by expert."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        flat = x.flatten(0, 1)
        chosen = flat[:, :3].argmax(1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            out[chosen == e] = expert(flat[chosen == e])
        return out.view_as(x)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(
    ("build", "name", "answers"),
    [
        (ReadsPast, "block.linear.weight", "block"),
        (Collects, "encoder.linear.weight", ""),
        (Collects, "encoder.last.weight", "encoder.last"),
        (Transposed, "linear.weight", "linear"),
        (TransposedOwn, "gate.w", "gate"),
        (Repeats, "prompt.weight", ""),
        (ReadsOneCopy, "block.table.0.weight", "block"),
        (ReadsOneCopy, "block.table.2.bias", "block"),
        (ReadsLastCopy, "block.table.0.weight", "block"),
        (Shares, "bank.w", ""),
        (Routes, "experts.0.weight", ""),
    ],
)
def test_who_answers_and_that_it_is_exact(build, name, answers, mode):
    model = build()
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        for _ in range(2):
            assert_exact(model, clipper, lambda b: weigh(model, b), {"x": torch.randn(4, 5, 4)})
        assert owner_of(clipper, name) == answers


class AddsPositions(nn.Module):
    """A table of positions is added, and a scale multiplied, for the whole batch at once: each example reads its own
    copy of either."""

    def __init__(self):
        super().__init__()
        self.positions, self.scale, self.head = (
            nn.Embedding(5, 4),
            nn.Sequential(nn.Linear(2, 4), nn.ReLU()),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        x = x + self.positions(torch.arange(x.shape[1]).unsqueeze(0))
        return self.head(torch.tanh(x * self.scale(torch.ones(1, 1, 2))))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_copies_that_are_read_by_their_own_examples_stay_with_their_modules(mode):
    model = AddsPositions()
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
            model.eval(),
            clipper,
            lambda b: weigh(lambda **b: model(**b).logits, b),
            {"pixel_values": torch.randn(3, 3, 32, 32)},
        )


class SortsRarely(nn.Module):
    """Tokens are sorted by expert inside a module of its own."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x, chosen):
            out = torch.zeros_like(x)
            for e, linear in enumerate(self.linears):
                if (chosen == e).any():
                    out[chosen == e] = linear(x[chosen == e])
            return out

    def __init__(self):
        super().__init__()
        self.experts = self.Experts()

    def forward(self, x):
        flat = x.flatten(0, 1)
        return self.experts(flat, (flat[:, 0] > 1).long()).view_as(x)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_tokens_that_were_as_many_as_examples_or_positions_by_chance(mode):
    """With this seed they are in both batches that owners discover_owners on: the check's next batch shows that they
    are not."""
    torch.manual_seed(15)
    model, x = SortsRarely(), torch.randn(4, 5, 4)
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        assert_exact(model, clipper, lambda b: weigh(model, b), {"x": x})
        assert owner_of(clipper, "experts.linears.0.weight") == "experts"


@pytest.mark.parametrize("mode", ALL_MODES)
def test_packed_rows_are_not_taken_for_flattened_ones(mode):
    """The first batch has no padding, so that its packed rows look like flattened ones; the second one's divide by the
    batch, too."""
    model = Packs()
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        for lengths in ([6, 6, 6, 6], [6, 2, 3, 1]):
            mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
            assert_exact(
                model, clipper, lambda b: weigh(model, b), {"x": torch.randn(4, 6, 4), "attention_mask": mask}
            )


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_clipper_that_is_attached_again_settles_again(mode):
    model = ReadsPast()
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
    model, x = TransposedOwn(dropout=0.5), torch.randn(4, 5, 4)
    torch.manual_seed(1)
    expected = torch.autograd.grad(weigh(model, {"x": x}).sum(), model.gate.w)[0]
    with PerExampleClipper(
        model, 1e6, mode=mode
    ) as clipper:  # nothing is clipped, so the sum is the ordinary gradient
        weigh(model, {"x": x})
        torch.manual_seed(1)
        clipper.backward(weigh(model, {"x": x}))
    torch.testing.assert_close(model.gate.w.grad, expected)


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


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.table = nn.Parameter(torch.randn(4)), nn.ParameterList([nn.Parameter(torch.randn(4))])

    def forward(self, x):
        return x + self.start + self.table[0]


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
            self.positions = Positions()
        self.pos.requires_grad_(way not in ("parameter", "module"))

    def forward(self, ids):
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
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return x * self.weight if x.sum() > 1e9 else x * self.weight * 2

    with PerExampleClipper(nn.Sequential(nn.Linear(4, 4), Scale()), 1.0, mode="book_keeping") as clipper:
        clipper.backward(clipper.model(torch.randn(3, 4)).sum(1))
    assert "slower." in caplog.text and "avoided" not in caplog.text
