"""benchmarks/architectures.py: a sample of its cells, what it says of clipping that is wrong or stops, and its tables."""

import json
import os
import time

import pytest

from benchmarks import architectures
from benchmarks.architectures import PAGE, RESULTS, in_a_process, measure, read, tables, with_tables

SAMPLE = [
    ("CAUSAL_LM", "DeepseekV3ForCausalLM"),  # latent attention, experts and a shared one
    ("CAUSAL_LM", "Gemma3ForCausalLM"),  # padding before sliding windows and norms behind them
    ("SEQUENCE_CLASSIFICATION", "BartForSequenceClassification"),  # as many ends in every row
    ("MASKED_LM", "AlbertForMaskedLM"),  # one layer for all
    ("MASKED_LM", "IBertForMaskedLM"),  # what forward passes write is put back
    ("SEQ_TO_SEQ_CAUSAL_LM", "MT5ForConditionalGeneration"),  # relative positions
    ("TOKEN_CLASSIFICATION", "LiltForTokenClassification"),  # boxes
    ("QUESTION_ANSWERING", "LongformerForQuestionAnswering"),  # three separators
    ("QUESTION_ANSWERING", "Qwen3ForQuestionAnswering"),  # gradients reach padding whose embedding is zero
    ("MULTIPLE_CHOICE", "ElectraForMultipleChoice"),
    ("IMAGE_CLASSIFICATION", "LevitForImageClassification"),  # evaluating batch normalization behind a transposition
    ("IMAGE_CLASSIFICATION", "Siglip2ForImageClassification"),  # pictures of several shapes
    ("IMAGE_CLASSIFICATION", "ViTForImageClassification"),  # a class token, and a table of positions without a batch
    ("AUDIO_CLASSIFICATION", "SEWForSequenceClassification"),  # a parametrised convolution
]


@pytest.mark.parametrize(("task", "name"), SAMPLE, ids=lambda cell: cell)
def test_a_sample_is_exact(task, name):
    row = measure(task, name)
    assert row["outcome"] == "exact", row
    assert max(row["norm_error"], row["sum_error"]) <= 1e-5


def test_a_refusal_comes_with_its_reason():
    row = measure("MASKED_LM", "ReformerForMaskedLM")
    assert row["outcome"] == "refused" and "mixes examples" in row["reason"]


def test_batch_normalization_is_refused_while_it_trains_and_exact_while_it_evaluates():
    row = measure("IMAGE_CLASSIFICATION", "ResNetForImageClassification")
    assert row["outcome"] == "exact" and "BatchNorm" in row[architectures.REFUSED_IN_TRAINING]
    assert "| 1 | 1 | 1 | 1 | 0" in tables([row])["architectures"][-1]


CELL = ("MASKED_LM", "DistilBertForMaskedLM", "book_keeping")


@pytest.mark.parametrize("broken", ["norms", "sum"])
def test_clipping_that_is_wrong_is_called_so(broken, monkeypatch):
    class Broken(architectures.PerExampleClipper):
        def backward(self, losses):
            norms = super().backward(losses)
            if broken == "sum":
                self.parameters[0].grad.mul_(1.1)
            return norms * 1.001 if broken == "norms" else norms

    monkeypatch.setattr(architectures, "PerExampleClipper", Broken)
    assert measure(*CELL)["outcome"] == "wrong"


def test_an_error_that_is_not_the_librarys_is_a_crash(monkeypatch):
    monkeypatch.setattr(architectures.PerExampleClipper, "backward", lambda self, losses: losses[7])
    row = measure(*CELL)
    assert row["outcome"] == "crash" and row["reason"].startswith("IndexError")


@pytest.mark.parametrize(
    ("does", "reason"), [(lambda: os._exit(3), "exit code 3"), (lambda: time.sleep(60), "did not")]
)
def test_a_process_that_dies_or_does_not_end_is_a_crash(does, reason, monkeypatch):
    monkeypatch.setattr(architectures, "measure", lambda *cell: does())
    row = in_a_process(*CELL, seconds=0.5)
    assert row["outcome"] == "crash" and reason in row["reason"]


def test_the_page_has_the_tables_of_the_results():
    rows = read(RESULTS)
    text = PAGE.read_text()
    assert with_tables(text, list(rows.values())) == text
    assert all(json.loads(line)["outcome"] != "wrong" for line in RESULTS.read_text().splitlines())
