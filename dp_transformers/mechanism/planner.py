"""Compares the mechanisms that meet a privacy target by the noise in the sum of gradients, and draws of persons with
draws of rows by the noise in the mean. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .clipping_functions import FlatClipping
from .mechanism import Mechanism, PrivacyUnit
from .noise import BandedInverseNoise, BandedNoise, BufferedNoise, IndependentNoise, Noise
from .sampling import (
    CyclicPoissonSampling,
    FixedOrderSampling,
    PoissonSampling,
    RandomAllocationSampling,
    TruncatedPoissonSampling,
    steps_of_epochs,
)

BANDS = (2, 4, 8, 16, 32, 64)
INVERSE_BANDS = (4, 16, 64)
BUFFERS = 3
_LEGEND = """\
noise: in the sum of gradients so far, over how often an example takes part, in units of the clipping bound.
hides: that an example was added or removed; or only that it was made a null one, so that N is known. The first is
more, and an epsilon of the one is not an epsilon of the other.
bytes: kept between steps for each trainable parameter.
Less noise is no promise of accuracy, and this is the noise that SGD sees: Adam scales each step by its own."""
RELATIONS = {"add_or_remove_one": "add or remove", "replace_special": "null one, N public"}


@dataclass(frozen=True)
class Candidate:
    """A mechanism that meets the target.

    Attributes:
        name: Its sampling and its noise, in words.
        noise: Root mean square over all steps of the standard deviation of the noise in the sum of gradients so far,
            divided by the number of times that an example takes part, in units of the clipping bound. SGD sees this.
        kept: 4-byte numbers that are kept between steps for each trainable parameter, beyond those of DP-SGD.
        drawn: Random numbers drawn in a step for each trainable parameter.
        against: Arguments against it.
    """

    name: str
    mechanism: Mechanism
    noise: float
    kept: int
    drawn: int
    against: tuple[str, ...]

    @property
    def relation(self) -> str:
        return self.mechanism.sampling.relation

    @property
    def bytes_per_parameter(self) -> int:
        return 4 * self.kept

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "name": self.name,
            "predicted_noise": self.noise,
            "neighboring_relation": self.relation,
            "bytes_per_trainable_parameter": self.bytes_per_parameter,
            "drawn_per_trainable_parameter": self.drawn,
            "against": list(self.against),
            "mechanism": self.mechanism.to_dict(),
        }


@dataclass(frozen=True)
class MechanismPlan:
    """The mechanisms that meet a target, sorted by predicted noise.

    Attributes:
        candidates: All mechanisms, the least noise first, for any relation.
        relation: The neighbouring relation that ``best`` must hide.
        left_out: Mechanisms that do not apply, and the reasons.
    """

    candidates: tuple[Candidate, ...]
    relation: str
    left_out: Mapping[str, str]

    @property
    def best(self) -> Mechanism:
        """The mechanism with the least predicted noise among those that hide ``relation``. All hide that an example
        was made a null one; not all hide that one was added or removed."""
        return next(c.mechanism for c in self if self.relation in (c.relation, "replace_special"))

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __str__(self) -> str:
        width = max(len(c.name) for c in self)
        lines = [f"  {'mechanism':<{width}}  {'noise':>8}  {'hides':<18}  {'bytes':>5}  what speaks against it"]
        for c in self:
            mark = "  <- best" if c.mechanism is self.best else ""
            lines.append(
                f"  {c.name:<{width}}  {c.noise:8.4g}  {RELATIONS[c.relation]:<18}  {c.bytes_per_parameter:5}  "
                + ("; ".join(c.against) or "nothing")
                + mark
            )
        lines += [f"  {name:<{width}}  does not apply: {why}" for name, why in self.left_out.items()]
        return "\n".join([*lines, _LEGEND, f"best: the least noise of those that hide {self.relation}."])


def plan(
    num_examples: int,
    *,
    expected_batch_size: int,
    target_epsilon: float,
    target_delta: float,
    epochs: float | None = None,
    steps: int | None = None,
    max_grad_norm: float = 1.0,
    max_examples_per_person: int = 1,
    relation: str = "add_or_remove_one",
    accountant: str = "pld",
) -> MechanismPlan:
    """Compare the mechanisms that meet a target by their noise in the sum of gradients. Less noise is no promise of
    accuracy: it was seen to help in training from scratch; for fine-tuning little is published.

    Args:
        num_examples: N.
        expected_batch_size: Expected number of examples in a step.
        target_epsilon, target_delta: The privacy budget, for all rows of one person.
        epochs: Mean number of passes over the data; or give ``steps``.
        relation: The neighbouring relation that the best mechanism must hide: "add_or_remove_one", or
            "replace_special", for which N is public and batches may have a fixed order.

    Raises:
        ValueError: an argument is out of range, or no noise meets the target.

    Example::

        >>> from dp_transformers import plan
        >>> found = plan(10_000, expected_batch_size=1_000, target_epsilon=2.0, target_delta=1e-5, steps=20)
        >>> found.best.sampling.kind, found.best.noise.kind
        ('random_allocation', 'independent')
        >>> [round(c.noise, 1) for c in found if c.name == "Poisson, independent"]
        [2.2]
    """
    if (epochs is None) == (steps is None):
        raise ValueError("give either epochs or steps: the number of passes over the data, or the number of draws.")
    if relation not in RELATIONS:
        raise ValueError(f"relation must be one of {tuple(RELATIONS)}, got {relation!r}.")
    PoissonSampling(num_examples, expected_batch_size)  # refuses what is no batch
    if steps is None:
        assert epochs is not None
        steps = steps_of_epochs(epochs, num_examples, expected_batch_size)
    setting = _Setting(
        num_examples, expected_batch_size, steps, target_epsilon, target_delta, accountant, max_grad_norm
    )
    unit = PrivacyUnit(max_examples_per_person)
    poisson = setting.candidate("Poisson, independent", PoissonSampling(num_examples, expected_batch_size), unit=unit)
    if max_examples_per_person > 1:
        why = "there is a bound for several rows of one person for Poisson sampling alone"
        return MechanismPlan((poisson,), relation, {"everything else": why})
    found, left_out = [poisson], {}
    if accountant == "pld":
        found += _truncated(setting) + _allocation(setting)
    else:
        left_out["truncated Poisson, random allocation"] = f"the accountant {accountant!r} has no bound; take 'pld'"
    found += (banded := _banded(setting)) + (in_order := _in_order(setting))
    if not banded:
        left_out["cyclic Poisson, bands"] = "less than two batches, or one step, leave no room for it"
    if len(in_order) == 1:
        left_out["fixed order, correlated noise"] = "less than two batches, or one step, leave no room for it"
    ranked = sorted(found, key=lambda c: c.noise)
    return MechanismPlan(tuple(_compared(c, poisson, setting) for c in ranked), relation, left_out)


@dataclass(frozen=True)
class UnitPlan:
    """Two trainings that protect all rows of a person at the same ε, with as many rows in a step.

    Attributes:
        by_person: Draws persons (ULS); the mean gradient of at most ``rows_per_unit`` rows of each is clipped.
        by_row: Draws rows (ELS), of which a person keeps ``by_row.unit.max_examples_per_person``; each is clipped.
        rows_per_unit: k.
        mean_rows: Rows of a drawn person, on average.
    """

    by_person: Mechanism
    by_row: Mechanism
    rows_per_unit: int
    mean_rows: float

    @property
    def noise_by_person(self) -> float:
        """Standard deviation of the noise in each coordinate of the mean gradient, in units of the bound on the norm
        of a person's mean gradient."""
        return _noise_on_mean(self.by_person)

    @property
    def noise_by_row(self) -> float:
        """The same in units of the bound on the norm of one row's gradient."""
        return _noise_on_mean(self.by_row)

    @property
    def break_even(self) -> float:
        """Draws of persons leave less noise where the mean gradient of a person's rows is shorter than the gradient of
        one row by more than this factor. It is shorter by the square root of their number where rows have nothing in
        common, and by nothing where they are alike."""
        return self.noise_by_person / self.noise_by_row

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        names = {"noise_on_mean_by_person": self.noise_by_person, "noise_on_mean_by_row": self.noise_by_row}
        mechanisms = {"by_person": self.by_person.to_dict(), "by_row": self.by_row.to_dict()}
        return {"rows_per_unit": self.rows_per_unit, **names, "break_even": self.break_even, **mechanisms}

    def __str__(self) -> str:
        names = {
            f"persons, {self.rows_per_unit} rows of one at most": self.by_person,
            f"rows, a person keeps {self.by_row.unit.max_examples_per_person} at most": self.by_row,
        }
        lines = [f"  {'drawn in each step':<36}  {'sigma':>8}  noise on the mean  expected"]
        for name, mechanism in names.items():
            sampling, noise = mechanism.sampling, f"{_noise_on_mean(mechanism):.3g} C"
            drawn = f"{sampling.expected_batch_size:,} of {sampling.num_examples:,}"
            lines.append(f"  {name:<36}  {mechanism.at(0).noise_multiplier:8.4f}  {noise:<17}  {drawn}")
        return "\n".join([*lines, self.better])

    @property
    def better(self) -> str:
        """What leaves less noise, and when."""
        most = math.sqrt(self.mean_rows)
        if self.break_even <= 1:
            return "Draws of persons leave less noise."
        if self.break_even >= most:
            return (
                f"Draws of rows leave less noise: a mean is hardly {self.break_even:.3g} times shorter than one row."
            )
        return (
            f"Draws of persons leave less noise if the mean gradient of a person's rows is more than "
            f"{self.break_even:.3g} times shorter\nthan that of one row, else draws of rows. It is 1 time (alike) to "
            f"{most:.3g} times (nothing in common) shorter."
        )


def plan_units(
    rows_per_person: Collection[float],
    *,
    expected_rows: int,
    rows_per_unit: int,
    max_examples_per_person: int | None = None,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    max_grad_norm: float = 1.0,
    accountant: str = "pld",
) -> UnitPlan:
    """Compare draws of persons with draws of rows at the same ε of a person (arXiv:2406.14322), by the noise alone.

    Args:
        rows_per_person: How many rows each person has: of public data of this kind, or a guess, since the counts of
            the training data are private themselves.
        expected_rows: Expected number of rows in a step.
        rows_per_unit: k, the rows that are taken of a drawn person, at most.
        max_examples_per_person: G, the rows that a person keeps where rows are drawn; None for k.

    Raises:
        ValueError: an argument is out of range, or no noise meets the target.

    Example::

        >>> from dp_transformers import plan_units
        >>> found = plan_units(
        ...     [2] * 1_000, expected_rows=200, rows_per_unit=2, target_epsilon=1.0, target_delta=1e-5, steps=10
        ... )
        >>> print(found)
          drawn in each step                       sigma  noise on the mean  expected
          persons, 2 rows of one at most          1.7410  0.0174 C           100 of 1,000
          rows, a person keeps 2 at most          2.9015  0.0145 C           200 of 2,000
        Draws of persons leave less noise if the mean gradient of a person's rows is more than 1.2 times shorter
        than that of one row, else draws of rows. It is 1 time (alike) to 1.41 times (nothing in common) shorter.
    """
    most = rows_per_unit if max_examples_per_person is None else max_examples_per_person
    if min(rows_per_person, default=0) < 1 or rows_per_unit < 1 or most < 1:
        raise ValueError("rows_per_unit, max_examples_per_person and each number of rows_per_person are at least 1.")
    mean_rows = sum(min(rows_per_unit, n) for n in rows_per_person) / len(rows_per_person)
    kept = round(sum(min(most, n) for n in rows_per_person))
    drawn = (
        (PoissonSampling(len(rows_per_person), max(1, round(expected_rows / mean_rows))), PrivacyUnit()),
        (PoissonSampling(kept, expected_rows), PrivacyUnit(most)),
    )
    by_person, by_row = (
        Mechanism(
            sampling=sampling,
            clipping=FlatClipping(max_grad_norm),
            noise=IndependentNoise(1.0),
            steps=steps,
            unit=unit,
        ).calibrated(target_epsilon=target_epsilon, target_delta=target_delta, accountant=accountant)
        for sampling, unit in drawn
    )
    return UnitPlan(by_person, by_row, rows_per_unit, mean_rows)


def _noise_on_mean(mechanism: Mechanism) -> float:
    return mechanism.at(0).noise_multiplier / mechanism.sampling.expected_batch_size


@dataclass(frozen=True)
class _Setting:
    examples: int
    batch: int
    steps: int
    epsilon: float
    delta: float
    accountant: str
    bound: float

    def candidate(
        self,
        name: str,
        sampling: Any,
        noise: Noise | None = None,
        against: Sequence[str] = (),
        *,
        kept: int = 0,
        drawn: int = 1,
        unit: PrivacyUnit | None = None,
    ) -> Candidate:
        """Return a candidate with the least noise that meets the target."""
        mechanism = Mechanism(
            sampling=sampling,
            clipping=FlatClipping(self.bound),
            noise=noise or IndependentNoise(1.0),
            steps=self.steps,
            unit=unit or PrivacyUnit(),
        ).calibrated(target_epsilon=self.epsilon, target_delta=self.delta, accountant=self.accountant)
        return Candidate(name, mechanism, predicted_noise(mechanism), kept, drawn, tuple(against))


def predicted_noise(mechanism: Mechanism) -> float:
    """Return :attr:`Candidate.noise`."""
    noise: Any = mechanism.noise
    assert mechanism.steps is not None
    return noise.prefix_error(mechanism.steps) / (mechanism.steps * mechanism.sampling.sample_rate)


def _truncated(setting: _Setting) -> list[Candidate]:
    """Truncated Poisson sampling with a cap that draws almost never reach."""
    cap = min(setting.examples, math.ceil(setting.batch + 6 * math.sqrt(setting.batch)))
    sampling = TruncatedPoissonSampling(setting.examples, setting.batch, cap)
    return [setting.candidate(f"truncated Poisson, cap {cap}, independent", sampling)]


def _allocation(setting: _Setting) -> list[Candidate]:
    steps_per_pass = round(setting.examples / setting.batch)
    sampling = RandomAllocationSampling(setting.examples, steps_per_pass)
    against = ["the last pass is paid for in full"] if setting.steps % steps_per_pass else []
    return [setting.candidate("random allocation, independent", sampling, against=against)]


def _banded(setting: _Setting) -> list[Candidate]:
    """The best number of bands that the batch size allows: σ grows with it, and the error falls."""
    most = min(setting.steps, setting.examples // setting.batch)
    made = []
    for bands in (b for b in BANDS if b <= most):
        noise = BandedNoise.optimal(1.0, steps=setting.steps, bands=bands)
        sampling = CyclicPoissonSampling(setting.examples, setting.batch, bands)
        name = f"cyclic Poisson, {bands} bands"
        made.append(setting.candidate(name, sampling, noise, kept=bands - 1))
    return _least(made)


def _in_order(setting: _Setting) -> list[Candidate]:
    """A fixed order with each kind of noise. Nothing is amplified, and all have a closed form."""
    sampling = FixedOrderSampling(setting.examples, setting.batch)
    steps, separation, order = setting.steps, sampling.min_separation, "fixed order"
    made = [setting.candidate(f"{order}, independent", sampling)]
    if separation < 2 or steps < 2:
        return made
    decay = BandedInverseNoise.optimal_decay(1.0, steps=steps, min_separation=separation)
    made.append(setting.candidate(f"{order}, lambda {-decay.coefficients[1]:.3g}", sampling, decay, drawn=2))
    inverses = [
        setting.candidate(
            f"{order}, BISR {bands}", sampling, BandedInverseNoise.square_root(1.0, bands=bands), drawn=bands
        )
        for bands in INVERSE_BANDS
        if bands <= steps
    ]
    buffered = BufferedNoise.optimal(1.0, steps=steps, min_separation=separation, buffers=BUFFERS)
    made.append(setting.candidate(f"{order}, {BUFFERS} buffers", sampling, buffered, kept=BUFFERS))
    return made + _least(inverses)


def _least(candidates: list[Candidate]) -> list[Candidate]:
    return [min(candidates, key=lambda c: c.noise)] if candidates else []


def _compared(candidate: Candidate, poisson: Candidate, setting: _Setting) -> Candidate:
    """Add the arguments against a candidate, compared with Poisson sampling and independent noise."""
    against, sampling = list(candidate.against), candidate.mechanism.sampling
    if candidate.noise > 1.005 * poisson.noise:
        cause = "correlated noise" if candidate.mechanism.noise.bands > 1 else "no amplification by sampling"
        against.append(f"{setting.steps} steps at epsilon = {setting.epsilon:g}: {cause} makes it worse than Poisson")
    if candidate.relation != "add_or_remove_one":
        against.append("N is public")
    if isinstance(sampling, FixedOrderSampling) and (rest := setting.examples % setting.batch):
        against.append(f"{rest} examples take no part")
    if candidate.mechanism.noise.bands > 1:
        against.append("good for SGD: with AdamW a fine-tuning was 13 points less accurate by it")
        against.append("a resumed run pays for a new source of noise")
    elif candidate.mechanism.needs_every_draw and not isinstance(sampling, FixedOrderSampling):
        against.append("a resumed run pays for a new pass")
    if candidate.kept:
        against.append(f"memory: {candidate.kept} x the gradient")
    if candidate.drawn > 4:
        against.append(f"draws {candidate.drawn} times")
    return replace(candidate, against=tuple(against))
