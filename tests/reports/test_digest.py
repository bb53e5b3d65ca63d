"""The keyed digest of training data: who has the key can compare, nobody else learns anything."""

import os
import stat

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from dp_transformers import FlatClipping, IndependentNoise, Mechanism, PoissonSampling, PrivacyUnit
from dp_transformers.reports.digest import (
    KEY_NAME,
    count_rows,
    describe_data,
    key_path,
    name_of,
    owner_key,
    row_digests,
    rows_of,
)
from dp_transformers.reports.digest import digest as digest_of
from dp_transformers.step.checkpoint import PrivacyState
from dp_transformers.step.run import PrivateRun

pytestmark = pytest.mark.halved

KEY, OTHER = b"k" * 32, b"o" * 32
ROWS = [{"text": "a", "labels": 0}, {"text": "b", "labels": 1}, {"text": "b", "labels": 1}]


def digest(rows, key):
    return digest_of(row_digests(rows, key), key)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "dp_transformers"


def test_the_key_is_made_once_and_only_its_owner_reads_it(home):
    key = owner_key()
    assert key_path() == home / KEY_NAME and len(key) == 32 and owner_key() == key
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600 and stat.S_IMODE(home.stat().st_mode) == 0o700
    assert os.listdir(home) == [KEY_NAME]
    key_path().unlink()
    assert owner_key() != key


def run_of(rows=4, k=1, steps=5, delta=1e-3):
    parts = {"sampling": PoissonSampling(rows, 2), "clipping": FlatClipping(1.0), "noise": IndependentNoise(1.5)}
    return PrivateRun(PrivacyState("r", Mechanism(**parts, steps=steps, unit=PrivacyUnit(k)), delta, None))


def facts_of(rows, folder):
    return describe_data(rows, folder, lambda counted: None)


def look(rows, folder, say):
    say(count_rows(rows))


@pytest.mark.parametrize("way", [describe_data, look])
def test_copies_of_rows_are_said_to_who_trains_and_to_nobody_else(way, tmp_path, caplog):
    run, rows = run_of(), [*ROWS, ROWS[2]]
    facts = way(rows, tmp_path / "out", run.say_copies)
    assert "3 of the 4 rows of the training data equal another one, one of them 3 times" in caplog.text
    one, three = (f"{run.mechanism.epsilon(1e-3, rows=k):.3g}" for k in (1, 3))
    assert (
        f"after 5 steps it is {one} (at delta 0.001), and for a person whose 3 rows these are it is {three}."
        in caplog.text
    )
    assert "max_examples_per_person=3" in caplog.text and (facts is None or {*facts} == {"rows", "digest", "key"})
    caplog.clear()
    way(rows, tmp_path / "out", run_of(k=3).say_copies)
    way(ROWS[:2], tmp_path / "out", run_of(2).say_copies)
    assert not caplog.text
    way(rows, tmp_path / "out", run_of(steps=None, delta=None).say_copies)  # a loop that ends by itself: of one pass
    assert "after 2 steps it is" in caplog.text and "(at delta 0.025)" in caplog.text


def test_a_loop_without_a_ledger_counts_what_is_read_fast(home):
    for rows in ([{"text": "x" * 3000}] * 2000, [{"text": object()}] * 3, Augmented()):
        assert not count_rows(rows)
    assert not home.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_not_used(mode, tmp_path):
    owner_key()
    key_path().chmod(mode)
    with pytest.raises(ValueError, match="others than its owner can read the key .*: chmod 600"):
        owner_key()
    facts = facts_of(ROWS, tmp_path / "out")
    assert facts["digest"] is None and "chmod 600" in facts["no_digest_because"]


def test_equal_rows_have_equal_digests_in_any_order():
    assert digest(ROWS, KEY) == digest(ROWS[::-1], KEY) == digest(iter(ROWS), KEY)
    assert digest(ROWS, KEY) == digest([dict(reversed(row.items())) for row in ROWS], KEY)
    assert digest(ROWS, KEY) == digest([{**row, "labels": torch.tensor(row["labels"])} for row in ROWS], KEY)
    assert digest(ROWS, KEY).startswith("hmac-sha256:") and len(digest(ROWS, KEY)) == 12 + 64


@pytest.mark.parametrize(
    "other",
    [ROWS[:2], [*ROWS, ROWS[0]], [*ROWS[:2], ROWS[0]], [*ROWS[:2], {"text": "b", "labels": 2}], [*ROWS[:2], {"text": "b", "labels": "1"}],
     [*ROWS[:2], {"text": "b"}], []],
)  # fmt: skip
def test_other_rows_have_other_digests(other):
    assert digest(other, KEY) != digest(ROWS, KEY)


def test_nobody_without_the_key_can_try_out_rows():
    assert digest(ROWS, KEY) != digest(ROWS, OTHER) and name_of(KEY) != name_of(OTHER)
    assert name_of(KEY) == name_of(KEY) and name_of(KEY) not in KEY.hex()
    facts = facts_of(ROWS, "elsewhere")
    assert owner_key().hex() not in str(facts) and facts["key"] == name_of(owner_key())
    assert facts["digest"] == digest(ROWS, owner_key()) and facts["rows"] == 3


def test_rows_of_data_sets():
    stored = datasets.Dataset.from_list(ROWS)
    for same in (stored, stored.with_format("torch"), stored.shuffle(seed=1), stored.select([2, 0, 1])):
        assert digest(rows_of(same), KEY) == digest(ROWS, KEY)
    assert digest(rows_of(stored.select([0, 1])), KEY) == digest(ROWS[:2], KEY)
    tensors = TensorDataset(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 1]))
    rows = [([0.0, 1.0], 0), ([2.0, 3.0], 1), ([4.0, 5.0], 1)]
    assert digest(rows_of(tensors), KEY) == digest(rows_of(rows), KEY)
    assert digest([np.arange(3)], KEY) == digest([[0, 1, 2]], KEY)


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        pytest.fail("a row was made")


@pytest.mark.parametrize(
    ("data", "why"),
    [(Augmented(), "is a Augmented, and its rows may differ"), ([{"x": object()}], "a row holds a object"), ([{"x": [[]], 1: 2}], "(TypeError)")],
)  # fmt: skip
def test_data_without_a_digest_says_why(data, why, tmp_path):
    facts = facts_of(data, tmp_path / "out")
    assert facts["digest"] is None and facts["key"] is None and why in facts["no_digest_because"]


class Quoting:
    def __init__(self, error):
        self.error = error

    def tolist(self):
        raise self.error("patient 4711")


def nested(depth=100_000):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "row", [lambda: {"x": Quoting(ValueError)}, lambda: {"x": Quoting(KeyError)}, lambda: {"x": Quoting(RuntimeError)}, lambda: {"x": nested()}],
)  # fmt: skip
def test_an_error_of_a_row_is_not_quoted_and_stops_no_training(row, tmp_path):
    """What is said here is handed over in privacy.json."""
    facts = facts_of([{"x": 1}, row()], tmp_path / "out")
    assert facts["digest"] is None and facts["no_digest_because"].startswith("a row cannot be read")
    assert "4711" not in str(facts)


def test_the_key_never_lies_in_what_is_handed_over(tmp_path, home):
    facts = facts_of(ROWS, tmp_path)
    assert facts["digest"] is None and "the key would lie in" in facts["no_digest_because"]
    assert not home.exists()
    assert facts_of(ROWS, tmp_path / "out")["digest"]
