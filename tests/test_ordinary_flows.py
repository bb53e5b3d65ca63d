"""What ordinary code does and must be let through: each row meets no other."""

import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine

N = 48


def ragged(lengths, seed=0):
    draw = random.Random(seed)
    return [torch.randint(1, 50, (draw.choice(lengths),)) for _ in range(N)]


def train(model, data, loss_of, collate, *, physical=4, **options):
    """Two passes of a loop; the sums of the last draw, and those of its examples one at a time."""
    engine = PrivacyEngine(dp_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), data_loader=DataLoader(data, 12, collate_fn=collate),
        noise_multiplier=0.0, max_grad_norm=1e6, max_physical_batch_size=physical, **options,
    )  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = [torch.zeros_like(p) for p in trained]
    for _ in range(2):
        for batch in loader:
            with engine.suspended():
                found = torch.autograd.grad(loss_of(model, batch) * len(batch[0]), trained, allow_unused=True)
            wanted = [w if g is None else w + g for w, g in zip(wanted, found, strict=True)]
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            steps = engine.steps
            optimizer.step()
            if engine.steps > steps:
                for p, w in zip(trained, wanted, strict=True):
                    torch.testing.assert_close(p.grad * 12, w, rtol=1e-3, atol=1e-4)
                wanted = [torch.zeros_like(p) for p in trained]
    engine.detach()
    return engine.steps


pytestmark = [pytest.mark.filterwarnings("ignore:dp_seed"), pytest.mark.halved]


class Scaled(nn.Module):
    """It has a parameter of its own, and masks padding by its ids."""

    def __init__(self, reads_numbers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 3)
        self.scale, self.reads_numbers = nn.Parameter(torch.ones(8)), reads_numbers

    def forward(self, ids):
        own = (ids != 0).unsqueeze(-1)
        if self.reads_numbers:  # which cannot be run by vmap
            assert min(int(n) for n in own.sum((1, 2))) >= 0
        return self.head((self.embedding(ids) * self.scale * own).sum(1) / own.sum(1).clamp(min=1))


@pytest.mark.parametrize("reads_numbers", [False, True])
@pytest.mark.parametrize("physical", [4, None])
def test_a_model_with_a_parameter_of_its_own_on_ragged_rows(reads_numbers, physical):
    """Checks of padding run it again, inside the call that meets a new kind of it."""
    data = [(x, i % 3) for i, x in enumerate(ragged(range(3, 12)))]

    def collate(rows):
        return pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])

    def loss_of(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    assert train(Scaled(reads_numbers), data, loss_of, collate, physical=physical) > 4


class Decoder(nn.Module):
    """A source, packed, and a target behind it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 50)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, source, target):
        lengths = (source != 0).sum(1)
        packed = pack_padded_sequence(self.embedding(source), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.decoder(self.embedding(target), self.encoder(packed)[1])[0])


@pytest.mark.parametrize("length", [9, 12])
def test_a_target_that_happens_to_be_as_long_as_a_padded_source(length):
    data = [(x, torch.randint(1, 50, (length,))) for x in ragged([3, 5, 8])]

    def collate(rows):
        return pad_sequence([x for x, _ in rows], batch_first=True), torch.stack([y for _, y in rows])

    def loss_of(model, batch):
        source, target = batch
        return F.cross_entropy(model(source, target[:, :-1]).transpose(1, 2), target[:, 1:])

    assert train(Decoder(), data, loss_of, collate) > 4


class Heads(nn.Module):
    """A head for each task, called on the rows of it where there are some."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def forward(self, x, task):
        hidden, out = self.body(x).relu(), x.new_zeros(len(x), 3)
        for i, head in enumerate(self.heads):
            if (own := task == i).any():
                out[own] = head(hidden[own])
        return out


@pytest.mark.parametrize("physical", [4, None])
def test_heads_of_tasks_of_which_a_batch_has_no_row(physical):
    data = [(torch.randn(6), i % 4 if i < 40 else 3, i % 3) for i in range(N)]

    def loss_of(model, batch):
        x, task, y = batch
        return F.cross_entropy(model(x, task), y)

    assert train(Heads(), data, loss_of, None, physical=physical) > 4


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 3)
        self.rnn = kind(8, 8, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, ids):
        lengths = (ids != 0).sum(1)
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        last = self.rnn(packed)[1]
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_of_packed_rows(kind):
    """Which number a row gets follows the lengths of all."""
    data = [(x, i % 3) for i, x in enumerate(ragged(range(3, 12)))]
    engine, model = PrivacyEngine(), Recurrent(kind)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        data_loader=DataLoader(
            data,
            12,
            collate_fn=lambda rows: (
                pad_sequence([x for x, _ in rows], batch_first=True),
                torch.tensor([y for _, y in rows]),
            ),
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=5,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.steps == 4


# ---- collators that draw how long a row is ----


def masked(rows, examples):
    ids = pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([e["labels"] for e in examples])}  # fmt: skip


def dropping(examples):
    """It drops some of the words."""
    return masked([e["ids"][torch.rand(len(e["ids"])) > 0.2] if random.random() < 0.9 else e["ids"][:1] for e in examples], examples)  # fmt: skip


def cropping(examples):
    """It takes a part of each row."""

    def crop(ids):
        first = random.randint(0, len(ids) - 3)
        return ids[first : first + random.randint(3, len(ids))]

    return masked([crop(e["ids"]) for e in examples], examples)


def choosing(examples):
    """It takes one of several texts."""
    return masked([random.choice([e["ids"], e["ids"].flip(0)[:4], e["ids"][:2]]) for e in examples], examples)


def examples(seed):
    torch.manual_seed(seed)
    return [{"ids": x, "labels": i % 3} for i, x in enumerate(ragged(range(4, 14), seed))]


@pytest.mark.parametrize("collate", [dropping, cropping, choosing])
def test_a_trainer_with_rows_of_random_lengths(collate, tmp_path):
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3)  # fmt: skip
    args = DPTrainingArguments(
        tmp_path, max_steps=4, expected_batch_size=12, per_device_train_batch_size=4, noise_multiplier=1.0, target_delta=1e-3,
        report_to=[], save_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    trainer = DPTrainer(model, args, train_dataset=examples(1), data_collator=collate)
    trainer.train()
    assert trainer.state.global_step == 4


# ---- losses of the model and a batch ----


@pytest.mark.parametrize("second", ["inputs", "batch"])
def test_a_loss_of_the_model_is_known_by_its_first_parameter(second, tmp_path):
    made = {}
    exec(re.sub("SECOND", second, "def loss(model, SECOND):\n    return (model(SECOND['x']) - SECOND['goal']).square().sum(1)\n"), made)  # fmt: skip
    args = DPTrainingArguments(
        tmp_path, max_steps=3, expected_batch_size=12, per_device_train_batch_size=4, noise_multiplier=1.0, target_delta=1e-3,
        report_to=[], save_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    data = [{"x": torch.randn(4), "goal": torch.randn(2)} for _ in range(N)]
    trainer = DPTrainer(nn.Linear(4, 2), args, train_dataset=data, per_example_loss_func=made["loss"])
    trainer.train()
    assert trainer.state.global_step == 3
