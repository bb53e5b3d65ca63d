"""DPDPOTrainer and DPRewardTrainer against the trainers of TRL on one preference at a time."""

from functools import partial

import pytest
import torch
from chats import FOR_NEIGHBOURS, StopAt, arguments_of, assert_exact, assert_neighbours, model, rows, tokenizer
from oracle import distance, length, trainable
from peft import LoraConfig, get_peft_model
from transformers import LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from dp_transformers import DPDPOConfig, DPDPOTrainer, DPRewardConfig, DPRewardTrainer
from dp_transformers.reports import certificate
from dp_transformers.trl.dpo_losses import LOSSES

pytestmark = [pytest.mark.filterwarnings("ignore:dp_seed"), pytest.mark.halved]
MODES = ["book_keeping", "ghost", "fast_gradient", "per_sample"]
BOTH = ((DPDPOTrainer, DPDPOConfig), (DPOTrainer, DPOConfig))
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def dpo(cls, config, folder, made=None, data="preference", ref_model="another", peft_config=None, **changes):
    """A trainer whose model is not its own reference."""
    private = {} if cls is not DPDPOTrainer else {"self_check": False}
    args = arguments_of(config, folder / cls.__name__, **{**private, "seed": 7, "max_grad_norm": 1.0, **changes})
    ref_model = model(seed=1) if ref_model == "another" else ref_model
    return cls(
        made or model(), args=args, train_dataset=rows(data), processing_class=tokenizer(), ref_model=ref_model, peft_config=peft_config,
    )  # fmt: skip


@pytest.mark.parametrize("data", ["preference", "chat-preference"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_one_preference_at_a_time(tmp_path, mode, data):
    private = dpo(*BOTH[0], tmp_path, data=data, clipping_mode=mode, self_check=True)
    assert_exact(private, dpo(*BOTH[1], tmp_path, data=data))


SETTINGS = {
    **{kind: {"loss_type": kind} for kind in LOSSES},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.1},
    "robust": {"loss_type": "robust", "label_smoothing": 0.1},
    "several": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
    "ld_alpha": {"ld_alpha": 0.5},
    "use_weighting": {"use_weighting": True},
    "truncated": {"max_length": 9},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_loss_is_that_of_trl(tmp_path, name):
    """In value and gradient, for each preference of a batch by itself."""
    private, plain = (dpo(*each, tmp_path, **SETTINGS[name]) for each in BOTH)
    batch = private.training_collator()([private.train_dataset[i] for i in range(4)])
    losses = private.example_losses(private.model, batch)
    for i in range(4):
        loss = plain.compute_loss(plain.model, plain.data_collator([plain.train_dataset[i]]))
        assert float(losses[i].detach()) == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
        found, expected = (
            torch.autograd.grad(x, trainable(t.model), retain_graph=True)
            for x, t in ((losses[i], private), (loss, plain))
        )
        assert distance(found, expected) <= 1e-5 * length(expected)


def adapted(name="default"):
    """A model with an adapter that was trained before."""
    torch.manual_seed(5)
    return get_peft_model(model(), LORA)


REFERENCES = {
    "precomputed": {"precompute_ref_log_probs": True, "made": model, "ref_model": "another"},
    "adapter off": {"peft_config": LORA, "ref_model": None},
    "adapter off, precomputed": {"peft_config": LORA, "ref_model": None, "precompute_ref_log_probs": True},
    "a copy of the adapter": {"made": adapted, "ref_model": None},
}


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
@pytest.mark.parametrize("name", REFERENCES)
def test_every_reference_is_one_preference_at_a_time(tmp_path, name, mode):
    changes = dict(REFERENCES[name])
    make = changes.pop("made", model)
    private = dpo(*BOTH[0], tmp_path, make(), clipping_mode=mode, max_grad_norm=0.05, **changes)
    before = {name for name, p in private.model.named_parameters() if p.requires_grad}
    plain = dpo(*BOTH[1], tmp_path, make(), **changes)
    for trainer in (private, plain):  # away from the reference, where the gradient does not depend on it
        torch.manual_seed(11)
        with torch.no_grad():
            for p in trainable(trainer.model):
                p.add_(0.05 * torch.randn_like(p))
    assert_exact(private, plain)
    assert {name for name, p in private.model.named_parameters() if p.requires_grad} == before
    assert not any("ref" in name for name in before)


def test_an_adapter_that_is_its_own_reference_is_checked_once(tmp_path, caplog):
    trainer = dpo(*BOTH[0], tmp_path, get_peft_model(model(), LORA), ref_model=None, self_check=True, max_steps=2)
    trainer.train()
    assert "checked again" not in caplog.text


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_neighbours_differ_by_one_preference(tmp_path, kind):
    make = partial(dpo, *BOTH[0]) if kind == "dpo" else partial(reward, DPRewardTrainer, DPRewardConfig)
    assert_neighbours(lambda: make(tmp_path, **FOR_NEIGHBOURS))


def test_a_batch_has_one_row_for_each_preference(tmp_path):
    trainer = dpo(*BOTH[0], tmp_path)
    examples = [trainer.train_dataset[i] for i in range(3)]
    theirs, ours = trainer.data_collator(list(examples)), trainer.training_collator()(list(examples))
    for name, x in theirs.items():
        assert torch.equal(ours[name][:, 0], x[:3]) and torch.equal(ours[name][:, 1], x[3:])
    assert ours["input_ids"].shape[:2] == (3, 2)


def reward(cls, config, folder, lora=False, margins=False, **changes):
    data = rows("preference")
    data = data.add_column("margin", [0.3 * i for i in range(len(data))]) if margins else data
    private = {} if cls is not DPRewardTrainer else {"self_check": False}
    args = arguments_of(config, folder / cls.__name__, **{**private, "seed": 7, **changes})
    made = model(LlamaForSequenceClassification)
    return cls(made, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=LORA if lora else None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_reward_models_are_one_preference_at_a_time(tmp_path, mode, lora):
    changes = {"center_rewards_coefficient": 0.1, "margins": mode != "ghost", "lora": lora, "max_grad_norm": 0.02}
    private = reward(DPRewardTrainer, DPRewardConfig, tmp_path, clipping_mode=mode, self_check=True, **changes)
    assert_exact(private, reward(RewardTrainer, RewardConfig, tmp_path, **changes))


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_losses_that_sort_the_batch_are_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=rf"loss_type='{kind}'.*choose among.*sort the log-ratios of the batch"):
        arguments_of(DPDPOConfig, tmp_path, loss_type=["sigmoid", kind])


@pytest.mark.parametrize("config", [DPDPOConfig, DPRewardConfig])
def test_settings_are_refused(tmp_path, config):
    with pytest.raises(ValueError, match="activation_offloading=True cannot be used"):
        arguments_of(config, tmp_path, activation_offloading=True)


def test_the_defaults_are_those_of_trl(tmp_path):
    private = {"target_epsilon": 8.0, "target_delta": 1e-6, "expected_batch_size": 8}
    for mine, theirs in ((DPDPOConfig, DPOConfig), (DPRewardConfig, RewardConfig)):
        a = mine(str(tmp_path), **private, use_cpu=True, activation_checkpointing=False)
        b = theirs(str(tmp_path), use_cpu=True, activation_checkpointing=False)
        different = {name for name in vars(b) if getattr(a, name) != getattr(b, name)}
        assert different <= {"_n_gpu", "distributed_state", "run_name", "logging_dir"}, different


def test_a_training_is_logged_evaluated_resumed_and_certified(tmp_path):
    private = {"target_epsilon": 20.0, "noise_multiplier": None, "dp_seed": None, "max_steps": 4, "save_strategy": "steps", "save_steps": 2,
               "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}  # fmt: skip

    def trainer(steps):
        args = arguments_of(DPDPOConfig, tmp_path, precompute_ref_log_probs=True, **private)
        made = DPDPOTrainer(model(), args=args, train_dataset=rows("preference"), eval_dataset=rows("preference", (4, 6)),
                            processing_class=tokenizer(), peft_config=LORA)  # fmt: skip
        made.add_callback(StopAt(steps))
        return made

    trainer(2).train()
    resumed = trainer(None)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.privacy_spent().steps == 4 and 0 < resumed.privacy_spent().epsilon <= 20.0
    lines = resumed.state.log_history
    assert all(
        set(x) == {"loss", "grad_norm", "learning_rate", "epsilon", "epoch", "step"} for x in lines if "loss" in x
    )
    evaluated = [x for x in lines if "eval_loss" in x]
    assert evaluated and all("eval_rewards/margins" in x and "eval_num_tokens" not in x for x in evaluated)
    assert "## Privacy" in (tmp_path / "README.md").read_text()
    (run,) = certificate.read(tmp_path)["runs"]
    assert run["steps"] == 4
