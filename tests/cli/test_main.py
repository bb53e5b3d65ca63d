"""The command line as a whole: what is loaded, wrong usage, and the distribution outside the checkout."""

import json
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from dp_transformers.cli.main import main

pytestmark = pytest.mark.halved

ROOT = Path(__file__).parents[2]
RECIPES = (
    "causal_lm, image_classification, name_classification, preference_tuning, question_answering, sft, "
    "summarization, synthetic_data, text_classification, token_classification"
)


def run(*words, **environment):
    return subprocess.run([*map(str, words)], capture_output=True, text=True, env={**os.environ, **environment})


def heavy_modules_after(*words):
    code = (
        "import sys\nfrom dp_transformers.cli.main import main\n"
        f"try: main({list(words)!r})\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'peft', 'accelerate', 'numpy', 'scipy', 'rich'} & sys.modules.keys()))"
    )
    return run(sys.executable, "-c", code).stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "words", [["--help"], ["budget", "--help"], ["check", "--help"], ["train", "--help"], ["train", "nope"]]
)
def test_help_and_wrong_usage_load_nothing_heavy(words):
    assert heavy_modules_after(*words) == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bugdet"], "No such command 'bugdet'. Did you mean 'budget'?"),
        (["xyzzy"], "No such command 'xyzzy'."),
        (["--verbose"], "No such option: --verbose"),
        (["report", "--epsilon", "3"], "No such option: --epsilon"),
        (["report", "--singed-by", "3"], "No such option: --singed-by. Did you mean --signed-by?"),
        (["train"], f"train needs a recipe: one of {RECIPES}."),
        (["train", "text_clasification"], "there is no recipe 'text_clasification'; did you mean text_classification?"),
        (["train", "xyzzy"], f"there is no recipe 'xyzzy'; there are {RECIPES}."),
        (["train", "--full", "causal_lm"], "the recipe comes before its flags: dp-transformers train RECIPE --full ..."),
        (["train", "causal_lm", "--accelerate_config", "fdsp"], "--accelerate_config: there is no file 'fdsp', and it is none of ddp, fsdp2, fsdp2_tp, multi_node."),
        (["check"], "Missing argument 'model'."),
        (["check", "m", "--target-modules", "query"], "--target-modules needs the rank of the adapters: give --lora-rank too."),
        (["check", "/no/such/model"], "there is no folder '/no/such/model': give one that exists, or the name of a model on the Hub."),
    ],
)  # fmt: skip
def test_wrong_usage_ends_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_the_package_is_the_command():
    result = run(sys.executable, "-m", "dp_transformers", "bugdet", PYTHONPATH=str(ROOT))
    assert (result.returncode, result.stderr) == (2, "error: No such command 'bugdet'. Did you mean 'budget'?\n")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A wheel and an sdist, built from a copy of what git knows of the checkout."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    files = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard").stdout.splitlines()
    for name in files:
        if name.startswith(("dp_transformers/", "recipes/")) or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools.build_meta import build_wheel, build_sdist; out = sys.argv[1]; build_wheel(out); build_sdist(out)"
    result = subprocess.run([sys.executable, "-c", build, out], cwd=copy, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory):
    """The folder of the commands of an environment with the wheel, and with the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (wheel,) = distributions.glob("*.whl")
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    pip = [sys.executable, "-m", "pip", "--python", python]
    result = run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, PYTHONPATH="")
    assert result.returncode == 0, result.stderr
    others = [path for path in sys.path if path.endswith("site-packages")]
    Path(site, "others.pth").write_text("\n".join(others))  # after the wheel, which is found first
    return folder / "bin"


def outside(command, *words, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([command, *map(str, words)], capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.mark.table("distribution")
def test_the_wheel_works_outside_the_checkout(installed, tmp_path):
    where = outside(
        installed / "python", "-c", "import dp_transformers; print(dp_transformers.__file__)", cwd=tmp_path
    )
    assert Path(where.stdout).is_relative_to(installed.parent)
    words = "budget --examples 1000 --batch 50 --epochs 2 --sigma 1 --accountant rdp --json"
    answer = outside(installed / "dp-transformers", *words.split(), cwd=tmp_path)
    assert json.loads(answer.stdout)["found"] == "epsilon", answer.stderr
    text = outside(installed / "dp-transformers", "train", "--help", cwd=tmp_path).stdout
    assert "text_classification" in text
    flags = outside(installed / "dp-transformers", "train", "text_classification", "--help", cwd=tmp_path)
    assert "--target_epsilon" in flags.stdout, flags.stderr
    recipes = next(installed.parent.glob("lib/python*/site-packages/dp_transformers/recipes"))
    assert {path.name for path in recipes.glob("*.py")} == {path.name for path in (ROOT / "recipes").glob("*.py")}
    for folder in ("configs", "accelerate"):
        assert {p.name for p in (recipes / folder).iterdir()} == {
            p.name for p in (ROOT / "recipes" / folder).iterdir()
        }


@pytest.mark.table("distribution")
def test_the_wheel_holds_every_module_and_nothing_else(installed):
    package = next(installed.parent.glob("lib/python*/site-packages/dp_transformers"))
    there = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    here = {str(path.relative_to(ROOT / "dp_transformers")) for path in (ROOT / "dp_transformers").rglob("*.py")}
    here |= {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py")}
    assert there == here
    assert (package / "py.typed").is_file()
    assert not list(package.parent.glob("recipes"))  # only within the package


@pytest.mark.table("distribution")
def test_a_wheel_is_built_from_the_sdist(distributions, tmp_path):
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (source / "recipes" / "configs" / "causal_lm.yaml").is_file()
    (wheel,), (other,) = tmp_path.glob("*.whl"), distributions.glob("*.whl")
    assert abs(wheel.stat().st_size - other.stat().st_size) < 2000
