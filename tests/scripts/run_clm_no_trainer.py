"""Train a causal language model in a loop with accelerate: the interfaces of Hugging Face's script of this name, in its
order, and not private."""

import argparse
import json
import math
import os
import random
from itertools import chain

import torch
from accelerate import Accelerator, DistributedType
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

logger = get_logger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    for name in ("model_name_or_path", "train_file", "validation_file", "output_dir", "checkpointing_steps"):
        parser.add_argument(f"--{name}", type=str)
    for name, default in {"block_size": 16, "num_warmup_steps": 0, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
                          "gradient_accumulation_steps": 1, "num_train_epochs": 2, "seed": 0, "max_train_steps": None}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning_rate", type=float, default=5e-2)
    parser.add_argument("--with_tracking", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    tracking = {"log_with": "tensorboard", "project_dir": args.output_dir} if args.with_tracking else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps, **tracking)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

    files = {"train": args.train_file, "validation": args.validation_file}
    with accelerator.main_process_first():
        raw_datasets = load_dataset("text", data_files=files, cache_dir=os.path.join(args.output_dir, "cache"))
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, config=config)
    with accelerator.main_process_first():
        tokenized = raw_datasets.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
    block_size = min(args.block_size, tokenizer.model_max_length)

    def group_texts(examples):
        joined = {name: list(chain(*examples[name])) for name in examples}
        length = len(joined["input_ids"]) // block_size * block_size
        blocks = {name: [t[i : i + block_size] for i in range(0, length, block_size)] for name, t in joined.items()}
        return {**blocks, "labels": blocks["input_ids"]}

    names = [name for name in tokenized["train"].column_names if name not in ("input_ids", "attention_mask")]
    tokenized = tokenized.remove_columns(names)
    with accelerator.main_process_first():
        lm_datasets = tokenized.map(
            group_texts,
            batched=True,
            desc=f"Blocks of {block_size}",
        )
    train_dataset, eval_dataset = lm_datasets["train"], lm_datasets["validation"]
    for index in random.sample(range(len(train_dataset)), 3):
        logger.info(f"Sample {index} of the training set: {train_dataset[index]}.")
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=default_data_collator, batch_size=args.per_device_eval_batch_size
    )

    decayed = [p for n, p in model.named_parameters() if "bias" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=args.learning_rate
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler(
        "linear", optimizer, num_warmup_steps=args.num_warmup_steps, num_training_steps=args.max_train_steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    if accelerator.distributed_type == DistributedType.TPU:
        model.tie_weights()
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    checkpointing_steps = args.checkpointing_steps
    if checkpointing_steps is not None and checkpointing_steps.isdigit():
        checkpointing_steps = int(checkpointing_steps)
    if args.with_tracking:
        accelerator.init_trackers("clm_no_trainer", {})

    completed_steps = 0
    for epoch in range(args.num_train_epochs):
        model.train()
        total_loss = 0
        active_dataloader = train_dataloader
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
            if isinstance(checkpointing_steps, int) and completed_steps % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))
            if completed_steps >= args.max_train_steps:
                break
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)

            loss = outputs.loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(args.per_device_eval_batch_size)))
        perplexity = math.exp(torch.cat(losses).mean())
        logger.info(f"epoch {epoch}: perplexity {perplexity}")
        if args.with_tracking:
            accelerator.log(
                {
                    "perplexity": perplexity,
                    "train_loss": total_loss.item() / len(train_dataloader),
                    "epoch": epoch,
                },
                step=completed_steps,
            )
    if args.output_dir is not None:
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(
            args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )
        if accelerator.is_main_process:
            tokenizer.save_pretrained(args.output_dir)
            with open(os.path.join(args.output_dir, "all_results.json"), "w") as f:
                json.dump({"perplexity": perplexity, "learning_rate": lr_scheduler.get_last_lr()[0]}, f)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
