"""What a model computes for a row of a real batch may not depend on what is in the other rows, in either loop."""

import pytest
import torch
import torch.nn.functional as F
from models import SHORT, batch_for, build, losses_function
from neighbours import LOOPS, Task, texts, train
from oracle import trainable
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from dp_transformers import PerExampleClipper, PrivacyEngine
from dp_transformers.clipping import clipper as clippers
from dp_transformers.clipping.errors import SelfCheckError

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
BOUND, RARE, WIDTH = 0.3, 9999, 8  # made-up texts hardly ever have the rare token
REFUSED = "returns something else for a row of this batch when other rows stand beside it"


def losses(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")


class Reads(nn.Module):
    """A class for each text; ``change(ids, h)`` is what the batch does to its rows."""

    def __init__(self, change=lambda ids, h: h, p=0.0):
        super().__init__()
        self.change, self.words, self.hidden = change, nn.Embedding(RARE + 1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.head = nn.Dropout(p), nn.Linear(WIDTH, 3)

    def forward(self, input_ids, attention_mask=None):
        h = self.dropout(self.hidden(self.words(input_ids).mean(1)))
        return self.head(torch.tanh(self.change(input_ids, h)))


CONDITIONS = {
    "any": lambda ids, h: h * (3.0 if bool((ids == RARE).any()) else 1.0),
    "any, on the device": lambda ids, h: h * torch.where((ids == RARE).any(), 3.0, 1.0),
    "the largest": lambda ids, h: h * (1 + ids.max() // RARE),
    "how many": lambda ids, h: h + (ids == RARE).sum() / 2,
    "the row before": lambda ids, h: h + (ids == RARE).any(1, keepdim=True).roll(1, 0).float(),
}


def rows(rare=2):
    """Texts of which one has the rare token."""
    found = texts([6] * 8)
    found[rare]["input_ids"][3] = RARE
    return found


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("p", [0.0, 0.2])  # where no number is drawn, one run of the model serves two looks
def test_a_condition_over_the_batch_is_refused(loop, condition, p):
    task = Task(lambda: Reads(CONDITIONS[condition], p), rows(), loss=losses, bound=BOUND, physical=8, steps=3)
    with pytest.raises(SelfCheckError, match=REFUSED):
        train(loop, task)


@pytest.mark.parametrize("rare", range(3))
@pytest.mark.parametrize("loop", LOOPS)
def test_in_whichever_row_it_is(loop, rare):
    task = Task(lambda: Reads(CONDITIONS["any"]), rows(rare)[:3], loss=losses, bound=BOUND, physical=3)
    with pytest.raises(SelfCheckError, match=REFUSED):
        train(loop, task)


@pytest.mark.parametrize("with_criterion", [False, True])
def test_a_loop_with_a_criterion_and_one_that_goes_back_itself(with_criterion):

    def step(change, data):
        torch.manual_seed(0)
        model, criterion = Reads(change), nn.CrossEntropyLoss()
        engine, loader = PrivacyEngine(dp_seed=5), DataLoader(data, 8)
        options = {"noise_multiplier": 1.0, "max_grad_norm": BOUND, "criterion": criterion if with_criterion else None}
        made = engine.make_private(module=model, optimizer=torch.optim.SGD(model.parameters()), data_loader=loader, **options)  # fmt: skip
        model, optimizer, loader = made[0], made[1], made[-1]
        batch = next(iter(loader))
        (made[2] if with_criterion else criterion)(model(batch["input_ids"]), batch["labels"]).backward()
        optimizer.step()
        engine.detach()

    step(lambda ids, h: h, rows())
    with pytest.raises(SelfCheckError, match=REFUSED):
        step(CONDITIONS["any"], rows())


@pytest.mark.parametrize("loop", LOOPS)
def test_what_begins_after_a_look_does_not_go_on_for_long(loop):
    """Passes between those that come ever more rarely are looked at by chance."""
    begun = []

    def change(ids, h):
        begun.append(len(begun))
        return h * (3.0 if len(begun) > 60 and bool((ids == RARE).any()) else 1.0)

    model = Reads(change)
    task = Task(lambda: model, rows(), loss=losses, bound=BOUND, physical=8, steps=900)
    with pytest.raises(SelfCheckError, match=REFUSED):
        train(loop, task)


# ---- honest models ----


class Tags(nn.Module):
    """Packs texts of several lengths."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(50, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 3)  # fmt: skip

    def forward(self, input_ids, attention_mask):
        packed = pack_padded_sequence(
            self.words(input_ids), attention_mask.sum(1), batch_first=True, enforce_sorted=False
        )
        states = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        return self.head(states.sum(1))


class Biased(nn.Module):
    """Is given a table for pairs of positions, of which there are as many as rows."""

    def __init__(self, p=0.1):
        super().__init__()
        self.words, self.head, self.dropout = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 3), nn.Dropout(p)

    def forward(self, input_ids, bias):
        h = self.words(input_ids)
        return self.head(self.dropout((h @ h.transpose(1, 2) + bias).softmax(2) @ h).mean(1))


class Pairs(nn.Module):
    """Compares all texts with all images, as CLIP does, for losses of which some read what is on the diagonal alone."""

    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return self.text(x) @ self.image(y).T


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        h = checkpoint(self.first, self.before(x), use_reentrant=False)
        return self.second(self.dropout(h.tanh()))


def dropped():
    return Reads(p=0.5), lambda model: losses(model(torch.randint(1, 50, (6, 4))), torch.arange(6) % 3)


def square():
    """As many rows as positions, from the second batch on."""
    batches = [torch.randint(1, 50, (size, 6)) for size in (6, 6, 4)] * 2
    return Biased(), lambda model: losses(model(ids := batches.pop(), bias=torch.randn(6, 6).tril()), ids[:, 0] % 3)


def packed_texts():
    ids = torch.randint(1, 50, (5, 7))
    mask = (torch.arange(7) < torch.tensor([[7], [6], [6], [3], [2]])).long()
    return Tags(), lambda model: losses(model(ids * mask, mask), ids[:, 0] % 3)


def transposed():
    x = torch.randn(4, 4, WIDTH)
    return nn.LSTM(WIDTH, 3), lambda model: model(x)[0].pow(2).sum((0, 2))


def of_transformers(name, *, autocast=False, **options):
    def make():
        model = build(name, dropout=0.1, **options)
        losses_of, batch = losses_function(model), batch_for(name, SHORT)

        def of(model):
            with torch.autocast("cpu", torch.bfloat16, autocast):
                return losses_of(batch)

        return model, of

    return make


HONEST = {
    "dropout": dropped,
    "packed": packed_texts,
    "square": square,
    "transposed": transposed,
    "diagonal": lambda: (Pairs(), lambda model: model(torch.randn(5, WIDTH), torch.randn(5, WIDTH)).diagonal().pow(2)),
    "checkpointed": lambda: (Checkpointed(), lambda model: model(torch.randn(5, WIDTH)).pow(2).sum(1)),
    "BERT": of_transformers("bert"),
    "BERT, bf16": of_transformers("bert", autocast=True),
    "LoRA": of_transformers("llama", lora=True),
}
SILENT = ("diagonal",)  # refused by the self-check, which takes all that is returned for a loss


@pytest.mark.parametrize("case", HONEST)
def test_honest_models_are_looked_at_and_neither_refused_nor_changed(monkeypatch, case):
    """Norms, sums and random numbers are the same bits without the look."""
    torch.manual_seed(0)
    made, losses_of = HONEST[case]()
    looked_at, look = [], clippers.require_same_beside_others

    def run(looks):
        monkeypatch.setattr(clippers, "require_same_beside_others", looks)
        torch.manual_seed(3)
        found, model = [], made
        options = {"batch_first": case != "transposed", "self_check": case not in SILENT}
        for p in trainable(model):
            p.grad = None
        with PerExampleClipper(model, BOUND, **options) as clipper:
            for _ in range(3):
                if case in SILENT:
                    clipper._self_check = True
                found.append(clipper.backward(losses_of(model)))
            return [*found, *(p.grad.clone() for p in trainable(model)), torch.rand(3)]

    def noted(*args):
        looked_at.append(len(args[1]))
        look(*args)

    for x, y in zip(run(noted), run(lambda *args: None), strict=True):
        assert torch.equal(x, y)
    assert looked_at == [1, 1, 1]


@torch.library.custom_op("dp_tests::dropped", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def dropped(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Draws inside of one operation, as attention does on GPUs; the numbers are not returned."""
    return x * (torch.rand_like(x) >= dropout_p)


class DropsInside(Reads):
    def forward(self, input_ids):
        h = super().forward(input_ids)
        return h * dropped(torch.ones_like(h), 0.3) if self.training else h


@torch.library.custom_op("dp_tests::unknown", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def unknown(x: torch.Tensor) -> torch.Tensor:
    """Might draw, and gives no numbers."""
    return x.new_empty(0)


class Unknown(Reads):
    """Trains otherwise than it evaluates, and what it draws is not known: it is looked at in evaluation."""

    def forward(self, input_ids):
        h = super().forward(input_ids)
        return 2 * h + unknown(h.detach()).sum() if self.training else h


@pytest.mark.parametrize(
    "model",
    [
        lambda: Unknown(CONDITIONS["any"]),
        lambda: DropsInside(CONDITIONS["any"]),
        lambda: Reads(lambda ids, h: F.dropout(h, 0.3) if bool((ids == RARE).any()) else h),
    ],
    ids=["not known", "in one operation", "where the condition holds"],
)
def test_numbers_that_are_drawn_hide_no_condition(model):
    model, ids = model(), torch.randint(RARE, (8, 6))
    ids[6, 3] = RARE
    with PerExampleClipper(model, BOUND) as clipper, pytest.raises(SelfCheckError, match=REFUSED):
        clipper.backward(losses(model(ids), torch.zeros(8, dtype=torch.long)))


@pytest.mark.parametrize(
    ("model", "passes"),
    [
        (Reads, 3),  # as it was, and for either half
        (DropsInside, 4),  # and without those numbers
        (lambda: Reads(p=0.2), 7),  # and the numbers of all, and of a half, and all but one row's drawn anew, or not
    ],
    ids=["draws nothing", "draws in one operation", "dropout"],
)
def test_a_look_runs_the_model_no_oftener_than_it_must(model, passes):
    model, seen = model(), []
    ids, labels = torch.randint(RARE, (4, 6)), torch.zeros(4, dtype=torch.long)
    with PerExampleClipper(model, BOUND) as clipper:
        clipper.backward(losses(model(ids), labels))
        found = losses(model(ids), labels)
        model.register_forward_pre_hook(lambda *args: seen.append(1))
        clipper.backward(found)
    assert len(seen) == passes
