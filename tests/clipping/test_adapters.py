"""Every adapter of peft against one example at a time, in every mode, or the text of its refusal."""

import types
import warnings

import peft
import pytest
import torch
from oracle import errors, trainable
from torch import nn
from zoo import batch_for, build, losses_function

from dp_transformers.clipping.modes import MODES
from dp_transformers.validation import validate_model

LINEAR = ["q_proj", "v_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": "CAUSAL_LM"}


def lora(**options):
    return lambda: peft.LoraConfig(**{**LORA, **options})


ADAPTERS = {
    "LoRA": ("Llama", lora()),
    "rsLoRA": ("Llama", lora(use_rslora=True)),
    "DoRA": ("Llama", lora(use_dora=True)),
    "DoRA on embeddings": ("Llama", lora(use_dora=True, target_modules=["embed_tokens", "q_proj"])),
    "PiSSA": ("Llama", lora(init_lora_weights="pissa")),
    "OLoRA": ("Llama", lora(init_lora_weights="olora")),
    "LoRA with lora_bias": ("Llama", lora(lora_bias=True)),
    "LoRA with bias='all'": ("Qwen2", lora(bias="all")),
    "LoRA with dropout": ("Llama", lora(lora_dropout=0.5)),
    "DoRA with dropout": ("Llama", lora(use_dora=True, lora_dropout=0.5)),
    "LoRA on Conv1D": ("GPT-2", lora(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)),
    "LoRA on Conv2d": ("ViT", lora(target_modules=["projection", "query"], task_type=None)),
    "LoRA on Embedding": ("Llama", lora(target_modules=["embed_tokens", "q_proj"])),
    "LoRA on a scaled Embedding": ("Gemma 2", lora(target_modules=["embed_tokens", "q_proj"])),
    "LoRA with modules_to_save": ("Llama", lora(modules_to_save=["lm_head"])),
    "LoRA with trainable_token_indices": ("Llama", lora(trainable_token_indices=[5, 6, 7])),
    "LoRA with trainable_token_indices, tied": ("Llama tied", lora(trainable_token_indices=[5, 6, 7])),
    "LN tuning": ("Llama", lambda: peft.LNTuningConfig(task_type="CAUSAL_LM")),
    "IA3": (
        "Llama",
        lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=LINEAR, feedforward_modules=["down_proj"]),
    ),
    "VeRA": ("Llama", lambda: peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], r=4)),
    "LoHa": ("Llama", lambda: peft.LoHaConfig(task_type="CAUSAL_LM", target_modules=LINEAR, r=4)),
    "LoKr": ("Llama", lambda: peft.LoKrConfig(task_type="CAUSAL_LM", target_modules=LINEAR, r=4)),
    "OFT": (
        "Llama",
        lambda: peft.OFTConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], oft_block_size=8),
    ),
    "BOFT": (
        "Llama",
        lambda: peft.BOFTConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], boft_block_size=8),
    ),
    "Prompt tuning": ("Llama", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "P-tuning": (
        "Llama",
        lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    ),
    "Prefix tuning": ("Llama", lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
}
REFUSED = {
    "AdaLoRA": (
        "Llama",
        lambda: peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=LINEAR, init_r=4, target_r=2, total_step=10),
        "regulariser",
    ),
    "VBLoRA": (
        "Llama",
        lambda: peft.VBLoRAConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], num_vectors=8, vector_length=16, topk=8, r=4
        ),
        "vector bank",
    ),
    "LoRA on MoE experts (target_parameters)": (
        "Mixtral",
        lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        "target_parameters.*folded into the parameters",
    ),
    "VeLoRA": ("Llama", lambda: lora(velora_config=peft.VeloraConfig())(), "averages of private activations"),
}


def adapted(adapter: str) -> tuple[nn.Module, dict]:
    name, config = (ADAPTERS | REFUSED)[adapter][:2]
    tied = name.endswith(" tied")
    name = name.removesuffix(" tied")
    model = build(name, tied=tied)
    if name == "ViT":
        model.config.problem_type = "single_label_classification"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, config())
    with torch.no_grad():  # adapters start where they change nothing, and then half of their gradients are zero
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model.train(), batch_for(name)


def with_one_mask(model, losses_of, batch):
    """The oracle where dropout is on: the same random numbers as the clipper's forward, one backward for each
    example."""
    torch.manual_seed(7)
    losses = losses_of(batch)
    grads = [torch.autograd.grad(loss, trainable(model), retain_graph=True, allow_unused=True) for loss in losses]
    return [
        [torch.zeros_like(p) if g is None else g for p, g in zip(trainable(model), row, strict=True)] for row in grads
    ]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_is_exact_in_every_mode(adapter, model_table):
    model, batch = adapted(adapter)
    losses_of = plain = losses_function(model)
    oracle = None
    if "dropout" in adapter:
        oracle = with_one_mask(model, plain, batch)

        def losses_of(batch):
            model(
                **{k: v for k, v in batch.items() if k != "labels"}
            )  # the self-check runs here, and restores the generator
            torch.manual_seed(7)
            return plain(batch)

    worst = 0.0
    for mode in sorted(MODES):
        norm_error, sum_error, owners = errors(model, mode, batch, losses_of, oracle)
        worst = max(worst, norm_error, sum_error)
    assert worst <= 1e-5
    model_table.add_adapter(adapter, "exact", worst, owners)


@pytest.mark.parametrize("adapter", REFUSED)
def test_adapter_is_refused_by_name(adapter, model_table):
    with pytest.raises(ValueError, match=REFUSED[adapter][2]) as error:
        validate_model(adapted(adapter)[0])
    model_table.add_adapter(adapter, f"refused: {str(error.value).partition(': ')[2]}", None, [])


def test_a_start_computed_from_data_is_warned_of(caplog):
    model = nn.Linear(3, 2)
    model.peft_config = {"default": peft.LoraConfig(init_lora_weights="eva", eva_config=peft.EvaConfig())}
    validate_model(model)
    assert "computed from data" in caplog.text


def test_table_is_current(model_table, request):
    if not request.config.getoption("--write-tables"):
        assert not model_table.stale(), "docs/models.md is not current: run again with --write-tables"


class Int8Linear(nn.Linear):
    """A stand-in for a quantised base layer: eight-bit weights, made whole in every forward pass."""

    def __init__(self, whole: nn.Linear):
        super().__init__(whole.in_features, whole.out_features, bias=False, device="meta")
        scale = whole.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((whole.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).T


def test_lora_on_a_quantised_base():
    model, batch = build("Llama"), batch_for("Llama")
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Int8Linear(getattr(layer.self_attn, name)))
    model = peft.get_peft_model(model, lora(target_modules=["q_proj", "v_proj"])())
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    assert model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.int8
    for mode in sorted(MODES):
        norm_error, sum_error, _ = errors(model, mode, batch, losses_function(model))
        assert max(norm_error, sum_error) <= 1e-5, mode


def test_x_lora_is_refused_by_name():
    model = nn.Linear(3, 2)
    model.peft_config = {"default": types.SimpleNamespace(peft_type=peft.PeftType.XLORA)}
    with pytest.raises(ValueError, match="XLORA.*router"):
        validate_model(model)
