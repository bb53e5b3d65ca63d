"""Small random models of every architecture in docs/models.md: real forwards, tiny sizes, weights far from zero."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from dp_transformers.losses.heads import decoder_inputs, find_per_example_loss

VOCABULARY, LABELS = 120, 4
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = TEXT | SPECIAL | {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "num_labels": LABELS}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}

# name: (model class, config class, settings); "+" names a variant of an architecture
ZOO: dict[str, tuple[type, type, dict]] = {
    "BERT": (hf.BertForMaskedLM, hf.BertConfig, TEXT | NO_DROPOUT),
    "RoBERTa": (hf.RobertaForMaskedLM, hf.RobertaConfig, TEXT | NO_DROPOUT | {"pad_token_id": 0}),
    "DistilBERT": (hf.DistilBertForMaskedLM, hf.DistilBertConfig,
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}),
    "ALBERT": (hf.AlbertForMaskedLM, hf.AlbertConfig, TEXT | NO_DROPOUT | {"embedding_size": 16}),
    "DeBERTa-v2": (hf.DebertaV2ForMaskedLM, hf.DebertaV2Config,
        TEXT | NO_DROPOUT | DEBERTA | {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}),
    "DeBERTa-v2 + conv, own keys": (hf.DebertaV2ForMaskedLM, hf.DebertaV2Config,
        TEXT | NO_DROPOUT | DEBERTA | {"max_relative_positions": 16, "conv_kernel_size": 3, "conv_act": "gelu", "share_att_key": False}),
    "ModernBERT": (hf.ModernBertForMaskedLM, hf.ModernBertConfig,
        TEXT | SPECIAL | {"cls_token_id": 3, "sep_token_id": 4, "local_attention": 4, "global_attn_every_n_layers": 2}),
    "ELECTRA": (hf.ElectraForMaskedLM, hf.ElectraConfig, TEXT | NO_DROPOUT | {"embedding_size": 16}),
    "GPT-2": (hf.GPT2LMHeadModel, hf.GPT2Config,
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}),
    "GPT-NeoX": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, TEXT | SPECIAL),
    "OPT": (hf.OPTForCausalLM, hf.OPTConfig,
        {k: v for k, v in TEXT.items() if k != "intermediate_size"} | {"ffn_dim": 48, "word_embed_proj_dim": 32,
         "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 0}),
    "Bloom": (hf.BloomForCausalLM, hf.BloomConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0} |
         SPECIAL),
    "Falcon": (hf.FalconForCausalLM, hf.FalconConfig, {k: v for k, v in TEXT.items() if k != "intermediate_size"} | SPECIAL),
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig, DECODER),
    "Mistral": (hf.MistralForCausalLM, hf.MistralConfig, DECODER | {"sliding_window": 4}),
    "Qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, DECODER),
    "Qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, DECODER),
    "Gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, DECODER),
    "Gemma 2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, DECODER),
    "Gemma 3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, DECODER),
    "Phi-3": (hf.Phi3ForCausalLM, hf.Phi3Config, DECODER),
    "OLMo-2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, DECODER),
    "SmolLM3": (hf.SmolLM3ForCausalLM, hf.SmolLM3Config, DECODER),
    "Mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, DECODER | EXPERTS | {"num_local_experts": 4}),
    "Mixtral + eager experts": (hf.MixtralForCausalLM, hf.MixtralConfig,
        DECODER | EXPERTS | {"num_local_experts": 4, "experts_implementation": "eager"}),
    "Qwen3-MoE": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig,
        DECODER | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 1}),
    "OLMoE": (hf.OlmoeForCausalLM, hf.OlmoeConfig, DECODER | EXPERTS | {"num_experts": 4, "num_key_value_heads": 2}),
    "GPT-OSS": (hf.GptOssForCausalLM, hf.GptOssConfig, DECODER | EXPERTS | {"num_local_experts": 4, "sliding_window": 4}),
    "T5": (hf.T5ForConditionalGeneration, hf.T5Config,
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
         "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}),
    "BART": (hf.BartForConditionalGeneration, hf.BartConfig,
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "dropout": 0.0,
         "scale_embedding": True}),
    "ViT": (hf.ViTForImageClassification, hf.ViTConfig, IMAGE | NO_DROPOUT | {"intermediate_size": 48}),
    "DINOv2": (hf.Dinov2ForImageClassification, hf.Dinov2Config, IMAGE | {"layerscale_value": 0.5}),
    "SigLIP + attention head": (hf.SiglipVisionModel, hf.SiglipVisionConfig, IMAGE | {"intermediate_size": 48}),
    "Mamba": (hf.MambaForCausalLM, hf.MambaConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "use_mambapy": False} | SPECIAL),
}  # fmt: skip
ALWAYS_UNTIED = (
    "GPT-NeoX", "ViT", "DINOv2", "SigLIP + attention head", "Mamba", "DeBERTa-v2 + conv, own keys", "Mixtral + eager experts",
)  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA_TARGETS = {  # where peft refuses all-linear, or warns about it
    **dict.fromkeys(("Mixtral", "Mixtral + eager experts", "Qwen3-MoE", "OLMoE", "GPT-OSS"), ATTENTION),
    "Mamba": ["in_proj", "x_proj"],
}


def build(name: str, *, tied: bool = False, lora: bool = False, seed: int = 0) -> nn.Module:
    model_class, config_class, settings = ZOO[name]
    torch.manual_seed(seed)
    settings = dict(settings)
    experts = settings.pop("experts_implementation", None)
    if name not in ALWAYS_UNTIED:
        settings["tie_word_embeddings"] = tied
    config = config_class(**settings, use_cache=False)
    model = model_class(config)
    if experts:
        model.set_experts_implementation(experts)
    if lora:
        targets = LORA_TARGETS.get(name, "all-linear")
        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=name == "GPT-2")
        )
    with torch.no_grad():  # weights far from zero, so that no gradient vanishes by its start value
        for p in model.parameters():
            p.copy_(0.2 * torch.randn_like(p)) if p.dim() > 1 else p.add_(0.1 * torch.randn_like(p))
    return model.train()


def batch_for(name: str, *, size: int = 5, length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ragged examples with random labels; one of them has no label at all where labels are tokens."""
    generator = torch.Generator().manual_seed(seed)
    model_class, config_class, _ = ZOO[name]
    if "pixel_values" in model_class.main_input_name:
        images = torch.randn(size, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, LABELS, (size,), generator=generator)}

    def text(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(5, VOCABULARY, (size, length), generator=generator)
        ids[:, 1] = ids[:, 0]  # a token that repeats within its example
        kept = torch.randint(length // 2, length + 1, (size,), generator=generator)
        mask = (torch.arange(length) < kept[:, None]).long()
        return ids * mask, mask

    ids, mask = text(length)
    labels = (
        ids if _is_causal(model_class) else torch.randint(5, VOCABULARY, ids.shape, generator=generator)
    ).masked_fill(mask == 0, -100)
    if config_class in (hf.T5Config, hf.BartConfig):
        targets, target_mask = text(length - 2)
        labels = targets.masked_fill(target_mask == 0, -100)
    labels[size - 1] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _is_causal(model_class: type) -> bool:
    return model_class.__name__.endswith(("ForCausalLM", "LMHeadModel"))


def losses_function(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """f(batch) -> (B,), the loss that DPTrainer would use; a random function of the output where the model has no
    head."""
    if not isinstance(getattr(model, "base_model", model), nn.Module) or "labels" not in _forward_names(model):
        return _random_function(model)
    loss = find_per_example_loss(model)

    def losses_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        return loss(model(**inputs, **decoder_inputs(model, batch["labels"])), batch["labels"])

    return losses_of


def _forward_names(model: nn.Module) -> tuple[str, ...]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return (
        base.forward.__wrapped__.__code__.co_varnames
        if hasattr(base.forward, "__wrapped__")
        else base.forward.__code__.co_varnames
    )


def _random_function(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    def losses_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = model(pixel_values=batch["pixel_values"]).pooler_output
        weight = torch.randn(out.shape[1], generator=torch.Generator().manual_seed(1))
        return torch.tanh(out) @ weight

    return losses_of
