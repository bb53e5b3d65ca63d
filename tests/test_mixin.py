"""DPTrainerMixin: any subclass of Trainer trains as DPTrainer does, keeps its evaluation, and is refused where it
would not be private."""

import logging
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from neighbours import Noted, Task, collate, seeded, texts, trainer_for
from test_contract import bert
from torch.utils.data import DataLoader

from dp_transformers import DPTrainer, DPTrainerMixin, DPTrainingArguments
from dp_transformers.step.ledger import Ledger

pytestmark = pytest.mark.halved

ROWS = texts([8, 5, 7] * 4)


@dataclass
class Seq2SeqArguments(DPTrainingArguments, hf.Seq2SeqTrainingArguments):
    pass


def arguments(folder, cls=DPTrainingArguments, **changes):
    values = {"output_dir": str(folder), "target_delta": 1e-4, "per_device_train_batch_size": 4, "expected_batch_size": 6, "max_steps": 2,
              "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none", "logging_steps": 1, "learning_rate": 0.1,
              "optim": "sgd", "noise_multiplier": 1.0, "self_check": False}  # fmt: skip
    return cls(**{**values, **changes})


def make(cls, folder, arguments_class=DPTrainingArguments, *, rows=ROWS, **options):
    args = arguments(folder, arguments_class)
    return cls(
        model=seeded(bert), args=args, data_collator=collate, train_dataset=rows, eval_dataset=ROWS[:4], **options
    )


def cross_entropy(outputs, labels):
    return F.cross_entropy(outputs.logits, labels, reduction="none")


class InHouse(hf.Trainer):
    """It evaluates in a way of its own."""

    evaluated = predicted = 0

    def evaluate(self, *args, **kwargs):
        self.evaluated += 1
        return {**super().evaluate(*args, **kwargs), "in_house": 1.0}

    def prediction_step(self, *args, **kwargs):
        self.predicted += 1
        return super().prediction_step(*args, **kwargs)


class DPPlain(DPTrainerMixin, hf.Trainer):
    pass


class DPSeq2Seq(DPTrainerMixin, hf.Seq2SeqTrainer):
    pass


class DPInHouse(DPTrainerMixin, InHouse):
    pass


class DPTwice(DPInHouse, DPSeq2Seq):
    """Two private classes make one private step."""


class Logging:
    """A mixin that has nothing to do with privacy."""

    def log(self, logs, *args, **kwargs):
        self.logged = [*getattr(self, "logged", []), logs]
        super().log(logs, *args, **kwargs)


class DPLogging(Logging, DPTrainerMixin, hf.Trainer):
    pass


class DPLoggingBelow(DPTrainerMixin, Logging, hf.Trainer):
    pass


SUBCLASSES = [DPPlain, DPSeq2Seq, DPInHouse, DPTwice, DPLogging, DPLoggingBelow]


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("cls", SUBCLASSES)
def test_any_trainer_takes_the_steps_of_dp_trainer(tmp_path, cls):
    """Bit for bit, with noise from a fixed seed; every step is clipped, noised and counted once."""
    task = Task(bert, ROWS, steps=3, sigma=1.0, expected=6)
    arguments_class = Seq2SeqArguments if issubclass(cls, hf.Seq2SeqTrainer) else DPTrainingArguments
    sums = {}
    for each in (DPTrainer, cls):
        noted, folder = Noted(task), tmp_path / each.__name__
        args = trainer_for(task, str(folder)).args.to_dict()
        kept = ("max_grad_norm", "noise_multiplier", "dp_seed", "max_steps", "per_device_train_batch_size", "expected_batch_size")  # fmt: skip
        args = arguments(
            folder, arguments_class if each is cls else DPTrainingArguments, **{name: args[name] for name in kept}
        )
        trainer = each(model=seeded(bert), args=args, data_collator=collate, train_dataset=ROWS, callbacks=[noted])
        trainer.train()
        sums[each] = noted.sums
        assert Ledger(folder).steps(trainer._run.state.run_id) == trainer.privacy_spent().steps == 3
    assert len(sums[cls]) == 3 and all(torch.equal(a, b) for a, b in zip(sums[DPTrainer], sums[cls], strict=True))


def test_evaluation_stays_that_of_the_class(tmp_path):
    trainer = make(DPInHouse, tmp_path)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["in_house"] == trainer.evaluated == trainer.predicted == 1
    plain = hf.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    reference = InHouse(trainer.model, plain, data_collator=collate, eval_dataset=ROWS[:4])
    assert metrics["eval_loss"] == pytest.approx(reference.evaluate()["eval_loss"], rel=1e-6)


def test_seq2seq_trains_and_generates(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0)).train()
    rows = [{"input_ids": torch.tensor([5, i, 7]), "labels": torch.arange(5, 8 + i % 4)} for i in range(12)]
    args = arguments(tmp_path, Seq2SeqArguments, predict_with_generate=True, generation_max_length=6, self_check=True)
    trainer = DPSeq2Seq(model=model, args=args, data_collator=collate, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train()
    assert trainer.privacy_spent().steps == 2
    generated = trainer.predict(rows[:4]).predictions
    assert generated.ndim == 2 and generated.shape[0] == 4 and trainer.evaluate()["eval_loss"] > 0


class Weighted(hf.Trainer):
    """It trains on another loss than that of the model's head."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = 4 * cross_entropy(outputs, labels).mean()
        return (loss, outputs) if return_outputs else loss


class DPWeighted(DPTrainerMixin, Weighted):
    pass


class DPWeightedTrainer(DPTrainer, Weighted):
    pass


@pytest.mark.parametrize("cls", [DPWeighted, DPWeightedTrainer])
def test_a_loss_of_the_class_must_be_said_for_each_example(tmp_path, cls):
    """Otherwise the model would be trained on the loss of its head without a word."""
    with pytest.raises(ValueError, match="(?s)Weighted has a compute_loss of its own.*Pass per_example_loss_func=f"):
        make(cls, tmp_path)


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_a_loss_of_the_class_evaluates_and_the_losses_of_examples_train(tmp_path):
    sums, evaluated = [], []
    for factor, cls in ((4, DPWeighted), (1, DPWeighted), (1, DPTrainer)):
        noted = Noted(Task(bert, ROWS, expected=6))
        args = arguments(tmp_path / str(len(sums)), noise_multiplier=0.0, dp_seed=1, max_grad_norm=1e3)
        loss = lambda outputs, labels, factor=factor: factor * cross_entropy(outputs, labels)  # noqa: E731
        trainer = cls(model=seeded(bert), args=args, data_collator=collate, train_dataset=ROWS, eval_dataset=ROWS[:4], callbacks=[noted],
                      per_example_loss_func=loss)  # fmt: skip
        evaluated.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        sums.append(noted.sums[0])
    assert torch.equal(sums[0], 4 * sums[1]) and torch.equal(sums[1], sums[2])
    assert evaluated[0] == evaluated[1] == pytest.approx(4 * evaluated[2], rel=1e-6)


class OwnStep(hf.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        raise AssertionError("it must not be called")

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, 4, collate_fn=self.data_collator)


class DPOwnStep(DPTrainerMixin, OwnStep):
    pass


def test_a_step_and_a_loader_of_the_class_are_replaced_and_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = make(DPOwnStep, tmp_path)
    for name in ("training_step", "get_train_dataloader"):
        assert f"OwnStep.{name} is not called: DPTrainerMixin replaces it" in caplog.text
    trainer.train()
    assert trainer.privacy_spent().steps == 2


class OnlyMixin(DPTrainerMixin):
    pass


class RefModelSecond(hf.Trainer):
    """A trainer whose second parameter is something else, as TRL's for preferences; it steps by itself."""

    def __init__(self, model=None, ref_model=None, args=None, data_collator=None, train_dataset=None, eval_dataset=None, **kwargs):  # fmt: skip
        assert ref_model is None
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, **kwargs)

    training_step = OwnStep.training_step


ORDERS = [(DPTrainerMixin, hf.Trainer), (hf.Seq2SeqTrainer, DPTrainer), (OnlyMixin, InHouse), (Logging, DPPlain), (DPTrainer, OwnStep), (DPTrainer, RefModelSecond)]  # fmt: skip


@pytest.mark.parametrize("bases", ORDERS)
def test_orders_that_are_private(tmp_path, bases):
    """A step of a base behind the private one is never called. DPTrainer hands everything over by keyword."""
    arguments_class = Seq2SeqArguments if hf.Seq2SeqTrainer in bases else DPTrainingArguments
    trainer = make(type("Right", bases, {}), tmp_path, arguments_class)
    trainer.train()
    assert trainer.privacy_spent().steps == 2


@pytest.mark.parametrize("cls", [DPTrainerMixin, OnlyMixin])
def test_a_mixin_without_a_trainer(tmp_path, cls):
    with pytest.raises(ValueError, match=rf"{cls.__name__} is no Trainer.*class .*\(DPTrainerMixin, Trainer\)"):
        cls(model=seeded(bert), args=arguments(tmp_path), train_dataset=ROWS)


class Windows(hf.Trainer):
    """It makes two rows of each text."""

    def __init__(self, *args, train_dataset=None, **kwargs):
        made = [{**row, "input_ids": row["input_ids"][i::2], "attention_mask": row["attention_mask"][i::2]}
                for row in train_dataset for i in range(2)]  # fmt: skip
        super().__init__(*args, train_dataset=made, **kwargs)


class DPWindows(DPTrainerMixin, Windows):
    pass


def test_rows_that_a_base_class_makes_of_one_are_said(tmp_path):
    options = {"model": seeded(bert), "data_collator": collate, "train_dataset": ROWS}
    with pytest.raises(ValueError, match=r"made 24 rows of the 12.*max_examples_per_person=1.*\(2 or more\)"):
        DPWindows(args=arguments(tmp_path), **options)
    trainer = DPWindows(args=arguments(tmp_path, max_examples_per_person=2), **options)
    trainer.train()
    spent = trainer.privacy_spent()
    assert spent.num_examples == 24 and spent.epsilon_per_person > spent.epsilon
