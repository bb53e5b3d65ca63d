"""Summarise texts with an encoder and a decoder (T5, BART, ...), with differential privacy.

With no arguments: a T5 of 0.1 M parameters with random weights learns to say in a few words what a telephone call was
about and what was done, from 16,000 notes that are made by rule, at epsilon = 8, on the CPU in a few minutes:

    python recipes/summarization.py

Your own model and data, a GPU, several processes:

    accelerate launch recipes/summarization.py --model_name_or_path google-t5/t5-small --source_prefix "summarize: " \\
        --dataset_name knkarthick/samsum --text_column dialogue --max_length 512 --learning_rate 1e-3 --bf16

The same training without privacy, for comparison:

    python recipes/summarization.py --twin

One row, a text with its summary, is what is protected. The result is the F1 of the words that a summary has in common
with the one that was written for the text (ROUGE-1 without stemming), over held-out texts. Its baseline is the better
of two: the text's first words, and the summary of another text.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import call_notes
import fine_tuning
import numpy as np
import torch
from datasets import DatasetDict
from outcome import Outcome
from peft import TaskType
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from dp_transformers import DPTrainer
from dp_transformers.losses.heads import IGNORE_INDEX


@dataclass
class DataArguments(fine_tuning.DataArguments):
    """The training data, and the model to start from."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of a model; default: a small T5 with random weights."}
    )
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    summary_column: str = field(default="summary", metadata={"help": "Column with the summary."})
    source_prefix: str = field(default="", metadata={"help": "What is put before each text, such as 'summarize: '."})
    max_length: int = field(default=128, metadata={"help": "Longer texts are truncated to this many tokens."})
    max_target_length: int = field(default=64, metadata={"help": "Longer summaries are truncated, in tokens."})


@dataclass
class ModelArguments(fine_tuning.ModelArguments):
    """The parameters that are trained; the small T5 is always trained whole."""


@dataclass
class Arguments(fine_tuning.Arguments):
    """The recipe's defaults; every flag of TrainingArguments works too."""

    output_dir: str | None = field(default="outputs/summarization", metadata={"help": "Where model and ledger go."})
    expected_batch_size: int | None = field(default=1024, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(
        default=256, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=256, metadata={"help": "Batch size of the evaluation."})
    num_train_epochs: float = field(default=6.0, metadata={"help": "Passes over the data, on average."})
    learning_rate: float = field(default=1e-2, metadata={"help": "Peak learning rate; larger under DP."})


def small_t5() -> tuple[T5ForConditionalGeneration, PreTrainedTokenizerFast]:
    """A T5 with random weights, and the words that the rule of the notes uses; names are unknown to it."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *call_notes.vocabulary()])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    config = T5Config(
        vocab_size=len(vocabulary),
        d_model=64,
        d_kv=16,
        num_heads=4,
        d_ff=128,
        num_layers=1,
        num_decoder_layers=1,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return freeze_positions(T5ForConditionalGeneration(config)), tokenizer


def freeze_positions(model):
    """T5's biases of relative positions stay as they are: for their gradients every example would be run alone."""
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            parameter.requires_grad_(False)
    return model


def tokenize(data: DatasetDict, args: DataArguments, tokenizer) -> DatasetDict:
    def encode(rows):
        texts = [args.source_prefix + text for text in rows[args.text_column]]
        encoded = tokenizer(texts, truncation=True, max_length=args.max_length)
        written = tokenizer(text_target=rows[args.summary_column], truncation=True, max_length=args.max_target_length)
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": written["input_ids"],
        }

    return data.map(encode, batched=True, remove_columns=data["train"].column_names, desc="tokenizing")


def build_model(path: str, args: ModelArguments):
    config = AutoConfig.from_pretrained(path)
    config.dropout_rate = args.dropout  # T5's name for it
    config = fine_tuning.set_dropout(config, args.dropout)
    model = AutoModelForSeq2SeqLM.from_pretrained(path, config=config, dtype=torch.float32)
    return freeze_positions(model) if args.full else fine_tuning.add_lora(model, args, TaskType.SEQ_2_SEQ_LM)


@torch.no_grad()
def summarise(model, tokenizer, texts: list[list[int]], batch_size: int, longest: int) -> list[str]:
    """The likeliest continuation, token by token, for every text."""
    model.eval()
    written = []
    for i in range(0, len(texts), batch_size):
        batch = tokenizer.pad({"input_ids": texts[i : i + batch_size]}, return_tensors="pt").to(model.device)
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=longest,
            do_sample=False,
            num_beams=1,
        )
        written += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return written


def overlap(written: list[str], right: list[str]) -> float:
    """The mean F1 of the words that two summaries have in common."""
    scores = []
    for pair in zip(written, right, strict=True):
        ours, theirs = (Counter(text.lower().split()) for text in pair)
        scores.append(2 * sum((ours & theirs).values()) / max(1, sum((ours + theirs).values())))
    return float(np.mean(scores))


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(__doc__, DataArguments, ModelArguments, Arguments)
    with args.main_process_first(desc="fetching and tokenizing"):
        if path := data_args.model_name_or_path:
            tokenizer = AutoTokenizer.from_pretrained(fine_tuning.check_model_name(path))
            fine_tuning.check_length(max(data_args.max_length, data_args.max_target_length), tokenizer)
        else:
            small_model, tokenizer = small_t5()
        columns = {"text_column": data_args.text_column, "summary_column": data_args.summary_column}
        rows = fine_tuning.read_examples(data_args, call_notes.summaries, columns, seed=args.seed)
        data = tokenize(rows, data_args, tokenizer)
        fine_tuning.check_batch(args, len(data["train"]))
    model = build_model(path, model_args) if path else small_model

    trainer = DPTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=IGNORE_INDEX),
    )
    fine_tuning.train(trainer)
    texts = list(data["test"]["input_ids"])
    written = summarise(model, tokenizer, texts, args.per_device_eval_batch_size, data_args.max_target_length)
    trainer.save_model()

    right = list(rows["test"][data_args.summary_column])
    length = round(float(np.mean([len(summary.split()) for summary in right])))
    first_words = [" ".join(text.split()[:length]) for text in rows["test"][data_args.text_column]]
    another = random.Random(args.seed).choices(right, k=len(right))
    baseline = max(overlap(first_words, right), overlap(another, right))
    outcome = Outcome("F1 of words", overlap(written, right), "trivial summaries", baseline, len(right))
    return fine_tuning.report(trainer, outcome)


if __name__ == "__main__":
    fine_tuning.run(main)
