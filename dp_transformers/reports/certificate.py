"""The certificate of a folder of trainings (``privacy.json``): the ε spent, the data, the code.

It is a summary of the ledger in the same folder, plus the number of draws that were given to a loop and not stepped.
:func:`disagreements` rebuilds it from the ledger and compares.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from ..mechanism.mechanism import NO_BOUND
from ..step.ledger import LEDGER_NAME, Ledger, PrivacyStateError, flush_to_disk
from .recompute import RecordedRun, Spent, recorded_runs, spent

CERTIFICATE_NAME = "privacy.json"
SCHEMA, VERSION = "dp-transformers/privacy", 1
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets", "dp-accounting", "numpy", "scipy")
TOLERANCE = 2e-3  # relative, of ε: another machine or release of dp_accounting may round differently

logger = logging.getLogger(__name__)

_FACTS = ("time", "data", "model", "software", "code", "also_released")


class CertificateError(ValueError):
    """Raised for a certificate that is missing or cannot be read."""


# ---- facts of a run when it begins ----


def circumstances(
    *, accountant: str, data: Mapping[str, Any], model: Any, also_released: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the facts that the line which begins a run holds besides its mechanism, for
    :meth:`dp_transformers.step.run.PrivateRun.begin`.

    Args:
        data: From :func:`dp_transformers.reports.digest.describe_data`.
        model: The module that is trained.
        also_released: Further outputs of the training, as ``{"what": ..., "covered": True if epsilon covers it}``.
    """
    return {
        "accountant": accountant,
        "time": _now(),
        "data": dict(data),
        "model": describe_model(model),
        "software": software(),
        "code": code(),
        "also_released": [dict(each) for each in also_released],
    }


def describe_model(model: Any) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__,
        "name": _public_name(getattr(getattr(model, "config", None), "_name_or_path", "")),
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
    }


def _public_name(name: str) -> str | None:
    """Return a model's name, or the last part of a local path, since a certificate is handed over."""
    return Path(name).name if os.path.isabs(name) or os.path.isdir(name) else name or None


@functools.lru_cache(maxsize=1)
def software() -> dict[str, str | None]:
    """Return the versions of Python, of this package and of its dependencies."""
    package = __name__.partition(".")[0]
    own = {"python": platform.python_version(), package: sys.modules[package].__version__}
    return own | {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=1)
def code() -> dict[str, Any] | None:
    """Return the running script and the git commit of the current folder; None outside of a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {
        "script": Path(sys.argv[0]).name,
        "git_commit": commit,
        "has_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


# ---- the certificate ----


def build(
    folder: str | os.PathLike, *, delta: float | None = None, unfinished: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Build the certificate of a folder from its ledger.

    Args:
        delta: The δ at which ε is stated; by default that of each run, and the smallest for their sum.
        unfinished: Number of draws of each run, by its id, that were given to a loop and not stepped.

    Raises:
        ValueError: the releases cannot be read from the ledger.
    """
    ledger = Ledger(folder)
    runs = recorded_runs(ledger, unfinished)
    if not runs:
        raise CertificateError(
            f"'{ledger.path}' holds no run: nothing was trained there, or its lines were taken out. Give the output "
            "folder of a training, or restore the file from a backup."
        )
    size, digest = ledger.digest()
    chain = ledger.chain()
    lines = {"lines": chain.lines, "bytes": size, "sha256": digest}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "written": _now(),
        "delta": delta,
        **summary(runs, delta),
        "ledger": {"file": LEDGER_NAME, **lines},
    }


def summary(runs: Sequence[RecordedRun], delta: float | None = None) -> dict[str, Any]:
    """Summarise several runs: ε of all together, and of each."""
    each = [spent([run], delta) for run in runs]
    total = each[0] if len(runs) == 1 else spent(runs, delta)
    reasons = _not_private_because(runs, total)
    return {
        "private": not reasons,
        "not_private_because": reasons,
        "verified": all(run.verified for run in runs),
        "unit": str(runs[0].mechanism.unit),
        "total": _numbers(total),
        "runs": [_describe(run, own) for run, own in zip(runs, each, strict=True)],
    }


def _not_private_because(runs: Iterable[RecordedRun], total: Spent) -> list[str]:
    reasons = list(dict.fromkeys(why for run in runs for why in run.not_private_because))
    return reasons or ([NO_BOUND] if total.epsilon == math.inf else [])


def _describe(run: RecordedRun, total: Spent) -> dict[str, Any]:
    reasons = _not_private_because([run], total)
    return {
        "run": run.state.run_id,
        **_numbers(total),
        "num_examples": run.mechanism.sampling.num_examples,
        "target_epsilon": run.state.target_epsilon,
        "unfinished_draws": run.unfinished,
        "private": not reasons,
        "not_private_because": reasons,
        "verified": run.verified,
        "mechanism": run.mechanism.to_dict(),
        **{name: run.facts.get(name) for name in _FACTS},
    }


def _numbers(total: Spent) -> dict[str, Any]:
    """Return the fields for JSON, which has no infinity: an infinite ε is None."""
    return {name: None if value == math.inf else value for name, value in vars(total).items()}


def write(
    folder: str | os.PathLike, *, delta: float | None = None, unfinished: Mapping[str, int] | None = None
) -> dict[str, Any] | None:
    """Write the certificate of a folder atomically, and return it; None if nothing was trained there.

    A certificate with the same content is left as it is, so that its signature stays valid.

    Args:
        delta, unfinished: As in :func:`build`. For runs that are not named, the old number of unfinished draws stays.

    Raises:
        PrivacyStateError: the ledger was changed, by its own digests or by those of the existing certificate.
    """
    folder = Path(folder)
    ledger = Ledger(folder)
    if not ledger.run_ids():
        return None
    require_intact(ledger)
    old = read(folder) if (folder / CERTIFICATE_NAME).exists() else None
    kept = unfinished_draws(old) if old else {}
    content = build(folder, delta=delta, unfinished={**kept, **(unfinished or {})})
    text = json.dumps(content, indent=2, allow_nan=False)
    if old is not None and {**old, "written": None} == {**json.loads(text), "written": None}:
        return old
    temporary = folder / f".{CERTIFICATE_NAME}"
    with open(temporary, "w") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / CERTIFICATE_NAME)
    flush_to_disk(folder)
    return content


def write_or_warn(folder: str | os.PathLike, **options: Any) -> None:
    """Call :func:`write`, and only log a failure, so that the training does not fail."""
    try:
        write(folder, **options)
    except (OSError, ValueError) as error:
        logger.warning("%s was not written in '%s': %s", CERTIFICATE_NAME, folder, error)


_OF_LEDGER = {"lines": int, "bytes": int, "sha256": str}


def read(folder: str | os.PathLike) -> dict[str, Any]:
    """Read the certificate in a folder.

    Raises:
        CertificateError: it is missing, of another version, or not a certificate.
    """
    path = Path(folder) / CERTIFICATE_NAME
    try:
        content = json.loads(path.read_text())
        schema, version = content["schema"], content["version"]
        content["delta"], content["total"]["epsilon"], unfinished_draws(content)
        if not all(isinstance(content["ledger"][name], kind) for name, kind in _OF_LEDGER.items()):
            raise TypeError(f"'ledger' must hold {', '.join(_OF_LEDGER)}")
    except FileNotFoundError:
        raise CertificateError(
            f"'{path}' is missing: the training was killed before it was written, or it was taken away. Let the "
            "training run to its end, which writes it."
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CertificateError(
            f"'{path}' is no certificate ({type(error).__name__}: {error}): it was changed, or another program wrote "
            "it. Restore it from a backup."
        ) from error
    if schema != SCHEMA or version != VERSION:
        raise CertificateError(
            f"'{path}' is of schema {schema!r}, version {version!r}, and this release reads {SCHEMA!r}, version "
            f"{VERSION}: install the release that wrote it."
        )
    return content


def unfinished_draws(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of unfinished draws of each run, by its id.

    Raises:
        ValueError: a number is negative, and would subtract steps of the ledger.
    """
    draws = {run["run"]: int(run["unfinished_draws"]) for run in content["runs"]}
    if any(count < 0 for count in draws.values()):
        raise ValueError(f"unfinished_draws must not be negative, got {min(draws.values())}")
    return draws


# ---- comparing ----


def disagreements(folder: str | os.PathLike, certificate: Mapping[str, Any]) -> list[str]:
    """Return the differences between a certificate and the ledger in the folder, as sentences."""
    ledger = Ledger(folder)
    faults = _faults_of_ledger(ledger, certificate["ledger"])
    try:
        now = build(folder, delta=certificate["delta"], unfinished=unfinished_draws(certificate))
    except ValueError as error:
        return [*faults, str(error)]
    before, after = dict(_flat(certificate)), dict(_flat(json.loads(json.dumps(now))))
    paths = [path for path in {**before, **after} if not path.startswith(("written", "ledger."))]
    differ = [
        f"{path} = {before.get(path)!r}, by the ledger it is {after.get(path)!r}"
        for path in paths
        if not _same(path, before.get(path), after.get(path))
    ]
    return [*faults, f"{CERTIFICATE_NAME} says {'; '.join(differ)}."] if differ else faults


def require_intact(ledger: Ledger) -> None:
    """Raise PrivacyStateError if the ledger was changed, by its own digests or by the digest in the certificate. So no
    run resumes from a wrong count, and no certificate is overwritten with one."""
    if changes := changes_of(ledger):
        raise PrivacyStateError(
            f"what was spent in '{ledger.path.parent}' is not known: {changes[0]} Restore both files from one backup, "
            "the latest, or choose another folder for a new run from the original model. What this one spent counts "
            "all the same."
        )


def changes_of(ledger: Ledger) -> list[str]:
    """Return evidence that lines of the ledger were changed or removed, by its own digests or by the digest in the
    certificate, as sentences."""
    recorded = None
    with contextlib.suppress(CertificateError):  # it is missing, or of another version
        recorded = read(ledger.path.parent)["ledger"]
    return _changes_since(recorded, ledger)


def _faults_of_ledger(ledger: Ledger, recorded: Mapping[str, Any]) -> list[str]:
    if changes := _changes_since(recorded, ledger):
        return changes
    if (more := ledger.chain().lines - recorded["lines"]) > 0:
        return [
            f"{LEDGER_NAME} goes on for {more} lines after {CERTIFICATE_NAME} was written: the training was "
            "killed, or is still running. Let it run to its end, which writes the certificate again."
        ]
    return []


def _changes_since(recorded: Mapping[str, Any] | None, ledger: Ledger) -> list[str]:
    """Return evidence that the ledger was changed, also by its ``recorded`` size and digest in a certificate."""
    chain = ledger.chain()
    if chain.broken_at is not None:
        return [
            f"line {chain.broken_at} of {LEDGER_NAME} does not follow from what stands before it: an earlier line, or "
            f"this one, was changed or put in, or a line before line {chain.broken_at} was taken out."
        ]
    if recorded is None or ledger.digest(recorded["bytes"]) == (recorded["bytes"], recorded["sha256"]):
        return []
    if not chain.lines:
        return [
            f"{LEDGER_NAME} is missing, or empty, and {CERTIFICATE_NAME} says that it had {recorded['lines']} lines."
        ]
    missing = recorded["lines"] - chain.lines
    changed = "was changed in its last line, or in all of its digests,"
    what = f"was cut off by {missing} lines" if missing > 0 else changed
    return [
        f"{LEDGER_NAME} {what} after {CERTIFICATE_NAME} was written: the SHA-256 of its first {recorded['bytes']} "
        "bytes is another one."
    ]


def _same(path: str, a: Any, b: Any) -> bool:
    if path.endswith((".epsilon", ".epsilon_per_person")) and isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=TOLERANCE)
    return a == b and type(a) is type(b)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flat(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        yield f"{path}.length", len(value)
        for number, each in enumerate(value):
            yield from _flat(each, f"{path}[{number}]")
    else:
        yield path, value
