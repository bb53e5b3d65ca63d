"""Tries a model on random inputs: the rules that cover its parameters, the errors of clipping, time and memory."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from .. import ModuleValidator, PerExampleClipper, check_model

MODES = ("book_keeping", "ghost", "fast_gradient", "per_sample")
PLAIN = "without privacy"
TASKS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "image_classification": "AutoModelForImageClassification",
    "base": "AutoModel",
}
# new heads, which peft trains together with the adapters
TRAINED_HEADS = {
    "ForSequenceClassification": TaskType.SEQ_CLS,
    "ForTokenClassification": TaskType.TOKEN_CLS,
    "ForQuestionAnswering": TaskType.QUESTION_ANS,
}


@dataclass
class ModelCheck:
    """The result of a check. ``refusals`` are the reasons why the model cannot be trained privately."""

    name: str
    parameters: int
    trainable: int
    examples: int
    refusals: list[str] = field(default_factory=list)
    covered: list[dict[str, Any]] = field(default_factory=list)
    modes: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "can_be_trained_privately": not self.refusals}


def build(
    name: str, task: str | None, lora_rank: int | None, target_modules: str | None, *, from_config: bool
) -> PreTrainedModel | PeftModel:
    """Load the model, with adapters if a rank is given.

    Raises:
        ValueError: there is no such model or task, or peft has no default modules for adapters.
        OSError: it cannot be read.
    """
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not os.path.isdir(name):
        raise ValueError(f"there is no folder '{name}': give one that exists, or the name of a model on the Hub.")
    config = AutoConfig.from_pretrained(name)
    cls = _class_for(config, task)
    if from_config:
        model = cls(config) if hasattr(cls, "config_class") else cls.from_config(config)
    else:
        model = cls.from_pretrained(name, dtype=torch.float32)
    return model if lora_rank is None else _with_lora(model, lora_rank, target_modules)


def _class_for(config: PretrainedConfig, task: str | None) -> Any:
    if task is not None:
        if task not in TASKS:
            raise ValueError(f"--task {task} is unknown; there are {', '.join(TASKS)}.")
        return getattr(transformers, TASKS[task])
    own = getattr(transformers, (config.architectures or [""])[0], None)
    if own is None:
        raise ValueError(f"the configuration does not say which head the model has: give --task ({', '.join(TASKS)}).")
    return own


def _with_lora(model: PreTrainedModel, rank: int, target_modules: str | None) -> PeftModel:
    targets = target_modules if target_modules in (None, "all-linear") else target_modules.split(",")
    task = next((kind for head, kind in TRAINED_HEADS.items() if type(model).__name__.endswith(head)), None)
    return get_peft_model(model, LoraConfig(task_type=task, r=rank, lora_dropout=0.0, target_modules=targets))


def check_model_in_all_modes(model: PreTrainedModel | PeftModel, examples: int, tokens: int) -> ModelCheck:
    """Try the model on random inputs of ``examples`` examples."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    found = ModelCheck(
        name=type(inner).__name__ + (" with LoRA" if inner is not model else ""),
        parameters=sum(size for size, _ in sizes),
        trainable=sum(size for size, trains in sizes if trains),
        examples=examples,
        refusals=[str(problem) for problem in ModuleValidator.validate(model)],
    )
    if found.refusals:
        return found
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nn.Module.to(model, device).train()
    batch = random_batch(model, inner.config, examples, tokens)
    logging.disable(logging.WARNING)  # what the lines would say is in the table
    try:
        found.modes = [_try_mode(model, batch, mode) for mode in MODES]
    except ValueError as error:
        found.refusals.append(str(error))
        return found
    finally:
        logging.disable(logging.NOTSET)
    found.modes.append(_measured(PLAIN, lambda: _losses(model, batch).sum().backward(), model))
    found.covered = _covered(model, batch)
    return found


def random_batch(model: nn.Module, config: PretrainedConfig, examples: int, tokens: int) -> dict[str, torch.Tensor]:
    """Make random inputs for the kind of the model's main input.

    Raises:
        ValueError: inputs of this kind cannot be made.
    """
    text, device = config.get_text_config(), next(model.parameters()).device
    ids = lambda: torch.randint(1, text.vocab_size, (examples, tokens), device=device)  # noqa: E731
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        batch = {"input_ids": ids(), "attention_mask": torch.ones(examples, tokens, dtype=torch.long, device=device)}
        return batch | ({"decoder_input_ids": ids()} if config.is_encoder_decoder else {})
    if main == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        shape = (examples, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, device=device)}
    raise ValueError(
        f"no random inputs can be made for a model that reads '{main}': call dp_transformers.check_model(model, "
        "batch) with a batch of public examples."
    )


def _losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return (B,) losses: the mean square of each example's first output."""
    return model(**batch)[0].flatten(1).square().mean(1)


def _try_mode(model: nn.Module, batch: dict[str, torch.Tensor], mode: str) -> dict[str, Any]:
    report = check_model(model, batch, mode=mode)
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        clipper.check((), batch)
        measured = _measured(mode, lambda: clipper.backward(_losses(model, batch)), model)
    errors = {"norm error": report.norm_error, "sum error": report.sum_error, "loss error": report.loss_error}
    return measured | errors


def _measured(mode: str, step: Callable[[], Any], model: nn.Module) -> dict[str, Any]:
    """Measure time and peak memory of a step, beyond the memory of the model."""

    def once() -> float:
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        model.zero_grad(set_to_none=True)
        return seconds

    once()
    seconds, memory = min(once() for _ in range(3)), _peak_bytes(once)
    return {"mode": mode, "milliseconds": 1e3 * seconds, "MiB": memory / 2**20}


def _peak_bytes(once: Callable[[], Any]) -> int:
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once()
        return torch.cuda.max_memory_allocated() - before
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        once()  # no gradient is left from before: only its release would be recorded
    now = peak = 0
    events: Any = recorded.profiler.kineto_results.events()  # pyrefly: ignore[missing-attribute]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Silence the file descriptor, to which torch's profiler writes directly."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _covered(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Count the parameters by kind of module and kind of rule that covers them."""
    modules: Counter[tuple[str, str]] = Counter()
    parameters: Counter[tuple[str, str]] = Counter()
    counted: set[nn.Parameter] = set()  # a tied weight has several owners
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.check((), batch)
        for owner in clipper.owners:
            by = "a rule" if owner.has_rule else "re-running each example" if owner.is_rerun else "each example apart"
            key = type(owner.module).__name__, by
            modules[key] += 1
            parameters[key] += sum(p.numel() for p in owner.names.keys() - counted)
            counted |= owner.names.keys()
    return [
        {"module": kind, "gradients by": by, "modules": modules[kind, by], "parameters": count}
        for (kind, by), count in parameters.most_common()
    ]
