"""What is found in one or several folders: what their certificates say, what their ledgers say, and in what they
differ."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..ledger import Chain, Ledger
from .attack import PrivacyCurve, ceilings, no_privacy, privacy_curve
from .certificate import CertificateError, build, disagreements, read, summary, unfinished_draws
from .recompute import RecordedRun, composed, over_steps, recorded_runs
from .signatures import SignatureError, signer
from .words import paragraph


@dataclass(frozen=True)
class Folder:
    """What is found in one folder.

    Attributes:
        runs: The runs of its ledger.
        faults: In what certificate, ledger and signature differ, in sentences.
        signed_by: The public key of its signature (hex).
    """

    path: Path
    runs: tuple[RecordedRun, ...]
    faults: tuple[str, ...]
    chain: Chain
    signed_by: str | None = None


def look(path: str | os.PathLike, public_key: str | None = None) -> Folder:
    """Read a folder's ledger, and compare its certificate and signature with it.

    Args:
        public_key: The key (hex) by which the certificate must be signed.

    Raises:
        ValueError: the ledger does not say what was released, so there is nothing to report.
    """
    path, faults, unfinished, signed_by = Path(path), [], {}, None
    try:
        said = read(path)
        faults += disagreements(path, said)
        unfinished = unfinished_draws(said)
    except CertificateError as error:
        faults.append(str(error))
    try:
        signed_by = signer(path)
        if public_key is not None and signed_by != public_key:
            faults.append(f"the certificate in '{path}' is signed by {signed_by or 'nobody'}, not by {public_key}.")
    except SignatureError as error:
        faults.append(str(error))
    ledger = Ledger(path)
    runs = recorded_runs(ledger, unfinished)
    if not runs:
        build(path)  # says so
    return Folder(path, tuple(runs), tuple(faults), ledger.chain(), signed_by)


class Report:
    """What several folders say together.

    Args:
        delta: The δ at which ε is stated; by default the smallest of the runs.
        same_data: Add them up although nothing shows that they are of the same data.

    Raises:
        ValueError: the folders are not of the same data, or one is given twice.
    """

    def __init__(self, folders: Sequence[Folder], delta: float | None = None, *, same_data: bool = False):
        self.folders, self._delta = list(folders), delta
        _refuse_twice(folder.path for folder in self.folders)
        self.runs = [run for folder in self.folders for run in folder.runs]
        if len(self.folders) > 1 and not same_data:
            self._refuse_other_data()

    def _refuse_other_data(self) -> None:
        data = {(run.facts.get("data") or {}).get("digest") for run in self.runs}
        if len(data) > 1 or None in data:
            why = "their digests differ" if None not in data else "not all have a digest"
            raise ValueError(
                f"nothing shows that the folders are of the same data ({why}), and what is spent on different data "
                "does not add up. If the same rows are in all of them, say so (same_data=True, --same-data)."
            )

    @property
    def faults(self) -> list[str]:
        return [fault for folder in self.folders for fault in folder.faults]

    @property
    def unchained_lines(self) -> int:
        """Lines that an earlier release wrote, in which a change would not show."""
        return sum(folder.chain.unchained for folder in self.folders)

    @cached_property
    def certificate(self) -> dict[str, Any]:
        """What a certificate of all runs would say, by the ledgers."""
        return summary(self.runs, self._delta)

    @cached_property
    def curve(self) -> PrivacyCurve:
        """δ(ε) of everything that was released."""
        if not self.certificate["private"]:
            return no_privacy()
        total = self.certificate["total"]
        return privacy_curve(composed(self.runs), total["relation"], total["accountant"])

    @cached_property
    def over_steps(self) -> list[tuple[int, float]]:
        """ε after a few numbers of steps; nothing for what is not private."""
        total = self.certificate["total"]
        return over_steps(self.runs, total["delta"], total["accountant"]) if self.certificate["private"] else []

    @property
    def guarantee(self) -> str:
        """What is guaranteed, in sentences that need no knowledge of the field."""
        said = paragraph(self.certificate, self.curve)
        if not self.faults:
            return said
        return f"Nothing is guaranteed as long as certificate and ledger do not agree. By the ledger as it is: {said}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "agrees": not self.faults,
            "guarantee": self.guarantee,
            "faults": self.faults,
            "unchained_lines": self.unchained_lines,
            "signed_by": [folder.signed_by for folder in self.folders],
            **self.certificate,
            "largest_detection_rate": {str(a): detected for a, detected in ceilings(self.curve).items()},
        }


def _refuse_twice(paths: Iterable[Path]) -> None:
    """Raise ValueError if a folder would be counted twice."""
    for path, count in Counter(path.resolve() for path in paths).items():
        if count > 1:
            raise ValueError(f"the folder '{path}' is given twice: its steps would be counted twice. Give it once.")
