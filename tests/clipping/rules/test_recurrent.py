"""nn.RNN, nn.LSTM, nn.GRU and their cells, option by option, in every mode; the recursion against torch's own; what is
refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_exact, clipped_sum, distance, length
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dp_transformers import PerExampleClipper, check_model
from dp_transformers.clipping.errors import UnsupportedModuleError
from dp_transformers.clipping.layer_rule import rule_for
from dp_transformers.clipping.modes import MODES
from dp_transformers.clipping.rules.recurrent import recurrent, recurrent_cell

ALL_MODES = sorted(MODES)
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
every_mode = pytest.mark.parametrize("mode", ALL_MODES)
every_layer = pytest.mark.parametrize("kind", LAYERS)


def states_of(hx):
    return hx if isinstance(hx, tuple) else (hx,)


class Tagger(nn.Module):
    """A recurrent layer between trainable ones, from (x, lengths); `reads` says what the loss sees of what it
    returns."""

    def __init__(self, rnn, *, reads=("output", "states"), starts=False, enforce_sorted=False, calls=1):
        super().__init__()
        self.below, self.rnn, self.reads, self.enforce_sorted, self.calls = (
            nn.Linear(IN, IN),
            rnn,
            reads,
            enforce_sorted,
            calls,
        )
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


def check(model, batch, mode, *, self_check=False):
    """Against one example at a time. The self-check does the same for all modes, so one will do."""
    with PerExampleClipper(model, 1.0, mode=mode, self_check=self_check and mode == "book_keeping") as clipper:
        assert_exact(model, clipper, losses_of(model), batch)
        assert all(owner.rule.terms for owner in clipper.owners), "a parent answers, not the rule"


def x_of(batch=4, steps=6):
    return torch.randn(batch, steps, IN)


@every_mode
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"num_layers": 2},
        {"bidirectional": True},
        {"bias": False},
        {"num_layers": 3, "bidirectional": True, "bias": False, "batch_first": True},
        {"num_layers": 2, "dropout": 0.5, "bidirectional": True},
    ],
    ids=str,
)
@every_layer
def test_layers(kind, options, mode):
    model = Tagger(LAYERS[kind](**options)).eval()  # dropout has its own test
    check(model, {"x": x_of()}, mode, self_check=True)


@every_mode
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_lstm_with_projection(options, mode):
    rnn = nn.LSTM(IN, HIDDEN, proj_size=3, **options)
    check(Tagger(rnn, starts=True), {"x": x_of()}, mode)
    check(Tagger(rnn), {"x": x_of(3, 5), "lengths": torch.tensor([2, 5, 3])}, mode)


@every_mode
@pytest.mark.parametrize("reads", [("output",), ("states",)], ids=str)
@pytest.mark.parametrize("starts", [False, True])
@every_layer
def test_states_given_and_read(kind, starts, reads, mode):
    """Initial states with gradient flow; a loss that sees h_n and c_n only, or the outputs only."""
    model = Tagger(LAYERS[kind](num_layers=2, bidirectional=True), starts=starts, reads=reads)
    check(model, {"x": x_of()}, mode)


@every_mode
def test_loss_that_reads_c_n_alone(mode):
    check(Tagger(nn.LSTM(IN, HIDDEN, batch_first=True), reads=("c_n",)), {"x": x_of()}, mode)


@every_mode
@pytest.mark.parametrize("lengths", [[6, 4, 4, 1], [3, 6, 1, 5]], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
@every_layer
def test_packed_sequences(kind, options, lengths, mode):
    """States end (and reverse ones start) at each sequence's own end; initial states are permuted as the sequences
    are."""
    batch = {"x": x_of(), "lengths": torch.tensor(lengths)}
    check(Tagger(LAYERS[kind](**options), starts=True), batch, mode, self_check=lengths == [3, 6, 1, 5])
    if lengths == sorted(lengths, reverse=True):
        check(Tagger(LAYERS[kind](**options), starts=True, enforce_sorted=True), batch, mode)


@every_mode
@every_layer
def test_packed_sequences_of_equal_lengths(kind, mode):
    model = Tagger(LAYERS[kind](bidirectional=True), enforce_sorted=True)
    check(model, {"x": x_of(), "lengths": torch.full((4,), 6)}, mode)


@every_mode
@every_layer
def test_called_twice(kind, mode):
    check(Tagger(LAYERS[kind](bidirectional=True), calls=2), {"x": x_of()}, mode)


@pytest.mark.parametrize(
    "trained", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "bias_hh_l1_reverse", "weight_ih_l1"]
)
@every_layer
def test_some_parameters_frozen(kind, trained):
    """Among them the GRU's bias_hh, part of which sits behind the reset gate."""
    model = Tagger(LAYERS[kind](num_layers=2, bidirectional=True))
    for name, p in model.named_parameters():
        p.requires_grad_(name == f"rnn.{trained}")
    for mode in ALL_MODES:
        check(model, {"x": x_of()}, mode)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@every_mode
def test_frozen_below_and_long(kind, mode):
    """Nothing below asks for a gradient; enough steps for both sides of the choice between factors and instances."""
    model = Tagger(LAYERS[kind](batch_first=True))
    model.below.requires_grad_(False)
    for steps in (1, 2, 30):
        check(model, {"x": x_of(3, steps)}, mode)


@every_mode
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


def test_dropout_that_cannot_be_replayed_is_refused(monkeypatch):
    """As on devices whose kernel keeps a random state of its own."""
    model = Tagger(nn.LSTM(IN, HIDDEN, num_layers=2, dropout=0.5))
    monkeypatch.setattr("dp_transformers.clipping.recorded_call.same_state", lambda a, b: True)
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        losses = losses_of(model)({"x": x_of()})
        with pytest.raises(
            UnsupportedModuleError, match=r"'rnn' \(LSTM\).*dropout cannot be replayed.*Ways out: freeze"
        ):
            clipper.backward(losses)


def test_another_mask_is_noticed(monkeypatch):
    model = Tagger(nn.GRU(IN, HIDDEN, num_layers=2, dropout=0.5))
    other = torch.Generator().manual_seed(99).get_state()
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        losses = losses_of(model)({"x": x_of()})
        monkeypatch.setattr(
            "dp_transformers.clipping.rules.recurrent.replayed", lambda state: torch.random.fork_rng(devices=[])
        )
        torch.set_rng_state(other)
        with pytest.raises(UnsupportedModuleError, match="computing it again from its weights gives another output"):
            clipper.backward(losses)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(sorted(LAYERS)),
    mode=st.sampled_from(ALL_MODES),
    num_layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    batch=st.integers(1, 5),
    steps=st.integers(1, 9),
    hidden=st.integers(1, 7),
    starts=st.booleans(),
    data=st.data(),
)
def test_drawn_shapes(kind, mode, num_layers, bidirectional, batch, steps, hidden, starts, data):
    model = Tagger(LAYERS[kind](hidden, num_layers=num_layers, bidirectional=bidirectional), starts=starts)
    inputs = {"x": x_of(batch, steps)}
    if data.draw(st.booleans()):
        inputs["lengths"] = torch.tensor(data.draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch)))
    check(model, inputs, mode)


@every_mode
@every_layer
def test_empty_batch(kind, mode):
    model = Tagger(LAYERS[kind](num_layers=2, bidirectional=True), starts=True)
    with PerExampleClipper(model, 1.0, mode=mode, self_check=False) as clipper:
        norms = clipper.backward(losses_of(model)({"x": x_of(0)}))
    assert norms.shape == (0,)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@every_mode
@every_layer
def test_an_example_that_is_not_finite_contributes_nothing(kind, mode):
    model, x = Tagger(LAYERS[kind](num_layers=2)), x_of()
    with PerExampleClipper(model, 0.1, mode=mode, self_check=False) as clipper:
        others = torch.tensor([0, 1, 3])
        expected = clipper.backward(losses_of(model)({"x": x[others]}))
        total = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        x[2, 3] = float("nan")
        got = clipper.backward(losses_of(model)({"x": x}))
    torch.testing.assert_close(got[others], expected)
    assert not torch.isfinite(got[2])
    assert distance([p.grad for p in model.parameters()], total) <= 1e-5 * length(total)


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


@every_mode
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind, starts, options, mode):
    check(Unrolled(CELLS[kind](**options), starts), {"x": x_of(4, 3)}, mode, self_check=True)
    check(Unrolled(CELLS[kind](**options), starts), {"x": x_of(1, 1)}, mode)


@pytest.mark.parametrize("kind", LAYERS)
def test_float64(kind):
    model, batch = Tagger(LAYERS[kind](num_layers=2, bidirectional=True), starts=True).double(), {"x": x_of().double()}
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        losses = lambda batch: torch.tanh(model(**batch)).sum(1)  # noqa: E731
        assert_exact(model, clipper, losses, batch, tolerance=1e-6)


@every_mode
@every_layer
def test_autocast(kind, mode):
    """Under bf16 autocast, to what bf16 can say; the bound holds for the gradients that are summed."""
    model, batch = Tagger(LAYERS[kind](num_layers=2), starts=True), {"x": x_of()}

    def losses(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tanh(model(**batch)).float().sum(1)

    with PerExampleClipper(model, 1.0, mode=mode, self_check=False) as clipper:
        assert_exact(model, clipper, losses, batch, tolerance=3e-2)


class Refused:
    class Paragraphs(nn.Module):
        """Every example is several sequences."""

        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(IN, HIDDEN, batch_first=True)

        def forward(self, x):
            return self.rnn(x.flatten(0, 1))[0].view(*x.shape[:3], -1)

    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(IN, HIDDEN)

        def forward(self, x):
            return torch.stack([self.rnn(row)[0] for row in x])

    class Parametrised(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(IN, HIDDEN, batch_first=True)
            parametrizations.weight_norm(self.rnn, "weight_hh_l0")

        def forward(self, x):
            return self.rnn(x)[0]

    class SingleCell(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTMCell(IN, HIDDEN)

        def forward(self, x):
            return torch.stack([self.rnn(row)[0] for row in x])


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        ("Paragraphs", (4, 2, 3, IN), "called on 8 sequences in a batch of 4 examples.*Ways out: freeze"),
        ("Single", (4, 3, IN), "one sequence without a batch dimension.*three dimensions"),
        ("SingleCell", (4, IN), r"input has the shape \(5,\) in a batch of 4.*Ways out: freeze"),
        ("Parametrised", (4, 3, IN), "weights are computed from others.*Ways out: freeze"),
    ],
)
def test_what_the_rule_leaves_to_the_parent(kind, shape, reason):
    """Refused by itself, with ways out; answered by the parent, exactly, where the self-check has settled that."""
    model, x = getattr(Refused, kind)(), torch.randn(shape)
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        losses = model(x).flatten(1).sum(1)
        with pytest.raises(UnsupportedModuleError, match=rf"'rnn' .*{reason}"):
            clipper.backward(losses)
    report = check_model(model, {"x": x})
    assert max(report.norm_error, report.sum_error) <= 1e-5


def test_the_check_names_the_layer_that_began_it_where_its_parents_cannot_be_run_either():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(IN, HIDDEN)

        def forward(self, x):
            return self.rnn(x)[0]  # examples are taken for the steps of one sequence

    with pytest.raises(UnsupportedModuleError, match=r"^'0.rnn' \(GRU\) was called on one sequence"):
        check_model(nn.Sequential(Rows()), torch.randn(4, IN))


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
    for mode in ALL_MODES:
        check(model, {"x": x_of()}, mode)


def test_the_modules_own_backward_does_not_run():
    """It would take a tanh_backward for every step; the rule takes one for all."""
    steps, model = 50, Tagger(nn.RNN(IN, HIDDEN))
    with PerExampleClipper(model, 1.0, mode="book_keeping", self_check=False) as clipper:
        losses = losses_of(model)({"x": x_of(steps=steps)})
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            clipper.backward(losses)
    assert 0 < sum(event.count for event in profile.key_averages() if event.key == "aten::tanh_backward") < steps


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
