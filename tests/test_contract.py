"""Ways in which one example might move the released sum by more than C: each is refused, with the way out, or mended,
in both loops."""

import copy
import io
import json
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from models import CHECKPOINTING
from neighbours import LOOPS, Task, backward, engine_for, padded, points, seeded, texts, train, trainer_for
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback

from dp_transformers import DPTrainer, DPTrainingArguments, FlatClipping
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


def llama(**changes):
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**{**SIZES, "max_position_embeddings": 16, "initializer_range": 0.5, **changes})
    )


def bert(dropout=0.0, **changes):
    config = hf.BertConfig(
        **SIZES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=3, **changes
    )
    return hf.BertForSequenceClassification(config)


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


class Seeding(hf.TrainerCallback):
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
    ("mode", "way_out"), [
        ("ghost", r"(?s)recomputed other activations in the second backward pass.*torch's global " r"generator and keep no state"),
        ("fast_gradient", r"(?s)recomputed other activations in the second backward pass.*torch's global generator and keep " r"no state"),
        ("book_keeping", r"(?s)draws random numbers that are other ones when it runs again"),
    ],
)  # fmt: skip
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


def task(**changes):
    return Task(
        **{"model": Scores, "rows": points(12), "loss": mean_cross_entropy, "bound": 0.01, "expected": 6, "physical": 12, **changes},
    )  # fmt: skip


def private_loop(**changes):
    """(task, engine, model, optimizer, loader)"""
    chosen = task(**changes)
    return chosen, *engine_for(chosen)


def each(change):
    """What a script does to every gradient that is there."""

    def edit(engine, model, optimizer):
        for p in model.parameters():
            if p.grad is not None:
                change(p.grad)

    return edit


def gradients_of_ones(engine, model, optimizer):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def another_function(engine, model, optimizer):
    engine.clipper.clipping = FlatClipping(100.0)


EDITS = {
    "clip_grad_norm_": lambda engine, model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "zero_grad": lambda engine, model, optimizer: optimizer.zero_grad(),
    "zeros": lambda engine, model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda engine, model, optimizer: model.zero_grad(),
    "in place": each(lambda grad: grad.mul_(10)),
    "data": each(lambda grad: grad.data.mul_(10)),
    "numpy": each(lambda grad: grad.numpy().fill(1)),
    "one number": each(lambda grad: grad.data[..., -1].add_(1e-3)),
    "storage": each(lambda grad: torch.tensor([], dtype=grad.dtype).set_(grad.untyped_storage()).mul_(10)),
    "p.grad =": gradients_of_ones,
    "what clips": another_function,
    "clipped_sums": lambda engine, model, optimizer: [x.mul_(10) for x in engine.clipped_sums().values()],
}
ONLY_ENGINE = {"what clips", "clipped_sums"}  # DPTrainer shows neither


class EditsSums(TrainerCallback):
    """Edits gradients before each forward pass, so that there are clipped sums of the physical batches before it."""

    def __init__(self, edit):
        self.edit = edit

    def before_forward(self, model, optimizer, module, args):
        self.edit(None, model, optimizer)

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        model.register_forward_pre_hook(partial(self.before_forward, model, optimizer))


def released_by_engine(edit, physical):
    chosen, engine, model, optimizer, loader = private_loop(expected=12, physical=physical, sigma=0.01, seed=3)
    released = []
    for batch in loader:
        backward(chosen, engine, model, batch)
        assert all(p.grad is None for p in model.parameters())
        edit(engine, model, optimizer)
        optimizer.step()
        if engine.has_stepped:
            released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        else:
            assert all(p.grad is None for p in model.parameters()), "a part of a draw is not stepped with"
    return released


def released_by_trainer(edit, physical):
    chosen = task(expected=12, physical=physical, sigma=0.01, seed=3, steps=2, callbacks=[EditsSums(edit)],
                  arguments={"self_check": False})  # fmt: skip
    return train("trainer", chosen)


@pytest.mark.parametrize("physical", [12, 5], ids=["whole", "in parts"])
@both_loops
def test_what_is_done_to_gradients_before_the_release_meets_nothing(loop, physical):
    """The released gradient is bit for bit the one without it."""
    run = released_by_trainer if loop == "trainer" else released_by_engine
    expected = run(lambda engine, model, optimizer: None, physical)
    assert expected and all(x.any() for x in expected)
    for name, edit in EDITS.items():
        if loop == "engine" or name not in ONLY_ENGINE:
            found = run(edit, physical)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name


@pytest.mark.parametrize("interrupted", ["the ledger", "the noise", "the sum over ranks"])
def test_a_step_that_was_interrupted(interrupted, monkeypatch):
    """Before the step was counted it may be tried again; half a release is stepped with by nobody."""
    chosen, engine, model, optimizer, loader = private_loop(expected=12)
    before, step = copy.deepcopy(model.state_dict()), loader._step

    def stop(grads=(), **options):
        for grad in grads:
            grad.mul_(2)  # what a sum over two ranks does
        raise KeyboardInterrupt

    backward(chosen, engine, model, next(iter(loader)))
    sums = engine.clipped_sums()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        where, name = {
            "the ledger": (step.run, "spend_step"),
            "the noise": (step._noise, "add_"),
            "the sum over ranks": (distributed, "sum_over_ranks"),
        }[interrupted]
        patch.setattr(where, name, stop if name != "spend_step" else lambda number: stop())
        optimizer.step()
    if interrupted == "the ledger":
        optimizer.step()
        assert all(torch.allclose(p.grad * 12, sums[name]) for name, p in model.named_parameters())
        return
    with pytest.raises(ValueError, match=r"stopped the loop, call engine.drop_draw\(\)"):
        optimizer.step()
    with pytest.raises(ValueError, match="has no noise"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    engine.drop_draw()
    assert all(p.grad is None for p in model.parameters())
    backward(chosen, engine, model, next(iter(loader)))
    optimizer.step()


def saved_bytes(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


STATES = []


class Inner(nn.Module):
    """The module that is run again; notes the generator's state that its masks are drawn from."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        STATES.append(torch.get_rng_state().numpy().tobytes())
        return F.dropout(x * self.scale, 0.5, self.training)


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.inner(x))


class Saving(TrainerCallback):
    def __init__(self):
        self.saved = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.saved.append(saved_bytes(model))


@both_loops
def test_a_saved_model_holds_no_state_of_a_generator(loop):
    """``torch.save(model)`` while training, with hooks and all: the masks of the step stay unknown."""
    STATES.clear()
    if loop == "trainer":
        saving = Saving()
        train(loop, task(model=WithDropout, callbacks=[saving], expected=12))
        saved = saving.saved
    else:
        _, engine, model, optimizer, loader = private_loop(model=WithDropout, expected=12)
        for batch in loader:
            loss = mean_cross_entropy(model(batch["x"]), batch["labels"])
            saved = [saved_bytes(model)]
            engine.backward(loss)
            saved.append(saved_bytes(model))
            optimizer.step()
    assert len(STATES) > 1 and saved
    for content in saved:
        assert not any(state in content or state[24:5016] in content for state in STATES)


def dp_arguments(folder, cls=DPTrainingArguments, **changes):
    values = {"output_dir": str(folder), "target_delta": 1e-4, "per_device_train_batch_size": 4, "expected_batch_size": 6, "max_steps": 2,
              "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none", "logging_steps": 1, "learning_rate": 0.1,
              "optim": "sgd"}  # fmt: skip
    if "noise_multiplier" not in changes:
        values["target_epsilon"] = 5.0
    return cls(**{**values, **changes})


def trainer_of_bert(folder, cls=DPTrainer, **changes):
    args, data = dp_arguments(folder, **changes), texts([8] * 12)
    return cls(model=seeded(bert), args=args, data_collator=lambda rows: padded(rows, "right"), train_dataset=data)


OURS = ["training_step", "compute_loss", "get_train_dataloader", "_inner_training_loop", "_clip_grad_norm", "floating_point_ops"]  # fmt: skip


@pytest.mark.parametrize("name", [*OURS, "_track_num_input_tokens"])
def test_methods_that_a_private_training_needs(tmp_path, name):
    """Whatever an override does; this one calls what it overrides."""

    def same(self, *args, **kwargs):
        return getattr(super(cls, self), name)(*args, **kwargs)

    cls = type("Own", (DPTrainer,), {name: same})
    with pytest.raises(ValueError, match=rf"(?s)Own overrides {name}, .*(Pass|Set|callback|with Trainer)"):
        trainer_for(Task(bert, texts([8] * 12)), str(tmp_path), cls)


class EditsReleased(TrainerCallback):
    """Notes the released gradients, edits them, and notes what the optimizer made of that."""

    def __init__(self, edit):
        self.edit, self.errors = edit, []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        weights = [p.detach().clone() for p in model.parameters()]
        self.edit(None, model, optimizer)
        self.expected = [w if p.grad is None else w - p.grad for w, p in zip(weights, model.parameters(), strict=True)]

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.errors += [
            float((p.detach() - w).abs().max()) for p, w in zip(model.parameters(), self.expected, strict=True)
        ]


@pytest.mark.parametrize("edit", ["clip_grad_norm_", "zero_grad", "zeros", "in place", "data"])
def test_released_gradients_may_be_changed(edit):
    """What follows from a release alone costs no privacy: clip it again, scale it, or leave the step out."""
    edits = EditsReleased(EDITS[edit])
    train("trainer", task(steps=2, callbacks=[edits], arguments={"learning_rate": 1.0}))
    assert edits.errors and max(edits.errors) <= 1e-6


@dataclass
class PackingArguments(DPTrainingArguments):
    packing: bool = False
    padding_free: bool = False


@pytest.mark.parametrize("name", ["packing", "padding_free"])
def test_packing_asked_for_in_the_arguments(tmp_path, name):
    """Arguments merged with those of a trainer that packs."""
    args = dp_arguments(tmp_path, PackingArguments, **{name: True})
    with pytest.raises(ValueError, match=rf"(?s){name}=True joins several examples in one row.*set {name}=False"):
        DPTrainer(seeded(llama), args, train_dataset=texts([8] * 12, classes=None))


def test_the_start_says_what_is_protected(tmp_path, caplog):
    """One row, whoever it is of; all rows of a person are hidden by less, or by more noise."""

    def spent(**changes):
        trainer = trainer_of_bert(tmp_path, **changes)
        trainer.train()
        return trainer.privacy_spent()

    spent()
    assert "protects: one row of the training data (N = 12)" in caplog.text
    assert "A person with k rows is hidden less" in caplog.text
    of_two = spent(max_examples_per_person=2)
    assert "All rows of one person, 2 at most, are hidden together" in caplog.text
    assert of_two.epsilon < 4 < of_two.epsilon_per_person <= 5


@pytest.mark.parametrize("log_raw_metrics", [False, True])
def test_metrics_of_training_have_epsilon(tmp_path, log_raw_metrics):
    """What save_metrics writes, with what it was spent for, and the epoch."""
    trainer = trainer_of_bert(tmp_path, log_raw_metrics=log_raw_metrics)
    trainer.save_metrics("train", trainer.train().metrics)
    written = json.loads((tmp_path / "train_results.json").read_text())
    assert 0 < written["epsilon"] <= 5 and written["delta"] == 1e-4
    assert written["noise_multiplier"] > 0 and written["epoch"] > 0
    assert ("train_loss" in written) != log_raw_metrics


def test_a_finished_run_resumed(tmp_path, caplog):
    """A job script run again ends as it did; a longer plan is refused with the ways there are."""

    def trainer(**changes):
        return trainer_of_bert(tmp_path, save_strategy="steps", save_steps=1, **changes)

    trainer().train()
    again = trainer()
    metrics = again.train(resume_from_checkpoint=True).metrics
    assert f"has ended: epsilon is {metrics['epsilon']:.4g} after 2 steps" in caplog.text
    assert again.privacy_spent().steps == again.state.global_step == 2 and 0 < metrics["epsilon"] <= 5
    with pytest.raises(ValueError, match=r"(?s)budget is spent.*Nothing was trained.*output_dir"):
        trainer(max_steps=4).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"epsilon for all rows of one person \(max_examples_per_person=2\) is "):
        trainer(max_steps=4, max_examples_per_person=2).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"(?s)budget is spent.*Nothing was trained.*output_dir"):
        again.train()
