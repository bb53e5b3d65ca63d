"""The common part of the recipes with a loop of their own: flags, a held-out fifth, training, accuracy, and the report
at the end."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from flags import RecipeParser
from outcome import REPORT_NAME, TWIN, TWIN_HELP, Outcome, print_table
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split

from dp_transformers import PrivacyEngine
from dp_transformers.reports.words import up

PRIVACY = ["target_epsilon", "target_delta", "expected_batch_size", "max_grad_norm", "twin"]


@dataclass
class Arguments:
    """The flags of a loop, by the names that they have in the other recipes."""

    target_epsilon: float = field(default=8.0, metadata={"help": "Privacy budget."})
    target_delta: float = field(default=1e-5, metadata={"help": "The delta of (epsilon, delta); smaller than 1/N."})
    expected_batch_size: int = field(default=512, metadata={"help": "Expected number of examples in a step."})
    max_grad_norm: float = field(
        default=1.0, metadata={"help": "The clipping bound C: L2 norm of one example's gradient."}
    )
    twin: bool = field(default=False, metadata={"help": TWIN_HELP})
    output_dir: str = field(default="outputs/plain_loop", metadata={"help": "Where model, ledger and report go."})
    num_train_epochs: int = field(default=20, metadata={"help": "Passes over the data, on average."})
    per_device_train_batch_size: int | None = field(
        default=None, metadata={"help": "Examples at once; no influence on the result."}
    )
    learning_rate: float = field(default=5e-3, metadata={"help": "Of Adam; private training wants larger ones."})
    seed: int = field(default=0, metadata={"help": "Of split and initial weights, never of the noise."})
    use_cpu: bool = field(default=False, metadata={"help": "Train on the CPU, also where there is a GPU."})

    def __post_init__(self) -> None:
        if self.twin:
            self.output_dir = os.path.join(self.output_dir, TWIN)

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"


def parse_arguments(description: str, arguments: type[Arguments]) -> Arguments:
    """Arguments from the command line; logging and seeds are set accordingly.

    Raises:
        ValueError: a launcher has started several processes, each of which would train a model of its own.
    """
    training = [each.name for each in fields(arguments) if each.name not in PRIVACY]
    (args,) = RecipeParser((arguments,), {"Privacy": PRIVACY, "Training": training}, description).parse()
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"this recipe trains in one process, and {processes} were started: type dp-transformers train RECIPE "
            "without --num_processes, or accelerate launch --num_processes 1."
        )
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("dp_transformers").setLevel(logging.INFO)
    torch.manual_seed(args.seed)
    return args


def hold_out(
    inputs: torch.Tensor, labels: torch.Tensor, seed: int
) -> tuple[Dataset, tuple[torch.Tensor, torch.Tensor]]:
    """Four fifths to train on, and inputs and labels of the rest."""
    train, test = random_split(TensorDataset(inputs, labels), [0.8, 0.2], torch.Generator().manual_seed(seed))
    return train, test.dataset[test.indices]


def checkpoint_of(args: Arguments) -> Path:
    """The file that every epoch is saved to."""
    return Path(args.output_dir, "checkpoint.pt")


def epochs_done(engine: PrivacyEngine, args: Arguments, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the number of epochs that an earlier start of the same command trained. Model and optimizer go on from
    there."""
    if not checkpoint_of(args).is_file():
        return 0
    print(f"going on with the training in {args.output_dir}; take another --output_dir for a new one", flush=True)
    return engine.load_checkpoint(checkpoint_of(args), module=model, optimizer=optimizer)["epochs"]


def accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        right = [
            (model(x.to(device)).argmax(1).cpu() == y).sum()
            for x, y in zip(inputs.split(512), labels.split(512), strict=True)
        ]
    model.train()
    return float(sum(right)) / len(labels)


def report(args: Arguments, engine: PrivacyEngine, model: nn.Module, test: tuple, before: float) -> dict:
    """Print and return the privacy spent and the accuracy, and write them to privacy_report.json in the folder of the
    certificate."""
    inputs, labels = test
    majority = float(labels.bincount().max()) / len(labels)
    outcome = Outcome("test accuracy", accuracy(model, inputs, labels), "majority baseline", majority, len(labels))
    full = {**engine.privacy_spent(args.target_delta).to_dict(), **outcome.to_dict(), "accuracy_before": before}
    engine.write_certificate(args.target_delta)
    engine.detach()
    Path(args.output_dir, REPORT_NAME).write_text(json.dumps(full, indent=2))
    table = {"epsilon": "infinite: NOT PRIVATE", "to hand over": "nothing: this training is NOT PRIVATE"}
    if full["private"]:
        table["epsilon"] = f"{up(full['epsilon'])} at delta = {args.target_delta:g}"
        table["to hand over"] = f"dp-transformers report {args.output_dir}"
    print_table({"epsilon": table["epsilon"], **outcome.rows(full, args.output_dir), **table})
    return full
