"""How much of plain training's speed is left: transformers, full and LoRA, beside plain training and Opacus.

    python -m benchmarks.throughput --quick
    python -m benchmarks.throughput --repeats 21 --json throughput.json
    python -m benchmarks.throughput --device cuda --dtypes bf16 --models llama llama-lora --width 2048 --layers 16
    --tokens-per-batch 8192

Two figures come from the same turns. *backward*: forward, backward and clipping of one physical batch. *step*: a whole
step of --examples-per-step examples, that is so many physical batches, then noise, division and the optimizer once.
"""

from __future__ import annotations

from collections.abc import Sequence

from .contenders import MODES, Task, field
from .harness import Benchmark, parser
from .models import KINDS, Shape, build_transformer, transformer_losses


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__)
    kinds = [*KINDS, *(f"{kind}-lora" for kind in KINDS)]
    p.add_argument(
        "--models", nargs="+", choices=kinds, default=["bert", "llama-lora"], help="the published table is the default"
    )
    p.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens per example")
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocabulary", type=int, default=8000)
    p.add_argument("--rank", type=int, default=16, help="of the LoRA adapters")
    p.add_argument("--tokens-per-batch", type=int, default=2048, help="physical batch: this many tokens")
    p.add_argument("--examples-per-step", type=int, default=256, help="logical batch of the step figure")
    p.add_argument("--modes", nargs="+", default=list(MODES), help="clipping modes, and per_layer")
    p.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32"], help="bf16 is autocast")
    args = p.parse_args(argv)
    if args.quick:
        args.lengths, args.tokens_per_batch, args.modes = [32], 1024, ["auto", "ghost"]
    benchmark = Benchmark("throughput", args)
    for kind in args.models:
        for tokens in args.lengths:
            for dtype in args.dtypes:
                size = max(1, args.tokens_per_batch // tokens)
                shape = Shape(args.width, args.layers, args.vocabulary, tokens, size, args.rank)
                losses = transformer_losses(kind, shape, benchmark.device)
                task = Task(
                    lambda k=kind, s=shape: build_transformer(k, s), losses, size, benchmark.device, dtype == "bf16"
                )
                case = {
                    "model": kind,
                    "width": shape.width,
                    "layers": shape.layers,
                    "tokens": tokens,
                    "batch": size,
                    "dtype": dtype,
                }
                parts = {"backward": (1, 0), "step": (args.examples_per_step / size, 1)}
                benchmark.compare(case, field(task, peers=args.peers, modes=args.modes), parts)


if __name__ == "__main__":
    main()
