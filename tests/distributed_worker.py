"""What every rank of tests/test_distributed.py runs: `torchrun --nproc_per_node N tests/distributed_worker.py <folder> <case> ...`.

A case is a function of the options in `CASES`; what it returns is saved as <folder>/<case>.<rank>.pt. One launch runs many cases, because
starting processes is what takes the time.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from models import build
from oracle import trainable
from test_trainer import arguments, collate, dataset
from transformers import TrainerCallback

from dp_transformers import DPTrainer, distributed


SEED = 55  # draws 2, 5, 2, 1 and no examples: over two ranks 3 + 2 (two physical batches and one), 1 + 0, 0 + 0


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Gradients(TrainerCallback):
    """The whole gradient that the optimizer is given, step by step, flat."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(torch.cat([whole(p.grad).flatten() for p in trainable(model)]))


class Counted(DPTrainer):
    """Notes how many examples this rank holds in each step."""

    counts: list[int]

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.counts = [*getattr(self, "counts", []), sum(inputs.sizes)]
        return super().training_step(model, inputs, num_items_in_batch)


def train(folder, model="bert", lora=False, **options):
    """Train with a fixed draw; the gradients of every step, and what this rank held."""
    gradients = Gradients()
    kind = "bert" if model == "bert" else "lm"
    args = arguments(folder, **{"dp_seed": SEED, "expected_batch_size": 3, "per_device_train_batch_size": 2, "max_steps": 5, **options})
    trainer = Counted(build(model, lora=lora), args, collate, dataset(kind=kind), callbacks=[gradients])
    trainer.train()
    wrapped = type(trainer.model_wrapped).__name__
    steps = trainer.privacy_spent().steps
    return {"gradients": gradients.steps, "counts": trainer.counts, "wrapped": wrapped, "steps": steps, "world": distributed.world_size()}


SILENT = {"noise_multiplier": 0.0}
CASES = {
    f"ddp-{'lora' if lora else 'full'}-{mode}": (train, {"lora": lora, "clipping_mode": mode, **SILENT})
    for lora in (False, True)
    for mode in ("book_keeping", "ghost")
}
# with a bound so small that gradients vanish beside the noise of σC = 2
CASES["ddp-noise"] = (
    train,
    {"noise_multiplier": 2000.0, "max_grad_norm": 1e-3, "expected_batch_size": 12, "max_steps": 2, "dp_seed": None},
)


def run(name: str, folder: Path):
    function, options = CASES[name]
    return function(folder / name, **options)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        torch.save(run(name, folder), folder / f"{name}.{dist.get_rank()}.pt")
        dist.barrier()
    dist.destroy_process_group()
