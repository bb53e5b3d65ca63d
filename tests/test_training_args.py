"""Arguments: derived values, and every refusal with its reason."""

import dataclasses
import json
import pickle
import re

import pytest
from transformers import HfArgumentParser

from dp_transformers import DPTrainingArguments, calibrate_noise_multiplier
from dp_transformers.mechanism.clipping_functions import CLIPPING_FUNCTIONS, FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism
from dp_transformers.mechanism.noise import IndependentNoise
from dp_transformers.mechanism.sampling import PoissonSampling


def make(tmp_path, **changes):
    return DPTrainingArguments(
        **{"output_dir": str(tmp_path), "target_epsilon": 8.0, "target_delta": 1e-5, "use_cpu": True, **changes}
    )


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
    ("changes", "message"), [
        ({"target_delta": None}, "target_delta must be given"),
        ({"target_delta": None}, "For evaluation alone use Trainer with TrainingArguments"),
        ({"target_delta": 1.5}, "target_delta"),
        ({"target_epsilon": None}, "got neither"),
        ({"target_delta": "auto"}, "got 'auto'. It is never chosen for you"),
        ({"target_epsilon": -1.0}, "positive finite"),
        ({"target_epsilon": float("inf")}, "positive finite"),
        ({"target_epsilon": None, "noise_multiplier": -1.0}, "at least 0"),
        ({"max_grad_norm": 0.0}, "bound on the norm"),
        ({"max_grad_norm": float("inf")}, "got inf; 1.0 is common. Only noise_multiplier=0 goes without one (inf)"),
        ({"max_grad_norm": None}, "max_grad_norm must be an int or a float, got None"),
        ({"expected_batch_size": 0}, "at least 1"),
        ({"clipping": "per_layer"}, "choose one of ['flat', 'auto_s', 'normalised', 'dp_psac'], or give a mechanism"),
        ({"clipping_mode": "opacus"}, "choose 'auto' or one of"),
        ({"accountant": "gdp"}, "pld"),
        ({"sampling": "shuffle"}, "shuffled in every epoch, for which Poisson's epsilon is too small, take RandomAllocationSampling"),
        ({"sampling": "b_min_sep"}, "b-min-sep nothing but Monte-Carlo estimates is known, which are no bound"),
        ({"secure_rng": True, "dp_seed": 1}, "contradict"),
        ({"dataloader_in_order": False, "dataloader_num_workers": 1}, "leave it True"),
        ({"optim": "lomo"}, "during backward"),
    ], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_refusals(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(tmp_path, **changes)


def test_every_field_of_ours_has_help_and_parses(tmp_path, capsys):
    parser = HfArgumentParser(DPTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--noise_multiplier", "1.1", "--target_delta", "1e-6", "--use_cpu", "--no_self_check"],
    )  # fmt: skip
    assert (args.noise_multiplier, args.target_delta, args.self_check) == (1.1, 1e-6, False)
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--help"])
    text = capsys.readouterr().out
    for name in (
        "target_epsilon",
        "target_delta",
        "noise_multiplier",
        "expected_batch_size",
        "clipping_mode",
        "log_raw_metrics",
    ):
        assert name in text
    assert all(
        re.fullmatch(r"[A-Z].* .*\.", f.metadata["help"])  # whole sentences
        for f in dataclasses.fields(DPTrainingArguments)
        if f.name in DPTrainingArguments.__annotations__
    )


def mechanism(**changes):
    parts = {"sampling": PoissonSampling(100, 12), "clipping": FlatClipping(0.7), "noise": IndependentNoise(1.3), "steps": 40}  # fmt: skip
    return Mechanism(**{**parts, **changes})


def test_flags_build_a_mechanism(tmp_path):
    args = make(tmp_path, target_epsilon=None, noise_multiplier=1.3, expected_batch_size=12, max_grad_norm=0.7)
    assert args.mechanism is None and args.mechanism_for(100, 40) == mechanism()
    for kind, function in CLIPPING_FUNCTIONS.items():
        assert dataclasses.replace(args, clipping=kind).mechanism_for(100, 40) == mechanism(clipping=function(0.7))
    args = make(tmp_path, target_epsilon=3.0, expected_batch_size=12, max_examples_per_person=2)
    found = args.mechanism_for(100, 40)
    assert found.noise.noise_multiplier == calibrate_noise_multiplier(3.0, 1e-5, 0.12, 40, rows=2)
    assert args.mechanism_for(100, 50, saved=found) == dataclasses.replace(found, steps=50)
    derived = make(tmp_path, per_device_train_batch_size=4, max_examples_per_person=2)
    assert derived.mechanism_for(100, 40, saved=found) == found


@pytest.mark.parametrize("form", ["value", "dictionary", "text", "path"])
def test_a_mechanism_in_the_place_of_flags(tmp_path, form):
    text = json.dumps(mechanism().to_dict())
    (tmp_path / "mechanism.json").write_text(text)
    given = {
        "value": mechanism(),
        "dictionary": mechanism().to_dict(),
        "text": text,
        "path": str(tmp_path / "mechanism.json"),
    }[form]
    args = make(tmp_path, target_epsilon=None, mechanism=given)
    assert args.mechanism == args.mechanism_for(100, 7) == mechanism()
    assert (args.expected_batch_size, args.max_grad_norm, args.max_steps, args.noise_multiplier) == (12, 0.7, 40, None)
    assert json.loads(args.to_json_string())["mechanism"] == mechanism().to_dict()
    assert dataclasses.replace(args, learning_rate=1e-3).mechanism == mechanism()
    assert pickle.loads(pickle.dumps(args)).mechanism == mechanism()
    with pytest.raises(ValueError, match="for num_examples=100, but train_dataset has 99"):
        args.mechanism_for(99, 7)


@pytest.mark.parametrize(
    "flag",
    [
        {"noise_multiplier": 1.3},
        {"noise_multiplier": 2.0},
        {"expected_batch_size": 13},
        {"max_grad_norm": 0.8},
        {"max_examples_per_person": 2},
        {"sampling": "shuffle"},
        {"clipping": "auto_s"},
        {"max_steps": 41},
    ],
    ids=str,
)
def test_a_mechanism_and_flags_at_once(tmp_path, flag):
    with pytest.raises(ValueError, match=f"{next(iter(flag))}=.* is given beside a mechanism"):
        make(tmp_path, **{"target_epsilon": None, "mechanism": mechanism(), **flag})


def test_what_is_no_mechanism(tmp_path):
    with pytest.raises(ValueError, match="mechanism must be a Mechanism"):
        make(tmp_path, target_epsilon=None, mechanism=3)
    with pytest.raises(ValueError, match="this is no mechanism.*sampling"):
        make(tmp_path, target_epsilon=None, mechanism={"noise": 3})
