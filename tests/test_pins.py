"""ε and σ are to the last digit what they were when tests/privacy_pins.json was written."""

import json

import privacy_pins
import pytest

PINNED = json.loads(privacy_pins.PINS.read_text())
SAME_MACHINE = PINNED["fingerprint"] == privacy_pins.fingerprint()


def same(seen: str, pinned: str) -> bool:
    """The same digits on the machine of the pins; elsewhere libraries may sum in another order."""
    return seen == pinned if SAME_MACHINE else float(seen) == pytest.approx(float(pinned), rel=1e-9, abs=1e-12)


def test_there_are_fifty():
    settings = [{name: value for name, value in pin.items() if name not in ("epsilon", "sigma")} for pin in PINNED["settings"]]
    assert settings == privacy_pins.settings() and len(settings) == 50
    assert len({(pin["epsilon"], pin["sigma"]) for pin in PINNED["settings"]}) > 45


@pytest.mark.parametrize("pin", PINNED["settings"], ids=range(50))
def test_epsilon_and_sigma_are_the_pinned_ones(pin):
    seen = privacy_pins.epsilon_and_sigma(pin)
    assert same(seen["epsilon"], pin["epsilon"]) and same(seen["sigma"], pin["sigma"])
