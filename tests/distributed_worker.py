"""What every rank of tests/test_distributed.py runs: a case is a function and its options in `CASES`."""

from __future__ import annotations

import itertools
import os
import random
from contextlib import contextmanager
from pathlib import Path

import chats
import dp_accounting.pld  # noqa: F401  # or each case's processes import it
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import VOCABULARY, adapted, batch_for, build, losses_function
from oracle import distance, length, trainable
from peft import LoraConfig
from test_trainer import arguments, collate, dataset
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from dp_transformers import (
    DPDPOConfig,
    DPDPOTrainer,
    DPRewardConfig,
    DPRewardTrainer,
    DPSFTConfig,
    DPSFTTrainer,
    DPTrainer,
    PerExampleClipper,
    PrivacyEngine,
    register_grad_sampler,
    register_norm_sampler,
)
from dp_transformers.clipping.engine import ClippingEngine
from dp_transformers.clipping.measured_budget import DeviceMemory, MeasuredBudget
from dp_transformers.mechanism.clipping_functions import AdaptiveClipping, FlatClipping, PerLayerClipping
from dp_transformers.mechanism.mechanism import Mechanism
from dp_transformers.mechanism.noise import BandedInverseNoise, BandedNoise, BufferedNoise, IndependentNoise
from dp_transformers.mechanism.sampling import PoissonSampling
from dp_transformers.noise.generators import GaussianNoise, ShardedNoise
from dp_transformers.runtime import distributed
from dp_transformers.step.ledger import Ledger
from dp_transformers.step.step import PrivateStep
from dp_transformers.trainer.patches import allow_meshes_on_cpu

SEED = 55  # draws 2, 5, 2, 1 and no examples: over two ranks 3 + 2 (two physical batches and one), 1 + 0, 0 + 0
CORRELATED = {
    "bands": BandedNoise(1.0, (0.8, 0.5, 0.3)),
    "inverse": BandedInverseNoise(1.0, (1.0, -0.5, -0.125)),
    "buffers": BufferedNoise(1.0, (0.3, 0.1), (0.9, 0.5)),
}
LENGTH, ROWS = 12, 3  # of the batches that are clipped by hand: rows on each rank


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


# ---- through DPTrainer ----


class Gradients(TrainerCallback):
    """The whole gradient that the optimizer is given, step by step, flat; this rank's shard of it; and a number as
    dropout draws them."""

    def __init__(self):
        self.steps, self.shards, self.drawn = [], [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.drawn.append(torch.rand(()).item())
        self.steps.append(torch.cat([whole(p.grad).flatten() for p in trainable(model)]))
        if any(hasattr(p, "placements") for p in trainable(model)):
            self.shards.append(
                torch.cat([p.grad.to_local().flatten() for p in trainable(model) if hasattr(p, "placements")]).clone()
            )


COUNTS: list[int] = []  # how many examples this rank held in each step of a training


def count_examples():
    physical_batches = PrivateStep.physical_batches

    def counted(step, draw):
        COUNTS.append(sum(batch.examples for batch in draw.batches))
        return physical_batches(step, draw)

    PrivateStep.physical_batches = counted


count_examples()


def train(folder, model="bert", lora=False, resume=None, replicas=1, tp=None, owners=None, **options):
    """Train with a fixed draw; the gradients of every step, what this rank held, and how the model lay."""
    if dist.is_initialized() and replicas > 1:  # as `accelerate launch` says it
        os.environ |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(replicas),
                       "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(dist.get_world_size() // replicas)}  # fmt: skip
    gradients = Gradients()
    kind = "bert" if model == "bert" else "lm"
    fixed = {"dp_seed": SEED, "expected_batch_size": 3, "per_device_train_batch_size": 2, "max_steps": 5, "self_check": False}  # fmt: skip
    args = arguments(folder, **{**fixed, **options})
    net = (
        build(model, lora=lora) if tp is None else loaded(model, folder, (dist.get_world_size() // tp, tp), lora=lora)
    )
    COUNTS.clear()
    data = dataset(kind=kind)
    data = data if owners is None else data.add_column("owner", [i % owners for i in range(len(data))])
    trainer = DPTrainer(net, args, collate, data, callbacks=[gradients])
    trainer.train(resume_from_checkpoint=resume)
    return {
        "gradients": gradients.steps,
        "shards": gradients.shards,
        "drawn": gradients.drawn,
        "parameters": torch.cat([whole(p).flatten() for p in trainable(trainer.model)]),
        "counts": list(COUNTS),
        "steps": trainer.privacy_spent().steps,
        "world": distributed.world_size(),
        "wrapped": type(trainer.model_wrapped).__name__,
        "sharded": trainer.is_fsdp_enabled and isinstance(trainer.model, FSDPModule),
        "placements": {str(getattr(p, "placements", None)) for p in trainer.model.parameters()},
    }


@contextmanager
def devices_with_less_each():
    """Inside, the device of each rank has less free than that of the rank before. Yields the budgets that are settled,
    and whether passes went back once."""
    settled, passes, free = [], [], 4e8 / (1 + distributed.rank())
    settle, plan, of = MeasuredBudget.settle, ClippingEngine.plan, DeviceMemory.of
    MeasuredBudget.settle = lambda self, limit: (settled.append(limit), settle(self, limit))
    ClippingEngine.plan = lambda self, *args: (found := plan(self, *args), passes.append(found.one_pass))[0]
    DeviceMemory.of = classmethod(lambda cls, device: cls(1e9, free))
    try:
        yield settled, passes
    finally:
        MeasuredBudget.settle, ClippingEngine.plan, DeviceMemory.of = settle, plan, of


def budgeted(folder, **options):
    """`train` with memory_budget="auto"; also the budgets that were settled, and how often plans went back once."""
    with devices_with_less_each() as (settled, passes):
        found = train(folder, memory_budget="auto", expected_batch_size=12, max_steps=6, **options)
    return {**found, "settled": settled, "passes": passes}


def budgeted_by_hand(folder, mode):
    """The same of a clipper that nobody tells of steps."""
    net = shard(build("llama"))
    rank, batch = dist.get_rank(), batch_for("llama", LENGTH, size=ROWS * dist.get_world_size())
    rows = {k: v[rank * ROWS : (rank + 1) * ROWS] for k, v in batch.items()}
    optimizer = torch.optim.Adam(net.parameters())
    with devices_with_less_each() as (settled, passes):
        clipper = PerExampleClipper(net, 0.9, mode, memory_budget="auto")
        for _ in range(6):
            optimizer.zero_grad()
            clipper.backward(losses_function(net)(rows))
            optimizer.step()
    return {"settled": settled, "passes": passes}


def of_trl(folder, kind="sft", lora=False, sharded=False, mode="book_keeping"):
    """Train with a trainer of TRL; what every step's gradient was, and how the model lay."""
    trainer, config, data = {
        "sft": (DPSFTTrainer, DPSFTConfig, "chat"),
        "dpo": (DPDPOTrainer, DPDPOConfig, "preference"),
        "reward": (DPRewardTrainer, DPRewardConfig, "preference"),
    }[kind]
    gradients = Gradients()
    more = {"precompute_ref_log_probs": True} if kind == "dpo" and not lora else {}
    more |= fsdp() if sharded else {}
    args = chats.arguments_of(config, folder, max_steps=3, learning_rate=0.01, optim="adamw_torch", max_grad_norm=0.2, clipping_mode=mode,
                              per_device_train_batch_size=2, **more)  # fmt: skip
    made = trainer(
        chats.model(LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM), args=args, train_dataset=chats.rows(data),
        processing_class=chats.tokenizer(), peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None, callbacks=[gradients],
    )  # fmt: skip
    torch.manual_seed(4)
    with torch.no_grad():
        for p in trainable(made.model):  # adapters begin at zero, and without a gradient
            p.add_(0.1 * torch.randn(p.shape))
    made.train()
    return {
        "gradients": gradients.steps,
        "parameters": torch.cat([whole(p).flatten() for p in trainable(made.model)]),
        "wrapped": type(made.model_wrapped).__name__,
        "sharded": any(hasattr(p, "placements") for p in made.model.parameters()),
    }


def fsdp(**config):
    return {"fsdp": True, "fsdp_config": {"version": 2, **config}}


def after_fsdp(folder, **options):
    """`train` after a training of which transformers leaves the configuration in the environment."""
    train(folder / "before", **{**options, **fsdp(), "max_steps": 1})
    return train(folder, **options)


def unsharded(options):
    """What one process does instead, whose batches have the sizes that they come with."""
    others = ("fsdp", "fsdp_config", "accelerator_config", "tp", "fill_physical_batches")
    return {k: v for k, v in options.items() if k not in others}


# ---- bytes ----


class Traffic(TorchDispatchMode):
    """Bytes that a rank sends in a ring: (n-1)/n of the whole tensor for a gather or a scatter, twice that for an
    all-reduce."""

    def __init__(self):
        super().__init__()
        self.sent = {"gather": 0.0, "reduce": 0.0, "scalars": 0.0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            share, size = ((dist.get_world_size() - 1) / dist.get_world_size(), max((x.nbytes for x in tensors), default=0))  # fmt: skip
            if size <= 12:
                self.sent["scalars"] += size
            elif "allreduce" in name or "all_reduce" in name:
                self.sent["reduce"] += 2 * share * size
            elif "reduce_scatter" in name:
                self.sent["reduce"] += share * size
            elif "allgather" in name or "all_gather" in name:
                self.sent["gather"] += share * size * (dist.get_world_size() if "_c10d" in func.namespace else 1)
            elif "broadcast" in name:
                self.sent["gather"] += size
            elif "wait" not in name and "wrap" not in name and "barrier" not in name:
                raise AssertionError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))


class StepTraffic(TrainerCallback):
    """What the last optimizer step of a training communicated, from the end of the one before to its own."""

    def __init__(self):
        self.mode, self.seen = Traffic(), []

    def on_train_begin(self, *args, **kwargs):
        self.mode.__enter__()

    def on_step_end(self, *args, **kwargs):
        self.seen.append(dict(self.mode.sent))

    def on_train_end(self, *args, **kwargs):
        self.mode.__exit__(None, None, None)

    def last_step(self):
        return {kind: after - self.seen[-2][kind] for kind, after in self.seen[-1].items()}


def traffic(folder, model="llama", sharded=False, late=False):
    """Bytes of one step of two physical batches on each rank, private in both ways and not private, in the same
    layout."""
    rows = 4 * dist.get_world_size()
    common, found = {"max_steps": 4, "logging_strategy": "no"}, {}  # in draws 0, 1, 2, 4, ... rows are compared, too

    def layout():  # anew each time, because Trainer changes what it is given
        sync = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": not late}}}
        return {**sync, **(fsdp() if sharded else {}), **common}

    for mode in ("book_keeping", "ghost"):
        counter = StepTraffic()
        options = {"expected_batch_size": rows, "per_device_train_batch_size": 2, "noise_multiplier": 1.0, "self_check": False}  # fmt: skip
        args = arguments(folder, clipping_mode=mode, **options, **layout())
        DPTrainer(build(model), args, collate, dataset(rows, kind="lm"), callbacks=[counter]).train()
        found[mode] = counter.last_step()
    counter = StepTraffic()
    args = TrainingArguments(str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True, disable_tqdm=True,
                             save_strategy="no", optim="sgd", **layout())  # fmt: skip
    allow_meshes_on_cpu(args)
    trainer = Trainer(build(model), args, collate, dataset(rows, kind="lm"), callbacks=[counter])
    trainer.train()
    assert trainer.is_fsdp_enabled == sharded == isinstance(trainer.model, FSDPModule)
    fresh = build(model)
    sizes = {
        name: 4 * sum(p.numel() for p in ps)
        for name, ps in (("parameters", fresh.parameters()), ("gradient", trainable(fresh)))
    }
    return {**found, "not private": counter.last_step(), **sizes}


# ---- through PrivacyEngine ----


def loop(
    folder,
    model="bert",
    by="loss",
    sharded=False,
    mode="book_keeping",
    noise_multiplier=0.0,
    bound=0.5,
    seed=SEED,
    expected=3,
    steps=5,
    fill=False,
):
    """A plain loop over five draws, saved and loaded again after the third; what each rank drew, and the gradients
    that were stepped with.

    It goes backward ``by`` the loss, by the loss of a criterion, or by losses of its own; a clipped sum by hand if
    there is one process.
    """
    data = dataset(kind="bert" if model == "bert" else "lm")

    def private(optimizer_class=torch.optim.Adam, **options):
        net = build(model, seed=dist.get_rank() if dist.is_initialized() and not sharded else 0)
        losses_of = losses_function(net)
        if sharded:
            net = shard(net, replicas() if sharded == "hsdp" else None)
        engine = PrivacyEngine(dp_seed=seed, ledger_dir=folder)
        made = engine.make_private(
            module=net, optimizer=optimizer_class(net.parameters(), lr=0.01, **options), data_loader=DataLoader(data, expected, collate_fn=collate),
            criterion=nn.CrossEntropyLoss() if by == "criterion" else None, loss_reduction="none" if by == "losses" else "mean",
            noise_multiplier=noise_multiplier, max_grad_norm=bound, max_physical_batch_size=2, clipping_mode=mode, fill_physical_batches=fill,
        )  # fmt: skip
        return engine, net, losses_of, made[1], made[-1], made[2] if by == "criterion" else F.cross_entropy

    engine, net, losses_of, optimizer, loader, criterion = private(eps=1e-3)
    sampler, draws, gradients, weights = loader._sampler, [], [], []
    draw = sampler.draw
    sampler.draw = lambda: draws.append(draw()) or draws[-1]
    for batch in loader:
        optimizer.zero_grad()
        if by == "losses":
            engine.backward(losses_of(batch))
        else:
            inputs = {k: v for k, v in batch.items() if k != "labels"}
            criterion(net(**inputs).logits, batch["labels"]).backward()
        optimizer.step()
        if trainable(net)[0].grad is not None:  # otherwise there are more batches of this draw
            gradients.append(torch.cat([whole(p.grad).flatten() for p in trainable(net)]))
            weights.append(flat_state(net, optimizer))
            if len(gradients) == 3:
                engine.save_checkpoint(folder / "c.pt", module=net, optimizer=optimizer, checkpoint_dict={"step": 3})
                if dist.is_initialized():
                    dist.barrier()
            if len(gradients) == steps:
                break
    found = {"rest": engine.load_checkpoint(folder / "c.pt", module=net, optimizer=optimizer), "loaded": flat_state(net, optimizer)}  # fmt: skip
    draws = [d.indices for d in draws[:steps]]
    found |= {"draws": draws, "gradients": gradients, "weights": weights, "counted": engine.steps,
              "ledger": Ledger(folder).steps(engine._loop.run.state.run_id)}  # fmt: skip
    engine.detach()
    engine, net, _, optimizer, _, _ = private(eps=1e-3)  # as a new process does
    engine.load_checkpoint(folder / "c.pt", module=net, optimizer=optimizer)
    found["loaded_anew"] = flat_state(net, optimizer)
    engine.detach()
    engine, net, _, optimizer, _, _ = private(torch.optim.SGD)  # has no moments, nor was there a step to save
    saved = flat_state(net, optimizer)
    engine.save_checkpoint(folder / "first.pt", module=net, optimizer=optimizer)
    if dist.is_initialized():
        dist.barrier()
    engine.load_checkpoint(folder / "first.pt", module=net, optimizer=optimizer)
    assert torch.equal(flat_state(net, optimizer), saved)
    return found


# ---- what one rank's batch leaves in its model ----


class Due(TrainerCallback):
    """Batches write from the second step on."""

    def on_step_begin(self, args, state, control, **kwargs):
        DUE.extend(range(state.global_step == 1))


DUE: list[int] = []  # not empty while batches write


def leftovers(folder):
    """What every rank is told where a batch of the last rank writes to its model."""

    def writing(name):
        net = build("bert")
        net.register_buffer("small", torch.zeros(2))
        net.register_buffer("large", torch.zeros(70_000))

        def write(module, args):
            if DUE and (not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1):
                net.switch = name == "switch"
                if name != "switch":
                    getattr(net, name).detach()[0] = 7

        net.switch, net.name = False, name
        net.classifier.register_forward_pre_hook(write)
        return net

    def by_trainer(net):
        options = {"expected_batch_size": 4, "per_device_train_batch_size": 2, "max_steps": 3, "self_check": False}
        args = arguments(folder / net.name, dp_seed=1, **options)
        DPTrainer(net, args, collate, dataset(kind="bert"), callbacks=[Due()]).train()

    def by_loop(net):
        loader, engine = DataLoader(dataset(kind="bert"), 4, collate_fn=collate), PrivacyEngine(dp_seed=1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        _, optimizer, loader = engine.make_private(
            module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, self_check=False,
        )  # fmt: skip
        try:
            for batch in loader:
                inputs = {k: v for k, v in batch.items() if k != "labels"}
                F.cross_entropy(net(**inputs).logits, batch["labels"]).backward()
                optimizer.step()
                DUE.append(1)
        finally:
            engine.detach()

    def told(trains, net):
        try:
            trains(net)
        except ValueError as error:
            return str(error)
        finally:
            DUE.clear()
        return "nothing"

    said = {}
    for trains in (by_trainer, by_loop):
        for name in ("small", "large", "switch"):
            net = writing(name)
            said[trains.__name__, name] = told(trains, net), float(net.small[0]), net.switch
    return said


# ---- by hand ----


def shard(model, mesh=None, **options):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = getattr(base, "bert", base).encoder.layer if hasattr(base, "bert") else base.model.layers
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def replicas():
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def clip(folder, model="llama", lora=False, mode="book_keeping", bad=None, budget=None, **options):
    """Clip this rank's rows of one batch for all; the row `bad` has a loss that is not finite. Norms, and the whole
    sum over ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.pop("hsdp", False):
        options["mesh"] = replicas()
    net = shard(build(model, lora=lora), **options)
    batch = {k: v[rank * ROWS : (rank + 1) * ROWS] for k, v in batch_for(model, LENGTH, size=ROWS * world).items()}
    clipper = PerExampleClipper(net, 0.9, mode, memory_budget=budget)
    losses = losses_function(net)(batch)
    if bad is not None and bad // ROWS == rank:
        losses = losses * torch.where(torch.arange(ROWS) == bad % ROWS, torch.inf, 1.0)
    norms = clipper.backward(losses)
    parameters = trainable(net)
    noise = GaussianNoise(entropy=distributed.noise_entropy(parameters[0]))
    noised = torch.zeros(parameters[0].to_local().shape)
    noise.add_([noised], 1.0)
    return {
        "norms": norms,
        "sum": [whole(p.grad) for p in parameters],
        "placements": {str(p.grad.placements) for p in parameters},
        "noise": noised,
    }


def layers(folder, by="fsdp"):
    """Clip this rank's rows (this group's, where layers are split) with a bound for each layer. Norms, whole sums,
    which layer each is of, and the scales of their noise."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    net = shard(build("llama")) if by == "fsdp" else split("llama", mesh["tp"])
    first = dist.get_rank() * ROWS if by == "fsdp" else 0
    batch = {k: v[first : first + ROWS] for k, v in batch_for("llama", LENGTH, size=ROWS * WORLD).items()}
    clipper = PerExampleClipper(net, PerLayerClipping(FlatClipping(0.9)))
    norms = clipper.backward(losses_function(net)(batch))
    names = {p: name for name, p in net.named_parameters()}
    return {
        "first": first,
        "norms": norms,
        "sum": [whole(p.grad) for p in clipper.parameters],
        "layers": [names[p].rpartition(".")[0] for p in clipper.parameters],
        "scales": clipper.noise_scales,
    }


def following(folder, sharded=False):
    """The bounds that AdaptiveClipping clips by on this rank, where every step takes all of 12 rows."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net = fully_shard(net) if sharded else net
    optimizer, bounds = torch.optim.SGD(net.parameters(), lr=0.1), []
    data = [(x, i % 2) for i, x in enumerate(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))]
    mechanism = Mechanism(
        sampling=PoissonSampling(12, 12),
        clipping=AdaptiveClipping(0.5, count_noise=0.1, learning_rate=1.0),
        noise=IndependentNoise(1.0),
    )
    engine = PrivacyEngine()
    net, optimizer, loader = engine.make_private(
        module=net, optimizer=optimizer, data_loader=DataLoader(data, batch_size=12), mechanism=mechanism,
        loss_reduction="none", max_physical_batch_size=4,
    )  # fmt: skip
    while engine.steps < 6:
        for x, y in loader:
            if not bounds or bounds[-1] != optimizer.max_grad_norm:
                bounds.append(optimizer.max_grad_norm)
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(net(x), y, reduction="none"))
            optimizer.step()
    engine.detach()
    return {"bounds": bounds, "rows": len(engine.clipper.norms)}


def correlated(folder, kind="bands", steps=6, hsdp=False):
    """The correlated noise of so many steps on this rank's shards: (steps, coordinates)."""
    net = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 200))
    mesh = replicas() if hsdp else init_device_mesh("cpu", (dist.get_world_size(),))
    clipper = PerExampleClipper(fully_shard(net, mesh=mesh), 1.0)
    source, rows = CORRELATED[kind].source(clipper), []
    for _ in range(steps):
        shards = [torch.zeros_like(p.to_local()) for p in clipper.parameters]
        source.add_(shards, 0.5)
        rows.append(torch.cat([shard.flatten() for shard in shards]))
    return {"noise": torch.stack(rows)}


def sensitivity(folder, mode="book_keeping", rows=8):
    """In bf16, with every example of both ranks the same and far longer than C: how far one of them moves the sum, in
    units of C."""
    net = shard(build("llama"), **BF16)
    batch = {k: v.expand(rows, LENGTH) for k, v in batch_for("llama", LENGTH, size=1).items()}
    bound, moved = 0.25, {}
    clipper = PerExampleClipper(net, bound, mode)
    for name, weights in {"all": torch.ones(rows), "one less": torch.ones(rows), "one": torch.zeros(rows)}.items():
        if dist.get_rank() == 0 and name != "all":
            weights[0] = 1 - weights[0]
        net.zero_grad()
        norms = clipper.backward(
            losses_function(net)(batch), weights if name != "one" or dist.get_rank() == 0 else torch.zeros(rows)
        )
        moved[name] = [whole(p.grad) for p in trainable(net)]
    assert norms.min() > 4 * bound
    return {"one less": distance(moved["all"], moved["one less"]) / bound, "one": length(moved["one"]) / bound}


class Scores(nn.Module):
    """A sum over scaled rows of a table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 16)

    def forward(self, ids, scales):
        return (self.table(ids).float() * scales[..., None]).sum((1, 2))


def crowded(folder, mode="ghost", rows=256, tokens=600, bound=0.25):
    """In units of C, in bf16: how far one of many equal rows moves the sum, beside any number of them; and what an
    example adds whose tokens nearly cancel, with the norm that it is measured to have."""
    net, moved = nn.Sequential(nn.Linear(64, 1, bias=False)), []
    clipper = PerExampleClipper(fully_shard(net, **BF16), bound, mode)
    for value in (1.1640625, 1.3203125):
        last, x = None, torch.full((rows, 64), value)
        for number in range(0, rows + 1) if dist.get_rank() == 0 else [0] * (rows + 1):
            net.zero_grad()
            clipper.backward(1.01 * net(x).float().squeeze(1), (torch.arange(rows) < number).float())
            total = [whole(net[0].weight.grad)]
            moved += [] if last is None else [distance(total, last) / bound]
            last = total
    clipper.detach()
    net = Scores()  # which is not compared with plain autograd: that adds the tokens up in bf16 on the CPU
    clipper = PerExampleClipper(fully_shard(net, **BF16), bound, mode, self_check=False)
    ids, scales = torch.ones(1, tokens + 1, dtype=torch.long), torch.full((1, tokens + 1), -4.0 / tokens)
    for _ in range(3):  # passes that are looked at
        clipper.backward(net(ids, -scales))
    net.zero_grad()
    scales[0, 0] = 4.0 if dist.get_rank() == 0 else 0.0
    norms = clipper.backward(net(ids, scales), torch.ones(1) * (dist.get_rank() == 0))
    return {"moved": max(moved), "norm": norms / bound, "added": length([whole(net.table.weight.grad)]) / bound}


# ---- tensor parallelism, by hand ----

BERT_PLAN = {
    "bert.embeddings.word_embeddings": "embedding_rowwise",
    "bert.embeddings.position_embeddings": "embedding_colwise",
    "bert.pooler.dense": "rowwise_split_input",
    "classifier": "colwise_gather_output",  # three classes on two processes
    **{f"bert.encoder.layer.*.{name}": "rowwise" for name in ("attention.output.dense", "output.dense")},
    **{
        f"bert.encoder.layer.*.{name}": "colwise"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value")
    },
    "bert.encoder.layer.*.intermediate.dense": "colwise",
}


class Block(nn.Module):
    """Norms on the sequence, between which torch's styles move tensors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 32, padding_idx=3)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.last, self.head = nn.RMSNorm(32, eps=1e-6), nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        return self.head(self.last(x + self.down(F.gelu(self.up(self.norm(x))))))


BLOCK_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "last": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def whole_model(name, lora=False):
    if name == "qwen3-norms":  # whose gradients are small beside the others
        net = build("qwen3")
        for key, p in net.named_parameters():
            p.requires_grad_(key.endswith(("q_norm.weight", "k_norm.weight")))
        return net
    return Block() if name == "block" else build(name, lora=lora)


def losses_of(net):
    if not isinstance(net, Block):
        return losses_function(net)
    return lambda batch: F.cross_entropy(
        net(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none"
    ).mean(1)


def rows_of(name, size):
    batch = batch_for("llama" if name == "block" else name, LENGTH, size=size)
    return {k: v.clamp(min=0) for k, v in batch.items()} if name == "block" else batch


def split(name, mesh, *, lora=False, plan=None):
    """A model in parts, from one that every process holds whole. Tied weights are split twice and tied again, as
    transformers does."""
    net = whole_model(name)
    if name == "block":
        return parallelize_module(net, mesh, BLOCK_PLAN)
    head = net.get_output_embeddings()
    tied = head is not None and head.weight is net.get_input_embeddings().weight
    if tied:
        head.weight = nn.Parameter(head.weight.detach().clone())
    net._device_mesh, net._tp_size, net.config.distributed_config = (mesh, mesh.size(), DistributedConfig(tp_size=mesh.size()))  # fmt: skip
    net.tp_plan = plan or (BERT_PLAN if name == "bert" else net.tp_plan)
    apply_tensor_parallelism(net, mesh, net._expand_parallel_plan(net.tp_plan))
    if tied:
        head.weight = net.get_input_embeddings().weight
    return (with_lora(net, name) if lora else net).train()


def with_lora(net, name):
    """Adapters on a model in parts, with the values that they have on a whole one."""
    net, values = adapted(net, name), dict(build(name, lora=True).named_parameters())
    for module in net.modules():
        if isinstance(module, nn.Linear):  # peft 0.21 writes down the sizes of the part
            module.out_features, module.in_features = module.weight.shape
    with torch.no_grad():
        for key, p in net.named_parameters():
            if p.requires_grad:
                value, is_split = values[key].detach(), hasattr(p, "placements")
                p.copy_(
                    distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None) if is_split else value
                )
    return net


def loaded(name, folder, shape, lora=False):
    """As transformers splits a checkpoint while it loads."""
    net = build(name)
    if dist.get_rank() == 0:
        net.save_pretrained(folder.parent / name)
    dist.barrier()
    config = DistributedConfig(tp_size=shape[1], fsdp_size=shape[0])
    net = type(net).from_pretrained(folder.parent / name, distributed_config=config)
    return (with_lora(net, name) if lora else net).train()


def parts(
    folder, model="llama", lora=False, mode="auto", bad=None, fsdp=None, load=False, shape=None, checkpointed=False
):
    """Clip this group's rows, in two batches that are the same. Norms, whole sum, where everything lies, and noise for
    it."""
    shape = shape or (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    net = loaded(model, folder, shape) if load else split(model, mesh["tp"], lora=lora)
    if fsdp is not None:
        net = shard(net, mesh["dp"], **fsdp)
    if checkpointed:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    group = mesh.get_local_rank("dp")
    batch = {k: v[group * ROWS : (group + 1) * ROWS] for k, v in rows_of(model, ROWS * shape[0]).items()}
    clipper = PerExampleClipper(net, 0.9, mode)
    for _ in range(2):
        losses = losses_of(net)(batch)
        if bad is not None and bad // ROWS == group:
            losses = losses * torch.where(torch.arange(ROWS) == bad % ROWS, torch.inf, 1.0)
        norms = clipper.backward(losses)
    noise = [torch.zeros_like(getattr(p.grad, "_local_tensor", p.grad)) for p in clipper.parameters]
    ShardedNoise(clipper).add_(noise, 1.0)
    names = {p: name for name, p in net.named_parameters()}
    return {
        "group": group,
        "norms": norms,
        "sum": [whole(p.grad) for p in clipper.parameters],
        "names": [names[p] for p in clipper.parameters],
        "placements": [str(getattr(p, "placements", None)) for p in clipper.parameters],
        "gradients lie as parameters": all(
            getattr(p, "placements", 0) == getattr(p.grad, "placements", 0) for p in clipper.parameters
        ),
        "noise": noise,
        "mode": clipper.mode.name,
    }


def saved(folder, model="qwen3", rows=6):
    """Train, evaluate, save, and load in one piece: the loss, and the parameters before and after."""
    args = arguments(folder, noise_multiplier=1.0, max_steps=2, per_device_eval_batch_size=rows)
    net = loaded(model, folder, (WORLD // 2, 2))
    held_out = dataset(rows * WORLD // 2, kind="lm").to_list()
    trainer = DPTrainer(net, args, collate, dataset(kind="lm"), held_out)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    dist.barrier()
    again = type(trainer.model).from_pretrained(folder / "saved").eval()
    with torch.no_grad():
        alone = [float(again(**collate(held_out[i : i + rows])).loss) for i in range(0, len(held_out), rows)]
    split = dict(trainer.model.named_parameters())
    assert all(hasattr(p, "placements") for name, p in split.items() if "_proj" in name)
    same = all(torch.equal(whole(p), again.get_parameter(name)) for name, p in split.items())
    return {"loss": loss, "loss of one": sum(alone) / len(alone), "same": same, "steps": trainer.privacy_spent().steps}


def parts_traffic(folder):
    """Bytes that going back over one physical batch sends, private and not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    net, batch, found = split("llama", mesh["tp"]), rows_of("llama", ROWS), {}
    for name in ("not private", "book_keeping", "ghost"):
        net.zero_grad()
        if name == "not private":
            losses = losses_of(net)(batch).sum()
            with Traffic() as counter:
                losses.backward()
        else:
            with PerExampleClipper(net, 1.0, name, self_check=False) as clipper:
                losses = losses_of(net)(batch)
                with Traffic() as counter:
                    clipper.backward(losses)
        found[name] = sum(counter.sent.values())
    return found


def message(make):
    """Of the error that stops it."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


class OneOfRank(torch.utils.data.Dataset):
    """The rows as this rank has them: in an order of its own, fewer, of which some cannot be loaded; or the same ones,
    with random numbers, by the global generators and by one of its own."""

    def __init__(self, kind=None, size=40):
        self.kind, self.noise = kind, np.random.default_rng(dist.get_rank())
        self.order = list(range(size))
        if kind == "order":
            random.Random(dist.get_rank()).shuffle(self.order)
        elif kind == "fewer" and dist.get_rank():
            self.order = self.order[: size - 5]

    def __len__(self):
        return len(self.order)

    def __getitem__(self, i):
        if self.kind == "split" and i % WORLD != dist.get_rank():
            raise KeyError(f"row {i} is in another shard")
        x = torch.zeros(len(self)).index_fill(0, torch.tensor(self.order[i]), 10.0)
        if self.kind == "random":
            x = x + 0.1 * torch.randn(len(x)) + 0.1 * self.noise.random() + random.random()
        return {"x": x, "labels": torch.tensor(i % 3), "path": f"/scratch/{dist.get_rank()}/{i}.png", "word": str(i)}


class OneLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, x):
        return {"logits": self.linear(x)}


def by_ranks(folder, loop, kind=None, workers=0, **of_the_last):
    """What stops a training of which the last rank has other data, or other settings."""
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.7, "batch": 20, "secure": False, "epsilon": None}
    settings |= of_the_last if dist.get_rank() == WORLD - 1 else {}
    data, batch = OneOfRank(kind), settings.pop("batch")
    secure, epsilon = settings.pop("secure"), settings.pop("epsilon")
    losses_of = lambda outputs, labels: F.cross_entropy(outputs["logits"], labels, reduction="none")  # noqa: E731
    stack = lambda rows: {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}  # noqa: E731
    steps = []

    def trained():
        net = OneLayer(len(data))
        if loop == "trainer":
            args = arguments(folder, **settings, expected_batch_size=batch, secure_rng=secure, max_steps=5, remove_unused_columns=False, dataloader_num_workers=workers, report_to="none")  # fmt: skip
            trainer = DPTrainer(net, args, stack, data, per_example_loss_func=losses_of)
            try:
                trainer.train()
            finally:
                steps.append(trainer.privacy_spent().steps)
            return
        engine, loader = (PrivacyEngine(secure_rng=secure), DataLoader(data, batch, collate_fn=stack, num_workers=workers))  # fmt: skip
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        made = {"module": net, "optimizer": optimizer, "data_loader": loader, "loss_reduction": "none"}
        if epsilon is None:
            *_, loader = engine.make_private(**made, **settings)
        else:
            settings.pop("noise_multiplier")
            *_, loader = engine.make_private_with_epsilon(
                **made, **settings, target_epsilon=epsilon, target_delta=1e-4, epochs=4
            )
        try:
            while engine.steps < 5:
                for rows in loader:
                    optimizer.zero_grad()
                    engine.backward(losses_of(net(rows["x"]), rows["labels"]))
                    optimizer.step()
        finally:
            steps.append(engine.steps)
            engine.detach()

    return {"said": message(trained), "steps": steps}


BY_RANKS = {
    "order": {"kind": "order"},
    "order-workers": {"kind": "order", "workers": 1},
    "fewer": {"kind": "fewer"},
    "split": {"kind": "split"},
    "split-workers": {"kind": "split", "workers": 1},
    "bound": {"max_grad_norm": 20.0},
    "sigma": {"noise_multiplier": 0.3},
    "rate": {"batch": 10},
    "invalid": {"max_grad_norm": -1.0},
    "secure": {"secure": True},
    "random": {"kind": "random"},
    "random-workers": {"kind": "random", "workers": 2},
    "same": {},
}


def parts_refusals(folder):
    """The messages of tensor-parallel layouts that cannot be exact."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]

    def packed():
        PerExampleClipper(split("llama", mesh, plan={"model.layers.*.mlp.gate_proj": "packed_colwise"}), 1.0)

    def partial_norm():
        net = build("qwen3")
        net = split("qwen3", mesh, plan={k: style for k, style in net.tp_plan.items() if "norm" not in k})
        with PerExampleClipper(net, 1.0):
            net(input_ids=torch.arange(24).view(2, 12))

    def per_sample():
        PerExampleClipper(split("llama", mesh), 1.0, "per_sample")

    def other_examples():
        net = split("llama", mesh)
        with PerExampleClipper(net, 1.0):
            net(input_ids=torch.arange(24).view(2, 12) + mesh.get_local_rank())

    def other_random_numbers():
        net = split("llama", mesh)
        torch.manual_seed(mesh.get_local_rank())
        with PerExampleClipper(net, 1.0):
            net(input_ids=torch.arange(24).view(2, 12))

    def too_small():
        PerExampleClipper(parallelize_module(nn.Sequential(nn.Linear(8, 1)), mesh, {"0": ColwiseParallel()}), 1.0)

    def resumed():
        args = arguments(folder, expected_batch_size=4)
        DPTrainer(loaded("qwen3", folder, (world // 2, 2)), args, collate, dataset(kind="lm")).train(
            resume_from_checkpoint=True
        )

    def derived_batch_size():
        args = arguments(folder, expected_batch_size=None)
        DPTrainer(loaded("qwen3", folder, (world // 2, 2)), args, collate, dataset(kind="lm"))

    def own_layer():
        class Own(nn.Linear):
            def forward(self, x):
                return super().forward(x)

        net = nn.Sequential(Own(8, 8))
        PerExampleClipper(parallelize_module(net, mesh, {"0": ColwiseParallel()}), 1.0)

    def rerun():
        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.inside, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

            def forward(self, x):
                return self.inside(x) * self.scale

        PerExampleClipper(
            parallelize_module(nn.Sequential(Around()), mesh, {"0.inside": ColwiseParallel(output_layouts=Replicate())}), 1.0,
        )  # fmt: skip

    def norm_sampler():
        class Normed(nn.LayerNorm):
            def forward(self, x):
                return super().forward(x)

        register_grad_sampler(Normed)(lambda layer, a, g: {layer.weight: (a[0] * g).sum(1), layer.bias: g.sum(1)})
        register_norm_sampler(Normed)(lambda layer, a, g: {p: torch.ones(len(g)) for p in (layer.weight, layer.bias)})
        plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
        net = parallelize_module(nn.Sequential(Normed(8), nn.Linear(8, 8)), mesh, plan)
        with PerExampleClipper(net, 1.0, "ghost", self_check=False) as clipper:
            clipper.backward(net(torch.ones(2, 4, 8)).sum((1, 2)))

    def plain_parts():
        net = build("llama")
        net._tp_size = 2
        PerExampleClipper(net, 1.0)

    def split_sequence():
        from transformers.distributed.tensor_parallel import RowwiseParallel

        net = build("llama")
        RowwiseParallel(output_layouts=Shard(1)).install_forward(net.model.layers[0].mlp.down_proj, mesh)
        PerExampleClipper(net, 1.0)

    def left_split():
        plan = {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        with PerExampleClipper(parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh, plan), 1.0) as clipper:
            clipper.model(torch.ones(2, 8))

    def in_a_loop():
        net = split("llama", mesh)
        loader, optimizer = (DataLoader(dataset(kind="lm"), 3, collate_fn=collate), torch.optim.SGD(net.parameters(), lr=0.1))  # fmt: skip
        PrivacyEngine().make_private(
            module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )

    modules = (packed, partial_norm, own_layer, too_small, rerun, norm_sampler, plain_parts, split_sequence, left_split)  # fmt: skip
    uses = (in_a_loop, per_sample, other_examples, other_random_numbers, resumed, derived_batch_size)
    return {f.__name__: message(f) for f in (*modules, *uses)}


class State(TrainerCallback):
    """What a training starts from."""

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.step, self.values = state.global_step, flat_state(model, optimizer)


def flat_state(model, optimizer):
    moments = [
        optimizer.state[p][name]
        for p in trainable(model)
        for name in ("exp_avg", "exp_avg_sq")
        if p in optimizer.state
    ]
    return torch.cat([whole(x).flatten() for x in (*trainable(model), *moments)])


def checkpoint(folder, kind="FULL_STATE_DICT", lora=False, resume=False):
    """Train two steps and save, or go on from there: parameters and Adam's moments at that point."""
    folder = folder.parent / f"checkpoints-{kind}-{lora}"
    args = arguments(folder, optim="adamw_torch", noise_multiplier=1.0, max_steps=4 if resume else 2, save_strategy="steps", save_steps=2,
                     self_check=False, **fsdp(state_dict_type=kind))  # fmt: skip
    start = State()
    trainer = DPTrainer(build("llama", lora=lora), args, collate, dataset(kind="lm"), callbacks=[start])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    found = {"steps": trainer.privacy_spent().steps, "sharded": isinstance(trainer.model, FSDPModule)}
    return {**found, "step": start.step, "values": start.values if resume else flat_state(trainer.model, trainer.optimizer)}  # fmt: skip


def dropped(folder):
    """What every rank is told when the last one has given up a draw by itself."""
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 3, generator=numbers), torch.randint(2, (40,), generator=numbers))
    net, engine = nn.Linear(3, 2), PrivacyEngine()
    net, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data_loader=DataLoader(data, 20),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    seen = []

    def train():
        for x, y in itertools.chain.from_iterable(itertools.repeat(loader, 5)):
            seen.append(len(x))
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            if len(seen) == 6 and dist.get_rank() == WORLD - 1:
                engine.drop_draw()
            else:
                optimizer.step()

    told = message(train)
    message(engine.detach)
    return told


def refusals(folder):
    """The messages of layouts that cannot be exact."""

    def low_precision_sums():
        PerExampleClipper(shard(build("llama"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), 1.0)

    def low_precision_sums_of_full_precision():
        PerExampleClipper(shard(build("llama"), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)), 1.0)

    def ignored():
        model = build("llama")
        PerExampleClipper(shard(model, ignored_params={model.model.norm.weight}), 1.0)

    def old_fsdp():
        arguments(folder, fsdp=True, fsdp_config={"version": 1})

    def left_in_the_environment():
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        try:
            train(folder)
        finally:
            del os.environ["ACCELERATE_USE_FSDP"]

    def by_hand():
        PerExampleClipper(nn.parallel.DistributedDataParallel(build("bert")), 1.0)

    def in_a_loop():
        net = nn.parallel.DistributedDataParallel(build("bert"))
        loader, optimizer = DataLoader(dataset(), 3, collate_fn=collate), torch.optim.SGD(net.parameters(), lr=0.1)
        PrivacyEngine().make_private(
            module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )

    def layerdrop():
        net = build("llama")
        net.config.decoder_layerdrop = 0.1
        PerExampleClipper(shard(net), 1.0)

    def written_in_a_draw():
        net = shard(build("llama"))
        engine, losses_of = PrivacyEngine(ledger_dir=folder / "written"), losses_function(net)
        loader, optimizer = (DataLoader(dataset(kind="lm"), 6, collate_fn=collate), torch.optim.SGD(net.parameters(), lr=0.1))  # fmt: skip
        made = engine.make_private(module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
                                   loss_reduction="none", max_physical_batch_size=1)  # fmt: skip
        for batch in made[-1]:
            engine.backward(losses_of(batch))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.9)

    modules = (by_hand, in_a_loop, layerdrop, low_precision_sums, low_precision_sums_of_full_precision, ignored)
    return {f.__name__: message(f) for f in (*modules, written_in_a_draw, old_fsdp, left_in_the_environment)}


WORLD = int(os.environ.get("PROCESSES", 2))
BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
SILENT = {"noise_multiplier": 0.0}
# with a bound so small that gradients vanish beside the noise of σC = 2
NOISY = {"noise_multiplier": 2000.0, "max_grad_norm": 1e-3, "expected_batch_size": 12, "max_steps": 2, "dp_seed": None}
LOOP_NOISE = {"noise_multiplier": 2000.0, "bound": 1e-3, "seed": None, "expected": 12}
LATE = {
    "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": False}}
}  # used by one case, for Trainer changes it
CASES = {
    f"ddp-{'lora' if lora else 'full'}-{mode}": (
        train,
        {"lora": lora, "clipping_mode": mode, "self_check": lora, **SILENT},
    )
    for lora, mode in ((False, "book_keeping"), (False, "ghost"), (True, "book_keeping"))
}
CASES |= {
    "ddp-noise": (train, NOISY),
    "ddp-filled": (train, {"fill_physical_batches": True, **SILENT}),
    **{f"persons-{by}": (train, {"owners": 23, "privacy_unit_column": "owner", "rows_per_unit": 2, "model": "llama", **SILENT, **(fsdp() if by == "fsdp" else {})})
       for by in ("ddp", "fsdp")},
    "ddp-bytes": (traffic, {"late": True}),
    "ddp-leftovers": (leftovers, {}),
    **{f"by-ranks-{loop}-{name}": (by_ranks, {"loop": loop, **options})
       for loop in ("trainer", "engine") for name, options in BY_RANKS.items()
       if (loop, name) != ("trainer", "invalid")},  # the arguments refuse it where they are made
    "tp-train-book_keeping": (train, {"model": "qwen3", "tp": 2, "clipping_mode": "book_keeping", **SILENT}),
    "tp-saved": (saved, {}),
    "tp-refusals": (parts_refusals, {}),
    "tp-train-fsdp": (train, {"model": "llama-tied", "tp": 1, "clipping_mode": "ghost", **SILENT}),
    "tp-train-noise": (train, {"model": "qwen3", "tp": 2, **NOISY}),
    "fsdp-full-book_keeping": (train, {"model": "llama", "self_check": True, "clipping_mode": "book_keeping", **SILENT, **fsdp()}),
    "fsdp-full-ghost": (train, {"model": "llama", "clipping_mode": "ghost", **SILENT, **fsdp(reshard_after_forward=False)}),
    "fsdp-lora-book_keeping": (train, {"model": "llama", "lora": True, "clipping_mode": "book_keeping", **SILENT, **fsdp(reshard_after_forward=False)}),
    "fsdp-lora-ghost": (train, {"model": "gpt2", "lora": True, "self_check": True, "clipping_mode": "ghost", **SILENT, **fsdp()}),
    # weights tied, activations checkpointed, which makes auto mean ghost
    "fsdp-tied-checkpointed": (train, {"model": "llama-tied", **SILENT, **fsdp(activation_checkpointing=True)}),
    # whole sums kept over the physical batches of a step
    "fsdp-late": (train, {"model": "llama-tied", "clipping_mode": "book_keeping", **SILENT, **fsdp(), **LATE}),
    "fsdp-filled": (train, {"model": "llama", "fill_physical_batches": True, **SILENT, **fsdp()}),
    "fsdp-noise": (train, {"model": "llama", **NOISY, **fsdp()}),
    "auto-ddp-ghost": (budgeted, {"clipping_mode": "ghost", **SILENT}),
    "auto-fsdp-book_keeping": (budgeted, {"model": "llama", "clipping_mode": "book_keeping", **SILENT, **fsdp()}),
    "auto-fsdp-ghost": (budgeted, {"model": "llama", "lora": True, "clipping_mode": "ghost", **SILENT, **fsdp()}),
    "hand-auto-ghost": (budgeted_by_hand, {"mode": "ghost"}),
    "loop-dropped": (dropped, {}),
    "loop-loss": (loop, {}),
    "loop-criterion": (loop, {"by": "criterion", "mode": "ghost"}),
    "loop-noise": (loop, LOOP_NOISE),
    "loop-filled": (loop, {"fill": True}),
    "loop-fsdp-keeping": (loop, {"model": "llama", "by": "losses", "sharded": True}),
    "loop-fsdp-filled": (loop, {"model": "llama", "by": "losses", "sharded": True, "fill": True}),
    "loop-fsdp-loss": (loop, {"sharded": True}),
    "loop-fsdp-loss-ghost": (loop, {"sharded": True, "mode": "ghost"}),
    "loop-fsdp-criterion": (loop, {"by": "criterion", "sharded": True, "mode": "ghost"}),
    "loop-fsdp-noise": (loop, {"model": "llama", "by": "losses", "sharded": True, **LOOP_NOISE}),
    "loop-hsdp-noise": (loop, {"model": "llama", "by": "losses", "sharded": "hsdp", **LOOP_NOISE}),
    "trl-ddp-sft": (of_trl, {"mode": "ghost"}),
    "trl-ddp-dpo-lora": (of_trl, {"kind": "dpo", "lora": True}),
    "trl-ddp-reward": (of_trl, {"kind": "reward"}),
    "trl-fsdp-sft": (of_trl, {"sharded": True}),
    "trl-fsdp-dpo-lora": (of_trl, {"kind": "dpo", "lora": True, "sharded": True}),
    "ddp-after-fsdp": (after_fsdp, {"model": "llama", **SILENT}),
    "fsdp-bytes": (traffic, {"sharded": True}),
    "hand-full-book_keeping": (clip, {"mode": "book_keeping", "reshard_after_forward": False}),
    "hand-lora-ghost": (clip, {"lora": True, "mode": "ghost"}),
    "hand-bad-book_keeping": (clip, {"model": "bert", "mode": "book_keeping", "bad": 1}),
    "hand-budget-book_keeping": (clip, {"mode": "book_keeping", "budget": 1e5}),
    "hand-budget-ghost": (clip, {"mode": "ghost", "budget": 1e5}),
    "hand-large-budget-ghost": (clip, {"lora": True, "mode": "ghost", "budget": 1e9}),
    "hand-hsdp-book_keeping": (clip, {"mode": "book_keeping", "hsdp": True}),
    "hand-hsdp-ghost": (clip, {"mode": "ghost", "hsdp": True}),
    "hand-offload-book_keeping": (clip, {"mode": "book_keeping", "offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "hand-bf16-book_keeping": (clip, {"mode": "book_keeping", **BF16}),
    "hand-bf16-sensitivity-book_keeping": (sensitivity, {"mode": "book_keeping"}),
    "hand-bf16-sensitivity-ghost": (sensitivity, {"mode": "ghost"}),
    "hand-bf16-crowded-ghost": (crowded, {"mode": "ghost"}),
    "hand-refusals": (refusals, {}),
    "following-ddp": (following, {}),
    "following-fsdp": (following, {"sharded": True}),
    "layers-fsdp": (layers, {"by": "fsdp"}),
    "layers-tp": (layers, {"by": "tp"}),
    **{f"correlated-fsdp-{kind}": (correlated, {"kind": kind}) for kind in CORRELATED},
    **{f"correlated-hsdp-{kind}": (correlated, {"kind": kind, "hsdp": True}) for kind in CORRELATED},
    # tensor parallelism: two processes to a group
    **{f"tp-full-{mode}": (parts, {"mode": mode}) for mode in ("book_keeping", "ghost")},
    "tp-odd-book_keeping": (parts, {"model": "llama-odd"}),
    "tp-tied-book_keeping": (parts, {"model": "llama-tied"}),
    "tp-qwen3-book_keeping": (parts, {"model": "qwen3"}),
    "tp-norms-book_keeping": (parts, {"model": "qwen3-norms"}),
    "tp-bert-book_keeping": (parts, {"model": "bert"}),  # biases of both kinds
    "tp-sequence-book_keeping": (parts, {"model": "block"}),
    "tp-sequence-ghost": (parts, {"model": "block", "mode": "ghost"}),
    "tp-lora-book_keeping": (parts, {"lora": True}),
    "tp-bad-book_keeping": (parts, {"bad": 1}),
    "tp-loaded-book_keeping": (parts, {"model": "qwen3", "load": True}),
    "tp-loaded-tied-ghost": (parts, {"model": "llama-tied", "load": True, "mode": "ghost"}),
    "tp-one-loaded-ghost": (parts, {"model": "llama-tied", "load": True, "shape": (WORLD, 1), "mode": "ghost"}),  # FSDP2, two units
    "tp-checkpointed": (parts, {"checkpointed": True}),
    "tp-fsdp-book_keeping": (parts, {"model": "llama-tied", "fsdp": {}}),
    "tp-fsdp-ghost": (parts, {"model": "qwen3", "fsdp": {}, "mode": "ghost"}),
    "tp-fsdp-lora-book_keeping": (parts, {"lora": True, "fsdp": {}}),
    "tp-fsdp-bf16-book_keeping": (parts, {"fsdp": BF16}),
    "tp-one-book_keeping": (parts, {"model": "llama-tied", "fsdp": {}, "shape": (WORLD, 1)}),
    "tp-bytes": (parts_traffic, {}),
}  # fmt: skip
for kind, lora in (("FULL_STATE_DICT", False), ("SHARDED_STATE_DICT", True)):
    name, options = f"{kind}-{'lora' if lora else 'full'}", {"kind": kind, "lora": lora}
    CASES |= {f"save-{name}": (checkpoint, options), f"load-{name}": (checkpoint, {**options, "resume": True})}
if WORLD == 2:  # FSDP2 shards the rest, where there is more, and does not shard adapters that come after it
    CASES["tp-train-lora"] = (
        train,
        {"model": "llama", "tp": 2, "lora": True, "clipping_mode": "book_keeping", **SILENT},
    )
if WORLD == 4:
    CASES |= {"fsdp-hsdp": (train, {"model": "llama", "replicas": 2, **SILENT, **fsdp()})}


def run(folder: Path, case: str):
    function, options = CASES[case]
    return function(folder, **options)
