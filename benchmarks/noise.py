"""What noise costs: seconds of each step, and bytes that are kept until the next; independent and correlated noise.

    python -m benchmarks.noise --quick
    python -m benchmarks.noise --parameters 10 100 --json noise.json

A contender adds the noise of one step to the gradients of so many million trainable parameters, as far into a training
as its memory reaches. `kept` are the tensors that are left after a step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from dp_transformers import BandedInverseNoise, BandedNoise, BufferedNoise, IndependentNoise, PerExampleClipper
from dp_transformers.mechanism.noise import Noise

from .harness import Benchmark, Contender, Phase, parser

WIDTH = 1000  # of a layer, which has the square of it


def live_bytes() -> int:
    """Of all tensors that have memory of their own, each storage once."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if isinstance(x, torch.Tensor) and not x.is_meta:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of a fake, wrapped or sparse tensor
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


def bytes_kept(contender: Contender) -> int:
    """What is there besides after it has begun."""
    before = live_bytes()
    phases = contender()
    kept = live_bytes() - before
    del phases
    return kept


def noisy(
    clipper: PerExampleClipper, gradients: Sequence[torch.Tensor], noise: Noise, steps: int, *, secure: bool = False
) -> Sequence[Phase]:
    """Adds the noise of a step, as what it keeps stays after so many ``steps``."""
    source = noise.source(clipper, secure=secure)

    def step() -> None:
        source.add_(gradients, std=1.0)

    for _ in range(steps):
        step()
    return [step]


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=7)
    p.add_argument("--parameters", nargs="+", type=float, default=[10, 100], help="trainable ones, in millions")
    p.add_argument("--bands", type=int, default=16, help="of the banded strategy")
    p.add_argument("--inverse-bands", type=int, default=4, help="of the inverse of the square root")
    p.add_argument("--buffers", type=int, default=3)
    p.add_argument("--steps", type=int, default=1000, help="of the training for which coefficients are optimal")
    p.add_argument("--separation", type=int, default=334, help="of two appearances of an example in it")
    args = p.parse_args(argv)
    if args.quick:
        args.parameters, args.bands = [2], 4
    benchmark = Benchmark("noise", args)
    steps, apart = args.steps, args.separation
    banded = BandedNoise.optimal(1.0, steps=steps, bands=args.bands)
    decay = BandedInverseNoise.optimal_decay(1.0, steps=steps, min_separation=apart)
    inverse = BandedInverseNoise.square_root(1.0, bands=args.inverse_bands)
    buffers = BufferedNoise.optimal(1.0, steps=steps, min_separation=apart, buffers=args.buffers)
    for millions in args.parameters:
        layers = max(1, round(millions * 1e6 / WIDTH**2))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(benchmark.device)
        gradients = [torch.zeros_like(p) for p in model.parameters()]
        clipper = PerExampleClipper(model, 1.0, self_check=False)
        contenders: dict[str, Contender] = {
            name: partial(noisy, clipper, gradients, *what, secure=name == "secure_rng")
            for name, what in {
                "independent": (IndependentNoise(1.0), 1),
                "secure_rng": (IndependentNoise(1.0), 1),
                f"banded {args.bands}": (banded, args.bands),
                "lambda": (decay, 2),
                f"BISR {args.inverse_bands}": (inverse, args.inverse_bands),
                f"BLT {args.buffers}": (buffers, 1),
            }.items()
        }
        case = {"parameters": f"{layers * WIDTH**2:,}"}
        benchmark.compare(case, contenders, {"a step": (1,)})
        for name, contender in contenders.items():
            size = bytes_kept(contender)
            figures = {"mb": size / 1e6, "bytes_per_parameter": size / (layers * WIDTH**2)}
            benchmark.add({**case, "part": "kept"}, name, figures)


if __name__ == "__main__":
    main()
