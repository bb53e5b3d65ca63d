"""Write a synthetic table that reads like a private one, from a language model that was trained on it privately.

    dp-transformers train synthetic_data

With no table named: 19,609 answers of 6,127 persons in a health registry, at epsilon = 8 for a person with all answers
of hers, on the CPU in a few minutes. Your own table, with what its columns may hold and whose a row is:

    dp-transformers train synthetic_data --train_file table.csv --schema schema.json --privacy_unit_column patient_id

The schema is public: bounds and categories that were read off the rows would tell of them. --draft_schema schema.json
writes one to begin with, which a person has to go through; tables.py says what stands in it.

A row becomes one token for each value, numbers in bins, and a small GPT-2 with random weights learns to write rows,
column by column. Only the tokens of a column may stand in its place, so that every row that is written is within the
schema. synthetic.csv follows from the model alone: epsilon covers it, however many rows are written. What is compared
with real rows at the end, on the screen and in privacy_report.json, is not covered and stays with you.

The same without privacy, for comparison: the same command with --twin.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import assets
import fine_tuning
import numpy as np
import pandas as pd
import tables
import torch
from datasets import Dataset
from outcome import Outcome, print_table
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    set_seed,
)

from dp_transformers import DPTrainer, WeightAverage

AVERAGED = 0.98  # decay of the moving average of the weights
EXAMPLE = Path(__file__).with_name("configs") / "synthetic_data.yaml"
MINE = ("train_file",)  # if it is given, the example's settings are not taken
YES_NO = {"type": "category", "values": ["0", "1"]}
PATIENTS = {  # from the questions that were asked, not from the answers
    "year": {"type": "integer", "min": 1984, "max": 1988},
    "female": YES_NO,
    "age": {"type": "integer", "min": 25, "max": 64, "bins": 20},
    "edlevel": {"type": "category", "values": ["1", "2", "3", "4"]},
    "educ": {"type": "number", "min": 7, "max": 18, "bins": 22, "decimals": 1},
    "married": YES_NO,
    "kids": YES_NO,
    "outwork": YES_NO,
    "self": YES_NO,
    "hhninc": {"type": "number", "edges": [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 10, 15, 30]},
    "docvis": {"type": "integer", "edges": [0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60, 130]},
    "hospvis": {"type": "integer", "edges": [0, 1, 2, 3, 5, 10, 60]},
}


@dataclass
class DataArguments:
    """The table and its schema, and the rows that are written."""

    train_file: str | None = field(
        default=None, metadata={"help": "A .csv file; default: answers in a health registry, fetched with pip."}
    )
    schema: str | None = field(
        default=None, metadata={"help": "A .json file: what each column may hold, see tables.py."}
    )
    draft_schema: str | None = field(
        default=None, metadata={"help": "Write a first schema for train_file there, which is NOT PRIVATE, and stop."}
    )
    target_column: str | None = field(
        default=None,
        metadata={"help": "The column that a classifier predicts, by synthetic and by real rows; default: the last."},
    )
    num_rows: int = field(default=10_000, metadata={"help": "The number of rows that are written."})


@dataclass
class ModelArguments:
    """The model that writes rows."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A model of this recipe for the same schema, such as one of public rows."}
    )
    hidden_size: int = field(default=32, metadata={"help": "Width of the model."})
    num_layers: int = field(default=1, metadata={"help": "Number of its layers."})


@dataclass
class Arguments(fine_tuning.Arguments):
    """The recipe's defaults; every flag of TrainingArguments works too."""

    output_dir: str | None = field(
        default="outputs/synthetic_data", metadata={"help": "Where model, ledger and synthetic.csv go."}
    )
    expected_batch_size: int | None = field(default=1024, metadata={"help": "Expected number of examples in a step."})
    per_device_train_batch_size: int = field(
        default=512, metadata={"help": "Physical batch size; no influence on the result."}
    )
    per_device_eval_batch_size: int = field(default=1024, metadata={"help": "The number of rows written at a time."})
    max_steps: int = field(default=200, metadata={"help": "Number of steps."})
    max_grad_norm: float = field(
        default=0.1, metadata={"help": "The clipping bound C: L2 norm of one example's gradient."}
    )
    learning_rate: float = field(default=3e-2, metadata={"help": "Peak learning rate; larger under DP."})


class HeldToSchema(LogitsProcessor):
    """Allows at each place of a row the tokens of its column alone.

    Args:
        allowed: (columns, tokens).
    """

    def __init__(self, allowed: torch.Tensor) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(~self.allowed[input_ids.shape[1] - 1].to(scores.device), -torch.inf)


def read(args: DataArguments, owner: str | None) -> tuple[pd.DataFrame, dict | None]:
    """Return the table, all values as texts, and its schema; None if a first one was to be written."""
    if args.train_file and not Path(args.train_file).is_file():
        raise ValueError(f"there is no file '{args.train_file}'.")
    rows = pd.read_csv(args.train_file or io.BytesIO(assets.patients()), dtype=str, keep_default_na=False)
    if owner is not None and owner not in rows:
        raise ValueError(f"the table has no column '{owner}', only {list(rows)}: set --privacy_unit_column.")
    if owner is not None and (rows[owner].str.strip() == "").any():
        raise ValueError(f"column '{owner}' names no owner in some rows: fill it in, or leave these rows out.")
    if args.draft_schema:
        tables.draft(rows, args.draft_schema, owner)
        return rows, None
    if args.schema:
        return rows, json.loads(Path(args.schema).read_text())
    if args.train_file:
        raise ValueError("a table needs --schema FILE; --draft_schema FILE writes a first one, to be gone through.")
    return rows, PATIENTS


def hold_out(owners: np.ndarray, seed: int) -> np.ndarray:
    """Return whether each row is held out: all rows of a fifth of the owners."""
    persons = np.random.default_rng(seed).permutation(np.unique(owners))
    return np.isin(owners, persons[: max(1, len(persons) // 5)])


def as_examples(codes: np.ndarray, owners: np.ndarray, owner: str | None, schema: tables.Schema) -> Dataset:
    """Return rows of tokens, which a row's beginning comes before, and whose they are."""
    tokens = np.pad(codes + schema.first_tokens, ((0, 0), (1, 0)))
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens} | ({owner: owners} if owner else {}))


def build_model(args: ModelArguments, schema: tables.Schema):
    """Return a GPT-2 with a token for each value of each column, or the one that is to be trained on."""
    tokens, columns = 1 + sum(schema.sizes), len(schema.columns)
    if args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(fine_tuning.check_model_name(args.model_name_or_path))
        if model.config.vocab_size != tokens:
            raise ValueError(f"{args.model_name_or_path} is for another schema: leave --model_name_or_path out.")
        return model
    config = GPT2Config(
        vocab_size=tokens,
        n_positions=1 + columns,
        n_embd=args.hidden_size,
        n_layer=args.num_layers,
        n_head=max(1, args.hidden_size // 16),
        bos_token_id=0,
        eos_token_id=None,
        initializer_range=args.hidden_size**-0.5,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(fine_tuning.set_dropout(config, 0.0))
    with torch.no_grad():  # each place begins near the tokens of its column, so that no step has to learn the schema
        near = torch.nn.init.orthogonal_(torch.empty(columns, args.hidden_size)) * 12 / args.hidden_size**0.5
        model.transformer.wpe.weight[:-1] += near
        model.lm_head.weight.copy_(schema.allowed().T.float() @ near)
    return model


@torch.no_grad()
def write(model, schema: tables.Schema, num_rows: int, batch_size: int, held: bool = True) -> np.ndarray:
    """Return the codes (num_rows, columns) of new rows; unless ``held`` is set, some may be of another column."""
    model.eval()
    held_to = LogitsProcessorList([HeldToSchema(schema.allowed())] if held else [])
    written = []
    for begun in torch.zeros(num_rows, 1, dtype=torch.long, device=model.device).split(batch_size):
        tokens = model.generate(
            begun,
            attention_mask=torch.ones_like(begun),
            logits_processor=held_to,
            max_new_tokens=len(schema.columns),
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        written.append(tokens[:, 1:].cpu().numpy() - schema.first_tokens)
    return np.concatenate(written)


def hand_over(args: Arguments, schema: tables.Schema, specs: dict, codes: np.ndarray) -> pd.DataFrame:
    """Write synthetic.csv, the schema, and what ties both to model and certificate; return the rows."""
    folder = Path(args.output_dir)
    file = folder / "synthetic.csv"
    schema.decode(codes, np.random.default_rng(args.seed)).to_csv(file, index=False)
    (folder / "schema.json").write_text(json.dumps(specs, indent=1))
    names = ["synthetic.csv", "schema.json", "model.safetensors", "privacy.json"]
    digests = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names if (folder / name).is_file()
    }
    (folder / "synthetic.json").write_text(json.dumps({"rows": len(codes), "sha256": digests}, indent=1))
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def compare(synthetic: np.ndarray, train: np.ndarray, test: np.ndarray, target: str, schema: tables.Schema) -> dict:
    """Return how far synthetic rows are from those of the training, beside held-out rows, and what a classifier learns
    from them. None of this is private."""
    figures: dict = {}
    for name, rows in (("synthetic", synthetic), ("held out", test)):
        near = tables.nearest(rows[: len(test)], train, schema)
        figures[name] = {
            "columns": tables.marginals(rows, train, schema),
            "pairs": tables.pairs(rows, train, schema),
            "copies": float((near < 1e-6).mean()),
            "nearest, 5% within": float(np.quantile(near, 0.05)),
            "nearest, median": float(np.median(near)),
        }
    place = [column.name for column in schema.columns].index(target)
    tokens = {"synthetic": synthetic, "real": train, "test": test}
    tokens = {name: np.delete(rows + schema.first_tokens, place, 1) for name, rows in tokens.items()}
    for name, rows in (("synthetic", synthetic), ("real", train)):
        figures[f"accuracy by {name} rows"] = tables.accuracy(
            tokens[name], rows[:, place], tokens["test"], test[:, place]
        )
    figures["most frequent value"] = float(np.mean(test[:, place] == np.bincount(train[:, place]).argmax()))
    number = min(len(synthetic), len(test))
    figures["told from real rows"] = tables.told_apart(synthetic[:number], test[:number], schema)
    return figures


def in_words(figures: dict, target: str) -> dict[str, str]:
    """Return the lines of the table; points are hundredths of the total variation distance."""

    def beside(describe) -> str:
        return f"{describe(figures['synthetic'])}  (held-out rows: {describe(figures['held out'])})"

    def points(values) -> str:
        return f"{100 * np.mean(values):.1f} points apart, {100 * max(values):.1f} at most"

    moved = [f"{name}: {n} {what}" for name, of in figures["values moved"].items() for what, n in of.items() if n]
    return {
        "values outside": "; ".join(moved) or "none",
        "rows within the schema": f"{figures['valid']:.1%}  "
        f"({figures['valid, not held']:.1%} if the model is not held to it)",
        "each column": beside(lambda of: points(list(of["columns"].values()))),
        "each pair of columns": beside(lambda of: points(of["pairs"])),
        "copies of a training row": beside(lambda of: f"{of['copies']:.1%}"),
        "distance of the nearest": beside(
            lambda of: f"{of['nearest, median']:.4f}, of 5% below {of['nearest, 5% within']:.4f}"
        ),
        f"{target} classified": f"{figures['accuracy by synthetic rows']:.1%} by synthetic rows, "
        f"{figures['accuracy by real rows']:.1%} by real ones, {figures['most frequent value']:.1%} by none",
        "told from real rows": f"{figures['told from real rows']:.1%}  (50% by a coin)",
    }


def evaluate(trainer: DPTrainer, data_args: DataArguments, schema: tables.Schema, real: tuple, specs: dict) -> dict:
    """Write the rows that are handed over, and return how they compare with the ``real`` ones."""
    model, batch_size = trainer.model, trainer.args.per_device_eval_batch_size
    set_seed(trainer.args.seed)
    new = write(model, schema, data_args.num_rows, batch_size)
    synthetic, written, _ = schema.encode(hand_over(trainer.args, schema, specs, new))
    free = write(model, schema, min(len(new), 2000), batch_size, held=False)
    within = ((free >= 0) & (free < schema.sizes)).all(1)
    figures = {"valid": float(written.mean()), "valid, not held": float(within.mean())}
    return figures | compare(synthetic, *real, data_args.target_column, schema)


def main() -> dict:
    data_args, model_args, args = fine_tuning.parse_arguments(
        __doc__, DataArguments, ModelArguments, Arguments, example=EXAMPLE, mine=MINE
    )
    owner = args.privacy_unit_column
    with args.main_process_first(desc="fetching"):
        rows, specs = read(data_args, owner)
    if specs is None:
        print(f"wrote {data_args.draft_schema}, which is read off the rows: go through it before you train by it")
        return {}
    schema = tables.Schema.of(specs)
    codes, kept, moved = schema.encode(rows)
    target = data_args.target_column = data_args.target_column or list(specs)[-1]
    if target not in specs:
        raise ValueError(f"the schema has no column '{target}', only {list(specs)}: set --target_column.")
    owners = rows[owner].to_numpy()[kept] if owner else np.arange(len(codes))
    held_out = hold_out(owners, args.seed)
    fine_tuning.check_batch(args, len(np.unique(owners[~held_out])))

    trainer = DPTrainer(
        model=build_model(model_args, schema),
        args=args,
        train_dataset=as_examples(codes[~held_out], owners[~held_out], owner, schema),
        callbacks=[WeightAverage(AVERAGED)],
    )
    fine_tuning.train(trainer)
    trainer.save_model()
    if not trainer.is_world_process_zero():
        return trainer.privacy_spent().to_dict()
    figures = {"values moved": moved} | evaluate(
        trainer, data_args, schema, (codes[~held_out], codes[held_out]), specs
    )
    scores = figures["accuracy by synthetic rows"], "most frequent value", figures["most frequent value"]
    outcome = Outcome(f"accuracy ({target})", *scores, int(held_out.sum()))
    report = fine_tuning.report(trainer, outcome, {"real rows": figures})
    print(f"\n  {data_args.num_rows} rows: {args.output_dir}/synthetic.csv")
    print("\n  Beside real rows; not covered by epsilon, stays with you:")
    print_table(in_words(figures, target))
    return report


if __name__ == "__main__":
    fine_tuning.run(main)
