"""The common part of the recipes: command-line arguments, reading examples, LoRA, and the report at the end."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import assets
import torch
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from flags import RecipeParser
from huggingface_hub import HfApi
from outcome import REPORT_NAME, TWIN, TWIN_HELP, Outcome, print_table
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.helpers import disable_input_dtype_casting
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import get_last_checkpoint

from dp_transformers import DPTrainer, DPTrainingArguments
from dp_transformers.reports.words import up

TEXTS = ("text_column", "prompt_column", "summary_column", "question_column", "context_column")
READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


@dataclass
class DataArguments:
    """The training data, and the model to start from."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of a model; default: a small public one, fetched with pip."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Hub id of a dataset, or its folder or file."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of that dataset."})
    train_file: str | None = field(
        default=None,
        metadata={
            "help": "A .csv, .json, .jsonl or .parquet file, an example in each row, or .txt, one in each line."
        },
    )
    validation_file: str | None = field(
        default=None,
        metadata={"help": "Held-out examples in the same format; default: a random fifth of the training data."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only this many training examples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use only this many held-out examples."})


@dataclass
class ModelArguments:
    """The parameters that are trained."""

    full: bool = field(default=False, metadata={"help": "Train all parameters, not LoRA."})
    lora_r: int = field(default=8, metadata={"help": "Rank of the LoRA adapters."})
    lora_alpha: int = field(default=16, metadata={"help": "Scale: alpha / r times the adapter."})
    lora_target_modules: str = field(
        default="auto",
        metadata={"help": "Modules that get an adapter: comma-separated names, all-linear, or auto (peft's choice)."},
    )
    dropout: float = field(
        default=0.0, metadata={"help": "Dropout of the model; the noise of DP is regularisation enough."}
    )


@dataclass
class Arguments(DPTrainingArguments):
    """The recipes' defaults; every flag of TrainingArguments works too."""

    target_epsilon: float | None = field(
        default=None, metadata={"help": "Privacy budget; default 8 unless noise_multiplier is given."}
    )
    target_delta: float | None = field(
        default=1e-5, metadata={"help": "The delta of (epsilon, delta); smaller than 1/N."}
    )
    twin: bool = field(default=False, metadata={"help": TWIN_HELP})
    save_strategy: str = field(
        default="steps", metadata={"help": "When to save checkpoints, from which a command that is repeated goes on."}
    )
    save_steps: float = field(
        default=0.1, metadata={"help": "Save every X steps; a fraction below 1 is a share of all."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "Keep the newest checkpoints only."})
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Pin batches for the GPU."}
    )

    def __post_init__(self) -> None:
        if self.twin:
            self._drop_privacy()
        if self.target_epsilon is None and self.noise_multiplier is None:
            self.target_epsilon = 8.0
        if str(self.fsdp).lower() in ("true", "false"):
            self.fsdp = str(self.fsdp).lower() == "true"
        if self.fsdp and "LOCAL_RANK" not in os.environ:
            raise ValueError(
                "--fsdp needs several processes: dp-transformers train RECIPE --num_processes 2 --accelerate_config "
                "fsdp2 ..., without --fsdp."
            )
        super().__post_init__()

    def _drop_privacy(self) -> None:
        self.without_privacy = True
        if Path(self.output_dir).name != TWIN:
            self.output_dir = os.path.join(self.output_dir, TWIN)


PRIVACY = [*(x for x in DPTrainingArguments.__annotations__ if x not in ("logging_steps", "without_privacy")), "twin"]
ALSO_TRAINING = [
    "max_steps",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "bf16",
    "activation_checkpointing",
    "seed",
    "use_cpu",
    "save_steps",
    "resume_from_checkpoint",
    "logging_steps",
    "report_to",
]


def parse_arguments(
    description: str, data: type, model: type, training: type, example: Path | None = None, mine: tuple[str, ...] = ()
) -> tuple:
    """Arguments from the command line and its ``--config``, or from the file ``example`` if none of the flags ``mine``
    is given; logging and seeds are set accordingly."""
    model_flags = list(dict.fromkeys(["model_name_or_path", *(field.name for field in fields(model))]))
    own = [name for cls in reversed(training.__mro__) if issubclass(cls, Arguments) for name in cls.__annotations__]
    groups = {
        "Privacy": PRIVACY,
        "Model": model_flags,
        "Data": [field.name for field in fields(data) if field.name not in model_flags],
        "Training": [name for name in dict.fromkeys([*own, *ALSO_TRAINING]) if name not in PRIVACY],
    }
    parsed = RecipeParser((data, model, training), groups, description).parse(example=example, mine=mine)
    args = parsed[-1]
    # Trainer would upload all of output_dir, also the twin in it
    args.upload, args.push_to_hub = args.push_to_hub and not args.twin, False
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("dp_transformers").setLevel(logging.WARNING if args.process_index == 0 else logging.ERROR)
    # TRL's own functions cannot be hashed, so that datasets does not keep what they made
    logging.getLogger("datasets.fingerprint").setLevel(logging.ERROR)
    # peft
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    set_seed(args.seed)
    return parsed


def read_examples(
    args: DataArguments,
    default: Callable[[], list[dict]],
    columns: dict[str, str],
    seed: int,
) -> DatasetDict:
    """The splits "train" and "test", from a file, a dataset of the Hub, or ``default()``.

    Args:
        columns: Flag -> column that the data must have; those of TEXTS must hold text.
        seed: Of the random split and choice of examples.

    Raises:
        ValueError: the file or dataset cannot be read, or lacks a column.
    """
    if args.train_file:
        data = _read_files(
            {"train": args.train_file} | ({"test": args.validation_file} if args.validation_file else {})
        )
    elif args.dataset_name:
        data = choose_splits(load_rows(args.dataset_name, args.dataset_config_name), "train", "validation")
    else:
        data = DatasetDict({"train": Dataset.from_list(default())})
    for split, rows in data.items():
        if len(rows) == 0:
            raise ValueError(f"the data ('{split}') has no rows.")
        for flag, column in columns.items():
            if column not in rows.column_names:
                raise ValueError(
                    f"the data ('{split}') has no column '{column}', only {rows.column_names}: set --{flag}."
                )
            if flag in TEXTS and getattr(rows.features[column], "dtype", None) not in (
                "string",
                "large_string",
            ):
                raise ValueError(
                    f"column '{column}' of the data ('{split}') holds no text: its type is {rows.features[column]}."
                )
    return hold_out(data, args, seed)


def load_rows(name: str, config: str | None = None) -> DatasetDict:
    """Return the splits of a data set: a file, a folder of files or of save_to_disk, or a name on the Hub."""
    folder = Path(name)
    if folder.suffix in READERS or folder.is_file():
        return _read_files({"train": name})
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        saved = load_from_disk(name)
        return saved if isinstance(saved, DatasetDict) else DatasetDict({"train": saved})
    try:
        return load_dataset(name, config)
    except DatasetsError as error:
        raise ValueError(f"cannot read '{name}': {error.__cause__ or error}") from error


def choose_splits(data: DatasetDict, train: str, test: str) -> DatasetDict:
    """Return the splits "train" and, if there are held-out rows, "test"."""
    if train not in data:
        raise ValueError(f"the data have no split '{train}', only {list(data)}.")
    others = [test, "validation", "test", "validation_matched"]
    held_out = next((name for name in others if name in data and name != train), None)
    chosen = DatasetDict({"train": data[train]} | ({"test": data[held_out]} if held_out else {}))
    for split, rows in chosen.items():
        if len(rows) == 0:
            raise ValueError(f"the data ('{split}') has no rows.")
    return chosen


def hold_out(data: DatasetDict, args: DataArguments, seed: int) -> DatasetDict:
    """Return the data with a split "test", and with the numbers of rows that the flags say."""
    most = args.max_eval_samples
    if "test" not in data:
        fifth = 0.2 if most is None or len(data["train"]) < 5 * most else most
        data = data["train"].train_test_split(test_size=fifth, seed=seed)
    if most:
        data["test"] = data["test"].select(range(min(most, len(data["test"]))))
    if args.max_train_samples:
        data["train"] = data["train"].shuffle(seed=seed).select(range(min(args.max_train_samples, len(data["train"]))))
    return data


def _read_files(files: dict[str, str]) -> DatasetDict:
    for path in files.values():
        if not os.path.isfile(path):
            raise ValueError(f"there is no file '{path}'.")
    extensions = {Path(path).suffix.lower() for path in files.values()}
    if len(extensions) > 1 or not extensions <= READERS.keys():
        raise ValueError(f"cannot read {list(files.values())}: the files must be of one kind, {', '.join(READERS)}.")
    reader = READERS[extensions.pop()]
    try:
        data = load_dataset(reader, data_files=files)
    except DatasetsError as error:
        raise ValueError(f"cannot read {list(files.values())} as {reader}: {error.__cause__ or error}") from error
    return data.filter(lambda row: row["text"].strip()) if reader == "text" else data  # blank lines are no examples


def check_model_name(name: str) -> str:
    """``name`` back, unless it is the path of a folder that does not exist.

    Raises:
        ValueError: it can be no name of the Hub, and there is no such folder.
    """
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not os.path.isdir(name):
        raise ValueError(f"there is no folder '{name}' for --model_name_or_path.")
    return name


def check_columns(data: DatasetDict, *layouts: tuple[str, ...]) -> None:
    """Raise ValueError if the rows of a split have all columns of none of these layouts."""
    needed = ", or ".join(" and ".join(map(repr, layout)) for layout in layouts)
    for split, rows in data.items():
        if not any(set(layout) <= set(rows.column_names) for layout in layouts):
            raise ValueError(
                f"the data ('{split}') has the columns {rows.column_names}, and needs {needed}: rename the columns."
            )


def check_length(max_length: int | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if texts of so many tokens are longer than the model reads; None: nothing is truncated."""
    most = longest(tokenizer)
    if max_length is not None and max_length > most:
        raise ValueError(
            f"--max_length {max_length} exceeds the {most} tokens that the model reads: give --max_length {most}."
        )


def longest(tokenizer: PreTrainedTokenizerBase) -> int | float:
    """Return how many tokens the model of this tokenizer reads."""
    config = AutoConfig.from_pretrained(tokenizer.name_or_path).get_text_config()
    return min(getattr(config, "max_position_embeddings", math.inf), tokenizer.model_max_length)


def check_batch(args: Arguments, num_examples: int) -> None:
    """Raise ValueError if a step would draw more examples than there are."""
    if args.expected_batch_size > num_examples:
        default = type(args).__dataclass_fields__["expected_batch_size"].default
        of_recipe = " (the recipe's default)" if args.expected_batch_size == default else ""
        raise ValueError(
            f"--expected_batch_size {args.expected_batch_size}{of_recipe} exceeds the {num_examples} training "
            f"examples: lower it, to --expected_batch_size {max(1, num_examples // 8)} for example."
        )


def set_dropout(config: PretrainedConfig, dropout: float) -> PretrainedConfig:
    """``config`` with the dropout of all its layers set."""
    for name in (
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "dropout",
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
    ):
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, dropout)
    return config


def add_lora(model: PreTrainedModel, args: ModelArguments, task_type: TaskType, depth: int | None = None) -> PeftModel:
    """``model`` with adapters, in all layers or in the last ``depth`` only."""
    targets = {"auto": None, "all-linear": "all-linear"}.get(
        args.lora_target_modules, args.lora_target_modules.split(",")
    )
    layers = None
    if depth is not None:
        layers = last_layers(model, depth)
        if targets == "all-linear":
            targets = names_of_linears(model)
    config = LoraConfig(
        task_type=task_type,
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets,
        layers_to_transform=layers,
        fan_in_fan_out=has_conv1d(model),
    )
    return get_peft_model(model, config)


def last_layers(model: PreTrainedModel, number: int) -> list[int]:
    """Return the places of the last layers."""
    depth = model.config.get_text_config().num_hidden_layers
    return list(range(max(0, depth - number), depth))


def names_of_linears(model: PreTrainedModel) -> list[str]:
    """Return what "all-linear" stands for: peft chooses layers only by names; the head lies outside base_model."""
    linears = [name for name, m in model.base_model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    return sorted({name.rsplit(".", 1)[-1] for name in linears})


def has_conv1d(model: nn.Module) -> bool:
    """Return whether weights lie transposed, as in GPT-2."""
    return any(isinstance(m, Conv1D) for m in model.modules())


def lora_movement(model: nn.Module) -> float | None:
    """Frobenius norm of all adapters' products BA together; B starts at zero, so this is how far LoRA has moved the
    model."""
    products = [
        (m.lora_B["default"].weight.detach() @ m.lora_A["default"].weight.detach()).square().sum()
        for m in model.modules()
        if hasattr(m, "lora_A") and "default" in getattr(m, "lora_A", {})
    ]
    return float(torch.stack(products).sum().sqrt()) if products else None


def train(trainer: DPTrainer) -> None:
    """Train; where output_dir holds checkpoints, go on from the newest."""
    args = trainer.args
    checkpoint = args.resume_from_checkpoint or any(Path(args.output_dir).glob("checkpoint-*"))
    if checkpoint and trainer.is_world_process_zero():
        print(f"going on with the training in {args.output_dir}; take another --output_dir for a new one", flush=True)
    try:
        with disable_input_dtype_casting(trainer.model, active=args.bf16 or args.fp16):  # autocast would cast it back
            trainer.train(resume_from_checkpoint=checkpoint or None)
    except KeyboardInterrupt:
        newest = get_last_checkpoint(args.output_dir)
        way_out = f"go on from {os.path.basename(newest)}" if newest else "begin again, as no checkpoint was saved yet"
        done = trainer.state.global_step
        raise KeyboardInterrupt(f" after {done} steps; type the same command to {way_out}") from None


def report(trainer: DPTrainer, outcome: Outcome, also: dict | None = None) -> dict:
    """Return the privacy spent, the ``outcome`` and the facts in ``also``. The main process writes them to
    privacy_report.json, and prints a table."""
    args = trainer.args
    full = {**trainer.privacy_spent().to_dict(), **outcome.to_dict(), **(also or {})}
    full["lora_BA_norm"] = lora_movement(trainer.model)
    if not trainer.is_world_process_zero():
        return full
    Path(args.output_dir, REPORT_NAME).write_text(json.dumps(full, indent=2))
    table = {
        **epsilon_in_words(full),
        "delta": f"{full['delta']:g}",
        "noise multiplier (sigma)": f"{full['noise_multiplier']:.4f}",
        "sampling rate (q)": f"{full['sample_rate']:.5f}  ({full['expected_batch_size']} of {full['num_examples']} "
        "examples expected per step)",
        "steps": f"{full['steps']}",
        "clipping bound (C)": f"{full['max_grad_norm']:g}",
        **outcome.rows(full, args.output_dir),
    }
    if full["lora_BA_norm"] is not None:
        table["LoRA moved: |BA|"] = f"{full['lora_BA_norm']:.4f}  (0 before training)"
    table["model, ledger, report"] = args.output_dir
    table["to hand over"] = "nothing: this training is NOT PRIVATE"
    if full["private"]:
        table["to hand over"] = f"dp-transformers report {args.output_dir}"
    print_table(table)
    if getattr(args, "upload", False):
        upload(trainer)
    return full


def upload(trainer: DPTrainer) -> None:
    """Upload the model with its card, ledger and certificate: not the twin, the checkpoints, and the metrics on
    held-out rows, which may be private."""
    args = trainer.args
    trainer.create_model_card()
    hub, name = HfApi(token=args.hub_token), args.hub_model_id or Path(args.output_dir).resolve().name
    repo = hub.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
    private = [REPORT_NAME, "training_args.bin"]
    place = hub.upload_folder(repo_id=repo, folder_path=args.output_dir, ignore_patterns=["*/*", *private])
    print(f"  uploaded: {place}")


def epsilon_in_words(spent: dict) -> dict[str, str]:
    """Return ε rounded up: first that of a person who may have several rows, for whom the target holds."""
    if not spent["private"]:
        return {"epsilon": "infinite: NOT PRIVATE"}
    if (rows := spent["max_examples_per_person"]) == 1:
        return {"epsilon": up(spent["epsilon"])}
    return {
        "epsilon": f"{up(spent['epsilon_per_person'])} for all rows of one person, {rows} at most",
        "epsilon of one row": up(spent["epsilon"]),
    }


def run(main: Callable[[], dict]) -> dict:
    """Run a recipe. An error of one line tells what the user can set right; the exit code is 2 if it is a flag, and
    130 after Ctrl-C."""
    try:
        result = main()
    except (assets.AssetError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except KeyboardInterrupt as error:
        print(f"\nstopped{error}", file=sys.stderr)
        sys.exit(130)
    if torch.distributed.is_initialized():
        gc.collect()  # models of DDP hold the group, and one that outlives the interpreter can abort the process
        torch.distributed.destroy_process_group()
    return result
