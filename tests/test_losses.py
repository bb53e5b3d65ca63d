"""Per-example losses: equal to the model's own on each row alone, independent of the other rows."""

import pytest
import torch
from models import batch_for, build, losses_function
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification
from transformers.trainer_pt_utils import LabelSmoother

from dp_transformers.losses import causal_lm_loss, find_per_example_loss, sequence_classification_loss

SIZES = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("lora", [False, True])
def test_equals_the_models_own_loss_on_every_row_alone(name, lora):
    model, batch = build(name, lora=lora).eval(), batch_for(name, 12)
    losses = losses_function(model)(batch)
    for i in range(5):
        alone = model(**{k: v[i : i + 1] for k, v in batch.items()}).loss
        torch.testing.assert_close(losses[i], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("problem_type", "num_labels", "labels"),
    [
        (None, 1, torch.randn(4)),
        ("regression", 3, torch.randn(4, 3)),
        (None, 3, torch.tensor([0, 2, 1, 1])),
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
        torch.testing.assert_close(losses[i], model(ids[i : i + 1], labels=labels[i : i + 1]).loss, rtol=1e-5, atol=1e-6)


def test_label_smoothing_is_transformers_within_each_row():
    model, batch = build("llama").eval(), batch_for("llama", 12)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    losses = find_per_example_loss(model, label_smoothing=0.1)(model(**inputs), batch["labels"])
    for i in range(5):
        row = model(**{k: v[i : i + 1] for k, v in inputs.items()})
        expected = LabelSmoother(0.1)({"logits": row.logits}, batch["labels"][i : i + 1].clone(), shift_labels=True)
        torch.testing.assert_close(losses[i], expected, rtol=1e-5, atol=1e-6)


def test_a_row_without_labels_has_loss_and_gradient_zero():
    logits = torch.randn(3, 5, 7, requires_grad=True)
    labels = torch.randint(0, 7, (3, 5))
    labels[1] = -100
    losses = causal_lm_loss(logits, labels)
    assert losses[1] == 0
    losses.sum().backward()
    assert (logits.grad[1] == 0).all()
    assert (logits.grad[0] != 0).any()


def test_neighbours_labels_do_not_matter():
    logits, labels = torch.randn(3, 9, 7), torch.randint(0, 7, (3, 9))
    before = causal_lm_loss(logits, labels)
    labels[0, 2:] = -100
    assert torch.equal(causal_lm_loss(logits, labels)[1:], before[1:])


def test_unknown_heads_and_shapes_are_named():
    model = BertForTokenClassification(BertConfig(**SIZES))
    with pytest.raises(ValueError, match="BertForTokenClassification.*per_example_loss_func"):
        find_per_example_loss(model)
    with pytest.raises(ValueError, match="head Linear"):
        find_per_example_loss(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="do not go with"):
        causal_lm_loss(torch.randn(2, 3, 4), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="'ranking'"):
        sequence_classification_loss(torch.randn(2, 3), torch.zeros(2), problem_type="ranking")
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        find_per_example_loss(BertForSequenceClassification(BertConfig(**SIZES, problem_type="regression")), 0.1)
