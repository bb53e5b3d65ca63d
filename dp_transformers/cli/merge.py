"""`dp-transformers merge`: write a trained adapter and its base model as one model of plain weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

STATEMENTS = ("privacy.json", "privacy.json.sig", "privacy_ledger.jsonl")  # merging costs no privacy


def merge(
    folder: Annotated[str, Argument(help="The folder of an adapter: what a training with LoRA saved.")],
    out: Annotated[str, Argument(help="The folder to write: a model that transformers loads without peft.")],
    dtype: Annotated[str, Option(help="Precision of the weights; a base of 4 bits is read anew in it.")] = "float32",
) -> None:
    """Merge the adapter in FOLDER into its base model, and write plain weights to OUT.

    The certificate and the ledger go with them: merging is no use of the data.
    """
    if not Path(folder, "adapter_config.json").is_file():
        raise ValueError(f"'{folder}' holds no adapter (adapter_config.json): a model without one is plain already.")
    import torch
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM, PeftConfig
    from transformers import AutoTokenizer

    task = PeftConfig.from_pretrained(folder).task_type
    loader = {"CAUSAL_LM": AutoPeftModelForCausalLM, "SEQ_2_SEQ_LM": AutoPeftModelForSeq2SeqLM}.get(str(task))
    if loader is None:
        raise ValueError(
            f"'{folder}' holds an adapter for {task}, whose head is not known: load the model as you train it, and "
            "save what its merge_and_unload() returns."
        )
    loader.from_pretrained(folder, dtype=getattr(torch, dtype)).merge_and_unload().save_pretrained(out)
    if Path(folder, "tokenizer_config.json").is_file():
        # pyrefly: ignore[missing-attribute]
        AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    for name in STATEMENTS:
        if Path(folder, name).is_file():
            shutil.copy(Path(folder, name), out)
    print(f"plain weights: {out}")
