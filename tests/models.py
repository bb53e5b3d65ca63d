"""Small random models and data: ragged lengths, random targets, a vocabulary of 1000, width 32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from dp_transformers.losses.heads import find_per_example_loss

VOCABULARY = 1000
# how options and methods of checkpointing begin, before transformers 5.23 with the other name
CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(hf.TrainingArguments, "activation_checkpointing")
    else "gradient_checkpointing"
)
SHORT, LONG = 8, 48  # on either side of the ghost crossover of a 32 x 64 layer, dp/(d+p) = 21


def build(name: str, *, lora: bool = False, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip
    if name == "bert":
        config = hf.BertConfig(
            **sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=3
        )
        model = hf.BertForSequenceClassification(config)
    elif name == "gpt2":
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0,
                       resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
        )  # fmt: skip
    elif name in ("llama", "llama-tied"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, tie_word_embeddings=name == "llama-tied"))
    elif name == "qwen3":  # queries and keys are normalised by head
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16))
        for norm in (m for m in model.modules() if type(m).__name__ == "Qwen3RMSNorm"):
            nn.init.normal_(norm.weight, mean=1.0, std=0.2)
    elif name == "llama-odd":  # nothing divides by two but the heads
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**sizes, "vocab_size": VOCABULARY + 1, "intermediate_size": 61}))
    else:
        raise ValueError(name)
    return (adapted(model, name) if lora else model).train()


def adapted(model: nn.Module, name: str) -> nn.Module:
    """With LoRA in every linear layer but the head."""
    task = "SEQ_CLS" if name == "bert" else "CAUSAL_LM"
    model = get_peft_model(
        model,
        LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules="all-linear", fan_in_fan_out=name == "gpt2"),
    )
    for m in model.modules():  # B starts at zero, and then A has no gradient
        if hasattr(m, "lora_B"):
            nn.init.normal_(m.lora_B["default"].weight, std=0.1)
    return model


MODELS = ["bert", "gpt2", "llama", "llama-tied"]


def batch_for(name: str, length: int, size: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (size, length), generator=generator)
    ids[:, 1] = ids[:, 0]  # a token that repeats within its example
    kept = torch.randint(length // 2, length + 1, (size,), generator=generator)
    mask = (torch.arange(length) < kept[:, None]).long()
    if name == "bert":
        labels = torch.randint(0, 3, (size,), generator=generator)
    else:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def losses_function(model: nn.Module):
    """f(batch) -> (B,), the loss DPTrainer would use."""
    loss = find_per_example_loss(model)

    def losses_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        return loss(model(**inputs), batch["labels"])

    return losses_of


class Net(nn.Module):
    """A plain network: embedding, LayerNorm, a Linear that is called twice, RMSNorm, head tied to the embedding."""

    def __init__(self, vocabulary: int = 50, width: int = 12):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.norm = nn.LayerNorm(width)
        self.twice = nn.Linear(width, width)
        self.rms = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(input_ids))
        x = x + torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(self.rms(x))


class DeepSpeedEngine(nn.Module):
    """What deepspeed's class of this name looks like from outside."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def net_losses(model: nn.Module):
    def losses_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["input_ids"])
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)

    return losses_of
