"""Checks of models and data before training."""

import re

import peft
import pytest
import torch
import transformers as hf
from models import DeepSpeedEngine, build
from torch import nn
from transformers import CLIPConfig, CLIPModel, LayoutLMConfig, LayoutLMModel

from dp_transformers import (
    ModuleValidator,
    check_per_sample_gradients_are_correct,
    register_module_fixer,
    register_module_validator,
)
from dp_transformers.checks.validation import longest_input, validate_model

pytestmark = pytest.mark.halved


class NllbMoeTop2Router(nn.Linear):
    """A stand-in with the name of the one in transformers."""


class Shifted(nn.Module):
    def forward(self, w):
        return w + 1


class FrozenBatchNorm2d(nn.Module):
    """As detection models have it: statistics that never change."""

    def __init__(self):
        super().__init__()
        self.running_mean, self.running_var = nn.Buffer(torch.zeros(2)), nn.Buffer(torch.ones(2))


class OwnBatchNorm(FrozenBatchNorm2d):
    momentum = 0.1


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, x):
        return torch.relu(super().forward(x))


def hooked(module):
    module.register_forward_hook(lambda module, args, output: output + 1)
    return module


def parametrized(module):
    nn.utils.parametrize.register_parametrization(module, "weight", Shifted())
    return module


def with_gradient_hook():
    layer = nn.Linear(3, 2)
    layer.weight.register_hook(lambda g: g)
    return layer


PROBLEMS = {  # module -> what is said of it, what is done about it
    "BatchNorm2d": (lambda: nn.BatchNorm2d(64), "whole batch", "BatchNorm2d -> GroupNorm(16, 64)"),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(12), "whole batch", "BatchNorm3d -> GroupNorm(3, 12)"),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(64), "whole batch", "BatchNorm1d -> GroupNorm(4, 64)"),
    "few channels": (lambda: nn.BatchNorm2d(7), "whole batch", "BatchNorm2d -> GroupNorm(1, 7)"),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(64), "whole batch", "SyncBatchNorm -> GroupNorm(4, 64)"),
    "one channel": (lambda: nn.BatchNorm1d(1), "whole batch", None),
    "subclass": (lambda: NormAndActivation(8), "NormAndActivation: it normalises", None),
    "parametrized": (lambda: parametrized(nn.BatchNorm2d(8)), "whole batch", None),
    "hooked": (lambda: hooked(nn.BatchNorm2d(8)), "whole batch", None),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(2, track_running_stats=True), "keep private data", "InstanceNorm1d: track_running_stats=True -> False"),
    "own statistics": (OwnBatchNorm, "running statistics", None),
    "max_norm": (lambda: nn.EmbeddingBag(5, 3, max_norm=2.0), "EmbeddingBag with max_norm", "EmbeddingBag: max_norm=2.0 -> None"),
    "sparse": (lambda: nn.Embedding(5, 3, sparse=True), "with sparse: the noised", "Embedding: sparse=True -> False"),
    "by frequency": (
        lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), "what the others contain", "Embedding: scale_grad_by_freq=True -> False",
    ),
    "router": (lambda: NllbMoeTop2Router(3, 2), "can push out another's", None),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(3, 2)), "cannot be clipped together", None),
    "DeepSpeed": (lambda: DeepSpeedEngine(nn.Linear(3, 2)), "clips gradients on its own", None),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_is_named_and_repaired_where_it_can_be(name, caplog):
    make, said, fix = PROBLEMS[name]
    model = nn.Sequential(nn.Linear(3, 2), nn.ModuleDict({"a": make()}))
    (problem,) = ModuleValidator.validate(model)
    assert problem.path == "1.a"
    assert problem.fix == fix
    assert re.match(r"'1\.a' is (an (?=[AEIOU])|a (?![AEIOU]))", str(problem))
    assert said in str(problem)
    assert not ModuleValidator.is_valid(model)
    before = type(model[1]["a"])
    fixed = ModuleValidator.fix(model)
    assert type(model[1]["a"]) is before  # a copy was repaired
    assert len(ModuleValidator.validate(model)) == 1
    assert ModuleValidator.is_valid(fixed) == (fix is not None)
    assert caplog.messages == ([f"'1.a': {fix}"] if fix else [])


def test_what_is_no_problem():
    frozen = nn.Embedding(5, 3, sparse=True, scale_grad_by_freq=True).requires_grad_(False)
    model = nn.Sequential(
        nn.InstanceNorm2d(3, affine=True), FrozenBatchNorm2d(), frozen, nn.GroupNorm(2, 4), nn.Linear(3, 2).bfloat16().requires_grad_(False),
    )  # fmt: skip
    assert ModuleValidator.validate(model) == []


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_problems_of_parameters():
    fp16 = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).half()
    frozen = nn.Sequential(nn.Linear(3, 2)).requires_grad_(False)
    found = [
        *ModuleValidator.validate(fp16), *ModuleValidator.validate(frozen), *ModuleValidator.validate(nn.Sequential(nn.LazyLinear(2))),
        *ModuleValidator.validate(with_gradient_hook()), *ModuleValidator.validate(nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d(affine=False))),
    ]  # fmt: skip
    said = [
        r"'0.weight' \(and 3 others\).*neither in float32 nor in bfloat16.*dtype=torch.float32", "no trainable parameter",
        r"'0.weight'.*without a shape", "hook", "whole batch",
    ]  # fmt: skip
    assert [re.search(words, str(problem)) is not None for words, problem in zip(said, found, strict=True)] == [
        True
    ] * 5
    assert [problem.path for problem in found] == ["0", "", "0", "", "1"]


def test_fix_keeps_everything_else():
    norm = nn.BatchNorm2d(8, eps=1e-3, track_running_stats=False).double().eval()
    nn.init.normal_(norm.weight)
    norm.bias.requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), norm, nn.ModuleList([norm, nn.BatchNorm2d(8, affine=False)]))
    model.register_parameter("scale", norm.weight)
    fixed = ModuleValidator.fix(model)
    one, other = fixed[1], fixed[2][1]
    assert fixed[2][0] is one  # shared under two paths, replaced once
    assert (type(one), one.num_groups, one.num_channels, one.eps, one.training) == (nn.GroupNorm, 2, 8, 1e-3, False)
    assert torch.equal(one.weight, norm.weight) and one.weight is not norm.weight and one.weight is fixed.scale
    assert (one.weight.dtype, one.weight.requires_grad, one.bias.requires_grad) == (torch.float64, True, False)
    assert (other.weight, other.affine, other.training) == (None, False, True)
    assert [p.path for p in ModuleValidator.validate(model)] == ["1", "2.1"]
    assert "'1' and '2.0' is a BatchNorm2d" in str(ModuleValidator.validate(model)[0])
    x = torch.randn(4, 8, 5, 5, dtype=torch.float64)
    expected = nn.functional.group_norm(x, 2, norm.weight, norm.bias, 1e-3)
    torch.testing.assert_close(one(x), expected)


def test_fix_of_the_model_itself():
    fixed = ModuleValidator.fix(nn.BatchNorm1d(32, dtype=torch.float64))
    assert (type(fixed), fixed.num_groups, fixed.weight.dtype) == (nn.GroupNorm, 2, torch.float64)
    assert fixed(torch.randn(3, 32, dtype=torch.float64)).std() > 0.5  # rows without positions are not normalised away


def test_a_fixed_model_can_be_trained():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    )
    x = torch.randn(4, 3, 6, 6)
    assert not check_per_sample_gradients_are_correct(x, model, modes=["ghost"])
    fixed = ModuleValidator.fix(model)
    assert check_per_sample_gradients_are_correct(x, fixed, modes=["ghost"])
    assert ModuleValidator.find_mixing(model, x).module == "'1' (BatchNorm2d)"
    assert ModuleValidator.find_mixing(fixed, x) is None


def test_longest_input():
    assert longest_input(build("bert")) == 512
    assert longest_input(build("gpt2")) == 64
    assert longest_input(build("llama")) is None
    assert longest_input(build("gpt2", lora=True)) == 64
    towers = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {**towers, "image_size": 16, "patch_size": 8}
    texts = {**towers, "vocab_size": 50, "max_position_embeddings": 20}
    assert longest_input(CLIPModel(CLIPConfig(text_config=texts, vision_config=images))) == 20  # 5 patches
    pages = LayoutLMConfig(**texts, max_2d_position_embeddings=8, type_vocab_size=2)
    assert longest_input(LayoutLMModel(pages)) == 20


def test_a_validator_of_one_s_own():
    class Wide(nn.Linear):
        pass

    @register_module_validator(Wide)
    def not_wide(module):
        return ["it has too many inputs. Select some."] if module.in_features > 5 else []

    assert ModuleValidator.is_valid(nn.Sequential(Wide(5, 2)))
    with pytest.raises(ValueError, match=r"'0' is a Wide: it has too many inputs. Select some."):
        validate_model(nn.Sequential(Wide(6, 2)))
    assert ModuleValidator.validate(nn.Sequential(Wide(6, 2)))[0].fix is None

    @register_module_fixer(Wide)
    def narrow(module):
        return nn.Linear(5, module.out_features)

    assert ModuleValidator.fix(nn.Sequential(Wide(6, 2)))[0].in_features == 5


WITH_SETTINGS = {
    "wav2vec2's LayerDrop": (lambda: speech(layerdrop=0.1), "encoder' is a Wav2Vec2Encoder with config.layerdrop=0.1"),
    "wav2vec2's SpecAugment": (lambda: speech(apply_spec_augment=True, mask_feature_prob=0.2), "config.apply_spec_augment=True"),
    "BART's LayerDrop": (lambda: hf.BartForSequenceClassification(hf.BartConfig(**BART, decoder_layerdrop=0.2)), "'model.decoder'.*layerdrop=0.2"),
    "XLNet's dropout of positions": (lambda: hf.XLNetModel(hf.XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8)), "dropout.p=0.1"),
    "DeBERTa's dropout of positions": (lambda: hf.DebertaV2Model(hf.DebertaV2Config(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, relative_attention=True, pos_att_type=["p2c", "c2p"])), r"'encoder.layer.0.attention.self' \(and 1 others\).*pos_dropout.p=0.1"),
    "Funnel's dropout of positions": (lambda: hf.FunnelModel(hf.FunnelConfig(vocab_size=20, d_model=8, n_head=2, d_head=4, d_inner=8, block_sizes=[1, 1], attention_type="factorized")), "sin_dropout.p=0.1"),
    "LoHa's module_dropout": (lambda: peft.get_peft_model(nn.Sequential(nn.Linear(3, 2)), peft.LoHaConfig(target_modules=["0"], r=2, module_dropout=0.1)), "set module_dropout=0.0"),
}  # fmt: skip
BART = {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}  # fmt: skip


def speech(**settings):
    settings = {"apply_spec_augment": False, "layerdrop": 0.0, "mask_time_prob": 0.0} | settings
    return hf.Wav2Vec2Model(
        hf.Wav2Vec2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8,),
                          conv_kernel=(4,), conv_stride=(3,), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, **settings)
    )  # fmt: skip


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_settings_that_draw_one_number_for_all_rows_are_refused(name):
    make, says = WITH_SETTINGS[name]
    with pytest.raises(ValueError, match=says):
        ModuleValidator.validate(make(), strict=True)


def test_what_is_switched_off_or_frozen_in_evaluation_draws_nothing():
    assert ModuleValidator.is_valid(speech())
    model = nn.Sequential(speech(layerdrop=0.1), nn.Linear(16, 2)).train()
    model[0].eval()
    assert ModuleValidator.is_valid(model)
