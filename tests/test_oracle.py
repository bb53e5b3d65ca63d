"""Rows of a real batch together against each alone and unpadded, and one of them in some batches of a whole training."""

import contextlib
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from models import CHECKPOINTING
from neighbours import padded, plain_loop, points, texts
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from violations import Scores, given

from dp_transformers import PerExampleClipper, check_model, register_grad_sampler
from dp_transformers.clipping.checks import witness
from dp_transformers.clipping.checks.comparison import Comparison, _shadow
from dp_transformers.clipping.checks.oracle import Oracle
from dp_transformers.clipping.checks.rows import Rows, projected
from dp_transformers.clipping.checks.without_dropout import without_dropout
from dp_transformers.clipping.checks.witness import Schedule
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.data.draws import LogicalBatches
from dp_transformers.losses.heads import find_per_example_loss
from dp_transformers.mechanism.sampling import Draw
from dp_transformers.runtime.randomness import SecretSeeds

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip
LENGTHS = (9, 5, 12, 7)


def bert():
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=3))


def gpt2():
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=50))


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2))


class Lstm(nn.Module):
    def __init__(self, reads_end):
        super().__init__()
        self.words, self.lstm, self.last = nn.Embedding(50, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 3)
        self.reads_end = reads_end

    def forward(self, input_ids, attention_mask):
        states = self.lstm(self.words(input_ids))[0]
        at = -1 if self.reads_end else attention_mask.sum(1) - 1
        return self.last(states[torch.arange(len(input_ids)), at])


class Packs(nn.Module):
    """Which number of the dropout between its layers a row gets follows the lengths of all."""

    def __init__(self, kind):
        super().__init__()
        self.words, self.rnn, self.last = (
            nn.Embedding(50, 8),
            kind(8, 8, 2, dropout=0.3, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, input_ids, attention_mask):
        packed = pack_padded_sequence(self.words(input_ids), attention_mask.sum(1), True, enforce_sorted=False)
        states = self.rnn(packed)[1]
        return self.last((states[0] if isinstance(states, tuple) else states)[-1])


class Pools(nn.Module):
    """The mean over a text's own positions; ``change(h, ids)`` is what becomes of it."""

    def __init__(self, change=lambda h, ids: h, last=nn.Linear):
        super().__init__()
        self.words, self.first, self.last = nn.Embedding(50, 16), nn.Linear(16, 16), last(16, 3)
        self.change = change

    def forward(self, input_ids, attention_mask):
        own = attention_mask[..., None]
        h = (self.first(self.words(input_ids)).tanh() * own).sum(1) / own.sum(1)
        return self.last(self.change(h, input_ids))


class PoolsAll(Pools):
    def forward(self, input_ids, attention_mask):
        return self.last(self.first(self.words(input_ids)).mean(1))


class WrongByOnePercent(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@register_grad_sampler(WrongByOnePercent)
def _wrong(layer, activations, backprops):
    return {layer.weight: 1.01 * torch.einsum("bi,bj->bij", backprops, activations[0]), layer.bias: backprops}


def ce(model, inputs):
    labels = inputs.pop("labels")
    return F.cross_entropy(getattr(out := model(**inputs), "logits", out), labels, reduction="none")


def of_head(model, inputs):
    """Its own loss, where the first token of each text is left out: on the left padding would predict it."""
    labels, first = inputs.pop("labels").clone(), inputs["attention_mask"].argmax(1)
    labels[torch.arange(len(labels)), first] = -100
    return find_per_example_loss(model)(model(**inputs, use_cache=False), labels)


def first_token_too(model, inputs):
    labels = inputs.pop("labels")
    return find_per_example_loss(model)(model(**inputs, use_cache=False), labels)


def batch_of(lengths=LENGTHS, side="right", classes=3, fill=-100):
    rows = texts(lengths, classes=classes)
    if classes is not None:
        rows[1]["input_ids"][2] = 49  # which no other row has

    def collate(rows):
        batch = padded(rows, side)
        if classes is None and fill != -100:
            batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, fill)
        return batch

    logical = LogicalBatches(rows, collate, len(rows), SecretSeeds(1))
    (batch,) = logical[Draw(0, list(range(len(rows))))].batches
    return batch


def compare(model, losses_of, batch, **options):
    rows = {name: x.clone() for name, x in batch.rows.items()}
    with PerExampleClipper(model.train(), 1.0, **options) as clipper:
        clipper.compare((), rows, lambda **inputs: losses_of(model, inputs), batch.sizes, batch.sizes_of)
    return clipper


SOUND = {
    "BERT, padded on the right": (bert, ce, {}),
    "GPT-2, padded on the right": (gpt2, of_head, {"classes": None}),
    "Llama, padded on the left, the first token left out": (llama, of_head, {"classes": None, "side": "left"}),
    "an LSTM that reads the last own state": (lambda: Lstm(False), ce, {}),
    "the mean over own positions": (Pools, ce, {}),
    **{f"packed rows of {kind.__name__}": (lambda kind=kind: Packs(kind), ce, {}) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
}  # fmt: skip
VIOLATIONS = {
    "GPT-2, padded on the left": (gpt2, of_head, {"classes": None, "side": "left"}, "padded"),
    "BERT, padded on the left": (bert, ce, {"side": "left"}, "padded"),
    "Llama, the first token predicted by padding": (llama, first_token_too, {"classes": None, "side": "left"}, "padded"),
    "labels padded with a number that counts": (gpt2, of_head, {"classes": None, "fill": 0}, "padded"),
    "an LSTM that reads the padded end": (lambda: Lstm(True), ce, {}, "padded"),
    "the mean over padding": (PoolsAll, ce, {}, "padded"),
    "a condition over the batch": (lambda: Pools(lambda h, ids: h * (1 + (ids == 49).any())), ce, {}, "mixes"),
    "a maximum over the batch": (lambda: Pools(lambda h, ids: h / h.abs().max()), ce, {}, "mixes"),
    "the mean of the batch taken off": (lambda: Pools(lambda h, ids: h - h.mean(0)), ce, {}, "mixes"),
    "room for two rows": (lambda: Pools(lambda h, ids: h * (torch.arange(len(h)) < 2)[:, None]), ce, {}, "mixes"),
    "batch statistics": (lambda: Pools(lambda h, ids: F.batch_norm(h, None, None, training=len(h) > 1)), ce, {}, "alone"),
    "a rule that is wrong by 1%": (lambda: Pools(last=WrongByOnePercent), ce, {}, "a rule is wrong"),
    "a loss that compares rows": (Pools, lambda m, i: (x := ce(m, i)) * (x >= x.max()), {}, "compares rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_set_ups(name):
    model, losses_of, options = SOUND[name]
    torch.manual_seed(0)
    compare(model(), losses_of, batch_of(**options))


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations(name):
    model, losses_of, options, says = VIOLATIONS[name]
    torch.manual_seed(0)
    built = model()
    with pytest.raises(SelfCheckError, match=says) as caught:
        compare(built, losses_of, batch_of(**options))
    text = re.sub(rf"-1(00)?|1%|{type(built).__name__}", "", str(caught.value))
    assert not any(character.isdigit() for character in text), "a figure of rows"


@pytest.mark.parametrize(
    "name", ["an LSTM that reads the padded end", "the mean over padding", "a maximum over the batch"]
)
def test_a_loop_whose_loss_is_not_known(name):
    model, _, options, says = VIOLATIONS[name]
    batch = batch_of(**options)
    inputs = {name: x for name, x in batch.rows.items() if name != "labels"}
    with PerExampleClipper(model(), 1.0) as clipper, pytest.raises(SelfCheckError, match=says):
        clipper.compare((), inputs, None, batch.sizes, batch.sizes_of)


@pytest.mark.parametrize("mode", ["book_keeping", "ghost", "fast_gradient", "per_sample"])
@pytest.mark.parametrize("name", ["BERT, padded on the right", "an LSTM that reads the last own state"])
def test_dropout_is_off_and_back_on(name, mode):
    """Also in what checkpointing, or a layer without a rule, runs again in the backward pass."""
    model = SOUND[name][0]()
    if name.startswith("BERT"):
        getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": False})
    batch, before = batch_of(), torch.get_rng_state()
    compare(model, ce, batch, mode=mode)
    assert torch.equal(before, torch.get_rng_state())
    x = torch.ones(100)
    assert model.training and bool((F.dropout(x, 0.5) == 0).any())


def test_projections_are_random_where_other_draws_are_constants():
    with without_dropout():
        assert torch.rand(2, generator=torch.Generator()).tolist() == [pytest.approx(0.6)] * 2
        for one, other in ((0, 1), (0, 8191), (1, 20000)):
            x = torch.zeros(20001)
            x[one], x[other] = 1.0, -1.0
            assert _shadow(x).abs().max() > 1e-3
        assert projected([torch.eye(2)]).diff().abs() > 1e-3


def test_without_dropout_goes_back_without_it():
    x, layer = torch.randn(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    with without_dropout():
        losses = checkpoint(layer, x, use_reentrant=False).sum(1)
        found = torch.autograd.grad(losses.sum(), layer[0].weight)[0]
        assert torch.equal(torch.rand(2), torch.rand(2)) and torch.equal(torch.randn_like(x), torch.randn_like(x))
    assert torch.allclose(found, x.sum(0).expand(6, 6), atol=1e-6)


@pytest.mark.parametrize("draws", ["torch.randint(9, (1,)).item()", "random.random()", "np.random.rand()"])
def test_what_draws_other_numbers_is_compared_in_evaluation(draws):
    """A wrong rule is then seen there."""
    import random

    import numpy as np

    draw = eval(f"lambda: {draws}", {"torch": torch, "random": random, "np": np})
    model = Pools()
    model.change = lambda h, ids: h * (1 + draw()) if model.training else h
    compare(model, ce, batch_of())
    wrong = Pools(last=WrongByOnePercent)
    wrong.change = lambda h, ids: h * (1 + draw()) if wrong.training else h
    with pytest.raises(SelfCheckError, match="a rule is wrong"):
        compare(wrong, ce, batch_of())
    model.change = lambda h, ids: h * (1 + draw())
    with pytest.raises(SelfCheckError, match="other ones when it runs again"):
        compare(model, ce, batch_of())


def test_rows_are_cut_as_they_were_padded():
    batch = batch_of(side="left", classes=None)
    ids, mask = batch.rows["input_ids"], batch.rows["attention_mask"]
    made = {
        "mask": mask.bool(),
        "square": mask[:, None] * mask[:, :, None] > 0,
        "scores": torch.rand(4, 3),
    }
    positions = torch.arange(ids.shape[1])[None]
    rows = Rows.of(nn.Linear(1, 1), (ids,), {**made, "positions": positions}, batch.sizes_of((ids,), {}))
    assert ids.shape[1] == max(LENGTHS) and rows.spread(2) == [0, 3]
    for row, own in enumerate(sorted(LENGTHS)):
        alone = rows.alone(row)
        assert torch.equal(alone.args[0][0], ids[row, -own:])
        kwargs = alone.kwargs
        assert kwargs["mask"].shape == (1, own) and bool(kwargs["mask"].all())
        assert kwargs["square"].shape == (1, own, own) and kwargs["scores"].shape == (1, 3)
        assert kwargs["positions"].shape == (1, own)


def counted(model):
    """How many rows go forward, in a list that grows."""
    rows = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return rows


def test_several_rows_of_each_example_in_one_tensor_are_refused_with_the_way_out():
    class Patches(nn.Linear):
        def forward(self, ids, pixels):
            return super().forward(pixels.view(len(ids), -1, 12).mean(1))

    with pytest.raises(SelfCheckError, match="give it tensors with one row for each example"):
        check_model(Patches(12, 2), (torch.ones(4, 5), torch.randn(8, 12)))


def test_when_rows_are_compared():
    """Once, and when something is new about them: more rows, a shorter or a longer one, other modules."""
    model = Pools()
    rows = counted(model)
    with PerExampleClipper(model.train(), 1.0) as clipper:

        def compares(lengths):
            batch = batch_of(lengths)
            rows.clear()
            clipper._schedule.is_due = lambda together: False
            losses_of = lambda **inputs: ce(model, inputs)  # noqa: E731
            clipper.compare((), dict(batch.rows), losses_of, batch.sizes, batch.sizes_of)
            return len(rows), sum(rows)

        passes, in_all = compares((33, 35, 40, 41))
        assert passes == 2 + 1 + 5 + 1 and in_all <= 6 * 8
        assert compares((34, 40, 38)) == (0, 0)
        assert compares((33, 46)) == (4, 5), "one row, which shows the precision, two alone and both together"
        assert compares((34, 46, 45)) == compares((34, 34, 34)) == (0, 0)
        assert compares((32, 45)) == (4, 5)
        assert compares((36,) * 6 + (37,))[0] == 1 + 7 + 1
        assert compares((36,) * 20 + (37,))[0] == 1 + 8 + 1
        assert compares((36,) * 40 + (37,)) == (0, 0)
        model.last = nn.Sequential(nn.Linear(16, 3))
        assert compares((36, 37)) == (7, 18), "the modules are new"


class Tasks(nn.Module):
    """A head for each task, of which a batch reaches one; ``reach(head, h)`` calls it."""

    def __init__(self, reach=lambda head, h: head(h)):
        super().__init__()
        self.first, self.heads, self.reach = (
            nn.Linear(6, 6),
            nn.ModuleDict({"0": nn.Linear(6, 3), "1": nn.Linear(6, 3)}),
            reach,
        )

    def forward(self, x, task):
        h = self.first(x).tanh()
        return self.reach(self.heads["1"], h) if task else self.heads["0"](h)


def losses_alone(model, x, task):
    used = [*model.first.parameters(), *model.heads[str(task)].parameters()]
    losses = [model(row[None], task).square().sum() for row in x]
    return [torch.stack([g.norm() for g in torch.autograd.grad(loss, used)]).norm() for loss in losses]


def test_a_head_that_the_compared_rows_did_not_reach_is_compared_when_it_is_called(monkeypatch):
    """Once for each: the norms are those of rows alone."""
    compared, compare = [], Oracle.compare
    monkeypatch.setattr(Oracle, "compare", lambda *args: compared.append(1) or compare(*args))
    model = Tasks()
    with PerExampleClipper(model, 1.0) as clipper:
        for task, times in ((0, 1), (1, 2), (0, 2), (1, 2), (0, 2)):
            x = torch.randn(4, 5, 6)
            found = clipper.backward(model(x, task).square().flatten(1).sum(1))
            with clipper.suspended():
                expected = losses_alone(model, x, task)
            assert torch.allclose(found, torch.stack(expected), rtol=1e-5) and len(compared) == times


GATHERS = {
    "on positions first": lambda head, h: head(h.transpose(0, 1)).transpose(0, 1),
    "on the largest positions of all rows": lambda head, h: head(h.flatten(0, 1)[h[..., 0].flatten().topk(len(h)).indices])[:, None],
}  # fmt: skip


@pytest.mark.parametrize("how", GATHERS)
def test_a_head_that_is_called_otherwise_later_is_refused(how):
    """It would be taken to have its rows first, of which there are as many as positions."""
    model = Tasks(GATHERS[how])
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.backward(model(torch.randn(4, 4, 6), 0).square().flatten(1).sum(1))
        with pytest.raises(SelfCheckError, match=r"'heads.1' \(Linear\) is called otherwise|mixes"):
            clipper.backward(model(torch.randn(4, 4, 6), 1).square().flatten(1).sum(1))


@pytest.mark.parametrize("drops", [False, True])
def test_the_witness_sees_what_a_rare_row_switches_on(drops, monkeypatch):
    """In as many of 40 trainings of six batches with such a row as the stated probability says."""
    seconds = itertools.count()
    found = 0
    monkeypatch.setattr(witness, "SHARE", 0.1)  # a look, which takes as long as a batch here, at one in ten
    for seed in range(40):
        torch.manual_seed(seed)
        switch = Pools(lambda h, ids: F.dropout(h, 0.1 * drops) * (1 - 2 * (ids == 49).any()))
        with PerExampleClipper(switch.train(), 1.0) as clipper:
            clipper._schedule = Schedule(lambda: next(seconds))
            clipper._schedule._secret.seed(seed)
            for _ in range(50):  # batches before, of which the first is looked at
                if clipper._schedule.is_due(together=False):
                    with clipper._schedule.looking():
                        pass
            try:
                for step in range(12):
                    ids = torch.randint(3, 49, (10, 8))
                    ids[seed % 10, 0] = 49 if step >= 6 else 5
                    clipper.backward(
                        F.cross_entropy(switch(ids, torch.ones_like(ids)), ids[:, 1] % 3, reduction="none")
                    )
            except SelfCheckError as error:
                found += "alone and unpadded" in str(error) and step >= 6
    assert 12 <= found <= 30, found  # of 40 times six batches, one in ten looked at, with nine rows of ten that move


def test_the_witness_takes_its_share_of_the_time():
    now, looks = 0.0, 0
    schedule = Schedule(lambda: now)
    for _ in range(20_000):
        now += 1.0
        if schedule.is_due(together=False):
            looks += 1
            with schedule.looking():
                now += 0.5
    assert 0.8 < looks * 0.5 / (0.01 * now) <= 1.0
    assert sum(Schedule().is_due(together=True) for _ in range(1)) == Schedule().is_due(together=True), (
        "alike on ranks"
    )


def test_a_training_spends_its_share_of_the_time_on_the_witness():
    """Every pass over the model takes a second here: of 700 batches the witness runs again at most seven."""
    now, again = [0.0], [0]
    model = Scores()

    def passes(module, args):
        now[0] += 1.0
        again[0] += len(args[0]) == 1 and not torch.is_grad_enabled()

    with PerExampleClipper(model, 1.0) as clipper:
        clipper.check((torch.randn(4, 6),), {})
        clipper._schedule = Schedule(lambda: now[0])
        model.register_forward_pre_hook(passes)
        for _ in range(700):
            clipper.backward(model(torch.randn(4, 6)).square().sum(1))
    assert 3 <= again[0] <= 0.01 * now[0]


def test_the_witness_lets_through_what_rounding_moves(monkeypatch):
    """One row of a batch that sorts: a second one must confirm it."""
    monkeypatch.setattr(witness, "SHARE", 1e9)
    model = Scores()
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.check((torch.randn(4, 6),), {})
        for place in range(3):
            x = torch.randn(9, 6)
            model.change = lambda h, m, place=place: h + (torch.arange(len(h)) == place)[:, None] * (len(h) == 9)
            clipper.backward(model(x).square().sum(1))


class HalfInside(Scores):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("kind", [Scores, HalfInside])
def test_the_witness_lets_through_what_bf16_rounds(monkeypatch, kind):
    monkeypatch.setattr(witness, "SHARE", 1e9)
    with PerExampleClipper(model := kind(), 1.0) as clipper:
        clipper.check((torch.randn(4, 6),), {})
        model.change = lambda h, m: h * (1.02 if len(h) == 9 else 1.0)
        with contextlib.nullcontext() if kind is HalfInside else pytest.raises(SelfCheckError):
            clipper.backward(model(torch.randn(9, 6)).square().sum(1))


def test_no_row_is_looked_at_where_a_batch_is_another_by_chance(monkeypatch):
    monkeypatch.setattr(witness, "SHARE", 1e9)
    model = Scores(lambda h, m: F.dropout(h, 0.5) + torch.randn_like(h))
    with PerExampleClipper(model.train(), 1.0) as clipper:
        for _ in range(4):
            clipper.backward(model(torch.randn(9, 6)).square().sum(1))


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_compared_in_float32(autocast):
    """In bf16 an influence of 2% is below the rounding."""
    slightly = lambda h, ids: h + 0.02 * h.mean(0)  # noqa: E731
    for change, is_sound in ((lambda h, ids: h, True), (slightly, False)):
        model = Pools(change)
        if not autocast:
            model = model.bfloat16()
        losses_of = lambda m, i: ce(m, i).float()  # noqa: E731
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if is_sound:
                compare(model, losses_of, batch_of())
                continue
            with pytest.raises(SelfCheckError, match="mixes"):
                compare(model, losses_of, batch_of())
        assert {p.dtype for p in model.parameters()} == {torch.float32 if autocast else torch.bfloat16}


class Adapted(nn.Module):
    """Adapters beside a frozen layer, of which the second one begins with zeros."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 3), WrongByOnePercent(6, 4), nn.Linear(4, 3, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_weights_that_are_zero_at_first():
    """A rule behind LoRA's B would see no gradient, and its weight holds zeros again afterwards."""
    model = Adapted()
    with pytest.raises(SelfCheckError, match="a rule is wrong"):
        check_model(model, {"x": torch.randn(4, 6)})
    assert not model.up.weight.any()


def test_rows_that_are_not_finite_or_have_no_gradient():
    batch = batch_of((8, 8, 8, 8))

    def losses_of(model, inputs):
        ids = inputs["input_ids"]
        losses = ce(model, inputs)
        return torch.where((ids[:, 0] == batch.rows["input_ids"][0, 0]), losses * torch.inf, losses) * (
            ids[:, 0] != batch.rows["input_ids"][2, 0]
        )

    compare(Pools(), losses_of, batch)


def test_a_batch_takes_no_more_memory_than_a_step():
    """Gradients of rows are never held beside those of others, or of their sum."""
    from dp_transformers.cli.model_check import _peak_bytes

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 800), nn.Tanh(), nn.Linear(800, 800), nn.Tanh(), nn.Linear(800, 3))
    x = torch.randn(16, 400)
    with PerExampleClipper(model, 1.0, self_check=False, mode="ghost") as clipper:
        step = _peak_bytes(lambda: clipper.backward(model(x).square().sum(1)))
        rows = Rows.of(model, (x,), {})

        def compared():
            with clipper.engine.trial():
                assert Comparison(clipper.engine, rows, rows.spread(), None).run().are_small

        compared()  # which draws the directions of projections
        for p in model.parameters():
            p.grad = None
        assert _peak_bytes(compared) <= 1.1 * step


def test_parts_of_a_gradient_that_nearly_cancel_show_in_its_projections():
    """A sum that is off by 1%, in one parameter of two million numbers or of three."""
    for size in (3, 2_000_000):
        x = torch.randn(size)
        for off in (0.0, 0.01):
            y = x.clone()
            y[size // 2 :] *= 1 + off
            error = (_shadow(x) - _shadow(y)).norm() / x.norm()
            assert (error > 1e-3) == bool(off), (size, off, error)


def test_a_check_of_public_rows_has_figures():
    report = check_model(Scores(), {"x": torch.randn(4, 6)})
    assert 0 < max(report.norm_error, report.sum_error, report.loss_error) < 1e-5


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_a_plain_loop_says_that_it_was_checked(caplog):
    private = plain_loop(given(rows=lambda: points(8), check=True)())
    batch = next(iter(private.loader))
    private.engine.backward(F.cross_entropy(private.model(batch["x"]), batch["labels"], reduction="none"))
    assert "self-check passed" in caplog.text
