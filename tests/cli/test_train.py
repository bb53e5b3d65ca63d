"""`dp-transformers train`: recipes are found, their flags grouped and read, also from files, and run as commands."""

import json
import sys
from pathlib import Path

import causal_lm
import fine_tuning
import image_classification
import name_classification
import plain_loop
import preference_tuning
import pytest
import question_answering
import sft
import summarization
import synthetic_data
import text_classification
import token_classification
import yaml

from dp_transformers.cli import train

pytestmark = pytest.mark.halved

CONFIGS = Path(text_classification.__file__).parent / "configs"
CLASSES = {
    "text_classification": text_classification, "causal_lm": causal_lm, "name_classification": name_classification,
    "image_classification": image_classification, "sft": sft, "preference_tuning": preference_tuning,
    "question_answering": question_answering, "summarization": summarization, "synthetic_data": synthetic_data,
    "token_classification": token_classification,
}  # fmt: skip


def parse(monkeypatch, recipe, *words):
    module = CLASSES[recipe]
    monkeypatch.setattr(sys, "argv", [recipe, *map(str, words)])
    if hasattr(module, "DataArguments"):
        example = {"example": module.EXAMPLE, "mine": module.MINE} if hasattr(module, "EXAMPLE") else {}
        return fine_tuning.parse_arguments(
            "", module.DataArguments, module.ModelArguments, module.Arguments, **example
        )
    return (plain_loop.parse_arguments("", module.Arguments),)


def test_every_recipe_has_a_configuration_and_is_found():
    assert train.recipes().keys() == CLASSES.keys() == {path.stem for path in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize("recipe", CLASSES)
def test_a_configuration_says_the_defaults(recipe, monkeypatch):
    """So that a copy of it is a beginning that changes nothing."""
    by_file = parse(monkeypatch, recipe, "--config", CONFIGS / f"{recipe}.yaml")
    plain = parse(monkeypatch, recipe)
    for mine, theirs in zip(by_file, plain, strict=True):
        assert vars(mine).keys() == vars(theirs).keys()
        for name in yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text()):
            if hasattr(theirs, name):
                assert getattr(mine, name) == getattr(theirs, name), name
                assert type(getattr(mine, name)) is type(getattr(theirs, name)), name


def test_the_settings_of_the_example_are_not_those_of_your_own(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("model_name_or_path: mine\nlora_r: 4")
    for words in (["--dataset_name", "rows.csv"], ["--config", tmp_path / "mine.yaml"]):
        _, model, args = parse(monkeypatch, "sft", *words)
        assert (args.num_train_epochs, args.max_length, model.lora_layers, model.prompt) == (3, 1024, 0, None)
    assert model.lora_r == 4
    _, model, args = parse(monkeypatch, "sft", "--lora_r", 3)
    assert (args.num_train_epochs, model.lora_layers, model.lora_r) == (0.125, 5, 3)


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_flags_win_over_the_file(kind, tmp_path, monkeypatch):
    values = {"target_epsilon": 3, "learning_rate": "2e-3", "full": True, "text_column": "sentence", "seed": 7}
    file = tmp_path / f"mine.{kind}"
    file.write_text(json.dumps(values) if kind == "json" else yaml.safe_dump(values))
    data, model, args = parse(monkeypatch, "text_classification", "--config", file, "--seed", 8)
    assert (args.target_epsilon, args.learning_rate, args.seed) == (3, 2e-3, 8)
    assert model.full is True
    assert data.text_column == "sentence"
    assert args.lr_scheduler_type == "linear"


def shown(capsys, monkeypatch, *words):
    with pytest.raises(SystemExit) as stopped:
        parse(monkeypatch, *words)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_privacy_stands_first_in_the_help_and_the_rest_is_left_out(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "text_classification", "--help")
    titles = [line for line in text.splitlines() if line.endswith(":") and line[0] not in " " and " " not in line]
    assert titles == ["Privacy:", "Model:", "Data:", "Training:", "More:"]
    assert text.index("Privacy:") < text.index("--target_epsilon") < text.index("Model:")
    assert "--neftune_noise_alpha" not in text
    assert len(text.splitlines()) < 200
    everything = shown(capsys, monkeypatch, "text_classification", "--help_all")
    assert "--neftune_noise_alpha" in everything and "--target_epsilon" in everything


def test_every_privacy_argument_of_the_trainer_is_in_the_group(capsys, monkeypatch):
    from transformers import TrainingArguments

    from dp_transformers import DPTrainingArguments

    text = shown(capsys, monkeypatch, "causal_lm", "--help")
    privacy = text[text.index("Privacy:") : text.index("Model:")]
    own = DPTrainingArguments.__dataclass_fields__.keys() - TrainingArguments.__dataclass_fields__.keys()
    for name in [*own - {"without_privacy"}, "twin", "max_grad_norm"]:
        assert f"--{name}" in privacy


@pytest.mark.parametrize(
    ("words", "message"), [
        (["--epsilon", "8"], "there is no flag --epsilon; did you mean --target_epsilon?"),
        (["--delta", "1e-6"], "there is no flag --delta; did you mean --target_delta?"),
        (["--lerning_rate=1"], "there is no flag --lerning_rate=1; did you mean --learning_rate?"),
        (["--neftune_alpha", "1"], "there is no flag --neftune_alpha; did you mean --neftune_noise_alpha?"),
        (["--xyzzy"], "there is no flag --xyzzy. See --help, or --help_all for every flag."),
        (["config.yaml"], "'config.yaml' stands where a flag should stand. A file of flags is given as --config config.yaml."),
        (["--config", "nowhere.yaml"], "--config: there is no file 'nowhere.yaml'."),
        (["--expected_batch_size", "many"], "argument --expected_batch_size/--expected-batch-size: invalid int value: 'many'"),
    ],
)  # fmt: skip
def test_wrong_flags_end_in_one_line(words, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(monkeypatch, "text_classification", *words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epsilon: 8", "there is no flag 'epsilon'; did you mean --target_epsilon?"),
        ("help: true", "there is no flag 'help'"),
        ("[1, 2]", "must hold lines of the form 'flag: value'."),
        ("a: [", "cannot be read: while parsing"),
    ],
)
def test_a_wrong_file_ends_in_one_line(content, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        parse(monkeypatch, "text_classification", "--config", tmp_path / "c.yaml")
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --config {tmp_path / 'c.yaml'}") and message in said and said.count("\n") == 1


def test_flags_reach_the_recipe_as_they_stand(monkeypatch):
    ran = []
    monkeypatch.setattr(train, "_run", lambda path, words: ran.append((path.stem, words)))
    for words in (["--max_steps", "-1", "--full"], ["--help"], ["--config", "x.yaml", "--help_all"]):
        call_main(["train", "causal_lm", *words], 0)
    assert ran == [
        ("causal_lm", ["--max_steps", "-1", "--full"]),
        ("causal_lm", ["--help"]),
        ("causal_lm", ["--config", "x.yaml", "--help_all"]),
    ]


def call_main(words, code):
    from dp_transformers.cli.main import main

    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert (stopped.value.code or 0) == code


def test_processes_are_launched_with_accelerate(monkeypatch):
    import accelerate.commands.launch as launcher

    launched = []
    monkeypatch.setattr(launcher, "launch_command", launched.append)
    call_main(["train", "causal_lm", "--num_processes", "2", "--max_steps", "3", "--use_cpu"], 0)
    call_main(["train", "causal_lm", "--accelerate_config", "fsdp2", "--full"], 0)
    plain, sharded = launched
    assert (plain.num_processes, plain.num_cpu_threads_per_process) == (2, 1)
    assert Path(plain.config_file) == CONFIGS.parent / "accelerate" / "ddp.yaml"
    assert not plain.cpu, "accelerate would start one process"
    assert plain.training_script == str(train.recipes()["causal_lm"])
    assert plain.training_script_args == ["--max_steps", "3", "--use_cpu"]
    assert Path(sharded.config_file) == CONFIGS.parent / "accelerate" / "fsdp2.yaml"
    assert sharded.training_script_args == ["--full"]
