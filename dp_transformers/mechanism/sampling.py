"""Sampling schemes as values, and the batch sampler that draws from one. Free of torch.

To write a scheme of your own, derive a frozen dataclass from :class:`Sampling`. Its fields are public,
:meth:`Sampling.draws` draws the examples of each step, and :meth:`Sampling.event` says what the steps cost.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .accounting.events import MOVED_BY_ONE, event_epsilon
from .keystream import secure_generator
from .schedules import Schedule
from .values import StepParameters, Value

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_STREAM = 0xD2A3D2A3  # separates the random numbers of draws from others derived from the same secret
FREE = 0.001  # a cap is called free if it raises epsilon by at most this share


def steps_per_epoch(num_examples: int, expected_batch_size: float) -> int:
    """Return the mean number of steps in one pass over the data: N / expected batch size, rounded, at least 1."""
    return max(1, round(num_examples / expected_batch_size))


def steps_of_epochs(epochs: float, num_examples: int, expected_batch_size: float) -> int:
    """Return the number of steps in ``epochs`` passes over the data, rounded up."""
    return math.ceil(epochs * steps_per_epoch(num_examples, expected_batch_size))


class Sampling(Value):
    """A rule by which each step chooses its examples. Secrets are arguments of :meth:`draws`, never fields.

    Attributes:
        num_examples: N.
        expected_batch_size: Expected number of examples in a draw, over all processes.
        min_separation: The least number of steps between two steps that may contain the same example; 1 if any step
            may. Noise correlated over b steps needs b. It is 1 too where an example's steps are themselves random (one
            step of each epoch, for instance), because noise shared by these steps would not hide which of them it was.
        largest_draw: Largest number of examples in a draw, over all processes; None if a draw may hold all data.
        relation: The neighbouring relation of :meth:`event`: "add_or_remove_one", "replace_special" (one example
            becomes a null example, and N is public) or "replace_one".
    """

    num_examples: int
    expected_batch_size: float
    min_separation: ClassVar[int] = 1
    largest_draw: ClassVar[int | None] = None
    relation: ClassVar[str] = "add_or_remove_one"

    @property
    def sample_rate(self) -> float:
        """The probability that a step contains a given example."""
        return self.expected_batch_size / self.num_examples

    @property
    def needs_every_draw(self) -> bool:
        """True if :meth:`event` holds only for consecutive draws, with none skipped."""
        return self.min_separation > 1

    def at(self, step: int) -> tuple[float, float]:
        """Return the sample rate and the expected batch size of a step, counted from 0. A scheme that changes over
        the steps overrides this."""
        return self.sample_rate, self.expected_batch_size

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        """Yield, without end, the (draw size,) integer indices of each step from ``first_step`` on. ``generator`` must
        be secret."""
        raise NotImplementedError

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        """Return the event of consecutive steps, given as (parameters, number of steps with these), in any order.

        Each step has independent Gaussian noise. In a step of sample rate 1, every eligible example takes part.
        """
        raise NotImplementedError

    @property
    def is_bounded_by_all(self) -> bool:
        """True if :meth:`event` is known to be Gaussian steps, Poisson-sampled or full, under a relation for which
        both accountants of this library have a bound."""
        return self.relation in MOVED_BY_ONE and type(self).event in _GAUSSIAN_EVENTS

    def warning(self, noise_multiplier: float, steps: int, delta: float) -> str | None:
        """Return a warning about the cost of ``steps`` steps, if they cost more than they should."""
        return None


@dataclass(frozen=True)
class PoissonSampling(Sampling):
    """Every step takes every example independently with probability ``expected_batch_size / num_examples``.

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
        return _poisson_draws(self, generator, first_step, largest=self.num_examples)

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        import dp_accounting as dp

        return _composed(
            steps, lambda step: dp.PoissonSampledDpEvent(step.sample_rate, dp.GaussianDpEvent(step.noise_multiplier))
        )


def _poisson_draws(
    sampling: Sampling, generator: np.random.Generator, first_step: int, largest: int
) -> Iterator[np.ndarray]:
    """Draw a size from Binomial(N, q), at most ``largest``, then that many distinct indices: without a cap, this is
    the distribution of independent coin flips."""
    for step in itertools.count(first_step):
        size = min(int(generator.binomial(sampling.num_examples, sampling.at(step)[0])), largest)
        yield generator.choice(sampling.num_examples, size, replace=False, shuffle=False)


def _composed(steps: Iterable[tuple[StepParameters, int]], event_of: Callable[[StepParameters], Any]) -> DpEvent:
    """Compose the event of each kind of step as often as it was taken."""
    import dp_accounting as dp

    return dp.ComposedDpEvent([dp.SelfComposedDpEvent(event_of(step), count) for step, count in steps])


@dataclass(frozen=True)
class ScheduledPoissonSampling(PoissonSampling):
    """Poisson sampling with an expected batch size, and so a sample rate, that follows a schedule: step t expects
    ``expected_batch_size * schedule.at(t)`` examples.

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


@dataclass(frozen=True)
class TruncatedPoissonSampling(Sampling):
    """Poisson draws cut to a random subset of at most ``cap`` examples, so that each draw fits into one batch of a
    fixed size. The sum is still divided by ``expected_batch_size``.

    A large cap is free (:meth:`with_free_cap`). A small cap costs privacy, because an example that is kept displaces
    another one (Ganesh 2025, arXiv 2508.15089; the bound is dp_accounting's). How often this happens depends on N, so
    N is public, and neighbouring data sets replace an example instead of adding or removing one.

    Attributes:
        cap: The largest number of examples in a draw.
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
        """Find, by bisection, the smallest cap that raises ε of ``steps`` steps by at most 0.1%."""

        def is_free(cap: int) -> bool:
            return cls(num_examples, expected_batch_size, cap, relation).excess(noise_multiplier, steps, delta) <= FREE

        lowest = math.ceil(expected_batch_size)
        highest = min(num_examples, lowest + math.ceil(9 * math.sqrt(expected_batch_size)) + 30)
        cap = lowest + bisect_left(range(lowest, highest), True, key=is_free)
        return cls(num_examples, expected_batch_size, cap, relation)

    def excess(self, noise_multiplier: float, steps: int, delta: float) -> float:
        """Return the share by which the cap raises ε of ``steps`` steps."""
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
        return _poisson_draws(self, generator, first_step, largest=self.cap)

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        import dp_accounting as dp

        def event_of(step: StepParameters) -> DpEvent:
            return dp.TruncatedSubsampledGaussianDpEvent(
                self.num_examples, step.sample_rate, self.cap, step.noise_multiplier
            )

        return _composed(steps, event_of)


@functools.lru_cache(maxsize=64)
def _epsilon(sampling: Sampling, noise_multiplier: float, steps: int, delta: float) -> float:
    parameters = StepParameters(sampling.sample_rate, sampling.expected_batch_size, noise_multiplier, 1.0)
    return event_epsilon(sampling.event([(parameters, steps)]), delta, relation=sampling.relation)


@dataclass(frozen=True)
class CyclicPoissonSampling(Sampling):
    """Poisson sampling from groups that take turns: each example is put into one of ``min_separation`` groups, chosen
    uniformly and independently, and a step draws each example of its group independently with one probability.

    The cost is that of Poisson sampling from one group for its number of turns, with independent noise and with noise
    correlated over at most ``min_separation`` steps.

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
        """The probability that a step of an example's group contains it."""
        return self.expected_batch_size * self.min_separation / self.num_examples

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        groups = generator.integers(self.min_separation, size=self.num_examples)
        members = [np.flatnonzero(groups == group) for group in range(self.min_separation)]
        for step in itertools.count(first_step):
            eligible = members[step % self.min_separation]
            yield eligible[generator.random(len(eligible)) < self.rate_in_group]

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        """Return the event of the turns of one group, where membership is public."""
        import dp_accounting as dp

        turns, worst = _turns(steps, self.min_separation)
        rate = min(1.0, worst.sample_rate * self.min_separation)
        return dp.SelfComposedDpEvent(
            dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(worst.noise_multiplier)), turns
        )


@dataclass(frozen=True)
class _OncePerPass(Sampling):
    """Base of schemes in which an example takes part in exactly one step of every pass of ``steps_per_pass`` steps."""

    num_examples: int  # pyrefly: ignore[bad-override]  (frozen here, and nobody assigns to it in the base)
    steps_per_pass: int

    def __post_init__(self) -> None:
        if not isinstance(self.steps_per_pass, int) or not 1 <= self.steps_per_pass <= self.num_examples:
            raise ValueError(
                f"steps_per_pass must be an int from 1 to num_examples={self.num_examples}, got "
                f"{self.steps_per_pass!r}: an expected batch has num_examples / steps_per_pass examples."
            )

    @property
    def expected_batch_size(self) -> float:  # pyrefly: ignore[bad-override]
        return self.num_examples / self.steps_per_pass

    @property
    def needs_every_draw(self) -> bool:
        return True

    def _bins(self, generator: np.random.Generator) -> list[np.ndarray]:
        """Put each example into one of ``steps_per_pass`` bins, uniformly and independently."""
        chosen = generator.integers(self.steps_per_pass, size=self.num_examples)
        counts = np.bincount(chosen, minlength=self.steps_per_pass)
        return np.split(np.argsort(chosen, kind="stable"), np.cumsum(counts)[:-1])


@dataclass(frozen=True)
class RandomAllocationSampling(_OncePerPass):
    """In every pass of ``steps_per_pass`` steps, each example takes part in exactly one step, chosen uniformly and
    independently of other examples and passes. No example waits as long as under Poisson sampling, and ε is smaller.

    ``accounting.allocation`` has the bound. A run of any length is accounted for in whole passes.

    Example::

        >>> from dp_transformers import FlatClipping, IndependentNoise, Mechanism, PoissonSampling
        >>> from dp_transformers import RandomAllocationSampling
        >>> rest = {"clipping": FlatClipping(1.0), "noise": IndependentNoise(1.0), "steps": 300}
        >>> allocation, poisson = RandomAllocationSampling(60_000, 100), PoissonSampling(60_000, 600)
        >>> [round(Mechanism(sampling=s, **rest).epsilon(1e-5), 2) for s in (allocation, poisson)]
        [0.95, 1.07]
    """

    kind: ClassVar[str] = "random_allocation"

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        """Yield the draws of one pass after the other. The first draw starts a pass, whatever its step."""
        while True:
            yield from self._bins(generator)

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        import dp_accounting as dp

        from .accounting.allocation import RandomAllocationDpEvent

        passes, worst = _turns(steps, self.steps_per_pass)
        one = RandomAllocationDpEvent(dp.GaussianDpEvent(worst.noise_multiplier), self.steps_per_pass)
        return dp.SelfComposedDpEvent(one, passes)


@dataclass(frozen=True)
class BallsInBinsSampling(_OncePerPass):
    """Each example is put into one of ``steps_per_pass`` bins once, uniformly and independently, and bins take turns:
    an example takes part in the same step of every pass.

    It costs far more than :class:`RandomAllocationSampling`, which chooses again in every pass: as much as one
    allocation with noise smaller by the root of the number of passes (``accounting.allocation``). This bound does not
    cover noise correlated over steps. For such noise take ``CyclicPoissonSampling`` with as many groups as a pass has
    steps: it draws in the same way, and its accounting does not use that the bin is secret.

    Example::

        >>> from dp_transformers import BallsInBinsSampling, FlatClipping, IndependentNoise, Mechanism
        >>> sampling = BallsInBinsSampling(60_000, 100)
        >>> rest = {"clipping": FlatClipping(1.0), "noise": IndependentNoise(1.0)}
        >>> [round(Mechanism(sampling=sampling, steps=steps, **rest).epsilon(1e-5), 2) for steps in (100, 300)]
        [0.62, 3.8]
    """

    kind: ClassVar[str] = "balls_in_bins"

    def draws(self, generator: np.random.Generator, first_step: int) -> Iterator[np.ndarray]:
        bins = self._bins(generator)
        for step in itertools.count(first_step):
            yield bins[step % self.steps_per_pass]

    def event(self, steps: Iterable[tuple[StepParameters, int]]) -> DpEvent:
        import dp_accounting as dp

        from .accounting.allocation import RandomAllocationDpEvent

        passes, worst = _turns(steps, self.steps_per_pass)
        gaussian = dp.GaussianDpEvent(worst.noise_multiplier / math.sqrt(passes))
        return RandomAllocationDpEvent(gaussian, self.steps_per_pass)


@dataclass(frozen=True)
class FixedOrderSampling(Sampling):
    """Examples are shuffled once and cut into batches of exactly ``expected_batch_size``, which take turns. Examples
    left over after the last whole batch are never used.

    There is no amplification by sampling: an example's appearances cost what so many full Gaussian steps cost, in
    closed form. Neighbouring data sets replace an example by a null example, since adding one would move all others.

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
    """Return the largest number of steps that may contain one example, and parameters that cost at least as much as
    those of any step."""
    parameters, counts = zip(*steps, strict=True)
    rates, batches, sigmas, bounds = zip(*parameters, strict=True)
    return math.ceil(sum(counts) / separation), StepParameters(max(rates), max(batches), min(sigmas), max(bounds))


_GAUSSIAN_EVENTS = (PoissonSampling.event, CyclicPoissonSampling.event, FixedOrderSampling.event)


@dataclass(frozen=True)
class Draw:
    """The examples of one step on one rank.

    Attributes:
        number: Count of the sampler's draws from 0; it never repeats.
        indices: Indices of the examples in the training data.
        starts_pass: True for the first draw of a pass over the data.
        step: The training step, counted from 0.
    """

    number: int
    indices: Sequence[int]
    starts_pass: bool = False
    step: int = 0


class DrawSampler:
    """A batch sampler: each iteration yields ``steps_per_epoch`` new draws, as one-item batches of :class:`Draw`.

    All ranks hold the same ``secret`` and draw the same global sample. Each takes every ``world_size``-th index of it,
    so their counts differ by at most one and no communication is needed. Draws never repeat, not even over epochs.

    Args:
        sampling: The scheme.
        steps_per_epoch: Draws in an epoch (:func:`steps_per_epoch` is usual).
        secret: Seed of the draws, from :func:`dp_transformers.runtime.distributed.shared_secret`. It is never written.
        rank, world_size: This process among those that share the secret.
        first_step: The training step of the first draw.
        skipped: Number of draws that the loop skips at the start. The draws are restarted after them, so that a pass
            begins with the first draw that is used.
        ended: True if there is nothing left to draw.
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
        self._restart_at(first_step)

    @property
    def largest_draw(self) -> int | None:
        """Largest number of examples in a draw on one rank; None if there is no bound."""
        largest = self.sampling.largest_draw
        return None if largest is None else math.ceil(largest / self.world_size)

    def start_at(self, step: int) -> None:
        """Let the next draw be the draw of this step.

        Raises:
            ValueError: draws were taken already, and examples take turns in them.
        """
        if self._has_drawn and self.sampling.needs_every_draw:
            raise ValueError(
                f"draws of sampling {self.sampling.kind!r} were taken already, in which examples take turns, and "
                "epsilon covers draws that continue from them. Make another loader to start again."
            )
        self._restart_at(step)

    def _restart_at(self, step: int) -> None:
        self._step, self._draws = itertools.count(step), self.sampling.draws(self._generator, step)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[list[Draw]]:
        for position in range(0 if self.ended else self.steps_per_epoch):
            draw = replace(self.draw(), starts_pass=position == 0, step=next(self._step))
            if draw.number + 1 == self._skipped:
                self._restart_at(draw.step + 1)
            yield [draw]

    def draw(self) -> Draw:
        """Return this rank's share of the next draw, without its step."""
        self._has_drawn = True
        return Draw(next(self._number), next(self._draws)[self.rank :: self.world_size].tolist())
