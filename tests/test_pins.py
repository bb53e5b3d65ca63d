"""ε and σ are to the last digit what they were when tests/privacy_pins.json was written, and what version 1 left on
disk is resumed."""

import json

import privacy_pins
import pytest
import torch
from test_resume import Classifier, build, rows
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from dp_transformers import DPTrainer, PrivacyEngine, compute_epsilon
from dp_transformers.mechanism.accounting.gaussian import FLOAT_ROUNDING
from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism, PrivacyUnit
from dp_transformers.mechanism.noise import IndependentNoise
from dp_transformers.mechanism.sampling import PoissonSampling
from dp_transformers.step.checkpoint import STATE_NAME
from dp_transformers.step.ledger import LEDGER_NAME, PrivacyStateError

PINNED = json.loads(privacy_pins.PINS.read_text())
VERSION_1 = json.loads((privacy_pins.PINS.parent / "version_1.json").read_text())
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


def stop_at(step):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == step

    return Stop()


def test_a_trainer_resumes_version_1(tmp_path):
    """From the checkpoint of step 3, of a run that took 6 steps; weights are of a run of now, which version 1 saved
    alike."""
    seen, options = VERSION_1["trainer"], {"save_total_limit": 2, "accountant": "pld"}
    build(DPTrainer, tmp_path, [stop_at(6)], **options).train()
    folder = tmp_path / "checkpoint-3"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != STATE_NAME}
    (folder / STATE_NAME).write_text(json.dumps({**seen["state"], "files": sizes}))
    (tmp_path / LEDGER_NAME).write_text(seen["ledger"])
    (tmp_path / "privacy.json").unlink()  # it is of the run of now
    with pytest.raises(PrivacyStateError, match=r"clipping.max_grad_norm=1.0, now it is 2.0"):
        build(DPTrainer, tmp_path, max_grad_norm=2.0, **options).train(resume_from_checkpoint=str(folder))
    trainer = build(DPTrainer, tmp_path, [stop_at(8)], **options)
    trainer.train(resume_from_checkpoint=str(folder))
    assert_same_report(trainer.privacy_spent().to_dict(), seen["spent_after_resuming_to_step_8"])
    lines = [json.loads(line) for line in (tmp_path / LEDGER_NAME).read_text().splitlines()]
    sigma = seen["state"]["noise_multiplier"]
    used = {"sample_rate": 0.2, "expected_batch_size": 8, "noise_multiplier": sigma, "max_grad_norm": 1.0}
    assert lines[-1] == {"run": seen["state"]["run_id"], "step": 11, **used, "before": lines[-1]["before"]}
    assert lines[7]["version"] == 2
    assert lines[7]["mechanism"]["noise"] == {"kind": "independent", "noise_multiplier": sigma}


@pytest.mark.parametrize("with_ledger", [True, False])
def test_a_loop_resumes_version_1(tmp_path, with_ledger):
    seen, data = VERSION_1["engine"], [(torch.tensor(row["x"]), row["labels"]) for row in rows()]
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.save({"module": model.state_dict(), "optimizer": optimizer.state_dict(), "privacy": seen["privacy"]}, tmp_path / "c.pt")  # fmt: skip
    (tmp_path / LEDGER_NAME).write_text(seen["ledger"])
    engine = PrivacyEngine(ledger_dir=tmp_path if with_ledger else None)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=10), noise_multiplier=1.5, max_grad_norm=0.5, self_check=False,
    )  # fmt: skip
    assert engine.load_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer) == {}
    assert engine.steps == (8 if with_ledger else 4)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    spent = engine.privacy_spent(1e-3)
    if with_ledger:
        assert_same_report(spent.to_dict(), seen["spent_after_another_pass"])
    assert spent.steps == (12 if with_ledger else 8) and spent.epsilon == compute_epsilon(1.5, 0.25, spent.steps, 1e-3)


def assert_same_report(report, of_version_1):
    """All that version 1 said, and the mechanism."""
    assert {*report} == {*of_version_1, "mechanism"}
    for name, value in of_version_1.items():
        assert same(repr(report[name]), repr(value)) if isinstance(value, float) else report[name] == value, name
