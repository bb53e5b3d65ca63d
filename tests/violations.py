"""Every way that is known in which a training script might break its guarantee, one line each: the specification of
what is constructed, what is checked and what stays the user's. What only looks alike, and must train, stands last.

A line says what the user does, in which loop, what must come of it and how likely real scripts do it. An outcome is

* ``bounded``: it trains, and one example moves the sum before noise by the clipping bound at most;
* ``refused``: an error, with a way out, before anything of it is released;
* ``yours``: it is not seen, and docs/privacy.md says so; ``why`` gives the reason.

Sizes are in units of C, measured where nothing stopped it. What needs two processes names the test that runs it.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers as hf
from datasets import Dataset as Table
from datasets import concatenate_datasets, interleave_datasets
from layers import Calls
from models import CHECKPOINTING, DeepSpeedEngine
from neighbours import At, Noted, PlainLoop, Task, moves, padded, plain_loop, points, texts, trainer_for
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler

from dp_transformers import DPTrainer, DPTrainingArguments, PerExampleClipper, PrivacyEngine

BOUNDED, REFUSED, YOURS = "bounded", "refused", "yours"
COMMON, OCCASIONAL, CONTRIVED = "common", "occasional", "contrived"


@dataclass(frozen=True)
class Violation:
    """``make`` returns a `Task`, in which ``row`` is left out, or is a function that does what must be refused, or the
    name of the test that has it. A task may release ``begins`` steps before it does anything wrong."""

    what: str
    loops: tuple[str, ...]
    outcome: str
    likely: str
    make: Callable[[], Any] | str | None
    says: str = ""  # a word of the refusal
    why: str = ""
    size: float | None = None
    row: int | tuple[int, ...] = 0
    begins: int = 0


def line_of(*loops: str) -> Callable[..., Violation]:
    def line(what: str, outcome: str, likely: str, make: Any = None, says: str = "", **more: Any) -> Violation:
        return Violation(what, loops, outcome, likely, make, says, **more)

    return line


both, trainer, loop = line_of("trainer", "engine"), line_of("trainer"), line_of("engine")

# ---- models ----


class Scores(nn.Module):
    """A classifier of vectors; ``change(hidden, model)`` is what it does to them between its layers."""

    def __init__(self, change: Callable = lambda h, m: h):
        super().__init__()
        self.first, self.last, self.change = nn.Linear(6, 8), nn.Linear(8, 3), change

    def forward(self, x):
        return self.last(torch.tanh(self.change(self.first(x), self)))


class Reads(nn.Module):
    """A classifier of texts, by what ``reads(embedded, mask, ids)`` makes of their words."""

    def __init__(self, reads: Callable, words: int = 50):
        super().__init__()
        self.words, self.last, self.reads = nn.Embedding(words, 12), nn.Linear(12, 3), reads

    def forward(self, input_ids, attention_mask=None):
        return self.last(torch.tanh(self.reads(self.words(input_ids), attention_mask, input_ids)))


def net(call: Callable, **parts: Callable) -> Callable[[], nn.Module]:
    """Makes a module of these parts, each made anew, that does ``call(module, ...)`` in its forward pass."""
    return lambda: Calls(call, **{name: make() for name, make in parts.items()})


LSTM = {"words": lambda: nn.Embedding(50, 12), "lstm": lambda: nn.LSTM(12, 16, batch_first=True), "last": lambda: nn.Linear(16, 3)}  # fmt: skip
# it reads its states at the last position, which is padding for most
CharLSTM = net(lambda m, input_ids, attention_mask=None: m.last(m.lstm(m.words(input_ids))[0][:, -1]), **LSTM)


def sorts(m, input_ids, attention_mask):
    """It sorts its rows by length to pack them."""
    lengths = attention_mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    packed = pack_padded_sequence(m.words(input_ids)[order], lengths[order], batch_first=True)
    return m.last(m.lstm(packed)[1][0][0][order.argsort()])


def two_layers(*widths: int, read: Callable = lambda scores: scores) -> Callable[[], nn.Module]:
    """Of these widths, with tanh between them."""
    a, b, c = widths
    return net(
        lambda m, x: read(m.last(torch.tanh(m.first(x)))), first=lambda: nn.Linear(a, b), last=lambda: nn.Linear(b, c)
    )


Positions = two_layers(4, 5, 3)  # three scores for each of three positions
Series = two_layers(3, 4, 1, read=lambda scores: scores.squeeze(-1))  # a number for each position
Regression = two_layers(6, 16, 1)  # one number for each row, of shape (B, 1)
# two towers, as those of texts and images
Dual = net(
    lambda m, x: (F.normalize(m.a(x), dim=-1), F.normalize(m.b(x.flip(1)), dim=-1)),
    a=lambda: nn.Linear(6, 8),
    b=lambda: nn.Linear(6, 8),
)


# convolutions, and the mean over all places, padding too; the same of sounds
Pictures = net(lambda m, x: m.last(m.b(m.a(x).relu()).relu().mean((2, 3))), a=lambda: nn.Conv2d(3, 8, 3, padding=1),
               b=lambda: nn.Conv2d(8, 8, 3, padding=1), last=lambda: nn.Linear(8, 2))  # fmt: skip
Waves = net(lambda m, x: m.last(m.second(m.first(x[:, None]).relu()).relu().mean(2)), first=lambda: nn.Conv1d(1, 8, 9, stride=4),
            second=lambda: nn.Conv1d(8, 8, 3), last=lambda: nn.Linear(8, 2))  # fmt: skip


class WithPictures(nn.Module):
    """Vectors, and pictures for some of them, whose projection has a bias."""

    def __init__(self):
        super().__init__()
        self.first, self.picture, self.last = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        nn.init.normal_(self.picture.bias)

    def forward(self, x, pixel_values=None):
        h = self.first(x)
        return self.last(torch.tanh(h if pixel_values is None else h + self.picture(pixel_values)))


class Given(Scores):
    """It is given a number for the whole batch, and multiplies all rows with it."""

    def forward(self, x, given=None):
        numbers = given if isinstance(given, (float, int, torch.Tensor)) else 1.0
        return super().forward(x * (numbers[:, None] if getattr(numbers, "ndim", 0) == 1 else numbers))


SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}  # fmt: skip


def bert(**changes):
    return hf.BertForSequenceClassification(
        hf.BertConfig(**SIZES, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes)
    )


def llama(**changes):
    config = {**SIZES, "max_position_embeddings": 16, "initializer_range": 0.5, **changes}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**config))


def gpt2():
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def t5():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    )  # fmt: skip


def bigbird():
    return hf.BigBirdForSequenceClassification(
        hf.BigBirdConfig(**SIZES, max_position_embeddings=64, block_size=4, num_random_blocks=1, attention_type="block_sparse",
                      num_labels=3, initializer_range=0.5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )  # fmt: skip


def wav2vec2():
    return hf.Wav2Vec2ForSequenceClassification(
        hf.Wav2Vec2Config(**SIZES, conv_dim=(8, 8), conv_kernel=(4, 3), conv_stride=(3, 2), num_feat_extract_layers=2, feat_extract_norm="group",
                       num_conv_pos_embeddings=4, initializer_range=0.5, num_conv_pos_embedding_groups=2, apply_spec_augment=False, num_labels=3,
                       hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0, classifier_proj_size=8)
    )  # fmt: skip


def ce(outputs, labels):
    """(B,) losses of a class each."""
    return F.cross_entropy(getattr(outputs, "logits", outputs), labels, reduction="none")


# ---- tasks ----


def given(model: Callable = Scores, rows: Any = None, **options: Any) -> Callable[[], Task]:
    """Makes a task of vectors with a class each; ``rows`` makes others."""

    def make() -> Task:
        return Task(
            model, points(8) if rows is None else rows(), **{"loss": ce, "bound": 0.01, "check": False, **options}
        )

    return make


def collated(collate: Callable, **options: Any) -> Callable[[], Task]:
    """``collate`` makes another collator for each training."""

    def make() -> Task:
        return given(**options, collate=collate())()

    return make


def of(collate: Callable) -> Callable:
    return lambda: collate


def loads(kind: Callable, **options: Any) -> Callable[[], Task]:
    return given(rows=lambda: kind(points(8)), **options)


def goes_back(loss: Callable) -> Callable[[PlainLoop, Any], None]:
    """The body of an ordinary loop, with ``loss(outputs, labels)`` of one number."""

    def body(plain: PlainLoop, batch: Any) -> None:
        plain.optimizer.zero_grad()
        loss(plain.model(batch["x"]), batch["labels"]).backward()
        plain.optimizer.step()

    return body


MEAN = {"loss_reduction": "mean"}


def scalar(
    loss: Callable, rows: Callable | None = None, model: Callable = Scores, reduction: str = "mean", **options: Any
):
    return given(model, rows, body=goes_back(loss), options={"loss_reduction": reduction}, **options)


def tagged(ignored: Iterable[int] = (0, 0, 0)) -> Callable[[], list[dict]]:
    """Rows of three positions with a class each, of which so many at the end do not count."""

    def make() -> list[dict]:
        generator, counts = torch.Generator().manual_seed(0), itertools.cycle(ignored)
        rows = []
        for count in itertools.islice(counts, 8):
            labels = torch.randint(3, (3,), generator=generator)
            labels[3 - count :] = -100
            rows.append({"x": torch.randn(3, 4, generator=generator), "labels": labels})
        return rows

    return make


def tags(loss: Callable, ignored: Iterable[int] = (0, 0, 0), reduction: str = "mean", **options: Any):
    return scalar(loss, tagged(ignored), Positions, reduction, **options)


def regression(wide: bool = True) -> list[dict]:
    """One target of which is far off."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"x": torch.randn(6, generator=generator), "labels": torch.randn((), generator=generator)} for _ in range(40)
    ]
    rows[0]["labels"] = torch.tensor(1e3)
    return rows


def numbers(loss: Callable, **options: Any):
    return scalar(loss, regression, Regression, **{"bound": 0.1, "physical": 64, **options})


def by_criterion(criterion: Callable, rows: Callable | None = None, model: Callable = Scores, **options: Any):
    """An ordinary loop with the criterion that make_private returned."""

    def body(plain: PlainLoop, batch: Any) -> None:
        plain.optimizer.zero_grad()
        plain.criterion(plain.model(batch["x"]), batch["labels"]).backward()
        plain.optimizer.step()

    return lambda: given(
        model, rows, body=body, options={"criterion": criterion(), "loss_reduction": "mean"}, **options
    )()


def wide():
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(32, generator=generator), "labels": torch.tensor(i % 3)} for i in range(8)]


Wide = net(lambda m, x: m.layer(x), layer=lambda: nn.Linear(32, 3))


def before(change: Callable, **options: Any):
    """A loop that does ``change(x)`` between the loader and the model."""

    def body(plain: PlainLoop, batch: Any) -> None:
        goes_back(F.cross_entropy)(plain, {**batch, "x": change(batch["x"])})

    return given(Wide, wide, body=body, options=MEAN, **options)


def filled_by_collator() -> Task:
    fill = {"fill_physical_batches": True}
    by_size = lambda rows: stacked(sorted(rows, key=lambda row: -float(row["x"].norm())))  # noqa: E731
    return given(collate=by_size, options=fill, arguments=fill, physical=6)()


def between(change: Callable, **options: Any):
    """A loop that does ``change(plain)`` between backward and step."""

    def body(plain: PlainLoop, batch: Any) -> None:
        plain.optimizer.zero_grad()
        F.cross_entropy(plain.model(batch["x"]), batch["labels"]).backward()
        change(plain)
        plain.optimizer.step()

    return given(body=body, options=MEAN, **options)


def after(change: Callable, model: Callable = Scores, **options: Any):
    """A loop that does ``change(plain)`` after each of its steps, of which several make a draw."""

    def body(plain: PlainLoop, batch: Any) -> None:
        goes_back(F.cross_entropy)(plain, batch)
        change(plain)

    return given(model, body=body, options=MEAN, **options)


def plain(**options: Any) -> PlainLoop:
    return plain_loop(given(options=MEAN, physical=8, **options)())


def passes(private: PlainLoop) -> Iterable[Any]:
    while True:
        yield from private.loader


def lost(private: PlainLoop, batch: Any = None) -> torch.Tensor:
    batch = next(iter(private.loader)) if batch is None else batch
    return F.cross_entropy(private.model(batch["x"]), batch["labels"])


def does(act: Callable[[PlainLoop], Any], **options: Any) -> Callable[[], None]:
    """What a plain loop does is ``act(plain)``."""
    return lambda: act(plain(**options)) and None


def does_alone(act: Callable[[], Any]) -> Callable[[], None]:
    return lambda: act() and None


def trains(change: Callable | None = None, cls: type = DPTrainer, **arguments: Any) -> Callable[[], None]:
    """Makes a trainer, does ``change(trainer)`` and trains."""

    def act() -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = trainer_for(given(rows=lambda: points(12), steps=2)(), folder, cls, **arguments)
            if change is not None:
                change(made)
            made.train()

    return act


def each(model: Callable, change: Callable) -> Callable[[], Task]:
    """A model of which ``change(model, step)`` is made before each step, in either loop, and that is checked."""

    def make() -> Task:
        held: list[nn.Module] = []
        steps = itertools.count()

        def made() -> nn.Module:
            held.append(model())
            return held[-1]

        def changed(*args: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                change(held[-1], next(steps))

        class Begins(hf.TrainerCallback):
            on_step_begin = changed

        def body(plain: PlainLoop, batch: Any) -> None:
            changed()
            plain.optimizer.zero_grad()
            plain.engine.backward(ce(plain.model(batch["x"]), batch["labels"]))
            plain.optimizer.step()

        return given(made, body=body, callbacks=[Begins()], physical=8, steps=4, check=True)()

    return make


# ---- collators ----


def stacked(rows, change=lambda x: x, **more):
    return {"x": change(torch.stack([row["x"] for row in rows])), "labels": torch.stack([row["labels"] for row in rows]), **more}  # fmt: skip


def changes(change: Callable) -> Callable:
    return of(lambda rows: stacked(rows, change))


def mixed_up(x):
    return 0.5 * x + 0.5 * x.roll(1, 0)


def cut_mixed(x):
    return torch.cat([x[:, :3], x.roll(1, 0)[:, 3:]], 1)


def standardised(x):
    return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)


def with_number(make: Callable) -> Callable:
    """A value for the whole batch, beside its rows."""
    return of(lambda rows: stacked(rows, given=make(torch.stack([row["x"] for row in rows]))))


def hard_examples_twice(rows):
    hard = sorted(rows, key=lambda row: -row["x"].norm())[: (len(rows) + 1) // 2]
    return stacked((hard + hard)[: len(rows)])


def two_in_a_row(rows):
    """As many rows as examples, of which every second one holds two."""
    x = torch.stack([row["x"] for row in rows])
    return stacked(rows, lambda _: torch.cat([x[::2] + F.pad(x[1::2], (0, 0, 0, len(x) % 2)), x[1::2] * 0]))


class Batch:
    def __init__(self, rows):
        self.x, self.labels = stacked(rows, mixed_up).values()


def cuts_all(limit):
    """It cuts all texts where one is longer than the limit."""

    def collate(rows):
        cut = limit // 2 if max(len(row["input_ids"]) for row in rows) > limit else limit
        return padded([{k: v[:cut] if v.dim() else v for k, v in row.items()} for row in rows], "right")

    return of(collate)


def resized(rows, to=max):
    size = to(len(row["x"]) for row in rows)
    x = [F.interpolate(row["x"][None, None], size, mode="linear")[0, 0] for row in rows]
    return stacked([{**row, "x": F.adaptive_avg_pool1d(each[None], 6)[0]} for row, each in zip(rows, x, strict=True)])


def lines(lengths=(4, 9, 6, 5, 7, 8, 5, 14)):
    """Vectors of several lengths, which a collator brings to six."""
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(n, generator=generator), "labels": torch.tensor(i % 3)} for i, n in enumerate(lengths)]


def cut_to_the_shortest(rows):
    shortest = min(len(row["x"]) for row in rows)
    return stacked([{**row, "x": F.pad(row["x"][:shortest], (0, 14 - shortest))[:6]} for row in rows])


def some_have_pictures():
    generator = torch.Generator().manual_seed(0)
    return [
        {**row, "pixel_values": torch.randn(4, generator=generator) if i == 0 else None}
        for i, row in enumerate(points(8))
    ]


def if_some_has_one(rows):
    found = [row["pixel_values"] for row in rows]
    if all(each is None for each in found):
        return stacked(rows)
    return stacked(rows, pixel_values=torch.stack([torch.zeros(4) if each is None else each for each in found]))


def if_some_is_large(rows):
    return if_some_has_one([{**row, "pixel_values": torch.ones(4) if row["x"][0] > 1.5 else None} for row in rows])


def floats_unless_the_first_is_none():
    return [{"x": row["x"], "labels": 0 if i == 0 else 1.5} for i, row in enumerate(points(8))]


def begins_late(at):
    calls = itertools.count()
    return lambda rows: stacked(rows, mixed_up if next(calls) >= at else lambda x: x)


# ---- data sets ----


class LeavesOut(list):
    def __getitems__(self, indices):
        return [self[indices[0]]]


class NormalisedTogether(list):
    def __getitems__(self, indices):
        rows = [self[i] for i in indices]
        largest = max(row["x"].abs().max() for row in rows)
        return [{**row, "x": row["x"] / largest} for row in rows]


class PaddedByDraw(list):
    """It pads what it is asked for together, on the left."""

    def __getitems__(self, indices):
        batch = padded([self[i] for i in indices], side="left")
        return [{name: x[i] for name, x in batch.items()} for i in range(len(indices))]


def windows():
    """What a tokenizer does with return_overflowing_tokens: several rows of one long text."""

    def cut(batch):
        found = [
            (ids[i : i + 6], y)
            for ids, y in zip(batch["input_ids"], batch["labels"], strict=True)
            for i in range(0, len(ids), 6)
        ]
        return {"input_ids": [ids for ids, _ in found], "labels": [y for _, y in found]}

    rows = [{"input_ids": r["input_ids"].tolist(), "labels": int(r["labels"])} for r in texts([40, *range(4, 8)])]
    return Table.from_list(rows).with_transform(cut)


def table(n=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Table.from_list([{"x": torch.randn(6, generator=generator).tolist(), "labels": i % 3} for i in range(n)])


def of_lists(rows):
    return {"x": torch.tensor([row["x"] for row in rows]), "labels": torch.tensor([row["labels"] for row in rows])}


def stored(rows: Callable, **options: Any):
    return given(rows=rows, collate=of_lists, **options)


def again(n):
    """The rows of a table, the first of them n times."""
    rows = points(8)
    return [rows[0]] * n + rows[1:]


# ---- rows of several lengths ----

RIGHT = of(lambda rows: padded(rows, "right"))
LEFT = of(lambda rows: padded(rows, "left"))
LONG_AND_SHORT = (40, *range(4, 11))


def reading(
    model: Callable,
    side: Callable = RIGHT,
    lengths: Iterable[int] = LONG_AND_SHORT,
    classes: int | None = 3,
    **options: Any,
):
    loss = {} if classes is None else {"loss": ce}
    return given(
        model,
        lambda: texts(lengths, classes=classes),
        **{"collate": side(), "physical": 16, "check": True, "loss": None, **loss, **options},
    )


def mean_of_all(h, mask, ids):
    return h.mean(1)


def own_mean(h, mask, ids):
    return (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def padded_by(column: str, of_row: Callable, label: Callable = lambda row: row["label"]) -> Callable:
    """A collator that pads ``of_row(row)`` with 0 to the largest size in each dimension."""

    def collate(rows):
        found = [torch.as_tensor(of_row(row)) for row in rows]
        sizes = [max(x.shape[d] for x in found) for d in range(found[0].dim())]
        x = torch.stack(
            [F.pad(x, [n for d in reversed(range(x.dim())) for n in (0, sizes[d] - x.shape[d])]) for x in found]
        )
        return {column: x, "labels": torch.tensor([label(row) for row in rows])}

    return collate


def sized(make: Callable, small: Any, large: Any) -> Callable:
    """The first row is the large one."""
    return lambda: [make(large, 1), *(make(small, int(i % 10 == 0)) for i in range(24))]


RNG = np.random.default_rng(0)


def image(size, label):
    return {"image": Image.fromarray(RNG.integers(60, 256, (*size, 3), dtype=np.uint8)), "label": label}


def tensor_image(size, label):
    return {"image": torch.rand(3, *size, generator=torch.Generator().manual_seed(sum(size))) + 0.4, "label": label}


def sound(size, label):
    return {
        "audio": {"array": (0.5 + RNG.standard_normal(size)).astype(np.float32), "sampling_rate": 16000, "path": None},
        "label": label,
    }


@dataclass
class Text:
    ids: list
    label: int


def ids(size):
    return RNG.integers(2, 50, size).tolist()


class Document:
    def __init__(self, size, label):
        self.ids, self.label = ids(size), label


def hidden(model: Callable, rows: Callable, collate: Callable, **options: Any):
    """Rows whose size shows in no column."""
    return given(model, rows, collate=collate, physical=64, check=True, **options)


class OfIds(Reads):
    """The mean of a convolution over all positions, padding too."""

    def __init__(self):
        super().__init__(lambda h, mask, ids: torch.relu(self.conv(h.transpose(1, 2))).mean(2))
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        with torch.no_grad():
            self.words.weight[2:] += 0.8


def pictures_of(row):
    return torch.tensor(np.asarray(row["image"])).permute(2, 0, 1) / 128.0


def sounds():
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_values": torch.randn(n, generator=generator) + 1, "labels": torch.tensor(i % 3)}
        for i, n in enumerate((400, *range(60, 130, 10)))
    ]


def collate_sounds(rows):
    values = [row["input_values"] for row in rows]
    masks = [torch.ones(len(x), dtype=torch.long) for x in values]
    return {"input_values": pad_sequence(values, batch_first=True), "attention_mask": pad_sequence(masks, batch_first=True),
            "labels": torch.stack([row["labels"] for row in rows])}  # fmt: skip


def already_padded():
    batch = padded(texts(LONG_AND_SHORT, classes=None), "left")
    rows = [{name: column[i] for name, column in batch.items()} for i in range(len(LONG_AND_SHORT))]
    return Task(gpt2, rows, bound=0.01, physical=16)


def padding_all(rows, fill=0, side="right"):
    """A collator that pads each column by itself, the labels with ``fill``."""
    return {
        name: pad_sequence([row[name] for row in rows], True, fill if name == "labels" else 0, padding_side=side)
        for name in rows[0]
    }


def with_targets(fill, model=t5, sources=(6,), side="right", made=False, **options: Any):
    """Texts with targets; the decoder's inputs are ``made`` by the collator, or from the labels."""

    def rows():
        generator = torch.Generator().manual_seed(1)
        return [{"input_ids": (x := torch.randint(3, 50, (m,), generator=generator)), "attention_mask": torch.ones_like(x),
                 "labels": torch.randint(3, 50, (n,), generator=generator)} for n, m in zip((12, *[4] * 7), itertools.cycle(sources), strict=False)]  # fmt: skip

    def collate(rows):
        batch = {**padding_all(rows), "labels": padding_all(rows, fill, side)["labels"]}
        decoder_inputs = t5().prepare_decoder_input_ids_from_labels
        return {**batch, "decoder_input_ids": decoder_inputs(batch["labels"])} if made else batch

    return given(model, rows, collate=collate, physical=16, check=True, **{"bound": 0.1, "loss": None, **options})


def mean_over_targets(outputs, labels):
    return F.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none").mean(1)


def series(lengths=(9, *[4] * 7)):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(n, 3, generator=generator), "labels": torch.full((n,), 2.0)} for n in lengths]


def padded_series(fill):
    return lambda rows: {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=f)
        for name, f in (("x", 0.0), ("labels", fill))
    }


def of_series(loss: Callable, **options: Any):
    return {
        "rows": series, "model": Series, "collate": padded_series(0.0), "physical": 16, "bound": 0.1, "check": True, **options, "loss": loss,
    }  # fmt: skip


class Pairs(nn.Module):
    """A query with its mean over its own words, a document with one over padding too unless it ``masks`` it."""

    def __init__(self, masks=False):
        super().__init__()
        self.words, self.last, self.masks = nn.Embedding(50, 8), nn.Linear(16, 3), masks

    def forward(self, query, document, attention_mask=None):
        own, others = ((x != 0)[..., None].float() for x in (query, document))
        others = others if self.masks else torch.ones_like(others)
        means = [(self.words(x) * m).sum(1) / m.sum(1) for x, m in ((query, own), (document, others))]
        return self.last(torch.cat(means, 1))


def of_pairs(masks=False, queries=(5, 6, 7), mask_of=None):
    """Queries of these lengths, of which the collator may make the attention_mask, and documents, one of them long."""

    def rows():
        generator = torch.Generator().manual_seed(0)
        return [{"query": torch.randint(1, 50, (n,), generator=generator), "document": torch.randint(1, 50, (20 if i == 0 else 4,), generator=generator),
                 "labels": torch.tensor([i % 3])} for i, n in zip(range(8), itertools.cycle(queries), strict=False)]  # fmt: skip

    def collate(rows):
        batch = padding_all(rows)
        masks = {} if mask_of is None else {"attention_mask": (batch[mask_of] != 0).long()}
        return {**batch, "labels": batch["labels"][:, 0], **masks}

    return lambda: given(lambda: Pairs(masks), rows, collate=collate, physical=16, check=True)()


WordScores = net(lambda m, input_ids: m.last(m.words(input_ids).tanh()), words=lambda: nn.Embedding(50, 8), last=lambda: nn.Linear(8, 50))  # fmt: skip


def divided_by(given_by: Callable, use: Callable):
    """Losses that a number for the whole batch divides, which is the length of its longest row."""

    def collate(rows):
        batch = padded(rows, "right")
        return {**batch, "given": given_by(batch["input_ids"])}

    def loss(model, inputs):
        losses_bt = F.cross_entropy(
            model(inputs["input_ids"]).transpose(1, 2), inputs["labels"], reduction="none", ignore_index=-100
        )
        return use(losses_bt, inputs["given"])

    return given(
        WordScores, lambda: texts([24, *[8] * 6], classes=None), collate=collate, loss=loss, physical=8, check=True
    )


def above(limit):
    """Interpolated positions above a length."""
    return lambda h, mask, ids: own_mean(h * (1.0 if ids.shape[1] <= limit else limit / ids.shape[1] - 1), mask, ids)


# ---- losses of a loop ----


def contrast(outputs, labels=None):
    a, b = outputs
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def clip_loss(outputs, labels=None):
    a, b = outputs
    scores, own = a @ b.T / 0.1, torch.arange(len(a))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def supervised_contrast(outputs, labels):
    z = outputs[0]
    near = (z @ z.T / 0.1).masked_fill(torch.eye(len(z)).bool(), -1e9).log_softmax(1)
    same = (labels[:, None] == labels) & ~torch.eye(len(z)).bool()
    return -((near * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def hardest_triplets(outputs, labels):
    d, same = torch.cdist(outputs[0], outputs[0]), labels[:, None] == labels
    return F.relu((d * same).amax(1) - (d + 9 * same).amin(1) + 0.5).mean()


def contrast_of_each(outputs, labels=None):
    a, b = outputs
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)), reduction="none")


class Compares(nn.CrossEntropyLoss):
    """It makes of the losses of the rows others, which depend on all of them."""

    def __init__(self, change: Callable):
        super().__init__()
        self.change = change

    def forward(self, outputs, targets):
        losses = self.change(F.cross_entropy(outputs, targets, reduction="none"))
        return losses if self.reduction == "none" else losses.mean()


def straight_through(losses, scale):
    return losses.detach() + scale * (losses - losses.detach())


def by_class_frequency(outputs, labels):
    return ce(outputs, labels) / torch.bincount(labels, minlength=3)[labels] * len(labels)


def hardest_eight(outputs, labels):
    losses = ce(outputs, labels)
    return losses * (losses >= losses.topk(min(8, len(losses))).values[-1])


class Fused(torch.autograd.Function):
    """A loss that computes its gradient in its forward pass."""

    @staticmethod
    def forward(ctx, scores, labels):
        with torch.enable_grad():
            held = scores.detach().requires_grad_()
            loss = weighted(held, labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, held))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad, None


def tokens(s, y):
    return F.cross_entropy(s.flatten(0, 1), y.flatten())


def weighted(s, y):
    return F.cross_entropy(s[:, 0], y[:, 0], weight=torch.tensor([1.0, 9.0, 1.0]))


def chosen(s, y):
    return s[y[:, 0] == 0].square().mean((1, 2)).mean()


def of_tasks(s, y):
    each = s.square().mean((1, 2))
    return torch.stack([each[(y[:, 0] == k) | (torch.arange(len(y)) == 0)].mean() for k in range(3)]).mean()


def by_count(s, y):
    own = (y != -100).float()
    return (F.cross_entropy(s.transpose(1, 2), y, reduction="none") * own).sum() / own.sum()


def focal(s, y):
    loss = F.cross_entropy(s[:, 0], y[:, 0])
    return (1 - torch.exp(-loss)) ** 2 * loss


class Sized:
    """A loss whose backward pass begins with a number that follows the batch's size."""

    def __init__(self, scores, labels):
        self.losses = ce(scores, labels)

    def backward(self):
        self.losses.backward(torch.full_like(self.losses, 1 / 64))


def centred(model, inputs):
    losses = ce(model(inputs["x"]), inputs["labels"])
    return losses - losses.detach().mean()


def begins_to_compare() -> Task:
    class Counts(hf.TrainerCallback):
        step = 0

        def on_step_begin(self, args, state, control, **kwargs):
            Counts.step = state.global_step

    def loss(outputs, labels):
        a, b = outputs
        return a.square().sum(1) + (b * 0.5).sum(1) + (contrast_of_each(outputs) if Counts.step >= 5 else 0.0)

    return given(Dual, loss=loss, physical=8, steps=9, callbacks=[Counts()], check=True)()


def with_its_loss(m, x, labels=None):
    """It computes its loss itself, as models of transformers do where they are given labels."""
    scores = m.last(torch.tanh(m.first(x)))
    return {"loss": tokens(scores, labels), "logits": scores}


ReturnsLoss = net(with_its_loss, first=lambda: nn.Linear(4, 5), last=lambda: nn.Linear(5, 3))


def long_beside_short():
    """The first row has three targets that count, and all others one."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"x": 1 + 0.1 * torch.randn(3, 4, generator=generator), "labels": torch.tensor([0, -100, -100])}
        for _ in range(24)
    ]
    return [{**rows[0], "labels": torch.tensor([1, 1, 1])}, *rows[1:]]


def by_the_model(plain: PlainLoop, batch: Any) -> None:
    plain.model(**batch)["loss"].backward()
    plain.optimizer.step()


# ---- what stays in a model or a loss ----


class Remembers(Scores):
    """It holds everything that a batch may write; ``writes(model, x)`` does."""

    def __init__(self, writes: Callable):
        super().__init__()
        self.writes, self.count, self.kind, self.switch, self.options, self.listed = (writes, 0, "sparse", False, {}, [0.0])  # fmt: skip
        self.kept, self.array, self.memory = None, np.zeros(3), torch.ones(1, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.scale = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x):
        extra = self.memory.mean(0) + self.listed[0] + float(self.array[0]) + self.options.get("add", 0.0)
        scores = super().forward((x - self.mean + extra) * self.scale * (1 + self.switch + 0.1 * self.count))
        self.writes(self, x.detach())
        return scores


def leaves(writes: Callable, **options: Any):
    return given(lambda: Remembers(writes), steps=3, expected=4, **{"bound": 0.05, **options})


def registers_a_hook(model, x):
    if not hasattr(model, "has_hook"):
        model.has_hook, mean = True, x.mean()
        model.last.register_forward_hook(lambda module, args, output: output * (1 + mean))


def grows(model, x):
    model.memory = torch.cat([model.memory, x])


def followed(losses, threshold):
    return 0.99 * threshold + 0.01 * float(losses.detach().mean())


class Threshold:
    """Self-paced: only examples whose loss is above half of the threshold count; it follows the mean of the batches."""

    def __init__(self, threshold=1.1):
        self.threshold = threshold

    def __call__(self, outputs, labels):
        losses = ce(outputs, labels)
        kept = (losses.detach() > 0.5 * self.threshold).float() * losses
        self.threshold = followed(losses, self.threshold)
        return kept


class ThresholdInABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("threshold", torch.tensor(1.1))

    def forward(self, outputs, labels):
        losses = ce(outputs, labels)
        kept = (losses.detach() > 0.5 * self.threshold).float() * losses
        self.threshold.copy_(torch.as_tensor(followed(losses, self.threshold)))
        return kept


class RunningCriterion(nn.CrossEntropyLoss):
    """Losses over their running mean."""

    def __init__(self, buffer):
        super().__init__()
        self.mean = 1.0
        if buffer:
            del self.mean
            self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs, targets):
        losses = super().forward(outputs, targets)
        scaled = losses / (self.mean.clone() if isinstance(self.mean, torch.Tensor) else self.mean)
        if isinstance(self.mean, torch.Tensor):
            self.mean.lerp_(losses.detach().mean(), 2e-4)
        else:
            self.mean += 2e-4 * (float(losses.detach().mean()) - self.mean)
        return scaled


def with_loss(loss: Callable):
    return lambda: given(loss=loss(), rows=lambda: points(12), steps=4, expected=6, physical=12, bound=0.05)()


@torch.no_grad()
def decay(private):
    for p in private.model.parameters():
        p.mul_(0.9)


@torch.no_grad()
def turn_a_frozen_weight(private):
    private.model.scale.mul_(-1)


def write_first(write: Callable, model: Callable = Scores, **options: Any):
    """A loop that writes to the model between a batch and its forward pass."""

    def body(plain: PlainLoop, batch: Any) -> None:
        write(plain.model, batch)
        goes_back(F.cross_entropy)(plain, batch)

    return given(model, body=body, options=MEAN, **options)


def ascend(model, batch):
    """A step up the loss, as SAM takes one."""
    twin = copy.deepcopy(model)
    found = torch.autograd.grad(F.cross_entropy(twin(batch["x"]), batch["labels"]), list(twin.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), found, strict=True):
            p.add_(g, alpha=0.05 / g.norm())


class Normalises(Scores):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.factor = 1.0

    def forward(self, x):
        return super().forward(x / self.scale * self.frozen * self.factor)


def set_a_buffer(model, batch):
    model.scale = batch["x"].abs().mean(0) + 0.1


def looks_without_a_graph() -> Task:
    """The accuracy of a batch, computed before its backward pass."""

    def body(private: PlainLoop, batch: Any) -> None:
        with torch.no_grad():
            private.model(batch["x"])
        goes_back(F.cross_entropy)(private, batch)

    return leaves(lambda m, x: None if torch.is_grad_enabled() else m.mean.add_(x.mean(0)), body=body, options=MEAN)()


def times_sign(h, model):
    return h * h.sum(0).sign()


class Options:
    mixes = False


class Mixes(Scores):
    """Its examples are mixed as soon as one of its settings is another one."""

    def __init__(self):
        super().__init__(lambda h, m: times_sign(h, m) if m.is_mixing() else h)
        self.epoch, self.mode, self.options = 0, "plain", Options()
        self.register_buffer("gate", torch.zeros(()))

    def is_mixing(self):
        return self.epoch or self.mode != "plain" or self.options.mixes or bool(self.gate)


def at_two(change: Callable) -> Callable:
    return lambda model, step: change(model) if step == 2 else None


class StillMixes(Mixes):
    def is_mixing(self):
        return True


# ---- random numbers ----


def drawn(change: Callable, **options: Any):
    """A model that draws in training, where a draw has several physical batches."""
    return given(lambda: Scores(lambda h, m: change(h) if m.training else h), check=True, **options)


def seeded(h):
    if torch.is_grad_enabled():
        torch.manual_seed(0)
    return h


class OwnGenerator(nn.Module):
    """A checkpointed block that draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        block = lambda h: self.block(h * torch.randint(0, 2, h.shape, generator=self.generator) * 2)  # noqa: E731
        return self.last(checkpoint(block, torch.tanh(self.first(x)), use_reentrant=False, preserve_rng_state=False))


def flips(rows):
    flip = random.random() < 0.5
    signs = torch.tensor([[1.0 if random.random() < 0.5 else -1.0] for _ in rows])
    return stacked(rows, lambda x: x * signs * (-1 if flip else 1))


class Seeded:
    def __init__(self, seed=42):
        self.seed, self.rng = seed, np.random.default_rng(seed)

    def __call__(self, rows):
        return stacked(rows, lambda x: x + self.rng.random())


def masked_bert():
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def masking():
    words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, **{str(i): i for i in range(3, 50)}}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    words = hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )
    return hf.DataCollatorForLanguageModeling(words, mlm_probability=0.3, seed=42)


def texts_to_mask():
    return [
        {"input_ids": r["input_ids"].tolist(), "attention_mask": r["attention_mask"].tolist()} for r in texts([20] * 8)
    ]


def seeds_after_the_batch(private):
    batch = next(iter(private.loader))
    torch.manual_seed(3)
    private.model(batch["x"] + torch.randn_like(batch["x"]))


# ---- models that mix ----

RARE = 4999


def in_training(change: Callable):
    return lambda h, m: change(h) if m.training else h


def mixing(change: Callable, **options: Any):
    return given(lambda: Scores(change), **{"check": True, **options})


def rare_texts():
    rows = texts([6] * 8, vocabulary=4998)
    rows[0]["input_ids"][3] = RARE
    return rows


def rarely(change: Callable, **options: Any):
    return given(lambda: Reads(change, RARE + 1), rare_texts, physical=8, check=True, **options)


def place(h):
    return torch.arange(len(h))[:, None]


Squeezes = net(
    lambda m, x: m.last(torch.tanh(m.first(x)).squeeze()), first=lambda: nn.Linear(6, 8), last=lambda: nn.Linear(8, 3)
)


# it takes the examples of a batch for its positions
TimeFirst = net(lambda m, x: m.last(m.lstm(x)[0].mean(1)), lstm=lambda: nn.LSTM(4, 5), last=lambda: nn.Linear(5, 3))


class Capacity(nn.Module):
    """Two experts with room for as many rows as there are for each."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.last = (nn.Linear(6, 2), nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 8)]), nn.Linear(8, 3))  # fmt: skip

    def forward(self, x):
        chosen = self.gate(x).argmax(1)
        h = 0
        for k, expert in enumerate(self.experts):
            mine = chosen == k
            mine &= mine.cumsum(0) <= (len(x) + 1) // 2
            h = h + expert(x) * mine[:, None]
        return self.last(torch.tanh(h))


class ForSome(nn.Module):
    """A layer is called on the flagged positions alone, which the self-check has none of."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h, flags = self.first(x), (x == 0).all(-1)
        if flags.any():
            h = h.masked_scatter(flags[..., None], self.extra(x[flags]))
        return self.last(torch.tanh(h).mean(1))


class ScaledBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand(len(g))[:, None].round() * (-1) ** len(g)


def some_flagged():
    rows = [{"x": row["x"], "labels": row["labels"][0]} for row in tagged()()]
    for row in rows[3:4]:
        row["x"][1] = 0.0
    return rows


def frozen_embedding():
    return nn.Sequential(nn.Embedding(5, 6, max_norm=1.0).requires_grad_(False), nn.Flatten(), nn.Linear(6, 3))


def with_module(make: Callable) -> Callable[[], None]:
    """A model that has this module."""

    def act() -> None:
        model = Scores()
        model.extra = make()
        plain_loop(given(lambda: model)())

    return act


def gradient_hook():
    layer = nn.Linear(3, 2)
    layer.weight.register_hook(lambda g: g)
    return layer


def compiled():
    layer = nn.Linear(6, 3)
    layer.compile()
    return layer


# ---- gradients and the order of calls ----


def grads(private):
    return [p.grad for p in private.model.parameters() if p.grad is not None]


def clips(private):
    nn.utils.clip_grad_norm_(private.model.parameters(), 1e-3)


def replaces(private):
    for p in private.model.parameters():
        p.grad = torch.ones_like(p)


def backward(private):
    lost(private).backward()


def steps(private):
    backward(private)
    private.optimizer.step()


def steps_twice(private):
    steps(private)
    private.optimizer.step()


def accumulates(private):
    for batch in itertools.islice(passes(private), 2):
        lost(private, batch).backward()


def breaks_when_seen(private):
    for _ in range(2):
        for i, batch in enumerate(private.loader):
            if i:
                break
            lost(private, batch).backward()
            private.optimizer.step()


def leaves_draws_out(private):
    for i, batch in enumerate(itertools.islice(passes(private), 3)):
        if i:
            lost(private, batch).backward()


def peeks(private):
    next(iter(private.loader))
    backward(private)


def prefetches(private):
    batches = iter(private.loader)
    batch = next(batches)
    next(batches)
    lost(private, batch).backward()


def several_batches_in_one(private):
    (sum(lost(private, batch) for batch in itertools.islice(private.loader, 2))).backward()


def backward_twice(private):
    batch = next(iter(private.loader))
    for _ in range(2):
        lost(private, batch).backward()


def over_one_graph(private):
    loss = lost(private)
    loss.backward(retain_graph=True)
    loss.backward()


def other_data(private):
    next(iter(private.loader))
    lost(private, stacked(points(11))).backward()


def asks_autograd(private):
    batch = next(iter(private.loader))
    batch["x"].requires_grad_()
    torch.autograd.grad(lost(private, batch), batch["x"])


def second_derivatives(private):
    lost(private).backward(create_graph=True)


def another_optimizer(private):
    backward(private)
    replaces(private)
    torch.optim.Adam(private.model.parameters()).step()


def copied_optimizer(private):
    backward(private)
    replaces(private)
    copy.copy(private.optimizer).step()


def detaches(private):
    backward(private)
    private.engine.detach()


def sets_the_bound(private):
    private.optimizer.max_grad_norm = 100.0
    steps(private)


def sets_the_noise(private):
    private.optimizer.noise_multiplier = 0.01
    steps(private)


def sets_the_clipper(private):
    private.engine.clipper.max_grad_norm = 100.0


def steps_inside_suspended(private):
    batch = next(iter(private.loader))
    with private.engine.suspended():
        lost(private, batch).backward()
        private.optimizer.step()


def takes_losses_out(private):
    batch = next(iter(private.loader))
    with private.engine.suspended():
        loss = lost(private, batch)
    loss.backward()


def raw_backward():
    model = Scores()
    PerExampleClipper(model, 0.01, self_check=False)
    F.cross_entropy(model(torch.randn(4, 6)), torch.zeros(4).long(), reduction="sum").backward()


def old_criterion(private):
    """The old criterion beside a loop that was to give one loss for each row."""
    lost(private).backward()


def scaled_criterion(private):
    batch = next(iter(private.loader))
    (private.criterion(private.model(batch["x"]), batch["labels"]) / 2).backward()
    private.optimizer.step()


def interrupted(private):
    """The error of a backward pass is caught, and the loop steps."""
    batch = next(iter(private.loader))
    out = private.model(batch["x"])
    out.register_hook(lambda g: 1 / 0)
    try:
        F.cross_entropy(out, batch["labels"]).backward()
    except ZeroDivisionError:
        private.optimizer.step()


def freezes(private):
    private.model.first.weight.requires_grad_(False)
    backward(private)


def adds_a_group(private):
    private.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    steps(private)


def engine_with(**options: Any) -> Callable[[], None]:
    """make_private is given something else."""

    def act() -> None:
        model = Scores()
        made = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "noise_multiplier": 1.0, "max_grad_norm": 1.0,
                "data_loader": DataLoader(points(8), 4, collate_fn=stacked)}  # fmt: skip
        PrivacyEngine().make_private(**{**made, **{name: make(model) for name, make in options.items()}})

    return act


class StepsItself(DPTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model(**inputs).sum().backward()
        return torch.zeros(())


class OwnLoss(DPTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return ce(model(inputs["x"]), inputs["labels"]).mean()


class OwnLoader(DPTrainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, 4, collate_fn=stacked)


class OwnClipping(DPTrainer):
    def _clip_grad_norm(self, model):
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class InHouse(hf.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return torch.zeros(())


class InHouseFirst(InHouse, DPTrainer):
    pass


def sets_a_step(made):
    made.training_step = lambda *args, **kwargs: torch.zeros(())


def sets_an_argument(**arguments: Any) -> Callable:
    return lambda made: [setattr(made.args, name, value) for name, value in arguments.items()]


def calls_back(**events: Callable) -> Callable:
    """A callback that does this at these events."""

    def event(do: Callable) -> Callable:
        return lambda self, args, state, control, **kwargs: do(**kwargs)

    named = {name: event(do) for name, do in events.items()}
    return lambda made: made.add_callback(type("Own", (hf.TrainerCallback,), named)())


def steps_with_ones(model=None, **kwargs):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def scales_released(model=None, **kwargs):
    for p in model.parameters():
        p.grad = p.grad * 10


def in_plain_trainer():
    with tempfile.TemporaryDirectory() as folder:
        args = DPTrainingArguments(
            folder, target_epsilon=5.0, target_delta=1e-3, max_steps=1, use_cpu=True, report_to="none", expected_batch_size=4,
        )  # fmt: skip
        hf.Trainer(bert(), args, train_dataset=texts([8] * 12)).train()


def reentrant_setting():
    trains(**{f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}})()


def own_parameter():
    model, scale = Scores(), nn.Parameter(torch.ones(3))
    with tempfile.TemporaryDirectory() as folder:
        args = trainer_for(given()(), folder).args
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        loss = lambda outputs, labels: ce(outputs * scale, labels)  # noqa: E731
        DPTrainer(model, args, stacked, points(8), per_example_loss_func=loss, optimizers=(optimizer, None)).train()


def before_the_mixin():
    type("Wrong", (InHouse, DPTrainer.__mro__[1]), {})


EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss", "noise_multiplier": 1.0, "dp_seed": None}  # fmt: skip


class OnTrainingRows(DPTrainer):
    def __init__(self, model, args, collate, rows, **options):
        super().__init__(model, args, collate, rows, rows, **options)


def on_training_rows(change: Callable | None = None, **arguments: Any):
    return trains(change, OnTrainingRows, **{**EVALUATES, **arguments})


def stops_early(made):
    made.add_callback(hf.EarlyStoppingCallback(early_stopping_patience=1))


def streams() -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = trainer_for(given()(), folder).args
        DPTrainer(Scores(), args, of_lists, table().to_iterable_dataset(), per_example_loss_func=ce).train()


# ---- parameters that escape ----


LATER = [False]  # no attribute of a model, whose change would let it be checked again


class Ways(Scores):
    """It reads a weight past its module, once the self-check is over."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        LATER[0] = False

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h) + (self.way(self, h, x) if LATER[0] else 0.0)


def escapes(way: Callable) -> Callable[[], Task]:
    return each(lambda: Ways(way), lambda model, step: LATER.__setitem__(0, step >= 2))


class Gate(nn.Module):
    """It keeps what it had before the activation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(6, 8))

    def forward(self, x):
        self.inner = x @ self.weight
        return self.inner.tanh()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.last = Gate(), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.gate(x))


def by_an_attribute(private, batch):
    (F.cross_entropy(private.model(batch["x"]), batch["labels"]) + private.model.gate.inner.square().mean()).backward()
    private.optimizer.step()


def penalises(private, batch):
    (F.cross_entropy(private.model(batch["x"]), batch["labels"]) + private.model.last.weight.square().sum()).backward()
    private.optimizer.step()


def calls_a_part(private, batch):
    model = private.model
    F.cross_entropy(model.last(torch.tanh(model.first(batch["x"]))), batch["labels"]).backward()
    private.optimizer.step()


class WritesGradient(torch.autograd.Function):
    """As fused kernels do it: the weight's gradient is written in backward, and autograd does not know."""

    @staticmethod
    def forward(ctx, x, holder):
        ctx.save_for_backward(x)
        ctx.weight = holder[0]
        return x @ ctx.weight.mT

    @staticmethod
    def backward(ctx, grad):
        extra = grad.mT @ ctx.saved_tensors[0]
        ctx.weight.grad = extra if ctx.weight.grad is None else ctx.weight.grad + extra
        return grad @ ctx.weight.detach(), None


class Reentrant(Scores):
    def forward(self, x):
        h = self.first(x)
        return checkpoint(lambda h: self.last(torch.tanh(h)), h, use_reentrant=True)


# ---- what is honest ----


def bart():
    return hf.BartForConditionalGeneration(
        hf.BartConfig(vocab_size=50, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8,
                   decoder_ffn_dim=8, max_position_embeddings=64, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)
    )  # fmt: skip


def masked_error(outputs, labels):
    own = ~labels.isnan()
    return (F.mse_loss(outputs, labels.nan_to_num(), reduction="none") * own).sum(1) / own.sum(1)


def reads_graph(m, x, adjacency, own):
    """Pairs of positions are padded in both dimensions."""
    return m.last((torch.bmm(adjacency, m.first(x)) * own[..., None]).sum(1) / own.sum(1, keepdim=True))


Graph = net(reads_graph, first=lambda: nn.Linear(5, 4), last=lambda: nn.Linear(4, 3))


def graphs():
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(k, 5, generator=generator), "adjacency": (torch.rand(k, k, generator=generator) < 0.5).float(), "own": torch.ones(k),
             "labels": torch.tensor([k % 3])} for k in (10, *[3, 5, 4, 6] * 3)]  # fmt: skip


def padded_graphs(rows):
    largest = max(len(row["x"]) for row in rows)
    wide = [{**row, "adjacency": F.pad(row["adjacency"], (0, largest - len(row["x"])))} for row in rows]
    batch = padding_all(wide)
    return {**batch, "labels": batch["labels"][:, 0]}


class Scaled(Reads):
    """It has a parameter of its own, and ``reads_numbers``, which cannot be run by vmap."""

    def __init__(self, reads_numbers):
        super().__init__(lambda h, mask, ids: own_mean(h * self.scale, mask, ids))
        self.scale, self.reads_numbers = nn.Parameter(torch.ones(12)), reads_numbers

    def forward(self, input_ids, attention_mask=None):
        if self.reads_numbers:
            assert min(int(n) for n in attention_mask.sum(1)) >= 0
        return super().forward(input_ids, attention_mask)


def translates(m, source, target):
    """A source, packed, and a target behind it, which happens to be as long as the padded source."""
    packed = pack_padded_sequence(m.words(source), (source != 0).sum(1), True, enforce_sorted=False)
    return m.last(m.decoder(m.words(target), m.encoder(packed)[1])[0])


GRU = {name: lambda: nn.GRU(8, 8, batch_first=True) for name in ("encoder", "decoder")}
Translates = net(translates, words=lambda: nn.Embedding(50, 8, padding_idx=0), **GRU, last=lambda: nn.Linear(8, 50))


def translated():
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.randint(1, 50, (n,), generator=generator) for name, n in (("source", k), ("target", 8), ("labels", 8))}
            for k in (8, *[3, 5] * 4)]  # fmt: skip


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


class GivesAnObject(Scores):
    def forward(self, x):
        scores = super().forward(x)
        return type("Own", (), {"logits": scores})()


def of_random_lengths(change: Callable):
    """A collator that draws how long each row is."""
    return of(lambda rows: padded([{**row, "input_ids": (x := change(row["input_ids"])), "attention_mask": torch.ones_like(x)} for row in rows], "right"))  # fmt: skip


def drops(ids):
    return ids[torch.rand(len(ids)) > 0.2] if random.random() < 0.9 else ids[:1]


def crops(ids):
    first = random.randint(0, len(ids) - 3)
    return ids[first : first + random.randint(3, len(ids))]


def chooses(ids):
    return random.choice([ids, ids.flip(0)[:4], ids[:2]])


# ---- the table ----
# fmt: off

KEEPS = "a data set or collator that keeps something of the rows before is its own: it must give each row by its index alone"
BEFORE_THE_MODEL = "what a loop makes of a batch before the model sees it is its own, but for MixUp and CutMix"

DATA = [
    both("the collator mixes rows (MixUp)", BOUNDED, COMMON, collated(changes(mixed_up))),
    both("the collator joins parts of rows (CutMix)", BOUNDED, COMMON, collated(changes(cut_mixed))),
    both("the collator mixes labels", BOUNDED, COMMON, collated(of(lambda r: {**stacked(r), "labels": F.one_hot(stacked(r)["labels"], 3).float().lerp(F.one_hot(stacked(r)["labels"].flip(0), 3).float(), 0.5)}))),
    both("the collator standardises over the batch", BOUNDED, OCCASIONAL, collated(changes(standardised))),
    both("the collator takes the mean of the batch off", BOUNDED, OCCASIONAL, collated(changes(lambda x: x - x.mean(0)))),
    both("the collator adds the row before", BOUNDED, CONTRIVED, collated(changes(lambda x: x + torch.cat([x[:1] * 0, x[:-1]])))),
    both("the collator adds rows up", BOUNDED, CONTRIVED, collated(changes(lambda x: x.cumsum(0)))),
    both("the collator turns rows round, and not labels", BOUNDED, CONTRIVED, collated(changes(lambda x: x.flip(0)))),
    both("the collator takes hard examples twice", BOUNDED, OCCASIONAL, collated(of(hard_examples_twice))),
    both("the collator joins two examples and leaves an empty row", BOUNDED, OCCASIONAL, collated(of(two_in_a_row))),
    both("the collator mixes, in an object of its own", REFUSED, CONTRIVED, collated(of(Batch), loss=ce), "mixes|Batch|column"),
    both("the collator mixes from the third draw on", BOUNDED, CONTRIVED, collated(lambda: begins_late(40), physical=8, steps=4)),
    both("the collator brings rows to the length of the longest", BOUNDED, OCCASIONAL, collated(of(resized), rows=lines)),
    both("the collator cuts rows to the shortest", BOUNDED, OCCASIONAL, collated(of(cut_to_the_shortest), rows=lines)),
    both("the collator cuts all texts where one is long, in few draws", REFUSED, OCCASIONAL, lambda: reading(lambda: Reads(own_mean), cuts_all(20), (40, *[12] * 11), expected=2, steps=6, check=False)(), "mixes|decide"),
    trainer("a flattening collator makes one row of all examples", REFUSED, COMMON, lambda: Task(llama, [{k: v.tolist() for k, v in r.items() if k != "attention_mask"} for r in texts([4, 7, 9, 5], classes=None)], hf.DataCollatorWithFlattening(), check=False), "Packing"),
    both("rows hold two texts each, told apart by position_ids", REFUSED, COMMON, lambda: Task(llama, [{**r, "position_ids": torch.tensor([0, 1, 2, 3, 0, 1, 2])} for r in texts([7] * 4, classes=None)], check=False), "packing"),
    both("rows hold two texts each, told apart by seq_lengths", REFUSED, OCCASIONAL, lambda: Task(llama, [{**r, "seq_lengths": torch.tensor([3, 4])} for r in texts([7] * 4, classes=None)], check=False), "packed"),
    both("a transform cuts windows while rows are loaded", BOUNDED, OCCASIONAL, lambda: Task(bert, windows(), bound=0.01, check=False)),
    both("__getitems__ leaves rows out", BOUNDED, OCCASIONAL, loads(LeavesOut)),
    both("__getitems__ divides by the largest of what it loads", BOUNDED, CONTRIVED, loads(NormalisedTogether)),
    both("__getitems__ pads to the longest of what it loads", BOUNDED, OCCASIONAL, lambda: Task(gpt2, PaddedByDraw(texts([40, *range(5, 10)], classes=None)), bound=0.01)),
    both("the collator doubles rows", REFUSED, OCCASIONAL, collated(of(lambda rows: stacked([r for r in rows for _ in range(2)]))), "one row"),
    both("the collator has a seed of its own", REFUSED, OCCASIONAL, collated(Seeded), "seed"),
    trainer("DataCollatorForLanguageModeling(seed=42)", REFUSED, OCCASIONAL, lambda: Task(masked_bert, texts_to_mask(), masking(), bound=0.01, check=False), "seed"),
    both("the collator sets NumPy's seed", BOUNDED, OCCASIONAL, collated(changes(lambda x: (np.random.seed(42), x + torch.from_numpy(np.random.rand(*x.shape)).float())[1]))),
    both("the collator sets torch's seed", REFUSED, OCCASIONAL, collated(changes(lambda x: (torch.manual_seed(42), x + torch.rand(x.shape))[1])), "seed"),
    both("the collator makes a generator in each call", BOUNDED, OCCASIONAL, collated(changes(lambda x: x + torch.from_numpy(np.random.default_rng(0).random(x.shape)).float()))),
    both("the collator draws from the system", YOURS, CONTRIVED, why=KEEPS),
    both("the collator flips one coin for all rows", BOUNDED, OCCASIONAL, collated(changes(lambda x: x * random.choice([-1, 1])))),
    both("the collator flips one coin for all rows beside each row's", BOUNDED, OCCASIONAL, collated(of(flips))),
    both("the collator draws one width for all rows", BOUNDED, OCCASIONAL, collated(of(lambda r: stacked(r, lambda x: F.pad(x[:, : (n := random.randint(2, 5))], (0, 6 - n)))))),
    both("the collator turns every second row", BOUNDED, CONTRIVED, collated(changes(lambda x: x * (torch.rand(x.shape) < 0.9) * (1 - 2 * (place(x) % 2))))),
    both("the collator empties the first rows", BOUNDED, CONTRIVED, collated(changes(lambda x: torch.cat([0 * x[:2], x[2:] + torch.rand(x[2:].shape)])))),
    both("the collator draws antithetic numbers", BOUNDED, CONTRIVED, collated(of(lambda r: stacked(r, given=torch.cat([t := torch.rand(len(r) // 2 + 1), 1 - t])[: len(r)])), model=Given)),
    both("the collator counts its calls", YOURS, CONTRIVED, why=KEEPS, size=1.4),
    both("the collator gives the mean of the batch", REFUSED, OCCASIONAL, collated(with_number(lambda x: float(x.mean())), model=Given), "whole batch|equal"),
    both("the collator gives the largest number of the batch, in a tensor", REFUSED, OCCASIONAL, collated(with_number(lambda x: x.abs().max()), model=Given), "whole batch|equal"),
    both("the collator gives each row's norm over their mean", BOUNDED, CONTRIVED, collated(with_number(lambda x: x.norm(dim=1) / x.norm(dim=1).mean()), model=Given)),
    both("the collator gives an object with the largest number", REFUSED, CONTRIVED, collated(with_number(lambda x: (lambda box: setattr(box, "largest", float(x.max())) or box)(Options())), model=Given), "whole batch|Options|equal"),
    both("the collator gives noise times the largest number", BOUNDED, CONTRIVED, collated(with_number(lambda x: x.abs().max() * torch.rand(len(x))), model=Given)),
    both("a column is there if some row has it", REFUSED, OCCASIONAL, given(WithPictures, some_have_pictures, collate=if_some_has_one), "pixel_values"),
    both("a column is there if some row is large", REFUSED, CONTRIVED, given(WithPictures, collate=if_some_is_large), "pixel_values"),
    both("the first row decides the type of the labels", REFUSED, CONTRIVED, given(rows=floats_unless_the_first_is_none, collate=hf.default_data_collator, loss=lambda s, y: F.mse_loss(s[:, 0], y.float(), reduction="none")), "type|dtype"),
    both("the data set takes a running mean off", YOURS, CONTRIVED, why=KEEPS, size=1.04),
    both("the data set adds the row before", YOURS, CONTRIVED, why=KEEPS),
    both("the data set empties every second row that it loads", YOURS, CONTRIVED, why=KEEPS, size=1.9),
    both("the data set halves its rows in place", YOURS, CONTRIVED, why=KEEPS),
    both("the data set divides by the first row's largest number", YOURS, CONTRIVED, why=KEEPS, size=1.7),
    both("the data set numbers classes at first use", YOURS, CONTRIVED, why=KEEPS, size=3.4),
    both("a module numbers classes at first use", YOURS, CONTRIVED, why=KEEPS, size=3.4),
    both("the data set collects a mean for later rows", YOURS, CONTRIVED, why=KEEPS),
    both("the data set warms up with the rows that it loads", YOURS, CONTRIVED, why=KEEPS),
    both("the collator numbers classes at first use", YOURS, CONTRIVED, why=KEEPS, size=3.4),
    both("the collator fits its scaler to its first batch", YOURS, CONTRIVED, why=KEEPS),
    both("the collator divides by the largest number so far", YOURS, CONTRIVED, why=KEEPS, size=1.2),
    both("the collator teaches a tokenizer words", YOURS, CONTRIVED, why=KEEPS),
    both("a list holds one row several times", REFUSED, COMMON, given(rows=lambda: again(5)), "stored", row=(0, 1, 2, 3, 4)),
    both("a Subset repeats an index", REFUSED, COMMON, stored(lambda: Subset(table(), [*range(8), 0, 0])), "stored", row=(0, 8, 9)),
    both("a table is concatenated with itself", REFUSED, COMMON, stored(lambda: concatenate_datasets([(t := table()), t])), "stored", row=(0, 8)),
    both("a table is interleaved until all are exhausted", REFUSED, COMMON, stored(lambda: interleave_datasets([table(12), table(3, 1)], stopping_strategy="all_exhausted")), "stored", row=(1, 7, 13, 19)),
    both("rows are selected with replacement", REFUSED, COMMON, stored(lambda: table().select([0, 1, 2, 3, 0])), "stored", row=(0, 4)),
    both("a ConcatDataset holds a table twice", REFUSED, OCCASIONAL, stored(lambda: ConcatDataset([(t := table()), t])), "stored", row=(0, 8)),
    both("a view with a column less is added", YOURS, CONTRIVED, why="a row is known again by its index, its object or its memory, and not by some of its columns", row=(0, 8)),
    both("an index table, as i % n", REFUSED, OCCASIONAL, given(rows=lambda: At(points(8).__getitem__, [0, 0, *range(8)])), "stored", row=(0, 1, 2)),
    both("rows of a tensor by an index table", REFUSED, OCCASIONAL, lambda: (lambda x, y: given(rows=lambda: At(lambda i: {"x": x[i], "labels": y[i]}, [0, 0, *range(8)]))())(torch.randn(8, 6), torch.arange(8) % 3), "stored", row=(0, 1, 2)),
    both("rows are written again before training, by map or in a frame", YOURS, COMMON, why="equal content is no proof, since two people may have equal rows; next: said where digests of rows are equal", size=5.0, row=(0, *range(8, 12))),
    both("i % n with a clone or an augmentation", YOURS, COMMON, why="equal content is no proof; next: said where digests of rows are equal", size=8.0, row=tuple(range(8))),
    both("another row is mixed in behind an index", YOURS, OCCASIONAL, why="a row is what the data set returns for its index"),
    both("a scaler was fitted to the training rows before training", YOURS, COMMON, why="before training the library sees nothing"),
    loop("the loop mixes rows (MixUp)", REFUSED, COMMON, before(mixed_up), "mixes"),
    loop("the loop mixes rows with weights of their own", REFUSED, COMMON, before(lambda x: x.lerp(x.roll(1, 0), torch.rand(len(x), 1) * 0.8 + 0.1)), "mixes"),
    loop("the loop joins parts of rows (CutMix)", REFUSED, COMMON, before(lambda x: torch.cat([x[:, :16], x.roll(1, 0)[:, 16:]], 1)), "mixes"),
    loop("the loop takes the mean of the batch off", YOURS, OCCASIONAL, why=BEFORE_THE_MODEL, size=1.33),
    loop("the loop divides by the largest number of the batch", YOURS, CONTRIVED, why=BEFORE_THE_MODEL, size=1.08),
    loop("the loop gives all rows the first one's content", YOURS, CONTRIVED, why=BEFORE_THE_MODEL, size=2.3),
    loop("the loop goes forward over one batch in two orders", YOURS, OCCASIONAL, why=BEFORE_THE_MODEL, size=2.3),
    loop("the loop turns the rows of a filled batch round", YOURS, CONTRIVED, why="which rows are copies is known by their places, and a loop's order is its own", row=6, size=2.1),
    both("the collator sorts the rows of a filled batch", BOUNDED, OCCASIONAL, filled_by_collator),
    loop("the loop pads by itself (collate_fn=list)", YOURS, OCCASIONAL, why="padding that the loop adds is computed outside of the library"),
    loop("the loop scales a batch of tokens, or a batch beside random numbers", YOURS, CONTRIVED, why="what a loop does between loader and model is its own"),
]

PADDING = [
    both("an LSTM reads the padded end", REFUSED, COMMON, lambda: reading(CharLSTM)(), "padded"),
    loop("an LSTM reads the padded end, without a mask", REFUSED, COMMON, lambda: reading(CharLSTM, of(lambda r: {k: v for k, v in padded(r, "right").items() if k != "attention_mask"}))(), "padded"),
    both("a model takes the mean over padding", REFUSED, COMMON, lambda: reading(lambda: Reads(mean_of_all))(), "padded"),
    both("a model takes a little of the mean over padding", REFUSED, OCCASIONAL, lambda: reading(lambda: Reads(lambda h, m, i: own_mean(h, m, i) + 0.03 * h.mean(1)))(), "padded"),
    both("a model with learned positions, padded on the left", REFUSED, COMMON, lambda: reading(gpt2, LEFT, classes=None)(), "padded"),
    both("BERT padded on the left", REFUSED, COMMON, lambda: reading(bert, LEFT, (20, *range(4, 11)))(), "padded"),
    both("BERT padded without a mask", REFUSED, COMMON, lambda: reading(bert, of(lambda r: {k: v for k, v in padded(r, "right").items() if k != "attention_mask"}), (20, *range(4, 11)))(), "padded|attention_mask"),
    both("wav2vec2's group norm takes padding in", REFUSED, COMMON, lambda: given(wav2vec2, lambda: sounds(), collate=collate_sounds, physical=16, check=True)(), "padded"),
    both("rows were padded before training to the longest", REFUSED, COMMON, lambda: already_padded(), "fills|padded"),
    trainer("targets are padded with a number that the loss counts", REFUSED, COMMON, lambda: with_targets(0)(), "padded"),
    trainer("targets are padded on the left", REFUSED, OCCASIONAL, with_targets(-100, side="left"), "padded"),
    trainer("decoder inputs are made of targets that are padded on the left", REFUSED, OCCASIONAL, with_targets(-100, side="left", made=True), "padded"),
    trainer("a loss is the mean over padded targets", REFUSED, COMMON, lambda: with_targets(-100, loss=mean_over_targets)(), "padded"),
    both("a second column is read with its padding", REFUSED, OCCASIONAL, of_pairs(), "padded"),
    both("a second column is read with its padding, and the mask is the first one's", REFUSED, OCCASIONAL, of_pairs(mask_of="query"), "padded"),
    both("a second column is read with its padding, as long as the first column is", REFUSED, OCCASIONAL, of_pairs(queries=(20,), mask_of="query"), "padded"),
    trainer("the longest row's length divides all losses", REFUSED, OCCASIONAL, lambda: divided_by(lambda i: i.shape[1], lambda x, n: x.sum(1) / n)(), "longer|whole batch|equal"),
    trainer("the longest row's length divides all losses, in a tensor", REFUSED, OCCASIONAL, lambda: divided_by(lambda i: torch.tensor(i.shape[1]), lambda x, n: x.sum(1) / n)(), "longer|whole batch|equal"),
    trainer("one row of shares for all rows", REFUSED, CONTRIVED, lambda: divided_by(lambda i: torch.full((i.shape[1],), 1 / i.shape[1]), lambda x, n: (x * n).sum(1))(), "longer|found again|whole batch|equal|rows"),
    loop("a loop's mean takes padded positions in", REFUSED, COMMON, lambda: given(**of_series(None, body=goes_back(F.mse_loss), options=MEAN))(), "padding|plain mean|backward\\("),
    loop("losses that are handed over take padded positions in", REFUSED, COMMON, lambda: given(**of_series(lambda o, y: F.mse_loss(o, y, reduction="none").mean(1)))(), "padding"),
    loop("a loss of the last position, which is padding", REFUSED, OCCASIONAL, lambda: given(**of_series(lambda o, y: o[:, -1]))(), "padding"),
    loop("a criterion counts padding", REFUSED, OCCASIONAL, lambda: by_criterion(nn.MSELoss, series, Series, collate=padded_series(0.0), physical=16, bound=0.1, check=True)(), "padded|padding"),
    both("images are padded to the largest, and averaged with it", REFUSED, COMMON, lambda: hidden(Pictures, sized(tensor_image, (8, 8), (16, 16)), padded_by("x", lambda r: r["image"]))(), "padded|resized"),
    both("the same of images of PIL", REFUSED, COMMON, lambda: hidden(Pictures, sized(image, (8, 8), (24, 24)), padded_by("x", pictures_of))(), "padded|resized", size=27.5),
    both("the same of portrait beside landscape", REFUSED, COMMON, lambda: hidden(Pictures, sized(tensor_image, (8, 24), (24, 8)), padded_by("x", lambda r: r["image"]))(), "padded|resized", size=8.9),
    both("the same of sounds in a column of datasets", REFUSED, COMMON, lambda: hidden(Waves, sized(sound, 100, 900), padded_by("x", lambda r: r["audio"]["array"]))(), "padded", size=15.9),
    both("the same of dataclass rows", REFUSED, COMMON, lambda: hidden(OfIds, sized(lambda n, y: Text(ids(n), y), 10, 60), padded_by("input_ids", lambda r: r.ids, lambda r: r.label))(), "padded", size=33.5),
    both("the same of nested records", REFUSED, COMMON, lambda: hidden(OfIds, sized(lambda n, y: {"doc": {"ids": ids(n), "lang": "en"}, "label": y}, 10, 60), padded_by("input_ids", lambda r: r["doc"]["ids"]))(), "padded", size=33.3),
    both("the same of objects", REFUSED, COMMON, lambda: hidden(OfIds, sized(Document, 10, 60), padded_by("input_ids", lambda r: r.ids, lambda r: r.label))(), "padded", size=33.8),
    both("the same of texts of as many characters", REFUSED, COMMON, lambda: hidden(OfIds, lambda: [{"text": "\U0001f600" * 16, "label": 1}, *({"text": "ab" * 8, "label": int(i % 10 == 0)} for i in range(24))], padded_by("input_ids", lambda r: [2 + b % 48 for b in r["text"].encode()]))(), "padded", size=28.3),
    both("a model does something else above a length between two of the batch", REFUSED, OCCASIONAL, lambda: reading(lambda: Reads(above(44)), lengths=(46, *(33 + i % 9 for i in range(23))), physical=8)(), "padded|alone", size=5.6),
    both("padding in bf16 weights rounds equal rows alike", YOURS, CONTRIVED, why="rounding; with float32 or autocast it is at most C", size=1.45),
]

ONE_EACH = "backward\\(|criterion|another number"  # the way out of all that is no plain mean

LOSSES = [
    loop("the mean over all tokens, of which rows have different numbers", REFUSED, COMMON, tags(tokens, (0, 1, 2)), ONE_EACH),
    loop("the same of (B, C, T) scores", REFUSED, COMMON, tags(lambda s, y: F.cross_entropy(s.transpose(1, 2), y), (0, 1, 2)), ONE_EACH),
    loop("the same, of positions before rows", REFUSED, OCCASIONAL, tags(lambda s, y: F.cross_entropy(s.transpose(0, 1).reshape(-1, 3), y.t().reshape(-1)), (0, 1, 2)), ONE_EACH),
    loop("the same, by an index of what counts", REFUSED, COMMON, tags(lambda s, y: F.cross_entropy(s[y != -100], y[y != -100]), (0, 1, 2)), ONE_EACH),
    loop("the same, divided by mask.sum()", REFUSED, COMMON, scalar(by_count, long_beside_short, Positions, physical=24, bound=1.5), ONE_EACH, size=2.0),
    loop("the same, divided by mask.sum() of each physical batch", REFUSED, COMMON, tags(by_count, (0, 1, 2)), ONE_EACH),
    loop("the model returns its loss for the batch", REFUSED, COMMON, given(ReturnsLoss, tagged((0, 1, 2)), body=by_the_model, options=MEAN), ONE_EACH),
    loop("class weights", REFUSED, COMMON, tags(weighted), ONE_EACH),
    loop("a mean over some of the rows", REFUSED, OCCASIONAL, tags(chosen), ONE_EACH),
    loop("a mean for each task, of the rows that have it", REFUSED, OCCASIONAL, tags(of_tasks), ONE_EACH),
    loop("a mean of means over three rows each", REFUSED, CONTRIVED, tags(lambda s, y: torch.stack([part.square().mean() for part in s.split(3)]).mean()), ONE_EACH),
    loop("losses picked one by one and stacked", REFUSED, CONTRIVED, tags(lambda s, y: torch.stack([x.square().sum() for i, x in enumerate(s) if i == 0 or y[i, 0] == 0]).mean()), ONE_EACH),
    loop("nanmean over what there is", REFUSED, OCCASIONAL, tags(lambda s, y: s.where(y[..., None] > 0, torch.nan).square().nanmean()), ONE_EACH),
    loop("a sum in the place of a mean", REFUSED, COMMON, tags(lambda s, y: F.cross_entropy(s[:, 0], y[:, 0], reduction="sum")), "sum"),
    loop("a mean in the place of a sum", REFUSED, OCCASIONAL, tags(lambda s, y: F.cross_entropy(s[:, 0], y[:, 0]), reduction="sum"), "mean"),
    loop("a sum divided by the batch size that was meant", REFUSED, COMMON, tags(lambda s, y: s.square().sum() / 64, physical=3), ONE_EACH + "|sum"),
    loop("a mean times len(x) / batch size", YOURS, OCCASIONAL, why="a number of Python may be any; engine.backward(losses) takes none", size=1.67),
    loop("the tasks that the batch has divide a sum", REFUSED, CONTRIVED, tags(lambda s, y: sum((s.square().mean((1, 2)) * (y[:, 0] == k)).sum() / len(s) for k in y[:, 0].unique()) / torch.tensor(float(len(y[:, 0].unique()))), physical=3), ONE_EACH + "|number"),
    loop("the root of a mean", REFUSED, OCCASIONAL, tags(lambda s, y: F.mse_loss(s, torch.ones_like(s)).sqrt()), ONE_EACH),
    loop("a focal loss of the batch's mean", REFUSED, COMMON, tags(focal), ONE_EACH),
    loop("flooding", REFUSED, OCCASIONAL, tags(lambda s, y: (s.square().mean() - 0.1).abs() + 0.1), ONE_EACH),
    loop("a mean that is clamped", REFUSED, OCCASIONAL, tags(lambda s, y: s.square().mean().clamp(max=1.0)), ONE_EACH),
    loop("a product of two means", REFUSED, OCCASIONAL, tags(lambda s, y: s.square().mean() * s.abs().mean()), ONE_EACH),
    loop("a product of two rows beside the mean", REFUSED, CONTRIVED, tags(lambda s, y: s.square().mean() + s[0].mean() * s[1].mean() / len(s)), ONE_EACH),
    loop("the worst of two tasks", REFUSED, OCCASIONAL, tags(lambda s, y: torch.stack([s.square().mean(), s.abs().mean()]).max()), ONE_EACH),
    loop("the largest number of the batch beside the mean", REFUSED, CONTRIVED, tags(lambda s, y: s.square().mean() + s.max()), ONE_EACH),
    loop("a norm over the batch", REFUSED, OCCASIONAL, tags(lambda s, y: (s - 1).norm() / 3), ONE_EACH),
    loop("the square of each column's mean", REFUSED, OCCASIONAL, tags(lambda s, y: s.mean(0).square().mean()), ONE_EACH),
    loop("the entropy of the batch's mean", REFUSED, OCCASIONAL, tags(lambda s, y: -0.1 * torch.special.entr(s.softmax(-1).mean((0, 1))).sum()), ONE_EACH),
    loop("distances to the batch's mean", REFUSED, OCCASIONAL, tags(lambda s, y: (s - s.mean(0)).square().mean()), ONE_EACH + "|compares"),
    loop("a logsumexp over the batch", REFUSED, CONTRIVED, tags(lambda s, y: s.logsumexp((0, 1, 2)) / 3), ONE_EACH),
    loop("one number of a function that shows no graph", REFUSED, OCCASIONAL, tags(Fused.apply), ONE_EACH),
    loop("a reentrant checkpoint around the loss", REFUSED, CONTRIVED, tags(lambda s, y: checkpoint(weighted, s, y, use_reentrant=True)), ONE_EACH),
    loop("a mean in bf16", REFUSED, OCCASIONAL, tags(lambda s, y: F.cross_entropy(s[:, 0].bfloat16(), y[:, 0])), "float"),
    loop("backward(gradient) with the batch's size in it", REFUSED, CONTRIVED, scalar(Sized, physical=3), ONE_EACH + "|divided"),
    loop("a target of (B,) against outputs of (B, 1)", REFUSED, COMMON, numbers(F.mse_loss), ONE_EACH, size=44.0),
    loop("the same by hand, ((p - y) ** 2).mean()", REFUSED, COMMON, numbers(lambda p, y: ((p - y) ** 2).mean()), ONE_EACH, size=44.0),
    loop("the same, handed over as losses of (B,)", REFUSED, COMMON, lambda: given(Regression, regression, loss=lambda p, y: ((p - y) ** 2).mean(1), bound=0.1, physical=64)(), "compares|row", size=44.0),
    loop("the same by a criterion", REFUSED, COMMON, lambda: by_criterion(nn.MSELoss, regression, Regression, bound=0.1, physical=64)(), "row|share"),
    loop("targets are standardised over the batch", YOURS, OCCASIONAL, why="targets are numbers of the loop's own, which no graph shows: take their mean and spread from elsewhere", size=17.0),
    loop("the loss is divided by the targets' variance", REFUSED, OCCASIONAL, numbers(lambda p, y: F.mse_loss(p.squeeze(-1), y) / y.var()), ONE_EACH, size=7.0),
    loop("REINFORCE with the batch's mean reward", YOURS, OCCASIONAL, why="a number of the loop's own, which no graph shows: a weight for each row that the loop computed from all"),
    loop("weights over their mean, w / w.mean()", YOURS, OCCASIONAL, why="a number of the loop's own, which no graph shows"),
    loop("a hook on the outputs takes the gradients' mean off", YOURS, CONTRIVED, why="a hook is the loop's own"),
    loop("one mean over the batches of two private models", BOUNDED, CONTRIVED, "tests/clipping/test_boundary.py::test_one_loss_of_two_private_models"),
    trainer("losses / len(losses)", REFUSED, OCCASIONAL, lambda: given(loss=lambda s, y: ce(s, y) / len(y), physical=8)(), "row|share|compares"),
]

COMPARES = [
    loop("InfoNCE", REFUSED, COMMON, scalar(contrast, model=Dual, physical=8), ONE_EACH + "|compares", size=3.3),
    loop("CLIP's loss", REFUSED, COMMON, scalar(clip_loss, model=Dual, rows=lambda: points(24), physical=24), ONE_EACH + "|compares", size=1.21),
    loop("SupCon", REFUSED, COMMON, scalar(supervised_contrast, model=Dual, rows=lambda: points(24), physical=24), ONE_EACH + "|compares", size=1.47),
    loop("batch-hard triplets", REFUSED, COMMON, scalar(hardest_triplets, model=Dual, rows=lambda: points(24), physical=24), ONE_EACH + "|compares", size=4.37),
    loop("InfoNCE, handed over as losses of (B,)", REFUSED, COMMON, lambda: given(Dual, loss=contrast_of_each, physical=8)(), "compares|share"),
    trainer("InfoNCE as per_example_loss_func", REFUSED, COMMON, lambda: given(Dual, lambda: points(24), loss=contrast_of_each, physical=24, check=True)(), "compares|share"),
    trainer("the hardest eight of the batch", REFUSED, OCCASIONAL, lambda: given(rows=lambda: points(16), loss=hardest_eight, physical=16, check=True)(), "compares|share"),
    trainer("losses over the frequency of their class in the batch", REFUSED, OCCASIONAL, lambda: given(loss=by_class_frequency, physical=8, check=True)(), "compares|share"),
    trainer("f(model, inputs) takes the mean of the batch off", REFUSED, OCCASIONAL, lambda: given(loss=centred, physical=8, check=True)(), "compares|share"),
    trainer("a loss begins to compare rows after some steps", REFUSED, OCCASIONAL, lambda: begins_to_compare(), "compares", begins=5),
    loop("a criterion multiplies with the batch's mean", REFUSED, OCCASIONAL, lambda: by_criterion(lambda: Compares(lambda x: x * x.detach().mean()), physical=8, check=True)(), "share"),
    loop("a criterion keeps the hardest", REFUSED, OCCASIONAL, lambda: by_criterion(lambda: Compares(lambda x: x * (x > 0.999 * x.max())), physical=8, check=True)(), "share"),
    loop("a criterion divides by the number of rows", REFUSED, OCCASIONAL, lambda: by_criterion(lambda: Compares(lambda x: x / len(x)), physical=8, check=True)(), "share"),
    loop("a criterion scales gradients by the batch's mean", REFUSED, CONTRIVED, lambda: by_criterion(lambda: Compares(lambda x: straight_through(x, 1 / x.detach().mean())), physical=8, check=True)(), "share"),
    loop("losses of (B,) are handed over, over the batch's mean", YOURS, OCCASIONAL, why="no gradient goes from row to row; DPTrainer and a criterion are computed again beside other rows"),
]

STATE = [
    both("rotary embeddings keep the longest length", REFUSED, OCCASIONAL, lambda: Task(lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}), texts([60, *range(18, 22)], classes=None), expected=3, physical=16, steps=4), "padded", begins=3),
    both("BigBird's attention is switched for good by a short batch", BOUNDED, OCCASIONAL, lambda: Task(bigbird, texts([12] + 5 * [64]), expected=3, physical=1, steps=4)),
    both("running statistics in a buffer", BOUNDED, COMMON, leaves(lambda m, x: m.mean.add_(0.1 * x.mean(0)))),
    both("running statistics by .data", BOUNDED, OCCASIONAL, leaves(lambda m, x: m.mean.data.add_(0.1 * x.mean(0)))),
    both("a buffer is registered anew", BOUNDED, OCCASIONAL, leaves(lambda m, x: m.register_buffer("mean", x.mean(0)))),
    both("a frozen weight is written", BOUNDED, OCCASIONAL, leaves(lambda m, x: m.scale.detach().add_(0.1 * x.mean(0)))),
    both("a trained weight is clamped in forward", REFUSED, OCCASIONAL, leaves(lambda m, x: m.last.weight.detach().clamp_(-0.1, 0.1)), "written to|modified"),
    both("a switch is turned for good", BOUNDED, OCCASIONAL, leaves(lambda m, x: setattr(m, "switch", True))),
    both("a word is changed for good", BOUNDED, CONTRIVED, leaves(lambda m, x: setattr(m, "kind", f"{float(x.mean()):.3f}"))),
    both("a list is written", BOUNDED, CONTRIVED, leaves(lambda m, x: m.listed.__setitem__(0, float(x.mean())))),
    both("an array is written", BOUNDED, CONTRIVED, leaves(lambda m, x: m.array.__setitem__(0, float(x.mean())))),
    both("a counter counts", BOUNDED, COMMON, leaves(lambda m, x: setattr(m, "count", m.count + 1))),
    both("activations are kept", BOUNDED, COMMON, leaves(lambda m, x: setattr(m, "kept", x))),
    both("a memory bank grows", BOUNDED, OCCASIONAL, leaves(grows)),
    both("a dictionary gets an entry", BOUNDED, OCCASIONAL, leaves(lambda m, x: m.options.setdefault("add", x.mean(0)))),
    both("a forward pass registers a hook", BOUNDED, CONTRIVED, leaves(registers_a_hook)),
    loop("a forward pass without a graph keeps statistics", BOUNDED, OCCASIONAL, looks_without_a_graph),
    both("a model rewrites its trained weights by .data", YOURS, CONTRIVED, why="a write by .data leaves no version behind; and weights are not compared"),
    both("state in objects two deep, closures, globals or files", YOURS, CONTRIVED, why="what a module holds is put back one level deep"),
    trainer("a loss follows the mean of its batches, in a number", BOUNDED, OCCASIONAL, with_loss(Threshold)),
    trainer("a loss follows the mean of its batches, in a closure", YOURS, CONTRIVED, why="a loss that is a function has no attributes; write a class, or a module"),
    trainer("a loss follows the mean of its batches, in a buffer", BOUNDED, OCCASIONAL, with_loss(ThresholdInABuffer)),
    loop("a criterion follows the mean of its batches, in a number", BOUNDED, OCCASIONAL, lambda: by_criterion(lambda: RunningCriterion(False), steps=2)()),
    loop("a criterion follows the mean of its batches, in a buffer", BOUNDED, OCCASIONAL, lambda: by_criterion(lambda: RunningCriterion(True), steps=2)()),
    loop("a plain loop's own loss keeps something of its batches", YOURS, OCCASIONAL, why="the library does not call it"),
    loop("weights decay between two physical batches", REFUSED, OCCASIONAL, after(decay), "written to"),
    loop("weights decay between two physical batches, by .data", YOURS, CONTRIVED, why="a write by .data leaves no version behind"),
    loop("a frozen weight is turned between two physical batches", BOUNDED, CONTRIVED, after(turn_a_frozen_weight, lambda: Remembers(lambda m, x: None))),
    loop("a switch is turned between two physical batches", BOUNDED, CONTRIVED, after(lambda p: setattr(p.model, "switch", not p.model.switch), lambda: Remembers(lambda m, x: None))),
    loop("a counter is set between two physical batches", BOUNDED, OCCASIONAL, after(lambda p: setattr(p.model, "count", p.model.count + 1), lambda: Remembers(lambda m, x: None))),
    loop("the model evaluates with a graph between two physical batches", BOUNDED, OCCASIONAL, after(lambda p: (p.model.eval()(torch.randn(4, 6)), p.model.train()))),
    loop("a step up the loss before the forward pass (SAM)", REFUSED, OCCASIONAL, write_first(ascend), "written to"),
    loop("statistics of the batch are written to a buffer", BOUNDED, OCCASIONAL, write_first(set_a_buffer, Normalises)),
    loop("statistics of the batch are set as an attribute", YOURS, CONTRIVED, why="between a step and the next batch the model is the loop's own"),
    loop("the learning rate changes in each physical batch", REFUSED, COMMON, after(lambda p: p.optimizer.param_groups[0].update(lr=p.optimizer.param_groups[0]["lr"] + 0.1)), "between"),
    loop("the optimizer counts its calls", REFUSED, OCCASIONAL, "tests/test_model_state.py::test_numbers_of_the_optimizer_change_between_draws_alone"),
    loop("momentum is halved in each physical batch", YOURS, CONTRIVED, why="moments are the loop's own; the optimizer's settings and numbers are compared"),
    loop("an average of the weights is updated in each physical batch", YOURS, OCCASIONAL, why="outside of the model and its optimizer; next: the number of physical batches is kept from the loop"),
    trainer("a loss writes trained weights by .data", YOURS, CONTRIVED, why="a write by .data leaves no version behind"),
    both("a number begins to mix the examples between draws", REFUSED, OCCASIONAL, each(Mixes, at_two(lambda m: setattr(m, "epoch", 1))), "mixes", begins=2),
    both("a word begins to mix the examples between draws", REFUSED, OCCASIONAL, each(Mixes, at_two(lambda m: setattr(m, "mode", "other"))), "mixes", begins=2),
    both("a switch of an object begins to mix the examples", REFUSED, CONTRIVED, each(Mixes, at_two(lambda m: setattr(m.options, "mixes", True))), "mixes", begins=2),
    both("a buffer begins to mix the examples", REFUSED, CONTRIVED, each(Mixes, at_two(lambda m: m.gate.fill_(1))), "mixes", begins=2),
    both("a class is swapped for one that mixes", REFUSED, CONTRIVED, each(Mixes, at_two(lambda m: setattr(m, "__class__", StillMixes))), "mixes", begins=2),
    both("a hook that mixes is registered between draws", REFUSED, OCCASIONAL, each(Scores, at_two(lambda m: m.first.register_forward_hook(lambda module, args, h: times_sign(h, m)))), "mixes", begins=2),
    both("a method that mixes is put in between draws", REFUSED, CONTRIVED, each(Scores, at_two(lambda m: setattr(m.first, "forward", lambda x: times_sign(F.linear(x, m.first.weight, m.first.bias), m)))), "mixes", begins=2),
]

ALL_ROWS = "what draws one number for all rows changes which gradients come together, and not the norm of one; settings of known models that do are refused by name"

NUMBERS = [
    both("a layer is left out for the whole batch", YOURS, OCCASIONAL, why=ALL_ROWS),
    both("a coin of Python for the whole batch", YOURS, OCCASIONAL, why=ALL_ROWS),
    both("a factor of NumPy for the whole batch", YOURS, OCCASIONAL, why=ALL_ROWS),
    both("one mask for all rows", YOURS, OCCASIONAL, why=ALL_ROWS),
    both("noise on a weight", YOURS, OCCASIONAL, why=ALL_ROWS),
    both("one vector of noise beside dropout", YOURS, CONTRIVED, why=ALL_ROWS),
    both("the first row's number for all", YOURS, CONTRIVED, why=ALL_ROWS),
    both("the mean of the rows' numbers for all", YOURS, CONTRIVED, why=ALL_ROWS),
    both("spans of NumPy and one number for all, by hand", YOURS, OCCASIONAL, why=ALL_ROWS),
    both("antithetic numbers of two rows", YOURS, OCCASIONAL, why=ALL_ROWS),
    both("transformers' LayerDrop, SpecAugment and dropout of positions", REFUSED, OCCASIONAL, "tests/test_validation.py::test_settings_that_draw_one_number_for_all_rows_are_refused"),
    both("dropout of a table that all rows read", YOURS, OCCASIONAL, why=ALL_ROWS),
    both("dropout of a table and of rows in one module", YOURS, CONTRIVED, why=ALL_ROWS),
    trainer("a loss draws one temperature for the batch", YOURS, OCCASIONAL, why=ALL_ROWS),
    loop("a criterion draws one temperature for the batch", YOURS, OCCASIONAL, why=ALL_ROWS),
    loop("a loop draws one number for the batch", YOURS, OCCASIONAL, why="what a loop draws is its own: a number for each row"),
    both("a module draws from a generator of its own for all rows", YOURS, CONTRIVED, why="a generator of one's own is not watched"),
    loop("a model sets torch's seed", REFUSED, OCCASIONAL, drawn(seeded), "seed"),
    loop("a loop sets torch's seed before it augments a batch", REFUSED, COMMON, does(seeds_after_the_batch, model=Wide, rows=wide, seed=None), "seed"),
    loop("a loop seeds NumPy before it augments a batch", YOURS, OCCASIONAL, why="generators other than torch's do not tell that they were seeded"),
    both("a checkpointed block draws from a generator of its own", REFUSED, CONTRIVED, given(OwnGenerator, lambda: points(1), mode="ghost", steps=12, check=True), "generator", begins=11),
    both("a data set augments by a seeded generator of its own", BOUNDED, COMMON, "tests/test_contract.py::test_augmentation_follows_no_seed_that_is_known"),
    both("set_seed(42) before each step", BOUNDED, COMMON, "tests/test_contract.py::test_dropout_follows_no_seed_that_is_known"),
    both("torch.cuda.manual_seed_all(0)", BOUNDED, COMMON, "tests/test_contract.py::test_a_seed_of_the_devices_does_not_matter"),
    loop("worker_init_fn seeds NumPy", BOUNDED, COMMON, "tests/test_contract.py::test_seeds_that_workers_are_given_do_not_matter"),
]

LOCALITY = [
    both("a layer takes the mean of the batch off", REFUSED, OCCASIONAL, mixing(lambda h, m: h - h.mean(0)), "mixes"),
    both("batch statistics by hand", REFUSED, COMMON, mixing(lambda h, m: F.batch_norm(h, None, None, training=True)), "mixes"),
    both("the sign of a column's sum", REFUSED, CONTRIVED, mixing(times_sign), "mixes|exact"),
    both("attention over the batch", REFUSED, OCCASIONAL, mixing(lambda h, m: (h @ h.T).softmax(1) @ h), "mixes|exact|example"),
    both("each row sees the one before it", REFUSED, CONTRIVED, mixing(lambda h, m: h + torch.tanh(torch.cat([h[:1] * 0, h[:-1]]))), "mixes|exact"),
    both("each row sees the one before it, in training alone", REFUSED, CONTRIVED, mixing(in_training(lambda h: h + torch.cat([h[:1] * 0, h[:-1]]))), "example|exact"),
    both("every second row is emptied, in training", REFUSED, CONTRIVED, mixing(in_training(lambda h: h * (place(h) % 2))), "example|exact"),
    both("rows are scaled by their number, in training", REFUSED, CONTRIVED, mixing(in_training(lambda h: h * (1 + 8 / len(h)))), "example|exact"),
    both("odd and even numbers of rows", REFUSED, CONTRIVED, mixing(lambda h, m: h + len(h) % 2), "example|exact"),
    both("the sign follows the last row", REFUSED, CONTRIVED, mixing(lambda h, m: h * torch.where(h[-1, 0] < 0, -1.0, 1.0)), "example|exact"),
    both("above a limit, all rows change", REFUSED, OCCASIONAL, mixing(lambda h, m: h * torch.where(h.max() > 30, -1.0, 1.0)), "example|exact"),
    both("gradients are scaled by the neighbour's sign, in training", REFUSED, CONTRIVED, mixing(in_training(lambda h: straight_through(h, h.detach().roll(1, 0).sum(1, keepdim=True).sign()))), "example|exact"),
    both("the batch dimension is squeezed away", REFUSED, OCCASIONAL, lambda: given(Squeezes, check=True)(), "first dimension|mixes|one"),
    both("batch_first=True was forgotten", REFUSED, COMMON, lambda: given(TimeFirst, lambda: [{"x": r["x"], "labels": r["labels"][0]} for r in tagged()()], check=True)(), "batch_first"),
    both("rows are sorted by length to pack them", REFUSED, OCCASIONAL, lambda: reading(net(sorts, **LSTM), lengths=(4, 9, 6, 12, 5, 7, 8, 10))(), "mixes|example|other"),
    both("experts with room for half of the rows", REFUSED, OCCASIONAL, lambda: given(Capacity, check=True, physical=8)(), "example|exact|mixes"),
    both("a token that one row has changes all rows", REFUSED, OCCASIONAL, rarely(lambda h, m, ids: h.mean(1) * (3.0 if bool((ids == RARE).any()) else 1.0)), "other rows|example"),
    both("the same without reading it back", REFUSED, OCCASIONAL, rarely(lambda h, m, ids: h.mean(1) * torch.where((ids == RARE).any(), 3.0, 1.0)), "other rows|example"),
    both("the same by the largest token", REFUSED, CONTRIVED, rarely(lambda h, m, ids: h.mean(1) * (1 + ids.max() // RARE)), "other rows|example"),
    both("the same by a count", REFUSED, OCCASIONAL, rarely(lambda h, m, ids: h.mean(1) + (ids == RARE).sum() / 2), "other rows|example"),
    both("the same where dropout is drawn too", REFUSED, OCCASIONAL, rarely(lambda h, m, ids: F.dropout(h.mean(1), 0.2) * (3.0 if bool((ids == RARE).any()) else 1.0)), "other rows|example"),
    both("a rare row switches all rows, in a draw that nobody looks at", YOURS, OCCASIONAL, why="next: the witness, one row alone in each of so many batches", size=15.1),
    both("a layer is called on some positions alone", REFUSED, OCCASIONAL, lambda: given(ForSome, some_flagged, physical=8, check=True)(), "mixes|neither"),
    both("a gradient is another one in training alone", REFUSED, CONTRIVED, mixing(in_training(lambda h: ScaledBack.apply(h) + h.roll(1, 0) * 0)), "training|exact|example"),
    both("a model mixes by a small probability of its own", YOURS, CONTRIVED, why="where no look meets it"),
    loop("reentrant checkpointing", REFUSED, COMMON, lambda: given(Reentrant, body=goes_back(F.cross_entropy), options=MEAN, check=True)(), "reentrant"),
    loop("BatchNorm", REFUSED, COMMON, with_module(lambda: nn.BatchNorm1d(8)), "GroupNorm"),
    loop("an Embedding with max_norm", REFUSED, OCCASIONAL, does_alone(lambda: plain_loop(given(frozen_embedding)())), "max_norm"),
    loop("InstanceNorm with running statistics", REFUSED, OCCASIONAL, with_module(lambda: nn.InstanceNorm1d(2, track_running_stats=True)), "running"),
    loop("spectral norm", REFUSED, OCCASIONAL, with_module(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))), "writes"),
    loop("sparse gradients", REFUSED, OCCASIONAL, with_module(lambda: nn.Embedding(5, 3, sparse=True)), "sparse"),
    loop("gradients by frequency", REFUSED, OCCASIONAL, with_module(lambda: nn.Embedding(5, 3, scale_grad_by_freq=True)), "scale_grad_by_freq|contain"),
    loop("a module that torch.compile made", REFUSED, COMMON, with_module(compiled), "compile"),
    loop("a hook on a parameter's gradient", REFUSED, OCCASIONAL, with_module(gradient_hook), "hook"),
    loop("weights in fp16", REFUSED, COMMON, with_module(lambda: nn.Linear(3, 2).half()), "float32"),
    loop("DataParallel", REFUSED, COMMON, engine_with(module=nn.DataParallel), "bare module"),
    loop("DeepSpeed's engine", REFUSED, COMMON, engine_with(module=DeepSpeedEngine), "bare module"),
]

EDITS = "tests/test_contract.py::test_what_is_done_to_gradients_before_the_release_meets_nothing"
CALLS = [
    loop("clip_grad_norm_ before the step", BOUNDED, COMMON, between(clips)),
    loop("zero_grad before the step", BOUNDED, COMMON, between(lambda p: p.optimizer.zero_grad())),
    loop("gradients are scaled before the step, by .data", BOUNDED, OCCASIONAL, EDITS),
    loop("gradients are scaled before the step, by NumPy", BOUNDED, CONTRIVED, EDITS),
    loop("gradients are replaced before the step", BOUNDED, CONTRIVED, between(replaces)),
    loop("step twice", REFUSED, COMMON, does(steps_twice), "one step"),
    loop("step without backward", REFUSED, OCCASIONAL, does(lambda p: (next(iter(p.loader)), p.optimizer.step())), "backward"),
    loop("two backward passes over one batch", REFUSED, COMMON, does(backward_twice), "second time"),
    loop("two backward passes over one graph", REFUSED, OCCASIONAL, does(over_one_graph), "before|second"),
    loop("gradients are accumulated over draws", REFUSED, COMMON, does(accumulates), "step"),
    loop("a draw is left by break when it is seen", REFUSED, OCCASIONAL, does(breaks_when_seen, expected=4), "drop_draw"),
    loop("draws are left out by continue", REFUSED, COMMON, does(leaves_draws_out, expected=4), "drop_draw"),
    loop("next(iter(loader)) before training", REFUSED, COMMON, does(peeks), "peek"),
    loop("batches are prefetched", REFUSED, OCCASIONAL, lambda: prefetches(plain_loop(given(options=MEAN, physical=2)())), "prefetch"),
    loop("losses of two batches go backward together", REFUSED, OCCASIONAL, lambda: several_batches_in_one(plain_loop(given(options=MEAN, physical=4)())), "one before|earlier"),
    loop("rows of another loader", REFUSED, COMMON, does(other_data), "loader"),
    loop("torch.autograd.grad", REFUSED, OCCASIONAL, does(asks_autograd), "suspended|deepcopy"),
    loop("second derivatives", REFUSED, OCCASIONAL, does(second_derivatives), "create_graph"),
    loop("another optimizer steps", REFUSED, COMMON, does(another_optimizer), "no noise|replaced|gradient"),
    loop("a copy of the optimizer steps", REFUSED, CONTRIVED, does(copied_optimizer), "no noise|replaced|gradient"),
    loop("detach between backward and step", REFUSED, CONTRIVED, does(detaches), "draw were dropped"),
    loop("an error in backward is caught, and the loop steps", REFUSED, OCCASIONAL, does(interrupted), "backward"),
    loop("optimizer.max_grad_norm is set, as Opacus's schedulers do", REFUSED, OCCASIONAL, does(sets_the_bound), "max_grad_norm"),
    loop("optimizer.noise_multiplier is set", REFUSED, OCCASIONAL, does(sets_the_noise), "noise_multiplier"),
    loop("the clipper's bound is set", REFUSED, CONTRIVED, does(sets_the_clipper), "max_grad_norm|attribute|setter"),
    loop("a step inside of suspended()", REFUSED, CONTRIVED, does(steps_inside_suspended), "suspended|noise|backward"),
    loop("losses are taken out of suspended()", REFUSED, CONTRIVED, does(takes_losses_out), "suspended|come through|outside"),
    loop("p.grad of suspended() is written to the weights by hand", YOURS, CONTRIVED, why="what a loop writes by hand is its own"),
    loop("loss.backward() beside a clipper", REFUSED, COMMON, does_alone(raw_backward), "clipper.backward|backward\\(losses\\)"),
    loop("loss.backward() where losses are to be handed over", REFUSED, COMMON, lambda: old_criterion(plain_loop(given(physical=8)())), "not clipped|backward\\("),
    loop("the private criterion's loss is divided by two", REFUSED, OCCASIONAL, lambda: scaled_criterion(plain_loop(given(options={"criterion": nn.CrossEntropyLoss(), **MEAN}, physical=8)())), "scaled"),
    loop("a parameter is frozen after make_private", REFUSED, OCCASIONAL, does(freezes), "changed"),
    loop("the optimizer gets other parameters", REFUSED, OCCASIONAL, does(adds_a_group), "not the model's"),
    loop("an optimizer misses trained parameters", REFUSED, OCCASIONAL, engine_with(optimizer=lambda m: torch.optim.SGD(m.last.parameters(), 0.1)), "misses"),
    loop("LBFGS", REFUSED, OCCASIONAL, engine_with(optimizer=lambda m: torch.optim.LBFGS(m.parameters())), "LBFGS"),
    loop("poisson_sampling=False", REFUSED, COMMON, engine_with(poisson_sampling=lambda m: False), "poisson_sampling"),
    loop("a WeightedRandomSampler", REFUSED, COMMON, engine_with(data_loader=lambda m: DataLoader(points(8), 4, sampler=WeightedRandomSampler([1.0] * 8, 8))), "WeightedRandomSampler"),
    loop("a batch_sampler", REFUSED, OCCASIONAL, engine_with(data_loader=lambda m: DataLoader(points(8), batch_sampler=[[0, 1]])), "batch_size"),
    loop("a model in evaluation mode", REFUSED, COMMON, engine_with(module=lambda m: copy.deepcopy(m).eval()), "train\\(\\)"),
    loop("a second optimizer trains parameters outside of the model", YOURS, OCCASIONAL, why="they are not the private model's; hold both in one module"),
    loop("a learning rate follows the training loss", YOURS, COMMON, why="what a loop decides by numbers without noise is its own"),
    loop("step past torch's hooks (SGD.step.__wrapped__)", YOURS, CONTRIVED, why="the hook is torch's"),
]

SETTINGS = [
    trainer("own training_step", REFUSED, COMMON, trains(cls=StepsItself), "training_step"),
    trainer("own compute_loss", REFUSED, COMMON, trains(cls=OwnLoss), "compute_loss"),
    trainer("own get_train_dataloader", REFUSED, COMMON, trains(cls=OwnLoader), "get_train_dataloader"),
    trainer("own _clip_grad_norm", REFUSED, CONTRIVED, trains(cls=OwnClipping), "_clip_grad_norm"),
    trainer("an in-house trainer before DPTrainer", REFUSED, OCCASIONAL, trains(cls=InHouseFirst), "first"),
    trainer("a Trainer before DPTrainerMixin", REFUSED, OCCASIONAL, does_alone(before_the_mixin), "before"),
    trainer("training_step is set on the trainer", REFUSED, CONTRIVED, trains(sets_a_step), "training_step"),
    trainer("DPTrainingArguments in a plain Trainer", REFUSED, COMMON, does_alone(in_plain_trainer), "without privacy"),
    trainer("fp16", REFUSED, COMMON, trains(fp16=True), "bf16"),
    trainer("dataloader_drop_last", REFUSED, COMMON, trains(dataloader_drop_last=True), "drop_last"),
    trainer("auto_find_batch_size", REFUSED, OCCASIONAL, trains(auto_find_batch_size=True), "auto_find_batch_size"),
    trainer("rows are grouped by length", REFUSED, COMMON, trains(train_sampling_strategy="group_by_length"), "random"),
    trainer("tokens are counted", REFUSED, OCCASIONAL, trains(include_num_input_tokens_seen="all"), "tokens"),
    trainer("memory is measured", REFUSED, OCCASIONAL, trains(skip_memory_metrics=False), "memory"),
    trainer("torch_compile", REFUSED, COMMON, trains(torch_compile=True), "compile"),
    trainer("Liger's kernels", REFUSED, COMMON, trains(use_liger_kernel=True), "liger|fused"),
    trainer("NEFTune", REFUSED, COMMON, trains(neftune_noise_alpha=5.0), "noise depends|neftune"),
    trainer("a layerwise optimizer", REFUSED, OCCASIONAL, trains(optim="galore_adamw_layerwise", optim_target_modules=["first"]), "before noise"),
    trainer("reentrant checkpointing is asked for", REFUSED, COMMON, does_alone(reentrant_setting), "use_reentrant"),
    trainer("overflow is debugged", REFUSED, CONTRIVED, trains(debug="underflow_overflow"), "private"),
    trainer("dataloader_drop_last is set after the trainer was made", REFUSED, CONTRIVED, trains(sets_an_argument(dataloader_drop_last=True)), "drop_last"),
    trainer("a callback accumulates gradients", REFUSED, CONTRIVED, trains(lambda made: calls_back(on_train_begin=lambda **kw: setattr(made.args, "gradient_accumulation_steps", 4))(made)), "accumulation"),
    trainer("a callback makes the model fp16", REFUSED, CONTRIVED, trains(calls_back(on_train_begin=lambda model, **kw: model.half())), "float16"),
    trainer("a callback steps with gradients of its own", REFUSED, OCCASIONAL, trains(calls_back(on_step_end=steps_with_ones)), "no noise"),
    trainer("a callback scales the released gradient", REFUSED, OCCASIONAL, trains(calls_back(on_pre_optimizer_step=scales_released)), "no noise|changed"),
    trainer("a callback gives the optimizer other parameters", REFUSED, OCCASIONAL, trains(calls_back(on_step_end=lambda optimizer, **kw: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}))), "not the model's"),
    trainer("the training rows choose the learning rate", REFUSED, OCCASIONAL, on_training_rows(lr_scheduler_type="reduce_lr_on_plateau"), "would choose"),
    trainer("the training rows choose the best checkpoint", REFUSED, OCCASIONAL, on_training_rows(load_best_model_at_end=True, save_strategy="steps", save_steps=1), "would choose"),
    trainer("the training rows choose when training stops", REFUSED, OCCASIONAL, on_training_rows(stops_early), "would choose"),
    trainer("other data are set after the trainer was made", REFUSED, OCCASIONAL, trains(lambda made: setattr(made, "train_dataset", points(20))), "rows"),
    trainer("rows are streamed", REFUSED, COMMON, does_alone(streams), "random access"),
    trainer("a delta of 1/N", REFUSED, OCCASIONAL, trains(target_delta=0.2), "1/N"),
    trainer("packing is asked for", REFUSED, COMMON, "tests/test_contract.py::test_packing_asked_for_in_the_arguments"),
    trainer("a checkpoint is resumed beside a shorter ledger", REFUSED, OCCASIONAL, "tests/test_trainer.py::test_resume_without_privacy_state_or_ledger_is_refused"),
    trainer("a callback trains beyond the budget", REFUSED, CONTRIVED, "tests/test_trainer.py::test_a_callback_cannot_train_beyond_the_budget"),
    trainer("accelerate's configuration adds what is refused", REFUSED, OCCASIONAL, "tests/test_trainer.py::test_what_the_environment_adds_is_refused"),
    both("a second training of the same model or rows", YOURS, COMMON, why="what both spend adds up, and the library knows of one"),
]

ESCAPES = [
    both("a weight is read past its module, later", REFUSED, OCCASIONAL, escapes(lambda m, h, x: F.linear(h, m.last.weight)), "come through", begins=2),
    both("a weight is read as an input, later", REFUSED, OCCASIONAL, escapes(lambda m, h, x: m.last(h + m.first.weight.mean(1))), "come through", begins=2),
    both("another weight is put in for a call", REFUSED, CONTRIVED, escapes(lambda m, h, x: torch.func.functional_call(m.last, {"weight": 20 * m.last.weight}, h)), "come through|replaced", begins=2),
    both("a gradient is written in backward", REFUSED, CONTRIVED, escapes(lambda m, h, x: WritesGradient.apply(h, [m.last.weight])), "come through", begins=2),
    loop("the loss has a penalty on the weights", REFUSED, COMMON, given(body=penalises, options=MEAN), "weight_decay|come through|backward\\("),
    trainer("the losses have a penalty on the weights", REFUSED, COMMON, lambda: given(loss=lambda model, inputs: ce(model(inputs["x"]), inputs["labels"]) + model.last.weight.square().sum(), physical=8)(), "come through|weight_decay"),
    loop("a gradient leaves a module by an attribute", REFUSED, OCCASIONAL, given(Gated, body=by_an_attribute, options=MEAN, check=True), "attribute|come through|backward\\("),
    loop("the loop calls a part of the model by itself", REFUSED, OCCASIONAL, given(body=calls_a_part, options=MEAN), "outside"),
    trainer("a loss trains a parameter of its own", REFUSED, OCCASIONAL, does_alone(own_parameter), "not the model's"),
]

PROCESSES = [
    both("processes have rows in other orders", REFUSED, OCCASIONAL, "tests/test_distributed.py::test_what_ranks_must_have_alike"),
    both("processes have half of the rows each", REFUSED, OCCASIONAL, "tests/test_distributed.py::test_what_ranks_must_have_alike"),
    both("processes have other bounds, rates or noise", REFUSED, OCCASIONAL, "tests/test_distributed.py::test_what_ranks_must_have_alike"),
    loop("one process gives a draw up", REFUSED, CONTRIVED, "tests/test_distributed.py::test_a_draw_that_one_rank_gave_up_is_not_released_with_the_next"),
    both("a batch of one process leaves something in the model", REFUSED, OCCASIONAL, "tests/test_distributed.py::test_all_ranks_are_refused_what_a_batch_of_one_left"),
    both("layouts of FSDP that are not exact", REFUSED, OCCASIONAL, "tests/test_distributed.py::test_layouts_that_are_not_exact_are_refused_by_name"),
    both("layouts of tensor parallelism that are not exact", REFUSED, OCCASIONAL, "tests/test_distributed.py::test_layouts_that_are_not_exact_are_refused_by_name"),
    both("a process group is made after the training was set up", REFUSED, OCCASIONAL, "tests/test_contract.py::test_a_process_group_that_is_made_after_the_training_was_set_up"),
]

HONEST = [
    both("a causal model, padded on the right", BOUNDED, COMMON, lambda: reading(gpt2, classes=None)()),
    trainer("targets are padded with what the loss ignores", BOUNDED, COMMON, with_targets(-100, bound=0.7)),
    trainer("targets are padded with what the loss ignores, beside sources of several lengths", BOUNDED, COMMON, with_targets(-100, bart, (4, 6, 5), bound=0.7)),
    trainer("targets are as long as sources at the most", BOUNDED, OCCASIONAL, with_targets(-100, sources=(12,), bound=0.7)),
    both("two columns are masked by their ids", BOUNDED, COMMON, of_pairs(masks=True)),
    both("two columns are masked by their ids, and one has a mask", BOUNDED, OCCASIONAL, of_pairs(True, (5, 20, 3), "document")),
    both("numbers as targets are padded with NaN", BOUNDED, OCCASIONAL, lambda: given(**{**of_series(masked_error), "rows": lambda: series((9, 4, 5, 6, 7, 8, 4, 5)), "collate": padded_series(float("nan"))})()),
    both("pairs of positions are padded in both dimensions", BOUNDED, OCCASIONAL, lambda: given(Graph, graphs, collate=padded_graphs, physical=16, check=True)()),
    both("a model has a parameter of its own", BOUNDED, COMMON, lambda: reading(lambda: Scaled(False), physical=4)()),
    both("a model has a parameter of its own, and reads numbers", BOUNDED, OCCASIONAL, lambda: reading(lambda: Scaled(True), physical=4)()),
    both("a target happens to be as long as a padded source", BOUNDED, OCCASIONAL, lambda: given(Translates, translated, collate=padding_all, check=True, loss=lambda o, y: F.cross_entropy(o.transpose(1, 2), y, reduction="none").mean(1))()),
    both("a batch has no row of some task", BOUNDED, OCCASIONAL, given(Heads, lambda: [{**row, "task": torch.tensor(i % 3)} for i, row in enumerate(points(12))], check=True)),
    trainer("a model returns an object of its own", BOUNDED, OCCASIONAL, given(GivesAnObject, check=True)),
    trainer("a loss draws negatives for each row", BOUNDED, OCCASIONAL, given(loss=lambda s, y: ce(s, y) + 0 * s.gather(1, torch.randint(0, 3, (len(y), 2))).sum(1), physical=8, check=True)),
    both("the collator drops words", BOUNDED, COMMON, reading(bert, of_random_lengths(drops), range(4, 14))),
    both("the collator takes a part of each row", BOUNDED, COMMON, reading(bert, of_random_lengths(crops), range(4, 14))),
    both("the collator takes one of several texts", BOUNDED, OCCASIONAL, reading(bert, of_random_lengths(chooses), range(4, 14))),
]

# fmt: on
TABLE = {
    f"{room}: {each.what}": each
    for room, found in {
        "data": DATA,
        "padding": PADDING,
        "losses": LOSSES,
        "losses that compare rows": COMPARES,
        "state": STATE,
        "random numbers": NUMBERS,
        "locality": LOCALITY,
        "calls": CALLS,
        "settings": SETTINGS,
        "parameters": ESCAPES,
        "processes": PROCESSES,
        "honest": HONEST,
    }.items()
    for each in found
}  # fmt: skip


REFUSALS = (ValueError, TypeError, AttributeError, RuntimeError)  # what the library raises for users


@dataclass
class Found:
    """What came of a violation."""

    outcome: str
    message: str = ""
    moved: float = 0.0
    released: int = 0  # steps before it was refused

    def agrees_with(self, line: Violation) -> bool:
        """A refusal that nothing needs any more, since what it refused is bounded, is none the worse."""
        if self.outcome == REFUSED:
            is_named = re.search(line.says, self.message, re.IGNORECASE | re.DOTALL)
            return line.outcome == REFUSED and bool(is_named) and self.released <= line.begins
        return self.outcome == BOUNDED and line.outcome in (BOUNDED, REFUSED)


def outcome_of(line: Violation, loop: str) -> Found:
    """Do it, where it trains with and without one row."""
    assert callable(line.make)
    try:
        made = line.make()
    except REFUSALS as error:
        return Found(REFUSED, f"{type(error).__name__}: {error}")
    if not isinstance(made, Task):
        return Found("wrong", "nothing was refused")
    noted = Noted(made)
    try:
        steps = moves(loop, made, line.row, line.make(), noted)
    except REFUSALS as error:
        return Found(REFUSED, f"{type(error).__name__}: {error}", released=len(noted.sums))
    drawn = max((move for with_it, move in steps if with_it), default=0.0)
    others = max((move for with_it, move in steps if not with_it), default=0.0)
    is_bounded = 1e-3 < drawn <= 1 + 1e-5 and others <= 1e-5
    return Found(BOUNDED if is_bounded else "wrong", moved=max(drawn, others))
