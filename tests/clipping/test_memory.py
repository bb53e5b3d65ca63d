"""A budget of memory: exact in every choice, never exceeded, decided by shapes alone."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from budgets import Net, example_batch, losses_of, plan_of
from oracle import assert_exact
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.budget import MODES, task_of, within
from benchmarks.contenders import PER_LAYER, field
from benchmarks.harness import Benchmark, parser
from benchmarks.models import Shape
from dp_transformers import DPTrainer, DPTrainingArguments, PerExampleClipper, PrivacyEngine
from dp_transformers.clipping import memory
from dp_transformers.clipping.loss_graph import LossGraph

pytestmark = pytest.mark.halved


def planned(model, budget, mode, positions, seed=0):
    with PerExampleClipper(model, 1.0, mode, memory_budget=budget) as clipper:
        losses_of(model, example_batch(positions, seed))
        return plan_of(clipper)


WIDTH, BUDGETS = 160, (0, 1e6, 2e6, 1e9)


@pytest.mark.parametrize("positions", [4, 90])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("mode", MODES)
def test_every_choice_is_exact(mode, budget, positions):
    torch.manual_seed(1)
    model, batch = Net(WIDTH), example_batch(positions)
    with PerExampleClipper(model, 1.0, mode, memory_budget=budget) as clipper:
        assert_exact(model, clipper, partial(losses_of, model), batch)


def test_the_choices_that_are_tested_differ():
    torch.manual_seed(1)
    model = Net(WIDTH)
    assert [planned(model, budget, "book_keeping", 90) for budget in BUDGETS] == [
        (True, set()),
        (True, {"wide.weight"}),
        (True, {"wide.weight", "convolution.weight"}),
        (True, {"wide.weight", "convolution.weight"}),
    ]
    # nothing is kept where that would not spare the second pass
    assert [planned(model, budget, "ghost", 90) for budget in BUDGETS[:3]] == [(False, set())] * 3
    assert planned(model, BUDGETS[3], "ghost", 90)[0]


def test_a_larger_instance_is_kept_only_within_the_budget():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3))
    x = torch.randn(4, 100, 300)
    extra = 4 * 4 * (300 * 300 - 100 * 300)  # instances of the first weight, less its output gradients

    def kept(budget):
        with PerExampleClipper(model, 1.0, memory_budget=budget) as clipper:
            model(x)
            return plan_of(clipper)[1]

    assert kept(0) == kept(extra - 1) == set()  # the other is smaller than its factors, and kept without a budget too
    assert kept(extra) == {"0.weight"}


def test_what_the_graph_holds_anyway_is_no_cost():
    """In ghost mode, whose graph stays until the second pass. Where saved tensors are put away it holds none."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3, bias=False))
    x = torch.randn(4, 5, 30)
    number = 4 * 4  # bytes of one for each example
    held = number * (5 * 30 + 5 * 3 + 30)  # output gradients of both layers, and the gradients of the bias
    put_away = number * (2 * 5 * 30 + 30 * 3 + 30)  # inputs of the first too; gradients of the second are smaller

    def goes_back_once(budget, context=nullcontext):
        with PerExampleClipper(model, 1.0, "ghost", memory_budget=budget) as clipper, context():
            model(x)
            return plan_of(clipper)[0]

    assert [goes_back_once(budget) for budget in (held - 1, held)] == [False, True]
    away = torch.autograd.graph.save_on_cpu
    assert [goes_back_once(budget, away) for budget in (put_away - 1, put_away)] == [False, True]


def test_what_saves_most_for_each_byte_comes_first():
    p, q = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    dear = memory._Choice(p, 0.0, 0.0, 80.0, False, True, 1000.0)
    cheap = memory._Choice(q, 0.0, 0.0, 30.0, False, True, 900.0)
    idle = memory._Choice(p, 0.0, 0.0, 0.0, False, True, -1.0)
    order = [(80.0, dear), (30.0, cheap), (0.0, idle)]
    assert list(memory._worthwhile(order, 100.0)) == [q]
    assert list(memory._worthwhile(order, 110.0)) == [q, p]


def test_no_budget_is_a_budget_of_nothing_bit_for_bit():
    sums = []
    for budget in (None, 0):
        torch.manual_seed(1)
        model = Net()
        with PerExampleClipper(model, 0.05, memory_budget=budget) as clipper:
            for positions in (4, 40, 9):
                clipper.backward(losses_of(model, example_batch(positions)))
        sums.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


@pytest.mark.parametrize(("budget", "backwards"), [(0, 2), (50_000, 2), (1e9, 1)])
def test_a_budget_for_everything_spares_the_second_pass(budget, backwards, monkeypatch):
    torch.manual_seed(1)
    model, batch = Net(), example_batch(40)
    passes = []
    with PerExampleClipper(model, 1.0, "ghost", memory_budget=budget) as clipper:
        clipper.backward(losses_of(model, batch))
        original = LossGraph.go_back
        monkeypatch.setattr(LossGraph, "go_back", lambda *a, **k: (passes.append(1), original(*a, **k)))
        clipper.backward(losses_of(model, batch))
    # the third pass over a batch is looked at for whose rows are whose, by two more
    assert len(passes) in (backwards, backwards + 2)


def test_a_bad_row_is_left_out_whatever_is_kept():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3, bias=False))
    x = torch.randn(4, 60, 30)
    sums = []
    for rows, budget in ((slice(1, 4), None), (slice(0, 4), None), (slice(0, 4), 15_000), (slice(0, 4), 1e9)):
        for mode in MODES:
            model.zero_grad()
            with PerExampleClipper(model, 1.0, mode, memory_budget=budget) as clipper:
                model(x)  # checked on rows that are finite
                bad = x.clone()
                bad[0] = torch.inf
                clipper.backward(model(bad[rows]).square().mean((1, 2)))
            sums.append([p.grad.clone() for p in model.parameters()])
    for found in sums[1:]:
        for a, b in zip(sums[0], found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("budget", [-1, float("nan"), float("inf"), True, "2GB"])
def test_nonsense_is_refused_everywhere(budget, tmp_path):
    model = nn.Linear(3, 2)
    loader = DataLoader(TensorDataset(torch.randn(20, 3), torch.zeros(20, dtype=torch.long)), batch_size=4)
    with pytest.raises(ValueError, match="memory_budget must be a finite number of bytes"):
        PerExampleClipper(model, 1.0, memory_budget=budget)
    with pytest.raises(ValueError, match="memory_budget must be a finite number of bytes"):
        DPTrainingArguments(
            output_dir=str(tmp_path), noise_multiplier=1.0, target_delta=1e-3, report_to="none", memory_budget=budget
        )
    with pytest.raises(ValueError, match="memory_budget must be a finite number of bytes"):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, memory_budget=budget,
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["per_sample", "fast_gradient"])
def test_modes_that_say_what_is_kept_take_no_budget(mode):
    with pytest.raises(ValueError, match=f"memory_budget does not go with clipping mode '{mode}'"):
        PerExampleClipper(nn.Linear(3, 2), 1.0, mode, memory_budget=1e6)


def stacked(rows):
    return {"input": torch.stack([row["input"] for row in rows])}


@pytest.mark.table("peaks")
@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_the_trainer_keeps_to_it_too_and_trains_the_same(mode, tmp_path, monkeypatch):
    kept, made = [], memory.MemoryBudget.plan

    def plan(self, *args, **kwargs):
        kept.append(made(self, *args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(memory.MemoryBudget, "plan", plan)
    trained = []
    for budget in (None, 1e9):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
        args = DPTrainingArguments(
            tmp_path / str(budget), clipping_mode=mode, memory_budget=budget, max_steps=3, expected_batch_size=8, per_device_train_batch_size=4,
            noise_multiplier=0.1, target_delta=1e-3, dp_seed=0, report_to=[], save_strategy="no",
        )  # fmt: skip
        rows = [{"input": x} for x in torch.randn(40, 100, 300)]
        DPTrainer(
            model,
            args,
            stacked,
            rows,
            per_example_loss_func=lambda model, inputs: model(inputs["input"]).square().sum((1, 2)),
        ).train()
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert any(plan.instances.values() for plan in kept) == (budget is not None)
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-6)


@pytest.fixture
def benchmark():
    return Benchmark("budget", parser("test").parse_args(["--allocator", "default"]))


SETTINGS = [  # kind, width, tokens, examples, mode, part of plain's peak; what binds in each differs
    ("bert", 192, 144, 4, "book_keeping", 0.3),
    ("llama", 128, 144, 4, "book_keeping", 2.0),
    ("vit-lora", 128, 144, 1, "book_keeping", 0.05),
    ("gpt2", 128, 64, 8, "ghost", 0.1),
    ("bert", 128, 64, 8, "ghost", 0.3),
    ("llama-lora", 128, 64, 4, "ghost", 0.2),
]


@pytest.mark.table("peaks")
@pytest.mark.parametrize(("kind", "width", "tokens", "size", "mode", "part"), SETTINGS)
def test_a_peak_is_never_over_budget(benchmark, kind, width, tokens, size, mode, part):
    figures = within(benchmark, kind, Shape(width, 1, 50, tokens, size, 4), mode, part)
    assert figures["over_mb"] <= 0.01


AUTO = [  # kind, width, tokens, examples, mode, free part of plain's peak; checkpointed and bf16
    ("bert", 192, 144, 4, "book_keeping", 2.0, False, False),
    ("llama-lora", 128, 64, 4, "ghost", 2.0, True, False),
    ("llama", 128, 64, 4, "ghost", 0.2, True, True),
    ("gpt2", 128, 64, 8, "ghost", 2.0, False, True),
]


@pytest.mark.table("peaks")
@pytest.mark.parametrize(("kind", "width", "tokens", "size", "mode", "part", "checkpointed", "bf16"), AUTO)
def test_a_peak_is_never_over_what_a_device_has_to_spare(
    benchmark, kind, width, tokens, size, mode, part, checkpointed, bf16
):
    shape = Shape(width, 1, 50, tokens, size, 4)
    how = {"auto": True, "checkpointed": checkpointed, "bf16": bf16}
    assert within(benchmark, kind, shape, mode, part, **how)["over_mb"] <= 0.01


@pytest.mark.table("peaks")
def test_the_budget_bounds_what_is_kept_and_not_less(benchmark, monkeypatch):
    """A plan that forgets the budget is seen by the measure."""
    monkeypatch.setattr(memory, "_worthwhile", lambda choices, limit: (c.parameter for _, c in choices if c.saved > 0))
    assert within(benchmark, "bert", Shape(384, 1, 50, 150, 4, 4), "book_keeping", 0.02)["over_mb"] > 0.1


@pytest.mark.table("peaks")
def test_layers_clipped_by_themselves_take_the_memory_of_plain_training(benchmark):
    """Nothing of a layer, its input neither, outlives its part of the backward pass."""
    contenders = field(task_of(benchmark, "bert", Shape(64, 2, 100, 64, 64, 4)), peers=False, modes=[PER_LAYER])
    assert benchmark.peak_bytes(contenders[PER_LAYER]) <= 1.05 * benchmark.peak_bytes(contenders["plain"])
