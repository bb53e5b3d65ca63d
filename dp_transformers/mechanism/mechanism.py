"""The mechanism of a private training: everything that ε depends on, in one value. Free of torch.

In each step a :class:`~dp_transformers.mechanism.sampling.Sampling` chooses examples, a
:class:`~dp_transformers.mechanism.clipping_functions.ClippingFunction` bounds what each adds to the sum of gradients,
and a :class:`~dp_transformers.mechanism.noise.Noise` hides it. The sampling knows which event the steps are, the
clipping function its sensitivity, and what does not go together is refused when the mechanism is built.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .accounting.accountants import Accountant, check_accountant, known_accountants
from .accounting.calibration import largest_within, smallest_noise
from .accounting.events import event_epsilon, phases_of_groups, unsupported
from .clipping_functions import ClippingFunction
from .noise import Noise
from .sampling import Sampling
from .values import StepParameters

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Steps = Mapping[StepParameters, int]  # how many steps used these parameters

NO_BOUND = "epsilon is infinite: there is no bound for so little noise"  # why nothing is private all the same
UNIT = "one row of the training data"  # what is protected, unless a person has several


@dataclass(frozen=True)
class PrivacyUnit:
    """What the guarantee protects: one row of the training data, and all rows of one person, who has
    ``max_examples_per_person`` at most.

    Example::

        >>> from dp_transformers import PrivacyUnit
        >>> PrivacyUnit(max_examples_per_person=30)
        PrivacyUnit(max_examples_per_person=30)
    """

    max_examples_per_person: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.max_examples_per_person, int) or self.max_examples_per_person < 1:
            raise ValueError(
                f"max_examples_per_person must be an int of at least 1, got {self.max_examples_per_person!r}."
            )


@dataclass(frozen=True)
class Release:
    """A sum over the draw that each step releases besides that of the gradients.

    An example's number adds to it by how far it is from ``center``, at most by ``bound`` in either direction.

    Attributes:
        name: What it is the sum of. The steps of this library know "loss".
        bound: The largest absolute value that one example can add.
        noise_multiplier: The standard deviation of its Gaussian noise over ``bound``.
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
        """The sum of numbers that are clipped to [low, high]; the center between the two takes the least noise."""
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
    """What a training releases: in each step a noised sum of bounded contributions over a random draw.

    Args:
        sampling: Which examples take part in a step.
        clipping: What an example's gradient is multiplied with, and what it can add at most.
        noise: The noise on the sum of gradients.
        steps: How many steps are planned; None where the loop decides.
        releases: Further noised sums over the same draws. ε covers them too.
        unit: What the guarantee protects.

    Raises:
        ValueError: the parts do not go together, or no accountant knows what they cost.

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
        for name, kind in (
            ("sampling", Sampling),
            ("clipping", ClippingFunction),
            ("noise", Noise),
            ("unit", PrivacyUnit),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be a {kind.__name__}, not {getattr(self, name)!r}.")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            raise ValueError(
                f"steps must be an int of at least 1, or None where the loop decides; got {self.steps!r}."
            )
        if self.noise.bands > self.sampling.min_separation:
            raise ValueError(
                f"noise {self.noise.kind!r} is correlated over {self.noise.bands} steps, but by sampling "
                f"{self.sampling.kind!r} an example may take part again after {self.sampling.min_separation}: its "
                "share in all of them would not be covered. Take a sampling with min_separation of at least "
                f"{self.noise.bands} (CyclicPoissonSampling, FixedOrderSampling), or independent noise."
            )
        moves = self.clipping.release_noise_multipliers or len({step.max_grad_norm for step in self.planned()}) > 1
        if self.noise.bands > 1 and moves:
            raise ValueError(
                f"noise {self.noise.kind!r} is correlated over {self.noise.bands} steps, which needs one clipping "
                f"bound for all of them, but clipping {self.clipping.kind!r} changes it: take FlatClipping, or "
                "IndependentNoise."
            )
        event, relation = self.event(Counter([self.at(0)])), self.sampling.relation
        if all(unsupported(event, accountant, relation=relation) for accountant in known_accountants()):
            raise ValueError(
                f"no accountant ({', '.join(known_accountants())}) has a bound on epsilon for a step of sampling "
                f"{self.sampling.kind!r} with noise {self.noise.kind!r}, which is {event} for neighbours by "
                f"{relation!r}. Let event() of the sampling return an event that an accountant of dp_accounting "
                "supports for that relation, or take PoissonSampling."
            )
        rows = self.unit.max_examples_per_person
        self._require_bound(rows)
        if rows > 1:
            phases_of_groups(event, "pld", relation=relation, rows=rows)

    # ---- what a step uses ----

    def at(self, step: int) -> StepParameters:
        """The parameters of a step, counted from 0."""
        return StepParameters(*self.sampling.at(step), self.noise.at(step), self.clipping.at(step).sensitivity)

    def planned(self, first_step: int = 0, steps: int | None = None) -> Counter[StepParameters]:
        """How many of the ``steps`` steps from ``first_step`` on use which parameters (default: all planned ones; one
        where the loop decides)."""
        steps = (self.steps or 1) if steps is None else steps
        return Counter(self.at(step) for step in range(first_step, first_step + steps))

    def costliest(self, steps: int) -> StepParameters:
        """A step that costs no less than any of the first ``steps``. It stands for steps of which only the number is
        known."""
        rates, batches, sigmas, bounds = zip(*self.planned(0, steps), strict=True)
        return StepParameters(max(rates), max(batches), min(sigmas), max(bounds))

    def known(self, segment: Mapping[StepParameters | None, int], executed: int) -> Counter[StepParameters]:
        """Replace steps whose parameters are not known (None) by the costliest of the first ``executed`` ones."""
        known = Counter({step: count for step, count in segment.items() if step is not None})
        unknown = segment.get(None, 0)
        return (Counter({self.costliest(executed): unknown}) if unknown else Counter()) + known

    @cached_property
    def is_silent(self) -> bool:
        """Whether no noise is added in some step, so that nothing is private."""
        return any(step.noise_multiplier == 0 for step in self.planned())

    @cached_property
    def needs_every_draw(self) -> bool:
        """Whether epsilon is that of draws that follow each other, none of which is left out: noise is correlated over
        steps, examples take turns, or later steps cost something else (where the loop decides how many there are, the
        first thousand are looked at)."""
        changes = len(self.planned(0, self.steps or 1000)) > 1
        return self.noise.bands > 1 or self.sampling.needs_every_draw or changes

    # ---- what it costs ----

    def event(self, *executed: Steps) -> DpEvent:
        """What the executed steps release (default: all planned), as dp_accounting says it.

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
        """The step with the noise multiplier of the gradient and all releases as one Gaussian mechanism."""
        others = [release.noise_multiplier for release in self.releases] + [*self.clipping.release_noise_multipliers]
        if not others or step.noise_multiplier == 0:
            return step
        precision = step.noise_multiplier**-2 + sum(sigma**-2 for sigma in others)
        return step._replace(noise_multiplier=precision**-0.5)

    def epsilon(
        self,
        delta: float,
        *,
        accountant: str | Accountant = "pld",
        executed: Iterable[Steps] | None = None,
        rows: int = 1,
    ) -> float:
        """ε at ``delta`` of the executed steps (default: all planned), for neighbours by ``sampling.relation``.

        Args:
            accountant: "pld", "rdp" or one of your own.
            executed: As in :meth:`event`; nothing was executed if it is empty.
            rows: With more than one, for so many rows added or removed together.
        """
        segments = (self.planned(),) if executed is None else tuple(executed)
        self._require_bound(rows)
        if not segments:
            return 0.0
        return event_epsilon(self.event(*segments), delta, accountant, relation=self.sampling.relation, rows=rows)

    def _require_bound(self, rows: int) -> None:
        """Raise ValueError if nothing is known of groups of so many rows because of who takes part when."""
        if rows > 1 and self.sampling.min_separation > 1:
            raise ValueError(
                f"there is no bound for groups of {rows} rows (max_examples_per_person) of sampling "
                f"{self.sampling.kind!r}, by which rows of one person have different steps. Take PoissonSampling, or "
                "leave max_examples_per_person at 1, which protects one row."
            )

    def calibrated(
        self, *, target_epsilon: float, target_delta: float, accountant: str | Accountant = "pld"
    ) -> Mechanism:
        """This mechanism with the least noise that keeps all planned steps within the target, for all rows of one
        person. The noise of releases stays in proportion to that of the gradients.

        Raises:
            ValueError: how many steps there will be is not known, or no noise is enough.
        """
        if self.steps is None:
            raise ValueError("noise is calibrated to a number of steps: give the mechanism steps=.")
        rows, now = self.unit.max_examples_per_person, self.noise.noise_multiplier
        if self.releases and not now:
            raise ValueError(
                f"noise_multiplier is 0, to which the noise of the release {self.releases[0].name!r} has no "
                "proportion: give the mechanism noise of any other level to begin with."
            )

        def scaled_to(sigma: float) -> Mechanism:
            return replace(
                self,
                noise=self.noise.scaled_to(sigma),
                releases=tuple(
                    replace(each, noise_multiplier=each.noise_multiplier * sigma / now) for each in self.releases
                ),
            )

        def epsilon_of(sigma: float) -> float:
            return scaled_to(sigma).epsilon(target_delta, accountant=accountant, rows=rows)

        sigma = smallest_noise(
            epsilon_of,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=self.at(0).sample_rate,
            steps=self.steps,
            accountant=check_accountant(accountant),
            rows=rows,
        )
        return scaled_to(sigma)

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
        """How many more steps from ``first_step`` on, at most ``limit``, stay within the target, for all rows of one
        person. A ``guess`` makes it fast where the limit is far away."""
        executed, rows = list(executed), self.unit.max_examples_per_person

        def epsilon_after(steps: int) -> float:
            segments = [*executed, self.planned(first_step, steps)]
            return self.epsilon(delta, accountant=accountant, executed=segments, rows=rows)

        return largest_within(epsilon_after, target_epsilon, limit, guess=guess)

    # ---- JSON ----

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ledgers, checkpoints and reports hold this."""
        return {
            "sampling": self.sampling.to_dict(),
            "clipping": self.clipping.to_dict(),
            "noise": self.noise.to_dict(),
            "steps": self.steps,
            "releases": [asdict(release) for release in self.releases],
            "unit": asdict(self.unit),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Mechanism:
        """The mechanism that :meth:`to_dict` wrote.

        Raises:
            ValueError: something is missing, or of a kind that is not defined.
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
