"""The command `report`, its page and pictures, in an interpreter without torch."""

import collections
import contextlib
import html
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import DELTA, mechanism, record

from dp_transformers import compute_epsilon
from dp_transformers.cli.main import main
from dp_transformers.reports.certificate import CERTIFICATE_NAME
from dp_transformers.reports.findings import Report, look
from dp_transformers.reports.pages import PAGE_NAME
from dp_transformers.reports.words import up
from dp_transformers.step.ledger import LEDGER_NAME

pytestmark = pytest.mark.halved

ROOT = Path(__file__).parents[2]

# torch cannot be imported, nor anything that stands on it
WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Blocked())
from dp_transformers.cli.main import main
main(["report", *sys.argv[1:]])
"""
Result = collections.namedtuple("Result", "exit_code stdout stderr")
HEAVY = {"torch", "transformers", "peft", "accelerate", "datasets"}


def run(*arguments):
    """Call the command, with what a shell would see of it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    return Result(ended.value.code or 0, out.getvalue(), err.getvalue())


def run_without(blocked, *arguments):
    code = WITHOUT.format(blocked=blocked)
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def page(folder):
    return (folder / PAGE_NAME).read_text()


def test_an_honest_run_without_torch(tmp_path):
    record(tmp_path)
    result = run_without(HEAVY, tmp_path)
    assert result.returncode == 0, result.stderr
    epsilon = compute_epsilon(1.0, 0.05, 20, DELTA)
    assert f"ε = {epsilon:.4g} at δ = 1e-05" in result.stdout and "add_or_remove_one" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        CERTIFICATE_NAME, LEDGER_NAME, PAGE_NAME, "privacy_epsilon.png", "privacy_detection.png"
    }  # fmt: skip
    assert (tmp_path / "privacy_detection.png").read_bytes().startswith(b"\x89PNG")
    text = page(tmp_path)
    assert "Certificate and ledger agree." in text and up(epsilon, 6) in text
    assert text.count("data:image/png;base64,") == 2
    assert not re.search(r'(src|href)="(?!data:)', text) and "@import" not in text, "it needs no other file"


def test_what_differs_fails_and_is_on_the_page(tmp_path):
    record(tmp_path)
    lines = (tmp_path / LEDGER_NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / LEDGER_NAME).write_bytes(b"".join(lines[:7] + lines[8:]))
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "DISAGREES: line 8 of privacy_ledger.jsonl does not follow" in result.stderr
    said = "Nothing is guaranteed as long as certificate, ledger and signature do not agree."
    assert result.stdout.startswith(said) and "differentially private" not in result.stdout
    assert re.search("Private +unknown", result.stdout) and "Largest detection rate" not in result.stdout
    assert json.loads(run(tmp_path, "--json").stdout)["private"] is None
    text = html.unescape(page(tmp_path))
    assert said in text and "do not agree" in text and "line 8 of privacy_ledger.jsonl" in text
    assert "by the ledger it is 19" in text
    assert 'class="numbers"' not in text and "base64" not in text and "<td>yes</td>" not in text
    assert up(compute_epsilon(1.0, 0.05, 19, DELTA), 6) in text, "by the ledger as it is"


def test_a_run_that_was_killed_before_it_had_a_certificate(tmp_path):
    record(tmp_path, certified=False)
    result = run(tmp_path)
    assert result.exit_code == 1 and "the training was killed before it was written" in result.stderr
    assert up(compute_epsilon(1.0, 0.05, 20, DELTA), 6) in result.stdout


@pytest.mark.parametrize("left", [None, 0, 1])
def test_a_ledger_that_was_taken_away_turns_the_page_red(tmp_path, left):
    """left: how many lines of its end are left, None for no file."""
    record(tmp_path)
    assert run(tmp_path).exit_code == 0
    ledger = tmp_path / LEDGER_NAME
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.unlink() if left is None else ledger.write_bytes(b"".join(lines[len(lines) - left :]))
    for arguments in ((), ("--delta", "1e-6")):
        result = run(tmp_path, *arguments)
        assert result.exit_code == 1 and result.stderr.startswith("DISAGREES: "), result.stderr
        assert "do not agree" in page(tmp_path) and "Certificate and ledger agree" not in page(tmp_path)
        assert 'class="numbers"' not in page(tmp_path)
    said = json.loads(run(tmp_path, "--json").stdout)
    assert said["agrees"] is False and said["private"] is None


def test_several_folders_on_the_same_data_add_up(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    record(folders[0], run_id="a1")
    record(folders[1], run_id="b2", how=mechanism(sigma=1.0), delta=1e-6)
    result = run(*folders, "--json", "--delta", "1e-5")
    said = json.loads(result.stdout)
    assert result.exit_code == 0 and said["total"]["delta"] == 1e-5 and said["total"]["steps"] == 40
    assert said["total"]["epsilon"] == compute_epsilon(1.0, 0.05, 40, 1e-5) and len(said["runs"]) == 2
    assert json.loads(run(*folders, "--json").stdout)["total"]["delta"] == 1e-6, "the smallest is common"
    assert list(said["largest_detection_rate"]) == ["0.1", "0.01", "0.001"]
    result = run(*folders, "--out", tmp_path / "both")
    assert result.exit_code == 0 and "Training 2 of 2" in (tmp_path / "both" / "privacy_report_sum.html").read_text()
    assert not list(folders[0].glob("*.html"))


@pytest.mark.parametrize(
    "data", [{"rows": 1000, "digest": "hmac-sha256:0", "key": "2"}, {"rows": 1000, "digest": None, "key": None}, None]
)
def test_folders_on_other_data_do_not_add_up_unless_one_says_so(tmp_path, data):
    folders = [tmp_path / "a", tmp_path / "b"]
    record(folders[0], run_id="a1")
    record(folders[1], run_id="b2", data=data)
    result = run(*folders)
    assert result.exit_code == 2 and "nothing shows that the folders are of the same data" in result.stderr
    assert "--same-data" in result.stderr
    result = run(*folders, "--same-data", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["total"]["steps"] == 40


def test_not_private(tmp_path):
    record(tmp_path, not_private_because=["dp_seed=1: draws and noise can be reproduced"], private=False)
    result = run(tmp_path)
    assert result.exit_code == 0 and "This training gives no guarantee of privacy (dp_seed=1" in result.stdout
    assert "Not private." in page(tmp_path) and "∞" in page(tmp_path) and "base64" not in page(tmp_path)
    said = json.loads(run(tmp_path, "--json").stdout, parse_constant=pytest.fail)
    assert said["private"] is False and set(said["largest_detection_rate"].values()) == {1.0}


def test_wrong_folders(tmp_path):
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 2 and "does not exist" in result.stderr
    result = run(tmp_path)
    assert result.exit_code == 2 and "holds no run: nothing was trained there" in result.stderr
    record(tmp_path / "run-1")
    result = run(tmp_path)
    assert result.exit_code == 2 and "these folders in it do: run-1" in result.stderr
    result = run(tmp_path / "run-1" / CERTIFICATE_NAME)
    assert result.exit_code == 2 and "is a file" in result.stderr
    result = run(tmp_path / "run-1", "--sign", tmp_path / "run-1" / CERTIFICATE_NAME / "key.pem")
    assert result.exit_code == 2 and "name a new file in a folder of yours" in result.stderr
    assert run(tmp_path / "run-1", "--sign", tmp_path / "new" / "key.pem").exit_code == 0


def test_nothing_that_a_training_says_gets_into_the_page_as_html(tmp_path):
    evil = "<script>alert(1)</script>"
    record(
        tmp_path,
        model={"class": evil, "name": '"><img src=x>', "parameters": 1, "trainable": 1},
        also_released=[{"what": evil, "covered": False}],
    )
    assert run(tmp_path).exit_code == 0
    assert "<script" not in page(tmp_path) and "<img src=x" not in page(tmp_path)
    assert "&lt;script&gt;" in page(tmp_path)


def test_sign_and_require_a_signer(tmp_path):
    folder, key = tmp_path / "run", tmp_path / "key.pem"
    record(folder)
    result = run(folder, "--sign", key)
    assert result.exit_code == 0, result.stderr
    (public,) = re.findall(r"public key ([0-9a-f]{64})", result.stderr)
    assert public in page(folder)
    assert f"valid, by {public}; whose key this is, --signed-by HEX checks" in result.stdout
    result = run(folder, "--signed-by", public.upper())
    assert result.exit_code == 0 and f"valid, by {public} (the key that you asked for)" in result.stdout
    green = page(folder)
    assert f"valid, by {public} (the key that you asked for)" in green
    result = run(folder, "--signed-by", "00")
    assert result.exit_code == 2 and "64 hex digits, got '00'" in result.stderr and page(folder) == green
    result = run(folder, "--signed-by", "0" * 64)
    said = f"NOT SIGNED BY {'0' * 64}: the certificate and the ledger agree, but the certificate in '{folder}' is"
    assert result.exit_code == 1 and f"{said} signed by {public}." in result.stderr
    assert said in html.unescape(page(folder)) and "do not agree" not in page(folder) + result.stdout + result.stderr
    content = (folder / CERTIFICATE_NAME).read_bytes()
    (folder / CERTIFICATE_NAME).unlink()
    result = run(folder)
    assert result.exit_code == 1 and "exists, but" in result.stderr
    (folder / CERTIFICATE_NAME).write_bytes(content)
    record(folder, first=20, steps=1)
    result = run(folder)
    assert result.exit_code == 1 and "was changed after it was signed, or training went on" in result.stderr
    assert run(folder, "--sign", key).exit_code == 0, "it is signed again"
    (folder / LEDGER_NAME).write_bytes((folder / LEDGER_NAME).read_bytes()[:-300])
    result = run(folder, "--sign", key)
    assert result.exit_code == 1 and "not signed: certificate and ledger" in result.stderr


def test_epsilon_over_steps_ends_at_epsilon(tmp_path):
    record(tmp_path, run_id="a1")
    record(tmp_path, run_id="b2", how=mechanism(sigma=3.0))
    found = Report([look(tmp_path)])
    steps, epsilons = zip(*found.over_steps, strict=True)
    assert steps[0] == 0 and epsilons[0] == 0
    assert (steps[-1], epsilons[-1]) == (40, found.certificate["total"]["epsilon"])
    assert list(epsilons) == sorted(epsilons)
    assert dict(found.over_steps)[20] == compute_epsilon(1.0, 0.05, 20, DELTA), "the first run alone"


def test_rows_of_one_person_are_said(tmp_path):
    record(tmp_path, how=mechanism(rows=3))
    person = mechanism().epsilon(DELTA, rows=3)
    result = run(tmp_path)
    assert result.stdout.startswith(
        f"All rows of one person, 3 at most, are protected together with ε = {up(person)} at"
    )
    text = page(tmp_path)
    box = text[text.index('class="numbers"') :]
    assert box.index("ε for all rows of one person (3 at most)</span><b>" + up(person)) < box.index(
        "ε for one row</span><b>" + up(mechanism().epsilon(DELTA))
    )
    assert "Largest rate of detection, by" in text
    assert "For a person with 3 rows these ceilings do not hold" in text
