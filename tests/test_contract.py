"""Ways in which one example might move the released sum by more than C: each is refused, with the way out, or mended,
in both loops."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import CHECKPOINTING
from neighbours import LOOPS, Task, assert_bounded, moves, points, texts, train
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
)

from dp_transformers.runtime import distributed
from dp_transformers.step.step import PrivateStep

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}  # fmt: skip
both_loops = pytest.mark.parametrize("loop", LOOPS)


def mean_cross_entropy(scores, labels):
    return F.cross_entropy(scores, labels, reduction="none")


class Scores(nn.Module):
    """A plain classifier of six numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


# ---- state of the model ----


def llama(**changes):
    return LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "max_position_embeddings": 16, "initializer_range": 0.5, **changes})
    )


# ---- rows of the data set and the collator ----


def bert(dropout=0.0, **changes):
    config = BertConfig(
        **SIZES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=3, **changes
    )
    return BertForSequenceClassification(config)


# ---- processes ----


@both_loops
@pytest.mark.parametrize("moment", ["hand-out", "release"])
def test_a_process_group_that_is_made_after_the_training_was_set_up(loop, moment, monkeypatch):
    """Each process would draw from all examples, with a secret of its own, and sums of all of them be released."""
    name = {"hand-out": "physical_batches", "release": "release"}[moment]
    original = getattr(PrivateStep, name)

    def join(step, *args):
        monkeypatch.setattr(distributed, "place", lambda: (0, 2))
        return original(step, *args)

    monkeypatch.setattr(PrivateStep, name, join)
    with pytest.raises(ValueError, match="set up as process 0 of 1.*process 0 of 2 now.*before make_private"):
        train(loop, Task(Scores, points(16), None, mean_cross_entropy, expected=8, physical=16, steps=2))


# ---- random numbers that somebody knows ----


class Augmented:
    """Vectors with noise of NumPy's global generator, or Python's; ``seen`` is what it drew."""

    def __init__(self, source="numpy"):
        self.rows, self.seen = points(6), []
        self.rng = np.random if source == "numpy" else random

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.seen.append(self.rng.random())
        return {"x": self.rows[i]["x"] + self.seen[-1], "labels": self.rows[i]["labels"]}


class Seeding(TrainerCallback):
    """A callback that seeds before every step."""

    def __init__(self, seed):
        self.seed = seed

    def on_step_begin(self, *args, **kwargs):
        self.seed()


def seed_augmentation():
    random.seed(0)
    np.random.seed(0)


def seed_all():
    seed_augmentation()
    torch.manual_seed(0)


class SeedsItself(Scores):
    """A model like BigBird, which seeds NumPy in its forward pass."""

    def forward(self, x):
        np.random.seed(0)
        return super().forward(x)


@pytest.mark.table
@both_loops
@pytest.mark.parametrize("source", ["numpy", "python"])
@pytest.mark.parametrize("model", [Scores, SeedsItself])
def test_augmentation_follows_no_seed_that_is_known(loop, source, model):
    """Neither one set by a callback or in the loop, nor a model's: two runs augment otherwise."""
    seen = []
    for _ in range(2):
        rows = Augmented(source)
        seed_augmentation()
        train(
            loop,
            Task(model, rows, None, mean_cross_entropy, steps=3, seed=None, callbacks=[Seeding(seed_augmentation)], before_forward=seed_augmentation),
        )  # fmt: skip
        seen.append(rows.seen)
    assert len(seen[0]) >= 18 and not set(seen[0]) & set(seen[1])
    assert len(set(seen[0])) > len(seen[0]) * 0.7  # what is collated twice, to look at it, is drawn once


class Masks(Scores):
    """Dropout whose masks can be read."""

    def forward(self, x):
        mask = F.dropout(torch.ones_like(x), training=self.training)
        if torch.is_grad_enabled():  # no look at the model beside other rows, whose numbers train nothing
            SEEN.append(mask)
        return super().forward(x * mask)


SEEN = []


@both_loops
def test_dropout_follows_no_seed_that_is_known(loop):
    """A seed set before every forward pass, as in a loop of one's own, tells no mask."""
    runs = []
    for _ in range(2):
        SEEN.clear()
        seed_all()
        task = Task(
            Masks, points(6), None, mean_cross_entropy, physical=6, seed=None, callbacks=[Seeding(seed_all)], before_forward=seed_all,
        )  # fmt: skip
        train(loop, task)
        runs.append(SEEN[-1])
    torch.manual_seed(0)
    known = F.dropout(torch.ones_like(runs[0]))
    assert not torch.equal(*runs) and not torch.equal(runs[0], known) and not torch.equal(runs[1], known)


class OnDevice(Scores):
    """Notes the seed that devices have when it runs on a batch of the data, where the first number is 7."""

    def forward(self, x):
        if (x[:, 0] == 7).all() and torch.is_grad_enabled():  # no look at it beside other rows
            SEEN.append(OF_DEVICES[-1])
        return super().forward(x)


OF_DEVICES = []


def seed_devices():
    torch.cuda.manual_seed_all(0)


@both_loops
def test_a_seed_of_the_devices_does_not_matter(loop, monkeypatch):
    """Torch's own seed does not tell whether somebody called ``torch.cuda.manual_seed``."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", OF_DEVICES.append)
    rows = [{**row, "x": torch.cat([torch.tensor([7.0]), row["x"][1:]])} for row in points(6)]
    runs = []
    for _ in range(2):
        SEEN.clear()
        seed_devices()
        task = Task(
            OnDevice, rows, None, mean_cross_entropy, seed=None, steps=2, callbacks=[Seeding(seed_devices)], before_forward=seed_devices,
        )  # fmt: skip
        train(loop, task)
        runs.append(set(SEEN))
    assert len(SEEN) >= 4 and not runs[0] & runs[1] and 0 not in runs[0] | runs[1]


def seed_numpy_of_worker(worker_id):
    np.random.seed(42 + worker_id)


class Told(list):
    """Vectors whose first number is NumPy's next."""

    def __getitem__(self, i):
        row = super().__getitem__(i)
        return {**row, "x": torch.cat([torch.tensor([float(np.random.random())]), row["x"][1:]])}


class Listening(Scores):
    """Keeps the first column of what it is given last."""

    def forward(self, x):
        if len(x) == 3 and self.training:
            SEEN.append(x[:, 0].tolist())
        return super().forward(x)


def test_seeds_that_workers_are_given_do_not_matter():
    """A loader's worker_init_fn may seed NumPy in every worker."""
    seen = []
    for _ in range(2):
        SEEN.clear()
        task = Task(Listening, Told(points(3)), None, mean_cross_entropy, seed=None, workers=1, worker_init_fn=seed_numpy_of_worker)  # fmt: skip
        train("engine", task)
        seen.append(SEEN[-1])
    np.random.seed(42)
    known = {float(np.float32(np.random.random())) for _ in range(50)}
    assert not set(seen[0]) & set(seen[1]) and not set(seen[0]) & known


# ---- two passes over one forward ----


class Recomputed(nn.Module):
    """A checkpointed block with dropout that draws from ``source``, and does not restore torch's random state."""

    def __init__(self, source):
        super().__init__()
        self.source, self.generator = source, torch.Generator()
        self.generator.manual_seed(0)
        self.first, self.block, self.head = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def random(self, x):
        if not self.training:
            return x
        if self.source == "numpy":
            return x * torch.from_numpy(np.random.randint(0, 2, tuple(x.shape))).to(x) * 2
        if self.source == "own":
            return x * torch.randint(0, 2, x.shape, generator=self.generator) * 2
        return F.dropout(x)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.head(checkpoint(lambda x: self.random(self.block(self.random(x))), x, use_reentrant=False, preserve_rng_state=False))  # fmt: skip


def alone(mode, model, **options):
    """One example in twelve steps: its sum is its move."""
    return Task(model, points(1), None, mean_cross_entropy, bound=0.01, steps=12, mode=mode, **options)


@both_loops
@pytest.mark.parametrize("mode", ["ghost", "fast_gradient", "book_keeping"])
@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_what_two_backward_passes_recompute_is_the_same(loop, mode, source):
    """Dropout in a checkpointed block, with preserve_rng_state=False: what is measured is what is summed."""
    lengths = [float(total.norm()) for total in train(loop, alone(mode, lambda: Recomputed(source)))]
    assert 0 < max(lengths) <= 1 + 1e-5, max(lengths)


@both_loops
@pytest.mark.parametrize(
    ("mode", "way_out"),
    [
        (
            "ghost",
            r"(?s)recomputed other activations in the second backward pass.*torch's global "
            r"generator and keep no state",
        ),
        (
            "fast_gradient",
            r"(?s)recomputed other activations in the second backward pass.*torch's global generator and keep "
            r"no state",
        ),
        ("book_keeping", r"(?s)draws random numbers that are other ones when it runs again.*torch's global generator"),
    ],
)
def test_a_generator_of_its_own_in_a_checkpointed_block(loop, mode, way_out):
    """Nobody can restore it."""
    with pytest.raises(ValueError, match=way_out):
        train(loop, alone(mode, lambda: Recomputed("own")))


def test_gradient_checkpointing_that_does_not_restore_random_numbers():
    """Trainer's own option, for which "auto" takes ghost clipping."""
    arguments = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False, "preserve_rng_state": False}}  # fmt: skip
    task = Task(lambda: bert(0.5), texts([12]), bound=0.01, steps=12, arguments=arguments)
    lengths = [float(total.norm()) for total in train("trainer", task)]
    assert 0 < max(lengths) <= 1 + 1e-5, max(lengths)


# ---- padding by others ----


def gpt2():
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


@both_loops
def test_texts_padded_on_the_right(loop):
    """The control: a causal model does not see what comes after."""
    assert_bounded(moves(loop, Task(gpt2, texts([40, *range(5, 14)], classes=None), bound=0.01), 0))


# ---- models and losses of one's own ----
