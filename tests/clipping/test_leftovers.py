"""What a private batch left in a model is put back, or nobody clips the model any more."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial

import numpy as np
import peft
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainerCallback

from dp_transformers import DPTrainer, DPTrainingArguments, PerExampleClipper, PrivacyEngine
from dp_transformers.clipping import clipper as clippers
from dp_transformers.losses import example_losses

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")

DUE = []  # not empty while batches write


class Net(nn.Module):
    """Its losses depend on everything that a batch may write."""

    def __init__(self, written=None):
        super().__init__()
        self.written, self.layer, self.switch = written, nn.Linear(3, 2), False
        for name, numbers in {"mean": torch.zeros(3), "short": torch.zeros(3, dtype=torch.bfloat16)}.items():
            self.register_buffer(name, numbers)
        self.register_buffer("table", torch.zeros(70_000))
        self.scale, self.large = (nn.Parameter(torch.ones(n), requires_grad=False) for n in (3, 70_001))
        self.options, self.listed, self.array, self.large_array = {}, [0.0], np.zeros(3), np.zeros(70_000)
        self.options["kind"] = "sparse"

    def forward(self, x):
        if DUE and self.written is not None:
            (PUT_BACK | LOST)[self.written](self, x.detach().reshape(-1, 3)[0])
        numbers = (
            self.mean.reshape(-1)[:3]
            + self.short.float()
            + self.table[:3]
            + self.scale * self.large[:3]
            + self.listed[0]
        )
        return self.layer(x + numbers) * (1 + self.switch)


PUT_BACK = {
    "buffer": lambda net, x: net.mean.data.copy_(x),
    "buffer with a trace": lambda net, x: net.mean.copy_(x),
    "another buffer": lambda net, x: net.register_buffer("mean", x),
    "not a number": lambda net, x: net.mean.data.fill_(torch.nan),
    "bf16": lambda net, x: net.short.data.copy_(x),
    "frozen weight": lambda net, x: net.scale.data.copy_(x),
    "another frozen weight": lambda net, x: setattr(net, "scale", nn.Parameter(x, requires_grad=False)),
    "switch": lambda net, x: setattr(net, "switch", True),
    "word": lambda net, x: net.options.update(kind="full"),
    "list": lambda net, x: net.listed.__setitem__(0, float(x[0])),
    "array": lambda net, x: net.array.__setitem__(0, float(x[0])),
}
LOST = {
    "large weight": lambda net, x: net.large.data[:3].copy_(x),
    "large weight with a trace": lambda net, x: net.large[:3].copy_(x),
    "large buffer": lambda net, x: net.table.data[:3].copy_(x),
    "buffer of another shape": lambda net, x: setattr(net.mean, "data", x.expand(2, 3).clone()),
    "large array": lambda net, x: net.large_array.__setitem__(0, float(x[0])),
    "trained weight": lambda net, x: net.layer.weight.detach()[0].copy_(x),
}


def rows():
    return torch.randn(40, 3) + 7


def state(net):
    arrays = {name: torch.tensor(getattr(net, name)) for name in ("array", "large_array", "listed", "switch")}
    return {k: v.clone() for k, v in {**net.state_dict(), **arrays}.items()} | {"kind": net.options["kind"]}


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


class Loop:
    """A plain loop, checked before any batch writes."""

    def __init__(self, net, folder=None):
        self.engine, self.net = PrivacyEngine(dp_seed=0, ledger_dir=folder), net
        _, self.optimizer, self.loader = self.engine.make_private(
            module=net,
            optimizer=torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1),
            data_loader=DataLoader(TensorDataset(rows()), 10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size=4,
        )
        self.engine.clipper.check((torch.randn(2, 3),), {})

    def train(self, fails=False):
        try:
            for (x,) in self.loader:
                loss = self.net(x).square().sum(1).mean()
                if fails and DUE:
                    raise OSError("something else")
                loss.backward()
                self.optimizer.step()
        finally:
            self.engine.detach()


class Begins(TrainerCallback):
    """Batches write from the step before the last one on."""

    def on_step_begin(self, args, state, control, **kwargs):
        DUE.extend([True] * (state.global_step == state.max_steps - 2))


def trainer(net, folder, fails=False, steps=3):
    def losses_of(model, inputs):
        losses = model(inputs["x"]).square().sum(1)
        if fails and DUE:
            raise OSError("something else")
        return losses

    args = DPTrainingArguments(
        folder,
        max_steps=steps,
        expected_batch_size=10,
        per_device_train_batch_size=4,
        noise_multiplier=1.0,
        target_delta=1e-3,
        report_to=[],
        save_strategy="no",
        dp_seed=0,
    )
    data = [{"x": row} for row in rows()]
    return DPTrainer(
        net,
        args,
        train_dataset=data,
        per_example_loss_func=losses_of,
        data_collator=lambda each: {"x": torch.stack([row["x"] for row in each])},
        callbacks=[Begins()],
    )


@pytest.fixture(autouse=True)
def nothing_is_due():
    DUE.clear()
    yield
    DUE.clear()


def refused(net, loop, folder, fails=False):
    """Train until a batch writes, and catch the error."""
    if loop == "trainer":
        training = trainer(net, folder, fails)
        with pytest.raises(OSError if fails else ValueError):
            training.train()
    else:
        training = Loop(net)
        DUE.append(True)
        with pytest.raises(OSError if fails else ValueError):
            training.train(fails)
    DUE.clear()
    return training


both_loops = pytest.mark.parametrize("loop", ["plain", "trainer"])
after = pytest.mark.parametrize("fails", [False, True], ids=["refused", "another error"])


@both_loops
@after
@pytest.mark.parametrize("written", PUT_BACK)
def test_what_is_known_is_put_back_for_whoever_trains_the_model_next(written, loop, fails, tmp_path):
    """Several batches of the draw write, and the first of them saw what was there before."""
    net = Net(written)
    before = state(net)
    training = refused(net, loop, tmp_path / "1", fails)
    held = state(net)
    if loop == "trainer":  # it took a step before
        before = {k: held[k] if k.startswith("layer") else v for k, v in before.items()}
        training = trainer(net, tmp_path / "2") if fails else training
        training.remove_callback(Begins)
        training.train()
    else:
        Loop(net).train()
    assert same(held, before)


def others(net, folder):
    """Whoever trains next."""
    pickled = io.BytesIO()
    torch.save(net, pickled)
    pickled.seek(0)
    shares = Net()
    shares.layer.weight, shares.large, shares.table, shares.mean = net.layer.weight, net.large, net.table, net.mean
    adapted = partial(peft.get_peft_model, net, peft.LoraConfig(target_modules=["layer"]))
    yield from {
        "the model": lambda: PerExampleClipper(net, 1.0),
        "an engine": lambda: Loop(net),
        "a trainer": lambda: trainer(net, folder).train(),
        "a part of it": lambda: PerExampleClipper(net.layer, 1.0),
        "what holds it": lambda: PerExampleClipper(nn.Sequential(net), 1.0),
        "a copy": lambda: PerExampleClipper(copy.deepcopy(net), 1.0),
        "a copy of a part": lambda: PerExampleClipper(copy.deepcopy(net.layer), 1.0),
        "a pickle": lambda: PerExampleClipper(torch.load(pickled, weights_only=False), 1.0),
        "a model with adapters": lambda: PerExampleClipper(adapted(), 1.0),
        "another pickle": lambda: PerExampleClipper(pickle.loads(pickle.dumps(net)), 1.0),
    }.items()
    if "array" not in net.written:
        yield "a model that shares its tensors", lambda: PerExampleClipper(shares, 1.0)


@both_loops
@after
@pytest.mark.parametrize("written", LOST)
def test_where_what_was_there_before_is_not_known_nobody_trains_the_model_any_more(written, loop, fails, tmp_path):
    net = Net(written)
    training = refused(net, loop, tmp_path / "1", fails)
    for who, trains in others(net, tmp_path / "2"):
        with pytest.raises(ValueError, match=r"an earlier training was refused because a batch changed"):
            pytest.fail(f"{who} was trained: {trains()}")
    with pytest.raises(ValueError, match="an earlier training was refused"):
        if loop == "trainer":
            training.save_model(tmp_path / "3")
        else:
            training.engine.save_checkpoint(tmp_path / "c.pt", module=net)
    if loop == "trainer":
        with pytest.raises(ValueError, match="an earlier training was refused"):
            training.train()
    assert not (tmp_path / "c.pt").exists() and not (tmp_path / "3").exists()
    Loop(Net()).train()  # a new model is another one


def test_a_marked_model_is_let_go_of(tmp_path):
    net = Net("large weight")
    refused(net, "plain", tmp_path)
    alive = [weakref.ref(net), weakref.ref(net.large)]
    del net
    gc.collect()
    assert [each() for each in alive] == [None, None]


def no_looks(monkeypatch):
    """Real batches are not looked at, so that what they leave is found where it matters at last."""
    monkeypatch.setattr(clippers, "require_same_beside_others", lambda *args: None)
    monkeypatch.setattr(clippers, "draw_for_all_rows", lambda *args: [])
    monkeypatch.setattr(example_losses, "refuse_losses_of_other_rows", lambda *args, **kwargs: None)
    monkeypatch.setattr(example_losses, "drawn_for_all_rows", lambda *args, **kwargs: [])


def test_a_checkpoint_that_is_loaded_after_a_batch_wrote_is_what_the_model_holds(tmp_path, monkeypatch):
    no_looks(monkeypatch)
    net = Net("buffer")
    loop = Loop(net)
    loop.engine.save_checkpoint(tmp_path / "c.pt", module=net)
    saved = torch.load(tmp_path / "c.pt")
    saved["module"]["mean"] += 5
    torch.save(saved, tmp_path / "c.pt")
    DUE.append(True)
    (x,) = next(iter(loop.loader))
    net(x).square().sum(1).mean().backward()
    DUE.clear()
    assert net.mean.any()
    loop.engine.load_checkpoint(tmp_path / "c.pt", module=net)
    with pytest.raises(ValueError, match="'mean' of the model changed"):
        loop.engine.drop_draw()
    assert net.mean.tolist() == [5.0] * 3


def test_a_checkpoint_that_is_saved_after_a_batch_wrote_holds_nothing_of_it(tmp_path, monkeypatch):
    no_looks(monkeypatch)
    net = Net("buffer")
    loop = Loop(net)
    DUE.append(True)
    batches = iter(loop.loader)
    (x,) = next(batches)
    net(x).square().sum(1).mean().backward()
    assert net.mean.any()
    DUE.clear()
    loop.engine.save_checkpoint(tmp_path / "c.pt", module=net)
    assert not torch.load(tmp_path / "c.pt")["module"]["mean"].any()
    loop.optimizer.step()
    with pytest.raises(ValueError, match="'mean' of the model changed"):
        for (x,) in batches:
            net(x).square().sum(1).mean().backward()
            loop.optimizer.step()


def test_a_model_that_shares_what_another_training_lost_is_refused_at_its_next_batch():
    """Two trainings go on side by side."""
    one, two = Net("large buffer"), Net()
    two.table = one.table
    both = [Loop(net) for net in (one, two)]
    DUE.append(True)
    with pytest.raises(ValueError, match="'table' of the model changed"):
        both[0].train()
    DUE.clear()
    with pytest.raises(ValueError, match="an earlier training was refused"):
        both[1].train()


@both_loops
@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_no_batch_sees_a_memory_that_others_made_longer(kind, loop, tmp_path, monkeypatch):
    """It grows once the model was checked, as a queue does after a warm-up."""
    no_looks(monkeypatch)

    class Remembers(Net):
        def forward(self, x):
            seen.append(len(self.memory))
            if DUE:
                rows = x.detach().reshape(-1, 3)
                self.memory = torch.cat([self.memory, rows])
            return self.layer(x + self.memory.mean(0))

    net, seen = Remembers(), []
    if kind == "buffer":
        net.register_buffer("memory", torch.ones(1, 3))
    else:
        net.memory = torch.ones(1, 3)
    if loop == "trainer":
        trainer(net, tmp_path, steps=7).train()
    else:
        training = Loop(net)
        DUE.append(True)
        training.train()
    assert len(seen) > 6 and set(seen) == {1} and net.memory.tolist() == [[1.0] * 3]
