"""Audits of the private step: many trials of one step, on the same weights and the same examples.

The *canary* is one more example, the one of a few whose gradient is longest. A secret coin decides in each trial
whether it is in the draw. Everything else is the script's own: model, collator, losses, clipping, the private step and
its noise. The attacker knows the draw and the weights, and scores a release by its dot product with the canary's
clipped gradient. With clipping bound C and noise σC no test of one release does better than one of N(0, 1) against
N(1/σ, 1), which is to say that the step is 1/σ-GDP. Trials are independent, so rates of detection and false alarms
bound μ from below (Clopper and Pearson); a bound above 1/σ is evidence against the mechanism.

The same trials are put to further tests, which need no canary (``StepAudit.p_values``). Together with the bound they
raise a false alarm with probability 1 - confidence at most, since each is made at a fifth of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2, norm

from ..data.draws import LogicalBatch, LogicalBatches
from ..mechanism.clipping_functions import AdaptiveClipping
from ..mechanism.mechanism import Mechanism
from ..mechanism.noise import IndependentNoise
from ..mechanism.sampling import Draw, PoissonSampling
from ..step.step import PrivateStep
from .estimators import clopper_pearson_epsilon_lower_bound, clopper_pearson_gdp_lower_bound

Vector = list[torch.Tensor]  # one tensor for each parameter, in units of the noise's scale

_TESTS = 5  # that a false alarm may come from
_TOLERANCE = 0.02  # of sums of clipped gradients, in units of C
ROWS = 8  # of the draw at most; the canary is chosen among them


@dataclass
class OneStep:
    """The private step of a script, which can be taken again and again.

    Attributes:
        losses: Computes the (B,) losses of the rows of a physical batch.
        sizes: The sizes of some draws of its sampler.
        copies: How often the canary is in a draw that it is in; above 1 it is a planted fault.
    """

    step: PrivateStep
    batches: LogicalBatches
    losses: Callable[[Any], torch.Tensor]
    optimizer: torch.optim.Optimizer
    sizes: Sequence[int] = ()
    copies: int = 1
    first_noise: Vector = field(default_factory=list)
    taken: int = 0
    longest: float = 0.0  # norm of the last batch

    def draw(self, others: Sequence[int], canary: int | None = None) -> LogicalBatch:
        """Return the batch of some rows, and of the canary if it is given."""
        if canary is None:
            return self.batches[Draw(0, others)]
        batch = self.batches[Draw(0, [*others, canary])]
        alone = [each for _ in range(self.copies - 1) for each in self.draw([canary]).batches]
        return replace(batch, batches=[*batch.batches, *alone])

    def take(self, batch: LogicalBatch) -> tuple[Vector, Vector, float]:
        """Take a step, and return the clipped sum, what was released times the divisor, and the standard deviation
        that its noise should have. The weights stay as they are."""
        step, clipper = self.step, self.step.clipper
        for given in step.physical_batches(replace(batch, number=self.taken)):
            self.longest = float(step.add(self.losses(given.batch.rows)).max())
        clipping, by_name = step.clipping, step.clipped_sums()
        noise, parameters = step.run.mechanism.noise, step.run.mechanism.at(0)
        step.release(self.optimizer)
        if isinstance(clipping, AdaptiveClipping):  # it follows the norms
            step.run.move(clipping)
        names = {id(p): name for name, p in clipper.model.named_parameters()}
        sums, released = [], []
        for p, scale in zip(clipper.parameters, clipper.noise_scales_of(clipping), strict=True):
            total, grad = by_name.get(names[id(p)]), p.grad
            assert grad is not None, "it was released"
            released.append(grad.detach().to(torch.float32) * (parameters.expected_batch_size / scale))
            sums.append(torch.zeros_like(released[-1]) if total is None else total.to(torch.float32) / scale)
        std = noise.relative_std(self.taken) * noise.at(0) * clipping.sensitivity
        if not self.first_noise:
            self.first_noise = _minus(released, sums)
        self.taken += 1
        return sums, released, std


@dataclass(frozen=True)
class StepAudit:
    """What many one-step trials show. All of it is at ``confidence`` together.

    Attributes:
        mechanism: The claim.
        canary_norm: Of the canary's clipped gradient, over C. Nothing above it can be shown of an honest step.
        moved: How far the clipped sum moved when the canary came in, over C. Above 1, clipping does not hold.
        detected, num_in: Trials with the canary in which it was detected, and all of them.
        alarms, num_out: Trials without it in which it was "detected", and all of them.
        p_values: Of the further tests, by what they would show.
    """

    mechanism: Mechanism
    delta: float
    confidence: float
    canary_norm: float
    moved: float
    detected: int
    num_in: int
    alarms: int
    num_out: int
    p_values: dict[str, float]
    seconds: float

    @property
    def each(self) -> float:
        """The confidence of each test by itself."""
        return 1 - (1 - self.confidence) / _TESTS

    @property
    def claimed_mu(self) -> float:
        return 1 / sigma if (sigma := self.mechanism.noise.at(0)) else math.inf

    @property
    def mu(self) -> float:
        """The lower bound on μ of one step in which the canary may be."""
        return clopper_pearson_gdp_lower_bound(self.detected, self.num_in, self.alarms, self.num_out, self.each)

    @property
    def largest_mu(self) -> float:
        """The bound that so many trials show if every guess is right."""
        return clopper_pearson_gdp_lower_bound(self.num_in, self.num_in, 0, self.num_out, self.each)

    @property
    def step_epsilon(self) -> float:
        """The lower bound on ε of one step at δ that supposes nothing of its mechanism."""
        rates = self.detected, self.num_in, self.alarms, self.num_out
        return clopper_pearson_epsilon_lower_bound(*rates, self.delta, self.each)

    @property
    def claimed_epsilon(self) -> float:
        """ε of all planned steps."""
        return math.inf if self.mechanism.is_silent else self.mechanism.epsilon(self.delta)

    @property
    def epsilon(self) -> float:
        """ε of all planned steps if each leaks what the bound on μ says, and draws are as claimed. It holds for steps
        that are as private as a Gaussian mechanism."""
        noise = IndependentNoise(1 / max(self.mu, 1e-6))
        return replace(self.mechanism, noise=noise, releases=()).epsilon(self.delta) if self.mu else 0.0

    @property
    def faults(self) -> list[str]:
        """Say what the trials speak against; nothing if they agree with the claim."""
        found = [f"{what} (p = {p:.1e})" for what, p in self.p_values.items() if p <= 1 - self.each]
        if self.moved > 1 + _TOLERANCE and not self.mechanism.is_silent:
            found.insert(0, f"one example moves the sum by {self.moved:.3g} times the clipping bound")
        if self.mu > self.claimed_mu:
            found.insert(0, f"mu of a step is at least {self.mu:.3g}, and {self.claimed_mu:.3g} is claimed")
        return found


def audit_step(
    one: OneStep,
    other_noise: Vector | None = None,
    *,
    delta: float,
    trials: int = 200,
    confidence: float = 0.95,
    seed: int | None = None,
) -> StepAudit:
    """Audit a private step by ``trials`` one-step trials, half of them with the canary, in a random order.

    Args:
        other_noise: The first noise of the same step when it was set up once before, from the same known seeds.
        seed: Of the order of the trials, for tests.
    """
    start, mechanism, bound = time.perf_counter(), one.step.run.mechanism, one.step.clipping.sensitivity
    others, canary = _choose_canary(one)
    without, with_canary = one.draw(others), one.draw(others, canary)
    base, there = one.take(without)[0], one.take(with_canary)[0]
    gradient = one.take(one.draw([canary]))[0]
    length, moved = _norm(gradient), _norm(_minus(there, base))
    direction = [g / max(length, 1e-30) for g in gradient]
    threshold = _dot(base, direction) + length / 2  # fixed before the trials
    coins = np.random.default_rng(seed).permutation([i % 2 for i in range(trials)])
    noises, hits = _Noises(), [0, 0]
    for coin in coins:
        sums, released, std = one.take(with_canary if coin else without)
        hits[coin] += _dot(released, direction) > threshold
        noises.add(_minus(released, sums), std)
    p_values = {} if mechanism.is_silent else noises.p_values(independent=mechanism.noise.bands == 1)
    if other_noise is not None and not mechanism.is_silent:
        p_values["the noise can be drawn again from what is known"] = _same_noise(one.first_noise, other_noise)
    if type(mechanism.sampling) is PoissonSampling and one.sizes:
        p_values["draws are not independent of each other"] = _draws(one.sizes, mechanism.sampling)
    rates, seconds = (hits[1], trials // 2, hits[0], trials - trials // 2), time.perf_counter() - start
    return StepAudit(mechanism, delta, confidence, length / bound, moved / bound, *rates, p_values, seconds)


def _choose_canary(one: OneStep) -> tuple[list[int], int]:
    """Return some examples (persons, if draws choose persons), and the one whose gradient is longest."""
    rows = list(range(min(ROWS + 1, one.step.run.mechanism.sampling.num_examples)))
    norms: dict[int, float] = {}
    for row in rows:
        one.take(one.draw([row]))
        norms[row] = one.longest
    canary = max(norms, key=lambda row: norms[row])
    return [row for row in rows if row != canary], canary


class _Noises:
    """Collects the noise of releases, of which only two sums are kept."""

    def __init__(self) -> None:
        self._sum: Vector = []
        self._squares: list[float] = []
        self._count = 0

    def add(self, noise: Vector, std: float) -> None:
        """Add the noise of a release, which should have this standard deviation."""
        unit = [x / std for x in noise] if std else noise
        squares = [float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 for x in unit]
        self._sum = [a + b for a, b in zip(self._sum, unit, strict=True)] if self._count else unit
        self._squares = [a + b for a, b in zip(self._squares, squares, strict=True)] if self._count else squares
        self._count += 1

    def p_values(self, *, independent: bool) -> dict[str, float]:
        sizes = [x.numel() for x in self._sum]
        least = min(chi2.cdf(s, self._count * n) for s, n in zip(self._squares, sizes, strict=True))
        found = {"a parameter has less noise than claimed": min(1.0, float(least) * len(sizes))}
        if independent:
            variance = max(sum(self._squares), 1e-30) / (self._count * sum(sizes))
            again = _norm(self._sum) ** 2 / (self._count * variance)
            found["noise of one step comes again in another"] = float(chi2.sf(again, sum(sizes)))
        return found


def _same_noise(first: Vector, second: Vector) -> float:
    lengths = max(_norm(first) * _norm(second), 1e-30)
    return float(norm.sf(_dot(first, second) / lengths * math.sqrt(sum(x.numel() for x in first))))


def _draws(sizes: Sequence[int], sampling: PoissonSampling) -> float:
    """Return the p-value of the spread of draws' sizes, which independent draws of every example have (normal
    approximation)."""
    q, count = sampling.sample_rate, len(sizes)
    variance = sampling.num_examples * q * (1 - q)
    if not variance:
        return 1.0
    spread = sum((size - sampling.num_examples * q) ** 2 for size in sizes) / variance
    kurtosis = (1 - 6 * q * (1 - q)) / variance
    return float(2 * norm.sf(abs(spread - count) / math.sqrt(count * (2 + kurtosis))))


def _minus(one: Vector, other: Vector) -> Vector:
    return [a - b for a, b in zip(one, other, strict=True)]


def _dot(one: Vector, other: Vector) -> float:
    return sum(float((a.double() * b).sum()) for a, b in zip(one, other, strict=True))


def _norm(vector: Vector) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in vector))
