"""Rows that are collated alone and joined by the library are the batches that the collator makes itself."""

import copy
import dataclasses
import logging
import os
import random
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import default_collate

from dp_transformers.data.columns import are_same, tensors_of
from dp_transformers.data.draws import LogicalBatches
from dp_transformers.data.joining import Joiner
from dp_transformers.data.ways_to_join import Column
from dp_transformers.mechanism.sampling import Draw
from dp_transformers.runtime.randomness import SecretSeeds

DRAWS = int(os.environ.get("DRAWS_OF_COLLATORS", "5"))  # of 12 rows each
PAD, WORDS = 3, range(5, 100)


def tokenizer(side):
    words = {f"w{i}": i for i in WORDS} | {"[PAD]": PAD, "[MASK]": 4, "[UNK]": 2}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]",
        unk_token="[UNK]", padding_side=side,
    )  # fmt: skip


def words(draw, low=3, high=40):
    return [draw.choice(WORDS) for _ in range(draw.randint(low, high))]


def text(draw, **columns):
    ids = words(draw)
    return {"input_ids": ids, "attention_mask": [1] * len(ids), **columns}


def classified(draw):
    row = text(draw, labels=draw.randrange(3))
    first = len(row["input_ids"]) // draw.choice([1, 1, 2])  # often one sentence, and then the padding is like it
    return {**row, "token_type_ids": [int(i >= first) for i in range(len(row["input_ids"]))]}


def tagged(draw):
    row = text(draw)
    return {**row, "labels": [draw.randrange(5) for _ in row["input_ids"]]}


def choices(draw):
    texts = [text(draw) for _ in range(3)]
    return {k: [x[k] for x in texts] for k in texts[0]} | {"label": draw.randrange(3)}


def preference(draw):
    return {name: words(draw) for name in ("prompt_ids", "chosen_ids", "rejected_ids")}


def image(draw):
    return torch.randn(3, draw.randint(4, 9), draw.randint(4, 9)), draw.randrange(3)


def of_trl(module, name):
    return lambda side: getattr(pytest.importorskip(f"trl.trainer.{module}"), name)(pad_token_id=PAD)


def pairs_as_rows(side):
    from dp_transformers.trl.base import PairsAsRows

    return PairsAsRows(of_trl("dpo_trainer", "DataCollatorForPreference")(side))


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    of: dict


def sequences(rows):
    return [torch.tensor(row["input_ids"]) for row in rows]


def labels(rows):
    return torch.tensor([row["labels"] for row in rows])


def images(rows):
    """As DETR's processors: padded to the largest, with a mask, and a list of what cannot be stacked."""
    shape = [max(x.shape[d] for x, _ in rows) for d in (1, 2)]
    x, mask = torch.zeros(len(rows), 3, *shape), torch.zeros(len(rows), *shape)
    for i, (each, _) in enumerate(rows):
        x[i, :, : each.shape[1], : each.shape[2]], mask[i, : each.shape[1], : each.shape[2]] = each, 1
    boxes = [{"boxes": torch.ones(y, 4), "name": str(y)} for _, y in rows]
    return UserDict(pixel_values=x, pixel_mask=mask, labels=boxes)


def placed(rows):
    ids = pad_sequence(sequences(rows), True)
    return {"x": ids, "position_ids": torch.arange(ids.shape[1])[None].repeat(len(rows), 1), "longest": ids.shape[1]}


def patches(rows):
    """As many patches of an image as it has words, beside one row of words."""
    x = torch.cat([ids[:, None].expand(-1, 2).float() for ids in sequences(rows)])
    return {"pixel_values": x, "input_ids": pad_sequence(sequences(rows), True, PAD)}


def packed(rows):
    rows = sorted(rows, key=lambda row: -len(row["input_ids"]))
    return pack_sequence(sequences(rows)), labels(rows)


def bags(rows, *, with_last=False):
    starts = torch.tensor(np.cumsum([0, *map(len, sequences(rows))]))
    return torch.cat(sequences(rows)), starts if with_last else starts[:-1], labels(rows)


def normalised(rows):
    """Each channel is padded with black, which is another number in each."""
    black = torch.tensor([-1.0, -2.0, -3.0])[:, None, None]
    batch = images(rows)
    x, mask = batch["pixel_values"], batch["pixel_mask"][:, None]
    return [x * mask + black * (1 - mask)]


def by_channel(rows):
    x = pad_sequence(sequences(rows), True, 0.5 * PAD).float()
    return Batch(x[:, None].expand(-1, 2, -1), {"mask": x.numpy() == 0, "n": 7, "names": ["a"] * len(rows)})


COLLATORS = {  # by name: what makes it for a side, and a row
    "DataCollatorWithPadding": (lambda side: hf.DataCollatorWithPadding(tokenizer(side)), classified),
    "in multiples": (lambda side: hf.DataCollatorWithPadding(tokenizer(side), pad_to_multiple_of=8), classified),
    "to one length": (lambda side: hf.DataCollatorWithPadding(tokenizer(side), "max_length", 48), classified),
    "DataCollatorForSeq2Seq": (lambda side: hf.DataCollatorForSeq2Seq(tokenizer(side)), lambda draw: text(draw, labels=words(draw))),
    "DataCollatorForTokenClassification": (lambda side: hf.DataCollatorForTokenClassification(tokenizer(side)), tagged),
    "DataCollatorForLanguageModeling": (lambda side: hf.DataCollatorForLanguageModeling(tokenizer(side), mlm=False), text),
    "DataCollatorForMultipleChoice": (lambda side: hf.DataCollatorForMultipleChoice(tokenizer(side)), choices),
    "default_data_collator": (lambda side: hf.default_data_collator, lambda draw: {"x": [draw.random()] * 3, "label": draw.randrange(3)}),
    "TRL's for texts": (of_trl("sft_trainer", "DataCollatorForLanguageModeling"), text),
    "TRL's for preferences": (of_trl("dpo_trainer", "DataCollatorForPreference"), preference),
    "TRL's for rewards": (of_trl("reward_trainer", "DataCollatorForPreference"), preference),
    "pairs as rows": (pairs_as_rows, preference),
    "default_collate": (lambda side: default_collate, lambda draw: (torch.randn(2, 3), {"y": draw.random(), "name": "a"})),
    "pad_sequence": (lambda side: lambda rows: Pair(pad_sequence(sequences(rows), padding_side=side), labels(rows)), classified),
    "squeezed": (lambda side: lambda rows: torch.stack([torch.tensor(x) for x in rows]).squeeze(), lambda draw: [draw.random()] * 3),
    "positions for all rows": (lambda side: lambda rows: {"x": pad_sequence(sequences(rows), True), "at": torch.arange(max(map(len, sequences(rows))))}, text),
    "positions of each row": (lambda side: placed, text),
    "lists of rows": (lambda side: lambda rows: tuple(zip(*rows, strict=True)), image),
    "images of all sizes": (lambda side: images, image),
    "a number for each channel": (lambda side: normalised, image),
    "an object": (lambda side: by_channel, text),
    "patches": (lambda side: patches, text),
    "PackedSequence": (lambda side: lambda rows: (pack_sequence(sequences(rows), enforce_sorted=False), labels(rows)), classified),
    "longest first": (lambda side: packed, classified),
    "bags": (lambda side: bags, classified),
    "bags with their end": (lambda side: lambda rows: bags(rows, with_last=True), classified),
}  # fmt: skip


def tensors(batch):
    """All of its tensors by path, rows of a PackedSequence padded."""
    parts = enumerate(batch) if isinstance(batch, tuple) else [("", batch)]
    unpacked = {k: pad_packed_sequence(x) if isinstance(x, PackedSequence) else x for k, x in parts}
    return dict(tensors_of(unpacked))


def joined(joiner, collate, rows):
    joiner._together = lambda keys, purpose: collate(
        [dict(rows[k]) if isinstance(rows[k], dict) else rows[k] for k in keys]
    )
    singles = [joiner._together([i], "") for i in range(len(rows))]
    joiner.begin(singles, range(len(rows)))
    return joiner.join(singles)[0]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", COLLATORS)
def test_joined_rows_are_the_batch_of_the_collator(name, side, caplog):
    make, row = COLLATORS[name]
    collate, draw = make(side), random.Random(name + side)
    joiner = Joiner(None, 12)
    with caplog.at_level(logging.WARNING):
        for _ in range(DRAWS):
            rows = [row(draw) for _ in range(12)]
            made = joined(joiner, collate, rows)
            own = collate(rows)
            assert type(made) is type(own)
            ours, theirs = tensors(made), tensors(own)
            assert ours.keys() == theirs.keys()
            for k, x in theirs.items():
                assert ours[k].dtype == x.dtype and are_same(ours[k], x), k
            assert collate is not placed or made["longest"] == own["longest"]
    assert not caplog.records


def with_decoder_inputs(side):
    config = hf.T5Config(
        vocab_size=100,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
    )
    return hf.DataCollatorForSeq2Seq(tokenizer(side), hf.T5ForConditionalGeneration(config))


KNOWN = ("DataCollatorWithPadding", "DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling", "default_data_collator", "default_collate")  # fmt: skip


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [*KNOWN, "decoder inputs"])
def test_known_collators_make_the_same_of_several_examples(name, side):
    """The same batch and sizes as of each alone."""
    make, row = COLLATORS.get(name, (with_decoder_inputs, COLLATORS["DataCollatorForSeq2Seq"][1]))
    collate, draw = make(side), random.Random(name + side)
    rows, sizes = [row(draw) for _ in range(12)], []

    class Apart:
        def __call__(self, rows):
            sizes.append(len(rows))
            return collate(rows)

    together, alone = (LogicalBatches(rows, c, 12, SecretSeeds(1)) for c in (collate, Apart()))
    (batch,) = together[Draw(0, range(12))].batches
    if name == "decoder inputs":
        assert are_same(batch.rows["decoder_input_ids"], collate.model._shift_right(batch.rows["labels"]))
        assert batch.sizes["labels"] == batch.sizes["decoder_input_ids"]
        return
    (other,) = alone[Draw(0, range(12))].batches
    ours, theirs = tensors(batch.rows), tensors(other.rows)
    assert ours.keys() == theirs.keys() and all(are_same(x, theirs[k]) for k, x in ours.items())
    assert batch.sizes == other.sizes
    assert {*sizes} <= {1, 2}


@pytest.mark.parametrize(
    ("name", "one", "other", "message"), [
        ("default_collate", (1,), (2.5,), "of what type"),
        ("default_collate", (torch.ones(2),), (torch.ones(2).double(),), "of what type"),
        ("default_collate", {"x": 1}, {"x": 2, "y": 3}, "whether 'y'"),
        ("default_data_collator", {"x": [1, 2]}, {"x": [1.0, 2.5]}, "of what type"),
        ("default_data_collator", {"x": [1], "y": None}, {"x": [1], "y": [2]}, "whether 'y'"),
        ("DataCollatorWithPadding", {"input_ids": [5], "label": 1}, {"input_ids": [6], "label": 1.5}, "of what type"),
        ("DataCollatorWithPadding", {"input_ids": [5]}, {"input_ids": [6], "token_type_ids": [1]}, "whether 'token_type"),
    ],
)  # fmt: skip
def test_examples_decide_no_type_and_no_column_of_a_known_collator(name, one, other, message):
    rows = [copy.deepcopy(row) for row in (one, other, one, other)]
    with pytest.raises(ValueError, match=message):
        LogicalBatches(rows, COLLATORS[name][0]("right"), 4, SecretSeeds(1))[Draw(0, range(4))]


def test_pairs_with_a_common_example_are_no_proof_of_a_number():
    column = Column(fill=torch.tensor([[3.0]]), sides={1: "right"}, pairs=[frozenset((0, 1)), frozenset((1, 2))])
    assert not column.is_known(1)
    column.pairs.append(frozenset((2, 3)))
    assert column.is_known(1)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
def test_random_masks_are_padded_as_the_collator_does(side, is_known):
    collator, draw = hf.DataCollatorForLanguageModeling(tokenizer(side), mlm_probability=0.3), random.Random(0)
    collate = collator if is_known else lambda rows: collator(rows)
    batches = LogicalBatches([text(draw) for _ in range(30)], collate, 30, SecretSeeds(1))
    (batch,) = batches[Draw(0, range(30))].batches
    own_bt = batch.rows["attention_mask"].bool()
    assert 5 < (batch.rows["labels"] != -100).sum(1).float().mean() < 9
    assert (batch.rows["input_ids"][~own_bt] == PAD).all() and (batch.rows["labels"][~own_bt] == -100).all()
    own = {1: (side, own_bt.sum(1).tolist())}
    assert batch.sizes == dict.fromkeys(("input_ids", "attention_mask", "labels"), own)


def rows_of(*sizes):
    return [{"x": torch.full((n,), float(n)), "i": i} for i, n in enumerate(sizes)]


def with_x(f):
    return lambda rows: {"x": f([row["x"] for row in rows])}


def edge(xs):
    longest = max(map(len, xs))
    return torch.stack([torch.cat([x, x[-1:].expand(longest - len(x))]) for x in xs])


def block_diagonal(xs):
    """Causal masks in which padding sees the row's own positions."""
    own_bt = pad_sequence([torch.ones(len(x), dtype=torch.bool) for x in xs], True)
    return (own_bt[:, None] & torch.ones(*own_bt.shape[1:] * 2, dtype=torch.bool).tril())[:, None]


REFUSED = {
    "flattened": (hf.DataCollatorWithFlattening(), [{"input_ids": [5] * n} for n in (3, 4, 5, 6)], "made one row of 2 examples"),
    "windows": (with_x(lambda xs: torch.cat([x.unfold(0, 2, 2) for x in xs])), rows_of(4, 6, 8, 10), "makes 5 rows of one example"),
    "none": (with_x(lambda xs: torch.stack(xs)[:0]), rows_of(4, 4, 4, 4), "makes no rows of one example"),
    "cut to the shortest": (with_x(lambda xs: torch.stack([x[: min(map(len, xs))] for x in xs])), rows_of(4, 5, 6, 7), "does not pad them"),
    "padded with numbers of a row": (with_x(edge), rows_of(4, 5, 6, 7), "with other numbers for other examples"),
    "padded with the largest number": (with_x(lambda xs: pad_sequence(xs, True, float(max(map(max, xs))))), rows_of(4, 4, 4, 7), "not seen in two pairs"),
    "pairs of positions": (lambda rows: {"mask": block_diagonal([row["x"] for row in rows])}, rows_of(4, 5, 6, 7), "masks of pairs of positions"),
    "a column of some rows": (lambda rows: {"y": torch.ones(len(rows)), **({"x": rows[0]["x"][None]} if rows[0]["i"] else {})}, rows_of(4, 4, 4), "whether 'x' is in a batch"),
    "two types": (lambda rows: {"x": torch.tensor([row["i"] / 2 if row["i"] else 0 for row in rows])}, rows_of(1, 1, 1), "of what type 'x'"),
    "None for some": (lambda rows: {"x": rows[0]["x"][None] if rows[0]["i"] else None}, rows_of(4, 4, 4), "'x'.*a NoneType or a Tensor"),
    "a number for all": (lambda rows: {"x": torch.ones(len(rows)), "n": max(row["i"] for row in rows)}, rows_of(1, 2, 3), "'n'.*for the whole batch"),
    "a tensor for all": (lambda rows: {"x": torch.ones(len(rows)), "n": torch.tensor(max(row["i"] for row in rows))}, rows_of(1, 2, 3), "'n'.*for the whole batch"),
    "a nested tensor": (with_x(torch.nested.nested_tensor), rows_of(3, 4, 5), "nested tensor.*mask"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_joined_is_refused(kind):
    collate, rows, message = REFUSED[kind]
    batches = LogicalBatches(rows, collate, 8, SecretSeeds(1))
    with pytest.raises(ValueError, match=message):
        batches[Draw(0, range(len(rows)))]


@pytest.mark.parametrize("seed", range(8))
def test_draws_of_two_rows_are_padded_as_the_data_set_shows(seed):
    """With lengths that the collator draws, and a number that is no usual one."""

    def cropped(xs):
        return pad_sequence([x[: random.randint(1, len(x))] for x in xs], True, PAD)

    batches = LogicalBatches(rows_of(*range(20, 60)), with_x(cropped), 2, SecretSeeds(seed))
    for number in range(3):
        x = batches[Draw(number, [11 + number, 37])].batches[0].rows["x"]
        assert {*x.unique().tolist()} <= {PAD, 31.0 + number, 57.0}


@pytest.mark.parametrize("number", [0, -100])
def test_one_longer_row_is_enough_for_usual_numbers(number):
    collate = with_x(lambda xs: pad_sequence(xs, True, number))
    x = LogicalBatches(rows_of(4, 4, 7), collate, 3, SecretSeeds(1))[Draw(0, range(3))].batches[0].rows["x"]
    assert (x[:2, 4:] == number).all()


def mix_up(rows):
    x, y = torch.stack([row["x"] for row in rows]), torch.tensor([row["i"] for row in rows])
    return {"x": 0.7 * x + 0.3 * x.roll(1, 0), "labels": y}


def augmented(rows):
    return {"x": torch.stack([row["x"] + torch.randn(4) for row in rows])}


@pytest.mark.parametrize(
    "collate", [mix_up, lambda rows: {"x": mix_up(rows)["x"] - mix_up(rows)["x"].mean(0)}, augmented]
)
def test_what_is_done_across_examples_does_nothing_and_is_said_once(collate, caplog):
    rows = [{"x": torch.randn(4), "i": i} for i in range(8)]
    batches = LogicalBatches(rows, collate, 8, SecretSeeds(1))
    with caplog.at_level(logging.WARNING):
        first, other = (batches[Draw(n, [i, 7])].batches[0].rows["x"] for n, i in ((0, 1), (1, 2)))
    assert len(caplog.records) == (collate is not augmented)
    if collate is mix_up:
        assert "two examples together" in caplog.text
        torch.testing.assert_close(first, torch.stack([rows[1]["x"], rows[7]["x"]]))
        torch.testing.assert_close(other, torch.stack([rows[2]["x"], rows[7]["x"]]))


def test_no_row_of_a_batch_changes_when_another_example_does():
    """But for its padding."""

    class OfOneself(hf.DataCollatorForLanguageModeling):
        """Of a class that is not known, and so given one example at a time."""

    draw = random.Random(0)
    rows = [text(draw) for _ in range(12)]
    collate = OfOneself(tokenizer("right"))

    def own_rows(rows):
        batch = LogicalBatches(rows, collate, 12, SecretSeeds(1))[Draw(0, range(12))].batches[0].rows
        rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True)
        return {tuple(torch.cat([ids[own], y[own]]).tolist()) for ids, y, own in rows}

    other = text(draw)
    assert len(own_rows(rows) & own_rows([*rows[:4], other, *rows[5:]])) == 11
