"""Models and losses that keep something of what passes through them train as if every pass were their first one; what
cannot be put back is refused."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import violations
from neighbours import Task, points, texts, trainer_for
from oracle import clipped_sum, distance, length
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader
from transformers import IBertConfig, IBertForSequenceClassification, RwkvConfig, RwkvModel, TrainerCallback

from dp_transformers import PerExampleClipper, PrivacyEngine
from dp_transformers.clipping import model_state
from dp_transformers.clipping.checks.oracle import Oracle

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
LR, BOUND = 0.5, 0.3


def test_what_a_weight_of_several_tensors_holds_is_summed():
    """torchao's weights have no bits of their own, only those of the tensors that they are made of."""
    parts = torch.arange(12.0), torch.arange(12.0)
    both = TwoTensor(*parts)
    before = model_state._sum_of_bits(both)
    assert model_state._sum_of_bits(both) == before
    for part in parts:
        part[3] += 1
        assert model_state._sum_of_bits(both) != before
        before = model_state._sum_of_bits(both)


class Keeps(nn.Module):
    """A classifier; ``keeps(model, x, h)`` reads and writes whatever it holds, and may return another ``h``."""

    def __init__(self, keeps=lambda m, x, h: None):
        super().__init__()
        self.first, self.last, self.keeps = nn.Linear(6, 8), nn.Linear(8, 3), keeps
        self.count, self.word, self.switch, self.kept = 0, "cold", False, None
        self.listed, self.table, self.seen, self.options = [0.0], {}, set(), collections.Counter()
        self.queue, self.array, self.plain = collections.deque(maxlen=8), np.zeros(6), torch.zeros(8)
        self.config = type("Config", (), {"__module__": "user"})()
        self.config.longest = 1
        self.codes = nn.Embedding(4, 8).requires_grad_(False)
        for name, size in {"mean": 8, "calls": 1, "bank": 64, "positions": 4, "other": 8}.items():
            self.register_buffer(name, torch.zeros(size))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        changed = self.keeps(self, x, h)
        return self.last(h if changed is None else changed)


def follows_the_mean(m, x, h):
    centred = h - m.mean.clone()
    m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return centred


def follows_by_data(m, x, h):
    centred = h - m.mean.clone()
    m.mean.data.lerp_(h.detach().mean(0), 0.1)
    return centred


def quantises(m, x, h):
    """VQ: codes follow the mean of what is nearest to them."""
    nearest = torch.cdist(h.detach(), m.codes.weight).argmin(1)
    found = h + (m.codes.weight[nearest].clone() - h).detach() * 0.5
    for k in nearest.unique():
        m.codes.weight.data[k] = 0.9 * m.codes.weight[k] + 0.1 * h.detach()[nearest == k].mean(0)
    m.options.update(nearest.tolist())
    return found


def fills_a_bank(m, x, h):
    """A queue of features, with a pointer, as MoCo's."""
    near = h * (1 + m.bank.view(8, 8).mean(0))
    place, m.count = m.count, (m.count + len(h)) % 8
    m.bank.view(8, 8)[place : place + 1] = h.detach()[:1]
    return near


def grows(m, x, h):
    if len(m.positions) < 40:
        m.register_buffer("positions", torch.linspace(0, 1, 40))
    m.config.longest = max(m.config.longest, 40)
    return h + m.positions[:8]


def registers(m, x, h):
    if not getattr(m, "has_hook", False):
        m.has_hook, scale = True, 1 + x.mean(1, keepdim=True)
        m.last.register_forward_hook(lambda module, args, output: output * scale)
        m.last.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    return h.detach() * 0 + h


MODELS = {
    "a counter": lambda m, x, h: setattr(m, "count", m.count + 1) or h * (1 + m.count),
    "a counter in a buffer": lambda m, x, h: m.calls.add_(1) * 0 + h * (1 + m.calls.clone()),
    "a running mean": follows_the_mean,
    "a running mean by .data": follows_by_data,
    "a running mean that is assigned": lambda m, x, h: setattr(m, "mean", h.detach().mean(0)),
    "a running mean in an attribute": lambda m, x, h: m.plain.lerp_(h.detach().mean(0), 0.1) * 0 + h,
    "a buffer that is deleted": lambda m, x, h: m._buffers.pop("other") * 0 + h,
    "codes of a VQ layer": quantises,
    "a frozen weight": lambda m, x, h: h * (1 + m.codes.weight.detach().mul_(1.1)[0].clone()),
    "a frozen weight that is replaced": lambda m, x, h: setattr(m.codes, "weight", nn.Parameter(m.codes.weight * 2, False)),
    "a bank of features with its pointer": fills_a_bank,
    "a table that grows": grows,
    "a word and a switch": lambda m, x, h: h * (1 + (m.word == "cold")) + (setattr(m, "word", "hot") or setattr(m, "switch", True) or 0),
    "a list": lambda m, x, h: m.listed.__setitem__(0, m.listed[0] + float(x.detach().mean())),
    "a list that grows": lambda m, x, h: m.listed.append(h.detach()),
    "a dictionary": lambda m, x, h: m.table.setdefault("shift", h.detach().mean(0)) * 0 + h,
    "a set and a deque": lambda m, x, h: m.seen.add(float(x.detach().sum())) or m.queue.append(h.detach()),
    "an array": lambda m, x, h: m.array.__iadd__(x.detach().mean(0).numpy()) is None or h,
    "activations": lambda m, x, h: setattr(m, "kept", h),
    "a module that is made at the first call": lambda m, x, h: setattr(m, "made", nn.Identity()),
    "hooks": registers,
    "its class": lambda m, x, h: setattr(m, "__class__", type("Other", (Keeps,), {})),
}  # fmt: skip


def ibert():
    return IBertForSequenceClassification(IBertConfig(**violations.SIZES, max_position_embeddings=32, num_labels=3, hidden_dropout_prob=0.0,
                                                      attention_probs_dropout_prob=0.0, quant_mode=False))  # fmt: skip


class Rwkv(nn.Module):
    def __init__(self):
        super().__init__()
        config = RwkvConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16, rescale_every=0
        )
        self.body, self.last = RwkvModel(config), nn.Linear(16, 3)

    def forward(self, input_ids):
        return self.last(self.body(input_ids, use_cache=False)[0][:, -1])


def causal_llama():
    return violations.llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, num_labels=3)


class OfTexts(nn.Module):
    """A classifier by a model's last logits."""

    def __init__(self, make):
        super().__init__()
        self.body = make()

    def forward(self, input_ids):
        logits = self.body(input_ids=input_ids).logits
        return logits[:, -1, :3] if logits.dim() == 3 else logits


REAL = {
    "IBert": functools.partial(OfTexts, ibert),
    "RWKV": Rwkv,
    "BigBird": functools.partial(OfTexts, violations.bigbird),
    "dynamic RoPE": functools.partial(OfTexts, causal_llama),
}


def example_by_example(start, inputs, labels):
    """The clipped sum of gradients of rows that each run alone through the model as its draw found it."""
    gradients = []
    for x, y in zip(inputs, labels, strict=True):
        twin = copy.deepcopy(start)
        loss = F.cross_entropy(twin(x[None]), y[None])
        trained = [p for p in twin.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        gradients.append([torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)])
    return clipped_sum(gradients, BOUND)[1]


def train_and_compare(model, rows, *, steps=3, **options):
    """Train in a plain loop of several physical batches each; every step is the sum of rows alone."""
    engine, trained = PrivacyEngine(dp_seed=3), [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(trained, lr=LR), data_loader=DataLoader(rows, 6), noise_multiplier=0.0,
        max_grad_norm=BOUND, max_physical_batch_size=2, loss_reduction="mean", **options,
    )  # fmt: skip
    taken, start, expected = 0, None, []
    while taken < steps:
        for inputs, labels in loader:
            if start is None:
                start, expected = copy.deepcopy(model), [torch.zeros_like(p, dtype=torch.float64) for p in trained]
            for total, part in zip(expected, example_by_example(start, inputs, labels), strict=True):
                total += part
            F.cross_entropy(model(inputs), labels).backward()
            sums, names = engine.clipped_sums(), [n for n, p in model.named_parameters() if p.requires_grad]
            found = [sums.get(name, total * 0) for name, total in zip(names, expected, strict=True)]
            assert distance(found, expected) <= 1e-5 * length(expected)
            optimizer.step()
            if engine.has_stepped:
                taken, start = taken + 1, None
                if taken == steps:
                    break
    return engine, model


def held(model):
    """All that a model holds besides its trained weights, as values. Flags of hooks that are gone do nothing."""
    values = {}
    for path, module in model.named_modules():
        names = [k for k in vars(module) if not k.endswith(("_parameters", "_modules", "keeps", "_kwargs", "_called"))]
        values[path] = type(module), {k: repr(vars(module)[k]) for k in names}
        values[path, "frozen"] = [repr(p) for p in module.parameters(recurse=False) if not p.requires_grad]
        values[path, "modules"] = list(module._modules)
    return values


@pytest.mark.parametrize("name", MODELS)
def test_every_pass_is_as_the_first_one(name):
    torch.manual_seed(0)
    model = Keeps(MODELS[name])
    before = held(model)
    rows = [(row["x"], row["labels"]) for row in points(12)]
    engine, model = train_and_compare(model, rows)
    engine.detach()
    assert held(model) == before


@pytest.mark.parametrize("name", REAL)
def test_architectures_that_keep_something_train(name):
    torch.manual_seed(0)
    rows = [(row["input_ids"], row["labels"]) for row in texts([24] * 12)]
    train_and_compare(REAL[name](), rows, steps=2)


class Relative:
    """Losses over their running mean, which is a number, a buffer and a list."""

    def __init__(self):
        self.mean, self.seen, self.part = 1.0, [], nn.BatchNorm1d(1, affine=False)

    def __call__(self, outputs, labels):
        losses = F.cross_entropy(outputs, labels, reduction="none")
        scaled = losses / (self.mean + len(self.seen))
        self.mean += float(losses.detach().mean())
        self.seen.append(losses.detach())
        return scaled

    def of(self, outputs, labels):
        return self(outputs, labels)


@pytest.mark.parametrize("how", ["an object", "its method", "a partial function"])
def test_a_trainer_s_loss_begins_each_batch_anew(how, tmp_path):
    kept = Relative()
    loss = {"an object": kept, "its method": kept.of, "a partial function": functools.partial(kept.of)}[how]
    task = Task(Keeps, points(12), loss=loss, steps=3, expected=6, physical=2)
    trainer_for(task, str(tmp_path)).train()
    assert kept.mean == 1.0 and kept.seen == []


def private(model, size=12, **options):
    engine = PrivacyEngine(dp_seed=3)
    parameters = [p for p in model.parameters() if p.requires_grad]
    options = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "max_physical_batch_size": 2,
        "loss_reduction": "mean",
    } | options
    data = DataLoader([(row["x"], row["labels"]) for row in points(size)], 6)
    return engine, *engine.make_private(
        module=model, optimizer=torch.optim.SGD(parameters, lr=LR), data_loader=data, **options
    )


def run(engine, model, optimizer, loader, after=lambda: None):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after()


def clamps(m, x, h):
    m.first.weight.detach().clamp_(-0.1, 0.1)


def rewrites_a_large_weight(m, x, h):
    m.codes.weight.detach()[0].mul_(0.5)


def with_large_codes(keeps):
    model = Keeps(keeps)
    model.codes = nn.Embedding(model_state.SMALL // 8 + 1, 8).requires_grad_(False)
    return model


REFUSED = {
    "a trained weight in forward": (lambda: Keeps(clamps), "first.weight"),
    "a large frozen weight in forward": (lambda: with_large_codes(rewrites_a_large_weight), "codes.weight"),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_put_back_is_refused_for_good(name, check):
    make, parameter = REFUSED[name]
    engine, model, optimizer, loader = private(make(), loss_reduction="none")
    engine.clipper._self_check = check
    for _ in range(2):
        before = [p.detach().clone() for p in model.last.parameters()]
        with pytest.raises(ValueError, match=f"'{parameter}' of the model was written to"):
            for x, y in loader:
                engine.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
        assert all(map(torch.equal, before, model.last.parameters()))
        with contextlib.suppress(ValueError):
            engine.drop_draw()


@pytest.mark.parametrize("where", ["before the forward pass", "between physical batches"])
def test_trained_weights_are_written_by_the_optimizer_alone(where):
    engine, model, optimizer, loader = private(Keeps())
    with pytest.raises(ValueError, match=r"'first.weight' of the model was written to.*engine.drop_draw"):
        for x, y in loader:
            if where == "before the forward pass":
                model.first.weight.data.mul_(0.9), model.first.weight.detach().mul_(0.9)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if where == "between physical batches" and not engine.has_stepped:
                model.first.weight.detach().mul_(0.9)
    assert engine.steps == 0


@pytest.mark.parametrize("write_at", [1, 2, 3])
def test_a_trainer_sees_a_large_frozen_weight_that_one_pass_wrote(write_at, tmp_path):
    """Also where the pass is looked at, or run again, before its end."""

    class Begins(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            step.append(state.global_step + 1)

    def writes(m, x, h):
        if step and step[-1] == write_at:
            rewrites_a_large_weight(m, x, h)

    step: list[int] = []

    def loss(outputs, labels):
        return F.cross_entropy(outputs, labels, reduction="none")

    task = Task(lambda: with_large_codes(writes), points(12), loss=loss, steps=4, expected=6, physical=2, sigma=1.0)
    trainer = trainer_for(task, str(tmp_path))
    trainer.add_callback(Begins())
    with pytest.raises(ValueError, match=r"'codes.weight' of the model was written to"):
        trainer.train()
    assert trainer.state.global_step == write_at - 1


def test_a_large_frozen_weight_may_be_written_onto_itself():
    """As by adapters on the weights of experts (peft's target_parameters)."""

    def writes(m, x, h):
        m.codes.weight.detach().copy_(m.codes.weight.detach().clone())

    run(*private(with_large_codes(writes)))


def packs(m, x, h):
    """As bitsandbytes repacks weights on CPUs."""
    m.codes.weight.data = m.codes.weight.data.flip(0).contiguous()
    m.codes.weight.quant_state.packed = True


def test_a_frozen_weight_whose_memory_is_replaced_is_put_back():
    model = with_large_codes(packs)
    state = type("QuantState", (), {"__module__": "bitsandbytes"})()
    state.packed, model.codes.weight.quant_state = False, state
    before, place = model.codes.weight.detach().clone(), model.codes.weight.data_ptr()
    engine, *rest = private(model)
    run(engine, *rest)
    assert engine.steps == 2 and model.codes.weight.equal(before) and model.codes.weight.data_ptr() == place
    assert not model.codes.weight.quant_state.packed


@pytest.mark.parametrize(
    "change", [lambda o: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.9), lambda o: setattr(o, "calls", getattr(o, "calls", 0) + 1)]
)  # fmt: skip
def test_numbers_of_the_optimizer_change_between_draws_alone(change):
    engine, model, optimizer, loader = private(Keeps())
    optimizer.calls = 0
    run(engine, model, optimizer, loader, lambda: engine.has_stepped and change(optimizer))
    with pytest.raises(ValueError, match="of the optimizer was changed between two physical batches"):
        run(engine, model, optimizer, loader, lambda: change(optimizer))


@pytest.mark.parametrize("physical", [None, 2])
def test_what_is_changed_between_draws_stays(physical):
    model = Keeps(lambda m, x, h: h * (1 + m.count) + m.mean)
    engine, model, optimizer, loader = private(model, max_physical_batch_size=physical)

    def after():
        if not engine.has_stepped:
            return
        model.count += 1
        model.calls = model.calls + 1  # another tensor
        model.mean.add_(1)
        model.codes.weight.data.mul_(0.5)
        model.eval(), model.train()

    codes = model.codes.weight.detach().clone()
    run(engine, model, optimizer, loader, after)
    assert model.count == model.calls == 2 and model.mean.eq(2).all() and torch.equal(model.codes.weight, codes / 4)


def test_a_pass_without_a_graph_leaves_nothing_of_a_batch_and_keeps_its_mode():
    _, model, optimizer, loader = private(Keeps(follows_the_mean))
    for x, y in loader:
        model.eval()
        with torch.no_grad():
            model(x), model(x)
        assert not model.training and not model.mean.any()
        model.train()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.randn(3, 6))
    assert model.mean.any(), "between a step and the next batch the model is the user's"


def test_it_is_said_once_what_is_put_back(caplog):
    run(*private(Keeps(lambda m, x, h: m.listed.append(1) or setattr(m, "count", m.count + 1) or None)))
    said = [r.getMessage() for r in caplog.records if "put back" in r.getMessage()]
    assert len(said) == 1 and "'count' of the model" in said[0] and "optimizer.step()" in said[0]
    caplog.clear()
    PerExampleClipper(nn.GRU(6, 6, batch_first=True), 1.0).model(torch.randn(4, 3, 6))
    assert not caplog.text, "torch's recurrent layers set attributes of their own"


def test_a_model_with_other_modules_is_checked_again(monkeypatch):
    compare, calls = Oracle.compare, []
    monkeypatch.setattr(Oracle, "compare", lambda *args, **kw: calls.append(1) or compare(*args, **kw))
    engine, model, optimizer, loader = private(Keeps(), max_physical_batch_size=None)
    changes = [
        lambda: None,
        lambda: setattr(model, "extra", nn.Identity()),
        lambda: setattr(model.extra, "__class__", nn.Tanh),
    ]
    counts = []
    for change in [lambda: None, *changes]:
        change(), run(engine, model, optimizer, loader)
        counts.append(len(calls))
    assert counts[0] == counts[1] < counts[2] < counts[3]
