"""Losses that begin to compare the rows of a batch after the first steps, in both loops."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from neighbours import Task, assert_bounded, moves, points, train
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from dp_transformers import PrivacyEngine
from dp_transformers.clipping.checks.rare_looks import RareLooks
from dp_transformers.losses.loss_checks import OFTEN, RATE, RATE_OF_MODELS

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
REFUSED = "the loss compares them"
BOUND, SIZE = 0.4, 8


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(6, 8)

    def forward(self, x):
        return {"logits": self.scores(x)}


def contrast(z):
    """How near each row is to the next one among all others."""
    unit = F.normalize(z, dim=1)
    near = unit @ unit.T / 0.1 - 1e9 * torch.eye(len(z))
    return F.cross_entropy(near, (torch.arange(len(z)) + 1) % len(z), reduction="none")


def cross_entropy(outputs, labels):
    return F.cross_entropy(outputs["logits"], labels, reduction="none")


class Warms(nn.Module):
    """Cross-entropy, and from its ``at``-th batch on a contrast. It counts outside of itself, as a callback does."""

    def __init__(self, at):
        super().__init__()
        self.reduction, self.is_warm = "mean", at

    def forward(self, z, labels):
        each = F.cross_entropy(z[:, :3], labels, reduction="none")
        each = each + contrast(z) if self.is_warm() else each
        return each.mean() if self.reduction == "mean" else each


@pytest.mark.parametrize("at", [3, 5, 7])
def test_a_loss_of_the_trainer(at):

    class Counts(TrainerCallback):
        step = 0

        def on_step_begin(self, args, state, control, **kwargs):
            self.step = state.global_step

    counts = Counts()

    def counted(outputs, labels):
        return criterion(outputs["logits"], labels)

    criterion = Warms(lambda: counts.step >= at)
    criterion.reduction = "none"
    task = Task(Scores, points(SIZE), loss=counted, bound=BOUND, physical=SIZE, steps=12, callbacks=[counts])
    with pytest.raises(ValueError, match=REFUSED):
        train("trainer", task)


@pytest.mark.parametrize("at", [3, 5, 7, 30])
def test_a_criterion(at):
    model, rows, steps = nn.Linear(6, 8), points(SIZE), []
    engine, criterion = PrivacyEngine(dp_seed=5), Warms(lambda: len(steps) >= at)
    loader = DataLoader([(row["x"], row["labels"]) for row in rows], SIZE)
    model, optimizer, criterion, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=loader, criterion=criterion,
        noise_multiplier=1.0, max_grad_norm=BOUND,
    )  # fmt: skip
    with pytest.raises(ValueError, match=REFUSED):
        for _ in range(400):
            for x, labels in loader:
                optimizer.zero_grad()
                criterion(model(x), labels).backward()
                optimizer.step()
                steps.append(1)
    assert len(steps) < at + 150
    engine.drop_draw()
    engine.detach()


def test_what_compares_nothing_goes_on():
    task = Task(Scores, points(SIZE), loss=cross_entropy, bound=BOUND,
                physical=3, steps=4)  # fmt: skip
    assert_bounded(moves("trainer", task, 2))


@pytest.mark.parametrize(("often", "rate", "share"), [(OFTEN, RATE, 0.035), (0, RATE_OF_MODELS, 0.02)])
def test_how_often_it_is_looked_at(often, rate, share):
    looks = RareLooks(rate, often)
    due = [i for i in range(1, 10_001) if looks.is_due()]
    assert due[:often] == list(range(1, often + 1))
    assert max(b - a for a, b in pairwise(due)) < 10 / rate  # no gap is long
    assert len([i for i in due if 20 < i <= 1000]) <= share * 980
