"""The chain of a ledger: each line holds the SHA-256 of what stands before it."""

import hashlib
import json

import pytest
from recorded import writing

from dp_transformers.mechanism.values import StepParameters
from dp_transformers.step.ledger import LEDGER_NAME, Chain, Ledger

USED = StepParameters(0.1, 10, 1.5, 1.0)


@pytest.fixture
def path(tmp_path):
    """A ledger of two runs, opened three times."""
    with writing(tmp_path) as ledger:
        ledger.begin({"run_id": "a1"})
        ledger.add_step("a1", 1, USED)
        ledger.add_step("a1", 2, USED)
    with writing(tmp_path) as ledger:
        ledger.begin({"run_id": "b2"})
        ledger.add_step("b2", 1, USED)
    with writing(tmp_path) as ledger:
        ledger.add_step("b2", 2, USED)
    return tmp_path / LEDGER_NAME


def chain_of(path):
    return Ledger(path.parent).chain()


def test_an_honest_ledger_is_whole(path):
    assert chain_of(path) == Chain(lines=6, broken_at=None)
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        assert json.loads(line)["before"] == hashlib.sha256(b"".join(lines[:number])).hexdigest()
    assert Ledger(path.parent).run_ids() == ["a1", "b2"]


@pytest.mark.parametrize("number", range(5))
def test_a_line_taken_out_shows_at_the_next(path, number):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
    assert chain_of(path).broken_at == number + 1


@pytest.mark.parametrize("number", range(5))
def test_a_line_changed_shows_at_the_next(path, number):
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b'"run"', b'"run" ')
    path.write_bytes(b"".join(lines))
    assert chain_of(path).broken_at == number + 2


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("without_digest", [True, False])
def test_a_line_put_in_shows(path, number, without_digest):
    lines = path.read_bytes().splitlines(keepends=True)
    entry = json.loads(lines[2])
    if without_digest:
        del entry["before"]
    path.write_bytes(b"".join([*lines[:number], json.dumps(entry).encode() + b"\n", *lines[number:]]))
    # one that may stand where it stands shows at the next
    fits = number == 2 and not without_digest
    assert chain_of(path).broken_at == number + (2 if fits else 1)


@pytest.mark.parametrize("torn", [b'{"run": "b2", "st', b"\0\0\0", b"\xff\n"])
def test_a_kill_in_the_middle_of_a_line_breaks_nothing(path, torn):
    with open(path, "ab") as file:
        file.write(torn)
    assert chain_of(path) == Chain(7, None)
    with writing(path.parent) as ledger:
        ledger.add_step("b2", 3, USED)
    assert chain_of(path) == Chain(8, None)


def test_what_is_cut_off_at_the_end_shows_by_the_digest_alone(path):
    ledger, content = Ledger(path.parent), path.read_bytes()
    size, digest = ledger.digest()
    assert (size, digest) == (len(content), hashlib.sha256(content).hexdigest())
    path.write_bytes(content.rpartition(b'{"run"')[0])
    assert ledger.chain().broken_at is None and ledger.digest(size) != (size, digest)
    path.write_bytes(content + b"{}\n")
    assert ledger.digest(size) == (size, digest), "what follows does not change what was"
