"""The ledger of a run (``privacy_ledger.jsonl`` in the output directory, beside the checkpoints): an append-only
record of its steps.

The line of a step is on disk before the step's noisy gradient exists, so that whatever anybody can have seen is
counted, also when training is resumed from an older checkpoint. One process writes it at a time.

Each line holds the SHA-256 of everything before it in the file (``before``), so a line that was removed, changed or
inserted shows at the next one. If somebody recomputes all of these digests, only the digest of the whole file in
``privacy.json``, and its signature, show it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..mechanism.values import StepParameters

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LEDGER_NAME = "privacy_ledger.jsonl"
VERSION = 2  # of ledger and privacy state

logger = logging.getLogger(__name__)


class PrivacyStateError(ValueError):
    """Privacy state that is missing or disagrees; training must not go on from it."""


class Chain(NamedTuple):
    """The result of comparing the digests in a ledger's lines with its file.

    Attributes:
        lines: The number of lines of the file.
        broken_at: The first line, from 1 on, with a digest that is not that of the lines before it; None if there is
            none.
    """

    lines: int
    broken_at: int | None


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if os.name == "nt":  # only what is open for writing can be flushed there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot flush folders
            raise
    finally:
        os.close(descriptor)


class Ledger:
    """Append-only record of every noised step, flushed to disk line by line. Anybody may read it; to write, `open` it
    and `close` it."""

    def __init__(self, output_dir: str | os.PathLike):
        self.path = Path(output_dir) / LEDGER_NAME
        self._file: io.FileIO | None = None
        self._before, self._size = hashlib.sha256(), 0  # of everything in the open file

    def run_ids(self) -> list[str]:
        """Return the ids of the runs in the file, in order."""
        return list(dict.fromkeys(writer for writer, _ in self._lines() if writer is not None))

    def steps(self, run_id: str) -> int:
        """Return the number of executed steps of this run, 0 without a file."""
        return sum(segment.total() for segment in self.segments(run_id))

    def segments(self, run_id: str) -> list[Counter[StepParameters | None]]:
        """Return the parameters of a run's steps, in one counter for each time that it began or went on; None for a
        torn line, which may have been a step of the run that wrote the line before; of any if there is none."""
        segments: list[Counter[StepParameters | None]] = [Counter()]
        for writer, entry in self._lines():
            if writer not in (run_id, None):
                continue
            if entry is None or "step" in entry:
                segments[-1][None if entry is None else _parameters(entry)] += 1
            elif segments[-1]:
                segments.append(Counter())
        return segments

    def beginnings(self, run_id: str) -> list[dict[str, Any]]:
        """Return the lines of each time that a run began or went on: its state, and whether it was private and
        verified."""
        return [
            entry for writer, entry in self._lines() if writer == run_id and entry is not None and "step" not in entry
        ]

    def other_steps(self, run_id: str) -> int:
        """Return the number of steps of other runs in the same file."""
        return sum(
            writer not in (run_id, None) and (entry is None or "step" in entry) for writer, entry in self._lines()
        )

    def chain(self) -> Chain:
        """Compare the digest in each line with the lines before it.

        A torn line, which a killed process left, needs no digest. The next line's digest covers it.
        """
        before, lines = hashlib.sha256(), 0
        with self._reader() as file:
            for lines, line in enumerate(file, start=1):
                entry = _parsed(line)
                if entry is not None and entry.get("before") != before.hexdigest():
                    return Chain(lines + sum(1 for _ in file), lines)
                before.update(line)
        return Chain(lines, None)

    def digest(self, size: int | None = None) -> tuple[int, str]:
        """Return the size of the file, or of its beginning of ``size`` bytes at most, and the SHA-256 of that."""
        with self._reader() as file:
            content = file.read() if size is None else file.read(size)
        return len(content), hashlib.sha256(content).hexdigest()

    def _reader(self) -> io.BufferedReader | io.BytesIO:
        return open(self.path, "rb") if self.path.exists() else io.BytesIO()

    def _lines(self) -> Iterator[tuple[str | None, dict[str, Any] | None]]:
        """Yield for each line the id of the run that wrote it (None if no line before has one), and its content (None
        if it is torn)."""
        writer = None
        with self._reader() as file:
            for entry in map(_parsed, file):
                writer = writer if entry is None else entry["run"]
                yield writer, entry

    def open(self) -> None:
        """Become the one writer, until `close` or until this process ends, however it ends.

        Raises:
            PrivacyStateError: another process, or another trainer in this one, is writing.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = io.FileIO(self.path, "a+")
        try:
            _lock(file, self.path)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")  # a torn line stays, and stays alone
            self._before, self._size = _digest_of(file), os.fstat(file.fileno()).st_size
            flush_to_disk(self.path.parent)
        except BaseException:
            file.close()
            raise
        self._file = file
        _OPEN.add(self)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def begin(self, state: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
        """Record that this run starts or goes on, with its state (mechanism, δ and target ε) and further facts
        (whether it is private, and why not)."""
        settings = {k: v for k, v in state.items() if k != "run_id"}
        self._append({"run": state["run_id"], "event": "begin", **settings, **(facts or {})})

    def add_step(self, run_id: str, step: int, parameters: StepParameters) -> None:
        """Record one step and what it uses, before its result exists. Returns when the line is on disk.

        Raises:
            OSError: it could not be written (the disk is full, say); the step must not be taken.
            PrivacyStateError: somebody else changed, replaced or removed the file.
        """
        self._append({"run": run_id, "step": step, **parameters._asdict()})

    def require_own_file(self) -> None:
        """Raise PrivacyStateError unless the path still names the file that is written here, with only the lines that
        were written. (Tools that synchronise or restore folders put a copy in its place, without later steps.)"""
        if self._file is None:
            return
        own = os.fstat(self._file.fileno())
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), own) and own.st_size == self._size:
                return
        raise PrivacyStateError(
            f"'{self.path}' was changed, replaced or removed by something else while this training was writing it, so "
            "it no longer says what was spent. Let nothing write to that folder meanwhile (a restored backup, a tool "
            "that synchronises folders, a second training), restore the file as it was, or train the original model "
            "anew in another folder."
        )

    def _append(self, entry: Mapping[str, Any]) -> None:
        assert self._file is not None, "the ledger is not open"
        self.require_own_file()
        line = json.dumps({**entry, "before": self._before.hexdigest()}).encode() + b"\n"
        written = self._file.write(line)
        self._before.update(line[:written])
        self._size += written
        if written != len(line):
            raise OSError(
                errno.ENOSPC,
                "a line of the ledger was cut short, so its step is not taken: make room on the disk, and resume from "
                "a checkpoint",
                str(self.path),
            )
        os.fsync(self._file.fileno())


def _digest_of(file: io.FileIO) -> Any:
    """Return the running SHA-256 of a whole file."""
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(2**20):
        digest.update(block)
    return digest


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line with the id of a run; None if it is torn."""
    try:
        entry = json.loads(line)
        is_whole = "step" not in entry or all(name in entry for name in StepParameters._fields)
        return entry if is_whole and entry["run"] is not None else None
    except (ValueError, TypeError, KeyError):
        return None


def _parameters(entry: Mapping[str, Any]) -> StepParameters:
    return StepParameters(*(entry[name] for name in StepParameters._fields))


_OPEN: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _close_after_fork() -> None:
    """Close ledgers in a forked process: a lock lasts as long as any copy of its descriptor, so a DataLoader worker
    would keep the lock of a killed trainer."""
    for ledger in _OPEN:
        ledger.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)


def _lock(file: io.FileIO, path: Path) -> None:
    try:
        if fcntl is None:
            raise OSError("no flock on this system")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PrivacyStateError(
            f"another training is writing '{path}'. Two at once would not count each other's steps: wait until it "
            "ends, call detach() on its PrivacyEngine, or choose another folder (output_dir of DPTrainingArguments, "
            "ledger_dir of PrivacyEngine)."
        ) from None
    except OSError as error:  # some network file systems
        logger.warning(
            "'%s' cannot be locked (%s): make sure that no other process trains in this output_dir.", path, error
        )
