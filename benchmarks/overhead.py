"""What privacy adds to a step besides clipping: noise, the private loss, sampling, accounting, the ledger; and what it
costs once: the self-check.

    python -m benchmarks.overhead --quick
    python -m benchmarks.overhead --json overhead.json

`share` is of a plain step of --examples-per-step examples; for what happens once it is in steps. The ledger waits for
the disk, which only the wall clock sees: `wall_share` is beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import torch

from dp_transformers import PerExampleClipper
from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, Release
from dp_transformers.mechanism.noise import IndependentNoise
from dp_transformers.mechanism.sampling import DrawSampler, PoissonSampling
from dp_transformers.noise.generators import GaussianNoise
from dp_transformers.step.checkpoint import PrivacyState
from dp_transformers.step.ledger import Ledger
from dp_transformers.step.releases import LOSS, PrivateLoss
from dp_transformers.step.run import PrivateRun

from .contenders import Task, plain
from .harness import WARM_UP, Benchmark, parser, spread
from .models import Shape, build_transformer, transformer_losses

NUM_EXAMPLES, LOGGING_STEPS, DELTA = 100_000, 10, 1e-6


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=9)
    p.add_argument("--model", choices=["bert", "llama", "bert-lora", "llama-lora"], default="bert")
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--physical", type=int, default=16, help="examples that are processed at once")
    p.add_argument("--examples-per-step", type=int, default=256)
    args = p.parse_args(argv)
    if args.quick:
        args.tokens, args.physical = 32, 16
    benchmark = Benchmark("overhead", args)
    shape = Shape(width=args.width, layers=args.layers, tokens=args.tokens, size=args.physical)
    losses = transformer_losses(args.model, shape, benchmark.device)
    task = Task(lambda: build_transformer(args.model, shape), losses, shape.size, benchmark.device)

    def median(phases: Sequence[Callable[[], object]], weights: Sequence[float]) -> tuple[float, float]:
        """Seconds of the weighed phases, by the benchmark's clock and by the wall clock."""
        turns = [benchmark.turn(phases) for _ in range(benchmark.repeats + WARM_UP)][WARM_UP:]
        weighed = [[sum(s * w for s, w in zip(clock, weights, strict=True)) for clock in turn] for turn in turns]
        return tuple(spread("s", [turn[k] for turn in weighed])["s"] for k in (0, 1))

    step, wall_step = median(plain(task), (args.examples_per_step / shape.size, 1))
    case = {"model": args.model, "width": args.width, "tokens": args.tokens, "examples": args.examples_per_step}
    benchmark.add(case, "plain step", {"ms": 1e3 * step, "wall_ms": 1e3 * wall_step})

    model = task.build().to(benchmark.device)
    gradients = [torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    noise, sampling = GaussianNoise(), PoissonSampling(NUM_EXAMPLES, args.examples_per_step)
    sampler = DrawSampler(sampling, NUM_EXAMPLES // args.examples_per_step, secret=0)
    mechanism = Mechanism(sampling=sampling, clipping=FlatClipping(1.0), noise=IndependentNoise(1.0))
    state = PrivacyState(PrivacyState.new_run_id(), mechanism, DELTA, None)
    run = PrivateRun(state)
    clipper = PerExampleClipper(model, 1.0)
    private_loss = PrivateLoss(Release.within(LOSS, 0.0, 10.0, noise_multiplier=10.0), clipper)
    losses_b = torch.rand(shape.size, device=benchmark.device)

    def count() -> None:
        run.spend_step(run.steps)

    def add_loss() -> None:
        private_loss.add(losses_b)

    def release_loss() -> None:
        private_loss.release(args.examples_per_step)

    def check() -> None:
        clipper.detach()
        clipper.attach()  # which lets all be compared again
        task.losses(model)

    def forward() -> None:
        task.losses(model)

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(folder)
        ledger.open()
        ledger.begin(state.to_dict())
        added = {
            "noise": median([lambda: noise.add_(gradients, std=1.0)], (1,)),
            "private loss": median([add_loss, release_loss], (args.examples_per_step / shape.size, 1)),
            "sampling": median([sampler.draw], (1,)),
            "accounting": median([count], (1,)),
            "epsilon in the log": median([count, lambda: run.epsilon(DELTA)], (0, 1 / LOGGING_STEPS)),
            "ledger": median([lambda: ledger.add_step(state.run_id, 1, mechanism.at(0))], (1,)),
        }
    for name, (seconds, wall) in added.items():
        benchmark.add(
            case,
            name,
            {"ms": 1e3 * seconds, "wall_ms": 1e3 * wall, "share": seconds / step, "wall_share": wall / wall_step},
        )
    seconds, wall = (sum(pair[k] for pair in added.values()) for k in (0, 1))
    benchmark.add(
        case,
        "together",
        {"ms": 1e3 * seconds, "wall_ms": 1e3 * wall, "share": seconds / step, "wall_share": wall / wall_step},
    )

    once = {**case, "part": "once"}
    seconds, wall = median([check, forward], (1, -1))
    benchmark.add(
        once,
        "self-check",
        {"ms": 1e3 * seconds, "wall_ms": 1e3 * wall, "share": seconds / step, "wall_share": wall / wall_step},
    )


if __name__ == "__main__":
    main()
