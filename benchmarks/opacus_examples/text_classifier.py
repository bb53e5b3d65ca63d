"""The last layer of a BERT, trained in batches of what fits the device, as in the tutorial on texts. δ is smaller than
1/N here; the tutorial's, 1 / (number of batches), is not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from . import made_up

BATCH_SIZE, DELTA = 256, 1e-5


class Bert(nn.Module):
    """BERT's last layer, pooler and classifier are trained, the rest stays as it is."""

    def __init__(self):
        super().__init__()
        sizes = {"vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = BertConfig(**sizes, intermediate_size=512, num_labels=3, attn_implementation="eager")
        self.bert = BertForSequenceClassification(config)
        self.bert.requires_grad_(False)
        for part in (self.bert.bert.encoder.layer[-1], self.bert.bert.pooler, self.bert.classifier):
            part.requires_grad_(True)

    def forward(self, ids):
        return self.bert(input_ids=ids, attention_mask=(ids != made_up.PADDING).long()).logits


def plain(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, None


def private(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from dp_transformers import PrivacyEngine

    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, epochs=epochs, target_epsilon=7.5, target_delta=DELTA,
        max_grad_norm=0.1, max_physical_batch_size=32,
    )  # fmt: skip
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield model, engine


def opacus(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, epochs=epochs, target_epsilon=7.5, target_delta=DELTA,
        max_grad_norm=0.1,
    )  # fmt: skip
    for _ in range(epochs):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=32, optimizer=optimizer) as batches:
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        yield model, engine


def rows(number: int) -> TensorDataset:
    return TensorDataset(*made_up.texts(number, 16, 100, 3))


def outcome(model: nn.Module, test: TensorDataset) -> float:
    return made_up.accuracy(model, *test.tensors)
