"""What the arguments of accounting must be."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

ACCOUNTANTS = ("pld", "rdp")  # those of this package


def _check_number(name: str, value: Any, valid: Callable[[float], bool], rule: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not valid(number):
        raise ValueError(f"{name} must be {rule}; got {value!r}.")
    return number


def check_noise(value: float) -> float:
    rule = "a finite number >= 0 (noise standard deviation / clipping bound; get one from calibrate_noise_multiplier)"
    return _check_number("noise_multiplier", value, lambda x: 0 <= x < math.inf, rule)


def check_rate(value: float) -> float:
    rule = "a probability in [0, 1] (expected batch size / number of examples)"
    return _check_number("sample_rate", value, lambda x: 0 <= x <= 1, rule)


def check_delta(name: str, value: float) -> float:
    rule = "strictly between 0 and 1 (choose it well below 1 / number of examples)"
    return _check_number(name, value, lambda x: 0 < x < 1, rule)


def require_small_delta(delta: float, num_examples: int, *, name: str = "delta") -> None:
    """Raise ValueError unless 0 < δ < 1/N."""
    if not delta > 0:
        raise ValueError(f"{name} must be above 0, got {delta!r}; 1e-6 is common.")
    if delta >= 1 / num_examples:
        raise ValueError(
            f"{name}={delta:g} is not smaller than 1/N = {1 / num_examples:.3g} for N = {num_examples} training "
            "examples: at that delta, publishing one example outright would count as private. Choose it well below, "
            "for example 1e-6."
        )


def check_epsilon(name: str, value: float) -> float:
    rule = "a finite number > 0 (for a run without privacy, set noise_multiplier=0 instead)"
    return _check_number(name, value, lambda x: 0 < x < math.inf, rule)


def check_rows(value: int) -> int:
    try:
        rows = operator.index(value)
    except TypeError:
        rows = 0
    if rows < 1:
        raise ValueError(
            f"rows must be an int >= 1 (how many rows one person may have, max_examples_per_person); got {value!r}."
        )
    return rows


def check_count(name: str, value: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"{name} must be an int >= 0 (a number of optimizer steps); got {value!r}.")
    return count
