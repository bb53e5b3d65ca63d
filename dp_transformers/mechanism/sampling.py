"""How steps choose examples: sampling schemes as values, and the batch sampler that draws from one. Free of torch.

A scheme of your own is a frozen dataclass derived from :class:`Sampling`: what is public about it are its fields, how
it draws is :meth:`Sampling.draws`, and what it costs is :meth:`Sampling.event`.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .accounting.events import event_epsilon
from .keystream import secure_generator
from .schedules import Schedule
from .values import StepParameters, Value

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_STREAM = 0xD2A3D2A3  # tells the numbers of draws from others that are made of the same secret
FREE = 0.001  # what a cap may cost, as a share of epsilon, to be called free


def steps_per_epoch(num_examples: int, expected_batch_size: float) -> int:
    """The number of steps in one pass over the data, on average: N over the expected batch size, rounded, and at least
    1."""
    return max(1, round(num_examples / expected_batch_size))


def steps_of_epochs(epochs: float, num_examples: int, expected_batch_size: float) -> int:
    """The number of steps of so many passes, rounded up."""
    return math.ceil(epochs * steps_per_epoch(num_examples, expected_batch_size))


class Sampling(Value):
    """Which examples take part in a step. Secrets are arguments, never fields.

    Attributes:
        num_examples: N.
        expected_batch_size: The expected size of a draw, over all processes.
        min_separation: Number of steps, at least, between two steps in which one example may take part, where chance
            decides at most whether it does; 1 where it may take part in any step. Noise that is correlated over b
            steps needs b. An example whose steps themselves are random (one of each epoch, or any but those just
            after its last) has 1: steps that share noise hide less which of them it was.
        largest_draw: The largest size of a draw, over all processes; None where draws may be as large as the data.
        relation: Which data sets are neighbours in :meth:`event`: "add_or_remove_one", "replace_special" (one example
            becomes a null one, and N is public) or "replace_one".
    """

    num_examples: int
    expected_batch_size: float
    min_separation: ClassVar[int] = 1
    largest_draw: ClassVar[int | None] = None
    relation: ClassVar[str] = "add_or_remove_one"

    @property
    def sample_rate(self) -> float:
        """The probability with which an example takes part in a step."""
        return self.expected_batch_size / self.num_examples

    @property
    def needs_every_draw(self) -> bool:
        """Whether :meth:`event` holds for draws that follow each other alone, none of which is left out."""
        return self.min_separation > 1

    def at(self, step: int) -> tuple[float, float]:
        """The sample rate and the expected batch size of a step, counted from 0; a scheme that changes on the way
        overrides this."""
        return self.sample_rate, self.expected_batch_size

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        """The indices of the examples of each step from ``first_step`` on, without end, from a generator that only the
        training knows."""
        raise NotImplementedError

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        """The event of steps that follow each other, in any order: which parameters were used, and in how many of
        them.

        The noise of each step is Gaussian and independent of that of all others. In a step of sample rate 1 every
        example takes part that may.
        """
        raise NotImplementedError

    def warning(self, noise_multiplier: float, steps: int, delta: float) -> str | None:
        """What whoever starts so many steps should know of what they cost, if there is anything."""
        return None


@dataclass(frozen=True)
class PoissonSampling(Sampling):
    """Every step takes every example independently with probability ``expected_batch_size / num_examples``, whatever
    was taken before.

    Example::

        >>> from dp_transformers import PoissonSampling
        >>> PoissonSampling(num_examples=60_000, expected_batch_size=300).sample_rate
        0.005
    """

    kind: ClassVar[str] = "poisson"
    num_examples: int  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to them in the base)
    expected_batch_size: float  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        if not 0 < self.expected_batch_size <= self.num_examples:
            raise ValueError(
                f"expected_batch_size must be above 0 and at most num_examples={self.num_examples}, got "
                f"{self.expected_batch_size}: it over num_examples is the sample_rate."
            )

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        """A sample size from Binomial(N, q), then that many distinct indices, which is how independent coins fall."""
        while True:
            size = int(generator.binomial(self.num_examples, self.sample_rate))
            yield generator.choice(self.num_examples, size, replace=False, shuffle=False)

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        import dp_accounting as dp

        return dp.ComposedDpEvent(
            [
                dp.SelfComposedDpEvent(
                    dp.PoissonSampledDpEvent(step.sample_rate, dp.GaussianDpEvent(step.noise_multiplier)), count
                )
                for step, count in steps
            ]
        )


@dataclass(frozen=True)
class ScheduledPoissonSampling(PoissonSampling):
    """Poisson sampling of which the expected batch size in each step, and so the rate, is ``expected_batch_size``
    times what the schedule says.

    Example::

        >>> from dp_transformers import ScheduledPoissonSampling, StepSchedule
        >>> ScheduledPoissonSampling(60_000, 300, StepSchedule(2.0, every=100)).at(100)
        (0.01, 600.0)
    """

    kind: ClassVar[str] = "scheduled_poisson"
    schedule: Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "schedule", Schedule.read(self.schedule))

    def at(self, step: int) -> tuple[float, float]:
        expected = self.expected_batch_size * self.schedule.at(step)
        if not 0 < expected <= self.num_examples:
            raise ValueError(
                f"{self.schedule} makes the expected batch size {expected:g} in step {step}, which must be above 0 "
                f"and at most num_examples={self.num_examples}: let the schedule end earlier."
            )
        return expected / self.num_examples, expected

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        for step in itertools.count(first_step):
            size = int(generator.binomial(self.num_examples, self.at(step)[0]))
            yield generator.choice(self.num_examples, size, replace=False, shuffle=False)


@dataclass(frozen=True)
class TruncatedPoissonSampling(Sampling):
    """Poisson draws of which at most ``cap`` examples are kept, a uniformly random subset of them, so that each draw
    fits into one batch of a fixed size. The sum is divided by ``expected_batch_size`` all the same.

    A large cap is free (:meth:`with_free_cap`), and a small one is not: an example that is kept takes the place of
    another one, which is seen in what that one does not add (Ganesh 2025, arXiv 2508.15089, whose bound dp_accounting
    has). How often that happens depends on N, so N is public: neighbours make an example a null one, or replace it by
    another, and none is added or removed.

    Attributes:
        cap: The largest draw.
        relation: "replace_special" or "replace_one".

    Example::

        >>> from dp_transformers import TruncatedPoissonSampling
        >>> sampling = TruncatedPoissonSampling.with_free_cap(
        ...     10_000, 500, noise_multiplier=2.0, steps=500, delta=1e-5
        ... )
        >>> sampling.cap, sampling.relation
        (585, 'replace_special')
    """

    kind: ClassVar[str] = "truncated_poisson"
    num_examples: int  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to them in the base)
    expected_batch_size: float  # pyrefly: ignore[bad-override]
    cap: int
    relation: str = "replace_special"  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        PoissonSampling(self.num_examples, self.expected_batch_size)  # refuses what no Poisson draw is
        if not isinstance(self.cap, int) or not 0 < self.cap <= self.num_examples:
            raise ValueError(
                f"cap is the size of the largest draw: an int from 1 to num_examples={self.num_examples}, got "
                f"{self.cap!r}. TruncatedPoissonSampling.with_free_cap finds one that costs nothing."
            )
        if self.relation not in ("replace_special", "replace_one"):
            raise ValueError(
                f"relation {self.relation!r} has no bound where draws have a cap, by which draws depend on N: "
                "take 'replace_special' or 'replace_one', for which N is public, or PoissonSampling."
            )

    @property
    def largest_draw(self) -> int:  # pyrefly: ignore[bad-override]
        return self.cap

    @classmethod
    def with_free_cap(
        cls,
        num_examples: int,
        expected_batch_size: float,
        *,
        noise_multiplier: float,
        steps: int,
        delta: float,
        relation: str = "replace_special",
    ) -> TruncatedPoissonSampling:
        """The smallest cap with which so many steps spend at most 0.1% more than without one, found by bisection."""

        def is_free(cap: int) -> bool:
            return cls(num_examples, expected_batch_size, cap, relation).excess(noise_multiplier, steps, delta) <= FREE

        lowest = math.ceil(expected_batch_size)
        highest = min(num_examples, lowest + math.ceil(9 * math.sqrt(expected_batch_size)) + 30)
        cap = lowest + bisect_left(range(lowest, highest), True, key=is_free)
        return cls(num_examples, expected_batch_size, cap, relation)

    def excess(self, noise_multiplier: float, steps: int, delta: float) -> float:
        """By which share ε of so many steps is larger than without a cap."""
        uncapped = _epsilon(replace(self, cap=self.num_examples), noise_multiplier, steps, delta)
        return _epsilon(self, noise_multiplier, steps, delta) / uncapped - 1 if 0 < uncapped < math.inf else 0.0

    def warning(self, noise_multiplier: float, steps: int, delta: float) -> str | None:
        if (excess := self.excess(noise_multiplier, steps, delta)) <= 0.05:
            return None
        return (
            f"the cap of {self.cap} examples on a draw makes epsilon {100 * excess:.3g}% larger than without one: "
            "take a larger one (TruncatedPoissonSampling.with_free_cap finds the smallest that costs nothing)."
        )

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        """The size of a Poisson draw or the cap, then that many distinct indices."""
        while True:
            size = min(int(generator.binomial(self.num_examples, self.sample_rate)), self.cap)
            yield generator.choice(self.num_examples, size, replace=False, shuffle=False)

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        import dp_accounting as dp

        return dp.ComposedDpEvent(
            [
                dp.SelfComposedDpEvent(
                    dp.TruncatedSubsampledGaussianDpEvent(
                        self.num_examples, step.sample_rate, self.cap, step.noise_multiplier
                    ),
                    count,
                )
                for step, count in steps
            ]
        )


@functools.lru_cache(maxsize=64)
def _epsilon(sampling: Sampling, noise_multiplier: float, steps: int, delta: float) -> float:
    parameters = StepParameters(sampling.sample_rate, sampling.expected_batch_size, noise_multiplier, 1.0)
    return event_epsilon(sampling.event([(parameters, steps)]), delta, relation=sampling.relation)


@dataclass(frozen=True)
class CyclicPoissonSampling(Sampling):
    """Every example is in one of ``min_separation`` groups, chosen uniformly and independently of others, and groups
    take turns: a step draws each example of its group independently with the same probability.

    It costs what Poisson sampling from one group costs for the number of turns, with independent noise and with noise
    that has no more bands than there are groups.

    Example::

        >>> from dp_transformers import CyclicPoissonSampling
        >>> CyclicPoissonSampling(60_000, 300, min_separation=16).rate_in_group
        0.08
    """

    kind: ClassVar[str] = "cyclic_poisson"
    num_examples: int  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to them in the base)
    expected_batch_size: float  # pyrefly: ignore[bad-override]
    min_separation: int  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        if not isinstance(self.min_separation, int) or self.min_separation < 1:
            raise ValueError(f"min_separation must be an int of at least 1, got {self.min_separation!r}.")
        if not 0 < self.expected_batch_size * self.min_separation <= self.num_examples:
            raise ValueError(
                f"each of min_separation={self.min_separation} groups has {self.num_examples} / {self.min_separation} "
                f"examples on average, so expected_batch_size must be above 0 and at most that, got "
                f"{self.expected_batch_size}. Take a smaller batch, or fewer groups."
            )

    @property
    def rate_in_group(self) -> float:
        """The probability with which an example takes part in a step of its group."""
        return self.expected_batch_size * self.min_separation / self.num_examples

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        groups = generator.integers(self.min_separation, size=self.num_examples)
        members = [np.flatnonzero(groups == group) for group in range(self.min_separation)]
        for step in itertools.count(first_step):
            eligible = members[step % self.min_separation]
            yield eligible[generator.random(len(eligible)) < self.rate_in_group]

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        """That of the turns of one group, which are public here."""
        import dp_accounting as dp

        turns, worst = _turns(steps, self.min_separation)
        rate = min(1.0, worst.sample_rate * self.min_separation)
        return dp.SelfComposedDpEvent(
            dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(worst.noise_multiplier)), turns
        )


@dataclass(frozen=True)
class RandomAllocationSampling(Sampling):
    """In every pass of ``steps_per_pass`` steps each example takes part in just one of them, chosen uniformly and
    independently of other examples and passes. Nobody is left out for long, as by Poisson draws, and ε is smaller.

    The bound is that of ``accounting.allocation``. A run of any length is accounted for in whole passes.

    Example::

        >>> from dp_transformers import FlatClipping, IndependentNoise, Mechanism, PoissonSampling
        >>> from dp_transformers import RandomAllocationSampling
        >>> rest = {"clipping": FlatClipping(1.0), "noise": IndependentNoise(1.0), "steps": 300}
        >>> allocation, poisson = RandomAllocationSampling(60_000, 100), PoissonSampling(60_000, 600)
        >>> [round(Mechanism(sampling=s, **rest).epsilon(1e-5), 2) for s in (allocation, poisson)]
        [0.95, 1.07]
    """

    kind: ClassVar[str] = "random_allocation"
    num_examples: int  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to it in the base)
    steps_per_pass: int

    def __post_init__(self) -> None:
        _check_pass(self.num_examples, self.steps_per_pass)

    @property
    def expected_batch_size(self) -> float:  # pyrefly: ignore[bad-override]
        return self.num_examples / self.steps_per_pass

    @property
    def needs_every_draw(self) -> bool:
        return True

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        """Passes begin with the first of these draws, whatever its step."""
        while True:
            yield from _bins(generator, self.num_examples, self.steps_per_pass)

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        import dp_accounting as dp

        from .accounting.allocation import RandomAllocationDpEvent

        passes, worst = _turns(steps, self.steps_per_pass)
        one = RandomAllocationDpEvent(dp.GaussianDpEvent(worst.noise_multiplier), self.steps_per_pass)
        return dp.SelfComposedDpEvent(one, passes)


@dataclass(frozen=True)
class BallsInBinsSampling(Sampling):
    """Each example is in one of ``steps_per_pass`` bins, chosen once, uniformly and independently of others, and bins
    take turns: an example takes part in the same step of every pass.

    It costs far more than :class:`RandomAllocationSampling`, which chooses anew in every pass: one allocation with
    noise that is smaller by the root of the number of passes (``accounting.allocation``). For noise that is correlated
    over steps there is no bound with this gain; ``CyclicPoissonSampling`` with as many groups as there are steps in a
    pass draws just so, and is accounted for without it.

    Example::

        >>> from dp_transformers import BallsInBinsSampling, FlatClipping, IndependentNoise, Mechanism
        >>> sampling = BallsInBinsSampling(60_000, 100)
        >>> rest = {"clipping": FlatClipping(1.0), "noise": IndependentNoise(1.0)}
        >>> [round(Mechanism(sampling=sampling, steps=steps, **rest).epsilon(1e-5), 2) for steps in (100, 300)]
        [0.62, 3.8]
    """

    kind: ClassVar[str] = "balls_in_bins"
    num_examples: int  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to it in the base)
    steps_per_pass: int

    def __post_init__(self) -> None:
        _check_pass(self.num_examples, self.steps_per_pass)

    @property
    def expected_batch_size(self) -> float:  # pyrefly: ignore[bad-override]
        return self.num_examples / self.steps_per_pass

    @property
    def needs_every_draw(self) -> bool:
        return True

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        bins = _bins(generator, self.num_examples, self.steps_per_pass)
        for step in itertools.count(first_step):
            yield bins[step % self.steps_per_pass]

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        import dp_accounting as dp

        from .accounting.allocation import RandomAllocationDpEvent

        passes, worst = _turns(steps, self.steps_per_pass)
        gaussian = dp.GaussianDpEvent(worst.noise_multiplier / math.sqrt(passes))
        return RandomAllocationDpEvent(gaussian, self.steps_per_pass)


def _check_pass(num_examples: int, steps_per_pass: int) -> None:
    if not isinstance(steps_per_pass, int) or not 1 <= steps_per_pass <= num_examples:
        raise ValueError(
            f"steps_per_pass must be an int from 1 to num_examples={num_examples}, got {steps_per_pass!r}: an "
            "expected batch has num_examples / steps_per_pass examples."
        )


def _bins(generator: np.random.Generator, num_examples: int, count: int) -> list[np.ndarray]:
    """Each example in one of so many bins, uniformly and independently of others."""
    chosen = generator.integers(count, size=num_examples)
    return np.split(np.argsort(chosen, kind="stable"), np.cumsum(np.bincount(chosen, minlength=count))[:-1])


@dataclass(frozen=True)
class FixedOrderSampling(Sampling):
    """Examples are shuffled once and cut into batches of just ``expected_batch_size``, which take turns. Those that
    fill no whole batch take no part.

    All batches have one size, and nothing is gained by not knowing who is in which: an example's appearances are
    released as Gaussian sums, by the closed form. Neighbours make an example a null one, since adding one would move
    all others.

    Example::

        >>> from dp_transformers import FixedOrderSampling
        >>> FixedOrderSampling(60_000, 256).min_separation
        234
    """

    kind: ClassVar[str] = "fixed_order"
    relation: ClassVar[str] = "replace_special"
    num_examples: int  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to them in the base)
    expected_batch_size: int  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        size = self.expected_batch_size
        if not isinstance(size, int) or not 0 < size <= self.num_examples:
            raise ValueError(
                f"expected_batch_size is the size of every batch of FixedOrderSampling: an int from 1 to "
                f"num_examples={self.num_examples}, got {size!r}."
            )

    @property
    def min_separation(self) -> int:  # pyrefly: ignore[bad-override]
        return self.num_examples // self.expected_batch_size

    @property
    def largest_draw(self) -> int:  # pyrefly: ignore[bad-override]
        return self.expected_batch_size

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        order = generator.permutation(self.num_examples)
        batches = order[: self.min_separation * self.expected_batch_size].reshape(self.min_separation, -1)
        for step in itertools.count(first_step):
            yield batches[step % self.min_separation]

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        import dp_accounting as dp

        turns, worst = _turns(steps, self.min_separation)
        return dp.SelfComposedDpEvent(dp.GaussianDpEvent(worst.noise_multiplier), turns)


def _turns(steps: Iterable[tuple[StepParameters, int]], separation: int) -> tuple[int, StepParameters]:
    """In how many of the steps one example may take part, and parameters that cost no less than those of any."""
    parameters, counts = zip(*steps, strict=True)
    rates, batches, sigmas, bounds = zip(*parameters, strict=True)
    return math.ceil(sum(counts) / separation), StepParameters(max(rates), max(batches), min(sigmas), max(bounds))


@dataclass(frozen=True)
class Draw:
    """The examples that one rank has to process in one step.

    Attributes:
        number: Grows with every draw of a sampler and never repeats.
        starts_pass: It is the first of a pass.
        step: The step of the training that it is for, counted from 0.
    """

    number: int
    indices: Sequence[int]
    starts_pass: bool = False
    step: int = 0


class DrawSampler:
    """A batch sampler: each iteration yields ``steps_per_epoch`` fresh draws, one-item batches of type :class:`Draw`.

    All ranks hold the same ``secret`` and draw the same global sample; each takes every ``world_size``-th index of it,
    so counts differ by at most one and no communication is needed. Draws of one sampler never repeat, over epochs too.

    Args:
        sampling: The scheme.
        steps_per_epoch: How many draws count as an epoch (:func:`steps_per_epoch` is usual).
        secret: Seed of the draws, from :func:`dp_transformers.runtime.distributed.shared_secret`; never written
            anywhere.
        rank, world_size: This process among those that share the secret.
        first_step: The step that the first draw is for.
        skipped: How many of the first draws the loop skips. Those after them are draws of a new start, so that a pass
            begins with the first that is used.
        ended: All draws were taken; there are no more.
        secure: Draw from a cryptographic generator (extra ``secure``).
    """

    def __init__(
        self,
        sampling: Sampling,
        steps_per_epoch: int,
        secret: int,
        rank: int = 0,
        world_size: int = 1,
        first_step: int = 0,
        skipped: int = 0,
        ended: bool = False,
        secure: bool = False,
    ):
        self.sampling, self.steps_per_epoch = sampling, steps_per_epoch
        self.rank, self.world_size, self.ended = rank, world_size, ended
        self._skipped = skipped
        self._generator = (
            secure_generator([secret, _STREAM]) if secure else np.random.Generator(np.random.PCG64DXSM(secret))
        )
        self._number, self._has_drawn = itertools.count(), False
        self._go_on_at(first_step)

    @property
    def largest_draw(self) -> int | None:
        """The largest size of a draw on one rank; None where there is no bound."""
        largest = self.sampling.largest_draw
        return None if largest is None else math.ceil(largest / self.world_size)

    def start_at(self, step: int) -> None:
        """Let the next draw be for this step.

        Raises:
            ValueError: some draws were taken, and examples take turns in them: other turns would begin.
        """
        if self._has_drawn and self.sampling.needs_every_draw:
            raise ValueError(
                f"draws of sampling {self.sampling.kind!r} were taken already, in which examples take turns, and "
                "epsilon is that of draws that go on from them: make another loader to begin anew."
            )
        self._go_on_at(step)

    def _go_on_at(self, step: int) -> None:
        self._step, self._draws = itertools.count(step), self.sampling.draws(self._generator, step)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[list[Draw]]:
        for position in range(0 if self.ended else self.steps_per_epoch):
            draw = replace(self.draw(), starts_pass=position == 0, step=next(self._step))
            if draw.number + 1 == self._skipped:
                self._go_on_at(draw.step + 1)
            yield [draw]

    def draw(self) -> Draw:
        self._has_drawn = True
        return Draw(next(self._number), next(self._draws)[self.rank :: self.world_size].tolist())
