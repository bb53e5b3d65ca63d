"""What a ledger says of a run is one mechanism from its beginning to its end."""

import pytest

from dp_transformers import FlatClipping, IndependentNoise, Mechanism
from dp_transformers.mechanism.sampling import RandomAllocationSampling, TruncatedPoissonSampling
from dp_transformers.reports.recompute import recorded_runs
from dp_transformers.step.checkpoint import PrivacyState
from dp_transformers.step.ledger import Ledger


@pytest.mark.parametrize(
    ("before", "after"),
    [(TruncatedPoissonSampling(100, 10, 11), TruncatedPoissonSampling(100, 10, 100)), (RandomAllocationSampling(100, 2), RandomAllocationSampling(100, 10))],
)  # fmt: skip
def test_a_run_that_went_on_with_another_mechanism_has_no_epsilon(tmp_path, before, after):
    """The lines of steps do not say what cap or which passes they had, so that of the last beginning would count."""
    ledger = Ledger(tmp_path)
    ledger.open()
    for sampling in (before, after):
        mechanism = Mechanism(sampling=sampling, clipping=FlatClipping(1.0), noise=IndependentNoise(1.0))
        ledger.begin(PrivacyState("run", mechanism, 1e-3, None).to_dict())
        ledger.add_step("run", 1, mechanism.at(0))
    ledger.close()
    with pytest.raises(ValueError, match="went on with another mechanism"):
        recorded_runs(ledger)
