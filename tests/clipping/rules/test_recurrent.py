"""nn.RNN, nn.LSTM, nn.GRU and their cells, option by option; the recursion against torch's own; what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import ALL_MODES, Calls
from oracle import assert_exact, clipped_sum, distance, length
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dp_transformers import PerExampleClipper, check_model
from dp_transformers.clipping.errors import UnsupportedModuleError
from dp_transformers.clipping.layer_rule import rule_for
from dp_transformers.clipping.rules.recurrent import recurrent, recurrent_cell

IN, HIDDEN = 5, 4

LAYERS = {
    "tanh": lambda hidden=HIDDEN, **options: nn.RNN(IN, hidden, **options),
    "relu": lambda hidden=HIDDEN, **options: nn.RNN(IN, hidden, nonlinearity="relu", **options),
    "gru": lambda hidden=HIDDEN, **options: nn.GRU(IN, hidden, **options),
    "lstm": lambda hidden=HIDDEN, **options: nn.LSTM(IN, hidden, **options),
}
CELLS = {
    "tanh": lambda **options: nn.RNNCell(IN, HIDDEN, **options),
    "relu": lambda **options: nn.RNNCell(IN, HIDDEN, nonlinearity="relu", **options),
    "gru": lambda **options: nn.GRUCell(IN, HIDDEN, **options),
    "lstm": lambda **options: nn.LSTMCell(IN, HIDDEN, **options),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


def states_of(hx):
    return hx if isinstance(hx, tuple) else (hx,)


class Tagger(nn.Module):
    """A recurrent layer between trainable ones, from (x, lengths); `reads` says what the loss sees of what it
    returns."""

    def __init__(self, rnn, *, reads=("output", "states"), starts=False, enforce_sorted=False, calls=1):
        super().__init__()
        self.below, self.rnn, self.reads, self.enforce_sorted, self.calls = (nn.Linear(IN, IN), rnn, reads, enforce_sorted, calls)  # fmt: skip
        self.num_states = rnn.num_layers * (1 + rnn.bidirectional)  # of h, and of an LSTM's c
        widths = [rnn.proj_size or rnn.hidden_size, rnn.hidden_size][: 1 + isinstance(rnn, nn.LSTM)]
        self.starts = nn.ModuleList(nn.Linear(IN, self.num_states * width) for width in widths) if starts else None

    def initial(self, x):
        if self.starts is None:
            return None
        given = [
            start(x[:, 0]).unflatten(1, (self.num_states, -1)).transpose(0, 1).contiguous() for start in self.starts
        ]
        return tuple(given) if isinstance(self.rnn, nn.LSTM) else given[0]

    def forward(self, x, lengths=None):
        seen, hx = [], self.initial(x)
        y = torch.tanh(self.below(x))
        if lengths is not None:
            y = pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=self.enforce_sorted)
        elif not self.rnn.batch_first:
            y = y.transpose(0, 1)
        for _ in range(self.calls):
            output, hx = self.rnn(y, hx)
            if "output" in self.reads:
                if isinstance(output, PackedSequence):
                    output = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])[0]
                elif not self.rnn.batch_first:
                    output = output.transpose(0, 1)
                seen.append(output.flatten(1))
        if "states" in self.reads:
            seen += [h.transpose(0, 1).flatten(1) for h in states_of(hx)]
        elif "c_n" in self.reads:
            seen.append(hx[1].transpose(0, 1).flatten(1))
        return torch.cat(seen, 1)


def losses_of(model):
    """f(batch) -> (B,): a random non-linear function of each example's output."""

    def losses(batch):
        out = model(**batch)
        return torch.tanh(out) @ torch.randn(out.shape[1], generator=torch.Generator().manual_seed(3))

    return losses


def check(model, batch, *, self_check=False, mode="book_keeping"):
    """Against one example at a time."""
    with PerExampleClipper(model, 1.0, mode=mode, self_check=self_check) as clipper:
        assert_exact(model, clipper, losses_of(model), batch)
        assert all(owner.rule.terms for owner in clipper.owners), "a parent answers, not the rule"


def x_of(batch=4, steps=6):
    return torch.randn(batch, steps, IN)


DEEP = {"num_layers": 2, "bidirectional": True}
OPTIONS = {  # of the layer, of the tagger, and lengths
    "plain": ({}, {}, None),
    "batch first": ({"batch_first": True}, {}, None),
    "two layers": ({"num_layers": 2}, {}, None),
    "both ways": ({"bidirectional": True}, {}, None),
    "no bias": ({"bias": False}, {}, None),
    "all of it": ({"num_layers": 3, "bidirectional": True, "bias": False, "batch_first": True}, {}, None),
    "output alone": (DEEP, {"reads": ("output",)}, None),
    "states alone": (DEEP, {"reads": ("states",)}, None),
    "output alone, from states": (DEEP, {"reads": ("output",), "starts": True}, None),
    "states alone, from states": (DEEP, {"reads": ("states",), "starts": True}, None),
    "called twice": ({"bidirectional": True}, {"calls": 2}, None),
    "packed": ({}, {"starts": True}, [3, 6, 1, 5]),
    "packed, deep": ({**DEEP, "batch_first": True}, {"starts": True}, [3, 6, 1, 5]),
    "packed and sorted": ({}, {"starts": True, "enforce_sorted": True}, [6, 4, 4, 1]),
    "packed and sorted, deep": ({**DEEP, "batch_first": True}, {"starts": True, "enforce_sorted": True}, [6, 4, 4, 1]),
    "packed and equal": ({"bidirectional": True}, {"enforce_sorted": True}, [6, 6, 6, 6]),
}


@pytest.mark.parametrize("option", OPTIONS)
@every_layer
def test_options(kind, option):
    """States are given, with a gradient, or not; sequences end, and reverse ones start, at their own ends."""
    of_layer, of_tagger, lengths = OPTIONS[option]
    batch = {"x": x_of()} | ({} if lengths is None else {"lengths": torch.tensor(lengths)})
    check(Tagger(LAYERS[kind](**of_layer), **of_tagger), batch, self_check=True)


@pytest.mark.parametrize("options", [{}, DEEP, {"bias": False}], ids=str)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_lstm_with_projection(options):
    rnn = nn.LSTM(IN, HIDDEN, proj_size=3, **options)
    check(Tagger(rnn, starts=True), {"x": x_of()})
    check(Tagger(rnn), {"x": x_of(3, 5), "lengths": torch.tensor([2, 5, 3])})


def test_loss_that_reads_c_n_alone():
    check(Tagger(nn.LSTM(IN, HIDDEN, batch_first=True), reads=("c_n",)), {"x": x_of()})


@every_layer
def test_some_parameters_frozen(kind):
    """Among them the GRU's bias_hh, part of which sits behind the reset gate."""
    for trained in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "bias_hh_l1_reverse", "weight_ih_l1"):
        model = Tagger(LAYERS[kind](**DEEP))
        for name, p in model.named_parameters():
            p.requires_grad_(name == f"rnn.{trained}")
        check(model, {"x": x_of()})


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_frozen_below_and_long(kind, mode):
    """Nothing below asks for a gradient; enough steps for both sides of the choice between factors and instances."""
    model = Tagger(LAYERS[kind](batch_first=True))
    model.below.requires_grad_(False)
    for steps in (1, 2, 30):
        check(model, {"x": x_of(3, steps)}, mode=mode)


@pytest.mark.table
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("packed", [False, True])
@every_layer
def test_dropout_between_layers(kind, packed, mode):
    """The same mask in forward, norms and sum, and the generator goes on as without a clipper."""
    model = Tagger(LAYERS[kind](num_layers=3, bidirectional=True, dropout=0.4, batch_first=True)).train()
    batch = {"x": x_of()} | ({"lengths": torch.tensor([2, 6, 5, 4])} if packed else {})
    losses = losses_of(model)
    torch.manual_seed(7)
    plain = losses(batch)
    after = torch.get_rng_state()
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in plain]
    bound = float(torch.tensor([length(g) for g in gradients]).median())
    norms, total = clipped_sum(gradients, bound)
    with PerExampleClipper(model, bound, mode=mode, self_check=False) as clipper:
        torch.manual_seed(7)
        got = clipper.backward(losses(batch))
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(got.double(), torch.tensor(norms).double(), rtol=1e-5, atol=0)
    assert distance([p.grad for p in parameters], total) <= 1e-5 * length(total)


@pytest.mark.parametrize(
    ("kind", "where", "stands_in", "reason"),
    [  # the first as on devices whose kernel keeps a random state of its own
        ("lstm", "recorded_call.same_state", lambda a, b: True, r"'rnn' \(LSTM\).*dropout cannot be replayed.*Ways out: freeze"),
        ("gru", "rules.recurrent.replayed", lambda state: torch.random.fork_rng(devices=[]), "again from its weights gives another output"),
    ],
)  # fmt: skip
def test_another_mask_than_that_of_the_forward_pass_is_refused(kind, where, stands_in, reason, monkeypatch):
    model = Tagger(LAYERS[kind](num_layers=2, dropout=0.5))
    other = torch.Generator().manual_seed(99).get_state()
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        monkeypatch.setattr(f"dp_transformers.clipping.{where}", stands_in)
        losses = losses_of(model)({"x": x_of()})
        torch.set_rng_state(other)
        with pytest.raises(UnsupportedModuleError, match=reason):
            clipper.backward(losses)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(sorted(LAYERS)), mode=st.sampled_from(ALL_MODES), num_layers=st.integers(1, 3), bidirectional=st.booleans(),
    batch=st.integers(1, 5), steps=st.integers(1, 9), hidden=st.integers(1, 7), starts=st.booleans(), data=st.data(),
)  # fmt: skip
def test_drawn_shapes(kind, mode, num_layers, bidirectional, batch, steps, hidden, starts, data):
    model = Tagger(LAYERS[kind](hidden, num_layers=num_layers, bidirectional=bidirectional), starts=starts)
    inputs = {"x": x_of(batch, steps)}
    if data.draw(st.booleans()):
        inputs["lengths"] = torch.tensor(data.draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch)))
    check(model, inputs, mode=mode)


class Unrolled(nn.Module):
    """A cell called once for every step, its states given or not."""

    def __init__(self, cell, starts):
        super().__init__()
        self.below, self.cell, self.start = nn.Linear(IN, IN), cell, nn.Linear(IN, HIDDEN) if starts else None

    def forward(self, x):
        hx, seen = None, []
        if self.start is not None:
            h = self.start(x[:, 0])
            hx = (h, torch.tanh(h)) if isinstance(self.cell, nn.LSTMCell) else h
        for x_t in torch.tanh(self.below(x)).unbind(1):
            hx = self.cell(x_t, hx)
            seen += states_of(hx)
        return torch.cat(seen, 1)


@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind, starts, options):
    check(Unrolled(CELLS[kind](**options), starts), {"x": x_of(4, 3)}, self_check=True)
    check(Unrolled(CELLS[kind](**options), starts), {"x": x_of(1, 1)})


@pytest.mark.parametrize("kind", LAYERS)
def test_float64(kind):
    model, batch = Tagger(LAYERS[kind](num_layers=2, bidirectional=True), starts=True).double(), {"x": x_of().double()}
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        losses = lambda batch: torch.tanh(model(**batch)).sum(1)  # noqa: E731
        assert_exact(model, clipper, losses, batch, tolerance=1e-6)


@every_layer
def test_autocast(kind):
    """Under bf16 autocast, to what bf16 can say; the bound holds for the gradients that are summed."""
    model, batch = Tagger(LAYERS[kind](num_layers=2), starts=True), {"x": x_of()}

    def losses(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tanh(model(**batch)).float().sum(1)

    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        assert_exact(model, clipper, losses, batch, tolerance=3e-2)


def parametrised():
    rnn = nn.GRU(IN, HIDDEN, batch_first=True)
    parametrizations.weight_norm(rnn, "weight_hh_l0")
    return rnn


REFUSED = {  # calls of ``m.rnn`` that no rule is for
    "several sequences each": (lambda m, x: m.rnn(x.flatten(0, 1))[0].view(*x.shape[:3], -1), lambda: nn.GRU(IN, HIDDEN, batch_first=True)),
    "one sequence alone": (lambda m, x: torch.stack([m.rnn(row)[0] for row in x]), lambda: nn.GRU(IN, HIDDEN)),
    "one step alone": (lambda m, x: torch.stack([m.rnn(row)[0] for row in x]), lambda: nn.LSTMCell(IN, HIDDEN)),
    "computed weights": (lambda m, x: m.rnn(x)[0], parametrised),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        ("several sequences each", (4, 2, 3, IN), "called on 8 sequences in a batch of 4 examples.*Ways out: freeze"),
        ("one sequence alone", (4, 3, IN), "one sequence without a batch dimension.*three dimensions"),
        ("one step alone", (4, IN), r"input has the shape \(5,\) in a batch of 4.*Ways out: freeze"),
        ("computed weights", (4, 3, IN), "weights are computed from others.*Ways out: freeze"),
    ],
)
def test_what_the_rule_leaves_to_the_parent(kind, shape, reason):
    """Refused by itself, with ways out; answered by the parent, exactly, where the self-check has settled that."""
    call, make = REFUSED[kind]
    model, x = Calls(call, rnn=make()), torch.randn(shape)
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        losses = model(x).flatten(1).sum(1)
        with pytest.raises(UnsupportedModuleError, match=rf"'rnn' .*{reason}"):
            clipper.backward(losses)
    report = check_model(model, x)
    assert max(report.norm_error, report.sum_error) <= 1e-5


def test_a_batch_that_is_taken_for_time():
    model, x = nn.Sequential(nn.GRU(IN, HIDDEN)), torch.randn(4, 3, IN)
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        losses = model(x)[0].sum((1, 2))
        way_out = "called on 3 sequences in a batch of 4 examples, .*time steps: .*build it with batch_first=True"
        with pytest.raises(UnsupportedModuleError, match=way_out):
            clipper.backward(losses)


def test_dispatch_is_by_what_runs():
    class Own(nn.LSTM):
        def forward(self, x):
            return super().forward(x)

    class Renamed(nn.GRU):
        pass

    assert rule_for(Renamed(2, 2)).terms is recurrent
    assert rule_for(nn.LSTMCell(2, 2)).terms is recurrent_cell
    assert rule_for(Own(2, 2)).terms is None


def test_tied_layers():
    model = Tagger(nn.GRU(HIDDEN + 1, HIDDEN, num_layers=2))
    model.rnn.weight_hh_l1, model.rnn.bias_ih_l1 = model.rnn.weight_hh_l0, model.rnn.bias_ih_l0
    check(model, {"x": x_of()})


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_bare_layer_with_states_among_its_outputs(kind, batch_first):
    """Three states, so that the check must not take them for its three examples."""
    model = kind(4, 5, num_layers=3, batch_first=batch_first)
    x = torch.randn(6, 7, 4)
    model_input = x if batch_first else x.transpose(0, 1)
    clipper = PerExampleClipper(model, 1.0, batch_first=batch_first)
    output, states = model(model_input)
    last = states[0] if isinstance(states, tuple) else states
    losses = (output if batch_first else output.transpose(0, 1)).flatten(1).sum(1) + last.square().sum((0, 2))
    norms = clipper.backward(losses)
    alone = []
    clipper.detach()
    for i in range(6):
        output, states = model(x[i : i + 1] if batch_first else x[i : i + 1].transpose(0, 1))
        last = states[0] if isinstance(states, tuple) else states
        alone.append(length(torch.autograd.grad(output.sum() + last.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(norms.double(), torch.tensor(alone, dtype=torch.float64), rtol=1e-5, atol=0)
