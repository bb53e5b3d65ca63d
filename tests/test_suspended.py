"""Backward passes that are not private, through a private model: a GAN's generator, adversarial inputs, saliency."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PerExampleClipper, PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
N, WIDTH, NOISE, BOUND = 24, 6, 3, 0.1


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.score = nn.Linear(WIDTH, 5), nn.Linear(5, 1)
        self.seen: list = []

    def forward(self, x):
        return self.score(torch.tanh(self.features(x))).squeeze(-1)


def loop(*, sigma=0.0, physical=None, loss_reduction="none", mode="auto", batch_size=8):
    torch.manual_seed(0)
    model, generator = Discriminator(), nn.Linear(NOISE, WIDTH)
    data = TensorDataset(torch.randn(N, WIDTH))
    engine = PrivacyEngine(dp_seed=1)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=DataLoader(data, batch_size=batch_size),
        noise_multiplier=sigma, max_grad_norm=BOUND, loss_reduction=loss_reduction, max_physical_batch_size=physical, clipping_mode=mode,
    )  # fmt: skip
    return engine, model, optimizer, loader, generator, torch.optim.SGD(generator.parameters(), lr=0.5)


def losses_of(model, x):
    return F.softplus(-model(x))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(*, generator_steps, **options):
    engine, model, optimizer, loader, generator, generator_optimizer = loop(**options)
    start, before = flat(model), flat(generator)
    for (x,) in loader:
        optimizer.zero_grad()
        if options.get("loss_reduction") == "mean":
            losses_of(model, x).mean().backward()
        else:
            engine.backward(losses_of(model, x))
        optimizer.step()
        for _ in range(generator_steps):
            with engine.suspended():
                generator_optimizer.zero_grad()
                losses_of(model, generator(torch.randn(7, NOISE))).mean().backward()
                assert all(p.grad is not None for p in model.parameters())
            generator_optimizer.step()
    return start, flat(model), not torch.equal(before, flat(generator)), engine


@pytest.mark.parametrize(
    "options",
    [{}, {"loss_reduction": "mean"}, {"mode": "ghost"}, {"mode": "per_sample"}, {"physical": 3}, {"sigma": 1.0}],
    ids=str,
)
def test_a_generator_is_trained_and_the_discriminator_is_not_told(options):
    start, with_generator, generator_moved, engine = train(generator_steps=2, **options)
    _, without, *_ = train(generator_steps=0, **options)
    assert generator_moved and not torch.equal(start, with_generator)
    assert torch.equal(with_generator, without), "the generator's steps must leave nothing in the private model"
    assert engine.steps == 3


def test_the_generator_s_gradient_is_that_of_an_ordinary_model():
    engine, model, optimizer, loader, generator, _ = loop()
    x = next(iter(loader))[0]
    engine.backward(losses_of(model, x))
    optimizer.step()
    z, plain = torch.randn(7, NOISE), copy.deepcopy(model)
    with engine.suspended():
        losses_of(model, generator(z)).mean().backward()
    expected = torch.autograd.grad(losses_of(plain, generator(z)).mean(), generator.weight)[0]
    torch.testing.assert_close(generator.weight.grad, expected)


def test_saliency_and_parts_of_the_model():
    engine, model, *_ = loop()
    x = torch.randn(3, WIDTH, requires_grad=True)
    with engine.suspended():
        (saliency,) = torch.autograd.grad(model(x).sum(), x)
        model.features(x).sum().backward()
    assert saliency.shape == x.shape and all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match=r"with engine.suspended\(\)"):
        model.features(x).sum().backward()


def test_the_clipped_sum_outlives_the_block():
    """Autograd adds to p.grad in place, where no sum is."""
    engine, model, optimizer, loader, generator, _ = loop()
    start, x = flat(model), next(iter(loader))[0]
    engine.backward(losses_of(model, x))
    sums = engine.clipped_sums().values()
    with engine.suspended():
        (1000 * losses_of(model, generator(torch.randn(7, NOISE))).mean()).backward()
    assert all(map(torch.equal, engine.clipped_sums().values(), sums))
    optimizer.step()
    expected = torch.cat([s.flatten() for s in sums]) / 8
    torch.testing.assert_close(flat(model), start - 0.5 * expected)


def stepped(model, generator_optimizer, optimizer, how):
    if how == "the private optimizer":
        optimizer.step()
    elif how == "another optimizer":
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    elif how == "one of both":
        torch.optim.SGD([*generator_optimizer.param_groups[0]["params"], *model.parameters()], lr=1.0).step()
    elif how == "by hand":
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad
    elif how == "a buffer":
        model.register_buffer("kept", next(model.parameters()).grad.clone())
    elif how == "an attribute":
        model.seen.append(next(model.parameters()).grad.clone())


@pytest.mark.parametrize("at", ["before backward", "after backward", "after the step"])
@pytest.mark.parametrize("how", ["the private optimizer", "another optimizer", "one of both", "by hand"])
def test_no_raw_gradient_is_stepped_with(how, at):
    engine, model, optimizer, loader, _, generator_optimizer = loop()
    x = next(iter(loader))[0]
    if at != "before backward":
        engine.backward(losses_of(model, x))
    if at == "after the step":
        optimizer.step()
    before = flat(model)
    with pytest.raises(ValueError), engine.suspended():
        losses_of(model, x).sum().backward()  # of private examples
        stepped(model, generator_optimizer, optimizer, how)
    if how != "by hand":  # that is seen when it is done
        assert torch.equal(flat(model), before)
    if at == "after backward":
        before = flat(model)
        torch.optim.SGD(model.parameters(), lr=1.0).step()  # there is no gradient to step with
        assert torch.equal(flat(model), before)
        return
    with pytest.raises(ValueError):
        optimizer.step()


@pytest.mark.parametrize("how", ["a buffer", "an attribute"])
def test_what_private_examples_leave_in_the_model_is_put_back(how):
    engine, model, optimizer, loader, _, generator_optimizer = loop()
    x = next(iter(loader))[0]
    with engine.suspended():
        losses_of(model, x).sum().backward()
        stepped(model, generator_optimizer, optimizer, how)
    assert model.seen == [] and not list(model.buffers())


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_losses_stay_on_their_side_of_the_block(reduction):
    engine, model, _, loader, *_ = loop(loss_reduction=reduction)
    x = next(iter(loader))[0]

    def made_inside():
        with engine.suspended():
            return losses_of(model, x)

    with pytest.raises(ValueError):
        made_inside().sum().backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError):
        engine.backward(made_inside())
    assert all(p.grad is None for p in model.parameters())
    outside = losses_of(model, x)
    with pytest.raises(ValueError, match="earlier forward pass"), engine.suspended():
        outside.mean().backward()
    assert all(p.grad is None for p in model.parameters())
    both = made_inside() + losses_of(model, x)
    with pytest.raises(ValueError):
        both.mean().backward() if reduction == "mean" else engine.backward(both)
    assert all(p.grad is None for p in model.parameters())


def test_an_error_in_the_block_leaves_the_loop_as_it_was():
    engine, model, optimizer, loader, *_ = loop()
    x = next(iter(loader))[0]
    with pytest.raises(ZeroDivisionError), engine.suspended():
        losses_of(model, x).sum().backward()
        raise ZeroDivisionError
    assert all(p.grad is None for p in model.parameters())
    engine.backward(losses_of(model, x))
    optimizer.step()


def test_a_clipper_by_itself():
    torch.manual_seed(0)
    model, x = Discriminator(), torch.randn(5, WIDTH)
    with PerExampleClipper(model, BOUND) as clipper:
        clipper.backward(losses_of(model, x))
        sums = [p.grad.clone() for p in model.parameters()]
        with clipper.suspended():
            losses_of(model, 10 * x).sum().backward()
        assert all(torch.equal(p.grad, s) for p, s in zip(model.parameters(), sums, strict=True))
        with pytest.raises(ValueError, match=r"of a PerExampleClipper: clipper.suspended\(\)"):
            losses_of(model, x).sum().backward()
