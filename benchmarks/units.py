"""A step of persons beside a step of as many rows, and a step of views beside as many plain rows.

    python -m benchmarks.units

Every draw takes all of the data (rate 1), so that steps are alike: of 64 rows, of 16 persons with 4 rows each, of 16
images with 8 views each. Times are process times of late steps, medians of turns that alternate in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from dp_transformers import PrivacyEngine

PERSONS, ROWS, VIEWS, CLASSES = 16, 4, 8, 10


def bert(lora: bool = False) -> nn.Module:
    config = BertConfig(
        vocab_size=2000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        max_position_embeddings=64, num_labels=CLASSES, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            net = BertForSequenceClassification(config)
            adapters = LoraConfig(r=8, target_modules=["query", "key", "value"], modules_to_save=["classifier"])
            self.net = get_peft_model(net, adapters) if lora else net

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.net(input_ids=ids).logits

    return Logits()


def convolutional() -> nn.Module:
    first = (nn.Conv2d(1, 16, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1))
    second = (nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, CLASSES))


class Turned(TensorDataset):
    """Images, each time turned or not."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, ...]:
        image, label = super().__getitem__(i)
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), label


def private(model: nn.Module, data: TensorDataset, batch_size: int, **options: object) -> Iterator[None]:
    """Take a private step each time that it is asked for one."""
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size), noise_multiplier=1.0,
        max_grad_norm=1.0, loss_reduction="none", **options,
    )  # fmt: skip
    while True:
        for inputs, labels in loader:
            engine.backward(F.cross_entropy(model(inputs), labels, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
            yield


def plain(model: nn.Module, data: TensorDataset, batch_size: int) -> Iterator[None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        for inputs, labels in DataLoader(data, batch_size):
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def medians(contenders: dict[str, Callable[[], Iterator[None]]], turns: int, warm: int) -> dict[str, float]:
    """Return milliseconds of a late step."""
    steps, seconds = {name: make() for name, make in contenders.items()}, {name: [] for name in contenders}
    for turn in range(warm + turns):
        for name, step in steps.items():
            start = time.process_time()
            next(step)
            if turn >= warm:
                seconds[name].append(time.process_time() - start)
    return {name: 1000 * statistics.median(each) for name, each in seconds.items()}


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--turns", type=int, default=25)
    p.add_argument("--warm", type=int, default=20)
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    number = PERSONS * ROWS
    texts = TensorDataset(torch.randint(2000, (number, 32)), torch.randint(CLASSES, (number,)))
    images = Turned(torch.randn(number, 1, 28, 28), torch.randint(CLASSES, (number,)))
    few = Turned(*(x[:PERSONS] for x in images.tensors))
    owners = {"unit_column": [i % PERSONS for i in range(number)], "rows_per_unit": ROWS}
    table = []
    for name, build, data in (
        ("BERT, 2 layers", bert, texts),
        ("its LoRA", partial(bert, lora=True), texts),
        ("CNN, 26 k", convolutional, images),
    ):
        found = medians(
            {
                "plain": lambda build=build, data=data: plain(build(), data, number),
                "rows": lambda build=build, data=data: private(build(), data, number),
                "persons": lambda build=build, data=data: private(build(), data, PERSONS, **owners),
            },
            args.turns,
            args.warm,
        )
        table.append({"model": name, **found, "persons: speed of rows": found["rows"] / found["persons"]})
    found = medians(
        {
            "plain": lambda: plain(convolutional(), few, PERSONS),
            "views": lambda: private(convolutional(), few, PERSONS, augmentation_multiplicity=VIEWS),
        },
        args.turns,
        args.warm,
    )
    speed = VIEWS * found["plain"] / found["views"]
    table.append({"model": f"CNN, {VIEWS} views of {PERSONS}", **found, f"speed of {VIEWS} plain": speed})
    for row in table:
        print({name: x if isinstance(x, str) else round(x, 2) for name, x in row.items()})


if __name__ == "__main__":
    main()
