"""What a private run leaves on disk: the ledger of its steps, and the privacy state in every checkpoint.

The **ledger** (``privacy_ledger.jsonl`` in the output directory, beside the checkpoints) is append-only. Its line for a step is on
disk before the step's noisy gradient exists, so that whatever anybody can have seen is counted, also when training is resumed from an
older checkpoint. The **privacy state** (``privacy_state.json`` inside a checkpoint) says which run the weights belong to and with which
mechanism they were trained; no secret is in it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

LEDGER_NAME = "privacy_ledger.jsonl"
STATE_NAME = "privacy_state.json"


class PrivacyStateError(ValueError):
    """Privacy state that is missing or disagrees; training must not go on from it."""


@dataclass(frozen=True)
class PrivacyState:
    """The mechanism of a run. Everything that must not change when it is resumed."""

    run_id: str
    num_examples: int
    expected_batch_size: int
    noise_multiplier: float
    max_grad_norm: float
    delta: float | None
    target_epsilon: float | None
    sampling: str

    @property
    def sample_rate(self) -> float:
        return self.expected_batch_size / self.num_examples

    @staticmethod
    def new_run_id() -> str:
        return secrets.token_hex(8)

    def save(self, folder: str | os.PathLike, ledger_steps: int) -> None:
        """Write it into a checkpoint, with the number of steps that the ledger held for this run."""
        path = Path(folder) / STATE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with open(temporary, "w") as file:
            json.dump({**asdict(self), "ledger_steps": ledger_steps}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> tuple[PrivacyState, int]:
        """The state in a checkpoint, and the number of steps the ledger must at least hold."""
        path = Path(folder) / STATE_NAME
        try:
            content = json.loads(path.read_text())
            return cls(**{f.name: content[f.name] for f in fields(cls)}), int(content["ledger_steps"])
        except FileNotFoundError:
            raise PrivacyStateError(
                f"'{path}' is missing, so what this checkpoint has already spent is not known. Resume from a checkpoint that DPTrainer "
                "wrote, or start a new run (resume_from_checkpoint=None)."
            ) from None
        except (KeyError, TypeError, ValueError) as error:
            raise PrivacyStateError(f"'{path}' cannot be read ({error}). Resume from another checkpoint.") from error

    def require(self, wanted: Mapping[str, Any]) -> None:
        """Raise PrivacyStateError unless every given value is the saved one."""
        for name, value in wanted.items():
            saved = getattr(self, name)
            if saved != value:
                raise PrivacyStateError(
                    f"the checkpoint was trained with {name}={saved!r}, now it is {value!r}. A run keeps its mechanism: use the old value, "
                    "or start a new run (resume_from_checkpoint=None)."
                )


class Ledger:
    """Append-only record of every noised step, flushed to disk line by line."""

    def __init__(self, output_dir: str | os.PathLike):
        self.path = Path(output_dir) / LEDGER_NAME

    def steps(self, run_id: str) -> int:
        """How many steps of this run were executed, a torn last line included. 0 without a file."""
        if not self.path.exists():
            return 0
        count = 0
        for line in self.path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # the process died while writing it: the step may have happened
                count += 1
                continue
            count += entry.get("run") == run_id and "step" in entry
        return count

    def other_steps(self, run_id: str) -> int:
        """How many steps of other runs the same file holds."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return sum('"step"' in line for line in lines) - self.steps(run_id)

    def begin(self, state: PrivacyState) -> None:
        """Record that this run starts or goes on."""
        self._append({"run": state.run_id, "event": "begin", **{k: v for k, v in asdict(state).items() if k != "run_id"}})

    def add_step(self, run_id: str, step: int) -> None:
        """Record one step, before its result exists. Returns when the line is on disk."""
        self._append({"run": run_id, "step": step})

    def _append(self, entry: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            line = json.dumps(entry).encode() + b"\n"
            if file.tell() and not self._ends_with_newline():
                line = b"\n" + line  # a torn line stays, and stays alone
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _ends_with_newline(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
