"""`dp-transformers report`: what a finished run may claim. Free of torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def report(run_dirs: list[Path]) -> None:
    """Recompute and report what the runs in RUN_DIRS spent together."""
    import_module("dp_transformers.reports").command(run_dirs)
