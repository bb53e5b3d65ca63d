"""LoRA in a BERT, with ghost clipping and its criterion, as in the tutorial on texts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from . import made_up

BATCH_SIZE, DELTA = 64, 1e-5


class Bert(nn.Module):
    """BERT with an adapter beside the queries and values, which is trained with the classifier."""

    def __init__(self):
        super().__init__()
        sizes = {"vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = BertConfig(**sizes, intermediate_size=512, num_labels=3, attn_implementation="eager")
        lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=32, lora_alpha=32, lora_dropout=0.05)
        self.bert = get_peft_model(BertForSequenceClassification(config), lora)

    def forward(self, ids):
        return self.bert(input_ids=ids, attention_mask=(ids != made_up.PADDING).long()).logits


def plain(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        yield model, None


def private(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from dp_transformers import PrivacyEngine

    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, epochs=epochs, target_epsilon=7.5, target_delta=DELTA,
        max_grad_norm=0.1, criterion=criterion, clipping_mode="ghost",
    )  # fmt: skip
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        yield model, engine


def opacus(data: TensorDataset, epochs: int) -> Iterator[made_up.State]:
    from opacus import PrivacyEngine

    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, epochs=epochs, target_epsilon=7.5, target_delta=DELTA,
        max_grad_norm=0.1, criterion=criterion, grad_sample_mode="ghost",
    )  # fmt: skip
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        yield model, engine


def rows(number: int) -> TensorDataset:
    return TensorDataset(*made_up.texts(number, 16, 100, 3))


def outcome(model: nn.Module, test: TensorDataset) -> float:
    return made_up.accuracy(model, *test.tensors)
