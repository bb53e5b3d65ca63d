"""Read handwritten digits with a small CNN (26,010 parameters), in a plain PyTorch loop with differential privacy.

    python recipes/image_classification.py

The same training without privacy, for comparison:

    python recipes/image_classification.py --twin

4,000 of 5,000 digits of MNIST are trained on, the others are held out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import assets
import fine_tuning
import plain_loop
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from dp_transformers import PrivacyEngine


def build_model() -> nn.Module:
    """Bounded activations learn better under clipping (Papernot et al. 2021, arXiv 2007.14191)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


@dataclass
class Arguments(plain_loop.Arguments):
    """The recipe's defaults."""

    output_dir: str = field(
        default="outputs/image_classification", metadata={"help": "Where model, ledger and report go."}
    )
    expected_batch_size: int = field(default=256, metadata={"help": "Expected number of examples in a step."})


def main() -> dict:
    args = plain_loop.parse_arguments(__doc__, Arguments)
    images, digits = assets.mnist_digits()
    inputs = (images[:, None].float() / 255 - 0.1307) / 0.3081  # mean and deviation of all of MNIST, which are public
    train_data, test = plain_loop.hold_out(inputs, digits.long(), args.seed)
    model = build_model().to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(train_data, batch_size=args.expected_batch_size, shuffle=True)
    before = plain_loop.accuracy(model, *test)

    engine = PrivacyEngine(accountant="pld", ledger_dir=args.output_dir, without_privacy=args.twin)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=args.target_epsilon,
        target_delta=args.target_delta,
        epochs=args.num_train_epochs,
        max_grad_norm=args.max_grad_norm,
        max_physical_batch_size=args.per_device_train_batch_size,
    )
    first_epoch = plain_loop.epochs_done(engine, args, model, optimizer)
    for epoch in range(first_epoch, args.num_train_epochs):
        for x_bchw, y_b in loader:
            loss = F.cross_entropy(model(x_bchw.to(args.device)), y_b.to(args.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        done = {"epochs": epoch + 1}
        engine.save_checkpoint(plain_loop.checkpoint_of(args), module=model, optimizer=optimizer, checkpoint_dict=done)
        print(f"epoch {epoch + 1:2}: test accuracy {plain_loop.accuracy(model, *test):.4f}", flush=True)

    return plain_loop.report(args, engine, model, test, before)


if __name__ == "__main__":
    fine_tuning.run(main)
