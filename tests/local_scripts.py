"""What a script of Hugging Face is run on here: local files, tiny random models with their tokenizers, and stand-ins
for the packages that would fetch metrics."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"w{i}" for i in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
_SIZE = len(WORDS) + len(SPECIAL)
TASKS = {
    "classification": lambda: hf.BertForSequenceClassification(hf.BertConfig(vocab_size=_SIZE, **_BERT)),
    "tagging": lambda: hf.BertForTokenClassification(hf.BertConfig(vocab_size=_SIZE, **_BERT)),
    "masked": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=_SIZE, **_BERT)),
    "questions": lambda: hf.BertForQuestionAnswering(hf.BertConfig(vocab_size=_SIZE, **_BERT)),
    "causal": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=_SIZE, n_embd=8, n_layer=1, n_head=2, n_positions=64, bos_token_id=2, eos_token_id=3)
    ),
    "summaries": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=_SIZE, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0,
                 pad_token_id=0, eos_token_id=3)
    ),
}  # fmt: skip


def tokenizer(task: str) -> hf.PreTrainedTokenizerFast:
    """A tokenizer of whole words, which puts what a model of the task expects around a text."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if task != "causal":
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        single, pair = (
            ("$A [SEP]", "$A $B [SEP]") if task == "summaries" else ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
        )
        words.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="[SEP]", model_max_length=64,
    )  # fmt: skip


def model(task: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return TASKS[task]()


def save_model(task: str, folder: Path) -> Path:
    """Write a model of the task and its tokenizer into a folder, as the Hub would give them."""
    path = folder / f"{task}-model"
    model(task).save_pretrained(path)
    tokenizer(task).save_pretrained(path)
    return path


def documents(number: int, longest: int, seed: int = 0) -> list[list[str]]:
    """Lists of words of many lengths."""
    choose = random.Random(seed)
    return [choose.choices(WORDS, k=choose.randint(4, longest)) for _ in range(number)]


def write_files(folder: Path, number: int = 60) -> dict[str, Path]:
    """Write what the scripts read, ``number`` rows each, and return the files by task."""
    texts = documents(number, 20)
    files = {
        "classification": folder / "classes.csv", "tagging": folder / "tags.json", "masked": folder / "texts.txt", "causal": folder / "texts.txt",
        "questions": folder / "questions.json", "summaries": folder / "summaries.csv",
    }  # fmt: skip
    _write_csv(files["classification"], ["sentence1", "label"], [(" ".join(t), i % 2) for i, t in enumerate(texts)])
    tags = [{"tokens": t, "ner_tags": ["O" if int(w[1:]) % 3 else "B-PER" for w in t]} for t in texts]
    files["tagging"].write_text("".join(json.dumps(row) + "\n" for row in tags))
    files["causal"].write_text("\n".join(" ".join(t) for t in texts))
    rows = []
    for i, words in enumerate(documents(number, 40)):
        answer = {"text": [words[-1]], "answer_start": [len(" ".join(words[:-1])) + 1]}
        rows.append({"id": str(i), "title": "t", "context": " ".join(words), "question": "w1 w2", "answers": answer})
    files["questions"].write_text(json.dumps({"data": rows}))
    _write_csv(files["summaries"], ["text", "summary"], [(" ".join(t), " ".join(t[:3])) for t in texts])
    return files


def _write_csv(path: Path, header: list[str], rows: list[tuple]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


STAND_INS = {
    "evaluate": """
        class Metric:
            def __init__(self): self.rows = 0
            def add_batch(self, predictions=None, references=None): self.rows += len(references)
            def compute(self, predictions=None, references=None, **others):
                rows = self.rows + (0 if references is None else len(references))
                keys = ("accuracy", "f1", "exact_match", "rouge1", "rouge2", "rougeL", "rougeLsum")
                overall = {"overall_" + key: 0.5 for key in ("precision", "recall", "f1", "accuracy")}
                return {**{key: 0.5 for key in keys}, **overall, "rows": rows}
        def load(*args, **kwargs): return Metric()
    """,
    "nltk": """
        class data:
            @staticmethod
            def find(name): return name
        def sent_tokenize(text): return text.split(" . ")
    """,
}


def write_stand_ins(folder: Path) -> Path:
    """Write modules that take the place of packages whose metrics come from the Hub; a folder for PYTHONPATH."""
    import textwrap

    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder
