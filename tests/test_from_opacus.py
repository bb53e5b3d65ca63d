"""Names that loops bring from Opacus: they work, or the message says what is called here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dp_transformers
from dp_transformers import LinearSchedule, Mechanism, PoissonSampling, PrivacyEngine, ScheduledNoise
from dp_transformers.mechanism.clipping_functions import AutomaticClipping, FlatClipping

pytestmark = pytest.mark.halved


def loop(engine=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(24, 3), torch.randint(0, 2, (24,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"module": model, "optimizer": optimizer, "data_loader": DataLoader(data, batch_size=8)}
    if "mechanism" not in options:
        options = {"noise_multiplier": 1.5, "max_grad_norm": 0.3, **options}
    engine = engine or PrivacyEngine()
    return engine, *engine.make_private(**given, **options)


def shown(optimizer):
    return optimizer.noise_multiplier, optimizer.max_grad_norm, optimizer.expected_batch_size


def test_the_optimizer_shows_noise_bound_and_batch_size():
    engine, model, optimizer, loader = loop()
    assert shown(optimizer) == (1.5, 0.3, 8)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert shown(optimizer) == (1.5, 0.3, 8)
    assert "noise_multiplier" not in str(optimizer.state_dict())
    engine.detach()
    assert not hasattr(optimizer, "noise_multiplier")


def test_what_is_shown_follows_a_schedule():
    noise = ScheduledNoise(2.0, LinearSchedule(0.5, steps=3))
    mechanism = Mechanism(sampling=PoissonSampling(24, 8), clipping=FlatClipping(0.3), noise=noise, steps=3)
    engine, model, optimizer, loader = loop(mechanism=mechanism)
    for step, (x, y) in enumerate(loader):
        assert optimizer.noise_multiplier == mechanism.at(step).noise_multiplier
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len({round(sigma, 6) for sigma, *_ in engine.history}) == 3


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("grad_sample_mode", "ghost", "clipping_mode"),
        ("wrap_model", False, r"engine.detach\(\)"),
        ("noise_generator", None, "dp_seed"),
        ("secure_mode", True, "secure_rng=True"),
        ("rand_on_empty", True, "weight 0"),
        ("clipping_modus", "ghost", "clipping_mode"),
    ],
)
def test_arguments_of_opacus_are_answered_with_ours(name, value, ours):
    with pytest.raises(TypeError, match=rf"make_private has no argument '{name}'.*{ours}"):
        loop(**{name: value})
    engine = PrivacyEngine()
    target = {"target_epsilon": 3.0, "target_delta": 0.01, "epochs": 1, "max_grad_norm": 1.0}
    with pytest.raises(TypeError, match=rf"make_private_with_epsilon has no argument '{name}'.*{ours}"):
        engine.make_private_with_epsilon(module=None, optimizer=None, data_loader=None, **target, **{name: value})


def test_clipping_functions_are_named_as_in_the_arguments_of_dptrainer():
    engine, _, optimizer, _ = loop(clipping="auto_s")
    assert engine.privacy_spent(1e-2).mechanism.clipping == AutomaticClipping(optimizer.max_grad_norm)
    with pytest.raises(ValueError, match=r"clipping 'per_layer' is unknown.*PerLayerClipping"):
        loop(clipping="per_layer")
    with pytest.raises(ValueError, match="clipping, .* is given beside a mechanism"):
        mechanism = engine.privacy_spent(1e-2).mechanism
        loop(mechanism=mechanism, clipping="auto_s")


def test_engines_of_opacus_are_made_anew():
    with pytest.raises(TypeError, match=r"PrivacyEngine has no argument 'secure_mode'.*secure_rng=True"):
        PrivacyEngine(secure_mode=True)
    for args, kwargs in (
        ((nn.Linear(2, 2),), {"sample_rate": 0.1}),
        ((), {"module": None}),
        ((), {"max_grad_norm": 1}),
    ):
        with pytest.raises(TypeError, match=r"PrivacyEngine has no argument '(module|max_grad_norm)'.*make_private\("):
            PrivacyEngine(*args, **kwargs)


@pytest.mark.parametrize(("name", "instead"), [("prv", "'pld' computes what 'prv' does"), ("gdp", "below the true")])
def test_accountants_of_opacus(name, instead):
    with pytest.raises(ValueError, match=instead):
        PrivacyEngine(accountant=name)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("BatchMemoryManager", "max_physical_batch_size"), ("GradSampleModule", "PerExampleClipper"), ("DPLightningDataModule", "configure_optimizers")],
)  # fmt: skip
def test_names_of_opacus_say_what_does_it_here(name, ours):
    with pytest.raises(ImportError, match=ours):
        exec(f"from dp_transformers import {name}")
    with pytest.raises(AttributeError):
        dp_transformers.NothingOfTheKind  # noqa: B018


@pytest.mark.parametrize(("name", "ours"), [("get_compatible_module", "fix"), ("is_compatible", "is_valid"), ("get_privacy_spent", "get_epsilon"), ("attach", "make_private")])  # fmt: skip
def test_methods_of_opacus_say_what_does_it_here(name, ours):
    for holder in (PrivacyEngine, PrivacyEngine()):
        with pytest.raises(AttributeError, match=rf"PrivacyEngine.{name} is of Opacus.*{ours}\("):
            getattr(holder, name)


def test_a_batch_memory_manager_left_in_the_loop():
    *_, loader = loop()
    with pytest.raises(AttributeError, match="BatchMemoryManager.*max_physical_batch_size"):
        loader.batch_sampler  # noqa: B018


def test_norms_can_be_looked_at_in_a_plain_loop():
    engine, model, _, loader = loop()
    with pytest.raises(ValueError, match="before the first backward pass"):
        _ = engine.clipper.norms
    x, y = next(iter(loader))
    expected = []
    with engine.suspended():
        for a, b in zip(x, y, strict=True):
            grads = torch.autograd.grad(F.cross_entropy(model(a[None]), b[None]), list(model.parameters()))
            expected.append(torch.cat([g.flatten() for g in grads]).norm())
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(engine.clipper.norms, torch.stack(expected))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.out(self.embed(ids)).transpose(1, 2)  # (B, V, T)


def tagging(criterion, reduction="mean"):
    torch.manual_seed(0)
    model, ids, labels = Tagger(), torch.randint(0, 7, (24, 5)), torch.randint(0, 3, (24, 5))
    labels[torch.rand(24, 5) < 0.4] = -100
    labels[3] = -100  # an example without any position
    return PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(TensorDataset(ids, labels), batch_size=8),
        criterion=criterion, loss_reduction=reduction, noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5])], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_criterion_ignores_positions_as_it_does_for_one_example(reduction, weight):
    given = nn.CrossEntropyLoss(reduction=reduction, weight=weight)
    model, optimizer, criterion, loader = tagging(given, reduction)
    for x, y in loader:
        each = F.cross_entropy(model(x), y, reduction="none", weight=weight).detach().sum(1)
        if reduction == "mean":
            each = each / (y != -100).sum(1).clamp(min=1)
        if weight is None:  # what torch makes of one example by itself
            alone = torch.stack([given(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]).nan_to_num()
            torch.testing.assert_close(each, alone.detach())
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        torch.testing.assert_close(loss.detach(), getattr(each, reduction)())
        loss.backward()
        optimizer.step()


def test_that_examples_are_averaged_by_themselves_is_said(caplog):
    dp_transformers.clipping.errors._WARNED.discard(nn.CrossEntropyLoss)
    model, _, criterion, loader = tagging(nn.CrossEntropyLoss())
    for x, y in loader:
        criterion(model(x), y).backward()
        break
    assert caplog.text.count("averaged by themselves") == 1
