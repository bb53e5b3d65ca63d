"""The section "Privacy" of a model card or of peft's README."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..step.ledger import Ledger
from .attack import PrivacyCurve
from .certificate import changes_of
from .findings import Report, look
from .words import paragraph, table

logger = logging.getLogger(__name__)

_BEGIN, _END = "<!-- privacy: begin -->", "<!-- privacy: end -->"


def section(certificate: Mapping[str, Any], curve: PrivacyCurve) -> str:
    """Return the section as Markdown: one paragraph and one table."""
    rows = [f"| {name} | {value.replace('|', '/')} |" for name, value in table(certificate, curve)]
    lines = ["## Privacy", "", paragraph(certificate, curve), "", "| | |", "|---|---|", *rows]
    return "\n".join([_BEGIN, *lines, _END])


def add_to(card: Path, run_dir: str | os.PathLike) -> None:
    """Put the section for a folder of trainings into a model card, if both exist. A failure is only logged, so that
    the model is saved all the same."""
    if not card.exists() or not Ledger(run_dir).run_ids():
        return
    try:
        folder = look(run_dir)
        if not changes_of(Ledger(run_dir)):  # any other fault is due to the model being saved before its certificate
            folder = replace(folder, faults=())
        found = Report([folder])
        put_into(card, section(found.certificate, found.curve))
    except (OSError, ValueError) as error:
        logger.warning("'%s' says nothing of privacy: %s", card, error)


def put_into(card: Path, text: str) -> None:
    """Replace the section of a model card, or add it at the end."""
    content = card.read_text(encoding="utf-8")
    old = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.S)
    if old.search(content):
        content = old.sub(lambda _: text, content, count=1)
    else:
        content = f"{content.rstrip()}\n\n{text}\n"
    card.write_text(content, encoding="utf-8")
