"""QLoRA: a Llama whose base is rounded to 4 or 8 bits, private beside plain, activations kept and checkpointed.

    pip install bitsandbytes torchao
    python -m benchmarks.quantised --quick
    python -m benchmarks.quantised --bases nf4 --width 1024

First the largest relative error of norms and clipped sums in three modes, against one example at a time by plain
autograd; then time and peak memory of a step, where activations are checkpointed also with memory_budget="auto".
On CPUs bitsandbytes and torchao have kernels for these bases.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig
from transformers.utils.logging import disable_progress_bar

from dp_transformers import PerExampleClipper

from .contenders import Task, ours, plain
from .harness import Benchmark, Row, explain, parser
from .models import Losses, Shape, build_transformer, transformer_losses

MODES = ("book_keeping", "ghost", "ghost with a budget", "per_sample")


def nf4(twice: bool) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=twice)


def int8() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


BASES: dict[str, Callable[[], object]] = {
    "float32": lambda: None,
    "nf4": partial(nf4, twice=False),
    "nf4 twice": partial(nf4, twice=True),
    "int8": int8,
}


def build(base: str, shape: Shape, checkpointing: bool) -> nn.Module:
    """The model with adapters of ``shape.rank`` at all linear layers, none of them zero, in training mode. It has none
    of its file's memory, which is mapped whole where a tensor is a part of it."""
    from peft import LoraConfig, get_peft_model

    with tempfile.TemporaryDirectory() as folder:
        build_transformer("llama", shape).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BASES[base](), dtype=torch.float32)
    for x in [*model.parameters(), *model.buffers()]:
        if type(x.data) is torch.Tensor and x.is_floating_point():
            x.data = x.data.clone()
    model = get_peft_model(model, LoraConfig(r=shape.rank, target_modules="all-linear"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def worst_error(model: nn.Module, losses: Losses, mode: str) -> float:
    """Of any norm, and of the sum clipped to 0.9 times the median norm."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms, rows = [], []
    for i in range(len(losses.targets)):
        row = Losses({name: x[i : i + 1] for name, x in losses.batch.items()}, losses.targets[i : i + 1])
        rows.append(torch.cat([g.flatten().double() for g in torch.autograd.grad(row(model).sum(), parameters)]))
        norms.append(rows[-1].norm())
    bound = 0.9 * float(torch.stack(norms).median())
    total = sum(row * min(1.0, bound / float(norm)) for row, norm in zip(rows, norms, strict=True))
    model.zero_grad()
    name, _, budget = mode.partition(" with ")
    with PerExampleClipper(model, bound, mode=name, memory_budget=1e12 if budget else None) as clipper:
        found = clipper.backward(losses(model)).double()
    clipped = torch.cat([p.grad.flatten().double() for p in parameters])
    expected = torch.stack(norms)
    return float(torch.maximum(((found - expected) / expected).abs().max(), (clipped - total).norm() / total.norm()))


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__)
    p.add_argument("--bases", nargs="+", choices=list(BASES), default=list(BASES))
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--tokens", type=int, default=128, help="of an example")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--rank", type=int, default=8, help="of the adapters")
    args = p.parse_args(argv)
    if args.quick:
        args.width, args.layers = 256, 2
    benchmark = Benchmark("quantised", args)
    disable_progress_bar()
    shape = Shape(args.width, args.layers, tokens=args.tokens, size=args.batch, rank=args.rank)
    losses = transformer_losses("llama", shape, benchmark.device)
    for base in args.bases:
        for checkpointing in (False, True):
            case: Row = {"base": base, "checkpointing": checkpointing}
            make = partial(build, base, shape, checkpointing)
            for mode in MODES:
                try:
                    figures: Row = {"worst_error": worst_error(make().to(benchmark.device), losses, mode)}
                except Exception as error:
                    figures = {"failed": explain(error)}
                benchmark.add({**case, "part": "exactness"}, mode, figures)
            task = Task(make, losses, shape.size, benchmark.device)
            contenders = {"plain": partial(plain, task), "private": partial(ours, task, "auto")}
            if checkpointing:
                contenders["with a memory budget"] = partial(ours, task, "auto", "auto")
            benchmark.compare({**case, "part": "time"}, contenders)
            for name, contender in contenders.items():
                peak = {"peak_mb": benchmark.peak_bytes(contender) / 1e6}
                benchmark.add({**case, "part": "memory"}, name, peak)


if __name__ == "__main__":
    main()
