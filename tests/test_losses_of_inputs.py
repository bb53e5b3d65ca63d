"""per_example_loss_func(model, inputs): the loss calls the model itself, as often as it likes, and needs no labels."""

import math

import pytest
import torch
from models import build
from neighbours import DELTA, assert_bounded, collate, moves, seeded, texts, trainer_for
from neighbours import Task as NeighbourTask
from oracle import clipped_sum, distance, length, per_example_gradients, trainable
from torch import nn

from dp_transformers import DPTrainer, DPTrainingArguments
from dp_transformers.losses.example_losses import runs_the_model
from dp_transformers.losses.heads import find_per_example_loss

pytestmark = pytest.mark.halved

LENGTHS = (3, 9, 5, 12, 7, 4, 8)
ROWS = [{**row, "other_ids": row["input_ids"].flip(0)} for row in texts(LENGTHS, classes=None)]


def pairs(rows):
    """Two padded texts of each row, and no labels."""
    batch = collate([{"input_ids": row["input_ids"]} for row in rows])
    other = collate([{"input_ids": row["other_ids"]} for row in rows])
    return {**batch, "other_ids": other["input_ids"], "other_mask": other["attention_mask"]}


def log_probability(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    found = logits.log_softmax(2).gather(2, ids[:, 1:, None]).squeeze(2)
    return (found * mask[:, 1:]).sum(1)


def preferred(model, inputs):
    """The text over the other one: two forward passes, one loss."""
    chosen = log_probability(model, inputs["input_ids"], inputs["attention_mask"])
    rejected = log_probability(model, inputs["other_ids"], inputs["other_mask"])
    return nn.functional.softplus(rejected - chosen + 0.1 * chosen.detach())


def task(mode="auto", loss=preferred, **changes):
    model = lambda: build("llama-tied")  # noqa: E731
    return NeighbourTask(model, ROWS, pairs, loss, mode=mode, bound=0.5, physical=3, **changes)


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "fast_gradient", "per_sample"])
def test_two_forward_passes_of_one_row_are_one_example(tmp_path, mode, drawn):
    """The clipped sum of a step against one row at a time through plain autograd."""
    trainer = trainer_for(task(mode), str(tmp_path), learning_rate=1.0)
    reference = seeded(lambda: build("llama-tied"))
    start = [p.detach().clone() for p in trainable(reference)]
    trainer.train()
    assert len(drawn) == 1
    gradients = []
    for i in drawn[0].indices:
        gradients += per_example_gradients(reference, lambda one: preferred(reference, one), pairs([ROWS[i]]))
    assert any(length(g) > 0.5 for g in gradients)
    _, total = clipped_sum(gradients, 0.5)
    moved = [a - b for a, b in zip(start, trainable(trainer.model), strict=True)]
    expected = [t / len(ROWS) for t in total]
    assert distance(moved, expected) <= 1e-5 * length(expected)


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_neighbours_differ_by_one_row_of_two_texts():
    assert_bounded(moves("trainer", task(steps=3, expected=4), 3))


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_it_is_the_loss_of_outputs_and_labels_where_that_is_what_it_computes(tmp_path):
    """Bit for bit, whichever way the same loss is declared."""
    rows, finals = texts(LENGTHS), []

    def of_inputs(model, inputs):
        labels = inputs.pop("labels")
        return find_per_example_loss(model)(model(**inputs), labels)

    for loss in (None, of_inputs):
        made = NeighbourTask(lambda: build("bert"), rows, loss=loss, steps=2, expected=4)
        trainer = trainer_for(made, str(tmp_path / str(len(finals))), learning_rate=1.0)
        trainer.train()
        finals.append([p.detach().clone() for p in trainable(trainer.model)])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_a_loss_of_another_shape_is_refused(tmp_path):
    trainer = trainer_for(
        task(loss=lambda model, inputs: preferred(model, inputs).mean()), str(tmp_path), dp_seed=None
    )
    with pytest.raises(ValueError, match=r"must be \(B,\)"):
        trainer.train()


def evaluating(folder, model, loss, rows=None, collator=collate, **options):
    args = DPTrainingArguments(str(folder), target_epsilon=8.0, target_delta=DELTA, expected_batch_size=4, max_steps=1, use_cpu=True, disable_tqdm=True,
                               report_to="none", save_strategy="no", eval_strategy="steps", per_device_eval_batch_size=2, remove_unused_columns=False)  # fmt: skip
    rows = texts(LENGTHS) if rows is None else rows
    return DPTrainer(model, args, collator, rows, rows, per_example_loss_func=loss, **options)


def test_it_evaluates_without_labels(tmp_path):
    trainer = evaluating(tmp_path, build("llama"), preferred, ROWS, pairs)
    with torch.no_grad():
        expected = preferred(trainer.model.eval(), pairs(ROWS)).mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert math.isfinite(trainer.predict(ROWS[:3]).metrics["test_loss"])


def cross_entropy(model, inputs):
    labels = inputs.pop("labels")
    return nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="none")


def test_metrics_are_computed_of_what_the_model_returned_and_of_the_labels(tmp_path):
    seen = []
    model = build("bert")
    trainer = evaluating(tmp_path, model, cross_entropy, compute_metrics=lambda p: seen.append(p) or {"n": 1.0})
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    batch = collate(texts(LENGTHS))
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    for got in (seen[0], predicted):
        torch.testing.assert_close(torch.tensor(got.predictions), logits, rtol=1e-4, atol=1e-5)
        assert got.label_ids.tolist() == labels.tolist()
    expected = nn.functional.cross_entropy(logits, labels)
    assert predicted.metrics["test_loss"] == pytest.approx(float(expected), rel=1e-4)


class Scores(nn.Module):
    """It returns a tensor and no dictionary."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        shown = self.embed(input_ids) * attention_mask[..., None]
        return self.head(shown.sum(1))


@pytest.mark.parametrize(
    "loss", [
        lambda outputs, labels: nn.functional.cross_entropy(outputs, labels, reduction="none"),
        lambda model, inputs: nn.functional.cross_entropy(model(inputs["input_ids"], inputs["attention_mask"]), inputs["labels"], reduction="none"),
    ], ids=["of outputs", "of the model"],
)  # fmt: skip
def test_predictions_of_a_model_that_returns_a_tensor_have_a_row_for_each_example(tmp_path, loss):
    trainer = evaluating(tmp_path, Scores(), loss)
    assert trainer.predict(texts(LENGTHS)).predictions.shape == (len(LENGTHS), 3)


def test_without_labels_and_with_a_loss_that_needs_them_the_way_out_is_named(tmp_path):
    trainer = trainer_for(task(loss=lambda outputs, labels: outputs.logits.sum((1, 2))), str(tmp_path), dp_seed=None)
    with pytest.raises(ValueError, match=r"no \['labels'\].*f\(model, inputs\) -> \(B,\), which calls the model"):
        trainer.train()


def test_the_names_of_the_parameters_decide():
    class Callable:
        def __call__(self, model, inputs):
            return None

    assert runs_the_model(preferred) and runs_the_model(Callable()) and runs_the_model(lambda model, batch: None)
    assert runs_the_model(lambda model, inputs, beta=0.1: None)
    assert not runs_the_model(lambda outputs, labels: None) and not runs_the_model(torch.add)
