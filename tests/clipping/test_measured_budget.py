"""memory_budget="auto": what the device has to spare, and no more."""

import pytest
import torch
from budgets import Net, example_batch, losses_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import DPTrainer, DPTrainingArguments, PerExampleClipper, PrivacyEngine, register_grad_sampler
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.clipping.measured_budget import PART, SHARE, DeviceMemory, MeasuredBudget

pytestmark = [pytest.mark.filterwarnings("ignore:dp_seed"), pytest.mark.halved]
HIGHEST, FREE = 4e9, 1e9


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A device whose memory is what the test says."""
    says = {"highest": HIGHEST, "free": FREE}
    monkeypatch.setattr(DeviceMemory, "of", classmethod(lambda cls, device: cls(**says)))
    return says


@pytest.fixture
def settled(monkeypatch):
    """The budgets that were settled."""
    found, settle = [], MeasuredBudget.settle
    monkeypatch.setattr(MeasuredBudget, "settle", lambda self, limit: (found.append(limit), settle(self, limit)))
    return found


def train(model, clipper, batches):
    """One step for each group of batches, each of so many positions; whether each batch went back once."""
    optimizer, passes = torch.optim.SGD(model.parameters(), 0.1), []
    for group in batches:
        optimizer.zero_grad()
        for positions in group if isinstance(group, list) else [group]:
            losses = losses_of(model, example_batch(positions))
            passes.append(backward(clipper, losses).one_pass)
        optimizer.step()
    return passes


def backward(clipper, losses):
    """The plan that it was done by."""
    plans, plan = [], clipper.engine.plan
    clipper.engine.plan = lambda *args: (plans.append(plan(*args)), plans[-1])[1]
    clipper.backward(losses)
    del clipper.engine.plan
    return plans[0]


def net():
    torch.manual_seed(1)
    return Net()


def test_it_is_nothing_until_steps_after_the_first_were_no_larger_than_those_before():
    model = net()
    with PerExampleClipper(model, 1.0, "ghost", memory_budget="auto") as clipper:
        assert train(model, clipper, [40] * 6) == [False] * 4 + [True] * 2
        assert clipper.engine.memory.limit == SHARE * FREE


@pytest.mark.parametrize(
    ("highest", "free", "limit"), [(HIGHEST, FREE, SHARE * FREE), (1e9, 1e9, PART * 1e9), (1e9, -1e9, 0)]
)
def test_it_is_a_share_of_what_is_free_and_a_part_of_what_is_in_use(highest, free, limit, device):
    device |= {"highest": highest, "free": free}
    model = net()
    with PerExampleClipper(model, 1.0, "ghost", memory_budget="auto") as clipper:
        one_pass = train(model, clipper, [40] * 5)[-1]
        assert (clipper.engine.memory.limit, one_pass) == (limit, limit > 0)


def test_it_waits_while_passes_grow_and_then_looks_ever_more_rarely():
    """After 2, 4, 8, ... steps, as long as half of them since the last look were larger than all before."""
    model = net()
    with PerExampleClipper(model, 1.0, "ghost", memory_budget="auto") as clipper:
        lengths = [50, 10, 20, 30, 30, 35, 35, 35, 35, 40, 50, 10]
        assert train(model, clipper, lengths) == [False] * 8 + [True, False, False, True]


def test_larger_passes_later_keep_what_the_mode_keeps():
    """One of more positions, though of fewer numbers, since positions look at each other; and one of more rows."""
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3))
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), []
    with PerExampleClipper(model, 1.0, "ghost", memory_budget="auto") as clipper:
        for rows, positions in [(8, 100)] * 5 + [(4, 100), (8, 90), (3, 170), (9, 100), (8, 101), (8, 100)]:
            plan = backward(clipper, model(torch.randn(rows, positions, 300)).square().mean((1, 2)))
            kept.append(plan.one_pass)
            optimizer.step()
            optimizer.zero_grad()
    assert kept == [False] * 4 + [True] * 3 + [False] * 3 + [True]


def test_batches_that_are_added_up_are_one_step():
    model = net()
    with PerExampleClipper(model, 1.0, "ghost", memory_budget="auto") as clipper:
        assert train(model, clipper, [[40] * 5] * 3) == [False] * 10 + [True] * 5


def test_until_then_every_bit_is_as_without_a_budget():
    sums = []
    for budget in (None, "auto"):
        model = net()
        with PerExampleClipper(model, 0.05, "ghost", memory_budget=budget) as clipper:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for positions in (4, 40, 40, 40):
                clipper.backward(losses_of(model, example_batch(positions)))
                optimizer.step()
        sums.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return x @ self.weight.T


@pytest.mark.parametrize("budget", [None, "auto", 1e3, 1e9])
def test_what_may_be_kept_is_checked_before_anything_is(budget):
    """A rule with right norms and wrong gradients."""

    register_grad_sampler(Own)(lambda layer, a, g: {layer.weight: -torch.einsum("bi,bj->bij", g, a[0])})
    torch.manual_seed(1)
    model, x = nn.Sequential(Own(), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4)
    clipper = PerExampleClipper(model, 1.0, "ghost", memory_budget=budget)
    with clipper, pytest.raises(SelfCheckError, match="with a memory_budget|clipping is not exact"):
        model(x)


def test_a_device_that_nobody_knows_is_refused_at_once(monkeypatch):
    def unknown(cls, device):
        raise ValueError("give memory_budget in bytes")

    monkeypatch.setattr(DeviceMemory, "of", classmethod(unknown))
    with pytest.raises(ValueError, match="give memory_budget in bytes"):
        PerExampleClipper(nn.Linear(3, 2), 1.0, memory_budget="auto")
    PerExampleClipper(nn.Linear(3, 2), 1.0, memory_budget=1e6).detach()


ROWS, WIDTH = 40, 300


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def inputs():
    return torch.randn(ROWS, 100, WIDTH, generator=torch.Generator().manual_seed(0))


def stacked(rows):
    return {"input": torch.stack([row["input"] for row in rows])}


def trainer(folder, mode, budget, steps, **options):
    args = DPTrainingArguments(
        folder, clipping_mode=mode, memory_budget=budget, max_steps=steps, expected_batch_size=8,
        per_device_train_batch_size=4, noise_multiplier=0.1, target_delta=1e-3, dp_seed=0, report_to=[],
        **{"save_strategy": "no", **options},
    )  # fmt: skip
    rows = [{"input": x} for x in inputs()]
    losses = lambda model, inputs: model(inputs["input"]).square().sum((1, 2))  # noqa: E731
    return DPTrainer(wide(), args, stacked, rows, per_example_loss_func=losses)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.table("trainings")
@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_the_trainer_settles_and_trains_the_same(mode, tmp_path, settled):
    trained = []
    for budget in (None, "auto"):
        each = trainer(tmp_path / str(budget), mode, budget, 5)
        each.train()
        trained.append(flat(each.model))
    assert settled == [SHARE * FREE]
    assert not torch.equal(*trained)  # from then on sums are formed in another order
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-6)


@pytest.mark.table("trainings")
@pytest.mark.parametrize("criterion", [False, True])
def test_a_plain_loop_settles_and_trains_the_same(criterion, settled):
    trained = []
    for budget in (None, "auto"):
        model = wide()
        loader = DataLoader(TensorDataset(inputs(), torch.zeros(ROWS, 100, dtype=torch.long)), batch_size=8)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine = PrivacyEngine(dp_seed=0)
        options = {"criterion": nn.CrossEntropyLoss(), "clipping_mode": "ghost"} if criterion else {}
        model, optimizer, *rest = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.1, max_grad_norm=1.0,
            memory_budget=budget, max_physical_batch_size=4, **options,
        )  # fmt: skip
        for x, y in rest[-1]:
            optimizer.zero_grad()
            if criterion:
                rest[0](model(x).transpose(1, 2), y).backward()
            else:
                model(x).square().mean((1, 2)).mean().backward()
            optimizer.step()
        engine.detach()
        trained.append(flat(model))
    assert settled == [SHARE * FREE]
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-3, atol=1e-5)
