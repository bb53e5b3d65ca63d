"""Rows made of documents: none holds pieces of two, and of one there are no more than a bound."""

import random
import re
from collections import Counter
from itertools import chain
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from local_scripts import tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

from dp_transformers import DPTrainer, DPTrainingArguments, first_rows_of_each, keep_documents_apart, padded_blocks
from dp_transformers.data.documents import owners_of_rows

pytestmark = pytest.mark.halved


def documents(number=40, longest=30, seed=0):
    """Tokenized documents; token ids say whose they are: those of document i are i · 100 and up."""
    choose = random.Random(seed)
    lengths = [choose.randint(0, longest) for _ in range(number)]
    ids = [[100 * (i + 1) + t for t in range(length)] for i, length in enumerate(lengths)]
    return {"input_ids": ids, "attention_mask": [[1] * len(d) for d in ids]}


def group_texts(batch, size=8):
    """What scripts do that train causal language models: one long text, cut into blocks."""
    joined = {name: list(chain(*values)) for name, values in batch.items()}
    return {name: [v[i : i + size] for i in range(0, len(v) // size * size, size)] for name, v in joined.items()}


def owners(rows):
    return [
        {token // 100 - 1 for token, own in zip(ids, mask, strict=True) if own}
        for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize("max_rows", [1, 2, 100])
def test_a_row_has_one_owner_and_an_owner_few_rows(max_rows):
    given = documents()
    assert any(len(o) > 1 for o in owners(group_texts(given))), "blocks of the joined text have several owners"
    for prepare in (group_texts, padded_blocks(8)):
        data = Dataset.from_dict(given).map(keep_documents_apart(prepare, max_rows), batched=True, batch_size=7)
        whose = owners(data)
        assert all(len(o) == 1 for o in whose)
        counts = [sum(o == {i} for o in whose) for i in range(len(given["input_ids"]))]
        blocks = [len(d) // 8 if prepare is group_texts else -(-len(d) // 8) for d in given["input_ids"]]
        assert counts == [min(max_rows, made) for made in blocks]


def test_no_token_is_lost_or_added_within_the_bound():
    given = documents()
    rows = keep_documents_apart(padded_blocks(8), 100)(given)
    kept = [
        [t for t, own in zip(ids, mask, strict=True) if own]
        for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)
    ]
    assert list(chain(*kept)) == list(chain(*given["input_ids"]))
    assert {len(r) for values in rows.values() for r in values} == {8}
    labels = [
        [t if own else -100 for t, own in zip(ids, mask, strict=True)]
        for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)
    ]
    assert rows["labels"] == labels


def test_one_document_more_or_less_changes_its_own_rows_alone():
    given = documents()
    less = {name: values[:5] + values[6:] for name, values in given.items()}
    prepare = keep_documents_apart(padded_blocks(8), 2)
    with_it, without = (list(map(tuple, prepare(d)["input_ids"])) for d in (given, less))
    gone = [row for row in with_it if row not in without]
    assert [row for row in with_it if row in without] == without
    assert 1 <= len(gone) <= 2 and all(row[0] // 100 == 6 for row in gone)


def test_windows_of_a_tokenizer_are_bounded_too():
    words = tokenizer("questions")
    texts = [" ".join(f"w{(i + j) % 60}" for j in range(n)) for i, n in enumerate([3, 40, 7, 25])]

    def windows(batch):
        made = words(batch["text"], max_length=12, stride=4, truncation=True, return_overflowing_tokens=True)
        return {"input_ids": made["input_ids"], "of": made["overflow_to_sample_mapping"]}

    free, bounded = windows({"text": texts}), keep_documents_apart(windows, 2)({"text": texts})
    assert [free["of"].count(i) for i in range(4)] == [1, 6, 1, 4]
    assert len(bounded["input_ids"]) == 1 + 2 + 1 + 2
    first = [[ids for ids, of in zip(free["input_ids"], free["of"], strict=True) if of == i][:2] for i in range(4)]
    assert bounded["input_ids"] == list(chain(*first))


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_a_person_are_bounded(seed):
    choose = random.Random(seed)
    names = choose.choices("abcde", k=60)
    kept = first_rows_of_each(names, 3)
    assert kept == sorted(set(kept))
    assert all(
        [i for i in kept if names[i] == n] == [i for i, m in enumerate(names) if m == n][:3] for n in set(names)
    )
    without = [i for i, n in enumerate(names) if n != "a"]
    others = first_rows_of_each([names[i] for i in without], 3)
    assert [without[i] for i in others] == [i for i in kept if names[i] != "a"]


@pytest.mark.parametrize(
    "form", [list, torch.tensor, np.array, pa.array, lambda ids: [[i] for i in ids], lambda ids: [UUID(int=i) for i in ids]],
)  # fmt: skip
def test_owners_are_compared_by_what_they_hold(form):
    """Each tensor was an owner of its own, so that every row was kept."""
    assert first_rows_of_each(form([1, 1, 2, 1, 2]), 1) == [0, 2]


@pytest.mark.parametrize("seed", range(5))
def test_each_of_several_owners_is_bounded(seed):
    """With one owner for each row this is the bound of that owner; and a row that is left out could not be kept."""
    choose = random.Random(seed)
    rows = [choose.sample("abcdefg", choose.randint(1, 3)) for _ in range(60)]
    kept = first_rows_of_each(rows, 4)
    counts = Counter(chain(*(rows[i] for i in kept)))
    assert max(counts.values()) == 4
    for i in set(range(60)) - set(kept):
        before = Counter(chain(*(rows[j] for j in kept if j < i)))
        assert any(before[owner] == 4 for owner in rows[i])
    assert first_rows_of_each([*map(set, rows)], 4) == kept == first_rows_of_each([*map(tuple, rows)], 4)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (["a", None], "row 1 has the owner None"),
        (["a", ""], "row 1 has the owner ''"),
        ([1.0, float("nan")], "row 1 has the owner nan"),
        ([pd.NA, 1], "row 0 has the owner <NA>"),
        (["a", []], "row 1 has the owner None"),
        (["a", ["b", None]], "row 1 has the owner None"),
        ([object(), object()], "does not equal the owner of its other rows"),
        ([{"id": 3}], "does not equal the owner of its other rows"),
        ([7, "7"], "row 0 has an owner of type int, and row 1 one of type str"),
        ([7, 8, 7.0], "row 0 has an owner of type int, and row 2 one of type float"),
        ([True, 1], "bool, and row 1 one of type int"),
        ([["a", "b"], [1]], "row 0 has an owner of type str, and row 1 one of type int"),
    ],
)
def test_a_person_has_one_name(column, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        owners_of_rows(column)
    with pytest.raises(ValueError, match=re.escape(said)):
        first_rows_of_each(column, 1)


def test_an_owner_of_most_rows_is_warned_of(caplog):
    assert owners_of_rows(["a", ["b", "a"], ("b",), "c"]) == ["a", frozenset("ab"), "b", "c"]
    assert not caplog.messages
    owners_of_rows(np.array([0, 3, 0, 4, 0]))
    assert "One owner has 3 of 5 rows" in caplog.text


def test_rows_keep_the_columns_of_their_document():
    """Its owner, which ``prepare`` would drop or change, and its index, with which a document is the unit."""
    given = documents() | {"author": [f"a{i % 7}" for i in range(40)]}
    free = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}

    def changes_the_author(batch):
        rows = padded_blocks(8)({name: batch[name] for name in free})
        return rows | {"author": ["somebody"] * len(rows["input_ids"])}

    for max_rows in (None, 2):
        prepare = keep_documents_apart(changes_the_author, max_rows, keep=["author"])
        data = Dataset.from_dict(given).map(
            prepare, batched=True, batch_size=7, with_indices=True, remove_columns=list(given)
        )
        plain = Dataset.from_dict(free).map(keep_documents_apart(padded_blocks(8), max_rows or 100), batched=True)
        assert data["input_ids"][:] == plain["input_ids"][:]
        assert [{i} for i in data["document"]] == owners(data)
        assert data["author"][:] == [f"a{i % 7}" for i in data["document"]]
    with pytest.raises(KeyError, match="patient"):
        keep_documents_apart(padded_blocks(8), keep=["patient"])(free)


def test_padded_blocks_train(tmp_path):
    """A causal language model trains on them, with default_data_collator, and the padding changes no gradient."""
    choose = random.Random(0)
    given = {"input_ids": [[choose.randint(1, 29) for _ in range(choose.randint(1, 20))] for _ in range(40)]}
    given["attention_mask"] = [[1] * len(d) for d in given["input_ids"]]
    rows = Dataset.from_dict(given).map(keep_documents_apart(padded_blocks(8), 2), batched=True)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2)
    )
    args = DPTrainingArguments(
        str(tmp_path), target_epsilon=8.0, target_delta=1e-3, expected_batch_size=10, max_steps=2, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", max_examples_per_person=2,
    )  # fmt: skip
    trainer = DPTrainer(model, args, train_dataset=rows, data_collator=default_data_collator)
    assert trainer.train().metrics["epsilon_per_person"] <= 8.0
    assert trainer.privacy_spent().verified
