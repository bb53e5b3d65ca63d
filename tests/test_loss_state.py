"""What a loss keeps outside of the model: no batch may leave anything there."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from neighbours import Task, assert_bounded, moves, points, train, trainer_for
from torch import nn

from dp_transformers import DPTrainer
from dp_transformers.clipping.conditions import Conditions
from dp_transformers.losses.loss_state import WatchedLoss

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
LONG = 23
ROWS = [*points(LONG), {"x": torch.full((6,), 1e5), "labels": torch.tensor(0)}]
THRESHOLD = 1.1  # of a loss that keeps it in its module


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return {"logits": self.linear(x)}


def losses_of(outputs, labels):
    return F.cross_entropy(outputs["logits"], labels, reduction="none")


def above(losses, threshold):
    """Self-paced: only examples whose loss is above a part of the threshold count."""
    return (losses.detach() > 0.5 * threshold).float() * losses


def followed(losses, threshold):
    return 0.99 * threshold + 0.01 * float(losses.detach().mean())


class InABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("threshold", torch.tensor(1.1))

    def forward(self, outputs, labels):
        losses = losses_of(outputs, labels)
        kept = above(losses, self.threshold)
        self.threshold.copy_(torch.as_tensor(followed(losses, self.threshold)))
        return kept


class InANumber:
    def __init__(self, threshold=1.1):
        self.threshold = threshold

    def __call__(self, outputs, labels):
        losses = losses_of(outputs, labels)
        kept = above(losses, self.threshold)
        self.threshold = self.threshold * 0 + followed(losses, self.threshold)
        return kept

    def losses(self, outputs, labels):
        return self(outputs, labels)


class InAModuleOfIt:
    def __init__(self):
        self.part = InABuffer()

    def __call__(self, outputs, labels):
        return self.part(outputs, labels)


def in_a_closure():
    threshold = 1.1

    def loss(outputs, labels):
        nonlocal threshold
        losses = losses_of(outputs, labels)
        kept, threshold = above(losses, threshold), followed(losses, threshold)
        return kept

    return loss


def in_a_dict():
    kept = {"threshold": 1.1}

    def loss(outputs, labels):
        losses = losses_of(outputs, labels)
        found, kept["threshold"] = above(losses, kept["threshold"]), followed(losses, kept["threshold"])
        return found

    return loss


def in_a_memory():
    seen = []

    def loss(outputs, labels):
        losses = losses_of(outputs, labels)
        threshold = torch.stack(seen).mean() if seen else 1.1
        seen.append(losses.detach().mean())
        return above(losses, threshold)

    return loss


def in_the_module():
    def loss(outputs, labels):
        global THRESHOLD
        losses = losses_of(outputs, labels)
        kept, THRESHOLD = above(losses, THRESHOLD), followed(losses, THRESHOLD)
        return kept

    return loss


def in_a_wrapped_object():
    kept = InANumber()
    return lambda outputs, labels: kept.losses(outputs, labels)


def in_an_attribute():
    def loss(outputs, labels):
        losses = losses_of(outputs, labels)
        kept, loss.threshold = above(losses, loss.threshold), followed(losses, loss.threshold)
        return kept

    loss.threshold = 1.1
    return loss


def in_a_default():
    def loss(outputs, labels, kept=None):
        losses = losses_of(outputs, labels)
        found, kept["threshold"] = above(losses, kept["threshold"]), followed(losses, kept["threshold"])
        return found

    loss.__defaults__ = ({"threshold": 1.1},)
    return loss


def in_a_class():
    class Loss:
        kept = InANumber()

        def __call__(self, outputs, labels):
            return self.losses(outputs, labels)

        def losses(self, outputs, labels):
            return self.kept(outputs, labels)

    return Loss()


def in_a_class_that_it_names():
    class Kept:
        threshold = 1.1

    def loss(outputs, labels):
        losses = losses_of(outputs, labels)
        kept, Kept.threshold = above(losses, Kept.threshold), followed(losses, Kept.threshold)
        return kept

    return loss


def in_a_lambda():
    def change(losses):
        global THRESHOLD
        kept, THRESHOLD = above(losses, THRESHOLD), followed(losses, THRESHOLD)
        return kept

    return lambda outputs, labels: next(change(losses) for losses in [losses_of(outputs, labels)])


PUT_BACK = {
    "number": InANumber,
    "bound method": lambda: InANumber().losses,
    "partial": lambda: functools.partial(InANumber()),
    "closure": in_a_closure,
    "dict": in_a_dict,
    "list": in_a_memory,
    "module variable": in_the_module,
    "closure over an object": in_a_wrapped_object,
    "attribute of a function": in_an_attribute,
    "default argument": in_a_default,
    "object of its class": in_a_class,
    "class that it names": in_a_class_that_it_names,
    "comprehension": in_a_lambda,
}
REFUSED = {
    "buffer": (InABuffer, "loss.threshold"),
    "tensor": (lambda: InATensor(torch.tensor(1.1)), "loss.threshold"),
    "module of an object": (InAModuleOfIt, "loss_part.threshold"),
    "closure over a module": (lambda: in_a_function(InABuffer()), "loss_kept.threshold"),
}


class InATensor(InANumber):
    def __call__(self, outputs, labels):
        losses = losses_of(outputs, labels)
        kept = above(losses, self.threshold)
        self.threshold.mul_(0.99).add_(0.01 * losses.detach().mean())
        return kept


def in_a_function(kept):
    return lambda outputs, labels: kept(outputs, labels)


def task(loss, **options):
    return Task(Net, ROWS, loss=loss, bound=0.5, physical=24, steps=8, expected=12, **options)


@pytest.mark.parametrize("kept", PUT_BACK)
def test_what_a_loss_keeps_is_put_back(kept):
    """Draws without the long example are what they were without it."""
    found = moves("trainer", task(PUT_BACK[kept]()), LONG)
    assert_bounded(found)
    assert any(not drawn for drawn, _ in found)


@pytest.mark.parametrize("kept", REFUSED)
def test_what_a_loss_writes_is_refused(kept):
    make, name = REFUSED[kept]
    with pytest.raises(ValueError, match=f"'{name}' of the model changed"):
        train("trainer", task(make()))


def test_a_loss_is_written_to_between_batches_and_in_evaluation(tmp_path):
    """By its owner, and not by a batch."""
    loss = InANumber()
    trainer = trainer_for(task(loss), str(tmp_path))
    trainer.evaluate(ROWS)
    assert (before := loss.threshold) != 1.1
    trainer.train()
    assert loss.threshold == before
    trainer.evaluate(ROWS)
    assert loss.threshold != before


class WithALoss(DPTrainer):
    threshold = 1.1

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "per_example_loss_func": self.own_losses})
        self.threshold = 1.1

    def own_losses(self, outputs, labels):
        losses = losses_of(outputs, labels)
        kept = above(losses, self.threshold)
        self.threshold = followed(losses, self.threshold)
        return kept


def test_a_loss_that_is_a_method_of_the_trainer(tmp_path):
    trainer = trainer_for(task(None), str(tmp_path), WithALoss)
    trainer.train()
    assert trainer.threshold == 1.1 and trainer.state.global_step == 8


class HoldsAnObject(DPTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "per_example_loss_func": self.own_losses})
        self.kept = InANumber()

    def own_losses(self, outputs, labels):
        return self.kept(outputs, labels)


def test_a_loss_that_keeps_an_object_in_the_trainer(tmp_path):
    trainer = trainer_for(task(None), str(tmp_path), HoldsAnObject)
    trainer.train()
    assert trainer.kept.threshold == 1.1


def with_a_teacher(compiled=False):
    teacher = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval().requires_grad_(False)
    teacher = torch.compile(teacher, backend="eager") if compiled else teacher

    def loss(model, inputs):
        student, labels = model(inputs["x"])["logits"], inputs["labels"]
        with torch.no_grad():
            towards = teacher(inputs["x"]).softmax(1)
        return F.cross_entropy(student, labels, reduction="none") + F.cross_entropy(student, towards, reduction="none")

    return loss


class Focal(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.seen = 0

    def forward(self, outputs, labels):
        self.seen += len(labels)  # is put back
        return self.scale * F.cross_entropy(outputs["logits"], labels, self.weights, reduction="none")


@pytest.mark.parametrize("make", [with_a_teacher, lambda: with_a_teacher(True), Focal, lambda: losses_of])
def test_losses_that_keep_nothing(make):
    assert_bounded(
        moves(
            "trainer",
            replace(task(make()), rows=[*ROWS[:-1], {"x": torch.full((6,), 9.0), "labels": torch.tensor(1)}]),
            LONG,
        )
    )


def test_the_model_that_is_trained_is_watched_by_itself():
    class Whole(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.calls = model, torch.zeros(())

        def forward(self, inputs):
            self.model.linear.calls = 3
            self.calls += 1
            return self.model(inputs)["logits"].sum(1)

    model = Net()
    loss = WatchedLoss(Whole(model), model, conditions := Conditions())
    loss(torch.ones(2, 6))
    with pytest.raises(ValueError, match=r"'loss\.calls'"):
        conditions.require()
    assert model.linear.calls == 3
