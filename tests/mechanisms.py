"""Parts of mechanisms that a user wrote."""

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import dp_accounting as dp
import numpy as np

from dp_transformers.mechanism.clipping_functions import ClippingFunction, FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism
from dp_transformers.mechanism.noise import IndependentNoise, Noise
from dp_transformers.mechanism.sampling import PoissonSampling, Sampling


def flat_mechanism(sampling, sigma, steps, **changes):
    """Flat clipping and independent noise."""
    return Mechanism(
        sampling=sampling, clipping=FlatClipping(1.0), noise=IndependentNoise(sigma), steps=steps, **changes
    )


def taken(sampling, steps, seed=0, first_step=0):
    """(steps, N): who takes part."""
    draws = itertools.islice(sampling.draws(np.random.default_rng(seed), first_step), steps)
    rows = np.zeros((steps, sampling.num_examples), bool)
    for row, indices in zip(rows, draws, strict=True):
        assert len(set(indices.tolist())) == len(indices)
        row[indices] = True
    return rows


@dataclass(frozen=True)
class EverybodyInTurn(Sampling):
    """Disjoint batches in a fixed order: every ``num_examples / expected_batch_size`` steps each example takes part
    once."""

    kind: ClassVar[str] = "in turn"
    num_examples: int
    expected_batch_size: int

    @property
    def min_separation(self):
        return self.num_examples // self.expected_batch_size

    def draws(self, generator, first_step):
        order = generator.permutation(self.num_examples).reshape(self.min_separation, -1)
        for step in itertools.count(first_step):
            yield order[step % self.min_separation]

    def event(self, steps):
        rounds = [(step, math.ceil(count / self.min_separation)) for step, count in steps]
        return dp.ComposedDpEvent(
            [dp.SelfComposedDpEvent(dp.GaussianDpEvent(s.noise_multiplier), n) for s, n in rounds]
        )


@dataclass(frozen=True)
class Capped(Sampling):
    """Poisson draws of which at most ``cap`` examples are kept."""

    kind: ClassVar[str] = "capped"
    relation: ClassVar[str] = "replace_special"
    num_examples: int
    expected_batch_size: int
    cap: int

    def draws(self, generator, first_step):
        while True:
            size = min(generator.binomial(self.num_examples, self.sample_rate), self.cap)
            yield generator.choice(self.num_examples, size, replace=False)

    def event(self, steps):
        make = dp.dp_event.TruncatedSubsampledGaussianDpEvent
        return dp.ComposedDpEvent(
            [dp.SelfComposedDpEvent(make(self.num_examples, s.sample_rate, self.cap, s.noise_multiplier), n) for s, n in steps],
        )  # fmt: skip


@dataclass(frozen=True)
class GrowingBatches(PoissonSampling):
    """The expected batch size doubles after ``double_at`` steps."""

    kind: ClassVar[str] = "growing"
    double_at: int

    def at(self, step):
        factor = 1 if step < self.double_at else 2
        return factor * self.sample_rate, factor * self.expected_batch_size


@dataclass(frozen=True)
class Automatic(ClippingFunction):
    """C / (norm + γ), Bu et al. 2023 (arXiv 2206.07136)."""

    kind: ClassVar[str] = "automatic"
    bound: float
    gamma: float = 0.01

    @property
    def sensitivity(self):
        return self.bound

    def coefficients(self, norms_b):
        return self.bound / (norms_b + self.gamma)


@dataclass(frozen=True)
class Halving(IndependentNoise):
    """σ halves after every ``every`` steps."""

    kind: ClassVar[str] = "halving"
    every: int

    def at(self, step):
        return self.noise_multiplier / 2 ** (step // self.every)


@dataclass(frozen=True)
class OverTwoSteps(Noise):
    """z_t - λ z_(t-1): any two neighbouring steps share a z."""

    kind: ClassVar[str] = "over two steps"
    noise_multiplier: float
    bands: ClassVar[int] = 2


@dataclass(frozen=True)
class Shifting(Noise):
    """No noise: every coordinate moves by the standard deviation."""

    kind: ClassVar[str] = "shifting"
    noise_multiplier: float

    def source(self, clipper, *, dp_seed=None, secure=False):
        class Source:
            def add_(self, grads, std):
                for grad in grads:
                    grad.add_(std)

        return Source()
