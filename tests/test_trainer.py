"""DPTrainer end to end on tiny models: the step, the count, the ledger, resume, refusals, and everything Trainer can
do."""

import itertools
import json
import math
import random
import re
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import TorchDynamoPlugin
from chats import Sums as Grads
from datasets import Dataset
from models import build, losses_function
from oracle import clipped_sum, distance, length, per_example_gradients, trainable
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset, Subset
from transformers.optimization import GreedyLR

from dp_transformers import DPTrainer, DPTrainingArguments, WeightAverage, compute_epsilon
from dp_transformers.reports.certificate import CERTIFICATE_NAME
from dp_transformers.step.checkpoint import STATE_NAME
from dp_transformers.step.ledger import LEDGER_NAME, PrivacyStateError
from dp_transformers.step.run import PrivateRun
from dp_transformers.step.step import PrivateStep
from dp_transformers.trainer.refused import refuse_settings

pytestmark = pytest.mark.halved

N = 60
WITH_LOSS = 1.01**-0.5  # σ of gradients and the logged loss together, over that of the gradients


def dataset(n=N, seed=0, kind="bert"):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        ids = torch.randint(
            1, 1000, (int(torch.randint(4, 14, (1,), generator=generator)),), generator=generator
        ).tolist()
        rows.append(
            {"input_ids": ids, "labels": ids if kind == "lm" else int(torch.randint(0, 3, (1,), generator=generator))}
        )
    return Dataset.from_list(rows)


def collate(rows):
    longest = max(len(r["input_ids"]) for r in rows)
    pad = lambda ids, value: ids + [value] * (longest - len(ids))  # noqa: E731
    batch = {
        "input_ids": torch.tensor([pad(r["input_ids"], 0) for r in rows]),
        "attention_mask": torch.tensor([pad([1] * len(r["input_ids"]), 0) for r in rows]),
    }
    labels = [r["labels"] for r in rows]
    batch["labels"] = torch.tensor(labels if isinstance(labels[0], int) else [pad(x, -100) for x in labels])
    return batch


def arguments(folder, **changes):
    if "noise_multiplier" not in changes:
        changes.setdefault("target_epsilon", 5.0)
    values = {"output_dir": str(folder), "target_delta": 1e-4, "expected_batch_size": 12, "per_device_train_batch_size": 5, "max_steps": 4,
              "learning_rate": 0.1, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "optim": "sgd",
              "lr_scheduler_type": "constant", "self_check": False}  # fmt: skip
    return DPTrainingArguments(**{**values, **changes})


def trainer_for(folder, model=None, data=None, callbacks=(), eval_data=None, **changes):
    return DPTrainer(
        model or build("bert"), arguments(folder, **changes), collate, data or dataset(), eval_data, callbacks=list(callbacks),
    )  # fmt: skip


@pytest.fixture
def draws(monkeypatch):
    """The rows of every draw that is trained on."""
    seen, physical_batches = [], PrivateStep.physical_batches

    def noted(step, draw):
        seen.append([row for b in draw.batches for row in zip(*(b.rows[k] for k in ("input_ids", "attention_mask", "labels")), strict=True)])  # fmt: skip
        return physical_batches(step, draw)

    monkeypatch.setattr(PrivateStep, "physical_batches", noted)
    return seen


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize(("name", "lora"), [("bert", False), ("gpt2", True), ("llama-tied", False)])
def test_noiseless_run_is_one_example_at_a_time_for_every_physical_size(tmp_path, name, lora, draws):
    data = dataset(kind="bert" if name == "bert" else "lm")
    finals = {}
    for size in (1, 3, 16):
        model = build(name, lora=lora)
        args = arguments(
            tmp_path, noise_multiplier=0.0, max_grad_norm=0.3, dp_seed=5, per_device_train_batch_size=size
        )
        draws.clear()
        DPTrainer(model, args, collate, data).train()
        finals[size] = (model, list(draws))
    reference, (_, seen) = build(name, lora=lora), finals[1]
    start = [p.detach().clone() for p in trainable(reference)]
    losses_of = losses_function(reference)
    for rows in seen:
        gradients = []
        for ids, mask, labels in rows:
            one = {"input_ids": ids[None], "attention_mask": mask[None], "labels": labels[None]}
            gradients += per_example_gradients(reference, losses_of, one)
        assert any(length(g) > 0.3 for g in gradients)
        total = clipped_sum(gradients, 0.3)[1]
        with torch.no_grad():
            for p, g in zip(trainable(reference), total, strict=True):
                p.sub_((g / 12).float(), alpha=0.1)
    moved = distance(trainable(reference), start)
    assert moved > 0
    for size, (model, _) in finals.items():
        assert distance(trainable(model), trainable(reference)) <= 1e-5 * moved, size


@pytest.mark.whole
def test_noise_has_the_promised_size_and_every_parameter_gets_it(tmp_path):
    """With a loss that no parameter influences, what the optimizer gets is noise of standard deviation σC/B alone."""
    grads = Grads()
    model = build("bert")
    args = arguments(tmp_path, noise_multiplier=2.0, max_grad_norm=0.5, learning_rate=0.0)
    trainer = DPTrainer(
        model, args, collate, dataset(), callbacks=[grads], per_example_loss_func=lambda out, y: out.logits.sum(1) * 0
    )
    trainer.train()
    std = 2.0 * 0.5 / 12
    for step in grads.steps:
        flat = torch.cat([g.flatten() for g in step])
        assert abs(flat.std() / std - 1) < 0.02
        assert abs(flat.mean()) < 5 * std / len(flat) ** 0.5
        assert all(abs(g.std() / std - 1) < 0.5 for g in step if g.numel() > 30)
    a, b = (torch.cat([g.flatten() for g in step]) for step in grads.steps[:2])
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / len(a) ** 0.5


def test_the_seed_does_not_reproduce_the_noise(tmp_path):
    runs = []
    for k in range(2):
        grads = Grads()
        trainer_for(
            tmp_path / str(k), callbacks=[grads], seed=42, expected_batch_size=N
        ).train()  # q = 1: the same draw
        runs.append(grads.steps)
    for a, b in zip(*runs, strict=True):
        assert all(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_neither_the_seed_nor_a_checkpoint_reproduces_dropout(tmp_path):
    """Who knows the masks knows sums that differ by more than C when one example is taken out: it moves the masks of
    others."""
    q1 = {"noise_multiplier": 0.0, "seed": 42, "expected_batch_size": N, "per_device_train_batch_size": N,
          "save_strategy": "steps", "save_steps": 1}  # fmt: skip
    runs, files, after = [], [], []
    for k in range(2):
        grads = Grads()
        trainer = trainer_for(tmp_path / str(k), model=build("bert", dropout=0.1), callbacks=[grads], **q1)
        global_state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        trainer.train()
        assert torch.equal(torch.get_rng_state(), global_state[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == global_state[1:]
        files.append(torch.load(tmp_path / str(k) / "checkpoint-2" / "rng_state.pth", weights_only=False))
        runs.append(grads.steps[0])
        third = [grads.steps[2]]
        for _ in range(2):
            resumed = Grads()
            trainer_for(tmp_path / str(k), model=build("bert", dropout=0.1), callbacks=[resumed], **q1).train(
                resume_from_checkpoint=str(tmp_path / str(k) / "checkpoint-2")
            )
            third.append(resumed.steps[0])
        after += itertools.combinations(third, 2)
    for a, b in [runs, *after]:  # the same examples and weights
        assert distance(a, b) > 1e-3 * length(a)
    assert torch.equal(files[0]["cpu"], files[1]["cpu"]) and files[0]["python"] == files[1]["python"]


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_dropout_and_collators_follow_the_fixed_seed_of_tests(tmp_path):
    finals = []
    for seed in (1, 2):
        model = build("bert", dropout=0.1)
        trainer_for(tmp_path / str(seed), model=model, seed=seed, noise_multiplier=0.0, dp_seed=1).train()
        finals.append(trainable(model))
    assert distance(*finals) == 0


def test_empty_draws_are_noised_and_counted(tmp_path, draws):
    grads = Grads()
    trainer = DPTrainer(build("bert"), arguments(tmp_path, noise_multiplier=1.0, expected_batch_size=1, max_steps=25), collate, dataset(),
                    callbacks=[grads])  # fmt: skip
    trainer.train()
    empty = [k for k, rows in enumerate(draws) if not rows]
    assert empty
    assert all(all((g != 0).any() for g in grads.steps[k]) for k in empty)
    assert trainer.privacy_spent().steps == trainer.state.global_step == 25


def test_number_of_steps_and_epsilon(tmp_path):
    by_epochs = trainer_for(tmp_path, max_steps=-1, num_train_epochs=1.5)
    by_epochs.train()
    spent = by_epochs.privacy_spent()
    assert spent.steps == by_epochs.state.global_step == math.ceil(1.5 * N / 12) == 8
    assert spent.sample_rate == 12 / N
    assert spent.epsilon <= 5.0
    expected = compute_epsilon(spent.noise_multiplier * WITH_LOSS, sample_rate=0.2, steps=8, delta=1e-4)
    assert spent.epsilon == pytest.approx(expected, rel=1e-6)
    assert spent.epsilon > 4.9


def test_training_again_composes_and_is_refused_when_the_budget_is_spent(tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.train()
    weights = [p.detach().clone() for p in trainable(trainer.model)]
    with pytest.raises(ValueError, match=r"budget is spent.*Nothing was trained"):
        trainer.train()
    assert distance(trainable(trainer.model), weights) == 0
    free = trainer_for(tmp_path / "free", noise_multiplier=1.0)
    free.train()
    once = free.privacy_spent()
    free.train()
    assert free.privacy_spent().steps == 2 * once.steps
    assert free.privacy_spent().epsilon > once.epsilon


def test_before_training_nothing_is_spent(tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.model = build("bert")
    with pytest.raises(ValueError, match=r"trainer.model was replaced.*load_state_dict"):
        trainer.train()
    spent = trainer_for(tmp_path).privacy_spent()
    assert (spent.epsilon, spent.steps, spent.neighboring_relation) == (0.0, 0, "add_or_remove_one")


def test_every_log_line_has_epsilon(tmp_path):
    trainer = trainer_for(tmp_path, eval_strategy="steps", eval_steps=2, eval_data=dataset(9, seed=1))
    output = trainer.train()
    assert output.metrics["train_loss"] == output.training_loss
    epsilons = [line["epsilon"] for line in trainer.state.log_history]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == trainer.privacy_spent().epsilon
    assert sum("loss" in line for line in trainer.state.log_history) == 4
    assert sum("eval_loss" in line for line in trainer.state.log_history) == 2


def test_resume_counts_every_executed_step_and_refreshes_the_secrets(tmp_path):
    """Killed after step 6, resumed from step 4: steps 5 and 6 were released, and count; their draws and noise do not
    come back."""

    class Kill(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise KeyboardInterrupt

    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "noise_multiplier": 1.0}
    before = Grads()
    first = trainer_for(tmp_path, callbacks=[before, Kill()], **options)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    after = Grads()
    second = trainer_for(tmp_path, callbacks=[after], **options)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 8
    assert second.privacy_spent().steps == 6 + 4
    expected = compute_epsilon(WITH_LOSS, sample_rate=0.2, steps=10, delta=1e-4)
    assert second.privacy_spent().epsilon == pytest.approx(expected, rel=1e-6)
    assert len(after.steps) == 4
    for again, once in zip(after.steps, before.steps[4:], strict=False):
        assert all(not torch.equal(x, y) for x, y in zip(again, once, strict=True))
    lines = [json.loads(line) for line in (tmp_path / LEDGER_NAME).read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [*range(1, 11)]
    assert len({line["run"] for line in lines}) == 1
    third = trainer_for(tmp_path, max_steps=8, **{k: v for k, v in options.items() if k != "max_steps"})
    third._training.restore(str(tmp_path / "checkpoint-8"))
    assert third.privacy_spent().steps == 10


@pytest.mark.whole
def test_training_stops_before_the_step_that_would_exceed_the_budget(tmp_path, caplog):
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2}
    trainer_for(tmp_path, **options).train()
    lines = (tmp_path / LEDGER_NAME).read_text().splitlines()
    (tmp_path / LEDGER_NAME).write_text("\n".join(lines[:-3]) + "\n")  # as if killed after step 5
    (tmp_path / CERTIFICATE_NAME).unlink()
    shutil.rmtree(tmp_path / "checkpoint-8")
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = trainer_for(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.privacy_spent().steps == 8  # 5 + 3: not the 9 that reaching step 8 would take
    assert resumed.state.global_step == 7
    assert resumed.privacy_spent().epsilon <= 5.0
    assert "training stops here" in caplog.text
    assert (tmp_path / "checkpoint-7" / STATE_NAME).exists()


STOPS = hf.EarlyStoppingCallback(early_stopping_patience=1)
FOLLOWS = [  # arguments, callbacks, and what follows the metrics of evaluation
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, [], "the learning rate"),
    ({"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1}, [], "the best checkpoint"),
    ({"save_strategy": "best", "save_steps": 1}, [], "which checkpoints are kept"),
    ({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}, [], "which checkpoints are kept"),
    ({}, [STOPS], "when training stops"),
]


@pytest.mark.parametrize("make", [torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR])
def test_training_rows_choose_no_learning_rate_of_a_scheduler_that_is_handed_over(tmp_path, make):
    data, model = dataset(), build("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_loss")
    trainer = DPTrainer(model, args, collate, data, data, optimizers=(optimizer, make(optimizer)))
    with pytest.raises(ValueError, match=rf"the training rows would choose the learning rate \({make.__name__}\)"):
        trainer.train()


def test_rows_beside_the_training_rows_may_choose(tmp_path):
    whole = dataset()
    train, rest = Subset(whole, range(40)), Subset(whole, range(40, 60))
    options = {"eval_strategy": "steps", "eval_steps": 1, "noise_multiplier": 1.0, "max_steps": 2}
    options |= {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_rest_loss"}
    trainer_for(tmp_path, data=train, eval_data={"train": train, "rest": rest}, **options).train()
    with pytest.raises(ValueError, match="the training rows would choose the learning rate"):
        trainer_for(tmp_path, data=train, eval_data={"rest": Subset(whole, range(39, 60))}, **options).train()


@pytest.mark.parametrize(("changes", "callbacks", "what"), FOLLOWS)
def test_choices_by_other_rows_are_said(tmp_path, changes, callbacks, what, caplog):
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss", "max_steps": 2, **changes}  # fmt: skip
    trainer_for(tmp_path, callbacks=callbacks, eval_data=dataset(8, seed=5), noise_multiplier=1.0, **options).train()
    assert callbacks or f"the evaluation data choose {what}" in caplog.text
    certificate = json.loads((tmp_path / "privacy.json").read_text())
    assert any(
        each["what"].startswith(what) and not each["covered"] for each in certificate["runs"][0]["also_released"]
    )


@pytest.fixture
def trained(tmp_path):
    trainer_for(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, noise_multiplier=1.0).train()
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_grad_norm": 0.7}, "max_grad_norm=1.0, now it is 0.7"),
        ({"noise_multiplier": 0.9}, "noise_multiplier=1.0"),
        ({"target_delta": 1e-5}, "delta=0.0001"),
        ({"expected_batch_size": 13}, "expected_batch_size=12"),
        ({"data": dataset(N + 1)}, "num_examples=60, now it is 61"),
        ({"output_dir": "elsewhere"}, "does not lie in output_dir"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_resume_with_another_mechanism_is_refused(trained, changes, message):
    changes = {"noise_multiplier": 1.0, **changes}
    if "output_dir" in changes:
        changes["output_dir"] = str(trained / "elsewhere")
    trainer = trainer_for(trained, max_steps=4, **changes)
    with pytest.raises(PrivacyStateError, match=re.escape(message)):
        trainer.train(resume_from_checkpoint=str(trained / "checkpoint-2"))


def test_resume_without_privacy_state_or_ledger_is_refused(trained):
    state, ledger = trained / "checkpoint-2" / STATE_NAME, trained / LEDGER_NAME
    kept = ledger.read_text()
    resume = lambda: trainer_for(trained, max_steps=4, noise_multiplier=1.0).train(resume_from_checkpoint=True)  # noqa: E731
    ledger.write_text("".join(kept.splitlines(keepends=True)[:-1]))
    with pytest.raises(PrivacyStateError, match="holds 1 steps.*executed 2 at least"):
        resume()
    ledger.unlink()
    with pytest.raises(PrivacyStateError, match="holds 0 steps"):
        resume()
    ledger.write_text(kept)
    state.unlink()
    with pytest.raises(PrivacyStateError, match="is missing"):
        resume()


def test_a_derived_batch_size_is_taken_from_the_checkpoint(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "noise_multiplier": 1.0, "expected_batch_size": None}  # fmt: skip
    trainer_for(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3, **options).train()
    resumed = trainer_for(tmp_path, per_device_train_batch_size=2, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.privacy_spent().expected_batch_size == 12


class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset())


def test_bad_input_is_refused_at_construction(tmp_path):
    with pytest.raises(ValueError, match=r"DPTrainingArguments\(output_dir=.*target_delta"):
        DPTrainer(build("bert"), hf.TrainingArguments(str(tmp_path)), collate, dataset())
    with pytest.raises(ValueError, match="got NoneType"):
        DPTrainer(build("bert"), None, collate, dataset())
    with pytest.raises(ValueError, match="Stream without random access"):
        trainer_for(tmp_path, data=Stream())
    with pytest.raises(ValueError, match="without random access"):
        trainer_for(tmp_path, data=dataset().to_iterable_dataset())
    with pytest.raises(ValueError, match=r"not smaller than 1/N = 0.0167"):
        trainer_for(tmp_path, target_delta=1 / N)
    with pytest.raises(ValueError, match="exceeds the 60"):
        trainer_for(tmp_path, expected_batch_size=61)
    with pytest.raises(ValueError, match="out of reach|cannot be reached|unreachable|larger"):
        trainer_for(tmp_path, target_epsilon=1e-9, target_delta=1e-12)
    with pytest.raises(ValueError, match="per_example_loss_func"):
        DPTrainer(build("bert"), arguments(tmp_path), collate, dataset(), compute_loss_func=lambda *a, **k: None)
    with pytest.raises(ValueError, match="BertForPreTraining"):
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 9}  # fmt: skip
        trainer_for(tmp_path, model=hf.BertForPreTraining(hf.BertConfig(**sizes)))
    with pytest.raises(ValueError, match="BatchNorm1d"):
        model = build("bert")
        model.classifier = nn.Sequential(nn.BatchNorm1d(32), model.classifier)
        trainer_for(tmp_path, model=model)
    with pytest.raises(ValueError, match="513 tokens.*512 only"):
        trainer_for(tmp_path, data=Dataset.from_list([*dataset(), {"input_ids": [1] * 513, "labels": 0}]))
    assert list(tmp_path.iterdir()) == []


def test_faults_seen_before_the_first_step_leave_the_model_untouched(tmp_path):
    model = build("bert")
    start = [p.detach().clone() for p in trainable(model)]
    mixed = lambda out, y: nn.functional.cross_entropy(out.logits, y, reduction="none") / y.float().add(1).sum()  # noqa: E731
    for loss, message in ((mixed, "mixes examples"), (lambda out, y: out.logits.mean(), "reduction='none'")):
        trainer = DPTrainer(
            model, arguments(tmp_path, self_check=True), collate, dataset(), per_example_loss_func=loss
        )
        with pytest.raises(ValueError, match=message):
            trainer.train()
        assert trainer.privacy_spent().steps == 0
    unlabelled = DPTrainer(
        model, arguments(tmp_path), lambda rows: {k: v for k, v in collate(rows).items() if k != "labels"}, dataset()
    )
    with pytest.raises(ValueError, match=r"no \['labels'\].*label_names"):
        unlabelled.train()
    assert distance(trainable(model), start) == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_evaluate_predict_save_and_load(tmp_path):
    model, held_out = build("bert"), dataset(9, seed=1)
    model.classifier.support_avx512bf16_for_cpu = True  # as 4-bit layers of bitsandbytes have it
    metrics = lambda p: {"accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())}  # noqa: E731
    trainer = DPTrainer(model, arguments(tmp_path), collate, dataset(), held_out, compute_metrics=metrics)
    assert not model.classifier.support_avx512bf16_for_cpu, "it would be packed by an evaluation before the training"
    trainer.train()
    assert set(trainer.evaluate()) >= {"eval_loss", "eval_accuracy"}
    assert trainer.predict(held_out).predictions.shape == (9, 3)
    trainer.save_model(str(tmp_path / "model"))
    again = type(model).from_pretrained(tmp_path / "model")
    assert distance(list(again.parameters()), list(model.parameters())) == 0


def test_evaluation_only_needs_no_training_data(tmp_path):
    trainer = DPTrainer(build("bert"), arguments(tmp_path), collate, None, dataset(9))
    assert "eval_loss" in trainer.evaluate()
    with pytest.raises(ValueError, match="no train_dataset"):
        trainer.privacy_spent()
    for data in (None, dataset()):  # rows that come later were never looked at
        trainer.train_dataset = data
        with pytest.raises(ValueError, match=r"requires a train_dataset: pass one"):
            trainer.train()


def test_draws_are_made_only_while_train_runs(tmp_path):
    trainer = trainer_for(tmp_path)
    with pytest.raises(RuntimeError, match=r"exist only while train\(\) runs: call train\(\)"):
        trainer.get_train_dataloader()
    trainer.train()
    with pytest.raises(RuntimeError, match=r"exist only while train\(\) runs: call train\(\)"):
        trainer.training_step(trainer.model, None)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_peft_models_train_save_and_resume(tmp_path, name):
    model = build(name, lora=True)
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    start = [p.detach().clone() for p in trainable(model)]
    data = dataset(kind="bert" if name == "bert" else "lm")
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "noise_multiplier": 0.5}
    trainer_for(tmp_path, model=model, data=data, **options).train()
    assert all(not torch.equal(a, b) for a, b in zip(trainable(model), start, strict=True))
    assert all(
        torch.equal(a, b) for a, b in zip([p for p in model.parameters() if not p.requires_grad], frozen, strict=True)
    )
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()
    resumed = trainer_for(tmp_path, model=build(name, lora=True), data=data, **{**options, "max_steps": 3})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.privacy_spent().steps == 3


@pytest.mark.parametrize("method", ["PrefixTuningConfig", "PromptEncoderConfig", "PromptTuningConfig"])
def test_prompts_are_saved_in_the_middle_and_at_the_end(tmp_path, method):
    """peft calls their encoder for that, with a graph."""
    config = getattr(peft, method)(task_type="SEQ_CLS", num_virtual_tokens=3)
    model = peft.get_peft_model(build("bert"), config)
    trainer = trainer_for(tmp_path, model=model, max_steps=2, save_strategy="steps", save_steps=1, self_check=True)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    prompts = [load_file(tmp_path / name / "adapter_model.safetensors")["prompt_embeddings"]
               for name in ("checkpoint-1", "checkpoint-2", "model")]  # fmt: skip
    assert not torch.equal(prompts[0], prompts[1]) and torch.equal(prompts[1], prompts[2])


class Seen(hf.TrainerCallback):
    """The weights that each step goes on from, and those that evaluation and saving see."""

    def __init__(self):
        self.before, self.between = [], []

    def on_step_begin(self, args, state, control, *, model, **kwargs):
        self.before.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    def on_save(self, args, state, control, *, model, **kwargs):
        self.between.append(torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_the_average_of_the_weights_is_released_and_steps_go_on_from_the_weights(tmp_path):
    options = {"noise_multiplier": 1.0, "dp_seed": 3, "optim": "adamw_torch", "learning_rate": 0.01, "save_strategy": "steps", "save_steps": 1}  # fmt: skip
    plain, averaged, again = Seen(), Seen(), Seen()
    trainer_for(tmp_path / "plain", callbacks=[plain], max_steps=5, **options).train()
    trainer = trainer_for(tmp_path / "a", callbacks=[WeightAverage(0.3), averaged], **options)
    trainer.train()
    weights, average = plain.before, plain.before[0].clone()
    assert all(torch.equal(*both) for both in zip(weights, averaged.before, strict=False))
    for t, (decay, now) in enumerate(zip([2 / 11, 3 / 12, 0.3, 0.3], weights[1:], strict=True)):
        average = decay * average + (1 - decay) * now
        torch.testing.assert_close(averaged.between[t], average, rtol=0, atol=1e-6)
    saved = load_file(tmp_path / "a" / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in trainer.model.named_parameters() if name in saved)
    shutil.rmtree(tmp_path / "a" / "checkpoint-4"), shutil.rmtree(tmp_path / "a" / "checkpoint-3")
    trainer_for(tmp_path / "a", callbacks=[WeightAverage(0.3), again], **options).train(resume_from_checkpoint=True)
    assert torch.equal(again.before[0], weights[2])  # and its average goes on from the one that was saved
    torch.testing.assert_close(again.between[0], averaged.between[1].lerp(again.before[1], 0.7), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="decay must be at least 0 and below 1, got 1"):
        WeightAverage(1)


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_workers_and_secure_rng_and_a_list_of_rows(tmp_path):
    finals = []
    for workers in (0, 2):
        model = build("bert")
        trainer_for(tmp_path, model=model, noise_multiplier=0.0, dp_seed=1, dataloader_num_workers=workers).train()
        finals.append(trainable(model))
    assert distance(*finals) == 0
    trainer = trainer_for(tmp_path, data=list(dataset()), secure_rng=True)
    trainer.train()
    assert trainer.privacy_spent().steps == 4


def test_model_init_and_adamw(tmp_path):
    trainer = DPTrainer(args=arguments(tmp_path, optim="adamw_torch"), model_init=lambda: build("bert"), data_collator=collate,
                        train_dataset=dataset())  # fmt: skip
    trainer.train()
    assert distance(trainable(trainer.model), trainable(build("bert"))) > 0


def test_bf16_autocast_trains(tmp_path):
    model = build("bert")
    trainer_for(tmp_path, model=model, bf16=True).train()
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())


def test_output_dir_of_an_earlier_run_is_pointed_out(trained, caplog):
    trainer = trainer_for(trained, noise_multiplier=1.0, max_steps=1)
    trainer.train()
    assert "2 steps of earlier runs" in caplog.text
    assert trainer.privacy_spent().steps == 1
    assert Path(trained, LEDGER_NAME).read_text().count('"step"') == 3


def test_an_optimizer_that_misses_trained_parameters_is_refused(tmp_path):
    model = build("bert")
    optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
    trainer = DPTrainer(model, arguments(tmp_path), collate, dataset(), optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="misses [0-9]+ trainable parameters .*take up the clipping bound"):
        trainer.train()
    assert trainer.privacy_spent().steps == 0


def test_a_callback_cannot_train_beyond_the_budget(tmp_path, monkeypatch):
    class GoOn(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = False

    trainer = trainer_for(tmp_path, callbacks=[GoOn()], num_train_epochs=2, max_steps=-1)
    trainer.train_dataset = trainer.train_dataset  # the loop itself ends after ten steps
    monkeypatch.setattr(PrivateRun, "plan", lambda run, *args: setattr(run, "steps_left", 3))
    with pytest.raises(RuntimeError, match="budget is spent"):
        trainer.train()
    assert trainer.privacy_spent().steps == 3


LAUNCHED = {  # what a launcher sets on the trainer, or its accelerator
    "gradient accumulation is switched on.*accelerate's.*set gradient_accumulation_steps to 1": lambda made: made.args.set_training(gradient_accumulation_steps=4, batch_size=5, learning_rate=0.1),
    "context or sequence parallelism is switched on.*use tensor parallelism or FSDP2": lambda made: setattr(made.accelerator.state, "parallelism_config", ParallelismConfig(cp_size=2)),
    "DeepSpeed is switched on.*use FSDP2, or DDP": lambda made: setattr(made, "is_deepspeed_enabled", True),
    "dynamo_backend.* is switched on.*set dynamo_backend to 'no'": lambda made: setattr(made.accelerator.state, "dynamo_plugin", TorchDynamoPlugin(backend="eager")),
}  # fmt: skip


@pytest.mark.parametrize("message", LAUNCHED)
def test_what_the_environment_adds_is_refused(tmp_path, message):
    class Launched(DPTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            LAUNCHED[message](self)

    with pytest.raises(ValueError, match=message):
        Launched(build("bert"), arguments(tmp_path), collate, dataset())


def test_two_devices_in_one_process_are_refused(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"2 devices in one process.*one process per device \(accelerate launch or"):
        DPTrainer(build("bert"), args, collate, dataset())


def test_a_step_that_is_cut_off_leaves_no_gradient_without_noise(tmp_path):
    calls = itertools.count(1)

    def interrupted(out, y):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(out.logits, y, reduction="none")

    args = arguments(tmp_path, self_check=False, per_device_train_batch_size=1, expected_batch_size=40)
    trainer = DPTrainer(build("bert"), args, collate, dataset(), per_example_loss_func=interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert all(p.grad is None for p in trainer.model.parameters())


def test_models_that_are_split_while_they_load_need_a_trainer_that_knows(tmp_path):
    trainer = trainer_for(tmp_path)
    vars(trainer).pop("is_distributed_loading_by_transformers", None)  # as before transformers 5.19
    refuse_settings(trainer)
    trainer.model._device_mesh = object()
    with pytest.raises(ValueError, match=r"while it loads \(DistributedConfig\).*install transformers>=5.19"):
        refuse_settings(trainer)


@pytest.mark.filterwarnings("ignore:dp_seed")
def test_arguments_that_are_set_later_change_nothing(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1, self_check=True)
    trainer.args.dp_seed, trainer.args.self_check, trainer.args.secure_rng = 5, False, True
    trainer.args.expected_batch_size += 1
    trainer.train()
    assert trainer.privacy_spent().private and trainer._run.dp_seed is None and trainer._run.verified
    assert not trainer._training.secure
