"""Tell the language of a surname with an LSTM over its characters, in a plain PyTorch loop with differential privacy.

    python recipes/name_classification.py

The same training without privacy, for comparison:

    python recipes/name_classification.py --twin

10,676 of 13,345 surnames from 15 countries are trained on, the others are held out.
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

MAX_LENGTH = 16
ALPHABET = "abcdefghijklmnopqrstuvwxyzßàáâäåçèéêëìíîïñòóôõöøùúûüýćčďđěėęğĺľłńňŕřśšťůźžāēīūőű '-.()"
PADDING, UNKNOWN = 0, 1


def encode(names: list[str]) -> torch.Tensor:
    """(N, MAX_LENGTH) numbers of characters, the end padded. The alphabet is fixed beforehand: one taken from the
    names would not be private."""
    numbers = {character: i for i, character in enumerate(ALPHABET, start=2)}
    ids_nt = torch.full((len(names), MAX_LENGTH), PADDING)
    for row, name in zip(ids_nt, names, strict=True):
        characters = name.lower()[:MAX_LENGTH]
        row[: len(characters)] = torch.tensor([numbers.get(character, UNKNOWN) for character in characters])
    return ids_nt


class NameClassifier(nn.Module):
    """The state of an LSTM after the last character."""

    def __init__(self, num_classes: int, dim: int = 64, hidden: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(2 + len(ALPHABET), dim, padding_idx=PADDING)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, ids_bt: torch.Tensor) -> torch.Tensor:
        states_bth, _ = self.lstm(self.embedding(ids_bt))
        last_b = (ids_bt != PADDING).sum(1).clamp(min=1) - 1
        return self.head(states_bth[torch.arange(len(ids_bt), device=ids_bt.device), last_b])


@dataclass
class Arguments(plain_loop.Arguments):
    """The recipe's defaults."""

    output_dir: str = field(
        default="outputs/name_classification", metadata={"help": "Where model, ledger and report go."}
    )


def main() -> dict:
    args = plain_loop.parse_arguments(__doc__, Arguments)
    names, languages = assets.surnames()
    train_data, test = plain_loop.hold_out(encode(names), torch.tensor(languages), args.seed)
    model = NameClassifier(len(assets.SURNAME_LOCALES)).to(args.device)
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
        for ids_bt, y_b in loader:
            loss = F.cross_entropy(model(ids_bt.to(args.device)), y_b.to(args.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        done = {"epochs": epoch + 1}
        engine.save_checkpoint(plain_loop.checkpoint_of(args), module=model, optimizer=optimizer, checkpoint_dict=done)
        print(f"epoch {epoch + 1:2}: test accuracy {plain_loop.accuracy(model, *test):.4f}", flush=True)

    return plain_loop.report(args, engine, model, test, before)


if __name__ == "__main__":
    fine_tuning.run(main)
