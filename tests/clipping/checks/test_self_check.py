"""The canary and the self-check: planted faults are caught, random state and gradients are left alone, nothing private
is used."""

import re
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layers import Attends, scale_linear_rule
from models import SHORT, batch_for, build, losses_function
from oracle import assert_exact_in_modes
from torch import nn
from transformers import (
    BatchEncoding,
)
from transformers.utils import ModelOutput

from dp_transformers import (
    FlatClipping,
    PerExampleClipper,
    PerLayerClipping,
    check_model,
    check_per_sample_gradients_are_correct,
)
from dp_transformers.clipping import engine, layer_rule
from dp_transformers.clipping.checks.reference import perturbed
from dp_transformers.clipping.checks.synthetic import synthetic_inputs
from dp_transformers.clipping.errors import SelfCheckError, UnsupportedModuleError
from dp_transformers.clipping.gradient_sums import GradientSums
from dp_transformers.clipping.layer_rule import LayerRule, rule_for
from dp_transformers.clipping.terms import Dense


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
        with pytest.raises(
            SelfCheckError, match=r"'linear.weight' of Linear is used outside of every module that returns"
        ):
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
    scale_linear_rule(monkeypatch, lambda module, backprops: 1.01)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    with pytest.raises(SelfCheckError, match="not exact"):
        PerExampleClipper(model, 1.0, mode=mode).model(torch.randn(4, 3, 5))


def test_norm_cached_across_batches(monkeypatch):
    right, seen = rule_for(nn.Linear(1, 1)).terms, {}

    def stale(module, activations, backprops):
        terms = right(module, activations, backprops)
        key = (id(module), len(backprops))
        return seen.setdefault(key, terms)

    monkeypatch.setitem(layer_rule._RULES, nn.Linear.forward, LayerRule(stale))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    clipper = PerExampleClipper(model, 1.0)
    stale_batch = torch.randn(3, 4, 5)
    clipper.checked = True
    clipper._engine.backward(model(stale_batch).sum((1, 2)))
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
    ids = batch["input_ids"]
    batch["input_ids"] = torch.where(ids == 0, 0, ids.flip(0).clamp(min=2))  # other words
    torch.manual_seed(1)
    assert torch.equal(synthetic_inputs(model, (), batch)[1]["input_ids"], first["input_ids"])


def test_synthetic_ids_have_a_meaning_where_the_given_ones_have_it():
    model, rows = build("bert"), range(3)
    model.config.eos_token_id, model.config.image_token_index = [7, 9], 11
    ids = torch.tensor([[3, 11, 11, 5, 7, 0], [3, 11, 5, 9, 0, 0]])
    for _ in range(20):
        made = synthetic_inputs(model, (), {"input_ids": ids}, 3)[1]["input_ids"]
        named = torch.isin(ids, torch.tensor([7, 9, 11]))[[0, 1, 0]]
        assert torch.equal(made[named], ids[[0, 1, 0]][named]) and not torch.isin(made[~named], ids[named[:2]]).any()
    assert all((made[i] != ids[i % 2]).any() for i in rows)
    model.config.vocab_size = 2  # fewer words than ids that are named
    assert synthetic_inputs(model, (), {"input_ids": torch.zeros(2, 4).long()})[1]["input_ids"].max() < 2


def test_synthetic_boxes_lie_on_the_page_and_shapes_stay():
    model = build("bert")
    model.config.max_2d_position_embeddings = 50
    batch = {"bbox": torch.full((3, 40, 4), 7), "spatial_shapes": torch.tensor([[2, 3], [3, 2], [1, 6]])}
    made = synthetic_inputs(model, (), batch, 3)[1]
    boxes = made["bbox"]
    assert (boxes[..., 2:] >= boxes[..., :2]).all() and boxes.min() >= 0 and boxes.max() in range(40, 50)
    assert torch.equal(made["spatial_shapes"], batch["spatial_shapes"])


def test_report_and_log(caplog):
    model, batch = build("gpt2"), batch_for("gpt2", SHORT)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    report = check_model(model, inputs)
    assert max(report.norm_error, report.sum_error) < 1e-5
    assert report.locality_error < 1e-6
    assert not model._forward_hooks
    with caplog.at_level("INFO"):
        PerExampleClipper(model, 1.0)
        model(**inputs)
    assert "self-check passed in" in caplog.text


def test_batch_of_one_is_not_enough():
    with pytest.raises(ValueError, match="at least two"):
        check_model(nn.Linear(3, 2), {"input": torch.randn(1, 3)})


def test_a_rule_behind_a_weight_that_starts_at_zero_is_checked(monkeypatch):
    scale_linear_rule(monkeypatch, lambda module, backprops: 0.5 if module.out_features == 7 else 1.0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 2))
    nn.init.zeros_(model[1].weight)
    with pytest.raises(SelfCheckError, match="not exact"):
        PerExampleClipper(model, 1.0).model(torch.randn(4, 3, 5))
    assert (model[1].weight == 0).all()


class Squeezes(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(5, width)

    def forward(self, x):
        return self.linear(x[:, None]).squeeze()


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
@pytest.mark.parametrize(
    ("width", "dims"), [(1, "1 dimensions for 6 examples and 0"), (3, "2 dimensions for 6 examples and 1")]
)
def test_a_batch_of_one_that_is_squeezed(width, dims, mode):
    model = Squeezes(width)
    with pytest.raises(SelfCheckError, match=rf"{dims} for one: squeeze\(\)"):
        check_model(model, {"x": torch.randn(6, 5)}, mode=mode)


def test_a_batch_of_one_that_is_squeezed_before_the_loss():
    model = Squeezes(3)
    with pytest.raises(SelfCheckError, match=r"1 for one: squeeze\(\)"):
        check_model(
            model,
            {"x": torch.randn(6, 5)},
            loss_function=lambda x: F.cross_entropy(model(x), torch.ones(len(x)).long(), reduction="none"),
        )


class Encodes(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.emb, self.part, self.head = nn.Linear(4, 8), part, nn.Linear(8, 2)

    def forward(self, x):
        x = self.emb(x)
        x = self.part(x, x, x) if isinstance(self.part, nn.MultiheadAttention) else self.part(x)
        return self.head(x[0] if isinstance(x, tuple) else x)


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "per_sample"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda **options: nn.MultiheadAttention(8, 2, **options), "'part' (MultiheadAttention)"),
     (lambda **options: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, **options), "'part.self_attn' (MultiheadAttention)"),
     (lambda **options: nn.GRU(8, 8, **options), "'part' (GRU)")],
)  # fmt: skip
@pytest.mark.parametrize("frozen", [False, True])
def test_batch_first_that_was_forgotten(make, name, mode, frozen):
    with pytest.raises(SelfCheckError, match=re.escape(name) + r".*batch_first=True"):
        PerExampleClipper(Encodes(make().requires_grad_(not frozen)), 1.0, mode=mode).model(torch.randn(4, 6, 4))
    PerExampleClipper(Encodes(make(batch_first=True).requires_grad_(not frozen)), 1.0, mode=mode).model(
        torch.randn(4, 6, 4)
    )


@pytest.mark.parametrize("kind", [dict, UserDict, BatchEncoding, OrderedDict])
def test_a_batch_as_collators_give_it(kind):
    batch = kind(batch_for("bert", SHORT))
    assert check_model(build("bert"), batch).sum_error < 1e-5


@dataclass
class Output:
    logits: torch.Tensor
    hidden: UserDict
    name: str = "?"


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(5, 3), kind

    def forward(self, x):
        y = self.linear(x)
        if self.kind == "dataclass":
            return Output(y, UserDict({"hidden": torch.tanh(y)}))
        if self.kind == "mapping":
            return UserDict({"logits": y})
        if self.kind == "object":
            return SimpleNamespace(logits=y)
        return ModelOutput(logits=y) if self.kind == "ModelOutput" else y.mean()


@pytest.mark.parametrize("kind", ["dataclass", "mapping", "ModelOutput"])
def test_outputs_that_are_looked_into(kind):
    report = check_model(Returns(kind), {"x": torch.randn(4, 5)})
    assert max(report.norm_error, report.sum_error) < 1e-5


@pytest.mark.parametrize(("kind", "name"), [("object", "SimpleNamespace"), ("scalar", "Tensor")])
def test_outputs_without_examples(kind, name):
    with pytest.raises(
        SelfCheckError, match=f"Returns returns {name}, in which there is no tensor of floating-point.*loss_function"
    ):
        check_model(Returns(kind), {"x": torch.randn(4, 5)})


def test_an_output_whose_rows_are_positions():
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(5, 5))
    with pytest.raises(
        SelfCheckError, match=r"Sequential returns a tensor of shape \(18, 5\) for 3 examples.*loss_func"
    ):
        check_model(model, torch.randn(4, 6, 5))


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
    "module",
    [
        lambda: nn.Embedding(9, 5, max_norm=0.1).requires_grad_(False),
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
    ],
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


def test_per_sample_gradients_are_correct(caplog):
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    with caplog.at_level("INFO"):
        assert check_per_sample_gradients_are_correct(torch.randn(4, 3, 5), model)
    for mode in ("book_keeping", "ghost", "fast_gradient", "per_sample"):
        assert f"mode {mode}: worst relative error of per-example gradients" in caplog.text
    assert not model._forward_hooks
    assert check_per_sample_gradients_are_correct(
        {"ids": torch.stack([torch.randperm(9)[:3] for _ in range(4)])}, Attends(swap=True)
    )
    bilinear, inputs = nn.Bilinear(5, 4, 2), (torch.randn(3, 5), torch.randn(3, 4))
    assert check_per_sample_gradients_are_correct(
        inputs, bilinear, loss_function=lambda a, b: bilinear(a, b).tanh().sum(1)
    )


def test_per_sample_gradients_that_are_not_correct(monkeypatch, caplog):
    x, model = torch.randn(4, 3, 5), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    right = rule_for(nn.Linear(1, 1)).terms

    def rows_in_another_order(module, activations, backprops):
        """The norms of all parameters together stay; each example's gradient does not."""
        found = right(module, activations, backprops)
        return {p: Dense(t.instantiate().grad.flip(1)) for p, t in found.items()}

    monkeypatch.setitem(layer_rule._RULES, nn.Linear.forward, LayerRule(rows_in_another_order))
    assert not check_per_sample_gradients_are_correct(x, model, modes=["per_sample"])
    monkeypatch.setitem(
        layer_rule._RULES,
        nn.Linear.forward,
        LayerRule(lambda m, a, g: {p: Dense(t.instantiate().grad * 1.0001) for p, t in right(m, a, g).items()}),
    )
    for mode in ("book_keeping", "ghost", "fast_gradient", "per_sample"):
        assert not check_per_sample_gradients_are_correct(x, model, modes=[mode])
        assert check_per_sample_gradients_are_correct(x, model, modes=[mode], tolerance=1e-2)
    assert "allowed: 1e-05" in caplog.text
    monkeypatch.undo()
    assert not check_per_sample_gradients_are_correct(torch.randn(4, 5), MixesBatch())
    assert "mixes examples" in caplog.text
    with pytest.raises(ValueError, match="at least two"):
        check_per_sample_gradients_are_correct(x[:1], model)
    with pytest.raises(ValueError, match="no trainable parameter"):
        check_per_sample_gradients_are_correct(x, nn.Linear(5, 2).requires_grad_(False))


def test_models_that_take_no_random_input():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            assert x.min() >= 0, "energies are not negative"
            return self.layer(x.sqrt())

    model = Scores()
    PerExampleClipper(model, 1.0)
    with pytest.raises(
        SelfCheckError,
        match=r"random numbers.*AssertionError: energies are not negative.*called labels.*self_check=False",
    ):
        model(torch.rand(4, 4))


class TrainsOtherwise(nn.Module):
    """Reads its weight without calling the layer, or lays no graph, in the other mode than that in which it trains."""

    def __init__(self, evaluates, dropout=0.0):
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(5, 7), nn.Linear(7, 2), nn.Dropout(dropout)
        self.evaluates = evaluates

    def forward(self, x):
        if self.training:
            x = F.linear(x, self.first.weight.clamp(-0.3, 0.3))
        elif self.evaluates:
            x = self.first(x)
        else:
            raise RuntimeError("this network can be trained alone")
        return self.second(torch.tanh(self.dropout(x)))


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "per_sample"])
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_model_that_computes_otherwise_in_training_is_checked_as_it_trains(evaluates, mode):
    model, x = TrainsOtherwise(evaluates), torch.randn(4, 5)
    assert_exact_in_modes(model, lambda batch: model(batch["x"]).square().sum(1), {"x": x}, [mode])
    assert model.training


def test_a_model_that_cannot_be_checked_in_either_mode_is_refused_for_the_first_reason():
    with pytest.raises(UnsupportedModuleError, match="first"):
        check_model(TrainsOtherwise(True, dropout=0.5), {"x": torch.randn(4, 5)})
    model = TrainsOtherwise(False)
    model.dropout = nn.Linear(3, 3)  # of another width
    with pytest.raises(RuntimeError, match="trained alone"):
        check_model(model, {"x": torch.randn(4, 5)})


def test_a_model_that_must_draw_random_numbers_is_refused_for_them():
    with pytest.raises(SelfCheckError, match="random numbers"):
        check_model(TrainsOtherwise(False, dropout=0.5), {"x": torch.randn(4, 5)})


class Draws(nn.Module):
    """Draws random numbers in its own way, also in evaluation, and mixes examples if it is told to."""

    def __init__(self, way, mixes=False):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(5, 4), nn.Linear(4, 3), nn.Parameter(torch.randn(4))
        self.way, self.mixes = way, mixes

    def forward(self, x):
        x = self.first(x)
        z = getattr(self, self.way)(x) * self.scale
        return self.second(z * z.sum(0).sign() if self.mixes else z)

    def of_a_vae(self, x):
        return x + torch.randn_like(x) * (x / 2).exp()

    def of_dropout(self, x):
        return F.dropout(x, 0.4)

    def one_for_each(self, x):
        return x * torch.rand(len(x), 1)

    def of_a_permutation(self, x):
        return x[:, torch.randperm(4)]

    def of_numpy(self, x):
        return x * np.random.rand()


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "per_sample"])
@pytest.mark.parametrize("way", ["of_a_vae", "of_dropout", "one_for_each"])
def test_random_numbers_in_evaluation_are_the_same_for_an_example_alone(way, mode):
    """As a variational autoencoder draws them that asks nobody whether it trains."""
    report = check_model(Draws(way), {"x": torch.randn(4, 5)}, mode=mode)
    assert max(report.norm_error, report.sum_error) < 1e-5


@pytest.mark.parametrize("way", ["of_a_permutation", "of_numpy"])
def test_random_numbers_in_evaluation_of_which_that_is_not_known(way):
    model = Draws(way)
    model.scale.requires_grad_(False)  # what is re-run is refused for it by a message of its own
    with pytest.raises(SelfCheckError, match="draws random numbers in evaluation too.*'if self.training:'"):
        check_model(model, {"x": torch.randn(4, 5)})


@pytest.mark.parametrize("train", [True, False])
def test_a_model_that_draws_in_evaluation_and_mixes_examples_is_refused(train):
    with pytest.raises(SelfCheckError, match="mixes examples"):
        check_model(Draws("of_a_vae", mixes=True).train(train), {"x": torch.randn(4, 5)})


def test_weights_that_are_zero_are_shifted_for_the_check_and_zero_again_after_it():
    """Each number by one of its own, so that no rows of a weight are alike."""
    model = nn.Sequential(OrderedDict(first=nn.Linear(300, 300, bias=False), second=nn.Linear(300, 2, bias=False)))
    for p in model.parameters():
        nn.init.zeros_(p)
    with PerExampleClipper(model, 1.0) as clipper, perturbed(clipper._engine):
        first, second = model.first.weight.detach().clone(), model.second.weight.detach().clone()
    assert not any(p.any() for p in model.parameters())
    assert 0.015 < first.std() < 0.025 and 0.015 < second.std() < 0.025
    assert torch.linalg.matrix_rank(first) == 300 and torch.linalg.matrix_rank(second) == 2


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_sum_that_is_wrong_in_one_of_the_groups_is_noticed(wrong, monkeypatch):
    model, add = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), GradientSums.add

    def add_too_much(self, parameter, parts, **options):
        factor = 1.01 if parameter is model[2 * wrong].weight else 1.0
        add(self, parameter, [part * factor for part in parts], **options)

    monkeypatch.setattr(GradientSums, "add", add_too_much)
    with (
        PerExampleClipper(model, PerLayerClipping(FlatClipping(1.0))) as clipper,
        pytest.raises(SelfCheckError, match="clipping is not exact"),
    ):
        clipper.check((torch.randn(3, 4),), {})


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "per_sample"])
def test_coefficients_that_are_wrong_are_noticed(mode, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    original = engine.coefficients

    def longer(norm_sq_b, **options):
        clipped = original(norm_sq_b, **options)
        return clipped._replace(of_sum_b=clipped.of_sum_b.clamp(max=0.9))  # as if the longest were clipped to more

    monkeypatch.setattr(engine, "coefficients", longer)
    with (
        PerExampleClipper(model, 1.0, mode=mode) as clipper,
        pytest.raises(SelfCheckError, match="clipping is not exact"),
    ):
        clipper.check((torch.randn(3, 4),), {})


def multiply_sums(monkeypatch, factor):
    add = GradientSums.add
    monkeypatch.setattr(
        GradientSums,
        "add",
        lambda self, parameter, parts, **options: add(self, parameter, [part * factor for part in parts], **options),
    )


@pytest.mark.parametrize("factor", [0.0, 0.998, 1.002, 100.0, float("nan")])
def test_sums_that_are_a_little_or_altogether_wrong_are_noticed(factor, monkeypatch):
    multiply_sums(monkeypatch, factor)
    with (
        PerExampleClipper(nn.Linear(4, 2), 1.0) as clipper,
        pytest.raises(SelfCheckError, match="clipping is not exact"),
    ):
        clipper.check((torch.randn(3, 4),), {})


@pytest.mark.parametrize("factor", [0.9995, 1.0005])
def test_the_error_of_sums_is_reported(factor, monkeypatch):
    multiply_sums(monkeypatch, factor)
    with PerExampleClipper(nn.Linear(4, 2), 1.0) as clipper:
        assert clipper.check((torch.randn(3, 4),), {}).sum_error == pytest.approx(5e-4, rel=1e-2)
