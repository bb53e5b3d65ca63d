"""Locality on the batches that a training meets, where the model treats them otherwise than made-up ones."""

import pytest
import torch
from oracle import clipped_sum, distance, length, per_example_gradients, trainable
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from dp_transformers import DPTrainer, DPTrainingArguments, PerExampleClipper, PrivacyEngine
from dp_transformers.clipping import clipper as clippers
from dp_transformers.clipping.errors import SelfCheckError

MODES = ["book_keeping", "ghost", "fast_gradient", "per_sample"]
REFUSED = "in rows that are taken for other examples"
T, FEATURES = 6, 3


class Reader(nn.Module):
    """Reads the rows up to the first zeros: random numbers, which the self-check makes up, have none."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.lstm, self.head = how, nn.LSTM(FEATURES, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, labels=None):
        lengths = (x != 0).all(2).sum(1).clamp(min=1)
        if self.how == "sorts by itself":  # unknown to the library
            order = lengths.argsort(descending=True, stable=True)
            packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
            last = self.lstm(packed)[1][0][-1][order.argsort()]
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            last = self.lstm(packed)[1][0][-1]
        logits = self.head(last)
        return logits


def batch(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), T, FEATURES, generator=generator)
    for row, length_of_row in zip(x, lengths, strict=True):
        row[length_of_row:] = 0
    return x, torch.randint(2, (len(lengths),), generator=generator)


def losses_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_the_model_reorders_are_seen_when_they_come(mode):
    whole, ragged = batch([T] * 5), batch([2, 6, 3, 5, 4])
    with PerExampleClipper(Reader("sorts by itself"), 0.1, mode=mode) as clipper:
        clipper.backward(losses_of(clipper.model, *whole))
        losses = losses_of(clipper.model, *ragged)
        with pytest.raises(SelfCheckError, match=REFUSED):
            clipper.backward(losses)
    with PerExampleClipper(Reader("lets torch sort"), 0.1, mode=mode) as clipper:
        clipper.backward(losses_of(clipper.model, *whole))
        clipper.model.zero_grad()
        norms = clipper.backward(losses_of(clipper.model, *ragged))
        found = [p.grad for p in trainable(clipper.model)]
    model = Reader("lets torch sort")
    gradients = per_example_gradients(
        model, lambda given: losses_of(model, given["x"], given["y"]), {"x": ragged[0], "y": ragged[1]}
    )
    expected_norms, expected = clipped_sum(gradients, 0.1)
    torch.testing.assert_close(norms, torch.tensor(expected_norms), rtol=1e-5, atol=0)
    assert distance(found, expected) <= 1e-5 * length(expected)


LENGTHS = [1, 2, 6, 3, 5, 4] * 4  # so many that a draw of half of them is in order by chance in none of 10,000


def loader(x, y):
    return DataLoader(list(zip(x, y, strict=True)), batch_size=len(x) // 2)


def by_trainer(folder, how):
    x, y = batch(LENGTHS)
    data = [{"x": row.tolist(), "labels": int(label)} for row, label in zip(x, y, strict=True)]
    arguments = DPTrainingArguments(
        output_dir=str(folder), target_epsilon=8.0, target_delta=1e-2, max_steps=2, expected_batch_size=12, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, max_grad_norm=0.1,
    )  # fmt: skip
    DPTrainer(
        model=Reader(how),
        args=arguments,
        train_dataset=data,
        per_example_loss_func=lambda outputs, labels: nn.functional.cross_entropy(outputs, labels, reduction="none"),
    ).train()


def by_engine(folder, how, criterion=True, follows=False):
    x, y = batch(LENGTHS)
    model, engine = Reader(how), PrivacyEngine(ledger_dir=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"criterion": nn.CrossEntropyLoss()} if criterion else {"loss_reduction": "mean" if follows else "none"}
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader(x, y), noise_multiplier=1.0, max_grad_norm=0.1, **options
    )
    model, optimizer, private = made[0], made[1], made[-1]
    loss_function = made[2] if criterion else None
    for rows, labels in private:
        optimizer.zero_grad()
        if criterion:
            loss_function(model(rows), labels).backward()
        elif follows:
            nn.functional.cross_entropy(model(rows), labels).backward()
        else:
            engine.clipper.backward(losses_of(model, rows, labels))
        optimizer.step()


LOOPS = {
    "trainer": by_trainer,
    "engine, criterion": by_engine,
    "engine, losses": lambda folder, how: by_engine(folder, how, criterion=False),
    "engine, loss.backward()": lambda folder, how: by_engine(folder, how, criterion=False, follows=True),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_both_loops_refuse_rows_that_the_model_reorders(tmp_path, loop):
    LOOPS[loop](tmp_path / "right", "lets torch sort")
    with pytest.raises(SelfCheckError, match=REFUSED):
        LOOPS[loop](tmp_path / "wrong", "sorts by itself")


class Switching(nn.Module):
    """Each example sees the one before it where some row of the batch is empty."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed, self.first, self.second = checkpointed, nn.Linear(FEATURES, 4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        if (x == 0).all(1).any():
            hidden = hidden + hidden.roll(1, 0)
        return self.second(self.dropout(hidden.tanh())).squeeze(-1)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_examples_that_rarely_see_each_other(checkpointed):
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(2))
    empty = torch.cat([x[:3], torch.zeros_like(x[:1])])
    with PerExampleClipper(Switching(checkpointed), 1.0) as clipper:
        clipper.backward(clipper.model(x) ** 2)
        losses = clipper.model(empty) ** 2
        with pytest.raises(SelfCheckError, match=REFUSED):
            clipper.backward(losses)
        clipper.backward(clipper.model(x) ** 2)  # the pass that was refused is forgotten


class TurnedRound(nn.Module):
    """All outputs have another sign where something of the batch is so: no norm moves, nor is there a gradient."""

    def __init__(self, turns):
        super().__init__()
        self.turns, self.linear = turns, nn.Linear(FEATURES, 1)

    def forward(self, x):
        return torch.where(self.turns(x), -1.0, 1.0) * self.linear(x).squeeze(-1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "turns",
    [lambda x: x[-1, 0] < 0, lambda x: x[:, 0].roll(1) < 0, lambda x: x.max() > 8],
    ids=["sign of the last", "sign of a neighbour", "a large number"],
)
def test_signs_and_thresholds_over_the_batch_are_seen_in_the_losses(turns, seed):
    torch.manual_seed(seed)
    clipper = PerExampleClipper(TurnedRound(turns), 1.0)
    with pytest.raises(SelfCheckError, match="only another example of its batch changed|clipping is not exact"):
        clipper.model(torch.randn(8, FEATURES))


def test_large_numbers_that_leave_no_number_in_the_losses_of_others_are_seen():
    class Overflows(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.where(x.max() > 30, torch.nan, 1.0)

    with pytest.raises(SelfCheckError, match="only another example of its batch changed"):
        PerExampleClipper(Overflows(FEATURES, 1), 1.0).model(torch.randn(8, FEATURES))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_check_leaves_norms_sums_and_random_numbers_alone(monkeypatch, mode, checkpointed):
    def run():
        torch.manual_seed(3)
        found = []
        with PerExampleClipper(Switching(checkpointed), 0.5, mode=mode) as clipper:
            for number in range(3):
                x = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(number))
                found.append(clipper.backward(clipper.model(x) ** 2))
            return [*found, *(p.grad for p in trainable(clipper.model)), torch.rand(3)]

    checked = run()
    monkeypatch.setattr(PerExampleClipper, "_takes_look", lambda self: False)
    for x, y in zip(checked, run(), strict=True):
        assert torch.equal(x, y)


def test_it_runs_at_first_and_ever_more_rarely(monkeypatch):
    look, seen = clippers.require_own_rows, []
    monkeypatch.setattr(clippers, "require_own_rows", lambda *args: seen.append(clipper._looks.number) or look(*args))
    with PerExampleClipper(nn.Linear(FEATURES, 1), 1.0) as clipper:
        for _ in range(10):
            clipper.backward(clipper.model(torch.randn(3, FEATURES)).squeeze(-1))
    assert seen == [1, 2, 3, 5, 10]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kept", [0.0, 1e-6, 1e-3])
def test_positions_that_cancel_out_are_no_mixing(mode, kept):
    """As in a pair of equal texts, one chosen and one rejected: what is left of its gradient is rounding, which every
    mode allows for in another way."""
    torch.manual_seed(0)
    net, u, x, sign_t = nn.Linear(16, 16), torch.randn(16), torch.randn(4, 8, 16), torch.ones(8)
    x[:, 1::2], sign_t[1::2] = x[:, ::2], kept - 1.0
    with PerExampleClipper(net, 1e-3, mode=mode) as clipper:
        for _ in range(3):
            norms_b = clipper.backward(((net(x) @ u) * sign_t).sum(1))
    assert (norms_b <= 100 * kept + 1e-3).all()


@pytest.mark.parametrize("passes", [0, 3])  # the first pass is looked at, the fourth is not
def test_losses_of_another_shape_are_refused_whether_or_not_they_are_looked_at(passes):
    with PerExampleClipper(nn.Linear(FEATURES, 1), 1.0) as clipper:
        for _ in range(passes):
            clipper.backward(clipper.model(torch.randn(3, FEATURES)).squeeze(-1))
        with pytest.raises(ValueError, match=r"losses must be a tensor of shape \(B,\)"):
            clipper.backward(clipper.model(torch.randn(3, FEATURES)).mean())


class Swaps(nn.Module):
    """Two examples change places inside, where some row of the batch is empty; what comes out is in order."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 4), nn.Linear(4, 1)

    def forward(self, x):
        order = list(range(len(x)))
        if (x == 0).all(1).any():
            order[:2] = [1, 0]
        return self.second(self.first(x[order])[order].tanh()).squeeze(-1)


@pytest.mark.parametrize("seed", range(4))
def test_two_examples_that_change_places(seed):
    torch.manual_seed(seed)
    x = torch.randn(6, FEATURES)
    x[5] = 0
    with PerExampleClipper(Swaps(), 1.0) as clipper:
        seen = []
        for _ in range(3):  # not every time do two examples have different weights
            losses = clipper.model(x) ** 2
            try:
                clipper.backward(losses)
            except SelfCheckError as error:
                seen.append(str(error))
                assert all(p.grad is None for p in trainable(clipper.model))
    assert seen and all(REFUSED in message for message in seen)


class Once(torch.autograd.Function):
    """Multiplies in backward what it keeps, as fused losses do."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = 2 * x.detach()
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.kept.mul_(gradient)


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_pass_that_gives_something_else_when_it_runs_again(mode):
    with PerExampleClipper(nn.Linear(FEATURES, 1), 1.0, mode=mode) as clipper:
        losses = Once.apply(clipper.model(torch.randn(4, FEATURES)).squeeze(-1))
        with pytest.raises(SelfCheckError, match="gives something else when it runs again"):
            clipper.backward(losses)


def test_a_gradient_that_is_not_finite_is_no_mixing():
    with PerExampleClipper(nn.Linear(FEATURES, 1), 1.0) as clipper:
        x = torch.randn(4, FEATURES)
        x[1] = float("nan")
        norms = clipper.backward(clipper.model(x).squeeze(-1))
    assert norms.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("in_training_alone", [True, False])
@pytest.mark.parametrize(
    "change", [lambda x: x * (1 + 8 / len(x)), lambda x: x + torch.randn_like(x) / len(x), lambda x: x + len(x) % 2]
)
def test_losses_that_depend_on_how_many_examples_there_are(change, in_training_alone):
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 2))
    model[0].register_forward_hook(
        lambda module, args, x: change(x) if module.training or not in_training_alone else x
    )
    reason = "another example of its batch was left out" if in_training_alone else "not exact|was left out"
    with pytest.raises(SelfCheckError, match=reason), PerExampleClipper(model.train(), 1.0):
        model(torch.randn(6, 4))


def straight_through(x, scale):
    """``x``, whose gradient is multiplied with ``scale``."""
    return x.detach() + scale * (x - x.detach())


def place(x):
    return torch.arange(len(x))[:, None]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * (place(x) % 2),
        lambda x: torch.where(place(x) % 2 == 0, x, x.detach()),
        lambda x: x * (1.0 - 2 * (place(x) % 2)),
        lambda x: straight_through(x, 1.0 - 2 * (place(x) % 2)),
        lambda x: torch.where(place(x) % 4 == 0, 0.0, x),
        lambda x: straight_through(x, 1 / len(x)),
        lambda x: straight_through(x, (-1.0) ** len(x)),
        lambda x: straight_through(x, x.detach().roll(1, 0).sum(1, keepdim=True).sign()),
        lambda x: straight_through(x, torch.where(x.detach().abs().max() > 20, -1.0, 1.0)),
    ],
    ids=["every second", "detached", "sign", "sign of the gradient", "every fourth", "mean", "sign of their number",
         "sign of a neighbour", "a large number"],
)  # fmt: skip
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_in_training_alone_that_depend_on_a_place_or_on_others(change, checkpointed):
    class Model(nn.Sequential):
        def forward(self, x):
            x = checkpoint(self[0], x, use_reentrant=False) if checkpointed else self[0](x)
            return self[1](change(x) if self.training else x)

    model = Model(nn.Linear(4, 5), nn.Linear(5, 2)).train()
    with pytest.raises(SelfCheckError, match="only another example of its batch"), PerExampleClipper(model, 1.0):
        model(torch.randn(6, 4))


def test_random_numbers_of_all_positions_of_a_batch_are_no_place():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x):
            flat = self.first(x).flatten(0, 1)
            noisy = flat * (1 + 0.1 * torch.randn(len(flat))[:, None]) if self.training else flat
            return self.second(noisy.view(len(x), -1, 5))

    model = Model().train()
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.backward(model(torch.randn(6, 7, 4)).square().mean((1, 2)))


def test_random_numbers_that_do_not_depend_on_how_many_examples_there_are():
    """Dropout, noise, layers that are left out, and numbers of which nothing is known."""

    def change(x):
        noisy = x * torch.empty_like(x).uniform_(0.5, 1.5) + 0.1 * torch.randn_like(x)
        noisy = noisy if torch.rand(()) < 0.2 else nn.functional.dropout(noisy, 0.4)
        return noisy[:, torch.randperm(x.shape[1])] if change.permutes else noisy

    for change.permutes in (False, True):
        model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 2))
        model[0].register_forward_hook(lambda module, args, x: change(x) if module.training else x)
        with PerExampleClipper(model.train(), 1.0) as clipper:
            clipper.backward(model(torch.randn(6, 4)).square().sum(1))
