"""Seconds per epoch of four whole networks: Table 1 of the Opacus paper, beside plain PyTorch, Opacus and JAX in the
same run.

    python -m benchmarks.end_to_end --quick
    python -m benchmarks.end_to_end --json end_to_end.json

The networks have exactly the paper's parameter counts and its training sets' sizes; inputs are random. An epoch is the
median step times the number of steps, so that large networks need no hours; the first steps, in which JAX compiles,
are not counted. The published factor is Opacus 1.0 / PyTorch on an A100. JAX takes part where it is installed (`pip
install jax`), on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F

from .contenders import LEARNING_RATE, MAX_GRAD_NORM, NOISE_MULTIPLIER, Task, field
from .harness import Benchmark, Phase, parser
from .models import NETWORKS, Network

BATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
PUBLISHED = {  # seconds per epoch at BATCH_SIZES: PyTorch without privacy, Opacus 1.0
    "mnist-cnn": ((5.82, 2.97, 1.55, 0.82, 0.47, 0.26, 0.16, 0.11), (15.81, 8.00, 4.25, 2.30, 1.22, 0.64, 0.36, 0.21)),
    "cifar-cnn": (
        (11.07, 5.99, 3.42, 1.76, 1.07, 0.87, 0.82, 0.79),
        (32.02, 16.59, 8.66, 4.40, 2.45, 2.06, 1.93, 1.89),
    ),
    "imdb-embedding": (
        (1.54, 0.78, 0.40, 0.21, 0.11, 0.06, 0.04, 0.04),
        (3.49, 1.76, 0.88, 0.45, 0.23, 0.12, 0.11, 0.12),
    ),
    "imdb-lstm": (
        (14.08, 7.13, 3.91, 2.00, 1.04, 0.60, 0.41, 0.34),
        (358.80, 183.22, 118.11, 59.92, 30.45, 15.91, 11.51, 9.94),
    ),
}


def jax_phases(network: Network, x, y) -> Sequence[Phase]:
    from . import jax_dpsgd

    return jax_dpsgd.phases(network(), x.numpy(), y.numpy(), MAX_GRAD_NORM, NOISE_MULTIPLIER, LEARNING_RATE)


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=9)
    p.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    p.add_argument("--batch-sizes", nargs="+", type=int, default=list(BATCH_SIZES), help="16 with --quick")
    p.add_argument("--modes", nargs="+", default=["auto"], help="clipping modes")
    args = p.parse_args(argv)
    if args.quick:
        args.batch_sizes = [16]
    benchmark = Benchmark("end_to_end", args)
    for name in args.networks:
        network = NETWORKS[name]
        for size in args.batch_sizes:
            x, y = network.batch(size, benchmark.device)
            task = Task(
                network, lambda model, x=x, y=y: F.cross_entropy(model(x), y, reduction="none"), size, benchmark.device
            )
            contenders = {
                k: v for k, v in field(task, peers=args.peers, modes=args.modes).items() if k != "opacus ghost"
            }
            if args.peers and args.device == "cpu":
                contenders["jax"] = partial(jax_phases, network, x, y)
            case = {"network": name, "parameters": network.parameters, "batch": size}
            steps = network.examples / size
            benchmark.compare(case, contenders, {"step": (1, 1), "epoch": (steps, steps)})
            if size in BATCH_SIZES:
                plain, private = (times[BATCH_SIZES.index(size)] for times in PUBLISHED[name])
                benchmark.add({**case, "part": "epoch"}, "published", {"ms": 1e3 * private, "factor": private / plain})


if __name__ == "__main__":
    main()
