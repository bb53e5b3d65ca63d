"""ε and σ of fifty settings; tests/test_pins.py compares with them.

`PYTHONPATH=. python tests/privacy_pins.py --write` writes tests/privacy_pins.json from the code as it is. Do that only
for a change that is meant to change ε or σ, and say so where you commit it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
from pathlib import Path

from trajectories import processor

from dp_transformers.mechanism.accounting import calibrate_noise_multiplier, compute_epsilon, group_epsilon

PINS = Path(__file__).with_suffix(".json")
CHOICES = {
    "sample_rate": (1e-4, 0.0064, 256 / 60000, 0.05, 0.3, 1.0),
    "noise_multiplier": (0.45, 0.8, 1.1, 1.7, 3.0),
    "steps": (1, 30, 400, 2500, 20000),
    "delta": (1e-4, 1e-5, 1e-6, 1e-9),
    "accountant": ("pld", "pld", "rdp"),
    "target_epsilon": (0.25, 1.0, 3.0, 8.0, 40.0),
}


def settings() -> list[dict]:
    """Fifty settings; ``rows`` is the number of rows that one person has, with few steps because groups take long."""
    choose = random.Random(1)
    single = [{**{name: choose.choice(values) for name, values in CHOICES.items()}, "rows": 1} for _ in range(45)]
    none = [{**single[0], **change} for change in ({"noise_multiplier": 0.0}, {"steps": 0})]
    groups = [
        {**single[1], "sample_rate": q, "steps": 12, "rows": rows} for q, rows in ((0.0064, 2), (0.05, 3), (0.01, 8))
    ]
    return single + none + groups


def epsilon_and_sigma(setting: dict) -> dict[str, float | str]:
    """Both by the functions of :mod:`dp_transformers.mechanism.accounting`."""
    q, steps, delta, accountant, rows = (
        setting[name] for name in ("sample_rate", "steps", "delta", "accountant", "rows")
    )
    sigma = setting["noise_multiplier"]
    epsilon = (
        compute_epsilon(sigma, q, steps, delta, accountant)
        if rows == 1
        else group_epsilon([(sigma, q, steps)], rows, delta)
    )
    found = calibrate_noise_multiplier(setting["target_epsilon"], delta, q, steps, accountant, rows)
    return {"epsilon": repr(epsilon), "sigma": repr(found)}


def fingerprint() -> dict[str, str]:
    """What decides the last digits: the processor, and the versions of what computes."""
    return {"processor": processor(), **{name: importlib.metadata.version(name) for name in ("dp-accounting", "numpy", "scipy")}}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", required=True, help="write the pins")
    parser.parse_args()
    pins = [{**setting, **epsilon_and_sigma(setting)} for setting in settings()]
    PINS.write_text(json.dumps({"fingerprint": fingerprint(), "settings": pins}, indent=1) + "\n")
