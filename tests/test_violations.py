"""The table of violations, line by line: what is common in one loop each, which one follows the commit, half of what is
occasional, some of the rest; all of it with --whole-tables. The witness looks at every batch here; how often it does in
a training, and what it then sees, is in test_oracle."""

import hashlib
import os
import re
from pathlib import Path

import pytest
from violations import COMMON, OCCASIONAL, TABLE, YOURS, outcome_of

from dp_transformers.clipping.checks import witness

pytestmark = pytest.mark.filterwarnings("ignore")  # what the library warns of beside it is another test's


@pytest.fixture(autouse=True)
def _looks_always(monkeypatch):
    monkeypatch.setattr(witness, "SHARE", 1e9)


RUN = {name: line for name, line in TABLE.items() if callable(line.make) and line.outcome != YOURS}


def in_one_loop(likely):
    for name, line in RUN.items():
        if line.likely == likely:
            turn = hashlib.sha256(f"{os.environ['DP_TEST_PART']} {name}".encode()).digest()[0]
            yield name, line.loops[turn % len(line.loops)]


FIRST, SECOND = list(in_one_loop(COMMON)), list(in_one_loop(OCCASIONAL))
REST = [(name, loop) for name, line in RUN.items() for loop in line.loops if (name, loop) not in FIRST + SECOND]


def require_outcome(name, loop):
    line, found = TABLE[name], outcome_of(TABLE[name], loop)
    assert found.agrees_with(line), (
        f"{line.outcome} ({line.says}) was expected; {found.outcome} after {found.released} steps, one example moved "
        f"the sum by {found.moved:.3f} C: {found.message}"
    )


@pytest.mark.whole
@pytest.mark.parametrize(("name", "loop"), FIRST)
def test_what_scripts_do_is_bounded_or_refused(name, loop):
    require_outcome(name, loop)


@pytest.mark.table(of=2)
@pytest.mark.parametrize(("name", "loop"), SECOND)
def test_what_some_scripts_do_is_bounded_or_refused(name, loop):
    require_outcome(name, loop)


@pytest.mark.parametrize(("name", "loop"), REST)
def test_what_else_is_bounded_or_refused(name, loop):
    require_outcome(name, loop)


@pytest.mark.whole
@pytest.mark.parametrize("name", [name for name, line in TABLE.items() if isinstance(line.make, str)])
def test_a_line_names_a_test_that_there_is(name):
    path, test = TABLE[name].make.split("::")
    assert re.search(rf"^def {test}\(", (Path(__file__).parents[1] / path).read_text(), re.MULTILINE)


def test_what_is_left_to_the_user_has_its_reason():
    for name, line in TABLE.items():
        assert bool(line.why) == (line.outcome == YOURS), name
