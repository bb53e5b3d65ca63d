"""What low precision saves and costs: Table 3 of "Scaling Private Deep Learning", BERT with its last layers or LoRA
trained.

    python -m benchmarks.precision --quick
    python -m benchmarks.precision --json precision.json

*mixed* is bf16 autocast; *bf16 body* also keeps the frozen weights in bf16; *all bf16* asks for trainable weights in
bf16. The model is MiniLM on movie-review sentences (the recipes' assets), 32 at a time and 256 a step, or with
--random a random BERT on random words whose first word decides. Time and memory are of one step relative to fp32;
accuracy is on held-out examples after --steps private steps.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from dp_transformers import PerExampleClipper
from dp_transformers.noise.add_noise import add_noise_and_divide
from dp_transformers.noise.generators import GaussianNoise

from .contenders import MAX_GRAD_NORM, NOISE_MULTIPLIER, Task, ours
from .harness import Benchmark, explain, parser
from .models import Shape, build_transformer

BATCH, LOGICAL, TOKENS = 32, 256, 48  # examples that are processed at once, and of a step
PRECISIONS = ("fp32", "mixed", "bf16 body", "all bf16")
Batch = dict[str, torch.Tensor]


def random_data() -> tuple[nn.Module, Batch]:
    shape = Shape(width=64, layers=2, vocabulary=200, tokens=8)
    ids = torch.randint(1, 200, (2 * LOGICAL, 8))
    return build_transformer("bert", shape), {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": (ids[:, 0] < 100).long(),
    }


def movie_data() -> tuple[nn.Module, Batch]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
    import assets

    rows, folder = assets.movie_sentences(), assets.minilm_folder()
    texts = [row["text"] for row in rows]
    batch = AutoTokenizer.from_pretrained(folder)(
        texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, dtype=torch.float32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return model, {**batch, "labels": torch.tensor([row["label"] for row in rows])}


def tuned(base: nn.Module, tuning: str, precision: str) -> nn.Module:
    """A copy of ``base`` with its last layers or LoRA trainable, its weights in the dtypes of ``precision``."""
    torch.manual_seed(0)
    model = copy.deepcopy(base).train()
    if tuning == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"])
        )
    else:
        model.requires_grad_(False)
        for module in (model.bert.encoder.layer[-1], model.bert.pooler, model.classifier):
            module.requires_grad_(True)
    for p in model.parameters():
        if precision == "all bf16" or (precision == "bf16 body" and not p.requires_grad):
            p.data = p.data.bfloat16()
    return model


def losses_of(batch: Batch, model: nn.Module) -> torch.Tensor:
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits.float(), batch["labels"], reduction="none")


def accuracy_after(task: Task, train: Batch, test: Batch, steps: int, learning_rate: float) -> float:
    """Held-out accuracy after so many private steps of LOGICAL shuffled examples."""
    model, noise = task.build().to(task.device), GaussianNoise()
    clipper = PerExampleClipper(model, MAX_GRAD_NORM)
    optimizer = torch.optim.AdamW(clipper.parameters, lr=learning_rate)
    order = torch.arange(0)
    for _ in range(steps):
        if len(order) < LOGICAL:
            order = torch.randperm(len(train["labels"]))
        step, order = order[:LOGICAL], order[LOGICAL:]
        optimizer.zero_grad()
        for rows in step.split(BATCH):
            clipper.backward(
                replace(task, losses=partial(losses_of, {name: x[rows] for name, x in train.items()})).forward(model)
            )
        add_noise_and_divide(clipper.parameters, noise, std=NOISE_MULTIPLIER * MAX_GRAD_NORM, divisor=LOGICAL)
        optimizer.step()
    clipper.detach()
    model.eval()
    with torch.no_grad(), torch.autocast(task.device.type, dtype=torch.bfloat16, enabled=task.bf16):
        inputs = [
            {name: x[i : i + 64] for name, x in test.items() if name != "labels"}
            for i in range(0, len(test["labels"]), 64)
        ]
        predicted = torch.cat([model(**rows).logits.argmax(-1) for rows in inputs])
    return float((predicted == test["labels"]).float().mean())


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=9)
    p.add_argument("--tunings", nargs="+", choices=["last layers", "lora"], default=["last layers", "lora"])
    p.add_argument(
        "--steps", type=int, default=33, help="private steps before accuracy is measured; the default is one epoch"
    )
    p.add_argument("--learning-rate", type=float, default=4e-3)
    p.add_argument("--random", action="store_true", help="random small BERT and random words: nothing is fetched")
    args = p.parse_args(argv)
    if args.quick:
        args.steps = min(args.steps, 2)
    benchmark = Benchmark("precision", args)
    base, data = random_data() if args.random else movie_data()
    data = {name: x.to(benchmark.device) for name, x in data.items()}
    order = torch.randperm(len(data["labels"]))
    held_out = 256 if args.quick else len(order) // 5
    test, train = ({name: x[rows] for name, x in data.items()} for rows in (order[:held_out], order[held_out:]))
    first = {name: x[:BATCH] for name, x in train.items()}
    for tuning in args.tunings:
        tasks: dict[str, Task] = {}
        for precision in PRECISIONS:
            build: Callable[[], nn.Module] = partial(tuned, base, tuning, precision)
            tasks[precision] = Task(
                build, partial(losses_of, first), BATCH, benchmark.device, bf16=precision in ("mixed", "bf16 body")
            )
        case = {"model": "random BERT" if args.random else "MiniLM", "trained": tuning, "batch": BATCH}
        benchmark.compare(case, {name: partial(ours, task, "auto") for name, task in tasks.items()}, {"time": (1, 1)})
        peak = None
        for name, task in tasks.items():
            try:
                bytes_used = benchmark.peak_bytes(partial(ours, task, "auto"))
                peak = peak or bytes_used
                accuracy = accuracy_after(task, train, test, args.steps, args.learning_rate)
            except Exception as error:
                benchmark.add({**case, "part": "memory and accuracy"}, name, {"failed": explain(error)})
                continue
            figures = {
                "peak_mb": bytes_used / 1e6,
                "memory_ratio": peak / bytes_used,
                "accuracy": accuracy,
                "steps": args.steps,
            }
            benchmark.add({**case, "part": "memory and accuracy"}, name, figures)


if __name__ == "__main__":
    main()
