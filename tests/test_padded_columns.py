"""Columns that are padded by themselves, targets among them: an example's loss is the same alone and in its batch."""

import itertools

import pytest
import torch
from neighbours import LOOPS, Task, assert_bounded, moves, train
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from dp_transformers.clipping.errors import SelfCheckError

pytestmark = [pytest.mark.filterwarnings("ignore:dp_seed"), pytest.mark.halved]
REFUSED = "padd.*-100"  # of the length of a longer one, or among the reasons where every row is padded


def t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    )  # fmt: skip


def bart():
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=50, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8,
            decoder_ffn_dim=8, max_position_embeddings=64, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
        )
    )  # fmt: skip


def translations(targets, sources=(6,)):
    """Rows with as many target tokens, and source tokens."""
    generator = torch.Generator().manual_seed(1)

    def tokens(length):
        return torch.randint(3, 50, (length,), generator=generator)

    return [
        {"input_ids": (ids := tokens(source)), "attention_mask": torch.ones_like(ids), "labels": tokens(target)}
        for target, source in zip(targets, itertools.cycle(sources), strict=False)
    ]


def padded_with(fill):
    def collate(rows):
        return {
            name: torch.stack([row[name] for row in rows])
            if rows[0][name].dim() == 0
            else pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill.get(name, 0))
            for name in rows[0]
        }

    return collate


@pytest.mark.table
@pytest.mark.parametrize("sources", [(6,), (4, 6, 5), (12,)])  # the last is as long as the longest target
@pytest.mark.parametrize("model", [t5, bart])
def test_targets_that_the_loss_ignores_where_they_are_padded(model, sources):
    rows = translations([4] * 15 + [12], sources)
    task = Task(model, rows, padded_with({"labels": -100}), bound=0.7, physical=16, steps=2)
    assert_bounded(moves("trainer", task, 15))
    with pytest.raises(SelfCheckError, match=REFUSED):
        train("trainer", Task(model, rows, padded_with({"labels": 0}), bound=0.7, physical=16))


class Pairs(nn.Module):
    """Classifies a query with a document, each the mean of its tokens; that of the document is one over padding, too,
    unless it ``masks`` it."""

    def __init__(self, masks):
        super().__init__()
        self.masks, self.embed, self.head = masks, nn.Embedding(50, 8), nn.Linear(16, 3)

    def mean(self, ids, masks):
        own = (ids != 0)[..., None].float() if masks else torch.ones(*ids.shape, 1)
        return (self.embed(ids) * own).sum(1) / own.sum(1)

    def forward(self, query, document, attention_mask=None):
        return self.head(torch.cat([self.mean(query, True), self.mean(document, self.masks)], 1))


def pairs(queries, documents):
    generator = torch.Generator().manual_seed(0)
    lengths = zip(itertools.cycle(queries), documents, strict=False)
    return [
        {
            name: torch.randint(1, 50, (length,), generator=generator)
            for name, length in (("query", q), ("document", d))
        }
        | {"labels": torch.tensor(i % 3)}
        for i, (q, d) in enumerate(lengths)
    ]


def with_mask(of):
    """A collator whose attention_mask is that of one column."""

    def collate(rows):
        batch = padded_with({})(rows)
        return {**batch, "attention_mask": (batch[of] != 0).long()}

    return collate


def class_loss(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")


@pytest.mark.table
@pytest.mark.parametrize("collate", [padded_with({}), with_mask("query"), with_mask("document")], ids=["no mask", "query", "document"])  # fmt: skip
@pytest.mark.parametrize("queries", [(6,), (5, 7, 6), (20,), (5, 20, 3)])  # the longest document has 20
@pytest.mark.parametrize("loop", LOOPS)
def test_two_columns_of_their_own_lengths(loop, queries, collate):
    def task(masks):
        rows = pairs(queries, [4] * 11 + [20])
        return Task(lambda: Pairs(masks), rows, collate, class_loss, bound=0.3, physical=12)

    assert_bounded(moves(loop, task(True), 11))
    with pytest.raises(SelfCheckError, match="padded"):
        train(loop, task(False))


class Series(nn.Module):
    """A number for each position."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x, attention_mask=None):
        return self.second(torch.tanh(self.first(x))).squeeze(-1)


def series(lengths):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(n, 3, generator=generator), "labels": torch.full((n,), 2.0)} for n in lengths]


def masked_error(outputs, labels):
    is_own = ~labels.isnan()
    return (F.mse_loss(outputs, labels.nan_to_num(), reduction="none") * is_own).sum(1) / is_own.sum(1)


def masked(rows):
    batch = padded_with({"labels": float("nan")})(rows)
    return {**batch, "attention_mask": (~batch["labels"].isnan()).long()}


@pytest.mark.parametrize("collate", [padded_with({"labels": float("nan")}), masked], ids=["no mask", "mask"])
@pytest.mark.parametrize("loop", LOOPS)
def test_numbers_as_targets_of_positions(loop, collate):
    rows = series([4 + i % 5 for i in range(16)])
    assert_bounded(moves(loop, Task(Series, rows, collate, masked_error, bound=0.3, physical=16, steps=2), 15))


# ---- criteria ----


# ---- how a row was padded ----


def own(count, length):
    return [True] * count + [False] * (length - count)


# ---- the gradient of a loop's own loss ----


# ---- what is honest ----


def test_pairs_of_positions():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x, adjacency, own):
            return self.head((torch.bmm(adjacency, self.embed(x)) * own[..., None]).sum(1) / own.sum(1, keepdim=True))

    def collate(rows):
        sizes = [len(row["x"]) for row in rows]
        n = max(sizes)
        return {
            "x": pad_sequence([row["x"] for row in rows], batch_first=True),
            "adjacency": torch.stack([F.pad(row["adjacency"], (0, n - k, 0, n - k)) for row, k in zip(rows, sizes, strict=True)]),
            "own": pad_sequence([torch.ones(k) for k in sizes], batch_first=True),
            "labels": torch.stack([row["labels"] for row in rows]),
        }  # fmt: skip

    rows = [
        {"x": torch.randn(k, 5), "adjacency": (torch.rand(k, k) < 0.5).float(), "labels": torch.tensor(k % 3)}
        for k in [3, 5, 4, 6] * 3 + [10]
    ]
    for loop in LOOPS:
        assert_bounded(moves(loop, Task(Graph, rows, collate, class_loss, bound=0.3, physical=16), 12))
