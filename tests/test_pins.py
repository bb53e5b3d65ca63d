"""ε and σ are to the last digit what they were when tests/privacy_pins.json was written."""

import json

import privacy_pins
import pytest

from dp_transformers.mechanism.accounting.gaussian import FLOAT_ROUNDING
from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit
from dp_transformers.mechanism.noise import IndependentNoise
from dp_transformers.mechanism.sampling import PoissonSampling

PINNED = json.loads(privacy_pins.PINS.read_text())
HERE = privacy_pins.fingerprint()
SAME_MACHINE = PINNED["fingerprint"] == HERE
SAME_VERSIONS = {**PINNED["fingerprint"], "processor": ""} == {**HERE, "processor": ""}


def same(seen: str, pinned: str, steps: int = 1, delta: float = 1e-5) -> bool:
    """The same digits on the machine of the pins. Other processors sum in another order, which moves δ by what is left
    for rounding; other versions of NumPy and SciPy have another FFT (with 2.0 and 1.13 the last of these pins moves by
    1e-5)."""
    rel = max(1e-8 if SAME_VERSIONS else 2e-5, FLOAT_ROUNDING * (10 + steps) / delta)
    return seen == pinned if SAME_MACHINE else float(seen) == pytest.approx(float(pinned), rel=rel, abs=1e-12)


def test_there_are_fifty():
    settings = [
        {name: value for name, value in pin.items() if name not in ("epsilon", "sigma")} for pin in PINNED["settings"]
    ]
    assert settings == privacy_pins.settings() and len(settings) == 50
    assert len({(pin["epsilon"], pin["sigma"]) for pin in PINNED["settings"]}) > 45


@pytest.mark.parametrize("pin", PINNED["settings"], ids=range(50))
def test_epsilon_and_sigma_are_the_pinned_ones(pin):
    seen = privacy_pins.epsilon_and_sigma(pin)
    assert same(seen["epsilon"], pin["epsilon"], pin["steps"], pin["delta"])
    assert same(seen["sigma"], pin["sigma"], pin["steps"], pin["delta"])


@pytest.mark.parametrize(
    "pin", [pin for pin in PINNED["settings"] if pin["steps"]], ids=lambda pin: f"{pin['steps']}-{pin['rows']}"
)
def test_those_of_a_mechanism_are_too(pin):
    # of so many examples that q is the same number
    q, (numerator, denominator) = pin["sample_rate"], pin["sample_rate"].as_integer_ratio()
    mechanism = Mechanism(
        sampling=PoissonSampling(denominator, numerator), clipping=FlatClipping(0.3), noise=IndependentNoise(pin["noise_multiplier"]),
        steps=pin["steps"], unit=PrivacyUnit(pin["rows"]),
    )  # fmt: skip
    assert mechanism.sampling.sample_rate == q
    epsilon = mechanism.epsilon(pin["delta"], accountant=pin["accountant"], rows=pin["rows"])
    found = mechanism.calibrated(
        target_epsilon=pin["target_epsilon"], target_delta=pin["delta"], accountant=pin["accountant"]
    )
    assert same(repr(epsilon), pin["epsilon"], pin["steps"], pin["delta"])
    assert same(repr(found.noise.noise_multiplier), pin["sigma"], pin["steps"], pin["delta"])
