"""benchmarks/architectures.py: a sample of its cells, what it says of clipping that is wrong or stops, and its tables."""

import json
import os
import time

import pytest
import torch
import transformers

from benchmarks import architectures, tiny
from benchmarks.architectures import PAGE, RESULTS, in_a_process, measure, read, tables, with_tables

SAMPLE = [
    ("CAUSAL_LM", "DeepseekV3ForCausalLM"),  # latent attention, experts and a shared one
    ("CAUSAL_LM", "Gemma3ForCausalLM"),  # padding before sliding windows and norms behind them
    ("SEQUENCE_CLASSIFICATION", "BartForSequenceClassification"),  # as many ends in every row
    ("MASKED_LM", "AlbertForMaskedLM"),  # one layer for all
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


@pytest.mark.parametrize(
    ("name", "rerun"),
    [
        ("BlenderbotForCausalLM", ["BlenderbotDecoder"]),  # a condition on its numbers, and a scale for the embeddings
        ("MambaForCausalLM", []),  # without a rule, one example at a time in the forward pass
    ],
)
def test_what_was_rerun_is_told(name, rerun):
    assert measure("CAUSAL_LM", name)["rerun"] == rerun


def test_a_refusal_comes_with_its_reason():
    row = measure("MASKED_LM", "IBertForMaskedLM")
    assert row["outcome"] == "refused" and "x_min" in row["reason"]


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


def test_a_sweep_goes_on_where_it_was_stopped(monkeypatch, tmp_path, capsys):
    asked = []

    def in_a_process(task, name, mode, seconds):
        asked.append(name)
        outcome = {"outcome": "crash", "reason": "x"} if len(asked) == 1 else {"outcome": "exact", "rerun": ["Router"]}
        return {"task": task, "class": name, "mode": mode, **outcome}

    monkeypatch.setattr(architectures, "in_a_process", in_a_process)
    results = tmp_path / "cells.jsonl"
    options = ["--tasks", "MASKED_LM", "--only", "Bert", "--results", str(results)]
    architectures.main(options)
    assert asked[0] == "BertForMaskedLM" and "RoFormerForMaskedLM" not in asked
    architectures.main([*options, "--again", "crash"])
    assert asked[-1] == asked[0] and len(asked) == len(set(asked)) + 1, "the one that crashed, and no other"
    assert len(results.read_text().splitlines()) == len(set(asked)), "one line for every cell"
    table = capsys.readouterr().out.rpartition("| task |")[2]
    assert f"| all | {len(set(asked))} | {len(set(asked))} | 0 | 0 | 0 | 0 | 0 | 0 |" in table
    assert f"| {len(set(asked)) - 1} | Router |" in table or f"| {len(set(asked))} | Router |" in table


def test_the_page_has_the_tables_of_the_results():
    rows = read(RESULTS)
    text = PAGE.read_text()
    assert with_tables(text, list(rows.values())) == text
    assert all(json.loads(line)["outcome"] != "wrong" for line in RESULTS.read_text().splitlines())


def test_reasons_are_grouped_without_names_and_figures():
    rows = [
        {"task": "MASKED_LM", "class": f"{name}ForMaskedLM", "mode": "ghost", "outcome": "refused",
         "reason": f"SelfCheckError: '{name}' of {name}ForMaskedLM moved by 3.{number}e-02"}
        for number, name in enumerate(("A1", "B2"))
    ]  # fmt: skip
    (line,) = tables(rows)["not exact"][2:]
    assert line == "| refused | 2 | SelfCheckError: … of … moved by … | A1ForMaskedLM, B2ForMaskedLM |"


def test_sizes_are_made_smaller_by_the_names_of_fields():
    config = tiny.tiny_config(transformers.Qwen3_5Config).text_config
    assert config.layer_types == ["linear_attention", "full_attention"] and config.num_hidden_layers == 2
    assert (config.hidden_size, config.vocab_size, config.num_attention_heads) == (32, 200, 4)
    shrunk = tiny.shrunk("num_heads", (3, 6, 12, 24))
    assert shrunk == (2, 4, 4, 4)
    assert tiny.shrunk("hidden_dropout_prob", 0.1) == 0.0 and tiny.shrunk("conv_kernel_size", 31) == 31
    assert tiny.shrunk("use_cache", True) is True and 150 <= tiny.shrunk("image_token_id", 151655) < 200


def test_rows_end_with_an_end_and_are_ragged():
    model = tiny.build("SEQUENCE_CLASSIFICATION", "BartForSequenceClassification")
    batch = tiny.batch_for(model, "SEQUENCE_CLASSIFICATION")
    ids, counts = batch["input_ids"], batch["attention_mask"].sum(1)
    assert counts.tolist() == [12, 9, 6] and (ids.eq(model.config.eos_token_id).sum(1) == 1).all()
    assert torch.equal(ids == model.config.pad_token_id, batch["attention_mask"] == 0)
    assert not any(getattr(m, "p", 0) for m in model.modules() if isinstance(m, torch.nn.Dropout))
