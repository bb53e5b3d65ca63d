"""Every adapter of peft against one example at a time, in every mode, or the text of its refusal."""

import sys
import types
import warnings

import numpy as np
import peft
import pytest
import torch
from oracle import errors, trainable
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import config as lora_config
from torch import nn
from zoo import batch_for, build, losses_function

from dp_transformers.checks.validation import ModuleValidator, validate_model
from dp_transformers.clipping.modes import MODES

LINEAR = ["q_proj", "v_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": "CAUSAL_LM"}


TWO = ["q_proj", "o_proj"]  # square
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(**options):
    return lambda: peft.LoraConfig(**{**LORA, **options})


def variant(option: str, config_class: str, **options):
    """LoRA with the configuration of a variant of it; None where this release of peft has none."""
    if not hasattr(lora_config, config_class):
        return None
    return lambda: lora(**{option: getattr(lora_config, config_class)(**options)})()


def method(config_class: str, **options):
    """Another method of peft; None where this release has none."""
    if not hasattr(peft, config_class):
        return None
    return lambda: getattr(peft, config_class)(**{"task_type": "CAUSAL_LM", **options})


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
    "IA3": ("Llama", lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=LINEAR, feedforward_modules=["down_proj"])),
    "VeRA": ("Llama", lambda: peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], r=4)),
    "LoHa": ("Llama", lambda: peft.LoHaConfig(task_type="CAUSAL_LM", target_modules=LINEAR, r=4)),
    "LoKr": ("Llama", lambda: peft.LoKrConfig(task_type="CAUSAL_LM", target_modules=LINEAR, r=4)),
    "OFT": ("Llama", lambda: peft.OFTConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], oft_block_size=8)),
    "BOFT": ("Llama", lambda: peft.BOFTConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], boft_block_size=8)),
    "Prompt tuning": ("Llama", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "P-tuning": ("Llama", lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)),
    "Prefix tuning": ("Llama", lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "LoRA with an orthogonal start": ("Llama", lora(init_lora_weights="orthogonal")),
    "LoRA with layer_replication": ("Llama", lora(layer_replication=[[0, 2], [0, 2]])),
    "LoRA on embeddings and head, tied": ("Llama tied", lora(target_modules=["embed_tokens", "lm_head", "q_proj"])),
    "LoRA on experts (target_parameters), Mixtral": ("Mixtral", lora(target_parameters=EXPERTS)),
    "LoRA on experts (target_parameters), Qwen3-MoE": ("Qwen3-MoE", lora(target_parameters=EXPERTS)),
    "LoRA on experts (target_parameters), OLMoE": ("OLMoE", lora(target_parameters=EXPERTS)),
    "LoRA on experts (target_parameters), GPT-OSS": ("GPT-OSS", lora(target_parameters=EXPERTS)),
    "LoRA on a weight (target_parameters)": ("Llama", lora(target_modules=["v_proj"], target_parameters=["q_proj.weight"])),
    "BD-LoRA": ("Llama", variant("use_bdlora", "BdLoraConfig", target_modules_bd_a=["down_proj"], target_modules_bd_b=["q_proj", "v_proj"], nblocks=2)),
    "KaSA": ("Llama", variant("kasa_config", "KasaConfig")),
    "VeLoRA with a random start": ("Llama", variant("velora_config", "VeloraConfig", init_type="random")),
    "AdaMSS": ("Llama", method("AdamssConfig", target_modules=LINEAR, r=8, num_subspaces=2, subspace_rank=2)),
    "LLaMA-Adapter": ("Llama", method("AdaptionPromptConfig", adapter_len=4, adapter_layers=1)),
    "BEFT": ("Llama", method("BeftConfig", target_modules=LINEAR)),
    "C3A": ("Llama", method("C3AConfig", target_modules=TWO, block_size=16)),
    "Cartridge": ("Llama", method("CartridgeConfig", num_virtual_tokens=4)),
    "DEFT": ("Llama", method("DeftConfig", target_modules=LINEAR, r=4)),
    "DeLoRA": ("Llama", method("DeloraConfig", target_modules=LINEAR, r=4)),
    "FourierFT": ("Llama", method("FourierFTConfig", target_modules=TWO, n_frequency=20)),
    "FRoD": ("Llama", method("FrodConfig", target_modules=LINEAR, progressbar=False)),
    "GLoRA": ("Llama", method("GloraConfig", target_modules=LINEAR, r=4)),
    "GraLoRA": ("Llama", method("GraloraConfig", target_modules=TWO, r=4, gralora_k=2, hybrid_r=2)),
    "HiRA": ("Llama", method("HiraConfig", target_modules=LINEAR, r=4)),
    "HRA": ("Llama", method("HRAConfig", target_modules=LINEAR, r=4)),
    "MiSS": ("Llama", method("MissConfig", target_modules=LINEAR, r=4)),
    "Multitask prompt tuning": ("Llama", method("MultitaskPromptTuningConfig", num_virtual_tokens=4, num_tasks=2)),
    "PEANuT": ("Llama", method("PeanutConfig", target_modules=LINEAR, r=4, depth=2)),
    "Poly": ("Llama", method("PolyConfig", target_modules=LINEAR, r=4, n_tasks=2, n_skills=2)),
    "PSOFT": ("Llama", method("PsoftConfig", target_modules=LINEAR, r=4)),
    "PVeRA": ("Llama", method("PveraConfig", target_modules=TWO, r=4)),
    "RandLoRA": ("Llama", method("RandLoraConfig", target_modules=TWO, r=4)),
    "RoAd": ("Llama", method("RoadConfig", target_modules=TWO, group_size=16)),
    "SHiRA": ("Llama", method("ShiraConfig", target_modules=LINEAR, r=4)),
    "Shadow without an auxiliary loss": ("Llama", method("ShadowConfig", r=4, shadow_dropout=0.0, auxiliary_loss_weight=0.0)),
    "Supertuning": ("Llama", method("SupertuningConfig", target_modules=LINEAR)),
    "TinyLoRA": ("Llama", method("TinyLoraConfig", target_modules=LINEAR, u=8, weight_tying=1.0)),
    "Trainable tokens": ("Llama", method("TrainableTokensConfig", token_indices=list(range(40)), target_modules=["embed_tokens"])),
    "Uni-LoRA": ("Llama", method("UniLoraConfig", target_modules=LINEAR, theta_d_length=64)),
    "VBLoRA": ("Llama", method("VBLoRAConfig", target_modules=["q_proj"], num_vectors=8, vector_length=16, topk=2, r=4)),
    "WaveFT": ("Llama", method("WaveFTConfig", target_modules=TWO, n_frequency=20)),
}  # fmt: skip
RANDOM = ("LoRA with dropout", "DoRA with dropout", "Poly", "PVeRA")  # they draw random numbers in training
REFUSED = {
    "AdaLoRA": ("Llama", lambda: peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=LINEAR, init_r=4, target_r=2, total_step=10), "regulariser"),
    "VeLoRA": ("Llama", variant("velora_config", "VeloraConfig"), "averages of private activations"),
    "aLoRA": ("Llama", lora(alora_invocation_tokens=[6, 7]), "positions behind the invocation"),
    "MonteCLoRA": ("Llama", variant("monteclora_config", "MontecloraConfig"), "samples from a store"),
    "LoRA on MultiheadAttention": ("SigLIP + attention head", lora(target_modules=["attention"], task_type=None), "merges its adapter"),
    "CPT": ("Llama", method("CPTConfig", cpt_token_ids=[5, 6, 7], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]), "a loss of its own"),
    "Lily": ("Llama", method("LilyConfig", target_modules=TWO, r=4), "mean over all tokens of a batch"),
    "OSF": ("Llama", method("OSFConfig", target_modules=LINEAR, effective_rank=4), "hooks change gradients"),
    "Shadow": ("Llama", method("ShadowConfig", r=4), "auxiliary loss"),
}  # fmt: skip
ADAPTERS = {name: entry for name, entry in ADAPTERS.items() if entry[1]}
REFUSED = {name: entry for name, entry in REFUSED.items() if entry[1]}


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
    batch = batch_for(name)
    if adapter in ("Poly", "Multitask prompt tuning"):
        batch["task_ids"] = torch.arange(len(batch["labels"])) % 2
    with torch.no_grad():  # adapters start where they change nothing, and then half of their gradients are zero
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model.train(), batch


class KMeans:
    """A stand-in for the one of scikit-learn, by which AdaMSS chooses where it starts."""

    def __init__(self, n_clusters: int, **_):
        self.n_clusters = n_clusters

    def fit_predict(self, x):
        return np.arange(len(x)) % self.n_clusters


@pytest.fixture(autouse=True)
def clusters(request, monkeypatch):
    if "AdaMSS" in request.node.name or "every_method" in request.node.name:
        for name in ("sklearn", "sklearn.cluster"):
            monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(KMeans=KMeans))


def with_one_mask(model, losses_of, batch):
    """The oracle where dropout is on: the same random numbers as the clipper's forward, one backward for each
    example."""
    torch.manual_seed(7)
    losses = losses_of(batch)
    grads = [torch.autograd.grad(loss, trainable(model), retain_graph=True, allow_unused=True) for loss in losses]
    return [
        [torch.zeros_like(p) if g is None else g for p, g in zip(trainable(model), row, strict=True)] for row in grads
    ]


@pytest.mark.table(of=30)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, to FRoD
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_is_exact_in_every_mode(adapter, model_table):
    model, batch = adapted(adapter)
    losses_of = plain = losses_function(model)
    oracle = None
    if adapter in RANDOM:
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
    model = adapted(adapter)[0]
    with pytest.raises(ValueError, match=REFUSED[adapter][2]):
        validate_model(model)
    first = ModuleValidator.validate(model)[0]
    model_table.add_adapter(adapter, f"refused: {str(first).partition(': ')[2]}", None, [])


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


class TimesPacked(torch.autograd.Function):
    """x Wᵀ with the weight made whole in both directions, and never kept: what bitsandbytes does."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x @ layer.whole().T

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.layer.whole(), None


class Packed4BitLinear(nn.Linear):
    """Two weights in a byte, in a parameter of another shape; scales in an attribute that is no buffer."""

    def __init__(self, whole: nn.Linear):
        super().__init__(whole.in_features, whole.out_features, bias=False, device="meta")
        groups = whole.weight.detach().reshape(-1, 8)
        self.scales = groups.abs().amax(1, keepdim=True) / 7
        levels = ((groups / self.scales).round() + 8).to(torch.uint8).flatten()
        self.weight = nn.Parameter((levels[::2] * 16 + levels[1::2])[:, None], requires_grad=False)

    def whole(self):
        levels = torch.cat([self.weight // 16, self.weight % 16], 1).float() - 8
        return (levels.reshape(-1, 8) * self.scales).reshape(self.out_features, self.in_features)

    def forward(self, x):
        return TimesPacked.apply(x, self)


def packed_for_inference(whole: nn.Linear):
    """As hqq does it: tensors that autograd keeps no count for."""
    with torch.inference_mode():
        return Packed4BitLinear(whole)


@pytest.mark.parametrize("quantise", [Int8Linear, Packed4BitLinear, packed_for_inference])
def test_lora_on_a_quantised_base(quantise):
    model, batch = build("Llama"), batch_for("Llama")
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, quantise(getattr(layer.self_attn, name)))
    model = peft.get_peft_model(model, lora(target_modules=["q_proj", "v_proj"])())
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    assert not model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.is_floating_point()
    for mode in sorted(MODES):
        norm_error, sum_error, _ = errors(model, mode, batch, losses_function(model))
        assert max(norm_error, sum_error) <= 1e-5, mode


class Linear8bitLt(nn.Linear):
    """A stand-in for bitsandbytes' layer: features with an outlier anywhere in the batch are not rounded."""

    def forward(self, x):
        outliers = (x.abs() > 3.0).flatten(0, -2).any(0)
        return super().forward(torch.where(outliers, x, (x * 8).round() / 8))


def test_eight_bits_with_outliers_of_the_whole_batch_are_refused():
    """One example's outliers moved another's logits by 0.6% with bitsandbytes 0.50 and llm_int8_threshold=6."""
    model, x = nn.Sequential(Linear8bitLt(4, 4), nn.Linear(4, 2)), torch.rand(3, 4)
    model[0].requires_grad_(False)
    x[0] = 10.0
    assert "Linear8bitLt" in str(ModuleValidator.find_mixing(model, x))
    with pytest.raises(ValueError, match=r"'0' is a Linear8bitLt: .* \(load_in_4bit=True\)"):
        validate_model(model)


def test_every_method_of_peft_is_exact_or_refused_by_name():
    """A method that a new release of peft brings belongs into one of the tables."""
    kinds = {peft.PeftType.XLORA}  # made of adapters that were saved before, see below
    for entry in (ADAPTERS | REFUSED).values():
        kinds.add(entry[1]().peft_type)
    assert kinds >= set(PEFT_TYPE_TO_CONFIG_MAPPING)
