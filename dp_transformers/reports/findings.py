"""The findings in one or several folders of trainings: certificates, ledgers, signatures, and their differences."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..step.ledger import Ledger
from .certificate import CERTIFICATE_NAME, CertificateError, build, disagreements, read, summary, unfinished_draws
from .recompute import (
    PrivacyCurve,
    RecordedRun,
    ceilings,
    composed,
    is_other_data,
    no_privacy,
    over_steps,
    privacy_curve,
    recorded_runs,
)
from .signatures import SignatureError, signer
from .words import paragraph


@dataclass(frozen=True)
class Folder:
    """The findings in one folder.

    Attributes:
        runs: The runs of its ledger.
        faults: Differences between certificate, ledger and signature, as sentences.
        delta: The δ that the user chose for the certificate; None without such a choice, or with faults.
        signed_by: The public key (hex) of its signature.
        wanted: The public key (hex) of the required signer, if any.
    """

    path: Path
    runs: tuple[RecordedRun, ...]
    faults: tuple[str, ...]
    delta: float | None = None
    signed_by: str | None = None
    wanted: str | None = None

    @property
    def signature(self) -> str:
        """The signer of the certificate, in words."""
        if self.signed_by is None:
            return "none"
        if self.signed_by == self.wanted:
            return f"valid, by {self.signed_by} (the key that you asked for)"
        if self.wanted is not None:
            return f"valid, by {self.signed_by}, which is not the key that you asked for"
        return f"valid, by {self.signed_by}; whose key this is, --signed-by HEX checks"

    @property
    def not_signed(self) -> str | None:
        """A sentence if the certificate is not signed by the required signer, else None."""
        if self.wanted in (None, self.signed_by):
            return None
        agree = "" if self.faults else "the certificate and the ledger agree, but "
        return (
            f"NOT SIGNED BY {self.wanted}: {agree}the certificate in '{self.path}' is signed by "
            f"{self.signed_by or 'nobody'}."
        )


def look(path: str | os.PathLike, public_key: str | None = None) -> Folder:
    """Read a folder's ledger, and compare its certificate and signature with it.

    Args:
        public_key: The public key (hex) of the required signer.

    Raises:
        ValueError: there is neither a certificate nor a readable ledger, or ``public_key`` is not a key.
    """
    path, faults, unfinished, signed_by, delta = Path(path), [], {}, None, None
    wanted = None if public_key is None else _key(public_key)
    try:
        certificate = read(path)
        faults += disagreements(path, certificate)
        unfinished = unfinished_draws(certificate)
        delta = None if faults else certificate["delta"]
    except CertificateError as error:
        faults.append(str(error))
    try:
        signed_by = signer(path)
    except SignatureError as error:
        faults.append(str(error))
    runs = _runs(path, unfinished)
    return Folder(path, tuple(runs), tuple(faults), delta, signed_by, wanted)


def _runs(path: Path, unfinished: Mapping[str, int]) -> list[RecordedRun]:
    """Return the runs of the ledger; none if they cannot be read and there is a certificate."""
    try:
        if runs := recorded_runs(Ledger(path), unfinished):
            return runs
        build(path)  # raises, since there are none
    except ValueError:
        if not (path / CERTIFICATE_NAME).exists():
            raise
    return []


def _key(text: str) -> str:
    """Return a public key in lower case."""
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise ValueError(f"a public key is 64 hex digits, got {text!r}: take the one that --sign printed.")
    return text.lower()


class Report:
    """The findings in several folders, added up.

    Args:
        delta: The δ at which ε is stated; by default the smallest δ of the certificates and the runs.
        same_data: Add the folders up although their digests do not show that they used the same data.

    Raises:
        ValueError: the folders are not of the same data, or one is given twice.
    """

    def __init__(self, folders: Sequence[Folder], delta: float | None = None, *, same_data: bool = False):
        self.folders, self._delta = list(folders), _delta_of(folders) if delta is None else delta
        _refuse_twice(folder.path for folder in self.folders)
        self.runs = [run for folder in self.folders for run in folder.runs]
        if len(self.folders) > 1 and not same_data:
            self._refuse_other_data()

    def _refuse_other_data(self) -> None:
        of_runs = [run.facts.get("data") or {} for run in self.runs]
        earlier = [each for last in of_runs for each in last.get("earlier", ()) if is_other_data(last, each)]
        data = {each.get("digest") for each in (*of_runs, *earlier)}
        if len(data) > 1 or None in data:
            why = "their digests differ" if None not in data else "not all have a digest"
            raise ValueError(
                f"nothing shows that the folders are of the same data ({why}). If any person or row is in more than "
                "one of them (a subset, a newer version of the same data), what is spent adds up for them: say so "
                "(same_data=True, --same-data). If not, report each folder by itself."
            )

    @property
    def faults(self) -> list[str]:
        return [fault for folder in self.folders for fault in folder.faults]

    @property
    def not_signed(self) -> list[str]:
        """Sentences on folders without the required signature."""
        return [folder.not_signed for folder in self.folders if folder.not_signed]

    @cached_property
    def certificate(self) -> dict[str, Any]:
        """The certificate of all runs, from the ledgers. If there are faults, "private" is None (unknown) or False.

        Raises:
            ValueError: a ledger cannot be read, or no δ is known.
        """
        for folder in self.folders:
            if not folder.runs:
                raise ValueError(
                    f"the ledger in '{folder.path}' does not say what was released: restore it from a backup, or "
                    "leave the folder out."
                )
        found = summary(self.runs, self._delta)
        if not self.faults:
            return found
        runs = [{**run, "private": None if run["private"] else False} for run in found["runs"]]
        return {**found, "private": None if found["private"] else False, "runs": runs}

    @cached_property
    def has_numbers(self) -> bool:
        """True if the ledgers can be added up; False only if there are faults."""
        try:
            return bool(self.certificate)
        except ValueError:
            if not self.faults:
                raise
            return False

    @cached_property
    def curve(self) -> PrivacyCurve:
        """δ(ε) of everything that was released."""
        if not self.certificate["private"]:
            return no_privacy()
        total = self.certificate["total"]
        stated = total["epsilon"], total["delta"]
        return privacy_curve(composed(self.runs), total["relation"], total["accountant"], stated=stated)

    @cached_property
    def over_steps(self) -> list[tuple[int, float]]:
        """(steps, ε) after a few numbers of steps; empty if the training is not private."""
        total = self.certificate["total"]
        return over_steps(self.runs, total["delta"], total["accountant"]) if self.certificate["private"] else []

    @property
    def guarantee(self) -> str:
        """The guarantee, in sentences that need no knowledge of the field."""
        if self.faults:
            return "Nothing is guaranteed as long as certificate, ledger and signature do not agree."
        return paragraph(self.certificate, self.curve)

    def to_dict(self) -> dict[str, Any]:
        """Return all findings for JSON."""
        numbers = {"private": None}
        if self.has_numbers:
            detections = {str(alarms): detected for alarms, detected in ceilings(self.curve).items()}
            numbers = {**self.certificate, "largest_detection_rate": detections}
        return {
            "agrees": not self.faults,
            "guarantee": self.guarantee,
            "faults": self.faults,
            "signed_by": [folder.signed_by for folder in self.folders],
            "not_signed": self.not_signed,
            **numbers,
        }


def _delta_of(folders: Sequence[Folder]) -> float | None:
    """Return the smallest δ if a certificate has a chosen one; None if each run has its own."""
    if all(folder.delta is None for folder in folders):
        return None
    of_runs = [run.state.delta for folder in folders if folder.delta is None for run in folder.runs]
    return min(delta for delta in [*of_runs, *(folder.delta for folder in folders)] if delta is not None)


def _refuse_twice(paths: Iterable[Path]) -> None:
    """Raise ValueError if a folder would be counted twice."""
    for path, count in Counter(path.resolve() for path in paths).items():
        if count > 1:
            raise ValueError(f"the folder '{path}' is given twice: its steps would be counted twice. Give it once.")
