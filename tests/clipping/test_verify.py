"""The canary and the self-check: planted faults are caught, random state and gradients are left alone, nothing private is used."""

import pytest
import torch
import torch.nn.functional as F
from models import SHORT, batch_for, build, losses_function
from torch import nn

from dp_transformers import PerExampleClipper, check_model
from dp_transformers.clipping import rules
from dp_transformers.clipping.terms import Outer
from dp_transformers.clipping.verify import SelfCheckError, synthetic_inputs


class Bypass(nn.Module):
    """Uses a weight functionally, outside the forward of the module that owns it."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.other(x) + F.linear(x, self.linear.weight) + 0 * self.linear(x)


class MixesBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return torch.tanh(self.linear(x) - 0.1 * self.linear(x).mean(0))


class DropsBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return torch.tanh(self.linear(x.mean(0))) * x


class BatchNormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False, track_running_stats=False)

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "fast_gradient", "per_sample"])
def test_parameter_read_past_its_module_is_answered_for_by_the_parent(mode):
    model = Bypass()
    report = check_model(model, {"x": torch.randn(4, 5)}, mode=mode)
    assert max(report.norm_error, report.sum_error) <= 1e-5
    assert isinstance(model.linear._parameters["weight"], nn.Parameter)


def test_parameter_that_escapes():
    model = Bypass()

    def loss(x):
        return model(x).sum(1) + model.linear.weight.sum()

    for _ in range(2):  # a failed check does not count as one
        with pytest.raises(SelfCheckError, match=r"'linear.weight' of Linear is used where no module sees it"):
            check_model(model, {"x": torch.randn(4, 5)}, loss_function=loss)
    assert isinstance(model.linear._parameters["weight"], nn.Parameter)


@pytest.mark.parametrize("model", [MixesBatch, BatchNormalised])
@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_examples_that_influence_each_other(model, mode):
    with pytest.raises(SelfCheckError, match="another example"):
        check_model(model(), {"x": torch.randn(6, 5)}, mode=mode)


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_a_layer_that_drops_the_batch(mode):
    with pytest.raises(ValueError, match="mixes examples"):
        check_model(DropsBatch(), {"x": torch.randn(6, 5)}, mode=mode)


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "fast_gradient", "per_sample"])
def test_rule_that_is_wrong_by_a_percent(monkeypatch, mode):
    right = rules._RULES[nn.Linear.forward]

    def wrong(module, activations, backprops):
        return {p: Outer(1.01 * t.left, t.right) if isinstance(t, Outer) else t for p, t in right(module, activations, backprops).items()}

    monkeypatch.setitem(rules._RULES, nn.Linear.forward, wrong)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    with pytest.raises(SelfCheckError, match="not exact"):
        PerExampleClipper(model, 1.0, mode=mode).model(torch.randn(4, 3, 5))


def test_norm_cached_across_batches(monkeypatch):
    right, seen = rules._RULES[nn.Linear.forward], {}

    def stale(module, activations, backprops):
        terms = right(module, activations, backprops)
        key = (id(module), len(backprops))
        return seen.setdefault(key, terms)

    monkeypatch.setitem(rules._RULES, nn.Linear.forward, stale)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    clipper = PerExampleClipper(model, 1.0)
    stale_batch = torch.randn(3, 4, 5)
    clipper.checked = True
    clipper.backward(model(stale_batch).sum((1, 2)))
    clipper.checked = False
    with pytest.raises(SelfCheckError):
        model(torch.randn(6, 4, 5))


def test_leaves_random_state_gradients_and_training_mode_alone():
    model = build("bert", dropout=0.1)
    batch = batch_for("bert", SHORT)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.bert.encoder.eval()
    modes = [m.training for m in model.modules()]
    state = torch.random.get_rng_state()
    clipper = PerExampleClipper(model, 0.7)
    with torch.no_grad():
        model(batch["input_ids"])
    assert not clipper.checked  # evaluation is not what is checked
    losses_function(model)(batch)
    assert clipper.checked
    assert clipper.max_grad_norm == 0.7
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    torch.random.set_rng_state(state)
    expected = torch.rand(3)
    torch.random.set_rng_state(state)
    clipper.detach()
    model.eval()
    PerExampleClipper(model, 0.7).model(batch["input_ids"])
    assert torch.equal(torch.rand(3), expected)


def test_synthetic_input_has_the_shape_but_nothing_of_the_content():
    model, batch = build("bert"), batch_for("bert", SHORT)
    batch["pixels"] = torch.full((5, 2, 2), 7.0)
    _, made = synthetic_inputs(model, (), batch)
    assert made["input_ids"].shape[1] == SHORT
    assert made["input_ids"].dtype == torch.long
    assert made["input_ids"].max() < 1000
    assert len({len(x) for x in made.values()}) == 1
    assert len(made["input_ids"]) not in (SHORT, 5, 2) or len(made["input_ids"]) == 3
    assert torch.equal(made["attention_mask"], batch["attention_mask"][torch.arange(len(made["attention_mask"])) % 5])
    assert (made["pixels"] != 7).all()
    torch.manual_seed(1)
    first = synthetic_inputs(model, (), batch)[1]
    batch["input_ids"] = batch["input_ids"].flip(0).clamp(min=2)
    torch.manual_seed(1)
    assert torch.equal(synthetic_inputs(model, (), batch)[1]["input_ids"], first["input_ids"])


def test_report_and_log(caplog):
    model, batch = build("gpt2"), batch_for("gpt2", SHORT)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    report = check_model(model, inputs)
    assert max(report.norm_error, report.sum_error) < 1e-5
    assert report.locality_error == 0
    assert not model._forward_hooks
    with caplog.at_level("INFO"):
        PerExampleClipper(model, 1.0)
        model(**inputs)
    assert "self-check passed in" in caplog.text


def test_batch_of_one_is_not_enough():
    with pytest.raises(ValueError, match="at least two"):
        check_model(nn.Linear(3, 2), {"input": torch.randn(1, 3)})


def test_a_rule_behind_a_weight_that_starts_at_zero_is_checked(monkeypatch):
    right = rules._RULES[nn.Linear.forward]

    def wrong(module, activations, backprops):
        return {p: Outer(0.5 * t.left, t.right) if module.out_features == 7 and isinstance(t, Outer) else t
                for p, t in right(module, activations, backprops).items()}  # fmt: skip

    monkeypatch.setitem(rules._RULES, nn.Linear.forward, wrong)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 2))
    nn.init.zeros_(model[1].weight)
    with pytest.raises(SelfCheckError, match="not exact"):
        PerExampleClipper(model, 1.0).model(torch.randn(4, 3, 5))
    assert (model[1].weight == 0).all()


class OnlyInTraining(nn.Module):
    """Mixes the batch in train mode only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        x = self.linear(x)
        return torch.tanh(x - x.mean(0)) if self.training else torch.tanh(x)


@pytest.mark.parametrize(
    "model", [OnlyInTraining, lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 2))]
)
def test_what_happens_only_in_training_is_seen(model):
    with pytest.raises(SelfCheckError, match="another example|keep private data"):
        check_model(model(), {"x" if model is OnlyInTraining else "input": torch.randn(6, 5)})


@pytest.mark.parametrize(
    "module", [lambda: nn.Embedding(9, 5, max_norm=0.1).requires_grad_(False), lambda: nn.InstanceNorm1d(3, track_running_stats=True)]
)
def test_frozen_state_that_moves_is_refused_and_put_back(module):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.head = module(), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.part(x))

    model = Model()
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    x = torch.randint(0, 9, (4, 3)) if isinstance(model.part, nn.Embedding) else torch.randn(4, 3, 5)
    with pytest.raises(SelfCheckError, match=r"'part\..*changes in the forward pass"):
        PerExampleClipper(model, 1.0).model(x)
    assert all(torch.equal(v, buffers[k]) for k, v in model.named_buffers())
