"""Peak memory beside plain training, and the largest physical batch that fits a budget, per mode.

    python -m benchmarks.memory --quick
    python -m benchmarks.memory --models bert llama llama-lora --lengths 32 128 512 --json memory.json

The peak of a whole step (model, gradients and activations; not the inputs) is measured at two batch sizes. Where
activations dominate it grows linearly, so the two give the bytes per example and the largest batch within --budget-gb.
On the CPU every allocation of torch is followed through the profiler, which is exact and needs no quiet machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .contenders import MODES, Task, field
from .harness import Benchmark, Contender, Row, explain, parser
from .models import KINDS, Shape, build_transformer, transformer_losses

SLOPE = 0.02  # by how much of its peak a contender must grow from half the batch to all of it


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__)
    kinds = [*KINDS, *(f"{kind}-lora" for kind in KINDS)]
    p.add_argument("--models", nargs="+", choices=kinds, default=["bert", "llama-lora"])
    p.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens per example")
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocabulary", type=int, default=8000)
    p.add_argument("--rank", type=int, default=16, help="of the LoRA adapters")
    p.add_argument(
        "--tokens-per-batch", type=int, default=8192, help="in the larger of the two batches; the other is half of it"
    )
    p.add_argument("--modes", nargs="+", default=list(MODES), help="clipping modes, and per_layer")
    p.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast")
    p.add_argument("--budget-gb", type=float, default=16.0, help="memory for which the largest batch is given")
    args = p.parse_args(argv)
    if args.quick:
        args.width, args.layers, args.lengths, args.tokens_per_batch = 256, 2, [128], 4096
    benchmark = Benchmark("memory", args)
    for kind in args.models:
        for tokens in args.lengths:
            small = max(1, args.tokens_per_batch // tokens // 2)
            fields = []
            for size in (small, 2 * small):
                shape = Shape(args.width, args.layers, args.vocabulary, tokens, size, args.rank)
                losses = transformer_losses(kind, shape, benchmark.device)
                task = Task(
                    lambda k=kind, s=shape: build_transformer(k, s),
                    losses,
                    size,
                    benchmark.device,
                    args.dtype == "bf16",
                )
                fields.append(field(task, peers=args.peers, modes=args.modes))
            case = {
                "model": kind,
                "width": args.width,
                "layers": args.layers,
                "tokens": tokens,
                "batch": 2 * small,
                "dtype": args.dtype,
            }
            peaks(benchmark, case, fields, small, args.budget_gb * 1e9)


def peaks(
    benchmark: Benchmark, case: Row, fields: Sequence[Mapping[str, Contender]], small: int, budget: float
) -> dict[str, Row]:
    """Record the peak of each contender, and its largest batch within ``budget`` bytes; returns the figures by
    contender.

    ``fields``: the contenders with batches of ``small`` and of twice as many examples.
    """
    plain, found = None, {}
    for name in fields[0]:
        try:
            low, high = (benchmark.peak_bytes(contenders[name]) for contenders in fields)
        except Exception as error:
            found[name] = {"failed": explain(error)}
            benchmark.add(case, name, found[name])
            continue
        per_example = (high - low) / small
        figures = {"peak_mb": high / 1e6}
        if per_example * small > SLOPE * high:  # else something else is largest, and nothing follows for other batches
            figures["per_example_mb"] = per_example / 1e6
            figures["largest_batch"] = int((budget - (low - small * per_example)) // per_example)
        plain = plain or figures
        found[name] = figures | {
            f"{short}_of_plain": figures[long] / plain[long]
            for short, long in (("peak", "peak_mb"), ("largest", "largest_batch"))
            if long in figures and long in plain
        }
        benchmark.add(case, name, found[name])
    return found


if __name__ == "__main__":
    main()
