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
    owner, name = (KeptTerms, "_add_sums") if mode == "book_keeping" else (modes._FirstPass, "_end_second")
    original = getattr(owner, name)

    def cut_off(*args, **kwargs):
        original(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, cut_off)
        with pytest.raises(KeyboardInterrupt):
            engine.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
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
