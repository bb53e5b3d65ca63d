"""DPSFTTrainer and DPDPOTrainer beside TRL's own trainers, end to end, on the same rows.

    python -m benchmarks.trl --quick
    python -m benchmarks.trl --json trl.json

Every step takes all rows, in physical batches: TRL's trainers accumulate gradients over them, and the private ones
have a sampling rate of one. The time is that between the ends of the first and the last step, for one row; a row of
DPO is a preference, two texts with their prompt. What comes before the end of the first step, self-check included, is
the `startup`. Rows have random lengths between `--shortest` and `--tokens`. The private trainers put rows of a like
length together, which saves padding; with `--shortest` as large as `--tokens` there is none to save.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from dp_transformers import DPDPOConfig, DPDPOTrainer, DPSFTConfig, DPSFTTrainer

from .harness import Benchmark, parser, spread, summarise
from .models import Shape, build_transformer
from .trainer import Clock

TRAINERS = {
    "SFT": ((SFTTrainer, SFTConfig), (DPSFTTrainer, DPSFTConfig)),
    "DPO": ((DPOTrainer, DPOConfig), (DPDPOTrainer, DPDPOConfig)),
}


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token for each of the words w2, w3, ..."""
    ids = {"<pad>": 0, "<end>": 1, **{f"w{i}": i for i in range(2, vocabulary)}}
    core = Tokenizer(WordLevel(ids))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")


def dataset(kind: str, rows: int, shortest: int, shape: Shape) -> Dataset:
    """A prompt of random words with one completion, or with two for DPO. Prompt and completion have the same number of
    words, and their end is one more token."""
    columns = ("chosen", "rejected") if kind == "DPO" else ("completion",)

    def row() -> dict[str, str]:
        half = int(torch.randint(shortest, shape.tokens + 1, ())) // 2
        texts = [f"w{i}" for i in torch.randint(2, shape.vocabulary, (half * (1 + len(columns)),))]
        prompt, *completions = (" ".join(texts[i : i + half]) for i in range(0, len(texts), half))
        return {"prompt": prompt, **{name: f" {text}" for name, text in zip(columns, completions, strict=True)}}

    return Dataset.from_list([row() for _ in range(rows)])


def train(kind: str, private: bool, mode: str, model: str, data: Dataset, shape: Shape, benchmark: Benchmark) -> Clock:
    trained = build_transformer(model, shape)
    clock = Clock(trained, benchmark)
    trainer_class, config = TRAINERS[kind][private]
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder, "max_steps": benchmark.args.steps, "per_device_train_batch_size": shape.size,
            "learning_rate": 1e-5, "logging_steps": 10, "save_strategy": "no", "disable_tqdm": True,
            "report_to": "none", "use_cpu": benchmark.device.type == "cpu", "bf16": False,
            "gradient_checkpointing": False, "max_length": None,
        }  # fmt: skip
        if kind == "DPO":
            options["precompute_ref_log_probs"] = True  # else TRL's trainer without LoRA keeps a second model
        if private:
            options |= {"noise_multiplier": 1.0, "target_delta": 1e-6, "expected_batch_size": len(data)}
            options |= {"clipping_mode": mode}
        else:
            options["gradient_accumulation_steps"] = len(data) // shape.size
        words = tokenizer(shape.vocabulary)
        trainer = trainer_class(trained, args=config(**options), train_dataset=data, processing_class=words)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    return clock


def main(argv: Sequence[str] | None = None) -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument("--trainers", nargs="+", choices=list(TRAINERS), default=list(TRAINERS))
    p.add_argument("--models", nargs="+", choices=["llama", "llama-lora"], default=["llama", "llama-lora"])
    p.add_argument("--tokens", type=int, default=128, help="of the longest prompt with its completion")
    p.add_argument("--shortest", type=int, default=64, help="tokens of the shortest")
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocabulary", type=int, default=8000)
    p.add_argument("--physical", type=int, default=8, help="rows that are processed at once")
    p.add_argument("--logical", type=int, default=32, help="rows of a step, a multiple of the physical ones")
    p.add_argument("--steps", type=int, default=4, help="optimizer steps of a turn")
    p.add_argument("--modes", nargs="+", default=["auto"], help="clipping modes")
    args = p.parse_args(argv)
    if args.quick:
        args.tokens, args.shortest, args.width, args.layers, args.physical, args.logical = 32, 16, 256, 2, 8, 16
    benchmark = Benchmark("trl", args)
    disable_progress_bars()
    shape = Shape(args.width, args.layers, args.vocabulary, args.tokens, args.physical)
    contenders = {"TRL": (False, "auto"), **{f"private {mode}": (True, mode) for mode in args.modes}}
    for kind in args.trainers:
        data = dataset(kind, args.logical, args.shortest, shape)
        for model in args.models:
            times, walls, startups = ({name: [] for name in contenders} for _ in range(3))
            for _ in range(benchmark.repeats):
                for name, (private, mode) in contenders.items():
                    begin, first, *_, last = train(kind, private, mode, model, data, shape, benchmark).marks
                    rows = (args.steps - 1) * args.logical
                    times[name].append((last[0] - first[0]) / rows)
                    walls[name].append((last[1] - first[1]) / rows)
                    startups[name].append(first[0] - begin[0])
            case = {"trainer": kind, "model": model, "width": args.width, "layers": args.layers}
            case |= {"tokens": f"{args.shortest} to {args.tokens}", "rows": args.logical}
            for name, figures in summarise("TRL", times, walls).items():
                benchmark.add(case, name, figures | spread("startup_s", startups[name]))


if __name__ == "__main__":
    main()
