"""Writes the message at the start of a private training, and warns if nothing can be learned through its noise, or if
its draws cost more than they have to."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import Optimizer

from ..clipping import PerExampleClipper
from ..clipping.parallel.dtensor import to_local
from ..mechanism.clipping_functions import NOT_CLIPPED
from ..mechanism.mechanism import Release
from ..mechanism.values import HOPELESS
from .run import PrivateRun

_NEIGHBOURS = {
    "add_or_remove_one": "adding or removing it",
    "replace_special": "replacing it by a {} without gradient (not N)",
    "replace_one": "replacing it by another {} (not N)",
}

_WHY = {  # "auto" takes a mode
    "book_keeping": "auto: one backward pass, and no example's gradient is formed",
    "ghost": "auto: activations are checkpointed, and other modes would keep them",
}


def size_of(clipper: PerExampleClipper) -> int:
    """Return the number of parameters that are trained, counted by their numbers."""
    return sum(p.numel() for p in clipper.parameters)


def describe(run: PrivateRun, steps: int | None, clipper: PerExampleClipper, *further: str) -> str:
    """Describe the training to whoever starts it, in five lines at most.

    Args:
        steps: The number of steps; None if the loop decides.
        further: Other things to be known.
    """
    step, size, mode = run.mechanism.at(0), size_of(clipper), clipper.mode.name
    sampling, noise = run.mechanism.sampling.kind, run.mechanism.noise.kind
    bound = "none" if run.mechanism.clipping == NOT_CLIPPED else f"{step.max_grad_norm:g}"
    also = [_describe_release(release, step.expected_batch_size) for release in run.mechanism.releases]
    if (sampling, noise) != ("poisson", "independent"):
        also.append(f"sampling {sampling!r}, noise {noise!r}")
    if not run.verified:
        also.append("NOT VERIFIED: the self-check is switched off, or was before this run was resumed")
    why = _WHY[mode] if clipper.asked_mode == "auto" else "as asked for"
    if mode == "ghost" and clipper.engine.memory is None and not clipper.engine.trainable.parallel:
        why += "; memory_budget='auto' may save one of two backward passes"
    lines = [
        _protected(run),
        f"to be spent: {_to_be_spent(run)}; expected batch size {step.expected_batch_size} "
        f"(q = {step.sample_rate:.6f})" + (f", steps {steps}" if steps else ""),
        f"model {type(clipper.model).__name__}: {size:,} of {sum(p.numel() for p in clipper.model.parameters()):,} "
        f"parameters are trained, in mode {mode} ({why})",
        f"noise multiplier {step.noise_multiplier:.4f}, clipping bound {bound}: noise {noise_norm(run, size):.3g} "
        "beside a signal of at most the bound in each step",
        "; ".join([*also, *further]),
    ]
    return "\n  ".join(filter(None, lines))


def _protected(run: PrivateRun) -> str:
    """Say who is protected, or why nobody is."""
    unit, sampling = run.mechanism.unit, run.mechanism.sampling
    if run.not_private_because:
        return f"NOT PRIVATE, nobody is protected (N = {sampling.num_examples}): {'; '.join(run.not_private_because)}"
    if unit.is_person:
        persons = f"Of a drawn person {unit.rows_per_step} rows at most take part in a step."
    elif unit.max_examples_per_person > 1:
        persons = f"All rows of one person, {unit.max_examples_per_person} at most, are hidden together."
    else:
        persons = "A person with k rows is hidden less; name the column of owners, or see max_examples_per_person."
    hidden = _NEIGHBOURS[sampling.relation].format(unit.noun)
    return f"private training protects: {unit} (N = {sampling.num_examples}); {hidden} is hidden. {persons}"


def _to_be_spent(run: PrivateRun) -> str:
    state = run.state
    if run.not_private_because:
        return "epsilon is infinite"
    at = "" if state.delta is None else f" at delta {state.delta:g}"
    if state.target_epsilon is None:
        return f"what the steps add up to{at}; there is no target_epsilon"
    rows = " for all rows of one person" if run.mechanism.unit.max_examples_per_person > 1 else ""
    return f"epsilon {state.target_epsilon:g}{at}{rows}"


def _describe_release(release: Release, batch_size: float) -> str:
    low, high = release.center - release.bound, release.center + release.bound
    return (
        f"{release.name} clipped to [{low:g}, {high:g}], its mean with noise of "
        f"{release.noise_std / batch_size:.2g} in each step, which epsilon covers"
    )


def noise_norm(run: PrivateRun, parameters: int) -> float:
    """Return the expected length of a step's noise, σ·C·√d/B. A step's signal, the mean of clipped gradients, is about
    C at most."""
    step = run.mechanism.at(0)
    return step.noise_multiplier * step.max_grad_norm * math.sqrt(parameters) / step.expected_batch_size


def warnings(
    run: PrivateRun, steps: int, clipper: PerExampleClipper, optimizer: Optimizer | None, *, passes: int = 1
) -> list[str]:
    """Return the warnings about a private training of so many steps. A loop that decides when it ends may take so many
    ``passes`` of them."""
    sampling, sigma = run.mechanism.sampling, run.mechanism.at(0).noise_multiplier
    costly = sampling.warning(sigma, steps, run.state.delta or 0.1 / sampling.num_examples)
    slow = None if optimizer is None else too_slow(run, steps * passes, clipper, optimizer)
    found = (hopeless(run, steps, size_of(clipper)), costly, slow, only_noise(clipper.model))
    return [warning for warning in found if warning]


def too_slow(run: PrivateRun, steps: int, clipper: PerExampleClipper, optimizer: Optimizer) -> str | None:
    """Return a warning if the learning rate is so small that weights cannot move by a hundredth of their size. Adam
    moves a weight by the learning rate in a step at most, and others all weights together by that times C."""
    weights = [to_local(p).detach().float() for p in clipper.parameters]
    size = max(1, sum(w.numel() for w in weights))
    typical = math.sqrt(sum(float(w.square().sum()) for w in weights) / size)
    of_bound = run.mechanism.at(0).max_grad_norm / math.sqrt(size)
    moved = max(
        g.get("initial_lr", g["lr"]) * steps * (1.0 if "betas" in g else of_bound) for g in optimizer.param_groups
    )
    if moved >= typical / 100:
        return None
    return (
        f"little will be learned: in {steps} steps of this learning rate a weight moves by {moved:.1g} at most, and "
        f"weights are about {typical:.1g}. Private training takes learning rates 10 to 100 times as large "
        "as plain training, and many steps."
    )


def only_noise(model: nn.Module) -> str | None:
    """Return a warning if peft trains a whole table of embeddings, as for new tokens."""
    for name, module in model.named_modules():
        if "modules_to_save" in name and isinstance(module, nn.Embedding) and module.weight.requires_grad:
            return (
                f"each of the {len(module.weight):,} rows of '{name}' gets noise in every step, and those of tokens "
                "that do not occur get nothing else. For new tokens train their rows alone: LoraConfig("
                "trainable_token_indices=...) in the place of modules_to_save."
            )
    return None


def hopeless(run: PrivateRun, steps: int, parameters: int) -> str | None:
    """Return a warning if nothing can be learned: over T steps signals add up to T·C at most, and independent noise to
    √T·σ·C·√d/B. None otherwise."""
    step = run.mechanism.at(0)
    ratio = noise_norm(run, parameters) / step.max_grad_norm / math.sqrt(max(steps, 1))
    if ratio <= HOPELESS:
        return None
    return (
        f"nothing will be learned: each step's noise has length {noise_norm(run, parameters):.3g}, its signal at most "
        f"{step.max_grad_norm:g}, and over {steps} steps the noise is still {ratio:.1f} times the signal. What helps: "
        f"a larger expected_batch_size (more than {math.ceil(step.expected_batch_size * ratio / HOPELESS)}), fewer "
        "trainable parameters (LoRA, a part of the layers), more rows, more steps, or a larger epsilon."
    )
