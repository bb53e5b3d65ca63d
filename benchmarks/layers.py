"""The cost of privacy layer by layer: Tables 2 and 3 of the Opacus paper, ours and Opacus in the same run, the
published factors beside.

    python -m benchmarks.layers --quick
    python -m benchmarks.layers --memory --json layers.json

The settings are the paper's (arXiv 2109.12298, Appendix E.3). A factor is time (or peak memory) with privacy /
without. Ours and Opacus' include clipping and the clipped sum; the published factors are of per-example gradients
alone, on a GPU. Empty where our copy of the paper cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .contenders import Task, field
from .harness import Benchmark, Contender, Row, explain, parser

BATCH_SIZES = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Layer:
    """A layer, its inputs for a batch size, and the published factors at `BATCH_SIZES`."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    published_time: tuple[float | None, ...]
    published_memory: tuple[float | None, ...]


def random(*shape: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda size: (torch.randn(size, *shape),)


def attention_inputs(size: int) -> tuple[torch.Tensor, ...]:
    source = torch.randn(size, 128, 100)
    return torch.randn(size, 64, 100), source, source.clone()


LAYERS = {
    "conv": Layer(lambda: nn.Conv2d(64, 64, 8), random(64, 50, 100),
                  (2.32, 2.50, 2.49, 2.79, 2.87, 2.87), (1.57, 2.49, 3.54, 4.48, 5.16, 5.59)),
    "layer norm": Layer(lambda: nn.LayerNorm(64), random(64),
                        (1.92, 1.91, None, 1.91, 1.90, 1.91), (1.32, 1.33, 1.33, 1.33, 1.33, None)),
    "instance norm": Layer(lambda: nn.InstanceNorm1d(256, affine=True), random(256, 64),
                           (1.81, 1.81, 1.81, 1.55, 1.54, 1.54), (1.17, 1.17, 1.17, None, 1.17, 1.17)),
    "group norm": Layer(lambda: nn.GroupNorm(16, 256), random(256),
                        (1.94, 1.94, 1.94, 1.95, 1.95, 1.71), (1.30, 1.32, 1.32, None, 1.32, 1.33)),
    "linear": Layer(lambda: nn.Linear(512, 512), random(512),
                    (None, 1.75, None, None, 2.80, 5.49), (11.2, None, None, 65.0, 103, 129)),
    "embedding": Layer(lambda: nn.Embedding(20_000, 100), lambda size: (torch.randint(0, 20_000, (size,)),),
                       (2.01, 3.45, 6.52, 12.4, 24.9, 48.7), (None, 22.3, 43.5, 85.8, 170, 334)),
    "attention": Layer(lambda: nn.MultiheadAttention(100, 4, batch_first=True), attention_inputs,
                       (2.02, 2.02, 2.02, 2.04, None, None), (1.48, 1.08, 1.04, 1.02, 1.01, 1.01)),
    "rnn": Layer(lambda: nn.RNN(100, 100, batch_first=True), random(128, 100),
                 (16.0, 15.5, None, 15.2, 11.3, 8.87), (1.01, 1.08, 1.05, 1.03, 1.03, 1.04)),
    "gru": Layer(lambda: nn.GRU(100, 100, batch_first=True), random(128, 100),
                 (18.1, 17.7, 16.9, 18.2, 16.5, 12.8), (1.31, 1.30, 1.34, 1.33, None, None)),
    "lstm": Layer(lambda: nn.LSTM(100, 100, batch_first=True), random(128, 100),
                  (16.3, 15.9, 17.6, 16.7, 15.4, 13.0), (1.37, 1.40, None, 1.44, 1.44, 1.44)),
}  # fmt: skip


def layer_task(layer: Layer, size: int, device: torch.device) -> Task:
    inputs = tuple(x.to(device) for x in layer.inputs(size))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return layer.build().train()

    def output(model: nn.Module) -> torch.Tensor:
        y = model(*inputs)
        return y[0] if isinstance(y, tuple) else y

    with torch.no_grad():
        target = torch.randn_like(output(build().to(device)))
    return Task(build, lambda model: (output(model) - target).square().flatten(1).mean(1), size, device)


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__)
    p.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    p.add_argument(
        "--batch-sizes",
        nargs="+",
        type=int,
        default=list(BATCH_SIZES),
        help="16 and 64 with --quick, and no convolution",
    )
    p.add_argument("--modes", nargs="+", default=["auto"], help="clipping modes")
    p.add_argument("--memory", action="store_true", help="measure peak memory too")
    args = p.parse_args(argv)
    if args.quick:
        args.batch_sizes, args.layers = [16, 64], [name for name in args.layers if name != "conv"]
    benchmark = Benchmark("layers", args)
    for name in args.layers:
        layer = LAYERS[name]
        for size in args.batch_sizes:
            task = layer_task(layer, size, benchmark.device)
            contenders = {
                k: v for k, v in field(task, peers=args.peers, modes=args.modes).items() if k != "opacus ghost"
            }
            case: Row = {"layer": name, "batch": size}
            time_case, memory_case = {**case, "part": "time"}, {**case, "part": "memory"}
            benchmark.compare(case, contenders, {"time": (1, 0)})
            benchmark.add(time_case, "published", {"factor": published(layer.published_time, size)})
            if args.memory:
                compare_memory(benchmark, memory_case, contenders)
                benchmark.add(memory_case, "published", {"factor": published(layer.published_memory, size)})


def compare_memory(benchmark: Benchmark, case: Row, contenders: Mapping[str, Contender]) -> None:
    plain = benchmark.peak_bytes(contenders["plain"])
    for name, contender in contenders.items():
        try:
            peak = benchmark.peak_bytes(contender)
            benchmark.add(case, name, {"peak_mb": peak / 1e6, "factor": peak / plain})
        except Exception as error:
            benchmark.add(case, name, {"failed": explain(error)})


def published(factors: tuple[float | None, ...], size: int) -> float | None:
    return factors[BATCH_SIZES.index(size)] if size in BATCH_SIZES else None


if __name__ == "__main__":
    main()
