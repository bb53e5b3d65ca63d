"""The mechanism of a private training: everything that ε depends on, as one value. Free of torch.

In each step a :class:`~dp_transformers.mechanism.sampling.Sampling` chooses examples, a
:class:`~dp_transformers.mechanism.clipping_functions.ClippingFunction` bounds what each adds to the sum of gradients,
and a :class:`~dp_transformers.mechanism.noise.Noise` adds noise to this sum. The sampling defines the privacy event of
the steps, and the clipping function its sensitivity. Parts that do not fit together are refused at construction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from .accounting.accountants import ACCOUNTANTS, Accountant, check_accountant, known_accountants
from .accounting.calibration import largest_within, smallest_noise
from .accounting.events import event_epsilon, phases_of_groups, unsupported
from .clipping_functions import NOT_CLIPPED, ClippingFunction
from .noise import IndependentNoise, Noise
from .sampling import Sampling
from .values import StepParameters

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Steps = Mapping[StepParameters, int]  # number of steps with these parameters

NO_BOUND = "epsilon is infinite: there is no bound for so little noise"


@dataclass(frozen=True)
class PrivacyUnit:
    """The privacy unit: what is hidden by ε when it is added to the training data or removed.

    It is one row, and all rows of a person who has at most ``max_examples_per_person``. With a ``column`` of owners,
    and without that bound, it is a person: draws choose persons, and of a drawn one at most ``rows_per_step`` rows,
    whose mean gradient is clipped.

    Example::

        >>> from dp_transformers import PrivacyUnit
        >>> PrivacyUnit(max_examples_per_person=30).noun, PrivacyUnit(column="patient_id", rows_per_step=4).noun
        ('row', 'person')
    """

    max_examples_per_person: int = 1
    column: str | None = None
    rows_per_step: int = 1

    def __post_init__(self) -> None:
        for name in ("max_examples_per_person", "rows_per_step"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")
        if self.rows_per_step > 1 and not self.is_person:
            raise ValueError(
                f"{self.rows_per_step} rows of one person are clipped together only where draws choose persons: name "
                "the column of their owner, and leave max_examples_per_person out."
            )

    @classmethod
    def of(cls, max_examples_per_person: int, column: str | None, rows_per_unit: int | None) -> PrivacyUnit:
        """Return the unit that the arguments of a training say. A drawn person has 4 rows at most if they do not."""
        default = 4 if column is not None and max_examples_per_person == 1 else 1
        return cls(max_examples_per_person, column, default if rows_per_unit is None else rows_per_unit)

    @property
    def is_person(self) -> bool:
        """True if draws choose persons, so that ε is for one of them."""
        return self.column is not None and self.max_examples_per_person == 1

    @property
    def noun(self) -> str:
        """The word for what one draw chooses: "row" or "person"."""
        return "person" if self.is_person else "row"

    def __str__(self) -> str:
        return f"one person (all rows with one '{self.column}')" if self.is_person else "one row of the training data"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, without a column where there is none."""
        return {name: value for name, value in asdict(self).items() if self.column is not None or "max" in name}


@dataclass(frozen=True)
class Release:
    """A noised sum over the draw that each step releases besides the sum of gradients.

    An example adds its number minus ``center``, clipped to [-``bound``, ``bound``].

    Attributes:
        name: Name of the summed quantity. The steps of this library know "loss".
        bound: The largest absolute value that one example can add.
        noise_multiplier: Standard deviation of the Gaussian noise over ``bound``.
        center: A public constant.

    Example::

        >>> from dp_transformers import Release
        >>> Release.within("loss", 0.0, 4.0, noise_multiplier=10.0)
        Release(name='loss', bound=2.0, noise_multiplier=10.0, center=2.0)
    """

    name: str
    bound: float
    noise_multiplier: float
    center: float = 0.0

    @classmethod
    def within(cls, name: str, low: float, high: float, *, noise_multiplier: float) -> Release:
        """Return the release of a sum of numbers clipped to [low, high]. The center in the middle needs the least
        noise."""
        return cls(name, (high - low) / 2, noise_multiplier, (low + high) / 2)

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.bound

    def __post_init__(self) -> None:
        if not (0 < self.bound < math.inf and 0 < self.noise_multiplier < math.inf and math.isfinite(self.center)):
            raise ValueError(
                f"the release {self.name!r} needs a bound and a noise_multiplier that are positive and finite, and a "
                f"finite center; got {self.bound!r}, {self.noise_multiplier!r} and {self.center!r}."
            )


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A privacy mechanism: each step releases a noised sum of bounded contributions over a random draw.

    Args:
        sampling: Chooses the examples of a step.
        clipping: Bounds the gradient of each example.
        noise: Noise on the sum of gradients.
        steps: Number of planned steps; None if the loop decides.
        releases: Further noised sums over the same draws, which ε covers too.
        unit: The privacy unit.

    Raises:
        ValueError: the parts do not fit together, or no accountant has a bound for them.

    Example::

        >>> from dp_transformers import FlatClipping, IndependentNoise, Mechanism, PoissonSampling
        >>> mechanism = Mechanism(
        ...     sampling=PoissonSampling(num_examples=60_000, expected_batch_size=256),
        ...     clipping=FlatClipping(1.0),
        ...     noise=IndependentNoise(1.1),
        ...     steps=2_000,
        ... )
        >>> round(mechanism.epsilon(delta=1e-6), 2)
        0.98
        >>> mechanism.at(0).noise_std
        1.1
    """

    sampling: Sampling
    clipping: ClippingFunction
    noise: Noise
    steps: int | None = None
    releases: tuple[Release, ...] = ()
    unit: PrivacyUnit = PrivacyUnit()

    def __post_init__(self) -> None:
        kinds = {"sampling": Sampling, "clipping": ClippingFunction, "noise": Noise, "unit": PrivacyUnit}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be a {kind.__name__}, not {getattr(self, name)!r}.")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            raise ValueError(
                f"steps must be an int of at least 1, or None where the loop decides; got {self.steps!r}."
            )
        if self.noise.bands > self.sampling.min_separation:
            raise ValueError(
                f"noise {self.noise.kind!r} is correlated over {self.noise.bands} steps, but under sampling "
                f"{self.sampling.kind!r} an example may take part again after {self.sampling.min_separation}: take a "
                f"sampling with min_separation of at least {self.noise.bands} (CyclicPoissonSampling, "
                "FixedOrderSampling), or independent noise."
            )
        moves = self.clipping.release_noise_multipliers or len({step.max_grad_norm for step in self.planned()}) > 1
        if self.noise.bands > 1 and moves:
            raise ValueError(
                f"noise {self.noise.kind!r} is correlated over {self.noise.bands} steps, which needs one clipping "
                f"bound for all of them, but clipping {self.clipping.kind!r} changes it: take FlatClipping, or "
                "IndependentNoise."
            )
        first, relation = Counter([self.at(0)]), self.sampling.relation
        if all(self.unsupported(accountant, first) for accountant in known_accountants()):
            raise ValueError(
                f"no accountant ({', '.join(known_accountants())}) has a bound on epsilon for a step of sampling "
                f"{self.sampling.kind!r} with noise {self.noise.kind!r}, which is {self.event(first)} for neighbours "
                f"by {relation!r}. Let event() of the sampling return an event that an accountant of dp_accounting "
                "supports for that relation, or take PoissonSampling."
            )
        rows = self.unit.max_examples_per_person
        self._require_bound(rows)
        if rows > 1:
            phases_of_groups(self.event(first), "pld", relation=relation, rows=rows)

    def without_privacy(self) -> Mechanism:
        """Return the twin for comparison: the same draws, no noise, and a bound that no gradient reaches. Nothing of
        it is private."""
        return replace(self, noise=IndependentNoise(0.0), clipping=NOT_CLIPPED, releases=())

    # ---- parameters of the steps ----

    def at(self, step: int) -> StepParameters:
        """Return the parameters of a step, counted from 0."""
        return StepParameters(*self.sampling.at(step), self.noise.at(step), self.clipping.at(step).sensitivity)

    def planned(self, first_step: int = 0, steps: int | None = None) -> Counter[StepParameters]:
        """Count the parameters of ``steps`` steps from ``first_step`` on (default: of all planned steps, or of one
        step if the loop decides)."""
        steps = (self.steps or 1) if steps is None else steps
        return Counter(self.at(step) for step in range(first_step, first_step + steps))

    def costliest(self, steps: int) -> StepParameters:
        """Return parameters that cost at least as much as those of any of the first ``steps`` steps. They stand for
        steps of which only the number is known."""
        rates, batches, sigmas, bounds = zip(*self.planned(0, steps), strict=True)
        return StepParameters(max(rates), max(batches), min(sigmas), max(bounds))

    def known(self, segment: Mapping[StepParameters | None, int], executed: int) -> Counter[StepParameters]:
        """Replace unknown parameters (None) in a segment by the costliest of the first ``executed`` steps."""
        known = Counter({step: count for step, count in segment.items() if step is not None})
        unknown = segment.get(None, 0)
        return (Counter({self.costliest(executed): unknown}) if unknown else Counter()) + known

    @cached_property
    def is_silent(self) -> bool:
        """True if a step adds no noise, so that nothing is private."""
        return any(step.noise_multiplier == 0 for step in self.planned())

    @cached_property
    def needs_every_draw(self) -> bool:
        """True if ε holds only for consecutive draws with none skipped: noise is correlated over steps, examples take
        turns, or the cost of a step changes (within the first 1,000 steps, if the loop decides how many there are)."""
        changes = len(self.planned(0, self.steps or 1000)) > 1
        return self.noise.bands > 1 or self.sampling.needs_every_draw or changes

    # ---- cost ----

    def unsupported(self, accountant: str | Accountant, steps: Steps | None = None) -> str | None:
        """Return the reason why ``accountant`` has no bound for ``steps`` (default: all planned); None if it has one.

        Steps that are known to have one are not turned into an event: `dp_accounting` takes a second to import.
        """
        if accountant in ACCOUNTANTS and self.sampling.is_bounded_by_all:
            return None
        return unsupported(self.event(steps or self.planned()), accountant, relation=self.sampling.relation)

    def event(self, *executed: Steps) -> DpEvent:
        """Return the privacy event of the executed steps (default: all planned).

        Args:
            executed: The steps that each noise source served. A resumed training has had several sources.
        """
        import dp_accounting

        events = []
        for steps in filter(None, executed or (self.planned(),)):
            independent = self.noise.independent_steps(steps, self.sampling.min_separation)
            events.append(self.sampling.event([(self._with_releases(step), count) for step, count in independent]))
        return dp_accounting.ComposedDpEvent(events)

    def _with_releases(self, step: StepParameters) -> StepParameters:
        """Return the step with the noise multiplier σ of the one Gaussian mechanism that costs as much as the gradient
        and all other releases together: 1/σ² = Σ 1/σᵢ²."""
        further = [release.noise_multiplier for release in self.releases] + [*self.clipping.release_noise_multipliers]
        if not further or step.noise_multiplier == 0:
            return step
        precision = step.noise_multiplier**-2 + sum(sigma**-2 for sigma in further)
        return step._replace(noise_multiplier=precision**-0.5)

    def epsilon(
        self,
        delta: float,
        *,
        accountant: str | Accountant = "pld",
        executed: Iterable[Steps] | None = None,
        rows: int = 1,
    ) -> float:
        """Return ε at ``delta`` of the executed steps (default: all planned), under ``sampling.relation``.

        Args:
            accountant: "pld", "rdp" or an accountant of your own.
            executed: As in :meth:`event`; if empty, nothing was executed.
            rows: Number of rows that are added or removed together.
        """
        segments = (self.planned(),) if executed is None else tuple(executed)
        self._require_bound(rows)
        if not segments:
            return 0.0
        return event_epsilon(self.event(*segments), delta, accountant, relation=self.sampling.relation, rows=rows)

    def _require_bound(self, rows: int) -> None:
        """Raise ValueError if the sampling has no bound for groups of ``rows`` rows."""
        if rows > 1 and self.sampling.min_separation > 1:
            raise ValueError(
                f"there is no bound for groups of {rows} rows (max_examples_per_person) under sampling "
                f"{self.sampling.kind!r}, which puts rows of one person into different steps. Take PoissonSampling, "
                "or leave max_examples_per_person at 1, which protects one row."
            )

    def calibrated(
        self, *, target_epsilon: float, target_delta: float, accountant: str | Accountant = "pld"
    ) -> Mechanism:
        """Return this mechanism with the least noise that keeps all planned steps within the target, for all rows of
        one person. The noise of releases keeps its ratio to the noise of the gradients.

        Raises:
            ValueError: the number of steps is not planned, or no noise is enough.
        """
        if self.steps is None:
            raise ValueError("noise is calibrated to a number of steps: give the mechanism steps=.")
        if self.releases and not self.noise.noise_multiplier:
            raise ValueError(
                f"noise_multiplier is 0, so the noise of the release {self.releases[0].name!r} has no ratio to it: "
                "give the mechanism a noise_multiplier above 0 to start from."
            )
        name, search = check_accountant(accountant), _calibrated_noise
        try:
            hash(self)
        except TypeError:  # a field of a class of the user's own
            search = _calibrated_noise.__wrapped__
        return self.scaled_to(search(self, target_epsilon, target_delta, name))

    def scaled_to(self, sigma: float) -> Mechanism:
        """Return this mechanism with another noise multiplier. Further releases, as the private loss, get more or less
        noise by the same factor."""
        now = self.noise.noise_multiplier
        releases = (replace(each, noise_multiplier=each.noise_multiplier * sigma / now) for each in self.releases)
        return replace(self, noise=self.noise.scaled_to(sigma), releases=tuple(releases))

    def affordable_steps(
        self,
        *,
        target_epsilon: float,
        delta: float,
        limit: int,
        executed: Iterable[Steps] = (),
        first_step: int = 0,
        accountant: str | Accountant = "pld",
        guess: int | None = None,
    ) -> int:
        """Return the largest number of steps from ``first_step`` on, at most ``limit``, that stay within the target
        for all rows of one person. A ``guess`` saves time if the limit is far away."""
        executed, rows = list(executed), self.unit.max_examples_per_person

        def epsilon_after(steps: int) -> float:
            segments = [*executed, self.planned(first_step, steps)]
            return self.epsilon(delta, accountant=accountant, executed=segments, rows=rows)

        return largest_within(epsilon_after, target_epsilon, limit, guess=guess)

    def until_spent(
        self, *, target_epsilon: float, target_delta: float, accountant: str | Accountant = "pld"
    ) -> Mechanism:
        """Return this mechanism with as many steps as stay within the target, ten million at most.

        Raises:
            ValueError: there is room for no step.
        """
        steps = self.affordable_steps(
            target_epsilon=target_epsilon, delta=target_delta, limit=10_000_000, accountant=accountant, guess=1000
        )
        if not steps:
            raise ValueError(f"one step spends more than target_epsilon={target_epsilon:g}: give more noise.")
        return replace(self, steps=steps)

    # ---- JSON ----

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, as ledgers, checkpoints and reports hold them."""
        return {
            "sampling": self.sampling.to_dict(),
            "clipping": self.clipping.to_dict(),
            "noise": self.noise.to_dict(),
            "steps": self.steps,
            "releases": [asdict(release) for release in self.releases],
            "unit": self.unit.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Mechanism:
        """Return the mechanism that :meth:`to_dict` wrote.

        Raises:
            ValueError: a field is missing, or its kind is not defined.
        """
        try:
            return cls(
                sampling=Sampling.from_dict(data["sampling"]),
                clipping=ClippingFunction.from_dict(data["clipping"]),
                noise=Noise.from_dict(data["noise"]),
                steps=data["steps"],
                releases=tuple(Release(**release) for release in data["releases"]),
                unit=PrivacyUnit(**data["unit"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"this is no mechanism ({type(error).__name__}: {error}): give the whole dictionary that to_dict() of "
                "a Mechanism returns, or a file that json.dump wrote it to."
            ) from error


@lru_cache(maxsize=64)  # a search takes 0.1 s and more, and several trainings may share one mechanism
def _calibrated_noise(mechanism: Mechanism, target_epsilon: float, target_delta: float, accountant: str) -> float:
    """Return the noise multiplier that :meth:`Mechanism.calibrated` looks for."""
    rows = mechanism.unit.max_examples_per_person
    assert mechanism.steps is not None
    return smallest_noise(
        lambda sigma: mechanism.scaled_to(sigma).epsilon(target_delta, accountant=accountant, rows=rows),
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=mechanism.at(0).sample_rate,
        steps=mechanism.steps,
        accountant=accountant,
        rows=rows,
    )
