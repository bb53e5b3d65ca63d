"""What a forward pass leaves behind: put back, kept where it is harmless, or refused by name."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import DPTrainer, DPTrainingArguments, PerExampleClipper, PrivacyEngine
from dp_transformers.clipping.conditions import Conditions
from dp_transformers.clipping.model_state import ModelState


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("mean", torch.zeros(3))
        self.count, self.kind, self.kept, self.history, self.options = 0, "sparse", None, [], {"kind": "sparse"}
        self.config = type("Config", (), {"__module__": "user"})()
        self.config.length = 4
        self.switch, self.array, self.deep = (
            False,
            np.zeros(2),
            [0, {"inner": type("Inner", (), {"__module__": "user"})()}],
        )
        self.deep[1]["inner"].kind = "sparse"
        self.large, self.large_array = nn.Parameter(torch.zeros(70_001), requires_grad=False), np.zeros(70_000)
        self.listed, self.many = [torch.zeros(3), np.zeros(3)], {k: [0.0] for k in range(1000)}

    remembers = False

    def forward(self, x):
        self.change(x)
        return self.layer(x * self.scale)

    def change(self, x):
        pass


def change(**methods):
    return type("Model", (Base,), methods)()


REFUSED = {
    "switch": lambda self, x: setattr(self, "switch", True),
    "layer.weight": lambda self, x: self.layer.weight.detach().clamp_(-0.1, 0.1),
    "deep.1.inner.kind": lambda self, x: setattr(self.deep[1]["inner"], "kind", "full"),
    "array": lambda self, x: self.array.__setitem__(0, 1.0),
    "kind": lambda self, x: setattr(self, "kind", "full"),
    "mean": lambda self, x: self.mean.add_(x.detach().mean(0)),
    "mean ": lambda self, x: self.mean.data.add_(x.detach().mean(0)),
    "mean  ": lambda self, x: self.register_buffer("mean", x.detach().mean(0)),
    "scale": lambda self, x: self.scale.detach().add_(0.1),
    "scale ": lambda self, x: setattr(self, "scale", nn.Parameter(self.scale + 0.1, requires_grad=False)),
    "options.kind": lambda self, x: self.options.update(kind="full"),
    "scale  ": lambda self, x: self.scale.data.add_(x.detach().mean(0)),
    "large": lambda self, x: self.large.data[:3].copy_(x.detach().mean(0)),
    "large  ": lambda self, x: self.large.detach()[:3].copy_(x.detach().mean(0)),
    "large ": lambda self, x: self.large.data[70_000:].copy_(x.detach().mean()),
    "large_array": lambda self, x: self.large_array.__setitem__(69_999, 1.0),
    "listed.0": lambda self, x: self.listed[0].data.add_(x.detach().mean(0)),
    "listed.1": lambda self, x: self.listed[1].__setitem__(0, float(x.detach().mean())),
    "many.999": lambda self, x: self.many[999].__setitem__(0, float(x.detach().mean())),
}


@pytest.mark.parametrize("self_check", [True, False])
def test_a_frozen_weight_that_is_written_onto_itself_has_not_changed(self_check):
    def write(self, x):
        for p in (self.scale, self.large):
            p.detach().copy_(p.detach().clone())

    model = change(change=write)
    with PerExampleClipper(model, 1.0, self_check=self_check) as clipper:
        for _ in range(2):
            clipper.backward(model(torch.randn(4, 3)).square().sum(1))


def test_a_large_frozen_weight_that_a_pass_without_clipping_wrote_is_refused_at_its_end():
    """Nothing is released after it, and the next draw would take what it finds for the user's own doing."""
    model = change(change=lambda self, x: self.large.detach()[:3].copy_(x.detach().mean(0)))
    with (
        PerExampleClipper(model, 1.0, self_check=False) as clipper,
        pytest.raises(ValueError, match=r"'large' of the model changed"),
        clipper.suspended(),
    ):
        model(torch.randn(4, 3))


@pytest.mark.parametrize("name", REFUSED)
def test_what_carries_a_batch_to_the_next_is_refused_by_name(name):
    model = change(change=REFUSED[name])
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        losses = model(torch.randn(4, 3)).square().sum(1)
        with pytest.raises(ValueError, match=rf"'{name.strip()}'.*would carry private data to later batches"):
            clipper.backward(losses)
        assert all(p.grad is None for p in model.parameters())


PUT_BACK = {
    "count": lambda self, x: setattr(self, "count", self.count + 1),
    "number of a configuration": lambda self, x: setattr(self.config, "length", len(x)),
    "kept": lambda self, x: setattr(self, "kept", x.detach()),
    "new": lambda self, x: setattr(self, "new", {"last": x.detach()}),
    "history": lambda self, x: self.history.append(x.detach()),
    "cache in a dict": lambda self, x: self.options.update(last=x.detach()),
    "length": lambda self, x: setattr(self, "kept", len(x)),
    "config": lambda self, x: setattr(self.config, "problem_type", "regression"),
    "module": lambda self, x: setattr(self, "made", nn.Identity()),
}


@pytest.mark.parametrize("name", PUT_BACK)
def test_what_held_nothing_or_tensors_is_put_back(name):
    model = change(change=PUT_BACK[name])
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        for _ in range(2):
            clipper.backward(model(torch.randn(4, 3)).square().sum(1))
            assert (
                (model.count, model.config.length) == (0, 4)
                and model.kept is None
                and model.history == []
                and model.options == {"kind": "sparse"}
            )
            assert (
                not hasattr(model, "new") and not hasattr(model, "made") and not hasattr(model.config, "problem_type")
            )


@pytest.mark.parametrize("self_check", [False, True])
def test_hooks_that_a_forward_pass_registers_are_removed_with_the_word_that_they_are_there(self_check):
    """Left behind alone, they would be there twice after the next pass, and a first batch could speak in them."""

    def remember(self, x):
        if not getattr(self, "has_hooks", False):
            self.has_hooks, mean = True, x.detach().mean()
            self.layer.register_forward_hook(lambda module, args, output: seen.append(float(mean)))
            self.layer.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)

    model, seen, means = change(change=remember), [], []
    with PerExampleClipper(model, 1.0, self_check=self_check) as clipper:
        for _ in range(3):
            x = torch.randn(4, 3)
            clipper.backward(model(x).square().sum(1))
            seen.clear()
            clipper.backward(model(x).square().sum(1))
            means.append(set(seen) == {float(x.mean())})  # more than once where the pass is looked at
    assert means == [True] * 3
    assert not hasattr(model, "has_hooks") and not model.layer._forward_hooks and not model.layer._forward_pre_hooks


def replaces(self, x):
    hooks, row = self.layer._forward_hooks, x.detach()[0]
    hooks.update({key: lambda module, args, output: output + row.sum() for key in hooks if hooks[key] is doubled})


def removes_and_registers(self, x):
    hooks, row = self.layer._forward_hooks, x.detach()[0]
    for key in [key for key in hooks if hooks[key] is doubled]:
        del hooks[key]
        self.layer.register_forward_hook(lambda module, args, output: output + row.sum())


def removes(self, x):
    hooks = self.layer._forward_hooks
    for key in [key for key in hooks if hooks[key] is doubled]:
        del hooks[key]


def doubled(module, args, output):
    return output * 2


@pytest.mark.parametrize("writes", [replaces, removes_and_registers, removes])
def test_hooks_that_a_forward_pass_replaces_or_removes_are_put_back(writes):
    """As many hooks as before may be others, which hold a row of the batch."""
    model = change(change=lambda self, x: LOOKS and writes(self, x))
    model.layer.register_forward_hook(doubled)
    with PerExampleClipper(model, 1.0) as clipper:
        for looks in ([], ["now"], []):
            LOOKS.extend(looks)
            clipper.backward(model(torch.randn(4, 3)).square().sum(1))
            LOOKS.clear()
            ours, theirs = model.layer._forward_hooks.values()
            assert theirs is doubled and ours is not doubled, "what a user's hook does is done behind the tap"
    assert list(model.layer._forward_hooks.values()) == [doubled]


def test_a_hook_that_removes_itself_is_put_back_with_what_it_is_told():
    """Once would be a word about the batch that it saw. How it is called is written in another place than the hook."""
    model, seen = change(change=lambda self, x: None), []

    def once(module, args, kwargs, output):
        seen.append(kwargs)
        handle.remove()

    handle = model.layer.register_forward_hook(once, with_kwargs=True)
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        for _ in range(3):
            clipper.backward(model(torch.randn(4, 3)).square().sum(1))
    assert seen == [{}] * 3


@pytest.mark.parametrize("as_buffer", [False, True])
def test_a_table_that_grows_is_put_back_with_its_length(as_buffer):
    def grow(self, x):
        self.count = max(self.count, 7)
        self.register_buffer("table", torch.arange(7.0)) if as_buffer else setattr(self, "plain", torch.arange(7.0))

    model = change(change=grow)
    if not as_buffer:
        model.plain = torch.arange(4.0)
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        for _ in range(2):
            clipper.backward(model(torch.randn(4, 3)).square().sum(1))
            assert (len(model.table if as_buffer else model.plain), model.count) == (4, 0)


def test_what_a_user_changes_between_batches_is_theirs():
    model = Base()
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        for k in range(2):
            model.count, model.mean = k, torch.full((3,), float(k))
            model.eval(), model.train()
            clipper.backward(model(torch.randn(4, 3)).square().sum(1))
            assert model.count == k


@pytest.mark.parametrize("how", ["hook", "method", "class", "switch"])
def test_a_model_that_was_changed_is_checked_again(how):
    """What was checked is what runs."""

    def mixes(x):
        return x - 0.2 * x.mean(0)

    class Mixing(Base):
        def change(self, x):
            return None

        def forward(self, x):
            return super().forward(mixes(x))

    class Switched(Base):
        def forward(self, x):
            return super().forward(mixes(x) if self.switch else x)

    model = Switched()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 3)), 8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for (x,) in loader:
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    if how == "hook":
        model.layer.register_forward_pre_hook(lambda module, args: (mixes(args[0]),))
    elif how == "method":
        model.layer.forward = lambda x: nn.functional.linear(mixes(x), model.layer.weight, model.layer.bias)
    elif how == "class":
        model.__class__ = Mixing
    else:
        model.switch = True
    with pytest.raises(ValueError):
        model(x)


def test_a_large_frozen_weight_that_a_batch_wrote_is_not_released():
    """Its content is looked at once a draw, whatever physical batch wrote it."""

    class Writes(Base):
        def change(self, x):
            if len(x) == 1:  # the last one of three
                self.large.data[:3].copy_(x.detach().mean(0))

    model = Writes()
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(7, 3)), 7)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=3,
    )
    before = model.layer.weight.clone()
    with pytest.raises(ValueError, match=r"'large' of the model changed .* would carry private data to later batches"):
        for (x,) in loader:
            model(x).square().sum(1).mean().backward()
            optimizer.step()
    assert model.layer.weight.equal(before)


def test_frozen_weights_may_be_written_between_draws():
    """Such as those of a teacher, who follows the model that is trained."""
    model = Base()
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.randn(7, 3)), 7),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(3):
        for (x,) in loader:
            model(x).square().sum(1).mean().backward()
            optimizer.step()
            for p in (model.large, model.scale):
                p.data.mul_(0.9).add_(0.1)
    assert engine.privacy_spent(1e-2).steps == 3


def test_nothing_is_found_where_nothing_changed():
    state = ModelState(Base(), Conditions())
    state.before_forward()
    state.require_unchanged()


class Remembers(Base):
    """It writes past autograd's count of changes, once it was checked."""

    def change(self, x):
        if self.remembers:
            self.mean.data.copy_(x.detach()[0])


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("end", ["step", "drop", "detach"])
def test_what_the_device_tells_later_is_heard_before_anything_is_released(end):
    """Buffers are compared after every batch, and the comparison is read once a draw."""
    model, engine = Remembers(), PrivacyEngine(dp_seed=0)
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.randn(40, 3)), 10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=2,
    )
    engine.clipper.check((torch.randn(2, 3),), {})
    before = model.layer.weight.clone()
    batches = iter(loader)
    (x,) = next(batches)
    model.remembers = True
    model(x).square().sum(1).mean().backward()
    with pytest.raises(ValueError, match=r"'mean' of the model changed in a forward or backward pass"):
        if end == "drop":
            engine.drop_draw()
        elif end == "detach":
            engine.detach()
        else:
            optimizer.step()
            for (x,) in batches:
                model(x).square().sum(1).mean().backward()
                optimizer.step()
    if end == "step":
        with pytest.raises(ValueError, match="'mean' of the model changed"):
            optimizer.step()  # nor when it is asked a second time
    assert engine.steps == (end == "drop") and torch.equal(model.layer.weight, before)


LOOKS = []  # not empty while a loop looks at the model
WRITES = {
    "buffer": lambda self, x: LOOKS and self.mean.data.copy_(x.detach()[0]),
    "switch": lambda self, x: LOOKS and setattr(self, "switch", True),
}
NAMES = {"buffer": "mean", "switch": "switch"}


def stacked(rows):
    return {"x": torch.stack([row["x"] for row in rows])}


def looks_again(model, x, how):
    """A loop goes forward once more, to look at the model, and catches what it is told."""
    LOOKS.append(how)
    try:
        with torch.set_grad_enabled(how == "with a graph"):
            model(x)
    except ValueError:
        pass
    LOOKS.clear()


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("written", WRITES)
@pytest.mark.parametrize("how", ["with a graph", "without"])
@pytest.mark.parametrize("last", [True, False], ids=["after the last batch", "between batches"])
def test_an_error_that_a_loop_of_ones_own_catches_is_not_forgotten(written, how, last):
    """What a batch left in the model is there when its draw is dropped, so nothing is released any more."""
    model, engine = change(change=WRITES[written]), PrivacyEngine(dp_seed=0)
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.randn(40, 3)), 10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=2,
    )
    engine.clipper.check((torch.randn(2, 3),), {})
    before, refused = model.layer.weight.clone(), ""
    for (x,) in loader:
        try:
            model(x).square().sum(1).mean().backward()
            if loader._step.given.last_of_draw == last:
                looks_again(model, x, how)
            optimizer.step()
        except ValueError as e:
            refused = str(e)
            with pytest.raises(ValueError, match="of the model changed|without a loss.backward"):
                optimizer.step()  # nor when it is asked a second time
            assert engine.steps == 0 and torch.equal(model.layer.weight, before)
            engine.drop_draw()
            break
    assert "of the model changed in a forward or backward pass" in refused
    for _ in range(2):
        with pytest.raises(ValueError, match="of the model changed"):
            for (x,) in loader:
                model(x).square().sum(1).mean().backward()
                optimizer.step()
        engine.drop_draw()
    assert engine.steps == 3 and torch.equal(model.layer.weight, before)


def private(model, size=10):
    """The private loop of its ``layer``, where a draw of 128 rows comes in batches of 2."""
    engine = PrivacyEngine(dp_seed=0)
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.layer.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(128, 3)), size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=2,
    )


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("written", ["large", "mean"])
def test_a_check_in_the_middle_of_a_draw_forgets_nothing(written):
    """It runs the model on made-up rows, whose sums are thrown away, and not those of the draw."""
    model = change(change=lambda self, x: LOOKS and getattr(self, written).data[:3].copy_(x.detach()[0]))
    engine, model, optimizer, loader = private(model, size=64)
    engine.clipper.check((torch.randn(2, 3),), {})
    before = model.layer.weight.clone()
    with pytest.raises(ValueError, match=f"'{written}' of the model changed"):
        for i, (x,) in enumerate(loader):
            if i == 5:
                looks_again(model, x, "with a graph" if written == "large" else "without")
                engine.clipper.check((torch.randn(2, 3),), {})
            model(x).square().sum(1).mean().backward()
            optimizer.step()
    assert i > 5 and engine.steps == 0 and torch.equal(model.layer.weight, before)


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("order", ["drop first", "load first"])
def test_a_draw_that_is_given_up_after_the_forward_pass_gives_the_model_back(order):
    """Its weights are the user's own to write then: those of a checkpoint, say."""
    engine, model, optimizer, loader = private(change(change=lambda self, x: None))
    state = engine.state_dict()
    (x,) = next(iter(loader))
    model(x)
    for give_up in (engine.drop_draw, lambda: engine.load_state_dict(state))[:: 1 if order == "drop first" else -1]:
        give_up()
    for (x,) in loader:
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    assert engine.steps > 2


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("give_up", ["drop_draw", "load_state_dict"])
def test_a_draw_that_is_given_up_after_the_forward_pass_is_looked_at(give_up):
    model = change(change=WRITES["buffer"])
    engine, model, *_, loader = private(model)
    engine.clipper.check((torch.randn(2, 3),), {})
    state = engine.state_dict()
    (x,) = next(iter(loader))
    LOOKS.append("")
    model(x)
    LOOKS.clear()
    with pytest.raises(ValueError, match="'mean' of the model changed"):
        getattr(engine, give_up)(*[state] * (give_up == "load_state_dict"))
        engine.drop_draw()


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("written", WRITES)
@pytest.mark.parametrize("how", ["with a graph", "without"])
def test_an_error_that_a_trainer_catches_is_not_forgotten(written, how, tmp_path):
    def losses_of(model, inputs):
        if trainer.state.global_step == 2 and torch.is_grad_enabled():  # not where losses are looked at
            looks_again(model, inputs["x"], how)
        return model(inputs["x"]).square().sum(1)

    model = change(change=WRITES[written])
    args = DPTrainingArguments(
        tmp_path,
        max_steps=5,
        expected_batch_size=10,
        per_device_train_batch_size=2,
        noise_multiplier=1.0,
        dp_seed=0,
        target_delta=1e-3,
        report_to=[],
        save_strategy="no",
    )
    rows = [{"x": row} for row in torch.randn(40, 3)]
    trainer = DPTrainer(model, args, train_dataset=rows, per_example_loss_func=losses_of, data_collator=stacked)
    with pytest.raises(ValueError, match=rf"'{NAMES[written]}' of the model changed in a forward"):
        trainer.train()
    assert trainer.state.global_step == 2
