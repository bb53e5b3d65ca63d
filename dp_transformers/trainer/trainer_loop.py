"""A TrainerLoop lasts for one call of ``train()``. It holds the seeds, the loader of draws and the private step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import AcceleratorConfig

from ..clipping import PerExampleClipper
from ..clipping.leftovers import refuse_marked
from ..data.draws import LogicalBatches, draws_dataloader
from ..runtime import distributed
from ..runtime.randomness import SecretSeeds, seed_worker, seeded_global_generators
from ..step.startup_message import Trained, describe, warnings
from ..step.step import PrivateStep
from .dp_config import DPTrainingArguments
from .trainer_run import TrainerRun


class TrainerLoop:
    """What exists only while Trainer's loop runs. Trainer asks for the loader first, and attaches the private step
    when the model is final.

    Args:
        training: The plan, and the run that counts the steps.
        args: The trainer's arguments.
        tp_size: How many ranks are one tensor-parallel group. They work on the same examples.
        say: Shows a sentence to the user, once over all processes.
    """

    def __init__(self, training: TrainerRun, args: DPTrainingArguments, tp_size: int, say: Callable[[str], None]):
        self._training, self._args, self._tp_size, self._say = training, args, tp_size, say
        self._secret = distributed.shared_secret(training.run.dp_seed)
        # ranks with different examples draw different dropout masks; a tensor-parallel group draws the same ones
        self._data_rank = distributed.rank() // tp_size
        self._seeds = SecretSeeds(self._secret, self._data_rank)
        self._draws: LogicalBatches | None = None
        self._step: PrivateStep | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Seed the global generators from the secret while Trainer's loop runs, and drop the private step when it
        ends."""
        try:
            # args.seed is known, and would tell the masks of dropout
            with seeded_global_generators([self._secret], self._args.device):
                yield
        finally:
            if self._step is not None:
                self._step.close()  # a step that was cut off leaves no gradient without noise
                self._step.clipper.detach()

    def loader(self, dataset: Any, collator: Callable[[list[Any]], Any]) -> DataLoader:
        """Make the loader of the draws, each a [`~dp_transformers.data.draws.LogicalBatch`]. All ranks call this
        together."""
        args = self._args
        self._training.require_rows(len(dataset))
        sampler = self._training.sampler(self._data_rank, distributed.world_size() // self._tp_size)
        self._draws = LogicalBatches(
            dataset,
            collator,
            args.per_device_train_batch_size,
            self._seeds,
            fill=args.fill_physical_batches,
            largest_draw=sampler.largest_draw,
            copies=self._training.run.mechanism.unit.max_examples_per_person,
        )
        return draws_dataloader(
            self._draws,
            sampler,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=seed_worker,
        )

    def attach(self, model: nn.Module, *, is_fsdp_enabled: bool, label_names: Sequence[str]) -> None:
        """Attach the clipper to the model, make the private step, and say what is about to be trained.

        Raises:
            ValueError: the parameters are not split over ranks as the arguments say, or a batch of an earlier training
                left something in the model.
        """
        assert self._draws is not None, "Trainer makes its loader before it prepares the model"
        distributed.require_on_all(lambda: refuse_marked(model), self._args.device)
        args, run = self._args, self._training.run
        assert isinstance(args.accelerator_config, AcceleratorConfig), "TrainingArguments make it of what is given"
        clipper = PerExampleClipper(
            model,
            run.mechanism.clipping.at(0),
            mode=args.clipping_mode,
            self_check=self._training.self_check,
            memory_budget=args.memory_budget,
        )
        if is_fsdp_enabled and not clipper.shards:
            raise ValueError(
                "FSDP was asked for, but accelerate did not shard the model. Set fsdp=True and "
                "fsdp_config={'version': 2}, and start one process per device (accelerate launch or torchrun). If you "
                "want no FSDP, switch it off in the arguments and in accelerate's configuration."
            )
        _refuse_groups(clipper, self._tp_size)
        self._step = PrivateStep(
            clipper,
            run,
            self._seeds,
            self._draws,
            secure=self._training.secure,
            announce=self._say,
            label_names=label_names,
            reduce_every_batch=(args.accelerator_config.gradient_accumulation_kwargs or {}).get(
                "sync_each_batch", True
            ),
        )
        clipper.follow(self._step, None)
        steps, trained = self._training.planned_steps, Trained.by(clipper)
        self._say(describe(run, steps, trained))
        for warning in warnings(run, steps, trained.parameters):
            self._say(warning)

    @property
    def step(self) -> PrivateStep:
        """The private step of the model that is trained."""
        if self._step is None:
            raise RuntimeError("there is no private step before Trainer has prepared the model: call train().")
        return self._step


def _refuse_groups(clipper: PerExampleClipper, size: int) -> None:
    """Raise ValueError unless each tensor-parallel group is ``size`` consecutive ranks, as the sampler assumes, and
    all gradients are summed."""
    parallel, shards, world = clipper.parallel, clipper.shards, distributed.world_size()
    first = distributed.rank() // size * size
    own = list(range(first, first + size))
    if (parallel.mesh.mesh.flatten().tolist() if parallel else own[:1]) != own:
        raise ValueError(
            f"the model says tp_size={size}, but its parameters are not split over the {size} processes {own} that "
            "this makes one group. Load it with from_pretrained(..., "
            "distributed_config=DistributedConfig(tp_size=...)), and do not split it by hand."
        )
    if (parallel or shards) and size * (shards.mesh.size() if shards else 1) != world:
        raise ValueError(
            f"some of the {world} processes hold the same parameters, and nothing adds up their gradients: load the "
            f"model with DistributedConfig(tp_size={size}, fsdp_size={world // size})."
        )
