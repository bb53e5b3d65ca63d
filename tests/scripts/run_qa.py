"""Answer questions: the interfaces of Hugging Face's script of this name, in its order, and not private."""

import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from trainer_qa import QuestionAnsweringTrainer
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Where the model is."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "Questions to train on."})
    validation_file: str = field(metadata={"help": "Questions to evaluate on."})
    max_seq_length: int = field(default=24, metadata={"help": "Tokens in a window."})
    doc_stride: int = field(default=8, metadata={"help": "Tokens that two windows share."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)])
    logger.warning(f"device: {training_args.device}, n_gpu: {training_args.n_gpu}")
    logger.info(f"Training parameters {training_args}")
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset(
        "json", data_files=files, field="data", cache_dir=os.path.join(training_args.output_dir, "cache")
    )
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForQuestionAnswering.from_pretrained(model_args.model_name_or_path, config=config)

    def prepare_train_features(examples):
        rows = tokenizer(
            examples["question"], examples["context"], truncation="only_second", max_length=data_args.max_seq_length,
            stride=data_args.doc_stride, return_overflowing_tokens=True, return_offsets_mapping=True,
            padding="max_length",
        )  # fmt: skip
        owners, offsets = rows.pop("overflow_to_sample_mapping"), rows.pop("offset_mapping")
        rows["start_positions"], rows["end_positions"] = [], []
        for i, spans in enumerate(offsets):
            start = examples["answers"][owners[i]]["answer_start"][0]
            at = [t for t, (a, b) in enumerate(spans) if rows.sequence_ids(i)[t] == 1 and a <= start < b]
            rows["start_positions"].append(at[0] if at else 0)
            rows["end_positions"].append(at[0] if at else 0)
        return rows

    train_dataset = raw["train"]
    if training_args.do_train:
        with training_args.main_process_first(desc="train dataset map pre-processing"):
            train_dataset = train_dataset.map(
                prepare_train_features,
                batched=True,
                remove_columns=raw["train"].column_names,
                desc="Running tokenizer on train dataset",
            )
    eval_examples = raw["validation"]
    eval_dataset = eval_examples.map(prepare_train_features, batched=True, remove_columns=eval_examples.column_names)

    def post_processing_function(examples, predictions):
        starts = np.argmax(predictions[0], axis=1)
        return EvalPrediction(predictions=starts, label_ids=np.zeros(len(starts)))

    def compute_metrics(p):
        return {"exact_match": float((p.predictions == p.label_ids).mean())}

    trainer = QuestionAnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        eval_examples=eval_examples if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        post_process_function=post_processing_function,
        compute_metrics=compute_metrics,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    card = {"finetuned_from": model_args.model_name_or_path, "tasks": "question-answering"}
    if training_args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)


if __name__ == "__main__":
    main()
