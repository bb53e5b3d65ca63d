"""`dp-transformers check`: what covers a model, what is refused, and what the modes take."""

import json

import pytest
import text_classification
import torch
import transformers as hf
from torch import nn

from dp_transformers import register_grad_sampler
from dp_transformers.cli import model_check
from dp_transformers.cli.main import main

BERT = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
MODELS = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=50)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=50, decoder_start_token_id=0)
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=16, patch_size=8
        )
    ),
}


@pytest.fixture
def folder(tmp_path):
    def save(name):
        MODELS[name]().save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def check(capsys, *words, code=0):
    with pytest.raises(SystemExit) as stopped:
        main(["check", *map(str, words), "--json"])
    said = capsys.readouterr()
    assert (stopped.value.code or 0) == code, said.err
    assert "profiler" not in said.err
    return json.loads(said.out)


@pytest.mark.parametrize("name", MODELS)
def test_all_parameters_are_covered_and_exact_in_every_mode(name, folder, capfd):
    found = check(capfd, folder(name), "--examples", 3, "--tokens", 8)
    model = MODELS[name]()
    assert found["can_be_trained_privately"] is True
    assert found["name"] == type(model).__name__
    assert found["trainable"] == found["parameters"] == sum(p.numel() for p in model.parameters())
    assert sum(row["parameters"] for row in found["covered"]) == found["trainable"]
    modes = {row["mode"]: row for row in found["modes"]}
    assert list(modes) == [*model_check.MODES, "without privacy"]
    for mode, row in modes.items():
        assert row["milliseconds"] > 0 and row["MiB"] > 0
        if mode != "without privacy":
            assert 0 < max(row["norm error"], row["sum error"], row["loss error"]) < 1e-3


@pytest.mark.parametrize(
    ("task", "head"),
    [
        ("sequence_classification", 2 * 16 + 2),
        ("token_classification", 2 * 16 + 2),
        ("question_answering", 2 * 16 + 2),
        ("masked_lm", 0),  # which is no new head
    ],
)
def test_adapters_and_a_new_head(task, head, folder, capsys):
    found = check(capsys, folder("bert"), "--task", task, "--lora-rank", 2, "--target-modules", "query,value")
    assert found["name"].endswith(" with LoRA")
    assert found["trainable"] == 2 * 2 * (16 + 16) + head
    assert [row["module"] for row in found["covered"]] == ["Linear"]


def test_the_recipe_trains_what_check_counts(folder, capsys):
    path = folder("bert")
    recipe = text_classification.build_model(str(path), [0, 1], text_classification.ModelArguments())
    found = check(capsys, path, "--task", "sequence_classification", "--lora-rank", 8)
    assert found["trainable"] == sum(p.numel() for p in recipe.parameters() if p.requires_grad)


def test_another_head_and_random_weights(folder, capsys):
    folder("bert")
    path = folder("bert")
    (path / "model.safetensors").unlink()
    found = check(capsys, path, "--task", "token_classification", "--from-config")
    assert found["name"] == "BertForTokenClassification"


def test_the_memory_of_gradients_is_seen(capsys):
    """Per-sample gradients of 16 examples take 16 times those of a plain step."""
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**{**BERT, "vocab_size": 5000}))
    modes = {row["mode"]: row["MiB"] for row in model_check.check_model_in_all_modes(model, 16, 4).modes}
    assert modes["per_sample"] > 5 * modes["without privacy"]
    assert modes["ghost"] < modes["per_sample"] / 3


def test_what_is_refused_is_named_and_the_exit_code_is_one(folder, capsys, monkeypatch):
    def with_batch_norm(*args, **kwargs):
        model = MODELS["bert"]()
        model.norm = nn.BatchNorm1d(4)
        return model

    monkeypatch.setattr(model_check, "build", with_batch_norm)
    found = check(capsys, "any", code=1)
    assert "'norm' is a BatchNorm1d" in found["refusals"][0]
    assert found["modes"] == []
    with pytest.raises(SystemExit) as stopped:
        main(["check", "any"])
    assert stopped.value.code == 1
    assert "REFUSED" in capsys.readouterr().out


def test_a_wrong_rule_is_found(monkeypatch, capsys):
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    @register_grad_sampler(Odd)
    def wrong(module, activations, backprops):
        return {module.weight: 2 * torch.einsum("bi,bo->boi", activations[0], backprops), module.bias: backprops}

    model = MODELS["bert"]()
    model.classifier = Odd(16, 2)
    monkeypatch.setattr(model_check, "build", lambda *args, **kwargs: model)
    assert "clipping is not exact" in check(capsys, "any", code=1)["refusals"][0]


def test_words(folder, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["check", str(folder("bert"))])
    text = capsys.readouterr().out
    assert not stopped.value.code
    for words in (
        "11,058 of 11,058 parameters are trained",
        "Embedding",
        "book_keeping",
        "the model can be trained privately.",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--task", "classify"], "--task classify is unknown"), (["--tokens", "0"], "Invalid value for '--tokens'")],
)
def test_wrong_flags(words, message, folder, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["check", str(folder("bert")), *words])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said.splitlines()[-1]
