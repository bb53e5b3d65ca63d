"""The diffs of docs/huggingface-scripts.md make scripts private that are written for Trainer or accelerate.

CI has no scripts of Hugging Face's. They are applied there to the short scripts in tests/scripts, which use the same
interfaces in the same order. With TRANSFORMERS_EXAMPLES=transformers/examples/pytorch they are applied to Hugging
Face's own, and each is run on local files (a minute each, some 15 in all).
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState
from local_scripts import save_model, write_files, write_stand_ins
from safetensors.torch import load_file

import dp_transformers

pytestmark = pytest.mark.halved

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "huggingface-scripts.md").read_text()
EXAMPLES = os.environ.get("TRANSFORMERS_EXAMPLES")
SCRIPTS = {
    "run_glue": ("text-classification", "classification", ["--max_seq_length", "16"]),
    "run_ner": ("token-classification", "tagging", []),
    "run_mlm": ("language-modeling", "masked", ["--max_seq_length", "16", "--line_by_line"]),
    "run_clm": ("language-modeling", "causal", ["--block_size", "16"]),
    "run_qa": ("question-answering", "questions", ["--max_seq_length", "24", "--doc_stride", "8"]),
    "run_summarization": ("summarization", "summaries", ["--max_source_length", "16", "--max_target_length", "8"]),
}
ROWS = 60


def diffs(script):
    """What the page says to change in a script: (lines now, lines then), hunk by hunk."""
    for names, text in re.findall(r"<!-- diff: (.*?) -->\n```diff\n(.*?)```", PAGE, re.S):
        if script in names.split():
            for hunk in text.split("@@\n"):
                lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
                yield [s for mark, s in lines if mark != "+"], [s for mark, s in lines if mark != "-"]


def patched(script, text):
    """The text of the script with the page's diffs applied, whatever the depth of its indentation."""
    lines = text.splitlines()
    for before, after in diffs(script):
        wanted = [line.strip() for line in before]
        at = [i for i in range(len(lines)) if [line.strip() for line in lines[i : i + len(wanted)]] == wanted]
        assert len(at) == 1, f"{script}: {len(at)} places for\n" + "\n".join(before)
        deeper = _indent(lines[at[0]]) - _indent(before[0])
        lines[at[0] : at[0] + len(wanted)] = [" " * max(0, _indent(s) + deeper) + s.strip() for s in after]
    return "\n".join(lines) + "\n"


def _indent(line):
    return len(line) - len(line.lstrip())


def scripts_of_the_page():
    return [name + suffix for suffix in ("", "_no_trainer") for name in SCRIPTS]


def test_the_diffs_import_what_there_is():
    imported = re.findall(r"^\+from dp_transformers import (.*)$", PAGE, re.M)
    names = {name.split(" as ")[0].strip() for line in imported for name in line.split(",")}
    assert names <= set(dp_transformers.__all__) and "DPTrainer" in names


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    return folder, write_files(folder, ROWS)


def prepared(script, local, tmp_path, source=ROOT / "tests" / "scripts", change=lambda text: text):
    """The script with the page's diff, in a folder with the modules that lie beside it, and its first flags."""
    base = script.removesuffix("_no_trainer")
    folder, files = local
    task = SCRIPTS[base][1]
    for path in source.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    changed = change(patched(script, (source / f"{script}.py").read_text()))
    (tmp_path / f"{script}.py").write_text(changed)
    model = folder / f"{task}-model"
    if not model.exists():
        save_model(task, folder)
    flags = [
        "--model_name_or_path", model, "--train_file", files[task], "--validation_file", files[task], "--output_dir", tmp_path / "out",
    ]  # fmt: skip
    return [str(tmp_path / f"{script}.py"), *map(str, flags)]


TRAIN = ["--do_train", "--do_eval", "--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--save_strategy", "no",
         "--target_epsilon", "8", "--target_delta", "1e-3", "--expected_batch_size", "20", "--max_steps", "3",
         "--per_device_train_batch_size", "8", "--logging_steps", "1"]  # fmt: skip


def run_here(command, monkeypatch):
    """Run the script in this process."""
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.syspath_prepend(str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.modules.pop("trainer_qa", None)
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()


def certificate(out):
    """What the folder says was spent, compared with its ledger."""
    said = json.loads((out / "privacy.json").read_text())
    (run,) = said["runs"]
    assert run["private"] and run["verified"] and 0 < run["epsilon"] <= 8
    return run


@pytest.mark.table("scripts")
def test_a_script_with_a_trainer_of_its_own_becomes_private(local, tmp_path, monkeypatch):
    command, windows = prepared("run_qa", local, tmp_path), 2
    run_here([*command, *TRAIN, "--max_examples_per_person", str(windows)], monkeypatch)
    out = tmp_path / "out"
    results = json.loads((out / "all_results.json").read_text())
    assert 0 < results["epsilon"] <= 8 and results["delta"] == 1e-3 and results["noise_multiplier"] > 0
    assert "eval_exact_match" in results, "it evaluates in its own way"
    assert results["epsilon"] < results["epsilon_per_person"] <= 8
    assert ROWS < results["train_samples"] <= windows * ROWS
    assert results["train_samples"] < results["eval_samples"], "some documents have more windows than are kept"
    assert "## Privacy" in (out / "README.md").read_text()
    assert certificate(out)["num_examples"] == results["train_samples"]
    assert load_file(out / "model.safetensors")


@pytest.mark.table("scripts")
def test_a_script_whose_trainer_was_forgotten_is_refused(local, tmp_path, monkeypatch):
    def forget(text):
        return text.replace(
            "class QuestionAnsweringTrainer(DPTrainerMixin, QuestionAnsweringTrainer)",
            "class Forgotten(DPTrainerMixin, QuestionAnsweringTrainer)",
        )

    command = prepared("run_qa", local, tmp_path, change=forget)
    with pytest.raises(ValueError, match="QuestionAnsweringTrainer is no DPTrainer and would train without privacy"):
        run_here([*command, *TRAIN], monkeypatch)


def at_delta(text):
    assert text.count("target_delta=1e-6") == 1
    return text.replace("target_delta=1e-6", "target_delta=1e-3")


def in_physical_batches(text):
    """What the page says of draws that do not fit the device."""
    text = at_delta(text).replace("max_grad_norm=1.0", "max_grad_norm=1.0, max_physical_batch_size=8")
    text = text.replace("lr_scheduler.step()", "engine.has_stepped and lr_scheduler.step()")
    return text.replace("if accelerator.sync_gradients:", "if engine.has_stepped:")


@pytest.mark.table("scripts")
@pytest.mark.parametrize("change", [at_delta, in_physical_batches])
def test_a_script_with_accelerate_becomes_private(local, tmp_path, monkeypatch, change):
    command = prepared("run_clm_no_trainer", local, tmp_path, change=change)
    run_here([*command, "--per_device_train_batch_size", "20", "--with_tracking"], monkeypatch)
    out = tmp_path / "out"
    run = certificate(out)
    assert (run["num_examples"], run["steps"]) == (ROWS, 6), "one row for each document, two passes"
    assert run["mechanism"]["sampling"]["expected_batch_size"] == 20
    results = json.loads((out / "all_results.json").read_text())
    assert results["learning_rate"] == 0, "the schedule came to its end with the last step"


LOOP = ["--per_device_train_batch_size", "20", "--num_train_epochs", "2"]
LOOP_SCRIPTS = {
    "run_glue": ["--max_length", "16"],
    "run_mlm": ["--max_seq_length", "16", "--line_by_line", "True"],
    "run_summarization": ["--max_source_length", "16", "--max_target_length", "8", "--text_column", "text", "--summary_column", "summary", "--num_beams", "1"],
}  # fmt: skip


@pytest.mark.skipif(EXAMPLES is None, reason="TRANSFORMERS_EXAMPLES names no folder with the scripts of Hugging Face")
@pytest.mark.parametrize("script", scripts_of_the_page())
def test_a_script_of_hugging_face_becomes_private(local, tmp_path, script):
    base, is_loop = script.removesuffix("_no_trainer"), script.endswith("_no_trainer")
    folder, _, own = SCRIPTS[base]
    own = LOOP_SCRIPTS.get(base, own) if is_loop else own
    command = prepared(script, local, tmp_path, Path(EXAMPLES) / folder, at_delta if is_loop else lambda text: text)
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(write_stand_ins(tmp_path / "stand_ins"))]), "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    flags = [*own, *(LOOP if is_loop else TRAIN)]
    done = subprocess.run(
        [sys.executable, *command, *flags], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not re.search("Sample [0-9]+ of the training set", done.stdout + done.stderr)
    out = tmp_path / "out"
    run = certificate(out)
    assert run["num_examples"] == ROWS if base not in ("run_qa",) else run["num_examples"] >= ROWS
    assert load_file(out / "model.safetensors")
    if not is_loop:
        results = json.loads((out / "all_results.json").read_text())
        assert results["epsilon"] == run["epsilon"] and any(name.startswith("eval_") for name in results)
        assert "## Privacy" in (out / "README.md").read_text()
