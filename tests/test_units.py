"""Persons, views and rows that are clipped together: what draws take, and what they add, beside one row at a time."""

import copy
from collections import Counter, defaultdict

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from models import build
from oracle import clipped_sum, distance, length, per_example_gradients, trainable
from test_trainer import arguments, collate, dataset
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from transformers import TrainerCallback

from dp_transformers import (
    DPTrainer,
    FlatClipping,
    IndependentNoise,
    Mechanism,
    PerExampleClipper,
    PoissonSampling,
    PrivacyEngine,
    PrivacyUnit,
)
from dp_transformers.step.step import PrivateStep

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
SILENT = {"noise_multiplier": 1e-7, "dp_seed": 5, "learning_rate": 0.5, "max_steps": 5}


def owned(n=40, owners=9):
    """Rows of persons, of whom the first has many; a row is known by its tokens."""
    return dataset(n).add_column("patient", [f"p{0 if i < 9 else i % owners}" for i in range(n)])


@pytest.fixture
def batches(monkeypatch):
    """The physical batches that are clipped, by draws, with the model as it was."""
    seen, add = [], PrivateStep.add

    def noted(step, losses, weights=None):
        seen.append(
            (step.number, copy.deepcopy(step.order.in_hand.batch), copy.deepcopy(step.clipper.model.state_dict()))
        )
        return add(step, losses, weights)

    monkeypatch.setattr(PrivateStep, "add", noted)
    return seen


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append([p.grad.clone() for p in trainable(model)])


def own(ids):
    return tuple(int(token) for token in ids if token)


def units_in(batch, owner_of):
    """The rows of a batch by their owners, without fillers."""
    units = defaultdict(list)
    for i in range(batch.examples):
        units[owner_of[own(batch.rows["input_ids"][i])]].append(i)
    return units


@pytest.mark.parametrize(
    "options",
    [
        {"rows_per_unit": 2},
        {"rows_per_unit": 5, "fill_physical_batches": True, "clipping_mode": "ghost"},
        {
            "rows_per_unit": 3,
            "augmentation_multiplicity": 2,
            "per_device_train_batch_size": 7,
            "clipping_mode": "per_sample",
        },
    ],
)
def test_a_step_adds_the_clipped_mean_of_each_drawn_person(tmp_path, batches, options):
    data, model, bound = owned(), build("bert"), 0.4
    owner_of = {own(row["input_ids"]): row["patient"] for row in data}
    most, views = options["rows_per_unit"], options.get("augmentation_multiplicity", 1)
    gradients = Gradients()
    args = arguments(
        tmp_path, privacy_unit_column="patient", max_grad_norm=bound, expected_batch_size=4, **{**SILENT, **options}
    )
    trainer = DPTrainer(model, args, collate, data, callbacks=[gradients])
    trainer.train()
    sums, chosen = defaultdict(lambda: [torch.zeros_like(p, dtype=torch.double) for p in trainable(model)]), Counter()
    reference = build("bert")
    for step, batch, weights in batches:
        reference.load_state_dict(weights)
        units = units_in(batch, owner_of)
        chosen.update((step, owner) for owner in units)
        each = per_example_gradients(
            reference,
            lambda rows: F.cross_entropy(
                reference(**{k: v for k, v in rows.items() if k != "labels"}).logits, rows["labels"], reduction="none"
            ),
            batch.rows,
        )
        means = []
        for owner, rows in units.items():
            different = {own(batch.rows["input_ids"][i]) for i in rows}
            has = sum(o == owner for o in owner_of.values())
            assert len(different) == min(most, has) and len(rows) == views * len(different)
            means.append([sum(parts) / len(rows) for parts in zip(*(each[i] for i in rows), strict=True)])
        if means:
            sums[step] = [a + b for a, b in zip(sums[step], clipped_sum(means, bound)[1], strict=True)]
        if options.get("fill_physical_batches"):
            assert batch.size == args.per_device_train_batch_size
    assert max(chosen.values()) == 1  # whole persons in one physical batch
    assert len({step for step, _ in chosen}) >= 4
    for step, found in enumerate(gradients.steps):
        assert distance([4 * g for g in found], sums[step]) <= 2e-5 * max(length(sums[step]), 0.01)
    spent = trainer.privacy_spent()
    assert (spent.num_examples, spent.sample_rate) == (
        9,
        4 / 9,
    ) and "one person (all rows with one 'patient')" in spent.unit


def test_a_drawn_person_takes_part_with_fresh_rows(tmp_path, batches):
    data = owned()
    args = arguments(
        tmp_path, privacy_unit_column="patient", expected_batch_size=9, rows_per_unit=1, **{**SILENT, "max_steps": 12}
    )
    DPTrainer(build("bert"), args, collate, data).train()
    first = {own(row["input_ids"]) for row in data if row["patient"] == "p0"}
    taken = [ids for _, batch, _ in batches for ids in map(own, batch.rows["input_ids"]) if ids in first]
    assert len(taken) >= 9 and len(set(taken)) >= 6  # of at least 9 rows; one chosen once and for all would be 1


@pytest.mark.filterwarnings("ignore:nothing will be learned")
def test_rows_beyond_a_bound_are_left_out_and_a_person_is_accounted_for(tmp_path, batches):
    data = owned()
    args = arguments(
        tmp_path,
        privacy_unit_column="patient",
        max_examples_per_person=3,
        noise_multiplier=2.0,
        expected_batch_size=12,
    )
    trainer = DPTrainer(build("bert"), args, collate, data)
    kept = Counter(trainer.train_dataset["patient"])
    assert max(kept.values()) == 3 and kept.keys() == set(data["patient"])
    trainer.train()
    spent = trainer.privacy_spent()
    by_hand = Mechanism(sampling=PoissonSampling(len(trainer.train_dataset), 12), clipping=FlatClipping(1.0), noise=IndependentNoise(2.0), steps=4,
                        releases=spent.mechanism.releases)  # fmt: skip
    assert spent.epsilon < spent.epsilon_per_person == pytest.approx(by_hand.epsilon(1e-4, rows=3))
    assert all(batch.unit_sizes is None or set(batch.unit_sizes) == {1} for _, batch, _ in batches)


class Flipped(TorchDataset):
    """Images, each time turned at random."""

    def __init__(self, n=12):
        self.images = torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), i % 3


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def test_views_of_a_row_are_drawn_apart_and_averaged_before_they_are_clipped():
    data, model, engine, bound = Flipped(), convolutional(), PrivacyEngine(dp_seed=7), 0.2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _, optimizer, criterion, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=4), criterion=nn.CrossEntropyLoss(), noise_multiplier=1e-7,
        max_grad_norm=bound, augmentation_multiplicity=6, max_physical_batch_size=13,
    )  # fmt: skip
    assert loader.expected_batch_size == 4
    different, total, parameters = 0, None, trainable(model)
    for images, labels in loader:
        criterion(model(images), labels).backward()
        images = images[: len(images) // 6 * 6]  # an empty draw comes as a row without weight
        for part, of_part in zip(images.split(6), labels.split(6), strict=False):
            different += len(part.unique(dim=0)) == 2
            losses = F.cross_entropy(model(part), of_part, reduction="mean")
            mean = [g.double() for g in torch.autograd.grad(losses, parameters)]
            total = [torch.zeros_like(g) for g in mean] if total is None else total
            total = [a + b for a, b in zip(total, clipped_sum([mean], bound)[1], strict=True)]
        optimizer.step()
        if engine.has_stepped and total is not None:
            assert distance([4 * p.grad for p in parameters], total) <= 1e-5 * length(total)
            total = None
    assert different >= 3  # a row of which all six views are equal has a chance of 1 in 32


REFUSED = {
    "no column 'doctor'": {"privacy_unit_column": "doctor"},
    "row 3 has the owner None": {"data": lambda rows: [*rows[:3], {**rows[3], "patient": None}, *rows[4:]]},
    "row 3 one of type int": {"data": lambda rows: [*rows[:3], {**rows[3], "patient": 7}, *rows[4:]]},
    "row 0 has several owners": {"data": lambda rows: [{**row, "patient": ["a", "b"]} for row in rows]},
    "a unit may have 6 rows": {"rows_per_unit": 6},
    "exceeds the 9 training persons": {"expected_batch_size": 10},
    "clipped together only where draws choose persons": {"rows_per_unit": 2, "max_examples_per_person": 2},
    "not smaller than 1/N": {"target_delta": 1 / 9},
    "must be at least 1": {"augmentation_multiplicity": 0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_unit_is_refused_before_training(tmp_path, message):
    options = dict(REFUSED[message])
    make = options.pop("data", lambda rows: Dataset.from_list(rows))
    given = {"privacy_unit_column": "patient", "expected_batch_size": 4, "noise_multiplier": 1.0, **options}
    with pytest.raises(ValueError, match=message):
        DPTrainer(build("bert"), arguments(tmp_path, **given), collate, make(owned().to_list())).train()


def test_a_loop_that_hands_over_one_loss_is_told_what_units_need():
    model = convolutional()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Flipped(), batch_size=4)
    options = {
        "module": model,
        "optimizer": optimizer,
        "data_loader": loader,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    with pytest.raises(ValueError, match="engine.backward"):
        PrivacyEngine().make_private(**options, unit_column=[i % 4 for i in range(12)])
    with pytest.raises(ValueError, match="give one owner for each row"):
        PrivacyEngine().make_private(**options, unit_column=[1, 2])
    mechanism = Mechanism(
        sampling=PoissonSampling(4, 4),
        clipping=FlatClipping(1.0),
        noise=IndependentNoise(1.0),
        unit=PrivacyUnit(column="owner"),
    )
    options = {name: options[name] for name in ("module", "optimizer", "data_loader")}
    with pytest.raises(ValueError, match="unit_column="):
        PrivacyEngine().make_private(**options, mechanism=mechanism)
    made = PrivacyEngine().make_private(
        **options, mechanism=mechanism, unit_column=[i % 4 for i in range(12)], loss_reduction="none"
    )
    assert made[-1].sample_rate == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "fast_gradient", "per_sample"])
def test_a_unit_moves_the_sum_by_the_bound_at_most(mode, dtype, request):
    """Random groupings into units of 1 to 50 rows: the sum with all rows, and without those of one unit."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)
    generator, bound = torch.Generator().manual_seed(4), 0.5
    for _ in range(200 if request.config.getoption("--whole-tables") else 20):
        sizes = [int(torch.randint(1, 51, (), generator=generator)) for _ in range(4)]
        ids = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))[
            torch.randperm(sum(sizes), generator=generator)
        ]
        tokens, labels = (
            torch.randint(20, (len(ids), 3), generator=generator),
            torch.randint(4, (len(ids),), generator=generator),
        )

        def summed(kept):
            model.zero_grad()
            with PerExampleClipper(model, bound, mode=mode, self_check=False) as clipper:
                losses = F.cross_entropy(model(tokens[kept]).sum(1).float(), labels[kept], reduction="none")  # noqa: B023
                clipper.backward(losses, unit_ids=ids[kept], into=(sums := clipper.empty_sums()))  # noqa: B023
                return [sums[p].double().clone() for p in trainable(model)]

        left_out = int(torch.randint(4, (), generator=generator))
        moved = distance(summed(ids >= 0), summed(ids != left_out))
        assert 0.9 * bound < moved <= bound * (1 + 1e-6)
