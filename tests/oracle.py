"""The oracle of every exactness test: one example at a time through plain autograd, no hook anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dp_transformers import PerExampleClipper


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def per_example_gradients(
    model: nn.Module, losses_of: Callable[[dict], torch.Tensor], batch: dict
) -> list[list[torch.Tensor]]:
    """For each example the gradients of all trainable parameters, from a forward pass of that example alone."""
    size = len(next(iter(batch.values())))
    gradients = []
    for i in range(size):
        loss = losses_of({k: v[i : i + 1] for k, v in batch.items()}).sum()
        grads = torch.autograd.grad(loss, trainable(model), allow_unused=True)
        gradients.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(trainable(model), grads, strict=True)]
        )
    return gradients


def length(tensors: list[torch.Tensor]) -> float:
    return float(sum(t.detach().double().square().sum() for t in tensors).sqrt())


def clipped_sum(
    gradients: list[list[torch.Tensor]], bound: float, weights=None
) -> tuple[list[float], list[torch.Tensor]]:
    norms = [length(g) for g in gradients]
    weights = [1.0] * len(norms) if weights is None else weights
    coefficients = [w * min(1.0, bound / n) if n > 0 else w for w, n in zip(weights, norms, strict=True)]
    total = [
        sum(c * g[k].double() for c, g in zip(coefficients, gradients, strict=True)) for k in range(len(gradients[0]))
    ]
    return norms, total


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return length([x.double() - y.double() for x, y in zip(a, b, strict=True)])


def assert_exact(
    model: nn.Module, clipper, losses_of: Callable[[dict], torch.Tensor], batch: dict, tolerance: float = 1e-5
) -> None:
    """Norms (each) and clipped sum (all parameters together) agree with the oracle; some are clipped and some are
    not."""
    gradients = per_example_gradients(model, losses_of, batch)
    bound = float(torch.tensor([length(g) for g in gradients]).median()) or 1.0
    norms, total = clipped_sum(gradients, bound)
    model.zero_grad()
    scale = clipper.max_grad_norm / bound  # of the losses: a clipper's bound stays what it is
    got = clipper.backward(losses_of(batch) * scale) / scale
    for i, (a, b) in enumerate(zip(got.tolist(), norms, strict=True)):
        assert abs(a - b) <= tolerance * b, f"norm of example {i}: {a} against {b}"
    grads = [torch.zeros_like(p) if p.grad is None else p.grad / scale for p in trainable(model)]
    error = distance(grads, total) / max(length(total), 1e-12)
    assert error <= tolerance, f"clipped sum: relative error {error:.2e}"


def errors(model, mode, batch, losses_of, oracle=None):
    """Worst relative errors of norms and clipped sum against one example at a time; some are clipped, some are not."""
    gradients = oracle or per_example_gradients(model, losses_of, batch)
    sizes = torch.tensor([length(g) for g in gradients])
    bound = float(sizes[sizes > 0].median()) * 0.9
    norms, total = clipped_sum(gradients, bound)
    model.zero_grad()
    with PerExampleClipper(model, bound, mode=mode) as clipper:  # the self-check settles who answers for what
        got = clipper.backward(losses_of(batch)).double()
        owners = clipper.owners
    expected = torch.tensor(norms, dtype=torch.float64)
    norm_error = ((got - expected).abs() / expected.clamp(min=1e-12)).where(expected > 0, got).max()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
    return float(norm_error), distance(grads, total) / length(total), owners


def assert_exact_in_modes(model, losses_of, batch, modes):
    """Norms and clipped sum agree with the oracle in each of these modes, after its self-check; the owners found."""
    with torch.random.fork_rng():
        gradients = per_example_gradients(model, losses_of, batch)
    for mode in modes:
        norm_error, sum_error, owners = errors(model, mode, batch, losses_of, gradients)
        assert norm_error <= 1e-5 and sum_error <= 1e-5, f"{mode}: norms {norm_error:.1e}, sum {sum_error:.1e}"
    return owners
