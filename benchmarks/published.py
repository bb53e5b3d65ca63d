"""Fashion-MNIST at (3, 1e-5), as it is published and beyond: test accuracy over five seeds.

    apt-get install dataset-fashion-mnist
    python -m benchmarks.published
    python -m benchmarks.published --settings flat --seeds 1

*flat* and *auto_s* train the net of Papernot et al. 2020 (arXiv 2007.14191), with the batch size, epochs and
clipping bound that Tramèr and Boneh 2020 (arXiv 2011.11660) chose for it. The others train a linear layer on
their fixed features: the scattering transform, and group normalisation of each image by itself.

The result of a run is one line of the results file, and runs that are in the file are not run again. A seed chooses
the first weights. Draws and noise come from the operating system. The table is also put in its place in
docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import dp_accounting as dp
import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import FlatClipping, IndependentNoise, Mechanism, PoissonSampling, PrivacyEngine
from dp_transformers.mechanism.accounting.events import event_epsilon
from dp_transformers.mechanism.clipping_functions import clipping_of

from .accuracy import read
from .harness import Row, machine
from .pages import with_table
from .scattering import CHANNELS, scattering

RESULTS = Path(__file__).with_name("published.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
DATA_DIR = Path("/usr/share/datasets/fashion-mnist")
EPSILON, DELTA, BOUND, MOMENTUM, DECAY = 3.0, 1e-5, 0.1, 0.9, 0.98
MEAN_NOISE, FOR_THE_MEAN = 20.0, 0.01  # σ of the released mean of features, and the part of epsilon kept for it
Data = tuple[torch.Tensor, torch.Tensor]


def conv_net(inputs: int) -> nn.Module:
    """Two convolutions and two linear layers with tanh: 26,010 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.Tanh(), nn.Linear(32, 10)),
    ).to(memory_format=torch.channels_last)  # a third faster on CPUs


def linear(inputs: int) -> nn.Module:
    return nn.Linear(inputs, 10)


@cache
def images(folder: Path, part: str) -> Data:
    """Pixels in [0, 1], (N, 1, 28, 28), and labels, of the part "train" or "t10k"."""
    if not folder.is_dir():
        sys.exit(f"there is no folder {folder}: apt-get install dataset-fashion-mnist, or say --data_dir.")
    pixels = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
    x = torch.from_numpy(np.frombuffer(pixels, np.uint8).reshape(-1, 1, 28, 28) / np.float32(255))
    return x, torch.from_numpy(np.frombuffer(labels, np.uint8).astype(np.int64))


@cache
def features(folder: Path, part: str) -> Data:
    """Scattering features, (N, 3969), normalised over three channels of one image at a time, and labels."""
    x, y = images(folder, part)
    return torch.cat([nn.functional.group_norm(scattering(some), CHANNELS // 3) for some in x.split(256)]).flatten(
        1
    ), y


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Attributes:
        published: Mean and deviation of the test accuracy, and where it is from.
        centred: Whether the mean of the features is released privately and taken off them.
    """

    title: str
    published: str
    load: Callable[[Path, str], Data]
    model: Callable[[int], nn.Module]
    batch: int
    rate: float
    physical: int
    clipping: str = "flat"
    centred: bool = False
    epochs: int = 40


SETTINGS = {
    "flat": Setting("convolutions, flat clipping", "86.0 ± 0.3", images, conv_net, 2048, 4.0, 512),
    "auto_s": Setting("convolutions, AUTO-S", "86.4 ± 0.2", images, conv_net, 2048, 6.0, 512, "auto_s"),
    "scattering": Setting("linear layer, scattering", "89.7 (ε < 2.9)", features, linear, 8192, 32.0, 1024),
    "centred": Setting("the same, features centred", "", features, linear, 8192, 16.0, 1024, centred=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--data_dir", type=Path, default=DATA_DIR)
    p.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    p.add_argument("--results", type=Path, default=RESULTS, help="one line of JSON for every finished run")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    for seed, setting in [(s, n) for s in args.seeds for n in args.settings]:
        if (setting, seed) in {(row["setting"], row["seed"]) for row in read(args.results)}:
            continue
        start = time.process_time()
        row = {"setting": setting, "seed": seed, **run(SETTINGS[setting], seed, args.data_dir)}
        row |= {"process_seconds": round(time.process_time() - start, 1), "machine": machine(torch.device("cpu"))}
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(setting, seed, f"{row['test_accuracy']:.4f} {row['averaged_accuracy']:.4f}", flush=True)
    rows = read(args.results)
    print("\n".join(table(rows)))
    if args.results == RESULTS:
        PAGE.write_text(with_table(PAGE.read_text(), "images", table(rows)))


def run(setting: Setting, seed: int, folder: Path) -> Row:
    """Train and test a model, within one budget for all that is released."""
    (x, y), (x_test, y_test) = setting.load(folder, "train"), setting.load(folder, "t10k")
    mechanism = Mechanism(
        sampling=PoissonSampling(len(x), setting.batch),
        clipping=clipping_of(setting.clipping, BOUND, 1.0),
        noise=IndependentNoise(1.0),
        steps=setting.epochs * len(x) // setting.batch,
    ).calibrated(target_epsilon=EPSILON - FOR_THE_MEAN * setting.centred, target_delta=DELTA)
    released = [mechanism]
    torch.manual_seed(seed)
    model = setting.model(x[0].numel())
    if setting.centred:
        mean, of_mean = private_mean(x)
        x, x_test, released = x - mean, x_test - mean, [of_mean, mechanism]
    average = train(model, setting.rate, MOMENTUM, mechanism, (x, y), setting.physical)
    epsilon = event_epsilon(dp.ComposedDpEvent([each.event() for each in released]), DELTA)
    assert epsilon <= EPSILON, epsilon
    with torch.no_grad():
        accuracies = [float((net(x_test).argmax(1) == y_test).float().mean()) for net in (model, average)]
    names = ("test_accuracy", "averaged_accuracy", "epsilon", "steps", "noise_multiplier")
    return dict(zip(names, (*accuracies, epsilon, mechanism.steps, mechanism.at(0).noise_multiplier), strict=True))


def private_mean(x: torch.Tensor) -> tuple[torch.Tensor, Mechanism]:
    """The mean of normalised features, (N, d) to (d,), and what its release cost: one step on all rows. None is longer
    than √d, so nothing is clipped."""
    mechanism = Mechanism(
        sampling=PoissonSampling(len(x), len(x)),
        clipping=FlatClipping(math.sqrt(x.shape[1])),
        noise=IndependentNoise(MEAN_NOISE),
        steps=1,
    )
    model = nn.Linear(x.shape[1], 1, bias=False)  # the gradient of its output is the row
    nn.init.zeros_(model.weight)
    train(model, 1.0, 0.0, mechanism, (x, torch.zeros(len(x))), 1024, lambda output, _: -output[:, 0])
    return model.weight.detach()[0], mechanism


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def train(
    model: nn.Module,
    rate: float,
    momentum: float,
    mechanism: Mechanism,
    data: Data,
    physical: int,
    losses_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropies,
) -> nn.Module:
    """Train a model for all steps of a mechanism, and return it with a moving average of its weights."""
    engine, average = PrivacyEngine(), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(*data), batch_size=int(mechanism.at(0).expected_batch_size)),
        mechanism=mechanism,
        max_physical_batch_size=physical,
    )
    while engine.steps < mechanism.steps:
        for x, y in loader:
            optimizer.zero_grad()
            engine.backward(losses_of(model(x), y))
            optimizer.step()
            if engine.has_stepped:
                average.update_parameters(model)
            if engine.steps == mechanism.steps:
                break
    engine.detach()
    assert engine.privacy_spent(DELTA).epsilon <= mechanism.epsilon(DELTA) * (1 + 1e-9)
    return average


def table(rows: Sequence[Row]) -> list[str]:
    """A line for every setting: test accuracy in percent, mean and deviation over the seeds, and minutes of a core."""
    lines = ["| setting | published | last weights | their average | seeds | minutes |", "|---|---|---|---|---|---|"]
    for name, setting in SETTINGS.items():
        runs = [row for row in rows if row["setting"] == name]
        found = [spread([row[of] for row in runs if of in row]) for of in ("test_accuracy", "averaged_accuracy")]
        minutes = f"{statistics.mean(row['process_seconds'] for row in runs) / 60:.1f}" if runs else ""
        cells = [f"`{name}`: {setting.title}", setting.published, *found, str(len(runs)), minutes]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def spread(accuracies: Sequence[float]) -> str:
    if len(accuracies) < 2:
        return f"{100 * accuracies[0]:.1f}" if accuracies else "not measured"
    return f"{100 * statistics.mean(accuracies):.1f} ± {100 * statistics.stdev(accuracies):.1f}"


if __name__ == "__main__":
    main()
