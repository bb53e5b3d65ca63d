"""Fine-tune a transformer for text classification with differential privacy.

With no arguments: MiniLM (22.7 M parameters) with LoRA on 10,568 movie-review sentences at epsilon = 8, on the CPU in a few minutes:

    python recipes/text_classification.py

Your own model and data, all parameters, a GPU, several processes:

    accelerate launch recipes/text_classification.py --model_name_or_path roberta-base --train_file reviews.csv \\
        --full --target_epsilon 3 --target_delta 1e-6 --expected_batch_size 1024 --learning_rate 5e-4 --bf16

The same training without privacy, for comparison:

    python recipes/text_classification.py --noise_multiplier 0 --max_grad_norm 1000000
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import assets
import numpy as np
import torch
from datasets import Dataset, DatasetDict, load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, HfArgumentParser, set_seed

from dp_transformers import DPTrainer, DPTrainingArguments


@dataclass
class DataArguments:
    """What to train on, and from where to start."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of a model; default: all-MiniLM-L6-v2, fetched with pip."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Hub id of a dataset, or the folder of one."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of that dataset."})
    train_file: str | None = field(default=None, metadata={"help": "A .csv, .json or .jsonl file with one example per row."})
    validation_file: str | None = field(
        default=None, metadata={"help": "Held-out examples in the same format; default: a random fifth of the training data."}
    )
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    label_column: str = field(default="label", metadata={"help": "Column with the class."})
    max_length: int = field(default=128, metadata={"help": "Longer texts are truncated to this many tokens."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only this many training examples."})


@dataclass
class ModelArguments:
    """Which parameters to train."""

    full: bool = field(default=False, metadata={"help": "Train all parameters instead of LoRA adapters."})
    head_only: bool = field(default=False, metadata={"help": "Train the classification head only, the body stays frozen."})
    lora_r: int = field(default=8, metadata={"help": "Rank of the LoRA adapters."})
    lora_alpha: int = field(default=16, metadata={"help": "LoRA scale: alpha / r multiplies the adapter."})
    lora_target_modules: str = field(
        default="auto", metadata={"help": "Modules that get an adapter: comma-separated names, all-linear, or auto (peft's choice)."}
    )
    dropout: float = field(default=0.0, metadata={"help": "Dropout of the model; the noise of DP is regularisation enough."})


@dataclass
class Arguments(DPTrainingArguments):
    """The recipe's defaults; every flag of TrainingArguments works too."""

    output_dir: str | None = field(default="outputs/text_classification", metadata={"help": "Where model and ledger go."})
    target_epsilon: float | None = field(default=None, metadata={"help": "Privacy budget; default 8 unless noise_multiplier is given."})
    target_delta: float | None = field(default=1e-5, metadata={"help": "The delta of (epsilon, delta); smaller than 1/N."})
    expected_batch_size: int | None = field(default=512, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Physical batch size; no influence on the result."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Batch size of the evaluation."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the data, on average."})
    learning_rate: float = field(default=1e-2, metadata={"help": "Peak learning rate; private training wants larger ones."})
    save_strategy: str = field(default="no", metadata={"help": "When to save checkpoints to resume from."})
    dataloader_pin_memory: bool = field(default_factory=torch.cuda.is_available, metadata={"help": "Pin batches for the GPU."})

    def __post_init__(self) -> None:
        if self.target_epsilon is None and self.noise_multiplier is None:
            self.target_epsilon = 8.0
        super().__post_init__()


def load_data(args: DataArguments, seed: int) -> DatasetDict:
    if args.train_file:
        extension = Path(args.train_file).suffix.lstrip(".").replace("jsonl", "json")
        files = {"train": args.train_file} | ({"test": args.validation_file} if args.validation_file else {})
        data = load_dataset(extension, data_files=files)
    elif args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
        held_out = next((name for name in ("validation", "test", "validation_matched") if name in data), None)
        data = DatasetDict({"train": data["train"]} | ({"test": data[held_out]} if held_out else {}))
    else:
        data = DatasetDict({"train": Dataset.from_list(assets.movie_sentences())})
    for column in (args.text_column, args.label_column):
        if column not in data["train"].column_names:
            raise SystemExit(f"the data has no column '{column}', only {data['train'].column_names}: set --text_column and --label_column.")
    if "test" not in data:
        data = data["train"].train_test_split(test_size=0.2, seed=seed)
    if args.max_train_samples:
        data["train"] = data["train"].shuffle(seed=seed).select(range(min(args.max_train_samples, len(data["train"]))))
    return data


def tokenize(data: DatasetDict, args: DataArguments, tokenizer) -> tuple[DatasetDict, list]:
    """Tokenized data with integer labels, and the class names. The classes are taken as public."""
    classes = sorted(set(data["train"][args.label_column]))
    index = {name: i for i, name in enumerate(classes)}

    def encode(rows):
        encoded = tokenizer(rows[args.text_column], truncation=True, max_length=args.max_length)
        return {**encoded, "labels": [index[label] for label in rows[args.label_column]]}

    return data.map(encode, batched=True, remove_columns=data["train"].column_names, desc="tokenizing"), classes


def build_model(path: str, num_labels: int, args: ModelArguments):
    config = AutoConfig.from_pretrained(path, num_labels=num_labels)
    for name in (
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "dropout",
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
    ):
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, args.dropout)
    model = AutoModelForSequenceClassification.from_pretrained(path, config=config, dtype=torch.float32)
    if args.full:
        return model
    if args.head_only:
        head = {id(p) for name in ("classifier", "score") for p in getattr(model, name, torch.nn.Module()).parameters()}
        for p in model.parameters():
            p.requires_grad_(id(p) in head)
        return model
    targets = {"auto": None, "all-linear": "all-linear"}.get(args.lora_target_modules, args.lora_target_modules.split(","))
    return get_peft_model(
        model,
        LoraConfig(task_type=TaskType.SEQ_CLS, r=args.lora_r, lora_alpha=args.lora_alpha, lora_dropout=0.0, target_modules=targets),
    )


def lora_movement(model) -> float | None:
    """Frobenius norm of all adapters' products BA together; B starts at zero, so this is how far LoRA has moved the model."""
    products = [
        (m.lora_B["default"].weight.detach() @ m.lora_A["default"].weight.detach()).square().sum()
        for m in model.modules()
        if hasattr(m, "lora_A") and "default" in getattr(m, "lora_A", {})
    ]
    return float(torch.stack(products).sum().sqrt()) if products else None


def main() -> dict:
    parser = HfArgumentParser((DataArguments, ModelArguments, Arguments), description=__doc__.splitlines()[0])
    data_args, model_args, args = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("dp_transformers").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)  # peft
    set_seed(args.seed)

    model_path = data_args.model_name_or_path or str(assets.minilm_folder())
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    data, classes = tokenize(load_data(data_args, seed=args.seed), data_args, tokenizer)
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
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    spent = trainer.privacy_spent()
    report = {**spent.to_dict(), "test_accuracy": accuracy, "majority_baseline": majority, "lora_BA_norm": lora_movement(model)}
    if trainer.is_world_process_zero():
        Path(args.output_dir, "privacy_report.json").write_text(json.dumps(report, indent=2))
        print_table(report, args)
    return report


def print_table(report: dict, args: Arguments) -> None:
    rows = {
        "epsilon": f"{report['epsilon']:.3f}" if args.noise_multiplier != 0 else "infinite: NOT PRIVATE",
        "delta": f"{report['delta']:g}",
        "noise multiplier (sigma)": f"{report['noise_multiplier']:.4f}",
        "sampling rate (q)": f"{report['sample_rate']:.5f}  ({report['expected_batch_size']} of {report['num_examples']} examples expected per step)",
        "steps": f"{report['steps']}",
        "clipping bound (C)": f"{report['max_grad_norm']:g}",
        "test accuracy": f"{report['test_accuracy']:.4f}",
        "majority baseline": f"{report['majority_baseline']:.4f}",
    }
    if report["lora_BA_norm"] is not None:
        rows["LoRA moved: |BA|"] = f"{report['lora_BA_norm']:.4f}  (0 before training)"
    rows["model, ledger, report"] = args.output_dir
    width = max(map(len, rows))
    print("\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()))


if __name__ == "__main__":
    try:
        main()
    except (assets.AssetError, ValueError) as error:
        sys.exit(f"error: {error}")
