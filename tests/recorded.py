"""Folders as trainings leave them, written without a training."""

import contextlib
import os

from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit
from dp_transformers.mechanism.noise import IndependentNoise
from dp_transformers.mechanism.sampling import PoissonSampling
from dp_transformers.reports import certificate
from dp_transformers.step.checkpoint import PrivacyState
from dp_transformers.step.ledger import Ledger

DELTA = 1e-5
DATA = {"rows": 1000, "digest": "hmac-sha256:" + "1" * 64, "key": "2" * 16}


def mechanism(sigma=1.0, steps=20, rows=1):
    return Mechanism(
        sampling=PoissonSampling(1000, 50), clipping=FlatClipping(1.0), noise=IndependentNoise(sigma), steps=steps, unit=PrivacyUnit(rows),
    )  # fmt: skip


@contextlib.contextmanager
def writing(folder):
    ledger = Ledger(folder)
    ledger.open()
    try:
        yield ledger
    finally:
        ledger.close()


def facts(**changes):
    return {
        "private": True,
        "not_private_because": [],
        "verified": True,
        "accountant": "pld",
        "time": "2026-11-01T09:00:00+00:00",
        "data": DATA,
        "model": {"class": "BertForSequenceClassification", "name": "bert", "parameters": 110_000_000, "trainable": 1_000_000},
        "software": {"python": "3.11.7", "dp_transformers": "0.1.0", "torch": "2.13.0"},
        "code": {"script": "train.py", "git_commit": "0" * 40, "has_changes": False},
        "also_released": [{"what": "metrics on evaluation data", "covered": False}],
        **changes,
    }  # fmt: skip


def record(folder, *, run_id="a1", steps=20, first=0, how=None, delta=DELTA, certified=True, **changes):
    """Write the ledger of one run, or of its next part, and the certificate of the folder."""
    how = how or mechanism()
    with writing(folder) as ledger:
        ledger.begin(PrivacyState(run_id, how, delta, 8.0).to_dict(), facts(**changes))
        for step in range(first, first + steps):
            ledger.add_step(run_id, step + 1, how.at(step))
    if certified:
        certificate.write(folder)
    return os.fspath(folder)
