"""The ledger of a run (``privacy_ledger.jsonl`` in the output directory, beside the checkpoints): an append-only
record of its steps.

The line of a step is on disk before the step's noisy gradient exists, so that whatever anybody can have seen is
counted, also when training is resumed from an older checkpoint. One process writes it at a time.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .values import StepParameters

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LEDGER_NAME = "privacy_ledger.jsonl"
# of it and of the privacy state; version 1 has the numbers of its mechanism one by one, and nothing in the lines of
# steps
VERSION = 2

logger = logging.getLogger(__name__)


class PrivacyStateError(ValueError):
    """Privacy state that is missing or disagrees; training must not go on from it."""


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
    """Append-only record of every noised step, flushed to disk line by line. Reading is free; to write, `open` it and
    `close` it."""

    def __init__(self, output_dir: str | os.PathLike):
        self.path = Path(output_dir) / LEDGER_NAME
        self._file: io.FileIO | None = None

    def steps(self, run_id: str) -> int:
        """How many steps of this run were executed. 0 without a file."""
        return sum(segment.total() for segment in self.segments(run_id))

    def segments(self, run_id: str) -> list[Counter[StepParameters | None]]:
        """Return the parameters of a run's steps, in one counter for each time that it began or went on; None where a
        line does not say.

        A torn line may have been a step, of the run that wrote the line before; of any if there is none.
        """
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
        """How many steps of other runs the same file holds."""
        return sum(
            writer not in (run_id, None) and (entry is None or "step" in entry) for writer, entry in self._lines()
        )

    def _lines(self) -> Iterator[tuple[str | None, dict[str, Any] | None]]:
        """Yield the run that wrote each line (None where no line before says it) and the content of the line (None
        where it is torn)."""
        writer = None
        with open(self.path, "rb") if self.path.exists() else io.BytesIO() as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    writer = entry["run"]
                except (ValueError, TypeError, KeyError):
                    entry = None
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
        self._append(
            {
                "run": state["run_id"],
                "event": "begin",
                **{k: v for k, v in state.items() if k != "run_id"},
                **(facts or {}),
            }
        )

    def add_step(self, run_id: str, step: int, parameters: StepParameters) -> None:
        """Record one step and what it uses, before its result exists. Returns when the line is on disk.

        Raises:
            OSError: it could not be written (the disk is full, say); the step must not be taken.
        """
        self._append({"run": run_id, "step": step, **parameters._asdict()})

    def _append(self, entry: Mapping[str, Any]) -> None:
        assert self._file is not None, "the ledger is not open"
        line = json.dumps(entry).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(
                errno.ENOSPC,
                "a line of the ledger was cut short, so its step is not taken: make room on the disk, and resume from "
                "a checkpoint",
                str(self.path),
            )
        os.fsync(self._file.fileno())


def _parameters(entry: Mapping[str, Any]) -> StepParameters | None:
    """Read the parameters from a step's line; None in version 1."""
    try:
        return StepParameters(*(entry[name] for name in StepParameters._fields))
    except KeyError:
        return None


_OPEN: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _close_after_fork() -> None:
    """Close ledgers in a forked process: a lock lasts as long as any copy of its descriptor, so a DataLoader worker
    would keep a killed trainer's."""
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
