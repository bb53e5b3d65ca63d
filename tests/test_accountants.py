"""An accountant of the user's own takes the place of those of this package, wherever they are named."""

import json
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from test_trainer import trainer_for
from torch.utils.data import DataLoader

from dp_transformers import (
    DPTrainingArguments,
    FlatClipping,
    IndependentNoise,
    Mechanism,
    PoissonSampling,
    PrivacyEngine,
    calibrate_noise_multiplier,
    compute_epsilon,
)
from dp_transformers.mechanism.accounting import accountants, event_epsilon, register_accountant
from dp_transformers.mechanism.sampling import Sampling
from dp_transformers.reports import certificate
from dp_transformers.reports.findings import Report, look

pytestmark = pytest.mark.halved


class Twice:
    """Twice what PLD says, of what PLD knows."""

    name = "twice"

    def __init__(self):
        self.asked = []

    def epsilon(self, event, delta, relation):
        self.asked.append((delta, relation))
        return 2 * event_epsilon(event, delta, relation=relation)


class Strange:
    """Of an event that nobody else knows."""

    name = "strange"

    def epsilon(self, event, delta, relation):
        if any(part != "strange" for part in getattr(event, "events", [event])):
            raise ValueError(f"{event} is not strange.")
        return math.nan if delta < 1e-8 else 3.0


@dataclass(frozen=True)
class StrangeSampling(Sampling):
    kind: ClassVar[str] = "strange"
    relation: ClassVar[str] = "add_or_remove_one"
    num_examples: int
    expected_batch_size: float

    def event(self, steps):
        return "strange"


def mechanism(**changes):
    parts = {"sampling": PoissonSampling(40, 8), "clipping": FlatClipping(1.0), "noise": IndependentNoise(1.0), "steps": 5}  # fmt: skip
    return Mechanism(**{**parts, **changes})  # fmt: skip


def test_functions_take_it():
    own = Twice()
    assert compute_epsilon(1.0, 0.2, 5, 1e-3, own) == 2 * compute_epsilon(1.0, 0.2, 5, 1e-3)
    assert compute_epsilon(1.0, 0.2, 5, 1e-3, "twice") == 2 * compute_epsilon(1.0, 0.2, 5, 1e-3)
    assert compute_epsilon(1.0, 0.2, 0, 1e-3, own) == 0
    assert set(own.asked) == {(1e-3, "add_or_remove_one")}
    found = calibrate_noise_multiplier(4.0, 1e-3, 0.2, 5, own)
    assert found == pytest.approx(calibrate_noise_multiplier(2.0, 1e-3, 0.2, 5), rel=2e-3)


def test_it_may_know_what_nobody_else_does():
    with pytest.raises(ValueError, match=r"no accountant \(pld, rdp\) has a bound"):
        mechanism(sampling=StrangeSampling(40, 8))
    register_accountant(Strange())
    made = mechanism(sampling=StrangeSampling(40, 8))
    assert made.epsilon(1e-3, accountant="strange") == 3.0
    assert made.epsilon(1e-9, accountant="strange") == math.inf  # what is not a number is no bound
    with pytest.raises(ValueError, match="not strange"):
        mechanism().epsilon(1e-3, accountant="strange")


@pytest.mark.parametrize("own", [object(), Twice, type("Nameless", (), {"epsilon": lambda *a: 0.0})(), 3, None])
def test_what_is_no_accountant_is_refused(own):
    if own is Twice:  # a class, whose epsilon nobody can call
        own = type("Named", (), {"name": ""})
    with pytest.raises(ValueError, match="is no accountant: it needs a name, and epsilon"):
        compute_epsilon(1.0, 0.2, 5, 1e-3, own)


def test_a_name_means_one_accountant():
    register_accountant(Twice())
    assert register_accountant(Twice()) == "twice"
    for name in ("twice", "pld"):
        other = Strange()
        other.name = name
        with pytest.raises(ValueError, match=f"an accountant named '{name}' is known already"):
            register_accountant(other)
    thrice = Twice()
    thrice.factor = 3
    with pytest.raises(ValueError, match="known already, .* and would compute in the place of yours"):
        compute_epsilon(1.0, 0.2, 5, 1e-3, thrice)
    with pytest.raises(ValueError, match=r"must be one of \('pld', 'rdp', 'twice'\), got 'other'"):
        compute_epsilon(1.0, 0.2, 5, 1e-3, "other")


def test_a_trainer_reports_by_it(tmp_path):
    trainer = trainer_for(tmp_path, accountant=Twice(), noise_multiplier=1.0, log_raw_metrics=True)
    trainer.train()
    spent = trainer.privacy_spent()
    assert spent.accountant == trainer.args.accountant == "twice"
    assert spent.epsilon == 2 * compute_epsilon(1.0, 0.2, 4, 1e-4) == trainer.state.log_history[-1]["epsilon"]
    said = certificate.read(tmp_path)
    assert said["total"]["accountant"] == "twice" and said["total"]["epsilon"] == spent.epsilon
    assert said["total"]["relation"] == "add_or_remove_one" and said["unit"]
    assert certificate.disagreements(tmp_path, said) == []
    found = Report([look(tmp_path)])  # of its accountant one point of the privacy curve is known
    of_the_point = np.exp(spent.epsilon) * 0.01 + spent.delta, 1 - (0.99 - spent.delta) / np.exp(spent.epsilon)
    assert found.curve.detection(0.01) == min(of_the_point)
    accountants._KNOWN.pop("twice")  # as in another process
    [fault] = certificate.disagreements(tmp_path, said)
    assert "got 'twice'" in fault and "register_accountant" in fault
    json.dumps(trainer.args.to_dict())


def test_arguments_name_it(tmp_path):
    with pytest.raises(ValueError, match="got 'twice'"):
        DPTrainingArguments(str(tmp_path), noise_multiplier=1.0, target_delta=1e-3, use_cpu=True, accountant="twice")
    register_accountant(Twice())
    args = DPTrainingArguments(
        str(tmp_path), target_epsilon=4.0, target_delta=1e-3, use_cpu=True, accountant="twice", expected_batch_size=8
    )
    found = args.mechanism_for(40, 5)
    assert 3.99 < 2 * found.epsilon(1e-3) <= 4.0


def test_an_engine_reports_by_it():
    model = torch.nn.Linear(3, 2)
    engine = PrivacyEngine(accountant=Twice())
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), self_check=False,
        data_loader=DataLoader([(torch.zeros(3), 0) for _ in range(40)], 8), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    for x, y in loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.get_epsilon(1e-3) == 2 * compute_epsilon(1.0, 0.2, 5, 1e-3)
    assert engine.privacy_spent(1e-3).accountant == "twice"
