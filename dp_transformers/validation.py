"""Checks of models and data before anything is trained, and the errors they raise."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def validate_model(model: nn.Module) -> None:
    """Raise ValueError for modules through which one example changes another's gradient."""
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ValueError(
                f"'{path}' is a {type(module).__name__}: it normalises every example with statistics of the whole batch, so no example has a "
                "gradient of its own. Replace it by GroupNorm or LayerNorm."
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
