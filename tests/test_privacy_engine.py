"""PrivacyEngine in plain loops: the same steps as one example at a time, whatever the loop; and misuse is loud."""

import contextlib
import copy
import dataclasses
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from oracle import clipped_sum, distance, length, per_example_gradients, trainable
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from violations import Compares

from dp_transformers import FlatClipping, PrivacyEngine, compute_epsilon
from dp_transformers.clipping import modes
from dp_transformers.clipping.modes import KeptTerms
from dp_transformers.engine.criterion import PrivateCriterion
from dp_transformers.engine.plain_loop import LoopOptions, PlainLoop
from dp_transformers.step.ledger import PrivacyStateError

CLASSES, WIDTH, LENGTH, N = 3, 5, 4, 40


class Net(nn.Module):
    """Ids to class scores, with an embedding, a shared layer and, if asked for, checkpointing or the batch second."""

    def __init__(self, checkpointed=False, batch_first=True):
        super().__init__()
        self.embed, self.mix, self.norm, self.head = (
            nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip
        self.checkpointed, self.batch_first = checkpointed, batch_first

    def block(self, x):
        return torch.relu(self.mix(torch.tanh(self.mix(x))))

    def forward(self, ids):
        x = self.embed(ids)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.head(self.norm(x)).mean(1 if self.batch_first else 0)


def make_data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randint(0, 9, (N, LENGTH), generator=generator), torch.randint(0, CLASSES, (N,), generator=generator)
    )


def make(model=None, *, seed=1, batch_size=10, optimizer=None, engine=None, collate_fn=None, **options):
    torch.manual_seed(3)
    model = model or Net()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, **options}
    loader = DataLoader(make_data(), batch_size=batch_size, shuffle=True, collate_fn=collate_fn)
    if engine is None:
        with pytest.warns(UserWarning, match="dp_seed"):
            engine = PrivacyEngine(dp_seed=seed)
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)


def step(model, optimizer, x, y):
    """An ordinary one."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def train(model, optimizer, loader):
    """An ordinary pass."""
    for x, y in loader:
        step(model, optimizer, x, y)


class OneAtATime:
    """The same training by one example at a time: what each step's gradient must be."""

    def __init__(self, model, make_optimizer, bound, expected):
        self.model, self.start, self.bound, self.expected = *(copy.deepcopy(model) for _ in "12"), bound, expected
        self.optimizer = make_optimizer(trainable(self.model))

    def step(self, x, y):
        total = [torch.zeros_like(p) for p in trainable(self.model)]
        if len(x):
            gradients = per_example_gradients(
                self.model, lambda b: F.cross_entropy(self.model(b["x"]), b["y"], reduction="none"), {"x": x, "y": y}
            )
            total = clipped_sum(gradients, self.bound)[1]
        for p, g in zip(trainable(self.model), total, strict=True):
            p.grad = (g / self.expected).to(p.dtype)
        self.optimizer.step()

    def went_as(self, model):
        moved = distance(trainable(self.model), trainable(self.start))
        return moved > 0.1 and distance(trainable(model), trainable(self.model)) <= 1e-5 * moved


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(
        parameters, lr=0.05, eps=1e-3
    )  # a smaller one would make steps of the rounding errors of zeros


@pytest.mark.parametrize("make_optimizer", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("mode", ["auto", "per_sample"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_loop_takes_the_steps_of_one_example_at_a_time(make_optimizer, physical, mode, reduction, checkpointed):
    model = Net(checkpointed)
    oracle = OneAtATime(model, make_optimizer, 0.3, 10)
    options = {"loss_reduction": reduction, "max_physical_batch_size": physical, "clipping_mode": mode}
    _, model, optimizer, loader = make(model, optimizer=make_optimizer(model.parameters()), **options)
    rows = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
            given = loader._step.order.in_hand
            rows += [(x, y)] if given.batch.examples else []
            if given.last_of_draw:
                assert physical is None or all(len(x) <= physical for x, _ in rows)
                oracle.step(*(torch.cat([row[k] for row in rows] or [torch.empty(0)]) for k in (0, 1)))
                rows = []
    assert oracle.went_as(model)


@pytest.mark.parametrize("mode", ["ghost", "fast_gradient", "book_keeping", "per_sample"])
@pytest.mark.parametrize("how", ["criterion", "clipper"])
def test_losses_handed_over_per_example(mode, how):
    model = Net()
    oracle = OneAtATime(model, sgd, 0.3, 10)
    handed = {"criterion": nn.CrossEntropyLoss()} if how == "criterion" else {"loss_reduction": "none"}
    engine, model, optimizer, *criterion, loader = make(
        model, optimizer=sgd(model.parameters()), clipping_mode=mode, **handed
    )
    for x, y in loader:
        optimizer.zero_grad()
        if how == "criterion":
            loss = criterion[0](model(x), y)
            assert torch.isclose(loss, F.cross_entropy(model(x), y))
            loss.backward()
        else:
            engine.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        oracle.step(x, y)
    assert oracle.went_as(model)


class Classic(nn.Module):
    """One of each kind of rule: tapped outside, from the inside, with a backward of its own, and re-run."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH + 1))

        def forward(self, x):
            return x * self.w

    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Embedding(9, WIDTH), nn.Conv1d(WIDTH, WIDTH + 1, 3, padding="same")
        self.group, self.scale = nn.GroupNorm(2, WIDTH + 1), self.Scale()
        self.lstm = nn.LSTM(WIDTH + 1, WIDTH + 1, batch_first=True, bidirectional=True)
        self.attention, self.head = (nn.MultiheadAttention(2 * WIDTH + 2, 2, batch_first=True), nn.Linear(2 * WIDTH + 2, CLASSES))  # fmt: skip

    def forward(self, ids):
        x = self.scale(self.group(self.conv(self.embed(ids).mT)).mT)
        x = self.lstm(x)[0]
        return self.head(self.attention(x, x, x, need_weights=False)[0]).mean(1)


@pytest.mark.parametrize("mode", ["auto", "per_sample"])
def test_every_kind_of_rule(mode):
    model = Classic()
    oracle = OneAtATime(model, sgd, 0.3, 10)
    _, model, optimizer, loader = make(model, optimizer=sgd(model.parameters()), clipping_mode=mode)
    for x, y in loader:
        step(model, optimizer, x, y)
        oracle.step(x, y)
    assert oracle.went_as(model)


def positions_first(examples):
    return torch.stack([x for x, _ in examples], 1), torch.stack([y for _, y in examples])


def only_positions_first(examples):
    return torch.stack([x for x, _ in examples], 1), torch.stack([x.float() for x, _ in examples], 1)


def test_batch_in_the_second_dimension():
    model = Net(batch_first=False)
    oracle = OneAtATime(copy_of(model), sgd, 0.3, 10)
    _, model, optimizer, loader = make(
        model, optimizer=sgd(model.parameters()), batch_first=False, collate_fn=positions_first
    )
    for x, y in loader:
        assert x.shape == (LENGTH, len(y))
        step(model, optimizer, x, y)
        oracle.step(x.T, y)
    assert oracle.went_as(model)


def losses_of(model):
    return lambda b: F.cross_entropy(model(b["x"]), b["y"], reduction="none")


def sums_are_those_of(reference, engine, x, y, losses=None):
    gradients = per_example_gradients(reference, losses or losses_of(reference), {"x": x, "y": y})
    total = clipped_sum(gradients, 0.3)[1]
    return distance([*engine.clipped_sums().values()], total) <= 1e-5 * length(total)


class Layers(Net):
    """Scores of six layers, as a decoder that detects objects returns them: (layers, B, positions, classes)."""

    def forward(self, ids):
        states = [self.embed(ids)]
        for _ in range(6):
            states.append(torch.tanh(self.mix(states[-1])))
        return self.head(self.norm(torch.stack(states[1:])))


@pytest.mark.parametrize("rows", [2, 5, 6])
def test_rows_behind_as_many_layers(rows):
    model = Layers()
    reference = copy.deepcopy(model)
    engine, model, _, loader = make(model, max_physical_batch_size=rows, fill_physical_batches=True, batch_size=30)
    batches = iter(loader)
    x, y = next(batches)
    sum(F.cross_entropy(scores.mean(1), y) for scores in model(x)).backward()
    losses = lambda b: sum(F.cross_entropy(scores.mean(1), b["y"], reduction="none") for scores in reference(b["x"]))  # noqa: E731
    assert len(x) == rows and sums_are_those_of(reference, engine, x, y, losses)


def test_gradients_can_be_seen_at_every_stage():
    model = Net()
    reference = copy.deepcopy(model)
    engine, model, optimizer, loader = make(model, clipping_mode="per_sample", noise_multiplier=1.0)
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    gradients = per_example_gradients(reference, losses_of(reference), {"x": x, "y": y})
    for k, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.grad_sample, torch.stack([g[k] for g in gradients]))
    total = clipped_sum(gradients, 0.3)[1]
    clipped = list(engine.clipped_sums().values())
    assert all(p.grad is None for p in model.parameters())
    assert distance(clipped, total) <= 1e-5 * length(total)
    optimizer.step()
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    noise = torch.cat([(p.grad * 10 - g).flatten() for p, g in zip(model.parameters(), clipped, strict=True)])
    assert 0.8 < noise.std() / 0.3 < 1.25  # 112 parameters
    assert len(noise.unique()) > 0.95 * len(noise)


def test_empty_draws_are_steps_of_noise():
    engine, model, optimizer, loader = make(batch_size=1, noise_multiplier=1.0)
    empty = 0
    for x, y in loader:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if loader._step.order.in_hand.batch.examples == 0:
            empty += 1
            assert length([*engine.clipped_sums().values()]) == 0
        optimizer.step()
        assert distance(list(model.parameters()), before) > 0
    assert empty > 5
    assert engine.steps == len(loader) == N


def test_epsilon_is_that_of_the_steps_taken():
    engine, model, optimizer, loader = make(engine=PrivacyEngine(), noise_multiplier=1.3, max_physical_batch_size=4)
    assert engine.get_epsilon(1e-3) == 0
    steps = 0
    for x, y in loader:
        step(model, optimizer, x, y)
        steps += loader._step.order.in_hand.last_of_draw
    assert steps == loader.steps_per_epoch == 4
    assert engine.get_epsilon(1e-3) == compute_epsilon(noise_multiplier=1.3, sample_rate=0.25, steps=4, delta=1e-3)
    assert engine.epsilon_after(2, delta=1e-3) == compute_epsilon(1.3, 0.25, 6, 1e-3) > engine.get_epsilon(1e-3)
    with pytest.raises(TypeError, match="steps_per_epoch"):
        len(loader)


@pytest.mark.parametrize("options", [{}, {"noise_multiplier": 0.0, "max_grad_norm": math.inf}])
def test_the_twin_trains_as_plain_and_a_frozen_batch_norm_keeps_its_statistics(options):
    """With public steps of the same optimizer between the private ones, and in training mode all the time."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(LENGTH, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    model[1].requires_grad_(False), model[2].requires_grad_(False).running_mean.fill_(0.3)
    plain, public = copy.deepcopy(model), (torch.randn(3, LENGTH), torch.tensor([0, 1, 2]))
    plain[2].eval()
    optimizer, adam_of_plain = adam(trainable(model)), adam(trainable(plain))
    loader = DataLoader([(x.float(), y) for x, y in make_data()], batch_size=10)
    engine = PrivacyEngine(without_privacy=not options)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, **{"noise_multiplier": 1.0, "max_grad_norm": 0.1, **options},
    )  # fmt: skip
    for x, y in loader:
        step(model.train(), optimizer, x, y)
        with engine.public():
            step(model, optimizer, *public)
        adam_of_plain.zero_grad()
        (F.cross_entropy(plain(x), y, reduction="sum") / 10).backward()
        adam_of_plain.step()
        step(plain, adam_of_plain, *public)
        assert distance(list(model.parameters()), list(plain.parameters())) < 1e-5
    assert torch.equal(model[2].running_mean, plain[2].running_mean)
    assert (engine.steps, engine.get_epsilon(1e-3)) == (4, math.inf)
    next(iter(loader))
    with pytest.raises(ValueError, match=r"enter engine.public\(\) after optimizer.step\(\)"), engine.public():
        pass


def test_target_epsilon_is_kept():
    model = Net()
    loader = DataLoader(make_data(), batch_size=10)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=sgd(model.parameters()), data_loader=loader, target_epsilon=3.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0,
    )  # fmt: skip
    for _ in range(2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert 2.9 < engine.get_epsilon(1e-3) <= 3.0
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="budget is spent"):
        optimizer.step()
    assert distance(list(model.parameters()), before) == 0
    engine.detach()  # there is nothing to be said of the draw, of which no step followed
    assert engine.get_epsilon(1e-3) <= 3.0


@pytest.mark.parametrize("epochs", [0, -1, 0.0, math.inf, math.nan])
def test_no_pass_to_calibrate_noise_for(epochs):
    """Nothing would be spent in no step, so there is no noise that a target could be calibrated to."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"module": model, "optimizer": optimizer, "data_loader": DataLoader(make_data(), 10), "target_epsilon": 3.0}  # fmt: skip
    options |= {"target_delta": 1e-4, "max_grad_norm": 1.0}
    engine = PrivacyEngine()
    with pytest.raises(ValueError, match=rf"(?s)epochs={epochs}.*above 0.*make_private\(noise_multiplier=...\)"):
        engine.make_private_with_epsilon(**options, epochs=epochs)
    assert not model._forward_hooks and not optimizer._optimizer_step_pre_hooks
    engine.make_private_with_epsilon(**options, epochs=0.1)
    assert engine.privacy_spent().noise_multiplier > 0


def test_both_ways_to_make_a_loop_private_take_the_same_options():
    options = {f.name: f.default for f in dataclasses.fields(PlainLoop) if f.default is not dataclasses.MISSING}
    assert set(LoopOptions.__annotations__) == set(options) - {"is_one_pass"}  # which the engine sets

    def calibrated(**options):
        model, engine = Net(), PrivacyEngine()
        target = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 1, "max_grad_norm": 1.0}
        loop = {"module": model, "optimizer": sgd(model.parameters()), "data_loader": DataLoader(make_data(), 10)}
        return engine, engine.make_private_with_epsilon(**loop, **target, **options)

    engine, (_, _, criterion, loader) = calibrated(
        criterion=nn.CrossEntropyLoss(), clipping_mode="ghost", max_physical_batch_size=3, self_check=False
    )
    assert isinstance(criterion, PrivateCriterion) and engine.clipper.mode.name == "ghost"
    assert loader.max_physical_batch_size == 3 and not engine.privacy_spent().verified
    with pytest.raises(ValueError, match="poisson_sampling=False"):
        calibrated(poisson_sampling=False)
    with pytest.raises(TypeError, match="clipping_modus"):
        calibrated(clipping_modus="ghost")


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize(
    ("delta", "message"),
    [(1 / N, "not smaller than 1/N"), (0.5, "not smaller than 1/N"), (0.0, "above 0"), (-1.0, "above 0")],
)
def test_a_delta_that_says_nothing_of_a_row(delta, message):
    """As DPTrainer refuses it: at 1/N, publishing one example outright counts as private."""
    engine = make(noise_multiplier=1.0)[0]
    for ask in (engine.get_epsilon, engine.privacy_spent):
        with pytest.raises(ValueError, match=message):
            ask(delta)
        assert ask(0.99 / N) is not None


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine of one core
def test_loader_keeps_what_the_old_one_was_told():
    def collate(examples):
        return {"x": torch.stack([x for x, _ in examples]), "y": torch.stack([y for _, y in examples])}

    *_, loader = make(collate_fn=collate)
    for batch in loader:
        assert set(batch) == {"x", "y"}
    old = DataLoader(make_data(), batch_size=10, num_workers=2)
    with pytest.warns(UserWarning, match="dp_seed"):
        engine = PrivacyEngine(dp_seed=1)
    model = Net()
    model, _optimizer, loader = engine.make_private(
        module=model, optimizer=sgd(model.parameters()), data_loader=old, noise_multiplier=1.0, max_grad_norm=1.0
    )
    sizes = {len(x) for x, _ in [*loader, *loader]}
    assert len(sizes) > 1, "draws of random size"


def one_batch(**options):
    engine, model, optimizer, loader = make(**options)
    x, y = next(iter(loader))
    return engine, model, optimizer, loader, x, y


def test_a_ledger_of_earlier_runs_is_pointed_out(tmp_path, caplog):
    for _ in range(2):
        assert "steps of earlier runs" not in caplog.text
        engine, model, optimizer, _, x, y = one_batch(noise_multiplier=1.0, engine=PrivacyEngine(ledger_dir=tmp_path))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        engine.detach()
    assert "also holds 1 steps of earlier runs, which the epsilon of this training does not" in caplog.text


@pytest.mark.parametrize(
    "change",
    [lambda losses: losses**2, lambda losses: losses * torch.rand(len(losses)), lambda losses: losses.clamp(max=1)],
)
def test_a_criterion_that_compares_nothing_is_not(change):
    engine, model, optimizer, criterion, loader = make(criterion=Compares(change))
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert engine.steps == 4


@pytest.mark.parametrize("at_the_given_one", [False, True])
def test_a_criterion_follows_its_owner(at_the_given_one):
    """A coefficient that is annealed, class weights, and methods of modules."""
    given = nn.CrossEntropyLoss(weight=torch.ones(3))
    _, _, _, criterion, _ = make(criterion=given)
    scores, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    changed = given if at_the_given_one else criterion
    changed.label_smoothing = 0.4
    changed.weight = torch.tensor([1.0, 2.0, 3.0])
    each = F.cross_entropy(scores, labels, changed.weight, label_smoothing=0.4, reduction="none")
    torch.testing.assert_close(criterion(scores, labels), each.mean())
    assert criterion.to("cpu") is criterion.eval() is criterion and not given.training
    assert criterion.weight is given.weight and criterion.reduction == "mean"
    criterion.reduction = "sum"
    torch.testing.assert_close(criterion(scores, labels), each.sum())
    with pytest.raises(AttributeError, match="alpha"):
        _ = criterion.alpha


def test_a_compiled_criterion_keeps_its_reduction():
    _, _, _, criterion, _ = make(criterion=torch.compile(nn.CrossEntropyLoss(), backend="eager"))
    scores, labels = torch.randn(3, 3), torch.arange(3)
    for _ in range(2):
        torch.testing.assert_close(criterion(scores, labels), F.cross_entropy(scores, labels))


def test_a_loss_of_the_private_criterion_goes_backward_once():
    _, model, _, criterion, loader = make(criterion=nn.CrossEntropyLoss())
    x, y = next(iter(loader))
    loss = criterion(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="called twice on one loss.*Call it once"):
        loss.backward()


@pytest.mark.parametrize("how", ["break", "peek", "middle of a draw"])
def test_a_draw_that_was_shown_is_stepped(how):
    """Whether it is must not depend on the examples in it."""
    engine, model, optimizer, loader = make(engine=PrivacyEngine(), noise_multiplier=1.0, max_physical_batch_size=2)
    if how == "peek":
        next(iter(loader))
    else:
        for x, y in loader:
            if how == "middle of a draw":
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            break
    x, y = next(iter(loader))
    assert engine.get_epsilon(1e-3) == compute_epsilon(noise_multiplier=1.0, sample_rate=0.25, steps=1, delta=1e-3), (
        "it counts all the same"
    )
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"Do not peek.*drop_draw"):
        F.cross_entropy(model(x), y).backward()
    assert distance(list(model.parameters()), before) == 0 and engine.steps == 0
    engine.drop_draw()
    assert engine.steps == 1
    reference, batches = copy_of(model), []
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        batches.append((x, y))
        if loader._step.order.in_hand.last_of_draw:
            break
        optimizer.step()
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    assert sums_are_those_of(reference, engine, x, y)


def copy_of(model):
    """The same weights, without hooks."""
    twin = Net()
    twin.load_state_dict(model.state_dict())
    return twin


def test_failed_backward_leaves_a_usable_model():
    engine, model, optimizer, loader, x, y = one_batch()
    out = model(x)
    out.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        F.cross_entropy(out, y).backward()
    with pytest.raises(ValueError, match="one backward, one step"):
        optimizer.step()
    engine.drop_draw()
    x, y = next(iter(loader))
    reference = copy_of(model)
    F.cross_entropy(model(x), y).backward()
    assert sums_are_those_of(reference, engine, x, y)


def test_after_a_step_that_raised_the_next_is_noised_and_counted():
    """Any handler of errors around optimizer.step() went on with bare clipped sums."""
    calls, seen = [], []

    def out_of_memory(optimizer, args, kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError

    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    optimizer.register_step_pre_hook(out_of_memory)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        total = engine.clipped_sums()["head.weight"]
        with contextlib.suppress(MemoryError):
            optimizer.step()
        seen.append(not torch.equal(model.head.weight.grad * 10, total))
    assert all(seen) and engine.steps == len(seen) == 4


@pytest.mark.parametrize("mode", ["ghost", "book_keeping"])
def test_a_backward_pass_that_was_cut_off_adds_nothing_twice(mode, monkeypatch):
    options = {"criterion": nn.CrossEntropyLoss(), "max_physical_batch_size": 2, "clipping_mode": mode}
    engine, model, optimizer, criterion, loader = make(noise_multiplier=1.0, **options)
    batches = iter(loader)
    x, y = next(batches)
    criterion(model(x), y).backward()
    optimizer.step()
    x, y = next(batches)
    owner, name = (KeptTerms, "_add_sums") if mode == "book_keeping" else (modes._FirstPass, "_end_second")
    original = getattr(owner, name)

    def cut_off(*args, **kwargs):
        original(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, cut_off)
        with pytest.raises(KeyboardInterrupt):
            engine.backward(F.cross_entropy(model(x), y, reduction="none"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"interrupted.*drop_draw"):
            criterion(model(x), y).backward()
    with pytest.raises(ValueError, match="optimizer.step"):
        optimizer.step()
    engine.drop_draw()
    x, y = next(batches)
    criterion(model(x), y).backward()
    optimizer.step()


def test_failed_forward_leaves_parameters_trainable():
    _, model, _, _, x, _ = one_batch()
    with pytest.raises(IndexError):
        model(x + 100)
    assert all(p.requires_grad for p in model.parameters())


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_optimizers_hold_shards_whatever_was_evaluated_before(one_rank):
    """FSDP2 leaves the parameters of the outermost unit whole after a forward pass without a backward pass."""
    model = Net()
    fully_shard(model)
    shards = list(model.parameters())
    model(torch.zeros(2, LENGTH, dtype=torch.long))
    of_whole = sgd(model.parameters())
    assert not set(of_whole.param_groups[0]["params"]) & set(shards), "what this test is about"
    with pytest.raises(ValueError, match=r"not the model's.*after the last change"):
        make(model, optimizer=of_whole)
    model(torch.zeros(2, LENGTH, dtype=torch.long))
    criterion = nn.CrossEntropyLoss()
    engine, model, optimizer, criterion, loader = make(model, optimizer=sgd(shards), criterion=criterion)
    for x, y in loader:
        criterion(model(x), y).backward()
        with engine.suspended(), torch.no_grad():
            model.eval()
            model(x)
            model.train()
        optimizer.step()
    assert all(p.grad is not None for p in shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poisson_sampling": False}, "Poisson"),
        ({"loss_reduction": "average"}, "'mean', 'sum' or 'none'"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "both must be 'mean'"),
        ({"max_physical_batch_size": 0}, "positive"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"batch_size": N + 1}, "exceeds"),
    ],
)
def test_arguments_that_are_refused_leave_the_model_as_it_was(options, message):
    model = Net()
    with pytest.raises(ValueError, match=message):
        make(model, **options)
    assert not model._forward_hooks and not model.head._forward_hooks
    make(model)


def test_other_refusals():
    model = Net()
    optimizer = sgd(model.parameters())
    engine = PrivacyEngine()
    common = {"module": model, "optimizer": optimizer, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    with pytest.raises(ValueError, match="make_private"):
        engine.detach(model)
    with pytest.raises(ValueError, match="DataLoader"):
        engine.make_private(**common, data_loader=[1, 2])
    engine.make_private(**common, data_loader=DataLoader(make_data(), batch_size=4))
    with pytest.raises(ValueError, match="already used"):
        engine.make_private(**common, data_loader=DataLoader(make_data(), batch_size=4))
    engine.detach()
    assert not model._forward_hooks and not optimizer._optimizer_step_pre_hooks


def test_a_notebook_cell_that_runs_twice(caplog):
    model, loader, criterion = Net(), DataLoader(make_data(), batch_size=10), nn.CrossEntropyLoss()
    for run in range(3):
        engine, optimizer = PrivacyEngine(), sgd(model.parameters())
        model, optimizer, criterion, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, criterion=criterion, noise_multiplier=1.0,
            max_grad_norm=1.0,
        )  # fmt: skip
        assert caplog.text.count("took no step is taken off") == run
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-3) == compute_epsilon(1.0, 10 / N, 4, 1e-3)
    with pytest.raises(ValueError, match=r"took 4 steps is attached.*engine.detach\(model\)"):
        make(model)
    PrivacyEngine().detach(model)
    train(*make(model)[1:])


def test_the_clipper_of_a_private_loop_adds_to_its_sums():
    engine, model, _, loader = make()
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="clips by its mechanism"):
        engine.clipper.backward(F.cross_entropy(model(x), y, reduction="none"), clipping=FlatClipping(9.0))
    engine.clipper.backward(F.cross_entropy(model(x), y, reduction="none"))
    assert all(p.grad is None for p in model.parameters()) and any(map(torch.any, engine.clipped_sums().values()))


def test_copies_and_pickles_of_a_private_model_carry_nothing(tmp_path):
    """No noise generator, no data, no gradient; and the copy is an ordinary model."""
    _, model, _, _, x, y = one_batch(noise_multiplier=1.0, engine=PrivacyEngine(ledger_dir=tmp_path))
    F.cross_entropy(model(x), y).backward()
    torch.save(model, tmp_path / "model.pt")
    assert b"TensorDataset" not in (tmp_path / "model.pt").read_bytes()
    for twin in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        twin.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        reference = copy_of(model)
        F.cross_entropy(reference(x), y).backward()
        assert distance([p.grad for p in twin.parameters()], [p.grad for p in reference.parameters()]) == 0
        make(twin)


def test_noise_is_never_copied():
    engine, *_ = make(engine=PrivacyEngine())
    with pytest.raises(TypeError, match="subtract the noise"):
        pickle.dumps(engine._loop.step._noise._streams)


def test_optimizer_whose_step_calls_that_of_its_base():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    trained = []
    for kind in (torch.optim.SGD, Own):
        torch.manual_seed(3)
        model = Net()
        engine, model, optimizer, loader = make(
            model, optimizer=kind(model.parameters(), lr=0.5), max_physical_batch_size=4
        )
        train(model, optimizer, loader)
        assert engine.steps == 4
        trained.append(list(model.parameters()))
    assert distance(*trained) == 0


class PerPosition(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return self.head(self.embed(ids)).squeeze(2)


@pytest.mark.parametrize("mode", ["ghost", "book_keeping"])
def test_criterion_with_the_batch_second(mode):
    """On a batch of as many examples as positions."""

    torch.manual_seed(3)
    model = PerPosition()
    reference = copy.deepcopy(model)
    engine, model, _, criterion, loader = make(
        model, batch_first=False, collate_fn=only_positions_first, criterion=nn.MSELoss(), clipping_mode=mode, batch_size=LENGTH,
    )  # fmt: skip
    for batch in (batch for _ in range(20) for batch in loader):
        x, y = batch
        if x.shape == (LENGTH, LENGTH):
            break
        engine.drop_draw()
    criterion(model(x), y).backward()
    losses = lambda b: (reference(b["x"]) - b["y"]).square().mean(1)  # noqa: E731
    assert sums_are_those_of(reference, engine, x.T, y.T, losses)


def test_a_part_of_the_model_without_gradients():
    class Teacher(Net):
        def forward(self, ids):
            with torch.no_grad():
                teacher = self.mix(self.embed(ids))
            return super().forward(ids) + teacher.mean()

    model = Teacher()
    reference = copy.deepcopy(model)
    engine, model, _, loader = make(model, self_check=False)  # the mean over the batch is for this test's sake
    x, y = next(iter(loader))
    with torch.no_grad():
        shift = reference.mix(reference.embed(x)).mean()
    F.cross_entropy(model(x), y).backward()
    plain = copy_of(reference)
    losses = lambda b: F.cross_entropy(plain(b["x"]) + shift, b["y"], reduction="none")  # noqa: E731
    assert sums_are_those_of(plain, engine, x, y, losses)


def test_closure():
    plain = []
    for closure in (False, True):
        _, model, optimizer, loader = make(noise_multiplier=0.7)
        for x, y in loader:

            def compute(x=x, y=y, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            if closure:
                assert optimizer.step(compute).item() > 0
            else:
                compute()
                optimizer.step()
        plain.append(list(model.parameters()))
    assert distance(*plain) == 0


@pytest.mark.parametrize("physical", [None, 3])
def test_bf16_parameters(physical):
    model = Net().bfloat16()
    engine, model, optimizer, loader = make(
        model, optimizer=adam(model.parameters()), noise_multiplier=1.0, max_physical_batch_size=physical
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), y).backward()
        last = loader._step.order.in_hand.last_of_draw
        assert all(p.grad is None for p in model.parameters())
        assert all(total.dtype == torch.float32 for total in engine.clipped_sums().values())
        optimizer.step()
        if last:
            assert all(p.grad.dtype == p.dtype == torch.bfloat16 for p in model.parameters())


class BeginsAtItsFirstStep(torch.optim.SGD):
    """And moves its moments to another place and back."""

    is_ready = False

    def step(self, closure=None):
        self.is_ready = True
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("mine", torch.zeros(3))
                self.state[p] = {k: v.clone() for k, v in self.state[p].items()}
        return super().step(closure)


def test_an_optimizer_may_begin_within_a_draw():
    model = Net()
    optimizer = BeginsAtItsFirstStep(model.parameters(), 0.1)
    engine, model, optimizer, loader = make(
        model, optimizer=optimizer, noise_multiplier=1.0, max_physical_batch_size=2
    )
    train(model, optimizer, loader)
    assert engine.steps == 4


def test_a_dropped_draw_ends():
    """Which examples are in the rest of it depends on what was in the part before."""
    engine, model, optimizer, loader = make(noise_multiplier=1.0, max_physical_batch_size=2)
    ends = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if not ends:
            engine.drop_draw()
            ends.append(engine.steps)
            continue
        optimizer.step()
        if engine.has_stepped:
            ends.append(engine.steps)
    assert ends == [1, 2, 3, 4]


def test_a_dropped_draw_does_not_come_back():
    engine, model, optimizer, loader = make(noise_multiplier=1.0, max_physical_batch_size=2)
    kept = iter(loader)
    next(kept)
    engine.drop_draw()
    next(iter(loader))
    engine.drop_draw()
    x, y = next(kept)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert engine._loop.step.number == 2


def test_a_checkpoint_that_is_loaded_within_a_draw_ends_it(tmp_path):
    """Its examples would meet two models. The draw is counted, and the loop goes on with the next."""
    engine, model, optimizer, loader = make(noise_multiplier=1.0, max_physical_batch_size=2)
    engine.save_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    stepped = []
    for count, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if count == 1:
            engine.load_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
            assert engine.steps == 1 and distance(list(model.parameters()), before) == 0
            continue
        optimizer.step()
        stepped += [engine.steps] if engine.has_stepped else []
    assert stepped == [2, 3, 4]


def test_the_loader_of_a_training_that_has_ended():
    """It went on, and the optimizer stepped without noise."""
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    batches = iter(loader)
    step(model, optimizer, *next(batches))
    engine.detach()
    for rest in (loader, batches):
        with pytest.raises(RuntimeError, match="has ended.*call make_private again"):
            next(iter(rest))


def test_whether_clipping_is_checked_is_said_once():
    engine, *_ = make(noise_multiplier=1.0)
    with pytest.raises(AttributeError, match="self_check"):
        engine.clipper.self_check = False


class AtATemperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.temperature = Net(), 1.0

    def forward(self, x):
        return self.net(x) / self.temperature


@pytest.mark.parametrize("physical", [2, 10**6])
@pytest.mark.parametrize("way", ["no_grad", "suspended", "failing", "averaged"])
def test_passes_that_train_nothing_may_run_otherwise_within_a_draw(physical, way):
    """A teacher, or an evaluation, between two physical batches: what is trained is not put back to what ran there."""
    model = AtATemperature()
    engine, model, optimizer, loader = make(model, noise_multiplier=1.0, max_physical_batch_size=physical)
    seen, averages = set(), [p.detach() / 2 for p in model.parameters()]
    hook = model.register_forward_pre_hook(
        lambda module, args: seen.add((module.temperature, torch.is_grad_enabled()))
    )
    for x, y in loader:
        model.temperature = 4.0
        model.eval()
        trained = [p.data for p in model.parameters()]
        for p, average in zip(model.parameters(), averages, strict=True):
            p.data = average if way == "averaged" else p.data
        aside = contextlib.nullcontext() if way == "no_grad" else engine.suspended()
        with contextlib.suppress(ArithmeticError), torch.no_grad(), aside:
            model(make_data().tensors[0][: len(x)])
            if way == "failing":
                raise ArithmeticError
        for p, data in zip(model.parameters(), trained, strict=True):
            p.data = data
        model.train()
        model.temperature = 1.0
        step(model, optimizer, x, y)
    hook.remove()
    assert {t for t, goes_back in seen if goes_back} == {1.0} and (4.0, False) in seen and engine.steps == 4


def test_a_schedule_goes_back_with_a_checkpoint(tmp_path):
    """The first draw after it may have the number of the last one before."""
    engine, model, optimizer, loader = make(noise_multiplier=1.0)

    def draws(count):
        for _, (x, y) in zip(range(count), loader, strict=False):
            step(model, optimizer, x, y)
            optimizer.param_groups[0]["lr"] *= 0.5

    draws(2)
    engine.save_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
    draws(1)
    engine.load_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
    draws(1)
    assert engine.steps == 4


def test_accelerate_loop():
    from accelerate import Accelerator

    trained = []
    for accelerated in (False, True):
        engine, model, optimizer, loader = make(noise_multiplier=0.5)
        if accelerated:
            accelerator = Accelerator(cpu=True)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss) if accelerated else loss.backward()
            optimizer.step()
        assert engine.steps == 4
        trained.append(list(model.parameters()))
    assert distance(*trained) == 0


def test_accelerate_prepares_after_make_private():
    from accelerate import Accelerator

    model = Net()
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="AcceleratedOptimizer around another.*before accelerator.prepare"):
        make(model, optimizer=optimizer, noise_multiplier=1.0)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # lightning's own
def test_lightning_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.net = Net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            return F.cross_entropy(self(batch[0]), batch[1])

        def train_dataloader(self):
            return self.loader

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            loader = DataLoader(make_data(), batch_size=10)
            with pytest.warns(UserWarning, match="dp_seed"):
                self.engine = PrivacyEngine(dp_seed=1)
            _, optimizer, self.loader = self.engine.make_private(
                module=self.net, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=0.3
            )
            return optimizer

    module = Module()
    start = copy.deepcopy(module.net)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    assert module.engine.steps == 8
    _, model, optimizer, loader = make()
    for _ in range(2):
        train(model, optimizer, loader)
    assert distance(list(module.net.parameters()), list(model.parameters())) <= 1e-5 * distance(
        list(start.parameters()), list(model.parameters())
    )


@pytest.mark.parametrize("with_ledger", [False, True])
def test_going_back_counts_no_step_twice_and_none_less(tmp_path, with_ledger):
    """To a file of its own; a file of another engine adds what that spent, however often its run was counted
    before."""

    def start():
        return make(noise_multiplier=1.0, engine=PrivacyEngine(ledger_dir=tmp_path if with_ledger else None))

    def save(engine, model, optimizer, loader, name):
        engine.save_checkpoint(tmp_path / name, module=model, optimizer=optimizer, checkpoint_dict={"name": name})

    def load(engine, model, optimizer, loader, name):
        assert engine.load_checkpoint(tmp_path / name, module=model, optimizer=optimizer) == {"name": name}

    first = start()
    for steps in (4, 8):
        train(*first[1:])
        save(*first, f"{steps}.pt")
    load(*first, "4.pt")
    assert first[0].steps == 8
    train(*first[1:])  # on the branch that was gone back to
    load(*first, "8.pt")
    load(*first, "4.pt")
    save(*first, "12.pt")
    assert first[0].steps == 12
    saved = copy_of(first[1])
    first[0].detach()
    with pytest.raises(ValueError, match="taken off with detach"):
        load(*first, "8.pt")

    second = start()
    load(*second, "8.pt")
    executed = 12 if with_ledger else 8  # all of the run, or what the file knows of
    assert second[0].steps == executed
    train(*second[1:])
    save(*second, "second.pt")
    load(*second, "second.pt")
    assert second[0].steps == executed + 4
    load(*second, "12.pt")  # of the other engine: whether its steps were counted is known with a ledger
    assert second[0].steps == executed + 4 + (0 if with_ledger else 12)
    assert distance(list(second[1].parameters()), list(saved.parameters())) == 0 and not list(tmp_path.glob("*.tmp"))


def test_resume_refuses_another_mechanism(tmp_path):
    engine, model, optimizer, _ = make(noise_multiplier=1.0)
    engine.save_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
    for change in ({"noise_multiplier": 2.0}, {"max_grad_norm": 2.0}, {"batch_size": 5}):
        engine, model, optimizer, _ = make(**{"noise_multiplier": 1.0, **change})
        with pytest.raises(PrivacyStateError, match="trained with"):
            engine.load_checkpoint(tmp_path / "c.pt", module=model, optimizer=optimizer)
    torch.save({"module": model.state_dict()}, tmp_path / "bare.pt")
    with pytest.raises(PrivacyStateError, match="says nothing"):
        engine.load_checkpoint(tmp_path / "bare.pt", module=model)


def test_no_noise_is_said(caplog):
    engine, model, optimizer, loader = make()
    assert "NOTHING IS PRIVATE" in caplog.text
    train(model, optimizer, loader)
    assert engine.get_epsilon(1e-3) == math.inf


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_what_was_spent_is_read_as_from_opacus():
    engine, model, optimizer, loader = make(engine=PrivacyEngine(), noise_multiplier=1.5)
    assert engine.accountant.steps == 0 and engine.accountant.history == []
    train(model, optimizer, loader)
    assert engine.accountant.steps == engine.steps == 4
    assert engine.accountant.history == engine.history == [(1.5, 0.25, 4)]
    assert engine.accountant.get_epsilon(1e-3) == engine.get_epsilon(1e-3) > 0
    known, model, optimizer, loader = make(engine=PrivacyEngine(dp_seed=1), noise_multiplier=1.5)
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert known.accountant.get_epsilon(1e-3) == math.inf
