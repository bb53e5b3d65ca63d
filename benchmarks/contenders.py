"""Who is compared: plain training, this library in its modes, Opacus, opake. Each returns two phases: clipped
gradient, and noise and step.

All step with SGD, which costs least: a dearer optimizer would only hide what privacy adds.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from dp_transformers import FlatClipping, PerExampleClipper, PerLayerClipping
from dp_transformers.noise.add_noise import add_noise_and_divide
from dp_transformers.noise.generators import Dither, GaussianNoise

from .harness import Contender, Phase
from .models import Losses

MODES = ("auto", "book_keeping", "ghost")
PER_LAYER = "per_layer"  # book-keeping with a bound for each layer, which keeps nothing
MAX_GRAD_NORM, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.0, 1e-6


@dataclass(frozen=True)
class Task:
    """What every contender does once per turn: ``losses(model)`` gives the (B,) losses of a batch of ``size`` for a
    model of ``build()``."""

    build: Callable[[], nn.Module]
    losses: Callable[[nn.Module], torch.Tensor]
    size: int
    device: torch.device
    bf16: bool = False

    def start(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)

    def forward(self, model: nn.Module) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            return self.losses(model)


def plain(task: Task) -> Sequence[Phase]:
    model = task.build().to(task.device)
    optimizer = task.start(model)

    def backward() -> None:
        optimizer.zero_grad()
        task.forward(model).mean().backward()

    return backward, optimizer.step


def ours(task: Task, mode: str, memory_budget: float | str | None = None) -> Sequence[Phase]:
    model = task.build().to(task.device)
    optimizer = task.start(model)
    clipping = FlatClipping(MAX_GRAD_NORM)
    if mode == PER_LAYER:
        clipping, mode = PerLayerClipping(clipping), "book_keeping"
    clipper = PerExampleClipper(model, clipping, mode=mode, memory_budget=memory_budget)
    clipper.follow(OneDraw(), None)
    sums = clipper.empty_sums()
    steps = itertools.count(1)
    noise, dither, std = GaussianNoise(), Dither(entropy=[0]), NOISE_MULTIPLIER * clipping.sensitivity

    def backward() -> None:
        optimizer.zero_grad()
        clipper.backward(task.forward(model), into=sums)

    def step() -> None:
        clipper.engine.end_draw()
        clipper.engine.deferred_checks.require()
        sums.become_gradients()
        add_noise_and_divide(
            clipper.parameters, noise, dither=dither, std=std, divisor=task.size, scales=clipper.noise_scales
        )
        optimizer.step()
        clipper.engine.begin_draw()
        clipper.look_at_memory(next(steps), int)  # of one rank, the least is its own

    return backward, step


class OneDraw:
    """The training loop of a clipper whose batches belong to one draw until the step, as they do in a training. What
    is looked at once a draw, that no frozen weight was written to, is part of the step."""

    def before_forward(self, args: tuple, kwargs: dict) -> None:
        """It needs nothing of the inputs."""

    def after_forward(self, output: object) -> None:
        """It needs nothing of the outputs."""

    def current_batch(self) -> object:
        return self


def opacus(task: Task, mode: str) -> Sequence[Phase]:
    """Opacus' own modules and optimizers, its hooks or its ghost clipping (two passes)."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    model = task.build().to(task.device)
    options = {"noise_multiplier": NOISE_MULTIPLIER, "max_grad_norm": MAX_GRAD_NORM, "expected_batch_size": task.size}
    if mode == "hooks":
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(task.start(wrapped), **options)
    else:
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_GRAD_NORM, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(task.start(wrapped), **options)

    def backward() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses = task.forward(wrapped)
        if mode == "hooks":
            losses.mean().backward()
            optimizer.clip_and_accumulate()
        else:
            DPTensorFastGradientClipping(wrapped, optimizer, losses).backward()
            optimizer.accumulate()

    def step() -> None:
        optimizer.add_noise()
        optimizer.scale_grad()
        optimizer.original_optimizer.step()

    return backward, step


def opake(task: Task) -> Sequence[Phase]:
    """opake's clipped gradients and noise: by vmap, with its own kernels where it has any."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.exceptions import ConfigurationError
    from opake.patches.transformers import apply_transformers_model_patches
    from opake.random import key
    from peft import PeftModel

    assert isinstance(task.losses, Losses), "opake is given the rows of a batch"
    model, losses, latest = task.build().to(task.device), task.losses, {}
    with contextlib.suppress(ConfigurationError):  # it has no kernels for this architecture
        apply_transformers_model_patches(model.get_base_model() if isinstance(model, PeftModel) else model)
    optimizer = task.start(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(values: dict[str, torch.Tensor], row: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: x[None] for name, x in row.items() if name != "targets"}
        with torch.autocast(task.device.type, dtype=torch.bfloat16, enabled=task.bf16):
            logits = torch.func.functional_call(model, values, (), inputs).logits
            return losses.of(logits, row["targets"][None]).sum()

    clipped, clipping_state = clipped_grad(loss, clipping_norm=MAX_GRAD_NORM)
    noised, noise_state = gaussian_noise(noise_multiplier=NOISE_MULTIPLIER, key=key(0))
    rows = {**losses.batch, "targets": losses.targets}

    def backward() -> None:
        latest.clear()
        values = {name: p.detach() for name, p in parameters.items()}
        latest["sum"] = clipped(values, rows, state=clipping_state)[0]

    def step() -> None:
        noisy = noised(latest["sum"], noise_state)[0].pytree
        for name, p in parameters.items():
            p.grad = noisy[name] / task.size
        optimizer.step()

    return backward, step


def for_opacus(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """``build`` with the layers that Opacus cannot do replaced by its own: recurrent ones and multi-head attention."""

    def fixed() -> nn.Module:
        from opacus.layers import DPRNN
        from opacus.validators import ModuleValidator

        model = build()
        if isinstance(model, nn.RNN):  # the only one that its validator leaves alone
            return DPRNN(model.input_size, model.hidden_size, batch_first=model.batch_first)
        return ModuleValidator.fix(model)

    return fixed


def field(task: Task, *, peers: bool, modes: Sequence[str] = MODES) -> dict[str, Contender]:
    """Plain training first, the others measured against it."""
    contenders: dict[str, Contender] = {"plain": partial(plain, task)}
    contenders |= {mode: partial(ours, task, mode) for mode in modes}
    if peers:
        fixed = replace(task, build=for_opacus(task.build))
        contenders |= {f"opacus {mode}": partial(opacus, fixed, mode) for mode in ("ghost", "hooks")}
        if isinstance(task.losses, Losses):
            contenders["opake"] = partial(opake, task)
    return contenders
