"""What the recipes with a loop of their own share: command-line arguments, a held-out fifth, accuracy, and the report
at the end."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace

import torch
from fine_tuning import HelpFormatter
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split


def parse_arguments(description: str, *, epochs: float, batch_size: int, learning_rate: float) -> Namespace:
    """Arguments from the command line; logging and seeds are set accordingly."""
    parser = ArgumentParser(description=description, formatter_class=HelpFormatter)
    parser.add_argument("--no_privacy", action="store_true", help="Train the same without privacy, for comparison.")
    parser.add_argument("--target_epsilon", type=float, default=8.0, help="The privacy budget.")
    parser.add_argument(
        "--target_delta", type=float, default=1e-5, help="The delta of (epsilon, delta); smaller than 1/N."
    )
    parser.add_argument(
        "--max_grad_norm", type=float, default=1.0, help="The clipping bound C: L2 norm of one example's gradient."
    )
    parser.add_argument("--batch_size", type=int, default=batch_size, help="Expected number of examples in a step.")
    parser.add_argument(
        "--max_physical_batch_size", type=int, default=None, help="Examples at once; no influence on the result."
    )
    parser.add_argument("--epochs", type=int, default=epochs, help="Passes over the data, on average.")
    parser.add_argument(
        "--learning_rate", type=float, default=learning_rate, help="Of Adam; private training wants larger ones."
    )
    parser.add_argument("--seed", type=int, default=0, help="Of split and initial weights, never of the noise.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="Where to train.")
    args = parser.parse_args()
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


def report(args: Namespace, epsilon: float, before: float, after: float) -> dict[str, float]:
    """Print and return what was spent and what was learned."""
    print(
        f"\n  epsilon        {epsilon:.3f} at delta = {args.target_delta:g}"
        + ("  NOT PRIVATE" if args.no_privacy else "")
    )
    print(f"  test accuracy  {after:.4f}  ({before:.4f} before training)")
    return {"epsilon": epsilon, "accuracy_before": before, "test_accuracy": after}
