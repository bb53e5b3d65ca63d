"""What privacy costs in texts that are written: SmolLM2 defines a noun of WordNet, given with its class.

    apt-get install wordnet-base
    pip install -e ".[bench,recipes]"
    python -m benchmarks.definitions
    python -m benchmarks.definitions --data_dir FOLDER --epsilons 8 inf

The language model's recipe with adapters in the last two layers, on definitions drawn at random, as prompts and
completions; tested on others. Perplexity is the recipe's; BLEU is sacreBLEU's, of the likeliest tokens one after
another, beside the definition of the dictionary. As in benchmarks.accuracy, a result is a line of the results file, a
run that is in the file is not run again, and the table of the page comes from the file.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .accuracy import ROOT, groups, read, run
from .glosses import CLASSES, nouns
from .harness import Row, machine
from .pages import with_table

RESULTS = Path(__file__).with_name("definitions.jsonl")
PAGE = ROOT / "docs" / "accuracy.md"
RECIPE = ROOT / "recipes" / "causal_lm.py"
TRAINED, TESTED = 8_192, 500  # rows
FLAGS = (
    "--prompt_column prompt --lora_layers 2 --expected_batch_size 512 --num_train_epochs 2 --max_new_tokens 0 "
    f"--max_length 48 --max_eval_samples {TESTED} --use_cpu"
)
MOST_WRITTEN = 32  # tokens of a definition


def main(argv: Sequence[str] | None = None) -> None:
    import sacrebleu  # noqa: F401  (who lacks it should know before the training)

    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--data_dir", type=Path, default="/usr/share/wordnet", help="has data.noun of WordNet 3.0")
    p.add_argument("--epsilons", nargs="+", type=float, default=[8.0, math.inf, 3.0])
    p.add_argument("--seeds", nargs="+", type=int, default=[42])
    p.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    p.add_argument("--bf16", action="store_true", help="train under autocast; faster where the CPU multiplies bf16")
    p.add_argument("--results", type=Path, default=RESULTS, help="one line of JSON for every finished run")
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    for seed, epsilon in [(s, e) for s in args.seeds for e in args.epsilons]:
        if (seed, epsilon) in {(row["seed"], row["epsilon"]) for row in read(args.results)}:
            continue
        start = time.perf_counter()
        rows = split(args.data_dir / "data.noun", seed)
        row = {"epsilon": str(epsilon), "seed": seed, **train_and_score(*rows, epsilon, seed, args)}
        row |= {"seconds": round(time.perf_counter() - start, 1), "machine": machine(torch.device("cpu"))}
        with args.results.open("a") as results:
            results.write(json.dumps(row) + "\n")
        print(
            f"epsilon {epsilon:g}, seed {seed}: BLEU {row['bleu']:.2f}, perplexity {row['perplexity']:.2f}", flush=True
        )
    rows = read(args.results)
    print("\n".join(table(rows)))
    if args.results == RESULTS:
        PAGE.write_text(with_table(PAGE.read_text(), "definitions", table(rows)))


def split(source: Path, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows for training and for the test, with a prompt and a text."""
    classes = CLASSES.split()
    rows = [
        {"prompt": f"{word} ({classes[number]}):", "text": f" {definition}"}
        for word, number, definition in nouns(source)
    ]
    chosen = random.Random(seed).sample(rows, min(len(rows), TRAINED + TESTED))
    return chosen[TESTED:], chosen[:TESTED]


def train_and_score(
    train: list[dict[str, str]], test: list[dict[str, str]], epsilon: float, seed: int, args: argparse.Namespace
) -> Row:
    """Train on some definitions, write others, and return what that took and how good they are."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS.split(), *["--bf16"] * args.bf16]
        for flag, rows in (("train", train), ("validation", test)):
            file = Path(folder, f"{flag}.jsonl")
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            flags += [f"--{flag}_file", str(file)]
        report = run(RECIPE, folder, epsilon, seed, args.threads, flags)
        (model,) = (file.parent for file in Path(folder).rglob("privacy_report.json"))
        written = write([row["prompt"] for row in test], model)
    kept = ("noise_multiplier", "steps", "num_examples", "expected_batch_size", "delta")
    row = {name: report[name] for name in kept} | {"bf16": args.bf16}
    row |= {"perplexity": report["perplexity_after"], "perplexity_before": report["perplexity_before"]}
    return row | {"bleu": bleu(written, [row["text"].strip() for row in test])}


@torch.no_grad()
def write(prompts: Sequence[str], adapter: Path) -> list[str]:
    """What SmolLM2 with an adapter writes after these prompts."""
    import assets
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = assets.smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()
    written = []
    for start in range(0, len(prompts), 50):
        batch = tokenizer(prompts[start : start + 50], padding=True, return_tensors="pt")
        tokens = model.generate(
            **batch, max_new_tokens=MOST_WRITTEN, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        written += [text.strip() for text in texts]
    return written


def bleu(written: Sequence[str], references: Sequence[str]) -> float:
    """The mean over texts, since few of them share four words in a row with their reference."""
    from sacrebleu import sentence_bleu

    pairs = zip(written, references, strict=True)
    return statistics.mean(sentence_bleu(text, [reference]).score for text, reference in pairs)


def table(rows: Sequence[Row]) -> list[str]:
    """One line for every epsilon: BLEU and perplexity, and how they compare with those without privacy."""
    lines = [
        "| ε | BLEU | share kept | perplexity | times the twin's | σ | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    twin = medians([row for row in rows if row["epsilon"] == math.inf])
    for epsilon, runs in groups(rows).items():
        found, compared = medians(runs), ["not measured"] * 2
        if twin:
            compared = [
                f"{100 * found['bleu'] / twin['bleu']:.0f}%",
                f"{found['perplexity'] / twin['perplexity']:.2f}",
            ]
        name = f"{epsilon:g}"
        if epsilon == math.inf:
            name, compared = "∞ (not private)", ["", ""]
        cells = [name, f"{found['bleu']:.1f}", compared[0], f"{found['perplexity']:.1f}", compared[1]]
        lines.append(f"| {' | '.join(cells)} | {found['noise_multiplier']:.2f} | {found['seconds'] / 60:.0f} |")
    return lines


def medians(rows: Sequence[Row]) -> dict[str, float]:
    names = ("bleu", "perplexity", "noise_multiplier", "seconds")
    return {name: statistics.median(row[name] for row in rows) for name in names} if rows else {}


if __name__ == "__main__":
    main()
