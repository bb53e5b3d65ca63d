"""What hostile hunts found beside the findings: retries after errors, seeds and generators out of sight, arguments set
later."""

import contextlib
import itertools

import pytest
import torch
from test_trainer import trainer_for
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine
from dp_transformers.clipping import modes
from dp_transformers.clipping.modes import KeptTerms


def private_loop(model, data, criterion=None, physical=None, mode="auto", **options):
    engine = PrivacyEngine(dp_seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=8, **options), noise_multiplier=1.0, max_grad_norm=0.5,
        criterion=criterion, max_physical_batch_size=physical, clipping_mode=mode,
    )  # fmt: skip
    return engine, *made


def rows_of_numbers(n=16):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 3, generator=generator), torch.randint(0, 2, (n,), generator=generator))


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_after_a_step_that_raised_the_next_is_noised_and_counted():
    """Any handler of errors around optimizer.step() went on with bare clipped sums."""
    calls, seen = [], []

    def out_of_memory(optimizer, args, kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError

    model = torch.nn.Linear(3, 2)
    engine, model, optimizer, loader = private_loop(model, rows_of_numbers())
    optimizer.register_step_pre_hook(out_of_memory)
    for x, y in itertools.chain(loader, loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        total = engine.clipped_sums()["weight"]
        with contextlib.suppress(MemoryError):
            optimizer.step()
        seen.append(not torch.equal(model.weight.grad * 8, total))
    assert all(seen) and engine.steps == len(seen) == 4


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("mode", ["ghost", "book_keeping"])
def test_a_backward_pass_that_was_cut_off_adds_nothing_twice(mode, monkeypatch):
    model = torch.nn.Linear(3, 2)
    engine, model, optimizer, criterion, loader = private_loop(
        model, rows_of_numbers(), torch.nn.CrossEntropyLoss(), physical=2, mode=mode
    )
    batches = iter(loader)
    x, y = next(batches)
    criterion(model(x), y).backward()
    optimizer.step()
    x, y = next(batches)
    owner, name = (KeptTerms, "_add_sums") if mode == "book_keeping" else (modes._FirstOfTwo, "_end_second")
    original = getattr(owner, name)

    def cut_off(*args, **kwargs):
        original(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, cut_off)
        with pytest.raises(KeyboardInterrupt):
            engine.clipper.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"interrupted.*drop_draw"):
            criterion(model(x), y).backward()
    with pytest.raises(ValueError, match="optimizer.step"):
        optimizer.step()
    engine.drop_draw()
    x, y = next(batches)
    criterion(model(x), y).backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_arguments_that_are_set_later_change_nothing(tmp_path, caplog):
    trainer = trainer_for(tmp_path, max_steps=1, self_check=True)
    trainer.args.dp_seed, trainer.args.self_check, trainer.args.secure_rng = 5, False, True
    trainer.args.expected_batch_size += 1
    trainer.train()
    told = [record.message for record in caplog.records if "after the trainer was made" in record.message]
    assert [text.split()[0] for text in told] == ["dp_seed", "expected_batch_size", "secure_rng", "self_check"]
    assert trainer.privacy_spent().private and trainer._run.dp_seed is None and trainer._run.verified
    assert not trainer._training.secure


def seeding(rows):
    torch.manual_seed(0)
    return torch.utils.data.default_collate(rows)


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_seeds_of_collators_and_models():
    engine, model, *_, loader = private_loop(torch.nn.Linear(3, 2), rows_of_numbers(), collate_fn=seeding)
    with pytest.raises(ValueError, match="torch's seed was set in the collator"):
        next(iter(loader))
    engine.detach()

    class Seeded(torch.nn.Linear):
        def forward(self, x):
            if self.training and torch.is_grad_enabled():
                torch.manual_seed(0)
            return super().forward(x)

    _, model, _, loader = private_loop(torch.nn.Sequential(Seeded(3, 2)), rows_of_numbers())
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="seed"):
        torch.nn.functional.cross_entropy(model(x), y).backward()


class Normalised(TensorDataset):
    def __getitems__(self, indices):
        x = torch.stack([self.tensors[0][i] for i in indices])
        return list(zip(x / x.abs().max(), self.tensors[1][indices], strict=True))


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_data_sets_that_mix_what_they_load_together_and_collators_that_sort():
    *_, loader = private_loop(torch.nn.Linear(3, 2), Normalised(*rows_of_numbers().tensors))
    for x, _ in loader:
        assert (x.abs().max(1).values == 1).all(), "each row is normalised by itself"
    by_size = lambda rows: torch.utils.data.default_collate(sorted(rows, key=lambda row: -float(row[0].norm())))  # noqa: E731
    *_, loader = private_loop(torch.nn.Linear(3, 2), rows_of_numbers(), collate_fn=by_size)
    assert len(list(loader)) == 2


class Remembers(torch.nn.Module):
    """Every forward pass, with or without a graph, adds to a buffer that the next one reads."""

    def __init__(self):
        super().__init__()
        self.layer, self.remembers = torch.nn.Linear(3, 2), True
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        if self.remembers and not torch.is_grad_enabled():
            self.mean += x.mean(0)
        return self.layer(x + self.mean)


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_a_forward_pass_without_a_graph_may_keep_nothing_of_a_private_batch():
    """Dynamic rotary embeddings, say, while a loop computes a batch's accuracy."""
    engine, model, optimizer, loader = private_loop(Remembers(), rows_of_numbers())
    batches = iter(loader)
    x, y = next(batches)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"'mean' of the model changed.*do that after optimizer.step"),
    ):
        model(x)
    engine, model, optimizer, loader = private_loop(Remembers(), rows_of_numbers())
    model.remembers = False
    x, y = next(iter(loader))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    model.remembers = True
    with torch.no_grad():
        model(
            torch.ones(4, 3)
        )  # between steps the model is the user's, and validation data are not what epsilon is for
    assert engine.steps == 1 and model.mean.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_validation_with_a_graph_between_steps():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2))
    engine, model, optimizer, loader = private_loop(model, rows_of_numbers())
    for x, y in itertools.chain(loader, loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        model(rows_of_numbers().tensors[0])  # somebody forgot no_grad()
        model.train()
    assert engine.steps == 4


def test_seeds_that_a_loop_sets():
    """They do not matter, but for one that is set for a batch which is then augmented: that augmentation would be
    known."""
    drawn, data = [], TensorDataset(torch.randn(16, 20), torch.randint(0, 2, (16,)))
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(20, 2))
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), data_loader=DataLoader(data, 16), noise_multiplier=1.0,
            max_grad_norm=1.0,
        )  # fmt: skip
        torch.manual_seed(3)
        for x, y in loader:
            drawn.append(torch.rand(4))
            torch.nn.functional.cross_entropy(model(x + torch.randn_like(x)), y).backward()
            optimizer.step()
    assert not torch.equal(*drawn)
    x, y = next(iter(loader))
    torch.manual_seed(3)
    model(x)
    drawn = [torch.rand(4)]
    torch.manual_seed(3)
    model(x)
    drawn.append(torch.rand(4))
    assert not torch.equal(*drawn), "dropout is seeded anew"
    torch.manual_seed(3)
    with pytest.raises(
        ValueError, match=r"seed was set in the training loop, after it took a batch.*Remove that call"
    ):
        model(x + torch.randn_like(x))


class LooksBack(torch.nn.Module):
    """Row i sees row i - 1, the first one nothing."""

    def __init__(self, ahead):
        super().__init__()
        self.layer, self.ahead = torch.nn.Linear(3, 2), ahead

    def forward(self, x):
        y = self.layer(x)
        other = torch.cat([y[1:], y[-1:] * 0]) if self.ahead else torch.cat([y[:1] * 0, y[:-1]])
        return y + torch.tanh(other) * y if self.training else y


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("ahead", [True, False])
def test_models_that_look_at_the_row_before_or_after(ahead):
    _, model, _, loader = private_loop(LooksBack(ahead), rows_of_numbers())
    with pytest.raises(ValueError, match="not exact|only another example of its batch changed"):
        for x, _y in loader:
            model(x)


class OwnOutput:
    """No dictionary, no dataclass: torch's trees do not look into it."""

    def __init__(self, logits):
        self.logits = logits


class GivesOwnOutput(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels=None):
        return OwnOutput(self.layer(x))


def sampled_loss(outputs, labels):
    negatives = torch.randint(0, 2, (len(labels), 3))
    return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none") + 0 * outputs.logits.gather(
        1, negatives
    ).sum(1)


def test_losses_of_objects_and_losses_that_draw(tmp_path):
    """They are the same for a row whatever rows are beside it, so nothing is refused."""
    torch.manual_seed(0)
    rows = [{"x": torch.randn(4), "labels": i % 2} for i in range(24)]
    args = DPTrainingArguments(
        output_dir=str(tmp_path), max_steps=3, expected_batch_size=8, per_device_train_batch_size=8, noise_multiplier=1.0, target_delta=1e-3,
        use_cpu=True, report_to="none", save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = DPTrainer(GivesOwnOutput(), args, train_dataset=rows, per_example_loss_func=sampled_loss)
    assert trainer.train().global_step == 3
