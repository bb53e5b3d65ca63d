"""Modules without a rule, one example at a time in the forward pass, beside re-running them in the backward pass.

    python -m benchmarks.apart --quick
    python -m benchmarks.apart --models gemma2 t5

The models are of transformers, with random weights, and each has such modules: routers, norm layers of their own,
sinks, scaled embeddings, tables of positions, state-space layers. *re-run* is what the library does where a module
cannot run apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import torch
import transformers
from torch import nn

from dp_transformers import find_example_losses
from dp_transformers.clipping.owners import Owner

from .contenders import Task, ours, plain
from .harness import Benchmark, Phase, parser

VOCABULARY = 4000
# the class of transformers, and what its configuration has besides sizes
MODELS: dict[str, tuple[str, dict[str, int | str | bool | list[str]]]] = {
    "gemma2": ("Gemma2ForCausalLM", {"num_key_value_heads": 2}),
    "cohere": ("CohereForCausalLM", {"num_key_value_heads": 2}),
    "nemotron": ("NemotronForCausalLM", {"num_key_value_heads": 2}),
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "gpt-oss": ("GptOssForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": ("MambaForCausalLM", {}),
    "deberta": (
        "DebertaForSequenceClassification",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "hidden_dropout_prob": 0},
    ),
    "mpnet": ("MPNetForMaskedLM", {}),
    "t5": ("T5ForConditionalGeneration", {"d_kv": 64, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", {"scale_embedding": True, "forced_eos_token_id": None}),
    "deit": ("DeiTForImageClassification", {"image_size": 128}),
}


def build(name: str, width: int, layers: int) -> nn.Module:
    """The model in training mode, without dropout."""
    torch.manual_seed(0)
    cls, options = MODELS[name]
    model_class = getattr(transformers, cls)
    config = model_class.config_class()
    sizes = dict.fromkeys(["hidden_size", "d_model"], width)
    sizes |= dict.fromkeys(["num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"], layers)
    heads_of = ["num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"]
    sizes |= dict.fromkeys(heads_of, max(1, width // 64)) | {"head_dim": 64, "vocab_size": VOCABULARY}
    sizes |= dict.fromkeys(["intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"], 4 * width)
    known = {key: value for key, value in sizes.items() if key in vars(config)}
    model = model_class(model_class.config_class(**{**known, **options})).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def losses_of(batch: dict[str, torch.Tensor], model: nn.Module) -> torch.Tensor:
    return find_example_losses(model)(batch)


def batch_for(name: str, size: int, tokens: int) -> dict[str, torch.Tensor]:
    if name == "deit":
        return {"pixel_values": torch.randn(size, 3, 128, 128), "labels": torch.randint(0, 2, (size,))}
    ids = torch.randint(3, VOCABULARY, (size, tokens))
    labels = torch.randint(0, 2, (size,)) if name == "deberta" else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def re_run(task: Task, mode: str) -> Sequence[Phase]:
    """As :func:`ours`, where every module without a rule needs the whole batch."""
    backward, step = ours(task, mode)

    def without_vmap() -> None:
        with mock.patch.object(Owner, "runs_by_example", False):
            backward()

    return without_vmap, step


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=7)
    p.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    p.add_argument("--modes", nargs="+", default=["book_keeping"])
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--batch", type=int, default=8)
    args = p.parse_args(argv)
    if args.quick:
        args.models, args.layers = args.models[:2], 2
    benchmark = Benchmark("apart", args)
    for name in args.models:
        build_model: Callable[[], nn.Module] = partial(build, name, args.width, args.layers)
        batch = {key: x.to(benchmark.device) for key, x in batch_for(name, args.batch, args.tokens).items()}
        task = Task(build_model, partial(losses_of, batch), args.batch, benchmark.device)
        for mode in args.modes:
            case = {"model": name, "mode": mode, "d": args.width, "T": args.tokens, "batch": args.batch}
            contenders = {"plain": partial(plain, task), "apart": partial(ours, task, mode)}
            benchmark.compare(case, {**contenders, "re-run": partial(re_run, task, mode)}, {"gradients": (1, 0)})


if __name__ == "__main__":
    main()
