"""The models that are benchmarked, with random weights: transformers of any size, and the four networks of the Opacus
paper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

KINDS = ("bert", "gpt2", "llama", "modernbert", "vit")  # each also as "…-lora"
PATCH = 4  # side of a ViT patch in pixels


@dataclass(frozen=True)
class Shape:
    """Size of a transformer and of its batch. The defaults are those of the published table."""

    width: int = 512
    layers: int = 4
    vocabulary: int = 8000
    tokens: int = 128
    size: int = 16
    rank: int = 16
    inner: int | None = None  # of the MLP of Llama and ModernBERT; default: hidden
    key_value_heads: int | None = None  # of Llama; default: all heads
    head_width: int = 64
    tied: bool = False  # whether Llama's head is its embedding

    @property
    def heads(self) -> int:
        return max(1, self.width // self.head_width)

    @property
    def hidden(self) -> int:
        """Inner width of Llama's MLP, a multiple of 32 near 8/3 of the width."""
        return round(self.width * 43 / 16 / 32) * 32

    @property
    def image_side(self) -> int:
        return PATCH * round(self.tokens**0.5)


def build_transformer(kind: str, shape: Shape) -> nn.Module:
    """In training mode, without dropout; "-lora" freezes all but adapters of ``shape.rank`` at every linear layer."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        ModernBertConfig,
        ModernBertForSequenceClassification,
        ViTConfig,
        ViTForImageClassification,
    )

    torch.manual_seed(0)
    base = kind.removesuffix("-lora")
    sizes = {"hidden_size": shape.width, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
    if base == "bert":
        config = BertConfig(
            **sizes,
            vocab_size=shape.vocabulary,
            intermediate_size=4 * shape.width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=max(512, shape.tokens),
        )
        model = BertForSequenceClassification(config)
    elif base == "gpt2":
        config = GPT2Config(
            vocab_size=shape.vocabulary,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_positions=max(512, shape.tokens),
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model = GPT2LMHeadModel(config)
    elif base == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                **sizes,
                vocab_size=shape.vocabulary,
                intermediate_size=shape.inner or shape.hidden,
                num_key_value_heads=shape.key_value_heads,
                tie_word_embeddings=shape.tied,
                use_cache=False,
            )
        )
    elif base == "modernbert":
        config = ModernBertConfig(
            **sizes,
            vocab_size=shape.vocabulary,
            intermediate_size=shape.inner or shape.hidden,
            pad_token_id=0,
            classifier_pooling="mean",
        )
        model = ModernBertForSequenceClassification(config)
    elif base == "vit":
        config = ViTConfig(
            **sizes, intermediate_size=4 * shape.width, image_size=shape.image_side, patch_size=PATCH, num_labels=10
        )
        model = ViTForImageClassification(config)
    else:
        raise ValueError(f"kind {kind!r} is unknown; choose one of {KINDS}, with or without '-lora'.")
    if kind.endswith("-lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=shape.rank, target_modules="all-linear", fan_in_fan_out=base == "gpt2")
        )
    return model.train()


@dataclass(frozen=True)
class Losses:
    """f(model) -> (B,) cross-entropies of one random batch.

    Attributes:
        batch: What the model is called with, each (B, ...).
        targets: (B,) classes, or (B, T - 1) tokens.
    """

    batch: dict[str, torch.Tensor]
    targets: torch.Tensor

    def __call__(self, model: nn.Module) -> torch.Tensor:
        return self.of(model(**self.batch).logits, self.targets)

    @staticmethod
    def of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """(B,) cross-entropies of (B, K) or (B, T, V) logits."""
        if targets.ndim == 2:
            logits = logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return losses.view(len(logits), -1).mean(1)


def transformer_losses(kind: str, shape: Shape, device: torch.device) -> Losses:
    ids = torch.randint(0, shape.vocabulary, (shape.size, shape.tokens), device=device)
    batch = {"input_ids": ids}
    if kind.startswith("vit"):
        batch = {"pixel_values": torch.randn(shape.size, 3, shape.image_side, shape.image_side, device=device)}
    elif kind.startswith("modernbert"):
        batch["attention_mask"] = torch.ones_like(ids)
    elif not kind.startswith(
        "llama"
    ):  # explicit, because Opacus cannot do with the (1, T) that the model makes itself
        batch["position_ids"] = torch.arange(shape.tokens, device=device).repeat(shape.size, 1)
    if kind.startswith("bert"):
        batch["token_type_ids"] = torch.zeros_like(ids)
    if kind.startswith(("gpt2", "llama")):
        return Losses(batch, ids[:, 1:])
    return Losses(batch, torch.zeros(shape.size, dtype=torch.long, device=device))


class MnistCNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip


class CifarCNN(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for d_in, d_out in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(d_in, d_out, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(d_out, d_out, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
        layers += [
            nn.Conv2d(128, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 10, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ]
        super().__init__(*layers)


class ImdbEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_004, 16)  # ten thousand words and four marks
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(1))


class ImdbLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 100)
        self.lstm = nn.LSTM(100, 100, batch_first=True)
        self.head = nn.Linear(100, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0].mean(1))


@dataclass(frozen=True)
class Network:
    """A network of the paper's Table 1: its number of parameters, its training set's size, and the shape of its
    inputs."""

    build: type[nn.Module]
    parameters: int
    examples: int
    inputs: tuple[int, ...]
    classes: int

    def __call__(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        count = sum(p.numel() for p in model.parameters())
        assert count == self.parameters, (
            f"{self.build.__name__} has {count} parameters, the paper's has {self.parameters}"
        )
        return model

    def batch(self, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Random inputs (B, ...) and labels (B,)."""
        is_text = len(self.inputs) == 1
        shape = (size, *self.inputs)
        x = torch.randint(0, 10_000, shape, device=device) if is_text else torch.randn(shape, device=device)
        return x, torch.randint(0, self.classes, (size,), device=device)


NETWORKS = {
    "mnist-cnn": Network(MnistCNN, 26_010, 60_000, (1, 28, 28), 10),
    "cifar-cnn": Network(CifarCNN, 605_226, 50_000, (3, 32, 32), 10),
    "imdb-embedding": Network(ImdbEmbedding, 160_098, 25_000, (256,), 2),
    "imdb-lstm": Network(ImdbLSTM, 1_081_002, 25_000, (256,), 2),
}
