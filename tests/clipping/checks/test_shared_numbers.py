"""Random numbers that all rows of a physical batch share: refused in both loops where a draw has several batches."""

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from neighbours import LOOPS, Task, assert_bounded, moves, points, texts, train
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
)

from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine
from dp_transformers.clipping.checks.shared_numbers import for_all_rows, watched_draws
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.step.step import PrivateStep

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
ROWS = points(12)


class Scores(nn.Module):
    """Two layers, and between them numbers at random in training."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.change = nn.Linear(6, 6), nn.Linear(6, 3), change

    def forward(self, x):
        hidden = self.first(x)
        return self.second(self.change(self, hidden) if self.training else hidden)


def losses_of(scores, labels):
    return F.cross_entropy(scores, labels, reduction="none")


def python_coins(size):
    return torch.tensor([[float(random.random() < 0.5)] for _ in range(size)])


SHARED = {
    "a layer left out": (lambda m, h: h if torch.rand(()) < 0.5 else h * 2, "the model itself"),
    "a coin of Python": (lambda m, h: h if random.random() < 0.5 else h * 2, "Python's random"),
    "a coin of NumPy": (lambda m, h: h * np.random.choice([1.0, 2.0]), "numpy.random"),
    "one mask": (lambda m, h: h * F.dropout(torch.ones(6), 0.5), "the model itself"),
    "noise on a weight": (lambda m, h: h + h @ torch.randn(6, 6) * 0.1, "the model itself"),
    "one vector, beside dropout": (lambda m, h: F.dropout(h, 0.1) + torch.randn(6), "the model itself"),
}


def beside_own(m, h):
    np.random.rand(len(h))
    return h if np.random.rand() < 0.5 else h * 2


def as_spec_augment(m, h):
    """One number for all rows, and then some for each row, as transformers' audio models mask spans."""
    shared = np.random.rand(1).item()
    spans = [np.random.choice(np.arange(6), 2, replace=False) for _ in h]
    return h * (1 + shared * torch.tensor(np.array(spans)).float().mean(1, keepdim=True))


SHARED |= {
    "a coin that nearly always falls alike": (lambda m, h: h if torch.rand(1) > 1e-6 else h * 2, "the model itself"),
    "a scale": (lambda m, h: h * torch.rand(1), "the model itself"),
    "beside a coin that always falls alike": (
        lambda m, h: (h if torch.rand(1) > 0.0 else h * 2) + torch.randn(1),
        "the model itself",
    ),
    "a coin beside the rows' own": (beside_own, "numpy.random"),
    "a number beside the rows' own spans": (as_spec_augment, "numpy.random"),
    "a coin of Python beside coins": (lambda m, h: h * python_coins(len(h) + 1)[0], "Python's random"),
    "the first row's number": (lambda m, h: h * torch.rand(len(h))[0], "the model itself"),
    "the first row's noise": (lambda m, h: h + torch.randn_like(h)[:1], "the model itself"),
    "a mean of the rows' own": (lambda m, h: h * torch.rand(len(h), 1).mean(), "the model itself"),
}
OWN = {
    "dropout": lambda m, h: F.dropout(h, 0.5),
    "a mask for each row": lambda m, h: h * torch.bernoulli(torch.full((len(h), 1), 0.5)),
    "noise": lambda m, h: h + torch.randn_like(h),
    "flattened": lambda m, h: F.dropout(h.flatten(), 0.5).view_as(h),
    "coins of Python": lambda m, h: h * python_coins(len(h)),
    "one row after the other": lambda m, h: h * torch.stack([torch.rand(1) for _ in h]),
    "spans, one row after the other": lambda m, h: (
        h * torch.tensor([[float(np.random.choice(np.arange(6), 2, replace=False).sum())] for _ in h])
    ),
    "as many for each as there are rows": lambda m, h: torch.einsum(
        "bi,bij->bj", h[:, :4], F.dropout(torch.ones(len(h) * 4, 6), 0.5).view(-1, 4, 6)[..., :6]
    ),
    "noise as wide as there are rows": lambda m, h: (
        h + F.dropout(torch.ones(len(h) * 6, 4), 0.5).view(-1, 6, 4).sum(2)
    ),
    "a coin that always falls alike": lambda m, h: h if torch.rand(1) > 0.0 else h * 2,
    "a seed of its own": lambda m, h: h * np.random.RandomState(0).rand() + 0 * _seeded_anew(),
    "nothing": lambda m, h: h.tanh(),
}


def _seeded_anew():
    state = random.getstate()
    random.seed(3)
    number = random.random()
    random.setstate(state)
    return number


def task(change, **options):
    return Task(lambda: Scores(change), ROWS, loss=losses_of, steps=3, **options)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drawn", SHARED)
def test_numbers_for_all_rows_are_refused_where_a_draw_has_several_batches(drawn, loop):
    change, name = SHARED[drawn]
    with pytest.raises(ValueError, match=rf"all rows of a physical batch share \({name}\).*layerdrop=0.0"):
        train(loop, task(change, physical=4))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drawn", ["one mask", "noise on a weight"])
def test_a_weight_may_be_as_large_as_a_batch(drawn, loop):
    with pytest.raises(ValueError, match="all rows of a physical batch share"):
        train(loop, task(SHARED[drawn][0], physical=6))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drawn", ["a layer left out", "a coin of Python", "one mask"])
def test_a_batch_that_is_the_whole_draw_may_share_them(drawn, loop):
    """With the same number for all of them an example adds its own clipped gradient, and nothing else."""
    assert_bounded(moves(loop, task(SHARED[drawn][0], physical=16), 3))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drawn", OWN)
def test_numbers_of_the_rows_own_are_taken(drawn, loop):
    train(loop, task(OWN[drawn], physical=4))


def antithetic(m, h):
    half = torch.rand(len(h) // 2 + 1, 1)
    return h * torch.cat([half, 1 - half])[: len(h)]


def antithetic_steps(m, h):
    half = torch.randint(0, 1000, (len(h) // 2 + 1, 1))
    return h * torch.cat([half, 999 - half])[: len(h)] / 999


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("physical", [4, 16])
@pytest.mark.parametrize("change", [antithetic, antithetic_steps])
def test_numbers_of_two_rows_are_refused_whatever_the_draw_has(change, physical, loop):
    with pytest.raises(SelfCheckError, match="one is taken for several rows of the batch, and not for all"):
        train(loop, task(change, physical=physical))


@pytest.mark.parametrize(
    ("steps_of", "error"),
    [
        (lambda n: torch.rand(n), None),
        (lambda n: torch.cat([torch.rand(1) for _ in range(n)]), None),
        (lambda n: torch.rand(n)[:1].expand(n), "all rows of a physical batch share"),
    ],
    ids=["of rows", "one row after the other", "the first row's"],
)
def test_numbers_that_a_loss_draws_before_the_model(steps_of, error):
    """f(model, inputs), as a diffusion loss."""

    def loss(model, inputs):
        steps = steps_of(len(inputs["x"])) if model.training else torch.full((len(inputs["x"]),), 0.9)
        return model(inputs["x"] * steps[:, None]).square().sum(1)

    given = Task(
        lambda: nn.Sequential(Scores(lambda m, h: h)),
        [{"x": row["x"]} for row in ROWS],
        loss=loss,
        steps=2,
        physical=4,
    )
    with contextlib.nullcontext() if error is None else pytest.raises(ValueError, match=error):
        train("trainer", given)


MASKS = []  # what a model keeps is put back


@pytest.mark.parametrize("change", [SHARED["a layer left out"][0], None], ids=["a layer left out", "a table"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_for_each_rank_is_not_the_whole_draw(change, loop, monkeypatch):
    """Ranks draw apart, and which rows are theirs depends on all rows of the draw."""
    monkeypatch.setattr(PrivateStep, "_has_ranks", True)
    model = Masked if change is None else lambda: Scores(change)
    with pytest.raises(ValueError, match="all rows of a physical batch share.*here or with other processes"):
        train(loop, Task(model, ROWS, loss=losses_of, steps=3, physical=12))


class Masked(nn.Module):
    """Dropout of a table, as DeBERTa has it for its relative positions, and of rows."""

    def __init__(self, p=0.5, also_rows=False, checkpointed=False):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.of_all, self.of_rows = nn.Dropout(0.5), nn.Dropout(p)
        self.also_rows, self.checkpointed = also_rows, checkpointed

    def hidden(self, x):
        mask, own = self.of_all(torch.ones(30)), self.of_rows(torch.ones(len(x), 30))
        if torch.is_grad_enabled():
            MASKS.append((mask, own[0]))
        return self.first(x) * mask[:6] * own[:, :6]

    def forward(self, x):
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.checkpointed else self.hidden(x)
        return self.second(self.of_all(hidden) if self.also_rows else hidden)


@pytest.mark.parametrize("loop", LOOPS)
def test_dropout_of_a_table_draws_one_mask_for_all_batches_of_a_draw(loop):
    MASKS.clear()
    assert len(train(loop, Task(Masked, ROWS, loss=losses_of, steps=3, physical=4))) == 3
    shared, own = zip(*MASKS[-9:], strict=True)  # of three batches in each draw
    draws = [shared[i : i + 3] for i in (0, 3, 6)]
    assert all(torch.equal(mask, draw[0]) for draw in draws for mask in draw)
    assert not torch.equal(draws[0][0], draws[1][0]) and not torch.equal(draws[1][0], draws[2][0])
    assert len({tuple(mask.tolist()) for mask in own}) == 9 and not {*map(str, own)} & {*map(str, shared)}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("mode", "checkpointed"), [("book_keeping", False), ("ghost", False), ("per_sample", False), ("auto", True)]
)
def test_an_example_moves_no_other_past_such_a_mask(loop, mode, checkpointed):
    without_own = Task(
        lambda: Masked(p=0.0, checkpointed=checkpointed), ROWS, loss=losses_of, steps=3, physical=4, mode=mode
    )
    assert_bounded(moves(loop, without_own, 1))


@pytest.mark.parametrize("loop", LOOPS)
def test_dropout_of_a_table_and_of_rows_in_one_module_is_refused(loop):
    with pytest.raises(ValueError, match=r"all rows of a physical batch share \(of_all\)"):
        train(loop, Task(lambda: Masked(also_rows=True), ROWS, loss=losses_of, steps=3, physical=4))


class Positions(nn.Module):
    """Dropout of a table that is as long as the longest text."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.scores = nn.Embedding(50, 6), nn.Embedding(16, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids, attention_mask):
        places = self.dropout(self.places.weight[: input_ids.shape[1]].detach())
        return self.scores(((self.words(input_ids) + places) * attention_mask[..., None]).sum(1))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_mask_as_long_as_the_longest_row_is_refused_where_batches_differ(loop):
    def collate(rows):
        size = max(len(row["input_ids"]) for row in rows)
        pad = lambda x: F.pad(x, (0, size - len(x)))  # noqa: E731
        batch = {name: torch.stack([pad(row[name]) for row in rows]) for name in ("input_ids", "attention_mask")}
        return batch | {"labels": torch.stack([row["labels"] for row in rows])}

    for lengths in ([5, 5, 5, 5], [4, 4, 7, 7]):
        several = Task(Positions, texts(lengths), loss=losses_of, steps=2, physical=2, collate=collate)
        if len({*lengths}) == 1:
            assert len(train(loop, several)) == 2
            continue
        with pytest.raises(
            ValueError, match=r"'dropout' draws one mask for all rows.*\(7, 6\).*\(4, 6\)|\(4, 6\).*\(7, 6\)"
        ):
            train(loop, several)


class Seats(nn.Module):
    """Puts rows into a buffer of one size, whatever their number is."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(6, 6), nn.Linear(6, 3), nn.Dropout(0.5)

    def forward(self, x):
        hidden = self.first(x)
        seats = torch.cat([hidden, hidden.new_zeros(12 - len(x), 6)])
        return self.second(self.dropout(seats)[: len(x)])


@pytest.mark.parametrize("loop", LOOPS)
def test_dropout_of_rows_in_a_buffer_of_one_size_is_no_table(loop):
    with pytest.raises(ValueError, match=r"all rows of a physical batch share \(dropout\)"):
        train(loop, Task(Seats, ROWS, loss=losses_of, steps=2, physical=4))


def test_dropout_of_bert_is_the_rows_own():
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    rows = texts([5, 9, 7, 9, 4, 6, 8, 9])
    train("trainer", Task(lambda: BertForSequenceClassification(BertConfig(**sizes, num_labels=3)), rows, steps=3))


def test_the_modules_that_draw_are_named():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh())
    with watched_draws() as drawn:
        model(torch.ones(4, 6))
        np.random.rand()
    assert drawn().by_torch == {(4, 6): [model[1]]} and list(drawn().by_others) == ["numpy.random"]


@pytest.mark.parametrize(
    ("change", "passes", "shared"),
    [
        (lambda x: x, 1, 0),
        (lambda x: F.dropout(x, 0.5), 2, 0),
        (lambda x: F.dropout(x, 0.5) + torch.randn(6), 3, 1),
        (lambda x: x[torch.randn(5).argsort()[: len(x)] % len(x)], 3, 1),
        (lambda x: x * random.random(), 4, 1),
    ],
    ids=["no numbers", "of rows", "of rows and of all", "of all", "of Python"],
)
def test_no_more_passes_than_are_needed_to_see_whose_numbers_are_drawn(change, passes, shared):
    seeds = []

    def draw(rows, seed):
        seeds.append(seed)
        random.seed(seed)
        with watched_draws() as drawn:
            change(torch.ones(8, 6)[rows])
            return drawn()

    assert len(for_all_rows(draw, 8)) == shared
    assert len(seeds) == passes


# ---- what losses draw ----


class Coin(nn.CrossEntropyLoss):
    """One temperature for the batch, or one for each row."""

    own = False

    def forward(self, scores, labels):
        return super().forward(scores * (0.5 + torch.rand((len(scores), 1) if self.own else ())), labels)


class CoinOfRows(Coin):
    own = True


def private_loop(criterion, most):
    data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, 20), criterion=criterion,
        noise_multiplier=1.0, max_grad_norm=1.0, max_physical_batch_size=most,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    engine.detach()
    return engine.steps


def private_trainer(made, criterion, folder, most):
    rows = [{"x": torch.randn(6), "labels": torch.tensor(i % 3)} for i in range(40)]
    args = DPTrainingArguments(
        folder, noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=20, per_device_train_batch_size=most,
        max_steps=2, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    model, criterion.reduction = Scores(lambda net, hidden: hidden), "none"
    loss = made(lambda *given: (criterion if model.training else losses_of)(*given))
    trainer = DPTrainer(model, args, train_dataset=rows, per_example_loss_func=loss)
    trainer.train()
    return trainer.privacy_spent().steps


def with_model(criterion):
    def loss(model, inputs):
        return criterion(model(inputs["x"]), inputs["labels"])

    return loss


def with_outputs(criterion):
    return criterion


@pytest.mark.parametrize("made", [with_model, with_outputs])
def test_a_coin_in_the_loss_of_the_trainer(tmp_path, made):
    with pytest.raises(ValueError, match=r"all rows of a physical batch share \(.*\), or its loss does"):
        private_trainer(made, Coin(), tmp_path, 4)
    assert private_trainer(made, CoinOfRows(), tmp_path, 4) == 2
    assert private_trainer(made, Coin(), tmp_path, 40) == 2  # the draw is one batch


def test_a_coin_in_a_criterion():
    with pytest.raises(ValueError, match=r"all rows of a physical batch share \(.*\), or its loss does"):
        private_loop(Coin(), 4)
    assert private_loop(CoinOfRows(), 4) == private_loop(Coin(), 40) == 2
