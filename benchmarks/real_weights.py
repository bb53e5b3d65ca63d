"""Ten noiseless steps on real weights against one example at a time: MiniLM in full, SmolLM2-135M with LoRA.

    python -m benchmarks.real_weights [--steps 10]

The reference is another copy of the model, one backward pass per example through plain autograd, clipped and summed by
hand.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dp_transformers import PerExampleClipper
from dp_transformers.losses.heads import find_per_example_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import assets


def minilm(texts: list[dict]) -> tuple[nn.Module, Callable[[int], dict]]:
    folder = assets.minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32)

    def batch(step: int) -> dict:
        rows = texts[8 * step : 8 * step + 8]
        encoded = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
        return {**encoded, "labels": torch.tensor([row["label"] for row in rows])}

    return model, batch


def smollm2(texts: list[dict]) -> tuple[nn.Module, Callable[[int], dict]]:
    folder = assets.smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))

    def batch(step: int) -> dict:
        encoded = tokenizer([row["text"] for row in texts[4 * step : 4 * step + 4]], padding=True, return_tensors="pt")
        return {**encoded, "labels": encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)}

    return model, batch


def compare(model: nn.Module, batch_of: Callable[[int], dict], steps: int, learning_rate: float) -> None:
    """Print, for every step, the worst relative error of norms and sum, and how far the two trajectories are apart."""
    model = model.eval()  # dropout off: the reference cannot have the same mask
    twin = copy.deepcopy(model)
    loss = find_per_example_loss(model)

    def losses_of(m: nn.Module, batch: dict) -> torch.Tensor:
        return loss(m(**{k: v for k, v in batch.items() if k != "labels"}), batch["labels"])

    def trainable(m: nn.Module) -> list[nn.Parameter]:
        return [p for p in m.parameters() if p.requires_grad]

    def length(tensors: list[torch.Tensor]) -> float:
        return float(torch.stack([t.detach().double().norm() for t in tensors]).norm())

    start = [p.detach().clone() for p in trainable(model)]
    clipper = PerExampleClipper(model, 1.0)
    for step in range(steps):
        batch, parameters = batch_of(step), trainable(twin)
        gradients = []
        for i in range(len(batch["labels"])):
            one = losses_of(twin, {k: v[i : i + 1] for k, v in batch.items()}).sum()
            gradients.append(torch.autograd.grad(one, parameters))
        norms = [length(list(g)) for g in gradients]
        bound = sorted(norms)[len(norms) // 2] * 0.9  # half of the examples are clipped
        total = [
            sum(min(1.0, bound / n) * g[k] for n, g in zip(norms, gradients, strict=True))
            for k in range(len(parameters))
        ]
        model.zero_grad()
        got = (clipper.backward(losses_of(model, batch) / bound) * bound).tolist()  # as with that bound
        norm_error = max(abs(a - b) / b for a, b in zip(got, norms, strict=True))
        sum_error = length([p.grad - t for p, t in zip(trainable(model), total, strict=True)]) / length(total)
        with torch.no_grad():
            for p, q, t in zip(trainable(model), parameters, total, strict=True):
                p.sub_(p.grad, alpha=learning_rate)
                q.sub_(t, alpha=learning_rate)
        apart = length([p - q for p, q in zip(trainable(model), parameters, strict=True)])
        moved = length([p - s for p, s in zip(trainable(model), start, strict=True)])
        print(
            f"  step {step + 1:2d}: norms {norm_error:.1e}, sum {sum_error:.1e}, trajectories apart "
            f"{apart / moved:.1e} of the way moved",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="noiseless SGD steps to take")
    steps = parser.parse_args().steps
    texts = assets.movie_sentences()
    for name, build, learning_rate in (
        ("MiniLM, all parameters", minilm, 1e-3),
        ("SmolLM2-135M, LoRA", smollm2, 1e-2),
    ):
        print(name, flush=True)
        torch.manual_seed(0)
        compare(*build(texts), steps, learning_rate)


if __name__ == "__main__":
    main()
