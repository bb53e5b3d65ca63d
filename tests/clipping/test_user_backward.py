"""Clipping inside the user's own ``loss.backward()``: no gradient is lost that leaves a module another way than by its
output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import trainable
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PerExampleClipper, PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")


class Gate(nn.Module):
    """It keeps what it had before the activation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(12, 6))

    def forward(self, x):
        self.inner = x @ self.weight
        return self.inner.tanh()


class Bayesian(nn.Module):
    """It keeps a loss of its weights alone."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Parameter(torch.randn(6, 12)), nn.Parameter(torch.zeros(6, 12))

    def forward(self, x):
        self.inner = (self.mean.square() + self.spread.exp() - self.spread).mean(1)
        return x @ self.mean.t()


class Keeps(nn.Linear):
    def __init__(self):
        super().__init__(12, 6)

    def forward(self, x):
        self.inner = super().forward(x)
        return self.inner.tanh()


class Detaches(Keeps):
    def forward(self, x):
        out = super().forward(x)
        self.inner = self.inner.detach()
        return out


class Contained(Keeps):
    """It keeps it in a container, in training alone."""

    def __init__(self, container):
        super().__init__()
        self.container, self.kept = container, container([torch.zeros(6)])

    def forward(self, x):
        out = super().forward(x)
        self.kept = self.container([self.inner if self.training else torch.zeros(6)])
        self.inner = None
        return out


class ReadByParent(nn.Module):
    """What it keeps goes into what its parent returns."""

    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def forward(self, x):
        out = self.gate(x)
        return out + self.gate.inner.square()


class ReadInTraining(ReadByParent):
    def forward(self, x):
        return super().forward(x) if self.training else self.gate(x)


def loop(first, *, physical=None, mode="auto", head=None):
    torch.manual_seed(0)
    model = nn.Sequential(first, head or nn.Linear(6, 3))
    data = TensorDataset(torch.randn(24, 12), torch.arange(24) % 3)
    engine = PrivacyEngine(dp_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), data_loader=DataLoader(data, 8), noise_multiplier=0.0,
        max_grad_norm=1e6, max_physical_batch_size=physical, clipping_mode=mode,
    )  # fmt: skip
    return engine, model, optimizer, loader


@pytest.mark.parametrize("first", [Gate, Bayesian, Keeps])
@pytest.mark.parametrize("mode", ["book_keeping", "per_sample"])
def test_a_gradient_that_leaves_a_module_past_its_output_is_refused(first, mode):
    _, model, optimizer, loader = loop(first(), mode=mode)
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="the loss depends on '0.inner', which a module keeps in an attribute"):
        (F.cross_entropy(model(x), y) + model[0].inner.square().mean()).backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError):
        optimizer.step()


def test_a_part_of_the_model_that_the_loop_calls_is_refused_where_a_gradient_goes_through_it():
    engine, model, optimizer, loader = loop(nn.Linear(12, 6))
    batches = iter(loader)
    x, y = next(batches)
    loss = F.cross_entropy(model(x), y)
    assert model[0](x).requires_grad  # looked at, and not gone back through
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    x, y = next(batches)
    with pytest.raises(ValueError, match=r"'1' .Linear. was called outside.*engine.suspended"):
        F.cross_entropy(model[1](model[0](x)), y).backward()
    with pytest.raises(ValueError, match="was called outside|past its module's call|forward ran outside"):
        (F.cross_entropy(model(x), y) + model[0](x).square().mean()).backward()
    assert all(p.grad is None for p in model.parameters())
    engine.drop_draw()


@pytest.mark.parametrize("container", [list, tuple])
def test_a_gradient_that_leaves_a_module_in_a_container_is_refused(container):
    _, model, optimizer, loader = loop(Contained(container))
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="the loss depends on '0.kept"):
        (F.cross_entropy(model(x), y) + model[0].kept[0].square().mean()).backward()
    with pytest.raises(ValueError):
        optimizer.step()


@pytest.mark.parametrize("first", [Gate, Keeps, Detaches])
def test_what_is_kept_may_be_looked_at(first):
    engine, model, optimizer, loader = loop(first())
    for x, y in loader:
        (F.cross_entropy(model(x), y) + 0 * model[0].inner.detach().mean()).backward()
        optimizer.step()
    assert engine.steps == 3


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 6)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False).tanh()


class Borrowed(nn.Module):
    """One weight used twice, one not at all, one frozen."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.idle = nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(2, 2)
        self.out = nn.Linear(12, 6).requires_grad_(False)

    def forward(self, x):
        return self.out(self.norm(self.layer(self.layer(x).tanh())))


@pytest.mark.parametrize("first", [Gate, Keeps, Checkpointed, Borrowed, ReadByParent, ReadInTraining])
@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("mode", ["book_keeping", "per_sample"])
def test_sums_are_those_of_the_loss(first, physical, mode):
    engine, model, optimizer, loader = loop(first(), physical=physical, mode=mode)
    trained = trainable(model)
    for _ in range(3):
        wanted = [torch.zeros_like(p) for p in trained]
        for x, y in loader:
            with engine.suspended():
                loss = F.cross_entropy(model(x), y, reduction="sum")
                found = torch.autograd.grad(loss, trained, allow_unused=True)
            wanted = [w if g is None else w + g for w, g in zip(wanted, found, strict=True)]
            (F.cross_entropy(model(x), y) if len(x) else model(x).sum()).backward()
            steps = engine.steps
            optimizer.step()
            if engine.steps > steps:
                for p, w in zip(trained, wanted, strict=True):
                    torch.testing.assert_close(p.grad * 8, w, rtol=1e-4, atol=1e-5)
                wanted = [torch.zeros_like(p) for p in trained]


class WithLoss(nn.Module):
    """It returns a loss beside its scores, as models of transformers do where they are given labels."""

    def __init__(self, loss):
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(4, 5), nn.Linear(5, 3), loss

    def forward(self, x, labels):
        scores = self.head(self.body(x).tanh())
        return {"loss": self.loss(scores, labels), "scores": scores}


def tokens(scores, labels):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def planes(scores, labels):
    return F.cross_entropy(scores.transpose(1, 2), labels)


def weighted(scores, labels):
    return F.cross_entropy(scores[:, 0], labels[:, 0], weight=torch.tensor([1.0, 9.0, 1.0]))


def train_with_loss(loss, ignored, *, reads="loss", reduction="mean"):
    """Three steps on rows of which each has so many positions that are ignored."""
    torch.manual_seed(0)
    model = WithLoss(loss)
    labels = torch.randint(3, (24, 3)).masked_fill(torch.arange(3) >= 3 - torch.tensor(ignored * 8)[:, None], -100)
    engine = PrivacyEngine(dp_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(TensorDataset(torch.randn(24, 3, 4), labels), 8),
        noise_multiplier=1.0, max_grad_norm=1.0, loss_reduction=reduction,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x, y)
        (output["loss"] if reads == "loss" else output["scores"].square().mean()).backward()
        optimizer.step()
    return engine


@pytest.mark.parametrize(("loss", "ignored"), [(tokens, [0, 1, 2]), (planes, [0, 1, 2]), (weighted, [0, 0, 0])])
def test_a_models_mean_in_which_examples_have_different_weights_is_refused(loss, ignored):
    with pytest.raises(ValueError, match=r"a mean over all targets.*find_example_losses.*criterion=.*\(B,\)"):
        train_with_loss(loss, ignored)


def test_a_mean_is_looked_at_in_every_pass(monkeypatch):
    """Also where nothing else is, before the sum is released."""
    monkeypatch.setattr(PerExampleClipper, "_takes_look", lambda self: False)
    with pytest.raises(ValueError, match="a mean over all targets"):
        train_with_loss(tokens, [0, 1, 2])
    assert train_with_loss(tokens, [1, 1, 1]).steps == 3


@pytest.mark.parametrize(
    ("loss", "ignored", "options"),
    [
        (tokens, [0, 0, 0], {}),
        (planes, [1, 1, 1], {}),  # as the last position of a language model
        (lambda s, y: F.mse_loss(s, y[..., None].float().expand_as(s)) + F.cross_entropy(s[:, 0], y[:, 0]), [0, 0, 0], {}),
        (lambda s, y: F.binary_cross_entropy_with_logits(s[..., 0], (y > 0).float()), [0, 0, 0], {}),
        (lambda s, y: F.cross_entropy(s.flatten(0, 1), y.flatten(), reduction="sum"), [0, 1, 2], {"reduction": "sum"}),
        (tokens, [0, 1, 2], {"reads": "scores"}),
    ],
    ids=["tokens", "equal counts", "a sum of two", "bce", "sum", "not differentiated"],
)  # fmt: skip
def test_a_models_mean_of_equal_weights_is_not_refused(loss, ignored, options):
    assert train_with_loss(loss, ignored, **options).steps == 3
