"""accelerate's save_state and load_state: all of a private training goes through them, or they are refused."""

import os

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PrivacyEngine
from dp_transformers.engine.loop import SIGNATURE
from dp_transformers.step.checkpoint import PrivacyState

pytestmark = pytest.mark.halved

DELTA = 1e-2


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)


def loop(seed, kind=torch.optim.Adam):
    """A model whose first weights are those of the seed, and its private loop."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(24, 3), torch.randint(0, 2, (24,)))
    optimizer = kind(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    return engine, *engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def moments(optimizer):
    return [value for state in optimizer.state_dict()["state"].values() for value in state.values()]


def test_a_registered_engine_is_saved_and_goes_on(tmp_path, accelerator):
    engine, model, optimizer, loader = loop(0)
    accelerator.register_for_checkpointing(engine)
    train(model, optimizer, loader)
    accelerator.save_state(str(tmp_path))
    saved = [p.detach().clone() for p in model.parameters()]
    spent = engine.get_epsilon(DELTA)
    train(model, optimizer, loader)  # more steps, which the saved state does not have
    twice = engine.get_epsilon(DELTA)

    again, model_again, optimizer_again, loader_again = loop(1)
    accelerator._custom_objects.clear()  # as in a new process
    accelerator.register_for_checkpointing(again)
    accelerator.load_state(str(tmp_path))
    assert again.steps == 3 and again.get_epsilon(DELTA) == spent > 0
    assert all(torch.equal(p, q) for p, q in zip(saved, model_again.parameters(), strict=True))
    assert next(float(x.sum()) for x in moments(optimizer_again)) == 3
    train(model_again, optimizer_again, loader_again)
    assert again.steps == 6 and again.get_epsilon(DELTA) == pytest.approx(twice)
    assert not any(torch.equal(p, q) for p, q in zip(saved, model_again.parameters(), strict=True))


def test_the_state_of_another_mechanism_is_refused(tmp_path, accelerator):
    engine, *parts = loop(0)
    accelerator.register_for_checkpointing(engine)
    train(*parts)
    accelerator.save_state(str(tmp_path))
    accelerator._custom_objects.clear()
    data = TensorDataset(torch.randn(24, 3), torch.randint(0, 2, (24,)))
    model = nn.Linear(3, 2)
    other = PrivacyEngine()
    other.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=8), noise_multiplier=0.5,
        max_grad_norm=1.0,
    )  # fmt: skip
    accelerator.register_for_checkpointing(other)
    with pytest.raises(ValueError, match="noise_multiplier"):
        accelerator.load_state(str(tmp_path))
    assert other.steps == 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_prepared_loop_cannot_lose_its_steps(tmp_path, accelerator, kind):
    """Model and optimizer alone would go on as if the steps before had never been."""
    engine, model, optimizer, loader = loop(0, kind)
    model, prepared = accelerator.prepare(model, optimizer)
    train(model, prepared, loader)
    assert engine.steps == 3
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()

    _, model_again, optimizer_again, _ = loop(1, kind)
    accelerator.prepare(model_again, optimizer_again)
    with pytest.raises(ValueError, match=r"would not count.*register_for_checkpointing\(engine\)"):
        accelerator.load_state(str(tmp_path))
    assert not moments(optimizer_again)


def test_an_optimizer_takes_its_own_state_alone():
    engine, model, optimizer, loader = loop(0)
    train(model, optimizer, loader)
    state = optimizer.state_dict()
    train(model, optimizer, loader)
    optimizer.load_state_dict(state)  # of steps that are counted
    engine.load_state_dict(engine.state_dict())
    assert engine.steps == 6, "its own steps are counted once"
    others = [{**state, SIGNATURE: "another"}, {"state": {}, "param_groups": state["param_groups"]}]
    others += [loop(0)[2].state_dict()]
    for other in others:
        with pytest.raises(ValueError, match=r"engine.load_checkpoint.*before make_private"):
            optimizer.load_state_dict(other)
    engine.detach()
    optimizer.load_state_dict(others[0])


def test_ranks_know_the_state_of_the_first_as_their_own(monkeypatch):
    """The first of several processes saves, and all load that. They would plan for other numbers of steps otherwise."""
    monkeypatch.setattr(PrivacyState, "new_run_id", lambda: "one for all ranks")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    _, *parts = first = loop(0)
    train(*parts)
    state = first[0].state_dict()
    monkeypatch.setattr(os, "getpid", lambda: 2)
    engine, model, optimizer, loader = loop(0)
    train(model, optimizer, loader)
    engine.load_state_dict(state)
    optimizer.load_state_dict(state["optimizer"])
    assert engine.steps == 3
    monkeypatch.setattr(os, "getpid", lambda: 3)  # a process that was forked from the second counts on its own
    engine.load_state_dict(state)
    assert engine.steps == 6
