"""Ledger and privacy state on disk."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from recorded import writing

from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit
from dp_transformers.mechanism.noise import IndependentNoise
from dp_transformers.mechanism.sampling import PoissonSampling
from dp_transformers.mechanism.values import StepParameters
from dp_transformers.step import ledger as ledger_module
from dp_transformers.step.checkpoint import STATE_NAME, PrivacyState, find_checkpoint, rotate
from dp_transformers.step.ledger import LEDGER_NAME, Ledger, PrivacyStateError

USED = StepParameters(0.1, 10, 1.5, 0.5)


def state(run_id="a1", max_grad_norm=0.5, **changes):
    mechanism = Mechanism(
        sampling=PoissonSampling(100, 10), clipping=FlatClipping(max_grad_norm), noise=IndependentNoise(1.5), steps=7
    )
    return PrivacyState(**{"run_id": run_id, "mechanism": mechanism, "delta": 1e-5, "target_epsilon": 3.0, **changes})


def saved(folder, **changes):
    (folder / "shards").mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"weights")
    (folder / "shards" / "0").write_bytes(b"")
    state(**changes).save(folder, ledger_steps=3)


def test_round_trip(tmp_path):
    state().save(tmp_path / "checkpoint-3", ledger_steps=3)
    assert PrivacyState.load(tmp_path / "checkpoint-3") == (state(), 3)
    assert [p.name for p in (tmp_path / "checkpoint-3").iterdir()] == [STATE_NAME]


def test_missing_broken_or_partial_state(tmp_path):
    with pytest.raises(PrivacyStateError, match=r"is missing.*Resume from another checkpoint, or start a new run"):
        PrivacyState.load(tmp_path)
    (tmp_path / STATE_NAME).write_text('{"run_id": "a')
    with pytest.raises(PrivacyStateError, match="cannot be read"):
        PrivacyState.load(tmp_path)
    state().save(tmp_path, 3)
    content = json.loads((tmp_path / STATE_NAME).read_text())
    del content["mechanism"]["noise"]["noise_multiplier"]
    (tmp_path / STATE_NAME).write_text(json.dumps(content))
    with pytest.raises(PrivacyStateError, match="noise_multiplier"):
        PrivacyState.load(tmp_path)


def test_require_names_what_disagrees():
    other = state("b2")
    state().require(replace(other, mechanism=replace(other.mechanism, steps=None, unit=PrivacyUnit(2))))
    for changes, message in (
        ({"max_grad_norm": 0.7}, r"with clipping.max_grad_norm=0.5, now it is 0.7"),
        ({"delta": 1e-6}, "delta=1e-05, now it is 1e-06"),
        ({"target_epsilon": None}, "target_epsilon=3.0, now it is None"),
    ):
        with pytest.raises(PrivacyStateError, match=message):
            state().require(state(**changes))
    silent = replace(state(), mechanism=replace(state().mechanism, noise=IndependentNoise(0.0)))
    with pytest.raises(PrivacyStateError, match=r"noise.noise_multiplier=1.5, now it is 0.0"):
        state().require(silent)


@pytest.mark.parametrize("damage", ["cut", "longer", "removed", "nested removed", "no state"])
def test_a_checkpoint_that_is_not_whole_is_not_loaded(tmp_path, damage):
    folder = tmp_path / "checkpoint-3"
    saved(folder)
    assert PrivacyState.load(folder) == (state(), 3)
    if damage in ("cut", "longer"):
        (folder / "model.bin").write_bytes(b"weight" if damage == "cut" else b"weights!")
    else:
        (folder / {"removed": "model.bin", "nested removed": "shards/0", "no state": STATE_NAME}[damage]).unlink()
    named = {"no state": STATE_NAME, "nested removed": "shards.0"}.get(damage, "model.bin")
    with pytest.raises(PrivacyStateError, match=f"{named}.*Resume from another checkpoint"):
        PrivacyState.load(folder)


def test_the_state_is_written_last_and_after_everything_is_on_disk(tmp_path, monkeypatch):
    folder, synced = tmp_path / "checkpoint-3", []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda d: (synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{d}"))), real_sync(d))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (synced.append("replace"), real_replace(a, b)))
    saved(folder)
    before, after = synced[: synced.index("replace")], synced[synced.index("replace") + 1 :]
    assert sorted(before) == sorted(["model.bin", "shards", "0", f".{STATE_NAME}"])
    assert after == ["checkpoint-3", tmp_path.name]


def test_the_newest_complete_checkpoint_is_found_with_a_warning(tmp_path, caplog):
    with pytest.raises(PrivacyStateError, match="no complete checkpoint.*Start a new run"):
        find_checkpoint(tmp_path)
    for number in (2, 9, 10, 11):
        saved(tmp_path / f"checkpoint-{number}")
    saved(tmp_path / "checkpoint-best")
    (tmp_path / "checkpoint-12").write_text("a file")
    assert find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-11")
    assert caplog.text == ""
    (tmp_path / "checkpoint-11" / STATE_NAME).unlink()
    (tmp_path / "checkpoint-10" / "model.bin").write_bytes(b"w")
    assert find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    assert "checkpoint-11/privacy_state.json' is missing" in caplog.text
    assert "checkpoint-10/model.bin' has 1 bytes" in caplog.text
    for number in (2, 9):
        (tmp_path / f"checkpoint-{number}" / STATE_NAME).write_text("{}")
    with pytest.raises(
        PrivacyStateError, match="no complete checkpoint.*checkpoint-11.*checkpoint-2.*Start a new run"
    ) as error:
        find_checkpoint(tmp_path)
    assert "another checkpoint" not in str(error.value), "there is none"


def test_rotation_takes_incomplete_and_old_ones_first_and_spares_what_is_kept(tmp_path):
    for age, number in enumerate((8, 2, 4, 6)):  # 8 is the oldest: left by an earlier run
        saved(tmp_path / f"checkpoint-{number}")
        os.utime(tmp_path / f"checkpoint-{number}", (age, age))
    (tmp_path / "checkpoint-10").mkdir()  # half-written, the newest
    left = lambda: sorted(p.name for p in tmp_path.iterdir())  # noqa: E731
    rotate(tmp_path, 4, keep={"checkpoint-6"})
    assert left() == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    rotate(tmp_path, 3, keep={"checkpoint-6"})
    assert left() == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    rotate(tmp_path, 1, keep={"checkpoint-6", "checkpoint-2"})
    assert left() == ["checkpoint-2", "checkpoint-6"]
    rotate(tmp_path, 1, keep={"checkpoint-6"})
    assert left() == ["checkpoint-6"]


def test_ledger_counts_every_line_of_its_run(tmp_path):
    assert Ledger(tmp_path / "new").steps("a1") == 0
    with writing(tmp_path / "new") as ledger:
        ledger.begin(state().to_dict())
        for step in (1, 2, 3, 2, 3):  # two steps were done again after a resume: they happened
            ledger.add_step("a1", step, USED)
        ledger.begin(state(run_id="b2").to_dict())
        ledger.add_step("b2", 1, USED)
    assert ledger.steps("a1") == 5
    assert ledger.steps("b2") == 1
    assert ledger.other_steps("b2") == 5
    assert len((tmp_path / "new" / LEDGER_NAME).read_text().splitlines()) == 8


@pytest.mark.parametrize("torn", [b'{"run": "a1", "st', b'{"run": "a1"', b"\0\0\0\0", b"\xff\n"])
def test_torn_line_counts_and_stays_alone(tmp_path, torn):
    """It was written by whoever wrote the line before, for there is one writer at a time."""
    with writing(tmp_path) as ledger:
        ledger.add_step("b2", 1, USED)
        ledger.add_step("a1", 1, USED)
    with open(ledger.path, "ab") as file:
        file.write(torn)
    assert (ledger.steps("a1"), ledger.steps("b2"), ledger.steps("c3")) == (2, 1, 0)
    with writing(tmp_path) as ledger:
        ledger.add_step("a1", 2, USED)
    assert (ledger.steps("a1"), ledger.steps("b2"), ledger.other_steps("a1")) == (3, 1, 1)
    last = json.loads(ledger.path.read_bytes().splitlines()[-1])
    assert last == {"run": "a1", "step": 2, **USED._asdict(), "before": last["before"]}
    assert ledger.chain().broken_at is None


def test_a_torn_line_with_nothing_before_it_counts_for_every_run(tmp_path):
    (tmp_path / LEDGER_NAME).write_text('{"ru')
    assert Ledger(tmp_path).steps("a1") == Ledger(tmp_path).steps("b2") == 1


class Failing(io.FileIO):
    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


class Short(io.FileIO):
    def write(self, data):
        return super().write(bytes(data)[:7])


def broken_fsync(descriptor):
    raise OSError(errno.EIO, "I/O error")


@pytest.mark.parametrize("fault", [Failing, Short, broken_fsync])
def test_a_line_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, fault):
    with writing(tmp_path) as ledger:
        ledger.add_step("a1", 1, USED)
    if fault is not broken_fsync:
        monkeypatch.setattr(ledger_module.io, "FileIO", fault)
    with writing(tmp_path) as ledger:
        if fault is broken_fsync:
            monkeypatch.setattr(os, "fsync", broken_fsync)
        with pytest.raises(OSError, match="No space|cut short.*make room on the disk|I/O error"):
            ledger.add_step("a1", 2, USED)
    monkeypatch.undo()
    assert ledger.steps("a1") == {Failing: 1, Short: 2, broken_fsync: 2}[fault]  # what may be on disk counts
    with writing(tmp_path) as ledger:
        ledger.add_step("a1", 2, USED)
    assert ledger.steps("a1") == {Failing: 2, Short: 3, broken_fsync: 3}[fault]


HOLDER = """
import os, sys, time
from dp_transformers.step.ledger import Ledger
ledger = Ledger(sys.argv[1])
ledger.open()
if os.fork() == 0:  # as a DataLoader worker: outlives its parent for a while
    print("open", flush=True)
time.sleep(60)
"""


def test_one_writer_at_a_time_and_a_killed_one_does_not_block(tmp_path):
    with (
        writing(tmp_path) as ledger,
        pytest.raises(PrivacyStateError, match=r"another training is writing.*detach\(\).*output_dir.*ledger_dir"),
    ):
        Ledger(tmp_path).open()
    with writing(tmp_path):
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ},
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(PrivacyStateError, match="another training"):
            ledger.open()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with writing(tmp_path) as ledger:  # though its child still lives
            ledger.add_step("a1", 1, USED)
        os.killpg(holder.pid, 0)  # it does
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.stdout.close()
        holder.wait()
