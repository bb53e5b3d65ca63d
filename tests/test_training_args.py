"""Arguments: derived values, and every refusal with its reason."""

import dataclasses
import pickle
import re

import pytest
from transformers import HfArgumentParser

from dp_transformers import DPTrainingArguments


def make(tmp_path, **changes):
    return DPTrainingArguments(**{"output_dir": str(tmp_path), "target_epsilon": 8.0, "target_delta": 1e-5, "use_cpu": True, **changes})


def test_expected_batch_size_is_folded_once(tmp_path):
    args = make(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=8)
    assert (args.expected_batch_size, args.gradient_accumulation_steps) == (32, 1)
    assert args.expected_batch_size_is_derived
    again = dataclasses.replace(args, learning_rate=1e-3)
    assert (again.expected_batch_size, again.gradient_accumulation_steps) == (32, 1)
    given = make(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=8, expected_batch_size=100)
    assert (given.expected_batch_size, given.gradient_accumulation_steps) == (100, 1)
    assert not given.expected_batch_size_is_derived
    assert pickle.loads(pickle.dumps(args)).expected_batch_size == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_delta": None}, "target_delta must be given"),
        ({"target_delta": 1.5}, "target_delta"),
        ({"target_epsilon": None}, "got neither"),
        ({"noise_multiplier": 1.0}, "got both"),
        ({"target_epsilon": -1.0}, "positive finite"),
        ({"target_epsilon": float("inf")}, "positive finite"),
        ({"target_epsilon": None, "noise_multiplier": -1.0}, "at least 0"),
        ({"max_grad_norm": 0.0}, "clipping bound"),
        (
            {"max_grad_norm": float("inf")},
            "clipping bound on one example's gradient norm and must be a positive finite number, got inf; 1.0 is common",
        ),
        ({"max_grad_norm": None}, "max_grad_norm must be a number, got None"),
        ({"expected_batch_size": 0}, "at least 1"),
        ({"clipping_mode": "opacus"}, "choose 'auto' or one of"),
        ({"accountant": "gdp"}, "pld"),
        ({"sampling": "shuffle"}, "Leave it at 'poisson'"),
        ({"secure_rng": True, "dp_seed": 1}, "contradict"),
        ({"fp16": True}, "use bf16=True"),
        ({"dataloader_drop_last": True}, "no last batch to drop, and dropping examples would change the sample rate; leave it False"),
        ({"train_sampling_strategy": "group_by_length"}, "Poisson sampling"),
        ({"auto_find_batch_size": True}, "restarts training"),
        ({"include_num_input_tokens_seen": True}, "not covered by epsilon; leave it 'no'"),
        ({"dataloader_in_order": False, "dataloader_num_workers": 1}, "leave it True"),
        ({"torch_compile": True}, "not supported yet"),
        ({"use_liger_kernel": True}, "no loss per example; leave it False"),
        ({"neftune_noise_alpha": 5.0}, "leave it None"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["a"]}, "during backward"),
        ({"optim": "lomo"}, "during backward"),
        ({"debug": "underflow_overflow"}, "one example could stop the training; leave it out"),
        ({"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refusals(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(tmp_path, **changes)


def test_deepspeed_is_refused_where_it_is_installed(tmp_path):
    args = make(tmp_path)
    args.deepspeed = "zero2.json"
    with pytest.raises(ValueError, match="deepspeed='zero2.json' cannot be used.*use FSDP2, or DDP"):
        args._refuse_what_breaks_privacy()


def test_every_field_of_ours_has_help_and_parses(tmp_path, capsys):
    parser = HfArgumentParser(DPTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--noise_multiplier", "1.1", "--target_delta", "1e-6", "--use_cpu", "--no_self_check"]
    )
    assert (args.noise_multiplier, args.target_delta, args.self_check) == (1.1, 1e-6, False)
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--help"])
    text = capsys.readouterr().out
    for name in ("target_epsilon", "target_delta", "noise_multiplier", "expected_batch_size", "clipping_mode", "log_train_loss"):
        assert name in text
    assert all(f.metadata.get("help") for f in dataclasses.fields(DPTrainingArguments) if f.name in DPTrainingArguments.__annotations__)
