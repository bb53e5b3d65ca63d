"""Any architecture of transformers made tiny: its configuration by the names of its fields, random weights, and a
batch of three ragged examples that the model accepts."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

TASKS = (
    "CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "MULTIPLE_CHOICE",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
)
VOCABULARY, CLASSES, CHOICES = 200, 3, 2
LENGTHS = (12, 9, 6)  # of the examples' texts
IDS = {"pad": 0, "bos": 1, "eos": 2, "mask": 3, "sep": 2, "cls": 1, "unk": 4, "decoder_start": 1}
WORDS = (10, 150)  # ids of texts; those of images, sounds and so on come after

# The first pattern that a field's whole name matches says how large its numbers may be; None leaves them as they are.
# Smaller ones are rounded down to a power of two, so that heads divide widths.
SIZES = {
    r".*(drop|jitter|kv_shared).*|mask_\w+_prob|replace_prob": 0,
    r".*kernel.*|pool_size|stem_channels|(stem_)?num_channels|.*bandwidths|.*multiplier|.*ratios?|.*rope_theta": None,
    r".*vocab.*": VOCABULARY,
    r".*rotary_dim": 4,
    r".*(head_dim|head_size|d_head|dim_head|d_kv|kv_channels)|(linear_)?(qk|v|key|value)_\w*dim": 8,
    r".*(kv_heads|key_value_heads|kv_n_heads|n_group|n_groups|ngroups|topk_group|num_groups)": 2,
    r".*(heads|n_head)": 4,
    r".*(experts_per_tok|moe_topk|moe_k|moe_top_k|shared_experts)": 2,
    r".*experts": 4,
    r".*(layers|n_layer|layer_num|depths?|num_blocks|block_repeats)|num_self_attends_per_block": 2,
    r".*(interval|period|pattern|every_n_layers|sparse_step|layer_group_size)": 2,
    r".*offset|first_k_dense_replace": 1,
    r"sliding_window.*|attention_window.*|local_attention|\w+_attn_chunk_length": 4,
    r".*(position|max_length|seq_len|n_ctx|context_length).*": 64,
    r"image_size|input_size|crop_size": 32,
    r".*patch_size|window_size": 4,
    r".*(hidden|size|dim|d_model|embd|width|channels|inner|rank|d_ff|dff|latents|mel_bins).*": 32,
}
# Sizes that some classes do not derive from others where they are None.
UNSET = {
    "vocab_size": VOCABULARY,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}

# What the names of fields do not say, by type of configuration.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2},
    "bros": {"hidden_size": 64},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "cvt": {"depth": [1, 2, 4]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "efficientnet": {"hidden_dim": 2560, "num_block_repeats": [1] * 7},  # or numbers grow from layer to layer
    "focalnet": {"use_post_layernorm": True, "use_layerscale": True},  # or numbers grow from layer to layer
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hgnet_v2": {"stem_channels": [3, 32, 32]},
    "hiera": {"patch_size": [7, 7]},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "levit": {"patch_size": 16, "image_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "mobilevitv2": {"image_size": 64},
    "musicgen_decoder": {"num_codebooks": 1},  # of several, a row is not an example
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "neomme": {"head_dim": 16},
    "perceiver": {"num_cross_attention_heads": 1, "max_position_embeddings": LENGTHS[0]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, LENGTHS[0] // 4]},
    "shieldgemma2": {"yes_token_index": 20, "no_token_index": 30},
    "swin": {"image_size": 64, "window_size": 2},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},  # doubled at each of six levels
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
}


def cells() -> list[tuple[str, str]]:
    """Every task with every class that transformers registers under it."""
    return [(task, name) for task in TASKS for name in sorted(classes(task))]


def classes(task: str) -> dict[str, str]:
    """The names of the classes under this task, and the type of each one's configuration."""
    found: dict[str, str] = {}
    for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
        for name in [names] if isinstance(names, str) else names:
            found.setdefault(name, model_type)
    return found


def build(task: str, name: str) -> nn.Module:
    """A model of this class in training mode without dropout; weights of standard deviation 0.2 at least, also those
    that begin at zero or one."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config_class = model_class.config_class or transformers.CONFIG_MAPPING[classes(task)[name]]
    num_labels = 2 if task == "QUESTION_ANSWERING" else CLASSES
    model = model_class(tiny_config(config_class, num_labels=num_labels, is_decoder=task == "CAUSAL_LM"))
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(torch.randn_like(p), alpha=0.2)
    for module in model.modules():  # some heads set it themselves
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.float().train()


def tiny_config(config_class: type, **given: Any) -> Any:
    """A configuration of this class and of the classes of its parts, whose sizes are those of :data:`SIZES`, with one
    layer of each kind."""
    default = config_class()
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        value = field.default_factory() if callable(field.default_factory) else field.default
        smaller = UNSET.get(field.name) if value is None else shrunk(field.name, value)
        if smaller != value:
            values[field.name] = smaller
    values |= {f"{name}_token_id": id for name, id in IDS.items() if hasattr(default, f"{name}_token_id")}
    if default.is_encoder_decoder:
        values["decoder_start_token_id"] = IDS["decoder_start"]
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    if fields.get("num_key_value_heads", 0) == fields.get("num_attention_heads"):
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name in {"layer_types", "layers_block_type"} & set(fields):
        if kinds := list(dict.fromkeys(getattr(default, name) or [])):
            values |= {name: kinds * (1 if len(kinds) > 1 else 2), "num_hidden_layers": max(2, len(kinds))}
    values |= {name: tiny_config(type(part)) for name, part in parts(default).items()}
    values |= {name: value for name, value in given.items() if name == "num_labels" or hasattr(default, name)}
    return config_class(**{**values, **EXCEPTIONS.get(config_class.model_type, {})})


def parts(config: Any) -> dict[str, Any]:
    found = {name: getattr(config, name, None) for name in config.sub_configs}
    return {name: part for name, part in found.items() if isinstance(part, transformers.PretrainedConfig)}


def shrunk(name: str, value: Any) -> Any:
    """``value`` with its numbers made as small as the field's name allows."""
    if isinstance(value, (list, tuple)):
        return type(value)(shrunk(name, item) for item in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if re.fullmatch(r".*(token|_)(id|index)", name) and value >= VOCABULARY:
        return WORDS[1] + sum(name.encode()) % (VOCABULARY - WORDS[1])
    limit = next((limit for pattern, limit in SIZES.items() if re.fullmatch(pattern, name)), None)
    if limit is None or (limit and value <= 1):
        return value
    return type(value)(limit if value >= limit else 2 ** (int(value).bit_length() - 1))


# ---- batches ----


def batch_for(model: nn.Module, task: str) -> dict[str, torch.Tensor]:
    """Three examples with labels: texts of 12, 9 and 6 words that end with an end, pictures, or sounds."""
    torch.manual_seed(1)
    takes = inspect.signature(model.forward).parameters
    labels = torch.arange(len(LENGTHS))
    if task == "IMAGE_CLASSIFICATION":
        return pictures(model) | {"labels": labels % CLASSES}
    if task == "AUDIO_CLASSIFICATION":
        return sounds(model) | {"labels": labels % CLASSES}
    batch = texts(model.config, with_question=task in ("QUESTION_ANSWERING", "MULTIPLE_CHOICE"))
    batch = {name: x for name, x in batch.items() if name in takes}
    if model.config.model_type == "voxtral_realtime":  # as long as the text
        batch["input_features"] = torch.randn(len(LENGTHS), model.config.audio_config.num_mel_bins, 8 * LENGTHS[0])
    ids, own = batch["input_ids"], batch_mask()
    if task == "QUESTION_ANSWERING":
        return batch | {"start_positions": torch.tensor([6, 5, 5]), "end_positions": torch.tensor([8, 7, 5])}
    if task == "MULTIPLE_CHOICE":
        batch = {name: torch.stack([x, x.roll(1, 0)], 1) for name, x in batch.items()}
        batch["input_ids"][:, 1, 0] = IDS["unk"]  # one that reads no other word (MRA on a CPU) tells them apart
        return batch | {"labels": labels % CHOICES}
    if task == "SEQUENCE_CLASSIFICATION":
        return batch | {"labels": labels % CLASSES}
    targets = {"TOKEN_CLASSIFICATION": torch.randint(0, CLASSES, ids.shape), "CAUSAL_LM": ids}
    return batch | {"labels": targets.get(task, ids.roll(3, 1)).masked_fill(~own, -100)}


def batch_mask() -> torch.Tensor:
    return torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]


def texts(config: Any, *, with_question: bool) -> dict[str, torch.Tensor]:
    """Whatever a model of texts may ask for: three rows that begin with a beginning and end with an end, some with two
    separators behind a question, and where each word stands on a page."""
    own = batch_mask()
    vocabulary = min(WORDS[1], getattr(config.get_text_config(), "vocab_size", WORDS[1]))
    ids = torch.randint(WORDS[0], vocabulary, own.shape)
    ids[:, 0] = IDS["bos"]
    ids[range(len(ids)), own.sum(1) - 1] = IDS["eos"]
    if with_question:
        ids[:, 2:4] = IDS["sep"]
    kinds = [len(config.type_vocab_sizes)] if hasattr(config, "type_vocab_sizes") else []  # of TAPAS, several at once
    corners = torch.randint(0, 30, (*ids.shape, 2))
    return {
        "input_ids": ids.masked_fill(~own, IDS["pad"]),
        "attention_mask": own.long(),
        "token_type_ids": torch.zeros(*ids.shape, *kinds, dtype=torch.long),
        "bbox": torch.cat([corners, corners + torch.randint(1, 30, corners.shape)], -1),
        "visual_feats": torch.randn(len(ids), 5, 32),
        "visual_pos": torch.rand(len(ids), 5, 4),
    }


def pictures(model: nn.Module) -> dict[str, torch.Tensor]:
    config = getattr(model.config, "vision_config", model.config)
    size, channels = len(LENGTHS), getattr(config, "num_channels", 3)
    if model.main_input_name == "input_ids":  # pixels are words
        return {"input_ids": torch.randint(*WORDS, (size, LENGTHS[0]))}
    if "spatial_shapes" in inspect.signature(model.forward).parameters:  # patches in rows
        shapes = torch.tensor([[2, 3], [3, 2], [2, 2]])
        return {
            "pixel_values": torch.randn(size, 6, channels * config.patch_size**2),
            "pixel_attention_mask": (torch.arange(6) < shapes.prod(1)[:, None]).long(),
            "spatial_shapes": shapes,
        }
    side = getattr(config, "image_size", None) or 32
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return {model.main_input_name: torch.randn(size, channels, height, width)}


def sounds(model: nn.Module) -> dict[str, torch.Tensor]:
    config = model.config
    if hasattr(config, "conv_stride"):
        return {"input_values": torch.randn(len(LENGTHS), 4000)}
    if config.model_type == "whisper":
        return {"input_features": torch.randn(len(LENGTHS), config.num_mel_bins, 2 * config.max_source_positions)}
    frames = getattr(config, "max_length", 16)
    bins = getattr(config, "feature_projection_input_dim", None) or config.num_mel_bins
    return {model.main_input_name: torch.randn(len(LENGTHS), frames, bins)}
