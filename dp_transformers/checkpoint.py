"""The files of a private run: the ledger of its steps, and the privacy state in every checkpoint.

The **ledger** (``privacy_ledger.jsonl`` in the output directory, beside the checkpoints) is append-only. Its line for a step is on
disk before the step's noisy gradient exists, so that whatever anybody can have seen is counted, also when training is resumed from an
older checkpoint. One process writes it at a time. The **privacy state** (``privacy_state.json`` inside a checkpoint) says which run the
weights belong to and with which mechanism they were trained; no secret is in it. It is written last and lists the other files of the
checkpoint with their sizes: a checkpoint without it, or without one of them, is half-written (or half-deleted) and is never loaded.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import secrets
import shutil
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .clipping.functions import FlatClipping
from .mechanism import Mechanism
from .noise import IndependentNoise
from .sampling import PoissonSampling
from .values import StepParameters

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LEDGER_NAME = "privacy_ledger.jsonl"
STATE_NAME = "privacy_state.json"
VERSION = 2  # of both; version 1 has the numbers of its mechanism one by one, and nothing in the lines of steps

_WAY_OUT = " Resume from another checkpoint, or start a new run (resume_from_checkpoint=None)."

logger = logging.getLogger(__name__)


class PrivacyStateError(ValueError):
    """Privacy state that is missing or disagrees; training must not go on from it."""


@dataclass(frozen=True)
class PrivacyState:
    """What must not change when a run is resumed: its mechanism, and the ε and δ it is to stay within."""

    run_id: str
    mechanism: Mechanism
    delta: float | None
    target_epsilon: float | None

    def to_dict(self) -> dict[str, Any]:
        budget = {"delta": self.delta, "target_epsilon": self.target_epsilon}
        return {"version": VERSION, "run_id": self.run_id, **budget, "mechanism": self.mechanism.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrivacyState:
        """Read the state that :meth:`to_dict` wrote, in this version or an earlier one. Other keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: it cannot be read.
        """
        if (version := data.get("version", 1)) not in (1, VERSION):
            raise ValueError(f"it is of version {version!r}, which a later release wrote")
        mechanism = _mechanism_of_version_1(data) if version == 1 else Mechanism.from_dict(data["mechanism"])
        return cls(data["run_id"], mechanism, data["delta"], data["target_epsilon"])

    @staticmethod
    def new_run_id() -> str:
        return secrets.token_hex(8)

    def save(self, folder: str | os.PathLike, ledger_steps: int, facts: Mapping[str, Any] | None = None) -> None:
        """Declare a checkpoint complete: flush its files to disk, then write this state with the steps that the ledger held for this run.

        Args:
            facts: What else is known of those steps (:meth:`dp_transformers.run.PrivateRun.facts`).
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [path for path in folder.rglob("*") if path.name != STATE_NAME]
        for path in paths:
            _fsync(path)
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}
        temporary = folder / f".{STATE_NAME}"
        with open(temporary, "w") as file:
            json.dump({**self.to_dict(), "ledger_steps": ledger_steps, **(facts or {}), "files": sizes}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / STATE_NAME)
        _fsync(folder)
        _fsync(folder.parent)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> tuple[PrivacyState, int]:
        """The state in a checkpoint, and the number of steps the ledger must at least hold.

        Raises:
            PrivacyStateError: the checkpoint is not complete.
        """
        path = Path(folder) / STATE_NAME
        try:
            content = json.loads(path.read_text())
            loaded = cls.from_dict(content), int(content["ledger_steps"])
            sizes = dict(content["files"])
        except FileNotFoundError:
            raise PrivacyStateError(
                f"'{path}' is missing: the checkpoint was not written to its end, or not by DPTrainer, so what it has already spent is not "
                f"known.{_WAY_OUT}"
            ) from None
        except (KeyError, TypeError, ValueError) as error:
            raise PrivacyStateError(f"'{path}' cannot be read ({type(error).__name__}: {error}).{_WAY_OUT}") from error
        for name, size in sizes.items():
            file = path.parent / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise PrivacyStateError(f"'{file}' {state}, it was saved with {size} bytes: the checkpoint is not complete.{_WAY_OUT}")
        return loaded

    @staticmethod
    def facts(folder: str | os.PathLike) -> dict[str, Any]:
        """Return the whole content of a complete checkpoint's state file."""
        return json.loads((Path(folder) / STATE_NAME).read_text())

    def require(self, wanted: PrivacyState) -> None:
        """Raise PrivacyStateError unless this saved state is that of ``wanted``, whatever its run, number of steps and unit."""
        before, now = (dict(_flat(state.to_dict())) for state in (self, wanted))
        for path in [path for path in {**before, **now} if not path.startswith(_MAY_CHANGE)]:
            name, saved, value = path.removeprefix("mechanism."), before.get(path), now.get(path)
            if saved != value:
                raise PrivacyStateError(
                    f"the checkpoint was trained with {name}={saved!r}, now it is {value!r}. A run keeps its mechanism: use the old value, "
                    "or start a new run without this checkpoint."
                )


_MAY_CHANGE = ("run_id", "mechanism.steps", "mechanism.unit")


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _mechanism_of_version_1(data: Mapping[str, Any]) -> Mechanism:
    """Read version 1, which had one kind of each part, and neither steps nor unit."""
    if data["sampling"] != PoissonSampling.kind:
        raise ValueError(f"no sampling {data['sampling']!r} was ever supported")
    return Mechanism(
        sampling=PoissonSampling(data["num_examples"], data["expected_batch_size"]),
        clipping=FlatClipping(data["max_grad_norm"]),
        noise=IndependentNoise(data["noise_multiplier"]),
    )


def find_checkpoint(output_dir: str | os.PathLike) -> str:
    """The newest complete checkpoint; incomplete ones above it are named in a warning.

    Raises:
        PrivacyStateError: there is none.
    """
    faults = []
    for folder in sorted(_checkpoints(output_dir), key=_number, reverse=True):
        try:
            PrivacyState.load(folder)
        except PrivacyStateError as error:
            faults.append(str(error).removesuffix(_WAY_OUT))
            continue
        if faults:
            logger.warning("resuming from '%s'; newer checkpoints are not complete: %s", folder, " ".join(faults))
        return str(folder)
    raise PrivacyStateError(
        " ".join(
            (
                f"there is no complete checkpoint in '{output_dir}' to resume from.",
                *faults,
                "Start a new run (resume_from_checkpoint=None).",
            )
        )
    )


def rotate(output_dir: str | os.PathLike, limit: int, keep: Collection[str]) -> None:
    """Delete checkpoints until `limit` are left, incomplete ones first, then the oldest; never those whose names are in `keep`."""
    folders = sorted(_checkpoints(output_dir), key=lambda folder: (_is_complete(folder), folder.stat().st_mtime_ns, _number(folder)))
    for folder in [f for f in folders if f.name not in keep][: max(0, len(folders) - limit)]:
        shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    return [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _is_complete(checkpoint: Path) -> bool:
    try:
        return bool(PrivacyState.load(checkpoint))
    except PrivacyStateError:
        return False


def _fsync(path: Path) -> None:
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
    """Append-only record of every noised step, flushed to disk line by line. Reading is free; to write, `open` it and `close` it."""

    def __init__(self, output_dir: str | os.PathLike):
        self.path = Path(output_dir) / LEDGER_NAME
        self._file: io.FileIO | None = None

    def steps(self, run_id: str) -> int:
        """How many steps of this run were executed. 0 without a file."""
        return sum(segment.total() for segment in self.segments(run_id))

    def segments(self, run_id: str) -> list[Counter[StepParameters | None]]:
        """Return the parameters of a run's steps, in one counter for each time that it began or went on; None where a line does not say.

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
        """Return the lines of each time that a run began or went on: its state, and whether it was private and verified."""
        return [entry for writer, entry in self._lines() if writer == run_id and entry is not None and "step" not in entry]

    def other_steps(self, run_id: str) -> int:
        """How many steps of other runs the same file holds."""
        return sum(writer not in (run_id, None) and (entry is None or "step" in entry) for writer, entry in self._lines())

    def _lines(self) -> Iterator[tuple[str | None, dict[str, Any] | None]]:
        """Yield the run that wrote each line (None where no line before says it) and the content of the line (None where it is torn)."""
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
            _fsync(self.path.parent)
        except BaseException:
            file.close()
            raise
        self._file = file
        _OPEN.add(self)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def begin(self, state: PrivacyState, facts: Mapping[str, Any] | None = None) -> None:
        """Record that this run starts or goes on, with its mechanism and further facts (whether it is private, and why not)."""
        self._append(
            {"run": state.run_id, "event": "begin", **{k: v for k, v in state.to_dict().items() if k != "run_id"}, **(facts or {})}
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
                "a line of the ledger was cut short, so its step is not taken: make room on the disk, and resume from a checkpoint",
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
    """Close ledgers in a forked process: a lock lasts as long as any copy of its descriptor, so a DataLoader worker would keep a killed trainer's."""
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
            f"another training is writing '{path}'. Two at once would not count each other's steps: wait until it ends, call detach() on its "
            "PrivacyEngine, or choose another folder (output_dir of DPTrainingArguments, ledger_dir of PrivacyEngine)."
        ) from None
    except OSError as error:  # some network file systems
        logger.warning("'%s' cannot be locked (%s): make sure that no other process trains in this output_dir.", path, error)
