"""What a rule reads of its module in the backward pass is refused where it is not what the module computed with."""

import copy
import pickle

import pytest
import torch
import transformers as hf
from layers import weigh
from oracle import trainable
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

from dp_transformers import PerExampleClipper
from dp_transformers.clipping import layer_rule
from dp_transformers.clipping.checks.comparison import Errors
from dp_transformers.clipping.layer_rule import rule_for

BATCH = 3
REASONS = ["before the backward pass that was set to"]


class LastLSTMCell(nn.LSTMCell):
    """A class by another name, which runs what its parent runs."""


def experts():
    layer = MixtralExperts(hf.MixtralConfig(num_local_experts=4, hidden_size=4, intermediate_size=3))
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer


IDS = torch.tensor([[1, 2, 2], [3, 0, 4], [5, 5, 1]])
LAYERS = {  # (the layer, what it is called with)
    "Linear": (lambda: nn.Linear(4, 3), [torch.randn(BATCH, 5, 4)]),
    "Conv1D": (lambda: Conv1D(3, 4), [torch.randn(BATCH, 5, 4)]),
    "Bilinear": (lambda: nn.Bilinear(4, 3, 2), [torch.randn(BATCH, 4), torch.randn(BATCH, 3)]),
    "PReLU": (lambda: nn.PReLU(4), [torch.randn(BATCH, 4, 5)]),
    "LayerNorm": (lambda: nn.LayerNorm(4), [torch.randn(BATCH, 5, 4)]),
    "RMSNorm": (lambda: nn.RMSNorm(4, eps=1e-3), [torch.randn(BATCH, 5, 4)]),
    "LlamaRMSNorm": (lambda: LlamaRMSNorm(4), [torch.randn(BATCH, 5, 4)]),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), [torch.randn(BATCH, 4, 5)]),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(4, affine=True), [torch.randn(BATCH, 4, 5)]),
    "InstanceNorm, evaluating": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(), [torch.randn(BATCH, 4, 5)]),
    "BatchNorm, evaluating": (lambda: nn.BatchNorm1d(4).eval(), [torch.randn(BATCH, 4, 5)]),
    "Embedding": (lambda: nn.Embedding(7, 4, padding_idx=2), [IDS]),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(7, 4, padding_idx=2, mode="sum"), [IDS]),
    "Conv2d": (lambda: nn.Conv2d(4, 4, (2, 3), padding=1), [torch.randn(BATCH, 4, 6, 5)]),
    "Conv1d, same": (lambda: nn.Conv1d(4, 4, 2, padding="same"), [torch.randn(BATCH, 4, 6)]),
    "Conv1d, circular": (lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), [torch.randn(BATCH, 4, 6)]),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), [torch.randn(BATCH, 5, 4)] * 3),
    "RNN": (lambda: nn.RNN(4, 3, batch_first=True), [torch.randn(BATCH, 5, 4)]),
    "LSTM": (lambda: nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True, dropout=0.5), [torch.randn(BATCH, 5, 4)]),
    "GRU": (lambda: nn.GRU(4, 3, 2, batch_first=True), [torch.randn(BATCH, 5, 4)]),
    "RNNCell": (lambda: nn.RNNCell(4, 3), [torch.randn(BATCH, 4)]),
    "LSTMCell": (lambda: LastLSTMCell(4, 3), [torch.randn(BATCH, 4)]),
    "GRUCell": (lambda: nn.GRUCell(4, 3), [torch.randn(BATCH, 4)]),
    "experts": (experts, [torch.randn(BATCH, 5, 4), torch.randint(4, (BATCH, 5, 2)), torch.rand(BATCH, 5, 2)]),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        make, self.given = LAYERS[name]
        self.layer = make()

    def forward(self, *given):
        if isinstance(self.layer, MixtralExperts):  # takes tokens of whatever examples
            return self.layer(*(x.flatten(0, 1) for x in given)).unflatten(0, given[0].shape[:2])
        out = self.layer(*given)
        while isinstance(out, tuple):
            out = out[0]
        return out

    def losses(self):
        torch.manual_seed(1)
        return weigh(self(*self.given))


def other(value):
    """Another setting of the same kind; None where it is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, tuple):
        return tuple(map(other, value))
    choices = (["sum", "mean"], ["zeros", "circular"], ["RNN_TANH", "RNN_RELU"], ["tanh", "relu"], ["same", "valid"])
    return next((b for pair in choices for a, b in (pair, pair[::-1]) if value == a), None)


def read_in_backward(model, clipper):
    """The names of the layer's attributes that somebody reads in a backward pass."""
    losses, layer, names = model.losses(), model.layer, []
    before = type(layer)

    class Watched(before):
        def __getattribute__(self, name):
            names.append(name)
            return super().__getattribute__(name)

    layer.__class__ = Watched
    try:
        clipper.backward(losses)
    finally:
        layer.__class__ = before
    return [name for name in dict.fromkeys(names) if name in vars(layer)]


def changed_while_it_runs(model, setting, value):
    """The losses of a forward pass with another setting, which is put back behind it."""
    before = getattr(model.layer, setting)
    setattr(model.layer, setting, value)
    try:
        return model.losses()
    finally:
        setattr(model.layer, setting, before)


def is_refused(clipper, losses):
    try:
        clipper.backward(losses)
    except ValueError as error:
        if any(reason in str(error) for reason in REASONS):
            return True
        raise
    return False


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
@pytest.mark.parametrize("name", LAYERS)
def test_settings_of_the_forward_pass_alone_are_refused(name, mode):
    with PerExampleClipper(Model(name), 0.3, mode=mode, self_check=name == "experts") as clipper:  # no looks at others
        settings = read_in_backward(clipper.model, clipper)
    for setting in settings:
        model = Model(name)
        if (value := other(getattr(model.layer, setting))) is None:
            continue
        with PerExampleClipper(model, 0.3, mode=mode, self_check=name == "experts") as clipper:
            clipper.backward(model.losses())
            assert all(owner.has_rule for owner in clipper.owners)
            usual = [p.grad.clone() for p in trainable(model)]
            model.zero_grad()
            try:
                losses = changed_while_it_runs(model, setting, value)
            except Exception:  # it does not run with it
                continue
            if not is_refused(clipper, losses):  # no one reads it for what it is
                assert all(torch.equal(p.grad, g) for p, g in zip(trainable(model), usual, strict=True)), setting


@pytest.mark.parametrize("name", LAYERS)
def test_a_clipped_model_can_be_copied_and_pickled_whatever_its_rules(name):
    model = Model(name)
    with PerExampleClipper(model, 0.3) as clipper:
        clipper.backward(model.losses())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
            twin.losses().sum().backward()  # an ordinary model, its hooks do nothing
            assert all(p.grad is not None and p.grad.dim() == p.dim() for p in trainable(twin))


def test_every_rule_is_among_them():
    rules = [*layer_rule._RULES.values(), *(rule for _, rule in layer_rule._RECOGNISED)]
    known = {rule.terms for rule in rules if rule.terms is not None}  # other tests register rules with norms alone
    own = {terms.__name__ for terms in known if terms.__module__.startswith("dp_transformers.")}
    # adapters on experts: tests/clipping/rules/test_adapted_experts.py
    assert own - {"adapted_experts"} == {rule_for(make()).terms.__name__ for make, _ in LAYERS.values()}


class Scaled(nn.Module):
    """In training alone the frozen tensors of a layer are larger while it runs."""

    def __init__(self, layer, how):
        super().__init__()
        self.layer, self.how = layer, how

    def frozen(self):
        return [
            t
            for t in (*self.layer.parameters(), *self.layer.buffers())
            if t.is_floating_point() and not t.requires_grad
        ]

    def forward(self, *args):
        if not self.training:
            return self.layer(*args)
        if self.how == "replaced":
            named = [*self.layer.named_parameters(), *self.layer.named_buffers()]
            other = {n: 8 * t.detach() for n, t in named if any(t is x for x in self.frozen())}
            return torch.func.functional_call(self.layer, other, args)
        for t in self.frozen():
            t.data.mul_(8)
        out = self.layer(*args)
        for t in self.frozen():
            t.data.div_(8)
        return out


def fixed(norm):
    norm.running_var.fill_(2.0)
    norm.eval()
    norm.train = lambda mode=True: norm
    return norm


class Mixtral(nn.Module):
    def __init__(self):
        super().__init__()
        config = hf.MixtralConfig(
            vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2,
        )  # fmt: skip
        self.model = hf.MixtralModel(config)
        for name, p in self.model.named_parameters():
            p.requires_grad_("gate_up_proj" in name)

    def forward(self, ids):
        return self.model(ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("how", ["replaced", "scaled in place"])
@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (lambda: fixed(nn.BatchNorm1d(4)), (torch.ones(3, 4),)),
        (lambda: fixed(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)), (torch.ones(3, 4, 5),)),
        (Mixtral, (torch.arange(12).view(3, 4),)),
    ],
    ids=["BatchNorm", "InstanceNorm", "experts"],
)
def test_tensors_of_the_forward_pass_alone_are_refused(layer, inputs, mode, how, monkeypatch):
    """The rule computes from them anew; one example moved the sum by 8 to 75 times the bound in ghost. The self-check
    sees it, too, where it is not later that the model begins with it."""
    torch.manual_seed(0)
    model = Scaled(layer(), how).train()
    inputs = [torch.randn_like(x) if x.is_floating_point() else x for x in inputs]
    monkeypatch.setattr(Errors, "are_small", True)
    clipper = PerExampleClipper(model, 1e-3, mode=mode)
    with pytest.raises(ValueError, match="computed with other weights, or statistics"):
        clipper.backward(model(*inputs).flatten(1).square().sum(1))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_a_padding_id_may_be_counted_from_the_end(mode):
    """As torch's function does, where the attribute is set after the layer was built."""
    layer, ids = nn.Embedding(12, 3), torch.tensor([[9, 9, 1], [9, 2, 3]])
    layer.padding_idx = -3
    with PerExampleClipper(layer, 1e6, mode) as clipper:
        clipper.backward(layer(ids).square().sum((1, 2)))
        assert not layer.weight.grad[9].any()
        assert layer.weight.grad[[1, 2, 3]].any(1).all()
