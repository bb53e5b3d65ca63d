"""How much of plain training's speed is left: forward + backward (+ clipping) of one physical batch, per contender.

    python -m benchmarks.throughput --quick               # the published table, a few minutes on one core
    python -m benchmarks.throughput --repeats 21 --json throughput.json

All contenders of a row take turns in one process; times are process times on one thread, medians over the repeats; the ratio is
plain time / contender time, so 1.00 is free. Opacus 1.6 (extra `bench`) runs beside us where it is installed and can do the work.

glibc gives freed memory back to the kernel between steps and takes it again page by page, which costs whoever frees more at once, not
who computes more. By default the allocator is told to keep it, for all contenders alike; `--allocator default` leaves it as it is.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from dp_transformers import PerExampleClipper

WIDTH, LAYERS, HEADS, VOCABULARY = 512, 4, 8, 8000
TOKENS_PER_BATCH = 2048  # 64 examples of 32 tokens, 16 of 128

Run = Callable[[], None]


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    if kind == "bert":
        config = BertConfig(**sizes, intermediate_size=4 * WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return BertForSequenceClassification(config).train()
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=1376))
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).train()


def make_batch(kind: str, tokens: int) -> dict[str, torch.Tensor]:
    size = TOKENS_PER_BATCH // tokens
    batch = {"input_ids": torch.randint(0, VOCABULARY, (size, tokens))}
    if kind == "bert":  # explicit, because Opacus cannot do with the (1, T) that the model makes itself
        batch["position_ids"] = torch.arange(tokens).repeat(size, 1)
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    return batch


def logits_and_targets(kind: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(**batch).logits
    if kind == "bert":
        return logits, torch.zeros(len(logits), dtype=torch.long)
    return logits[:, :-1], batch["input_ids"][:, 1:]


def per_example_losses(kind: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits, targets = logits_and_targets(kind, model, batch)
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(logits), -1).mean(1)


def plain(kind: str, batch: dict[str, torch.Tensor]) -> Run:
    model = build(kind)

    def run() -> None:
        model.zero_grad()
        per_example_losses(kind, model, batch).mean().backward()

    return run


def ours(kind: str, batch: dict[str, torch.Tensor], mode: str) -> Run:
    model = build(kind)
    clipper = PerExampleClipper(model, 1.0, mode=mode)

    def run() -> None:
        model.zero_grad()
        clipper.backward(per_example_losses(kind, model, batch))

    return run


def opacus(kind: str, batch: dict[str, torch.Tensor], mode: str) -> Run:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    size = len(batch["input_ids"])
    common = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": size}
    if mode == "hooks":
        wrapped = GradSampleModule(build(kind))
        optimizer = DPOptimizer(torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.0), **common)

        def run() -> None:
            optimizer.zero_grad()
            per_example_losses(kind, wrapped, batch).mean().backward()
            optimizer.pre_step()

        return run
    wrapped = GradSampleModuleFastGradientClipping(build(kind), max_grad_norm=1.0, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.0), **common)
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def run() -> None:
        optimizer.zero_grad()
        logits, targets = logits_and_targets(kind, wrapped, batch)
        criterion(logits.flatten(0, -2), targets.flatten(), shape=targets.shape if targets.dim() > 1 else None).backward()
        optimizer.pre_step()

    return run


def contenders(kind: str, tokens: int, peers: bool) -> dict[str, Run]:
    batch = make_batch(kind, tokens)
    runs = {"plain": plain(kind, batch)}
    for mode in ("book_keeping", "ghost"):
        runs[mode] = ours(kind, batch, mode)
    if peers:
        for mode in ("ghost", "hooks"):
            try:
                runs[f"opacus {mode}"] = opacus(kind, batch, mode)
                runs[f"opacus {mode}"]()
            except Exception as error:  # what a peer cannot do is part of the result
                del runs[f"opacus {mode}"]
                print(f"  opacus {mode} cannot do {kind}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
    return runs


def measure(runs: dict[str, Run], repeats: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if repeat >= 2:  # the first two warm up
                times[name].append(time.process_time() - start)
    # each repeat compares neighbours in time, so a slow minute of the machine slows both
    ratios = {name: [p / t for p, t in zip(times["plain"], values, strict=True)] for name, values in times.items()}
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(times[name]),
            "ratio": statistics.median(ratios[name]),
            "ratio_low": statistics.quantiles(ratios[name], n=4)[0],
            "ratio_high": statistics.quantiles(ratios[name], n=4)[2],
        }
        for name in runs
    }


def keep_freed_memory() -> None:
    """Tell glibc not to give memory back between steps (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # not glibc
    mallopt(-1, 2**31 - 1)
    mallopt(-3, 2**31 - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="7 repeats instead of --repeats")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds, in each of which every contender runs once")
    parser.add_argument("--models", nargs="+", choices=["bert", "llama-lora"], default=["bert", "llama-lora"], help="full BERT, LoRA Llama")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32, 128], help="tokens per example")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave Opacus out")
    parser.add_argument("--allocator", choices=["keep", "default"], default="keep", help="what glibc does with freed memory, see above")
    parser.add_argument("--json", metavar="PATH", help="also write the results there")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.allocator == "keep":
        keep_freed_memory()

    machine = {"torch": torch.__version__, "cpu": platform.processor() or platform.machine(), "allocator": args.allocator}
    print(f"{WIDTH}-wide, {LAYERS} layers, {TOKENS_PER_BATCH} tokens a batch, one thread, process time; " + ", ".join(machine.values()))
    results = []
    for kind in args.models:
        for tokens in args.lengths:
            print(f"\n{kind}, T = {tokens}, B = {TOKENS_PER_BATCH // tokens}")
            row = measure(contenders(kind, tokens, args.peers), 7 if args.quick else args.repeats)
            for name, r in row.items():
                print(
                    f"  {name:<14} {r['milliseconds']:8.0f} ms   {r['ratio']:.3f} of plain speed  ({r['ratio_low']:.3f} to {r['ratio_high']:.3f})"
                )
            results.append({"model": kind, "tokens": tokens, "contenders": row})
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine, "results": results}, file, indent=2)


if __name__ == "__main__":
    main()
