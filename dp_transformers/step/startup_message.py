"""Writes the message at the start of a private training, and warns if nothing can be learned through its noise, or if
its draws cost more than they have to."""

from __future__ import annotations

import math

from ..clipping import PerExampleClipper
from ..mechanism.mechanism import UNIT, Release
from ..mechanism.values import HOPELESS
from .run import PrivateRun

_NEIGHBOURS = {
    "add_or_remove_one": "adding or removing it",
    "replace_special": "replacing it by a row without gradient (not N)",
    "replace_one": "replacing it by another row (not N)",
}

_WHY = {  # "auto" takes a mode
    "book_keeping": "auto: one backward pass, and no example's gradient is formed",
    "ghost": "auto: activations are checkpointed, and other modes would keep them",
}


def size_of(clipper: PerExampleClipper) -> int:
    """Return the number of parameters that are trained, counted by their numbers."""
    return sum(p.numel() for p in clipper.parameters)


def describe(run: PrivateRun, steps: int | None, clipper: PerExampleClipper) -> str:
    """Describe the training to whoever starts it. ``steps`` is None if the loop decides."""
    step, size, mode = run.mechanism.at(0), size_of(clipper), clipper.mode.name
    lines = [
        _protected(run),
        f"  model {type(clipper.model).__name__}: {size:,} of {sum(p.numel() for p in clipper.model.parameters()):,} "
        "parameters are trained",
        f"  clipping mode {mode} ({_WHY[mode] if clipper.asked_mode == 'auto' else 'as asked for'})",
        f"  expected batch size {step.expected_batch_size} (q = {step.sample_rate:.6f}), noise multiplier "
        f"{step.noise_multiplier:.4f}, clipping bound {step.max_grad_norm:g}" + (f", steps {steps}" if steps else ""),
        f"  noise {noise_norm(run, size):.3g} beside a signal of at most {step.max_grad_norm:g} in each step",
        f"  to be spent: {_to_be_spent(run)}",
    ]
    sampling, noise = run.mechanism.sampling.kind, run.mechanism.noise.kind
    if (sampling, noise) != ("poisson", "independent"):
        lines.append(f"  sampling {sampling!r}, noise {noise!r}")
    lines += [_describe_release(release, step.expected_batch_size) for release in run.mechanism.releases]
    if not run.verified:
        lines.append("  NOT VERIFIED: the self-check is switched off, or was before this run was resumed")
    return "\n".join(lines)


def _protected(run: PrivateRun) -> str:
    """Say who is protected, or why nobody is."""
    k, sampling = run.mechanism.unit.max_examples_per_person, run.mechanism.sampling
    if run.not_private_because:
        return f"NOT PRIVATE, nobody is protected (N = {sampling.num_examples}): {'; '.join(run.not_private_because)}"
    persons = (
        f"All rows of one person, {k} at most, are hidden together."
        if k > 1
        else "A person with k rows is hidden less; see max_examples_per_person."
    )
    return (
        f"private training protects: {UNIT} (N = {sampling.num_examples}); {_NEIGHBOURS[sampling.relation]} is "
        f"hidden. {persons}"
    )


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
        f"  {release.name} clipped to [{low:g}, {high:g}], its mean with noise of "
        f"{release.noise_std / batch_size:.2g} in each step, which epsilon covers"
    )


def noise_norm(run: PrivateRun, parameters: int) -> float:
    """Return the expected length of a step's noise, σ·C·√d/B. A step's signal, the mean of clipped gradients, is about
    C at most."""
    step = run.mechanism.at(0)
    return step.noise_multiplier * step.max_grad_norm * math.sqrt(parameters) / step.expected_batch_size


def warnings(run: PrivateRun, steps: int, parameters: int) -> list[str]:
    """Return the warnings about a private training of ``parameters`` numbers."""
    sampling, sigma = run.mechanism.sampling, run.mechanism.at(0).noise_multiplier
    costly = sampling.warning(sigma, steps, run.state.delta or 0.1 / sampling.num_examples)
    return [warning for warning in (hopeless(run, steps, parameters), costly) if warning]


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
