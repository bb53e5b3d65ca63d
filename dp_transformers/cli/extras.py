"""What to type where an optional dependency is not installed."""

from __future__ import annotations


def missing_extra(what: str, package: str, extra: str) -> ValueError:
    """The error to raise where ``what`` needs a package that comes with an extra of this distribution."""
    return ValueError(f'{what} needs {package}, which is not installed. Type: pip install "dp-finetune[{extra}]"')
