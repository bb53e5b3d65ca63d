"""The rooms and who may know whom; what importing costs; what the README says."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from planted_bugs import BUGS

import dp_transformers

ROOT = Path(__file__).parent.parent


def test_import_contracts():
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "9 kept, 0 broken" in result.stdout


def test_every_file_of_tests_has_a_recorded_duration():
    """By which files are started; `python -m pytest tests/test_NAME.py --write-durations` records that of a new one."""
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(json.loads((ROOT / "tests" / "durations.json").read_text())) == files


def test_only_one_room_of_clipping_speaks_to_ranks():
    """A contract cannot say so: a forbidden package from outside must be a whole one, and this is a part of torch."""
    speaking = {
        path
        for path in (ROOT / "dp_transformers" / "clipping").rglob("*.py")
        if "torch.distributed" in path.read_text()
    }
    assert {path.parent.name for path in speaking} == {"parallel"}


def code_lines(text):
    """Return how many lines are no docstring, no comment and not blank."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(i not in docstrings and bool(line.strip()) and not line.strip().startswith("#") for i, line in lines)


GUARDS = {"loss_root", "loss_graph", "compared_rows", "deferred_checks", "refused"}  # and the rooms that check
TOOLS = {"find_mixing", "check_model"}  # of these rooms, which a user calls


def is_guard(path):
    return path.stem in GUARDS or (path.parent.name == "checks" and path.stem not in TOOLS)


def test_nothing_grows_past_its_budget():
    package, tests = (
        {path: path.read_text() for path in (ROOT / room).rglob("*.py")} for room in ("dp_transformers", "tests")
    )
    classes = {
        node.name: code_lines("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
        for text in package.values()
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name not in dp_transformers.__all__
    }
    assert max(classes.values()) <= 350, max(classes, key=classes.get)
    assert sum(map(code_lines, package.values())) <= 18_340
    assert len(package) <= 165
    assert sum(code_lines(text) for path, text in package.items() if is_guard(path)) <= 2_100
    assert sum(text.count("\n") for text in tests.values()) <= 33_470


def test_planted_bugs_are_in_one_place_each():
    """Or `python tests/planted_bugs.py` would plant none; it is not run for a push."""
    texts = [path.read_text() for path in (ROOT / "dp_transformers").rglob("*.py")]
    words = [old for bug in BUGS.values() for old, _ in bug.changes]
    assert {old: sum(text.count(old) for text in texts) for old in words} == dict.fromkeys(words, 1)


def test_lint():
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr


PYREFLY = Path(sys.executable).with_name("pyrefly")


@pytest.mark.skipif(not PYREFLY.exists(), reason="pyrefly is of the extra 'test', and not installed here")
def test_types():
    result = subprocess.run(
        [PYREFLY, "check", "--python-interpreter-path", sys.executable], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_importing_loads_nothing_heavy():
    code = "import sys, dp_transformers; print([m for m in ('torch', 'transformers', 'numpy', 'scipy', 'dp_accounting') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_public_names():
    for name in dp_transformers.__all__:
        assert getattr(dp_transformers, name).__doc__, name
    with pytest.raises(AttributeError, match="it offers"):
        dp_transformers.NoSuchThing  # noqa: B018


def test_readme_commands_are_single_lines_and_its_python_is_valid():
    readme = (ROOT / "README.md").read_text()
    for name in ("main", "test"):
        (command,) = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*?)```", readme, re.S)
        assert command.count("\n") == 1
    for block in re.findall(r"```python\n(.*?)```", readme, re.S):
        compile(block, "README.md", "exec")
    assert "pip install dp-transformers" not in readme
