"""Checks of models and data before anything is trained, and the errors they raise."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import IterableDataset

logger = logging.getLogger(__name__)

_REFUSED_ADAPTERS = {
    "ADALORA": "its regulariser is added to the model's own loss, which is not used here, and it prunes by gradients; use LoRA",
    "XLORA": "its router mixes adapters by a first forward pass that no rule sees; use one LoRA adapter",
    "VBLORA": "all layers share its vector bank in a way that cannot be re-run one example at a time; use LoRA or VeRA",
}
_DATA_DEPENDENT_STARTS = ("eva", "corda", "lora_ga")


def validate_adapters(model: nn.Module) -> None:
    """Raise ValueError, by name, for peft adapters that cannot be trained privately; warn of those initialised from data."""
    for name, config in getattr(model, "peft_config", {}).items():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[-1]
        why = _REFUSED_ADAPTERS.get(kind)
        if getattr(config, "velora_config", None) is not None or getattr(config, "use_velora", False):
            kind, why = "VeLoRA", "it keeps averages of private activations and approximates gradients; use LoRA"
        if getattr(config, "target_parameters", None):
            kind, why = (
                f"{kind} with target_parameters",
                "the adapter is folded into the parameters of the experts, where no per-example gradient can be had; use target_modules, or "
                "train the experts themselves",
            )
        if why:
            raise ValueError(f"adapter '{name}' is {kind}, which cannot be trained privately: {why}.")
        start = getattr(config, "init_lora_weights", None)
        if start in _DATA_DEPENDENT_STARTS:
            logger.warning(
                "adapter '%s' starts from init_lora_weights=%r, which is computed from data: on private examples that leaks them, and epsilon "
                "does not count it. Compute it on public data, or use another start.",
                name,
                start,
            )


def validate_model(model: nn.Module) -> None:
    """Raise ValueError for modules through which one example changes another's gradient, or leaves traces without noise."""
    validate_adapters(model)
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model is compiled (torch.compile); pass the model itself, compiled models are not supported yet.")
    for path, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"'{path}' is a {type(module).__name__} with max_norm: it rewrites the rows of the tokens it sees, trainable or not, without "
                "noise. Build it without max_norm."
            )
        if getattr(module, "track_running_stats", False) and not isinstance(module, _BatchNorm):
            raise ValueError(
                f"'{path}' is a {type(module).__name__} with running statistics, which keep private data without noise. Build it with "
                "track_running_stats=False."
            )
        if isinstance(module, _BatchNorm):
            raise ValueError(
                f"'{path}' is a {type(module).__name__}: it normalises every example with statistics of the whole batch, so no example has a "
                "gradient of its own. Replace it by GroupNorm or LayerNorm."
            )


def validate_training_data(dataset: Any, *, target_delta: float | None, expected_batch_size: int) -> None:
    """Raise ValueError for data that cannot be drawn from by Poisson sampling, or that δ and batch size do not fit."""
    if dataset is None:
        return
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__} without random access: Poisson sampling takes every example with equal probability, "
            "which needs its length and its rows. Use a map-style dataset (for a datasets.IterableDataset: load it without streaming)."
        )
    n = len(dataset)
    if n == 0:
        raise ValueError("train_dataset is empty.")
    if target_delta is not None and target_delta >= 1 / n:
        raise ValueError(
            f"target_delta={target_delta:g} is not smaller than 1/N = {1 / n:.3g} for N = {n} training examples: at that delta, publishing one "
            "example outright would count as private. Choose it well below, for example 1e-6."
        )
    if expected_batch_size > n:
        raise ValueError(
            f"expected_batch_size={expected_batch_size} exceeds the {n} training examples; q would be above 1. Lower expected_batch_size "
            "(or per_device_train_batch_size x gradient_accumulation_steps x processes, from which it derives)."
        )


def longest_input(model: nn.Module) -> int | None:
    """The largest number of positions the model has embeddings for; None where positions are not a table (rotary, ALiBi, ...)."""
    limits = []
    for path, module in model.named_modules():
        name = path.rsplit(".", 1)[-1]
        if isinstance(module, nn.Embedding) and (name == "wpe" or "position_embedding" in name) and type(module) is nn.Embedding:
            limits.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    return min(limits, default=None)


def validate_lengths(model: nn.Module, dataset: Any, column: str = "input_ids") -> None:
    """Raise ValueError if an example is longer than the model's table of positions."""
    limit = longest_input(model)
    if limit is None or len(dataset) == 0:
        return
    longest = _longest_example(dataset, column)
    if longest > limit:
        raise ValueError(
            f"the training data has an example of {longest} tokens, but {type(model).__name__} has position embeddings for {limit} only. "
            f"Truncate when tokenizing: tokenizer(..., truncation=True, max_length={limit})."
        )


def _longest_example(dataset: Any, column: str) -> int:
    features = getattr(dataset, "features", None)
    if features is not None and column in features and getattr(dataset, "format", {}).get("type") != "custom":
        import pyarrow.compute as pc

        lengths = pc.list_value_length(dataset.with_format("arrow")[:][column])
        return pc.max(lengths).as_py() or 0
    first = dataset[0]
    if not (hasattr(first, "get") and hasattr(first.get(column), "__len__")):
        return 0
    return max(len(dataset[i][column]) for i in range(len(dataset)))
