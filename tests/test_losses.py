"""Per-example losses: equal to the model's own on each row alone, independent of the other rows, and cheap in
memory."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from models import batch_for, build
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import find_labels

from dp_transformers import find_example_losses
from dp_transformers.losses.heads import (
    causal_lm_loss,
    decoder_inputs,
    find_per_example_loss,
    question_answering_loss,
    sequence_classification_loss,
    token_loss,
)

SIZES = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}  # fmt: skip
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
GPT = {"vocab_size": 100, "n_embd": 16, "n_layer": 1, "n_head": 2, **IDS}
DECODER = {**SIZES, **IDS, "num_key_value_heads": 1, "head_dim": 8}
GEMMA = {**DECODER, "sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}
T5 = {
    "vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {"vocab_size": 100, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_start_token_id": 2, **IDS}  # fmt: skip
IMAGE = {**SIZES, "image_size": 16, "patch_size": 8}
MODERN = {**SIZES, **IDS, "cls_token_id": 0, "sep_token_id": 2}
SOUND = {**SIZES, "conv_dim": (8,), "conv_kernel": (10,), "conv_stride": (5,), "num_feat_extract_layers": 1, "classifier_proj_size": 8,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}  # fmt: skip
SPEECH = {**BART, "num_mel_bins": 8, "max_source_positions": 20}
MOONSHINE = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 16, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1,
             "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 1}  # fmt: skip
SPECTROGRAM = {**SIZES, "num_mel_bins": 16, "max_length": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}
DISTIL = {"vocab_size": 100, "dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2}

HEADS = [
    ("CausalLM", "bert", {**SIZES, "is_decoder": True}),
    ("CausalLM", "gpt2", GPT),
    ("CausalLM", "gpt_neox", {**SIZES, "bos_token_id": 0, "eos_token_id": 2}),
    ("CausalLM", "opt", {**SIZES, **IDS, "ffn_dim": 16, "word_embed_proj_dim": 16}),
    ("CausalLM", "bloom", {"vocab_size": 100, "hidden_size": 16, "n_layer": 1, "n_head": 2, **IDS}),
    ("CausalLM", "falcon", {**SIZES, **IDS}),
    ("CausalLM", "llama", DECODER),
    ("CausalLM", "qwen2", DECODER),
    ("CausalLM", "gemma2", GEMMA),
    ("CausalLM", "gemma3_text", GEMMA),
    ("CausalLM", "phi3", DECODER),
    ("CausalLM", "mixtral", {**DECODER, "num_local_experts": 2}),
    ("CausalLM", "mamba", {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, **IDS}),
    ("MaskedLM", "bert", SIZES),
    ("MaskedLM", "roberta", {**SIZES, **IDS}),
    ("MaskedLM", "distilbert", DISTIL),
    ("MaskedLM", "albert", {**SIZES, "embedding_size": 8}),
    ("MaskedLM", "deberta-v2", SIZES),
    ("MaskedLM", "electra", {**SIZES, "embedding_size": 8}),
    ("MaskedLM", "modernbert", MODERN),
    ("MaskedLM", "modernbert", {**MODERN, "sparse_prediction": True}),
    ("SequenceClassification", "bert", SIZES),
    ("SequenceClassification", "deberta-v2", SIZES),
    ("SequenceClassification", "llama", DECODER),
    ("SequenceClassification", "gpt2", GPT),
    ("SequenceClassification", "bart", BART),
    ("SequenceClassification", "t5", {**T5, "eos_token_id": 2}),
    ("SequenceClassification", "mixtral", {**DECODER, "num_local_experts": 2}),
    ("TokenClassification", "roberta", {**SIZES, **IDS}),
    ("TokenClassification", "electra", {**SIZES, "embedding_size": 8}),
    ("TokenClassification", "qwen2", DECODER),
    ("TokenClassification", "t5", T5),
    ("QuestionAnswering", "bert", SIZES),
    ("QuestionAnswering", "distilbert", DISTIL),
    ("QuestionAnswering", "llama", DECODER),
    ("QuestionAnswering", "bart", BART),
    ("QuestionAnswering", "t5", T5),
    ("MultipleChoice", "bert", SIZES),
    ("MultipleChoice", "deberta-v2", SIZES),
    ("Seq2SeqLM", "t5", T5),
    ("Seq2SeqLM", "bart", BART),
    ("Seq2SeqLM", "mbart", BART),
    ("Seq2SeqLM", "pegasus", BART),
    ("Seq2SeqLM", "m2m_100", BART),  # makes decoder inputs in its forward pass alone
    ("Seq2SeqLM", "blenderbot", BART),
    ("Seq2SeqLM", "nllb-moe", {**BART, "num_experts": 2}),
    ("ImageClassification", "vit", IMAGE),
    ("ImageClassification", "dinov2", IMAGE),
    ("ImageClassification", "siglip", {"vision_config": IMAGE}),
    ("SpeechSeq2Seq", "whisper", SPEECH),
    ("SpeechSeq2Seq", "speech_to_text", {**SPEECH, "input_feat_per_channel": 8, "conv_channels": 8}),
    ("SpeechSeq2Seq", "moonshine", MOONSHINE),
    ("AudioClassification", "wav2vec2", SOUND),
    ("AudioClassification", "hubert", SOUND),
    ("AudioClassification", "wavlm", {**SOUND, "problem_type": "regression"}),  # which it does not read
    ("AudioClassification", "whisper", {**SPEECH, "classifier_proj_size": 8}),
    ("AudioClassification", "audio-spectrogram-transformer", SPECTROGRAM),
]


def head(task: str, name: str, config: dict) -> nn.Module:
    torch.manual_seed(0)
    labels = {} if task in ("QuestionAnswering", "MultipleChoice") else {"num_labels": 3}
    auto = getattr(
        transformers, "AutoModelForQuestionAnswering" if task == "QuestionAnswering" else f"AutoModelFor{task}"
    )
    return auto.from_config(AutoConfig.for_model(name, **config, **labels)).eval()


def rows_for(task: str, size: int = 3, length: int = 7) -> dict[str, torch.Tensor]:
    """A batch with random targets, a ragged number of -100, and positions on both sides of the end."""
    if task == "ImageClassification":
        return {"pixel_values": torch.randn(size, 3, 16, 16), "labels": torch.randint(0, 3, (size,))}
    if task == "AudioClassification":
        return {"labels": torch.randint(0, 3, (size,))}
    shape = (size, 4, length) if task == "MultipleChoice" else (size, length)
    ids = torch.randint(3, 100, shape)
    ids[..., -1] = 2  # BART looks for the end
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if task == "QuestionAnswering":
        return batch | {
            "start_positions": torch.tensor([0, length - 1, 2]),
            "end_positions": torch.tensor([-100, length - 1, 4]),
        }
    if task in ("SequenceClassification", "MultipleChoice"):
        return batch | {"labels": torch.randint(0, 3, (size,))}
    targets = torch.randint(0, 3 if task == "TokenClassification" else 100, shape)
    return batch | {"labels": targets.masked_fill(torch.arange(length) >= torch.tensor([[2], [length], [5]]), -100)}


def as_in_training(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B,) losses with the labels taken out as DPTrainer does: by the names Trainer finds."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    inputs = dict(batch)
    labels = [inputs.pop(name) for name in find_labels(type(base))]
    labels = labels[0] if len(labels) == 1 else tuple(labels)
    return find_per_example_loss(model)(model(**{**decoder_inputs(model, labels), **inputs}), labels)


def check_rows_alone(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    losses = as_in_training(model, batch)
    for i in range(len(losses)):
        alone = model(**{k: v[i : i + 1] for k, v in batch.items()}).loss
        torch.testing.assert_close(losses[i], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("task", "name", "config"), HEADS, ids=[f"{task}-{name}" for task, name, _ in HEADS])
def test_every_kind_of_head_equals_its_own_loss_on_every_row_alone(task, name, config):
    model, batch = head(task, name, config), rows_for(task)
    if task in SHAPES:
        batch = {model.main_input_name: torch.randn(3, *SHAPES[task][name]), "labels": batch["labels"]}
    check_rows_alone(model, batch)


SHAPES = {
    "SpeechSeq2Seq": {"whisper": (8, 40), "speech_to_text": (40, 8), "moonshine": (2000,)},
    "AudioClassification": {"wav2vec2": (200,), "hubert": (200,), "wavlm": (200,), "whisper": (8, 40),
                            "audio-spectrogram-transformer": (16, 16)},
}  # fmt: skip


@pytest.mark.parametrize(("task", "name", "config"), [("Seq2SeqLM", "t5", T5), ("QuestionAnswering", "bert", SIZES)])
def test_heads_inside_a_peft_model(task, name, config):
    kind, target = {
        "Seq2SeqLM": ("SEQ_2_SEQ_LM", ["q", "wi"]),
        "QuestionAnswering": ("QUESTION_ANS", ["query", "value"]),
    }[task]
    model = get_peft_model(head(task, name, config), LoraConfig(task_type=kind, r=2, target_modules=target)).eval()
    check_rows_alone(model, rows_for(task))


@pytest.mark.parametrize(
    ("problem_type", "num_labels", "labels"),
    [
        (None, 1, torch.randn(4)),
        (None, 1, torch.randn(4, 1)),
        ("regression", 3, torch.randn(4, 3)),
        (None, 3, torch.tensor([0, 2, 1, 1])),
        (None, 3, torch.tensor([[0], [2], [1], [1]])),
        (None, 3, torch.randint(0, 2, (4, 3)).float()),
        ("multi_label_classification", 3, torch.randint(0, 2, (4, 3)).float()),
    ],
)
def test_kinds_of_sequence_classification(problem_type, num_labels, labels):
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=num_labels, problem_type=problem_type)).eval()
    ids = torch.randint(0, 100, (4, 6))
    losses = find_per_example_loss(model)(model(ids), labels)
    assert losses.shape == (4,)
    for i in range(4):
        torch.testing.assert_close(
            losses[i], model(ids[i : i + 1], labels=labels[i : i + 1]).loss, rtol=1e-5, atol=1e-6
        )


def test_deberta_does_not_take_float_labels_for_several_labels():
    model = head("SequenceClassification", "deberta-v2", SIZES)
    soft, outputs = torch.rand(2, 3), model(torch.randint(0, 100, (2, 6)))
    with pytest.raises(ValueError, match=r"config\.problem_type|do not go with"):
        find_per_example_loss(model)(outputs, soft)
    model.config.problem_type = "multi_label_classification"
    expected = F.binary_cross_entropy_with_logits(outputs.logits, soft, reduction="none").mean(1)
    torch.testing.assert_close(find_per_example_loss(model)(outputs, soft), expected)


def test_positions_outside_the_input_are_not_counted():
    start, end = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    losses = question_answering_loss(start, end, (torch.tensor([1, 5, 99, -3]), torch.tensor([2, 3, 7, 4])))
    one = [
        F.cross_entropy(logits[i], torch.tensor(t))
        for logits, i, t in [(start, 0, 1), (end, 0, 2), (end, 1, 3), (start, 3, 0), (end, 3, 4)]
    ]
    torch.testing.assert_close(
        losses, torch.stack([(one[0] + one[1]) / 2, one[2] / 2, torch.tensor(0.0), (one[3] + one[4]) / 2])
    )
    losses.sum().backward()
    assert (start.grad[1:3] == 0).all() and (end.grad[2] == 0).all()


def test_decoder_inputs_are_for_sequence_to_sequence_only():
    labels = torch.tensor([[5, 6, 2, -100]])
    assert decoder_inputs(head("Seq2SeqLM", "bart", BART), labels)["decoder_input_ids"].tolist() == [[2, 5, 6, 2]]
    for task, name, config in [
        ("SequenceClassification", "bart", BART),
        ("CausalLM", "llama", DECODER),
        ("MaskedLM", "bert", SIZES),
    ]:
        assert decoder_inputs(head(task, name, config), labels) == {}
    assert decoder_inputs(bare("T5Gemma2ForSequenceClassification"), labels) == {}
    assert decoder_inputs(nn.Linear(2, 2), labels) == {}
    whisper = head("SpeechSeq2Seq", "whisper", {**SPEECH, "decoder_start_token_id": 3})
    assert decoder_inputs(whisper, labels)["decoder_input_ids"].tolist() == [[3, 5, 6, 2]]
    assert decoder_inputs(head("AudioClassification", "whisper", {**SPEECH, "classifier_proj_size": 8}), labels) == {}


# Cross-entropy


def reference(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """(B,) by plain cross-entropy, one row after the other."""
    losses = []
    for row, targets in zip(logits, labels, strict=True):
        row = row if row.dtype == torch.float64 else row.float()
        loss = F.cross_entropy(row, targets, reduction="sum", label_smoothing=label_smoothing)
        losses.append(loss / max((targets != -100).sum().item(), 1))
    return torch.stack(losses)


def ragged(size: int, length: int, vocabulary: int) -> torch.Tensor:
    labels = torch.randint(0, vocabulary, (size, length))
    labels[torch.rand(size, length) < 0.3] = -100
    labels[-1] = -100
    return labels


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5, 2), (4, 7, 33), (3, 8, 50_000)], ids=str)  # 50,000: several chunks
def test_losses_and_gradients_are_those_of_plain_cross_entropy(shape, dtype, label_smoothing):
    logits = (torch.randn(shape) * 3).to(dtype).requires_grad_()
    labels, weight = ragged(*shape), torch.rand(shape[0])
    losses, expected = (token_loss(logits, labels, label_smoothing=label_smoothing), reference(logits, labels, label_smoothing))  # fmt: skip
    assert losses.dtype == expected.dtype
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad((losses * weight).sum(), logits)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), logits)
    assert grad.dtype == dtype
    torch.testing.assert_close(
        grad, expected_grad, rtol=1e-6 if dtype == torch.float64 else None, atol=None if dtype != torch.float64 else 1e-8,
    )  # fmt: skip
    assert losses[-1] == 0 and (grad[-1] == 0).all()


def test_causal_is_the_next_token():
    logits, labels = torch.randn(3, 6, 9), ragged(3, 6, 9)
    torch.testing.assert_close(causal_lm_loss(logits, labels), reference(logits[:, :-1], labels[:, 1:]))


@pytest.mark.parametrize(("name", "config"), [("llama", DECODER), ("gemma2", GEMMA), ("gemma3_text", GEMMA)])
def test_padding_on_the_left_changes_neither_losses_nor_gradients(name, config):
    """The position before an example's first one is padding, and predicts nothing that counts."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config))
    losses_of, lengths = find_example_losses(model), [3, 9, 5, 12]
    texts = [torch.randint(3, 100, (n,)) for n in lengths]

    def batch(rows, targets=lambda x: x):
        columns = {"input_ids": (texts, 0), "attention_mask": ([torch.ones_like(x) for x in texts], 0)}
        columns["labels"] = ([targets(x) for x in texts], -100)
        return {
            name: nn.utils.rnn.pad_sequence([xs[i] for i in rows], True, fill, padding_side="left")
            for name, (xs, fill) in columns.items()
        }

    def gradient(loss):
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])

    together = losses_of(batch(range(4)))
    for i in range(4):
        alone = F.cross_entropy(model(texts[i][None]).logits[0, :-1], texts[i][1:])
        torch.testing.assert_close(together[i], alone)
        torch.testing.assert_close(gradient(together[i]), gradient(alone))
    # a first label that a position of the example's own predicts counts: that of a completion
    completion = losses_of(batch(range(4), lambda x: torch.where(torch.arange(len(x)) < 2, -100, x)))
    torch.testing.assert_close(completion[0], F.cross_entropy(model(texts[0][None]).logits[0, 1:2], texts[0][2:]))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_gradcheck(label_smoothing):
    logits, labels = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True), ragged(3, 4, 5)
    assert torch.autograd.gradcheck(lambda x: causal_lm_loss(x, labels, label_smoothing=label_smoothing), logits)


@pytest.mark.parametrize(
    ("loss", "shape", "shift"),
    [(token_loss, (5, 6, 9), False), (causal_lm_loss, (5, 6, 9), True), (sequence_classification_loss, (5, 9), False)],
)
def test_label_smoothing_is_transformers_within_each_row(loss, shape, shift):
    logits, labels = torch.randn(shape), torch.randint(0, 9, shape[:-1])
    if len(shape) == 3:
        labels[torch.rand(labels.shape) < 0.3] = -100
        labels[:, 1] = 3  # LabelSmoother divides by zero where nothing counts
    losses = loss(logits, labels, label_smoothing=0.1)
    for i in range(5):
        expected = LabelSmoother(0.1)({"logits": logits[i : i + 1]}, labels[i : i + 1].clone(), shift_labels=shift)
        torch.testing.assert_close(losses[i], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [token_loss, causal_lm_loss])
def test_other_rows_do_not_matter_to_the_last_bit(loss):
    logits, labels = torch.randn(6, 9, 3001, requires_grad=True), ragged(6, 9, 3001)

    def row(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses = loss(logits, labels)
        return losses[2].detach(), torch.autograd.grad(losses.sum(), logits)[0][2]

    before = row(logits, labels)
    others, other_labels = (torch.randn(6, 9, 3001) * 50), ragged(6, 9, 3001)
    others[2], other_labels[2] = logits[2].detach(), labels[2]
    for bad in (None, float("nan"), float("inf")):
        if bad is not None:
            others[0] = bad
        after = row(others.clone().requires_grad_(), other_labels)
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_what_is_not_counted_may_be_anything():
    logits, labels = torch.randn(3, 4, 7), torch.randint(0, 7, (3, 4))
    logits[0, 1] = float("nan")
    logits[2] = float("inf")
    labels[0, 1] = labels[2] = -100
    losses = token_loss(logits.requires_grad_(), labels)
    losses.sum().backward()
    assert losses.isfinite().all() and logits.grad.isfinite().all()
    assert (logits.grad[0, 1] == 0).all() and (logits.grad[2] == 0).all() and losses[2] == 0


def test_a_non_finite_example_is_silenced_by_a_zero_coefficient():
    logits, labels = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    logits[0, 1, 2] = float("nan")
    losses = token_loss(logits.requires_grad_(), labels)
    assert losses[0].isnan() and losses[1].isfinite()
    (grad,) = torch.autograd.grad(losses, logits, torch.tensor([0.0, 1.0]))
    assert (grad[0] == 0).all() and grad[1].isfinite().all()


def test_two_backward_passes_over_one_graph():
    logits, labels = torch.randn(4, 5, 11, requires_grad=True), torch.randint(0, 11, (4, 5))
    losses = token_loss(logits, labels)
    (first,) = torch.autograd.grad(losses.sum(), logits, retain_graph=True)  # an expanded upstream gradient
    coefficients = torch.rand(4)
    (second,) = torch.autograd.grad(losses, logits, coefficients, retain_graph=True)
    (again,) = torch.autograd.grad(losses, logits, torch.ones(()).expand(4))
    torch.testing.assert_close(second, first * coefficients[:, None, None])
    assert torch.equal(first, again)


def test_no_second_derivative():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    for weight in (torch.ones(2), torch.ones(2, requires_grad=True)):
        losses = token_loss(logits, torch.zeros(2, 3, dtype=torch.long))
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad((losses * weight).sum(), logits, create_graph=True)


def test_an_empty_batch():
    logits = torch.randn(0, 4, 7, requires_grad=True)
    losses = token_loss(logits, torch.zeros(0, 4, dtype=torch.long))
    losses.sum().backward()
    assert losses.shape == (0,)
    assert sequence_classification_loss(torch.zeros(0, 1), torch.zeros(0)).shape == (0,)


def peak_bytes(f) -> int:
    """The most memory that f holds at once, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        f()
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_one_gradient_and_a_scratch(dtype, label_smoothing):
    logits, labels = torch.randn(4, 128, 32_000).to(dtype).requires_grad_(), torch.randint(0, 32_000, (4, 128))
    peak = peak_bytes(lambda: causal_lm_loss(logits, labels, label_smoothing=label_smoothing).sum().backward())
    assert logits.nbytes <= peak <= logits.nbytes + 5 * 2**20
    with torch.no_grad():
        assert peak_bytes(lambda: causal_lm_loss(logits, labels, label_smoothing=label_smoothing)) <= 5 * 2**20


# Errors


def bare(name: str) -> nn.Module:
    """An instance of the class, not initialised: what a head is, is in its class."""
    cls = getattr(transformers, name)
    return cls.__new__(cls)


@pytest.mark.parametrize(
    "name",
    [
        "XLNetLMHeadModel", "XLMWithLMHeadModel", "CpmAntForCausalLM", "BartForCausalLM", "TrOCRForCausalLM", "MusicgenForCausalLM",
        "GitForCausalLM", "ProphetNetForConditionalGeneration", "FSMTForConditionalGeneration", "EncoderDecoderModel",
        "Qwen2AudioForConditionalGeneration", "BertForPreTraining", "BertForNextSentencePrediction",
        "LukeForMaskedLM", "YosoForTokenClassification", "BrosForTokenClassification", "LxmertForQuestionAnswering",
        "XLNetForQuestionAnswering", "DPRReader", "Wav2Vec2ForCTC", "DetrForObjectDetection", "SegformerForSemanticSegmentation",
        "DeiTForImageClassificationWithTeacher", "GPT2DoubleHeadsModel", "BertModel", "SpeechEncoderDecoderModel", "DiaForConditionalGeneration",
        "GraniteSpeechForConditionalGeneration", "VoxtralForConditionalGeneration",
    ],
)  # fmt: skip
def test_heads_with_another_loss_are_refused(name):
    with pytest.raises(ValueError, match=f"head {name}.*per_example_loss_func"):
        find_per_example_loss(bare(name))


def test_subclasses():
    class Named(LlamaForCausalLM):
        pass

    class Own(LlamaForCausalLM):
        def forward(self, **inputs):
            return super().forward(**inputs)

    config = LlamaConfig(**DECODER)
    find_per_example_loss(Named(config))
    with pytest.raises(ValueError, match="head Own"):
        find_per_example_loss(Own(config))
    with pytest.raises(ValueError, match="head LlamaForCausalLM"):  # of the same name, but not transformers'
        find_per_example_loss(type("LlamaForCausalLM", (nn.Module,), {"forward": lambda self, labels: None})())


def test_losses_over_the_batch_are_refused():
    model = head("CausalLM", "mixtral", {**DECODER, "num_local_experts": 2, "output_router_logits": True})
    with pytest.raises(ValueError, match=r"config\.output_router_logits=True.*output_router_logits=False"):
        find_per_example_loss(model)
    model = head("CausalLM", "llama", DECODER)
    model.config.z_loss_coefficient = 0.1
    with pytest.raises(ValueError, match="z_loss_coefficient"):
        find_per_example_loss(model)
    model = head("CausalLM", "llama", DECODER)
    model.loss_function = lambda **_: None
    with pytest.raises(ValueError, match="loss_function of LlamaForCausalLM was replaced"):
        find_per_example_loss(model)


def test_label_smoothing_without_a_meaning():
    for config in (BertConfig(**SIZES, problem_type="regression"), BertConfig(**SIZES, num_labels=1)):
        with pytest.raises(ValueError, match="label_smoothing_factor has no meaning for regression"):
            find_per_example_loss(BertForSequenceClassification(config), 0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        find_per_example_loss(BertForQuestionAnswering(BertConfig(**SIZES)), 0.1)
    with pytest.raises(ValueError, match="multi_label"):
        sequence_classification_loss(torch.randn(2, 3), torch.rand(2, 3), label_smoothing=0.1)


@pytest.mark.parametrize("bad", [7, -1, 10**6])
def test_labels_out_of_range_are_named(bad):
    labels = torch.tensor([[0, -100], [bad, 2]])
    with pytest.raises(ValueError, match=f"label {bad} is not one of the 7 classes"):
        token_loss(torch.randn(2, 2, 7), labels)


def test_unknown_heads_and_shapes_are_named():
    with pytest.raises(ValueError, match="head Linear"):
        find_per_example_loss(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="do not go with"):
        causal_lm_loss(torch.randn(2, 3, 4), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="do not go with"):
        sequence_classification_loss(torch.randn(2, 3), torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="must be integers"):
        token_loss(torch.randn(2, 3, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="regression takes labels"):
        sequence_classification_loss(torch.randn(2, 3), torch.zeros(2), problem_type="regression")
    with pytest.raises(ValueError, match="'ranking'"):
        sequence_classification_loss(torch.randn(2, 3), torch.zeros(2), problem_type="ranking")


def test_the_wrong_number_of_label_columns_is_named():
    with pytest.raises(ValueError, match="start_positions"):
        question_answering_loss(torch.randn(2, 3), torch.randn(2, 3), torch.zeros(2, dtype=torch.long))
    model = head("CausalLM", "llama", DECODER)
    with pytest.raises(ValueError, match=r"one column of labels, got 2: set label_names=\['labels'\]"):
        find_per_example_loss(model)(None, (torch.zeros(1), torch.zeros(1)))


def test_class_weights_are_a_plain_function():
    """What a user passes as per_example_loss_func: weighted, and still each example from itself alone."""
    weight = torch.tensor([1.0, 5.0, 0.5])

    def weighted(outputs, labels):
        return F.cross_entropy(outputs.logits.float(), labels, weight=weight, reduction="none")

    model, batch = build("bert").eval(), batch_for("bert", 12)
    outputs = model(batch["input_ids"], batch["attention_mask"])
    losses = find_per_example_loss(model)(outputs, batch["labels"])
    torch.testing.assert_close(weighted(outputs, batch["labels"]), losses * weight[batch["labels"]])
