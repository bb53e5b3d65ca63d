"""The privacy state in every checkpoint (``privacy_state.json``).

It names the run of the weights and the mechanism that they were trained with; no secret is in it. It is written last
and lists the other files of the checkpoint with their sizes: a checkpoint without it, or without one of them, is
half-written (or half-deleted) and is never loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..mechanism.mechanism import Mechanism
from .ledger import VERSION, PrivacyStateError, flush_to_disk

STATE_NAME = "privacy_state.json"

_WAY_OUT = " Resume from another checkpoint, or start a new run (resume_from_checkpoint=None)."

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivacyState:
    """The mechanism of a run, and the ε and δ that it is to stay within. They must not change when it is resumed."""

    run_id: str
    mechanism: Mechanism
    delta: float | None
    target_epsilon: float | None

    def to_dict(self) -> dict[str, Any]:
        budget = {"delta": self.delta, "target_epsilon": self.target_epsilon}
        return {"version": VERSION, "run_id": self.run_id, **budget, "mechanism": self.mechanism.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrivacyState:
        """Read the state that :meth:`to_dict` wrote. Other keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: it cannot be read.
        """
        if data["version"] != VERSION:
            raise ValueError(
                f"the privacy state is of version {data['version']!r}, and this release of dp_transformers reads "
                f"{VERSION}: install the one that wrote it, to go on from it"
            )
        return cls(data["run_id"], Mechanism.from_dict(data["mechanism"]), data["delta"], data["target_epsilon"])

    @staticmethod
    def new_run_id() -> str:
        return secrets.token_hex(8)

    def save(self, folder: str | os.PathLike, ledger_steps: int, facts: Mapping[str, Any] | None = None) -> None:
        """Declare a checkpoint complete: flush its files to disk, then write this state with the number of steps that
        the ledger held of this run.

        Args:
            facts: Further facts of those steps (:meth:`dp_transformers.step.run.PrivateRun.facts`).
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [path for path in folder.rglob("*") if path.name != STATE_NAME]
        for path in paths:
            flush_to_disk(path)
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}
        temporary = folder / f".{STATE_NAME}"
        content = {**self.to_dict(), "ledger_steps": ledger_steps, **(facts or {}), "files": sizes}
        with open(temporary, "w") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / STATE_NAME)
        flush_to_disk(folder)
        flush_to_disk(folder.parent)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> tuple[PrivacyState, int]:
        """Return the state in a checkpoint, and the smallest number of steps that the ledger must hold.

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
                f"'{path}' is missing: the checkpoint was not written to its end, or not by DPTrainer, so what it has "
                f"already spent is not known.{_WAY_OUT}"
            ) from None
        except (KeyError, TypeError, ValueError) as error:
            raise PrivacyStateError(f"'{path}' cannot be read ({type(error).__name__}: {error}).{_WAY_OUT}") from error
        for name, size in sizes.items():
            file = path.parent / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise PrivacyStateError(
                    f"'{file}' {state}, it was saved with {size} bytes: the checkpoint is not complete.{_WAY_OUT}"
                )
        return loaded

    def most_steps_beside(self, folder: str | os.PathLike) -> int:
        """Return the largest number of steps that the ledger held of this run when one of the checkpoints in a folder
        was saved, whether they are complete or not."""
        most = 0
        for path in Path(folder).glob(f"*/{STATE_NAME}"):
            with contextlib.suppress(OSError, KeyError, TypeError, ValueError):  # of something else, or torn
                content = json.loads(path.read_text())
                most = max(most, int(content["ledger_steps"]) if content["run_id"] == self.run_id else 0)
        return most

    @staticmethod
    def facts(folder: str | os.PathLike) -> dict[str, Any]:
        """Return the whole content of a complete checkpoint's state file."""
        return json.loads((Path(folder) / STATE_NAME).read_text())

    def require(self, wanted: PrivacyState) -> None:
        """Raise PrivacyStateError unless this saved state is that of ``wanted``. Run, number of steps and
        ``max_examples_per_person`` may differ."""
        before, now = self.settings(), wanted.settings()
        for name in [name for name in {**before, **now} if not name.startswith(_MAY_CHANGE)]:
            if (saved := before.get(name)) != (value := now.get(name)):
                raise PrivacyStateError(
                    f"the checkpoint was trained with {name}={saved!r}, now it is {value!r}. A run keeps its "
                    "mechanism: use the old value, or start a new run without this checkpoint."
                )

    def settings(self) -> dict[str, Any]:
        """Return the state without its run, by the names of arguments."""
        flat = _flat(self.to_dict())
        return {path.removeprefix("mechanism."): value for path, value in flat if path != "run_id"}


_MAY_CHANGE = ("steps", "unit.max_examples_per_person")


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def find_checkpoint(output_dir: str | os.PathLike) -> str:
    """Return the newest complete checkpoint. A warning names newer ones that are not complete.

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
    missing = f"there is no complete checkpoint in '{output_dir}' to resume from."
    raise PrivacyStateError(" ".join([missing, *faults, "Start a new run (resume_from_checkpoint=None)."]))


def rotate(output_dir: str | os.PathLike, limit: int, keep: Collection[str]) -> None:
    """Delete checkpoints until `limit` are left, incomplete ones first, then the oldest; never those that are named in
    `keep`."""
    folders = sorted(
        _checkpoints(output_dir), key=lambda folder: (_is_complete(folder), folder.stat().st_mtime_ns, _number(folder))
    )
    for folder in [f for f in folders if f.name not in keep][: max(0, len(folders) - limit)]:
        shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    found = Path(output_dir).glob("checkpoint-*")
    return [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _is_complete(checkpoint: Path) -> bool:
    try:
        return bool(PrivacyState.load(checkpoint))
    except PrivacyStateError:
        return False
