"""Per-example losses of the heads of transformers, computed from logits and labels outside of the model.

A model's own loss is a mean over the batch (often over all its tokens), so one example's gradient would depend on the
lengths of other examples. Here example i's loss depends on example i alone: a token loss is divided by the example's
own number of labelled tokens. On a batch of one, each loss is the model's own.

Shape legend: B examples, T positions, V classes or vocabulary, N rows (examples or tokens), K rows of a chunk that
have a target.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

IGNORE_INDEX = -100

# (model outputs, labels or a tuple of labels) -> (B,), or (model, inputs) -> (B,)
PerExampleLoss = Callable[[Any, Any], torch.Tensor]

# of heads, as transformers' auto mappings name them, and the first that names a class: BART is under masked_lm too
_KINDS = (
    "seq_to_seq_causal_lm", "speech_seq_2_seq", "causal_lm", "masked_lm", "token_classification",
    "question_answering", "sequence_classification", "image_classification", "audio_classification",
    "multiple_choice",
)  # fmt: skip
_ENCODER_DECODERS = ("seq_to_seq_causal_lm", "speech_seq_2_seq")  # decoder inputs are the shifted labels
_OF_CLASSES = ("sequence_classification", "image_classification", "audio_classification")
_OF_ONE_CLASS = "single_label_classification"

# Heads in these mappings with another loss (every forward of transformers 5.23 was read for this list).
_OTHER_CONVENTIONS = {
    # causal, but the labels are not shifted
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "CpmAntForCausalLM", "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM",
    "PegasusForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM", "XLNetLMHeadModel",
    # several streams or codebooks of predictions, image tokens before the text, an adaptive softmax, scores of a
    # prompt's "Yes"
    "ProphetNetForCausalLM", "ProphetNetForConditionalGeneration", "MusicgenForCausalLM",
    "MusicgenMelodyForCausalLM", "GitForCausalLM", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel",
    "ShieldGemma2ForImageClassification",
    # the loss leaves out tokens by another input
    "BioGptForTokenClassification", "BrosForTokenClassification", "MraForTokenClassification",
    "XLMRobertaXLForTokenClassification", "YosoForTokenClassification",
    # the labels change more than the decoder's input_ids
    "EncoderDecoderModel", "SpeechEncoderDecoderModel", "FSMTForConditionalGeneration",
}  # fmt: skip


def sequence_classification_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, problem_type: str | None = None, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return (B,) losses from logits (B, V): cross-entropy, binary cross-entropy averaged over classes, or squared
    error.

    By default ``problem_type`` is inferred as in transformers: one output is regression, integer labels are
    single-label, float labels multi-label classification.
    """
    if problem_type is None:
        of_classes = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        problem_type = "regression" if logits.shape[-1] == 1 else of_classes
    if problem_type == _OF_ONE_CLASS:
        return _cross_entropy(logits, labels.flatten(), label_smoothing)
    if problem_type not in ("multi_label_classification", "regression"):
        raise ValueError(
            f"config.problem_type is {problem_type!r}: set it to 'regression', 'single_label_classification' or "
            "'multi_label_classification'."
        )
    _refuse_smoothing(label_smoothing, problem_type)
    if logits.shape != (labels.unsqueeze(-1) if labels.dim() == 1 else labels).shape:
        raise ValueError(
            f"{problem_type} takes labels of the shape of the logits, {tuple(logits.shape)}, not "
            f"{tuple(labels.shape)}. Give one number for each output, or set config.num_labels and "
            "config.problem_type to what the labels are."
        )
    loss = F.mse_loss if problem_type == "regression" else F.binary_cross_entropy_with_logits
    logits = logits.to(_precision(logits))
    return loss(logits, labels.to(logits).view_as(logits), reduction="none").mean(1)


def token_loss(logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the (B,) mean cross-entropy over each example's labels that are not -100; 0 if it has none.

    Args:
        logits: (B, T, V).
        labels: (B, T). The logits at t predict the label at t, as in masked language models, token classification, and
            encoder-decoders (with shifted decoder inputs).
    """
    losses_bt = _cross_entropy(logits, labels, label_smoothing)
    return losses_bt.sum(1) / (labels != IGNORE_INDEX).sum(1).clamp(min=1).to(logits.device)


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the (B,) mean cross-entropy of the next token over each example's labels that are not -100; 0 if it has
    none.

    Args:
        logits: (B, T, V).
        labels: (B, T), not shifted: the logits at t predict the label at t + 1.
    """
    return token_loss(logits, _shifted(labels), label_smoothing=label_smoothing)


def next_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return (B, T) cross-entropies of the label at t + 1 by the logits at t; 0 if that label is -100, and at the end.

    Args:
        logits: (B, T, V).
        labels: (B, T), not shifted.
    """
    return _cross_entropy(logits, _shifted(labels))


def predicts_next_token(model: nn.Module) -> bool:
    """Return True if the head of ``model`` predicts at each position the label of the next one."""
    return _kind(_base_model(model)) == "causal_lm"


def without_targets_of_padding(labels: Any, attention_mask: Any) -> Any:
    """Mask the labels that padding would predict. With padding on the left, it would predict an example's first label,
    which is not predicted with padding on the right or without padding.

    Args:
        labels: (B, T), not shifted.
        attention_mask: (B, T), 0 at padding. If it is missing or has another shape, the labels are not changed.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != getattr(labels, "shape", None):
        return labels
    after_padding = F.pad(attention_mask[:, :-1] == 0, (1, 0))
    return labels.masked_fill(after_padding.to(labels.device), IGNORE_INDEX)


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def question_answering_loss(
    start_logits: torch.Tensor, end_logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the (B,) mean of the cross-entropies of the start and the end of the answer.

    Args:
        start_logits, end_logits: (B, T), scores of each position.
        labels: (start_positions, end_positions), (B,) each. As in transformers, a position past the end is ignored
            (the answer was truncated), and a negative one is position 0.
    """
    if not isinstance(labels, tuple) or len(labels) != 2:
        raise ValueError(
            "question answering needs two columns of labels: set in the arguments label_names=['start_positions', "
            "'end_positions']."
        )

    def loss(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        positions = positions.flatten().clamp(min=0)
        return _cross_entropy(logits, positions.masked_fill(positions >= logits.shape[1], IGNORE_INDEX))

    return (loss(start_logits, labels[0]) + loss(end_logits, labels[1])) / 2


def find_per_example_loss(model: nn.Module, label_smoothing: float = 0.0) -> PerExampleLoss:
    """Return the per-example loss of ``model``'s head.

    Args:
        model: A transformers model, or a PEFT model around one.
        label_smoothing: As ``TrainingArguments.label_smoothing_factor``, applied within each example.

    Raises:
        ValueError: no per-example loss is known for the head, or a setting adds a loss over the batch.
    """
    base = _base_model(model)
    kind = _kind(base)
    if kind is None:
        raise ValueError(
            f"no per-example loss is known for the head {type(base).__name__}. Pass per_example_loss_func=f to "
            "DPTrainer, with f(outputs, labels) -> (B,), each entry computed from its own example alone "
            "(reduction='none', averaged inside the example only)."
        )
    _refuse_losses_over_the_batch(base)
    others = "question answering" if kind == "question_answering" else _OF_ONE_CLASS
    problem_type = _problem_type(base) if kind in _OF_CLASSES else others
    if problem_type not in (None, _OF_ONE_CLASS):
        _refuse_smoothing(label_smoothing, problem_type)
    virtual_tokens = _virtual_tokens(model) if kind == "causal_lm" else 0

    def per_example_loss(outputs: Any, labels: Any) -> torch.Tensor:
        if kind == "question_answering":
            return question_answering_loss(outputs.start_logits, outputs.end_logits, labels)
        if not isinstance(labels, torch.Tensor):
            raise ValueError(
                f"{type(base).__name__} takes one column of labels, got {len(labels)}: set label_names=['labels'] in "
                "the arguments."
            )
        if kind in (*_OF_CLASSES, "multiple_choice"):
            return sequence_classification_loss(
                outputs.logits, labels, problem_type=problem_type, label_smoothing=label_smoothing
            )
        labels = F.pad(labels, (virtual_tokens, 0), value=IGNORE_INDEX) if virtual_tokens else labels
        loss = causal_lm_loss if kind == "causal_lm" else token_loss
        return loss(outputs.logits, labels, label_smoothing=label_smoothing)

    return per_example_loss


def label_columns(model: nn.Module) -> list[str]:
    """Return the names of a batch's columns with the labels of ``model``'s head."""
    from transformers.utils import find_labels

    return find_labels(type(_base_model(model)))


def default_loss_bound(model: nn.Module) -> float:
    """Return the default bound on an example's released loss: 4 more than the loss of a uniform guess among all
    classes or tokens; 10 for heads without classes (regression, positions, unknown heads)."""
    base = _base_model(model)
    kind, config = _kind(base), cast(Any, getattr(base, "config", None))
    if kind in ("causal_lm", "masked_lm", *_ENCODER_DECODERS):
        return 4 + math.log(config.get_text_config().vocab_size)
    problem_type = _problem_type(base) if kind in (*_OF_CLASSES, "token_classification") else "regression"
    if problem_type == "regression":
        return 10.0
    several = problem_type == "multi_label_classification"  # a mean of losses with two classes each
    return 4 + math.log(2 if several else config.num_labels)


def decoder_inputs(model: nn.Module, labels: Any) -> dict[str, torch.Tensor]:
    """Return ``{"decoder_input_ids": (B, T)}`` for a sequence-to-sequence model, which makes them from its labels, and
    ``{}`` for other models.

    Classification heads of encoder-decoders need none: they start their decoder from the input. A head with an unknown
    loss (it needs per_example_loss_func) gets them if it can make them.
    """
    base = _base_model(model)
    make = _maker_of_decoder_inputs(base)
    if make is None or not isinstance(labels, torch.Tensor) or _kind(base) not in (*_ENCODER_DECODERS, None):
        return {}
    return {"decoder_input_ids": make(labels)}


def _maker_of_decoder_inputs(base: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the model's own function from labels to decoder inputs; None if it is not known."""
    prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return lambda labels: prepare(labels=labels)
    config = cast(Any, getattr(base, "config", None))
    for cls in type(base).__mro__:
        shift = getattr(sys.modules.get(cls.__module__), "shift_tokens_right", None)  # its forward calls this
        if shift is not None and _mapped_kind(cls) in _ENCODER_DECODERS:
            return lambda labels, shift=shift: shift(labels, config.pad_token_id, config.decoder_start_token_id)
    return None


def _virtual_tokens(model: nn.Module) -> int:
    """Return the number of positions that prompt learning (peft) puts before the text, which have no labels."""
    config: Any = getattr(model, "active_peft_config", None)
    in_the_cache = ("PREFIX_TUNING", "CARTRIDGE")
    in_the_input = getattr(config, "is_prompt_learning", False) and config.peft_type not in in_the_cache
    return config.num_virtual_tokens if in_the_input else 0


def _base_model(model: nn.Module) -> nn.Module:
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def _kind(base: nn.Module) -> str | None:
    """Return the kind of head in transformers' auto mappings; None if it, or its loss, is not known for certain."""
    from transformers.utils import find_labels

    for cls in type(base).__mro__:
        kind = _mapped_kind(cls)
        if kind:
            expected = ["start_positions", "end_positions"] if kind == "question_answering" else ["labels"]
            if cls.__name__ in _OTHER_CONVENTIONS or find_labels(cls) != expected:
                return None
            return None if kind in _ENCODER_DECODERS and _maker_of_decoder_inputs(base) is None else kind
        if "forward" in vars(cls):
            return None  # its own forward may have another loss
    return None


def _mapped_kind(cls: type) -> str | None:
    from transformers.models.auto import modeling_auto

    if not cls.__module__.startswith("transformers."):  # code from the Hub reuses the names
        return None
    for kind in _KINDS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{kind.upper()}_MAPPING_NAMES").values():
            if cls.__name__ == names or cls.__name__ in (names if isinstance(names, tuple) else ()):
                return kind
    return None


def _problem_type(base: nn.Module) -> str | None:
    names = [c.__name__ for c in type(base).__mro__]
    if _kind(base) == "audio_classification" and "ASTForAudioClassification" not in names:
        return _OF_ONE_CLASS  # these heads ignore config.problem_type
    config: Any = base.config
    problem_type = config.problem_type
    if problem_type is None and config.num_labels == 1:
        return "regression"
    if problem_type is None and any(name.startswith("Deberta") for name in names):
        return _OF_ONE_CLASS  # DeBERTa would take float labels for soft ones
    return problem_type


def _refuse_losses_over_the_batch(base: nn.Module) -> None:
    for setting, off in {"output_router_logits": False, "z_loss_coefficient": 0.0}.items():
        if value := getattr(base.config, setting, off):
            raise ValueError(
                f"config.{setting}={value} adds a loss over all tokens of the batch, which belongs to no example: set "
                f"model.config.{setting}={off}."
            )
    if hasattr(base, "_loss_function"):
        raise ValueError(
            f"the loss_function of {type(base).__name__} was replaced; it returns one loss for the whole batch and "
            "would not be used. Pass to DPTrainer per_example_loss_func=f with f(outputs, labels) -> (B,)."
        )


def _refuse_smoothing(label_smoothing: float, what: str) -> None:
    if label_smoothing:
        raise ValueError(f"label_smoothing_factor has no meaning for {what}: set it to 0 in the arguments.")


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return losses of the shape of ``targets`` (...) from logits (..., V), 0 where the target is -100, in float32
    (float64 from float64)."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not go with labels of shape {tuple(targets.shape)}: "
            f"{tuple(logits.shape[:-1])} expected, one class for each example (or position, -100 if it has none). "
            "Correct the collator, the label column, or config.problem_type."
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(
            f"class labels must be integers, not {targets.dtype}: cast the label column to int64. For several labels "
            "at once set config.problem_type='multi_label_classification', for numbers 'regression'."
        )
    targets, classes = targets.to(logits.device, torch.long), logits.shape[-1]
    counts = targets != IGNORE_INDEX
    outside = counts & ((targets < 0) | (targets >= classes))
    number, is_outside = torch.stack((counts.sum(), outside.any())).tolist()  # one synchronisation with the device
    if is_outside:
        raise ValueError(
            f"label {targets[outside][0].item()} is not one of the {classes} classes of the logits (0 to "
            f"{classes - 1}, or -100 to ignore). Correct the labels, or load the model with more classes (num_labels; "
            "for tokens model.resize_token_embeddings)."
        )
    counted_k = counts.flatten().nonzero_static(size=number).squeeze(1)
    return _TokenCrossEntropy.apply(logits, targets, counted_k, label_smoothing)


def _precision(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


class _TokenCrossEntropy(torch.autograd.Function):
    """Cross-entropy, a few rows at a time: it allocates only the gradient, in the logits' dtype, and a bounded
    scratch.

    It reads only the rows ``counted_k``, which have a target, and in the backward pass only those with a nonzero
    upstream gradient. All other rows have gradient 0. It saves the logits and one logsumexp per row.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, counted_k: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        logits_nv, targets_n = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        losses_n = torch.zeros(targets_n.shape, dtype=_precision(logits), device=logits.device)
        logsumexp_n = torch.zeros_like(losses_n)
        for rows in _chunks(counted_k, logits_nv):
            x_kv = logits_nv.index_select(0, rows).to(losses_n.dtype)
            logsumexp_n[rows] = x_kv.logsumexp(1)
            target_k = x_kv.gather(1, targets_n[rows, None]).squeeze(1)
            losses_n[rows] = logsumexp_n[rows] - (1 - label_smoothing) * target_k
            if label_smoothing:
                losses_n[rows] -= label_smoothing * x_kv.mean(1)
        ctx.save_for_backward(logits, targets, counted_k, logsumexp_n)
        ctx.label_smoothing = label_smoothing
        return losses_n.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # once_differentiable would accept create_graph if the upstream gradient is a constant
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the per-example losses have no second derivative: call backward without create_graph=True."
            )
        logits, targets, counted_k, logsumexp_n = ctx.saved_tensors
        logits_nv, targets_n, grad_n = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), grads[0].reshape(-1)
        grad_nv = logits_nv.new_zeros(logits_nv.shape)
        for rows in _chunks(counted_k[grad_n[counted_k] != 0], logits_nv):
            p_kv = logits_nv.index_select(0, rows).to(logsumexp_n.dtype).sub_(logsumexp_n[rows, None]).exp_()
            if ctx.label_smoothing:
                p_kv -= ctx.label_smoothing / p_kv.shape[1]
            target_k1 = targets_n[rows, None]
            p_kv.scatter_(1, target_k1, p_kv.gather(1, target_k1) - (1 - ctx.label_smoothing))
            grad_nv.index_copy_(0, rows, p_kv.mul_(grad_n[rows, None]).to(grad_nv.dtype))
        return grad_nv.view(logits.shape), None, None, None


def _chunks(rows_k: torch.Tensor, logits_nv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split the rows such that three float copies of a chunk's logits fit into the scratch."""
    scratch = 2**22 if logits_nv.device.type == "cpu" else 2**26  # bytes: near a CPU's cache; work for a GPU's kernels
    rows = scratch // max(3 * logits_nv.shape[1] * _precision(logits_nv).itemsize, 1)
    return rows_k.split(max(rows, 1))
