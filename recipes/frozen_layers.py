"""What frozen layers below the first trained one compute: once for each text, and not in every epoch.

The layers stay where they are, and let through what is kept. An example's loss, its gradient and ε are those of the
whole model, whose dropout must be 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainingArguments

IGNORE_INDEX = -100
MOST_KEPT = 8 * 2**30  # bytes of outputs of frozen layers; with more, these layers compute in each epoch


class HiddenStates(Dataset):
    """Rows of a tokenized data set, with the output of the last frozen layer in the place of the tokens.

    Args:
        hidden_td: The output for the tokens of all rows, one row after the other. One tensor and not one for each row,
            as garbage collection looks through tensors again and again.
        lengths: The number of tokens in each row.
    """

    def __init__(self, hidden_td: torch.Tensor, lengths: list[int], labels: list[Any]):
        self._hidden_td, self._starts, self._labels = hidden_td, [0, *accumulate(lengths)], labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        hidden = self._hidden_td[self._starts[i] : self._starts[i + 1]]
        labels = torch.as_tensor(self._labels[i])
        return {"inputs_embeds": hidden, "attention_mask": torch.ones(len(hidden), dtype=torch.long), "labels": labels}


def pad(rows: list[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate rows of :class:`HiddenStates`, padded on the right."""
    fills = {"inputs_embeds": 0.0, "attention_mask": 0, "labels": IGNORE_INDEX}
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
        if rows[0][name].dim()
        else torch.stack([row[name] for row in rows])
        for name, fill in fills.items()
    }


def kept(
    where: str,
    model: PreTrainedModel,
    data: Mapping[str, Any],
    collate: Callable[[list], Mapping],
    args: TrainingArguments,
) -> contextlib.AbstractContextManager[tuple[Mapping[str, Any], Callable[[list], Mapping]]]:
    """:func:`computed_once` where the flag ``--keep_frozen`` says (memory, or a folder); nothing is kept if it says
    no, or if the outputs are larger than MOST_KEPT."""
    tokens = sum(len(ids) for rows in data.values() for ids in rows["input_ids"])
    if where == "no" or 4 * tokens * model.config.get_text_config().hidden_size > MOST_KEPT:
        return contextlib.nullcontext((data, collate))
    folder = None if where == "memory" else Path(where)
    return computed_once(model.to(args.device), data, collate, args.per_device_eval_batch_size, folder)


@contextlib.contextmanager
def computed_once(
    model: PreTrainedModel,
    data: Mapping[str, Any],
    collate: Callable[[list], Mapping],
    batch_size: int,
    folder: Path | None = None,
) -> Iterator[tuple[Mapping[str, Any], Callable[[list], Mapping]]]:
    """Inside, the model takes what its frozen layers make of the texts; these rows and their collator are returned.
    They are the given ones if no layer lies below the first that is trained, or if the model needs the tokens
    elsewhere, as Llama does to find the last one.

    Args:
        data: Tokenized rows of each split, with ``input_ids`` and ``labels``.
        collate: Their collator.
        folder: Where outputs are kept for later trainings, which find them by the tokens and the frozen parameters.
    """
    frozen = frozen_layers(model)
    kept = {}
    for split, rows in data.items() if frozen else ():
        ids = [*rows["input_ids"]]
        file = folder / f"{_digest(frozen, ids)}.pt" if folder else None
        if file and file.exists():
            hidden_td = torch.load(file, mmap=True)
        else:
            hidden_td = _outputs_of(frozen[-1], model, rows, collate, batch_size)
        if file and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(hidden_td, file)
        kept[split] = HiddenStates(hidden_td, [*map(len, ids)], [*rows["labels"]])
    try:
        if frozen and _goes_on_from(model, frozen, kept["train"], data["train"], collate):
            yield kept, pad
        else:
            yield data, collate
    finally:
        for module in frozen:
            module.__dict__.pop("forward", None)


def _goes_on_from(model: PreTrainedModel, frozen: list[nn.Module], kept: Dataset, rows: Any, collate: Any) -> bool:
    """Let frozen modules pass on what they are given, if the outputs for some rows are the same then."""
    some = range(min(8, len(rows)))
    batch = _on_device(collate([rows[i] for i in some]), model)
    with torch.no_grad():
        whole = model(**batch).logits
        for module in frozen:
            module.forward = _let_through
        passed_on = model(**_on_device(pad([kept[i] for i in some]), model)).logits
    at = batch["attention_mask"].bool() if whole.dim() == 3 else slice(None)
    if whole.shape == passed_on.shape and torch.allclose(passed_on[at], whole[at], atol=1e-4):
        return True
    for module in frozen:
        del module.forward
    return False


def frozen_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that come before what is trained, in their order; none if the embeddings or the first layer
    are trained."""
    depth = model.config.get_text_config().num_hidden_layers
    layers = next((list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth), [])
    number = next((i for i, layer in enumerate(layers) if _is_trained(layer)), len(layers))
    words = model.get_input_embeddings()
    parent = next(m for m in model.modules() if any(child is words for child in m.children()))
    embeddings = [] if any(m in layers for m in parent.modules()) else [parent]  # a whole model takes inputs_embeds
    if number == 0 or any(map(_is_trained, [words, *embeddings])):
        return []
    return [*embeddings, *layers[:number]]


def _digest(frozen: list[nn.Module], ids: list[list[int]]) -> str:
    found = hashlib.sha256(repr([type(module).__name__ for module in frozen]).encode())
    for p in (p for module in frozen for p in module.parameters()):
        found.update(p.detach().float().cpu().numpy().tobytes())
    found.update(json.dumps(ids).encode())
    return found.hexdigest()


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _on_device(batch: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: x.to(model.device) for name, x in batch.items()}


def _let_through(*args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    return next(x for x in (*args, inputs_embeds) if isinstance(x, torch.Tensor))


class _Reached(Exception):
    """The layer has computed."""


@torch.no_grad()
def _outputs_of(
    layer: nn.Module, model: PreTrainedModel, rows: Any, collate: Callable[[list], Mapping], batch_size: int
) -> torch.Tensor:
    """Return the (tokens of all rows, width) output of a layer; nothing above it runs."""
    lengths = [*map(len, rows["input_ids"])]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)

    def keep(_, args: tuple, output: torch.Tensor) -> None:
        outputs.append(output)
        raise _Reached

    outputs: list[torch.Tensor] = []
    was_training, hook = model.training, layer.register_forward_hook(keep)
    found_td: torch.Tensor | None = None
    starts = [0, *accumulate(lengths)]
    try:
        model.eval()
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = _on_device(collate([rows[i] for i in chosen]), model)
            with contextlib.suppress(_Reached):
                model(**batch)
            output = outputs.pop()
            if found_td is None:
                found_td = torch.empty(starts[-1], output.shape[-1], dtype=output.dtype)
            for i, row, mask in zip(chosen, output, batch["attention_mask"], strict=True):
                found_td[starts[i] : starts[i + 1]] = row[mask.bool()]
    finally:
        hook.remove()
        model.train(was_training)
    return found_td
