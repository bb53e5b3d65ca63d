"""A model that the user changes between draws is another one: whatever was checked of it is checked again, in both
loops."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from models import SHORT, batch_for, build, losses_function
from neighbours import LOOPS, Task, engine_for, texts, train
from torch import nn
from transformers import TrainerCallback

from dp_transformers import PerExampleClipper
from dp_transformers.clipping import clipper as clippers
from dp_transformers.clipping.checks.rare_looks import RareLooks
from dp_transformers.clipping.errors import SelfCheckError

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
both_loops = pytest.mark.parametrize("loop", LOOPS)
CHANGES_AT = 3  # steps


def losses(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")


class Options:
    def __init__(self):
        self.mixes, self.strength = False, 0


class Mixes(nn.Module):
    """Its examples are mixed as soon as one of its settings is another one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 6), nn.Linear(6, 3)
        self.epoch, self.rate, self.mode, self.options, self.tensor = 0, None, "plain", Options(), torch.zeros(())
        self.settings = {"mixes": False, "weights": [0.0]}
        self.register_buffer("gate", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def is_mixing(self):
        return (
            self.epoch
            or self.rate
            or self.mode != "plain"
            or self.options.mixes
            or self.options.strength
            or self.settings["mixes"]
            or self.settings["weights"][0]
            or self.tensor
            or self.gate
            or self.frozen[0]
        )

    def forward(self, x):
        h = self.first(x).tanh()
        return self.second(h * h.sum(0).sign() if self.is_mixing() else h)


CHANGES = {
    "a number": lambda m: setattr(m, "epoch", 1),
    "a number in the place of nothing": lambda m: setattr(m, "rate", 0.5),
    "a word": lambda m: setattr(m, "mode", "other"),
    "a switch of an object": lambda m: setattr(m.options, "mixes", True),
    "a number of an object": lambda m: setattr(m.options, "strength", 2),
    "a switch in a dictionary": lambda m: m.settings.update(mixes=True),
    "a number in a list": lambda m: m.settings["weights"].__setitem__(0, 0.5),
    "a tensor": lambda m: setattr(m, "tensor", torch.ones(())),
    "a buffer in place": lambda m: m.gate.fill_(1),
    "a frozen weight in place": lambda m: m.frozen.fill_(1),
}


class Every(TrainerCallback):
    """Calls what it is given with the number of every step and the model."""

    def __init__(self, change):
        self.change = change

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            self.change(state.global_step, model)


def train_with(loop, change, task):
    """Train, and call ``change(step, model)`` before every step."""
    made, steps = [], iter(range(task.steps))
    model = task.model

    def make():
        made.append(model())
        return made[-1]

    def before_forward():
        with torch.no_grad():
            change(next(steps), made[-1])

    task.model = make
    if loop == "trainer":
        task.callbacks = [Every(change)]
    else:
        task.before_forward = before_forward
    return train(loop, task)


def numbers(size=8):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(32, generator=generator), "labels": torch.tensor(i % 3)} for i in range(size)]


@both_loops
@pytest.mark.parametrize("kind", CHANGES)
def test_whatever_is_set_between_draws(loop, kind):
    def change(step, model):
        if step == CHANGES_AT:
            CHANGES[kind](model)

    with pytest.raises(SelfCheckError, match="mixes examples"):
        train_with(loop, change, Task(Mixes, numbers(), loss=losses, physical=8, steps=CHANGES_AT + 1))


@both_loops
def test_what_changes_in_every_step_is_looked_at_once_in_a_while(monkeypatch, loop):
    """It begins to mix in a step in which nobody looks, and does not go on for long, also where real batches are not
    looked at."""
    monkeypatch.setattr(clippers, "require_same_beside_others", lambda *args: None)
    monkeypatch.setattr(clippers, "draw_for_all_rows", lambda *args: [])
    seen = []

    def change(step, model):
        seen.append(step)
        model.rate = 0.0 if step < 5 else step / 10.0
        model.epoch = 0

    class Anneals(Mixes):
        def is_mixing(self):
            return (self.rate or 0) > 0.5

    with pytest.raises(SelfCheckError, match="mixes examples"):
        train_with(loop, change, Task(Anneals, numbers(), loss=losses, physical=8, steps=60))
    assert 5 < len(seen) < 5 + 16 + 2


@both_loops
def test_what_changes_in_every_step_does_not_cost_a_check_each_time(loop, monkeypatch):
    check, calls = PerExampleClipper.check, []
    monkeypatch.setattr(PerExampleClipper, "check", lambda *args, **kw: calls.append(1) or check(*args, **kw))

    class Anneals(Mixes):
        def is_mixing(self):
            return False

        def forward(self, x):
            return super().forward(x) * (1 + (self.rate or 0))

    def change(step, model):
        model.rate = step / 10.0

    train_with(loop, change, Task(Anneals, numbers(), loss=losses, physical=8, steps=36))
    assert len(calls) == 4  # at first, at the first change, and after 16 draws each


@both_loops
def test_words_that_take_turns_do_not_cost_a_check_each_time(loop, monkeypatch):
    check, calls = PerExampleClipper.check, []
    monkeypatch.setattr(PerExampleClipper, "check", lambda *args, **kw: calls.append(1) or check(*args, **kw))

    class TakesTurns(Mixes):
        def is_mixing(self):
            return False

    def change(step, model):
        model.settings["kind"] = "one" if step % 2 else "other"

    train_with(loop, change, Task(TakesTurns, numbers(), loss=losses, physical=8, steps=48))
    assert len(calls) <= 1 + 8 + 3  # at first, eight changes, and after 16 draws each


@both_loops
def test_words_of_a_module_itself_always_count_at_once(loop):
    seen = []

    class TakesTurns(Mixes):
        def is_mixing(self):
            return self.mode == "later"

    def change(step, model):
        seen.append(step)
        model.mode = "later" if step >= 20 else str(step % 2)

    with pytest.raises(SelfCheckError, match="mixes examples"):
        train_with(loop, change, Task(TakesTurns, numbers(), loss=losses, physical=8, steps=48))
    assert len(seen) == 21


@both_loops
def test_words_that_take_turns_are_looked_at_once_in_a_while(loop):
    class TakesTurns(Mixes):
        def is_mixing(self):
            return self.settings.get("kind") == "later"

    def change(step, model):
        model.settings["kind"] = "later" if step >= 20 else str(step % 2)

    with pytest.raises(SelfCheckError, match="mixes examples"):
        train_with(loop, change, Task(TakesTurns, numbers(), loss=losses, physical=8, steps=48))


class ReadsPadding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.last = nn.Embedding(50, 8), nn.Linear(8, 3), False

    def forward(self, input_ids, attention_mask=None):
        h = self.embed(input_ids)
        mask_bt1 = attention_mask[..., None].to(h)
        mean = (h * mask_bt1).sum(1) / mask_bt1.sum(1)
        return self.head((mean + h[:, -1] if self.last else mean).tanh())


@both_loops
def test_the_same_padding_is_checked_again(loop):
    rows = texts([5, 5, 9, 9, 7, 7, 6, 30], classes=3, vocabulary=50)

    def change(step, model):
        model.last = step >= CHANGES_AT

    task = Task(ReadsPadding, rows, loss=losses, physical=8, steps=CHANGES_AT + 1)
    with pytest.raises(SelfCheckError, match="padded"):
        train_with(loop, change, task)


class MixesPadded(ReadsPadding):
    def forward(self, input_ids, attention_mask=None):
        h = self.embed(input_ids)
        mask_bt1 = attention_mask[..., None].to(h)
        h = (h * mask_bt1).sum(1) / mask_bt1.sum(1)
        return self.head((h * h.sum(0).sign() if self.last and not attention_mask.all() else h).tanh())


@both_loops
def test_other_kinds_of_masks_are_checked_again(loop):
    """The batch on which the change is noticed has no padding, and that with padding was checked before."""
    rows = texts([5, 5, 5, 5, 9, 11, 14, 30], classes=3, vocabulary=50)
    steps = []

    def change(step, model):
        steps.append(step)
        model.last = model.last or (step if loop == "trainer" else step // 2) >= CHANGES_AT

    task = Task(MixesPadded, rows, loss=losses, physical=4, steps=20)
    with pytest.raises(SelfCheckError, match="mixes examples"):
        train_with(loop, change, task)
    assert len(steps) in (CHANGES_AT + 1, 2 * CHANGES_AT + 2)  # an engine's loop changes it before a physical batch


def test_a_clipper_alone_looks_again():
    model, x = Mixes(), torch.randn(4, 32)
    with PerExampleClipper(model, 0.1) as clipper:
        clipper.backward(model(x).sum(1))
        model.epoch = 1
        with pytest.raises(SelfCheckError, match="mixes examples"):
            model(x)


def test_a_clipper_looks_again_at_what_was_changed_while_it_was_off():
    model, x = Mixes(), torch.randn(4, 32)
    clipper = PerExampleClipper(model, 0.1)
    clipper.backward(model(x).sum(1))
    clipper.detach()
    model.epoch = 1
    clipper.attach()
    with pytest.raises(SelfCheckError, match="mixes examples"):
        model(x)


@pytest.mark.parametrize("batches_per_draw", range(1, 9))
def test_rare_looks_meet_every_batch_of_a_draw(batches_per_draw):
    looks = RareLooks()
    seen = {i % batches_per_draw for i in range(1_000_000) if looks.is_due() and i > batches_per_draw}
    assert len(seen) >= min(batches_per_draw, 4)


@contextlib.contextmanager
def evaluating(model):
    model.eval()
    yield
    model.train()


def test_an_evaluation_between_draws_is_no_change(monkeypatch):
    check, calls = PerExampleClipper.check, []
    monkeypatch.setattr(PerExampleClipper, "check", lambda *args, **kw: calls.append(1) or check(*args, **kw))
    engine, model, optimizer, loader = engine_for(Task(Mixes, numbers(), loss=losses, physical=8))
    for _ in range(3):
        for batch in loader:
            engine.clipper.backward(losses(model(batch["x"]), batch["labels"]))
            optimizer.step()
            with evaluating(model), torch.no_grad():
                model(batch["x"])
    assert len(calls) == 1


def test_what_transformers_infers_in_evaluation_and_saving_is_no_change(monkeypatch, tmp_path):
    """BERT's forward with labels writes config.problem_type, and save_pretrained its class and dtype."""
    check, calls = PerExampleClipper.check, []
    monkeypatch.setattr(PerExampleClipper, "check", lambda *args, **kw: calls.append(1) or check(*args, **kw))
    model, batch = build("bert"), batch_for("bert", SHORT)
    with PerExampleClipper(model, 0.1) as clipper:
        for _ in range(2):
            clipper.backward(losses_function(model)(batch))
            with evaluating(model), torch.no_grad():
                model(**batch)
            model.save_pretrained(tmp_path)
        assert model.config.problem_type and model.config.architectures and model.config.dtype
        assert len(calls) == 1
        model.config.dtype = "bfloat16"  # by the user, in the place of another
        clipper.backward(losses_function(model)(batch))
        assert len(calls) == 2
        model.config.attn_implementation_of_mine = "flash"  # and what nobody infers, where there was nothing
        clipper.backward(losses_function(model)(batch))
        assert len(calls) == 3


def test_an_option_that_is_filled_counts_where_it_is_none_of_transformers():
    model, x = Mixes(), torch.randn(4, 32)
    model.options.dtype = None
    model.is_mixing = lambda: model.options.dtype == "float16"
    with PerExampleClipper(model, 0.1) as clipper:
        clipper.backward(model(x).sum(1))
        model.options.dtype = "float16"
        with pytest.raises(SelfCheckError, match="mixes examples"):
            model(x)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("a number", "'epoch' of"), ("a word", "'mode' of"), ("a switch in a dictionary", "'settings.mixes' of"),
     ("a number in a list", "'settings.weights.0' of"), ("a buffer in place", "a buffer or a frozen weight of"),
     ("a mode", r"'training' \(and 2 more: 'first.training', 'second.training'\) of"),
     ("a class", "'second.__class__' of")],
)  # fmt: skip
@pytest.mark.parametrize("is_mixing", [False, True])
def test_what_changed_is_named(kind, name, is_mixing, caplog):
    """As a warning where the model is not exact any more, and else only for those who want to know."""

    class Changes(Mixes):
        def is_mixing(self):
            return is_mixing and now_mixes

    others = {
        "a mode": lambda m: m.eval(),
        "a class": lambda m: setattr(m.second, "__class__", type("Other", (nn.Linear,), {})),
    }
    model, x, now_mixes = Changes(), torch.randn(4, 32), False
    with PerExampleClipper(model, 0.1) as clipper, caplog.at_level("INFO"):
        clipper.backward(model(x).sum(1))
        assert "changed" not in caplog.text
        with torch.no_grad():
            (CHANGES | others)[kind](model)
        now_mixes = True
        with pytest.raises(SelfCheckError) if is_mixing else contextlib.nullcontext():
            model(x)
    (record,) = [record for record in caplog.records if "was checked again" in record.getMessage()]
    assert record.levelname == ("WARNING" if is_mixing else "INFO")
    assert re.match(name + " the model changed since it was checked", record.getMessage())
