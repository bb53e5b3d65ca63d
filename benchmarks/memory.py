"""Peak memory beside plain training, and the largest physical batch that fits a budget, per mode.

    python -m benchmarks.memory --quick
    python -m benchmarks.memory --models bert llama llama-lora --lengths 32 128 512 --json memory.json

The peak of a whole step (model, gradients and activations; not the inputs) is measured at batch sizes that double
until it grows linearly: then activations dominate, and the last two give the bytes per example and the largest batch
within --budget-gb. (Before that the peak is where the gradients of all weights are there, and grows by less.)
On the CPU every allocation of torch is followed through the profiler, which is exact and needs no quiet machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .contenders import MODES, Task, field
from .harness import Benchmark, Contender, Row, explain, parser
from .models import KINDS, Shape, build_transformer, transformer_losses

LINEAR = 0.03  # by how much of itself the growth per example may differ from one doubling of the batch to the next


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__)
    kinds = [*KINDS, *(f"{kind}-lora" for kind in KINDS)]
    p.add_argument("--models", nargs="+", choices=kinds, default=["bert", "llama-lora"])
    p.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens per example")
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocabulary", type=int, default=8000)
    p.add_argument("--rank", type=int, default=16, help="of the LoRA adapters")
    p.add_argument("--tokens-per-batch", type=int, default=8192, help="in the second batch; the first is half of it")
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

            def contenders(size: int, kind: str = kind, tokens: int = tokens) -> dict[str, Contender]:
                shape = Shape(args.width, args.layers, args.vocabulary, tokens, size, args.rank)
                losses = transformer_losses(kind, shape, benchmark.device)
                task = Task(
                    lambda: build_transformer(kind, shape), losses, size, benchmark.device, args.dtype == "bf16"
                )
                return field(task, peers=args.peers, modes=args.modes)

            case = {
                "model": kind,
                "width": args.width,
                "layers": args.layers,
                "tokens": tokens,
                "batch": 2 * small,
                "dtype": args.dtype,
            }
            peaks(benchmark, case, contenders, small, args.budget_gb * 1e9)


def peaks(
    benchmark: Benchmark, case: Row, contenders: Callable[[int], Mapping[str, Contender]], small: int, budget: float
) -> dict[str, Row]:
    """Record the peak of each contender with twice ``small`` examples, and its largest batch within ``budget`` bytes;
    returns the figures by contender.

    ``contenders(size)``: the contenders with batches of so many examples.
    """
    plain, found = None, {}
    for name in contenders(small):
        try:
            figures = peak_and_growth(
                lambda size, name=name: benchmark.peak_bytes(contenders(size)[name]), small, budget
            )
        except Exception as error:
            found[name] = {"failed": explain(error)}
            benchmark.add(case, name, found[name])
            continue
        plain = plain or figures
        found[name] = figures | {
            f"{short}_of_plain": figures[long] / plain[long]
            for short, long in (("peak", "peak_mb"), ("largest", "largest_batch"))
            if long in figures and long in plain
        }
        benchmark.add(case, name, found[name])
    return found


def peak_and_growth(peak_bytes: Callable[[int], int], small: int, budget: float) -> Row:
    """The peak with twice ``small`` examples, and what follows from its growth where that is linear."""
    sizes, measured = [small, 2 * small], [peak_bytes(small), peak_bytes(2 * small)]
    figures: Row = {"peak_mb": measured[1] / 1e6}
    growth = (measured[1] - measured[0]) / small
    while measured[-1] + growth * sizes[-1] < budget:
        sizes.append(2 * sizes[-1])
        measured.append(peak_bytes(sizes[-1]))
        before, growth = growth, (measured[-1] - measured[-2]) / sizes[-2]
        if abs(growth - before) <= LINEAR * growth:
            largest = sizes[-1] + int((budget - measured[-1]) // growth)
            return figures | {"per_example_mb": growth / 1e6, "largest_batch": largest}
    return figures  # the budget is full before the growth is known


if __name__ == "__main__":
    main()
