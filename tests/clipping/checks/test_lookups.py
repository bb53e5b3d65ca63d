"""Synthetic ids are drawn below the size of the table that they are looked up in, however the argument is called."""

import pytest
import torch
import torch.nn.functional as F
from models import SHORT, build
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.checks.lookups import tables_of_ids
from dp_transformers.clipping.checks.self_check import self_check
from dp_transformers.clipping.engine import ClippingEngine
from dp_transformers.clipping.modes import MODES


class Looks(nn.Module):
    """Looks ids up in tables of 2, 50 and 9 rows, in its own way."""

    def __init__(self, way):
        super().__init__()
        self.types, self.words, self.few = nn.Embedding(2, 4), nn.Embedding(50, 4), nn.Embedding(9, 4)
        self.bags, self.way, self.calls = nn.EmbeddingBag(30, 4), way, 0

    def forward(self, q, types):
        self.calls += not torch.is_grad_enabled()
        return getattr(self, self.way)(q) + self.types(types).mean(1)

    def directly(self, q):
        return self.words(q).mean(1)

    def of_both_tables(self, q):
        return (self.words(q) + self.few(q)).mean(1)

    def shifted(self, q):
        shifted = q.new_zeros(q.shape)
        shifted[:, 1:] = q[:, :-1]
        return self.words(shifted).mean(1)

    def joined(self, q):
        return self.words(torch.cat([q, q.new_zeros(len(q), 1)], 1).int()).mean(1)

    def by_columns(self, q):
        return self.words(q[:, 0]) + self.few(q[:, 1])

    def functionally(self, q):
        return F.embedding(weight=self.words.weight, input=q).mean(1)

    def in_bags(self, q):
        return self.bags(q)

    def masked(self, q):
        return (self.words(q) * self.few((q != 0).long().cumsum(1))).mean(1)

    def chosen(self, q):
        return self.words.weight[:5][q].mean(1)

    def gathered(self, q):
        return torch.gather(self.words.weight[:5], 0, q[:, :4])

    def one_hot(self, q):
        return F.one_hot(q, 9).float().mean(1) @ self.few.weight

    def unseen(self, q):
        return self.words(torch.tensor(q.tolist())).mean(1)

    def failing(self, q):
        if not torch.is_grad_enabled():
            raise RuntimeError("no graph")
        return self.words(q).mean(1)


def engine_of(model):
    engine = ClippingEngine(model, MODES["book_keeping"])
    engine.attach()
    return engine


SIZES = {"directly": 50, "of_both_tables": 9, "shifted": 50, "joined": 50, "by_columns": 9, "functionally": 50,
         "in_bags": 30, "masked": 50, "chosen": 5, "gathered": 5, "one_hot": 9, "unseen": None, "failing": None}  # fmt: skip


@pytest.mark.parametrize("way", SIZES)
def test_ids_are_followed_to_their_table(way):
    model = Looks(way)
    tables = tables_of_ids(engine_of(model), None, (torch.zeros(4, 6).long(), torch.zeros(4, 6).long()), {})
    assert model.calls == 0
    paths = [path for path, _ in torch.utils._pytree.tree_flatten_with_path(((0, 0), {}))[0]]
    assert [tables(path) for path in paths] == [SIZES[way], None if way == "failing" else 2]
    assert model.training and (model.calls == 1 or way == "failing")


class Tags(nn.Module):
    """Scores of tags that are given beside the words, chosen in three ways."""

    def __init__(self):
        super().__init__()
        self.words, self.scores = nn.Embedding(50, 8), nn.Linear(8, 5)
        self.start, self.next = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5, 5))

    def forward(self, words, tags):
        scores = self.scores(self.words(words))
        own = scores.gather(2, tags[..., None]).squeeze(2).sum(1)
        return own + self.start[tags[:, 0]] + self.next[tags[:, :-1], tags[:, 1:]].sum(1)


@pytest.mark.parametrize("name", ["tags", "labels"])
def test_what_chooses_among_scores_is_drawn_below_their_number(name):
    model, words, tags = Tags(), torch.randint(50, (4, 6)), torch.randint(5, (4, 6))
    losses = lambda words, **others: model(words, others[name])  # noqa: E731
    report = self_check(engine_of(model), (), {"words": words, name: tags}, losses)
    assert max(report.norm_error, report.sum_error) < 1e-5


@pytest.mark.parametrize("is_checked_with_its_loss", [True, False])
def test_the_self_check_draws_such_ids(is_checked_with_its_loss):
    model, drawn = Looks("directly"), []
    model.words.register_forward_hook(lambda m, args, output: drawn.append(args[0]))
    given = {"anchor": torch.zeros(4, 6).long(), "kinds": torch.zeros(4, 6).long()}
    losses = lambda anchor, kinds: model(anchor, kinds).tanh().sum(1)  # noqa: E731
    if is_checked_with_its_loss:
        self_check(engine_of(model), (), given, losses)
    else:
        self_check(engine_of(model), tuple(given.values()), {})
    assert torch.cat([x.flatten() for x in drawn]).unique().numel() > 40


def test_named_arguments_of_models_with_a_config_need_no_look(monkeypatch):
    model, seen = build("bert"), []
    monkeypatch.setattr(
        "dp_transformers.clipping.checks.lookups._Lookups.__torch_function__", lambda *args: seen.append(args)
    )
    ids = torch.zeros(4, SHORT).long()
    self_check(engine_of(model), (), {"input_ids": ids, "attention_mask": ids + 1})
    assert not seen


class BiEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = build("bert").bert

    def forward(self, a_ids, p_ids, n_ids):
        return tuple(self.bert(input_ids=ids).pooler_output for ids in (a_ids, p_ids, n_ids))


@pytest.mark.parametrize("loss", ["triplet", "cosine"])
def test_encoders_of_several_texts_are_accepted(loss):
    """With ids of token types alone, 0 and 1, all texts would be nearly alike, and gradients would cancel to their
    rounding."""
    model, ids = BiEncoder(), torch.zeros(4, SHORT).long()

    def losses(**texts):
        a, p, n = model(**texts)
        if loss == "triplet":
            return F.triplet_margin_loss(a, p, n, reduction="none")
        return F.relu(0.5 - F.cosine_similarity(a, p) + F.cosine_similarity(a, n))

    clipper = PerExampleClipper(model, 1.0)
    report = clipper.check((), {"a_ids": ids, "p_ids": ids, "n_ids": ids}, losses)
    assert report.norm_error < 1e-4
