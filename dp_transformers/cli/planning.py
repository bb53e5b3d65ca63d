"""Plans of private trainings: finds the one number that is not given. Free of torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from .. import FlatClipping, IndependentNoise, Mechanism, PoissonSampling, PrivacyUnit
from ..mechanism.accounting.calibration import guess_noise_multiplier, largest_within
from ..mechanism.sampling import steps_of_epochs

MOST_STEPS = 10**6


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The fixed part of a plan, with Poisson sampling, flat clipping and independent noise.

    Attributes:
        examples: N, the number of rows of the training data.
        max_examples_per_person: Rows that one person may have; epsilon is for all of them together.
    """

    examples: int
    delta: float
    max_grad_norm: float = 1.0
    max_examples_per_person: int = 1
    accountant: str = "pld"

    def __post_init__(self) -> None:
        _check_positive("max-grad-norm", self.max_grad_norm)
        _check_positive("delta", self.delta)
        if self.delta * self.examples >= 1:
            raise ValueError(
                f"--delta {self.delta:g} is not smaller than 1/N = {1 / self.examples:g}: at that delta, publishing "
                f"one example outright would count as private. Leave it out for {default_delta(self.examples):g}."
            )

    def mechanism(self, sigma: float, batch: float, steps: int) -> Mechanism:
        """Return the mechanism of a training."""
        return Mechanism(
            sampling=PoissonSampling(self.examples, batch),
            clipping=FlatClipping(self.max_grad_norm),
            noise=IndependentNoise(sigma),
            steps=steps,
            unit=PrivacyUnit(self.max_examples_per_person),
        )

    def epsilon(self, sigma: float, batch: float, steps: int, rows: int | None = None) -> float:
        """Return ε for ``rows`` rows together (default: the rows of one person)."""
        rows = self.max_examples_per_person if rows is None else rows
        return self.mechanism(sigma, batch, steps).epsilon(self.delta, accountant=self.accountant, rows=rows)

    def guess_sigma(self, epsilon: float, batch: float, steps: int) -> float:
        """Estimate the sigma that meets epsilon, without an accountant."""
        return guess_noise_multiplier(
            epsilon, self.delta, batch / self.examples, steps, rows=self.max_examples_per_person
        )

    def steps_of(self, epochs: float, batch: int) -> int:
        """Return the steps of ``epochs`` passes over the data, as DPTrainer counts them."""
        return steps_of_epochs(epochs, self.examples, batch)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A complete plan of a training."""

    setting: Setting
    epsilon: float
    sigma: float
    batch: int
    steps: int

    @property
    def epochs(self) -> float:
        """Mean number of passes over the data."""
        return self.steps * self.batch / self.setting.examples

    @property
    def noise_on_mean(self) -> float:
        """Standard deviation of the noise in each coordinate of the mean gradient, in units of C: sigma / batch."""
        return self.sigma / self.batch

    def noise_norm(self, parameters: int) -> float:
        """Return the expected norm of the noise of a step, sigma * C * sqrt(d) / batch."""
        return self.noise_on_mean * self.setting.max_grad_norm * math.sqrt(parameters)

    def batch_exponent(self) -> float | None:
        """Return d ln sigma / d ln batch at constant epsilon and passes over the data; None if it cannot be computed
        for so much noise, so few steps or so large a batch.

        Near 0, sigma is almost constant, and sigma / batch falls as 1 / batch; near 1/2, it falls as its root.
        """
        fewer = min(round(self.steps / 1.1), self.steps - 1)
        if fewer < 1 or self.batch * self.steps / fewer > self.setting.examples or self.sigma == 0:
            return None
        growth = self.steps / fewer
        here = self.setting.epsilon(self.sigma, self.batch, self.steps)
        larger = self.setting.epsilon(self.sigma, self.batch * growth, fewer)
        noisier = self.setting.epsilon(1.05 * self.sigma, self.batch, self.steps)
        if not 0 < noisier < here < math.inf or larger <= 0:
            return None
        return -(math.log(larger / here) / math.log(growth)) / (math.log(noisier / here) / math.log(1.05))

    def varied_epsilon(self, name: str, factor: float) -> float | None:
        """Return ε with one of sigma, batch and epochs multiplied by ``factor``; None if the batch would exceed the
        data."""
        sigma = self.sigma * (factor if name == "sigma" else 1)
        batch = self.batch * (factor if name == "batch" else 1)
        steps = self.steps * {"sigma": 1, "batch": 1 / factor, "epochs": factor}[name]
        return self.setting.epsilon(sigma, batch, max(1, round(steps))) if batch <= self.setting.examples else None


def find(
    setting: Setting,
    *,
    epsilon: float | None = None,
    sigma: float | None = None,
    batch: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
) -> tuple[Plan, str]:
    """Return the complete plan, and the name of the number that was found.

    Raises:
        ValueError: too much or too little is given, or nothing meets the budget.
    """
    _check_numbers(setting, epsilon, sigma, batch, epochs)
    if steps is not None and epochs is not None:
        batch, epochs = _batch_of(setting, batch, steps, epochs), None
    if batch is not None and epochs is not None:
        steps = setting.steps_of(epochs, batch)
    match epsilon, sigma, batch, steps, epochs:
        case None, float(), int(), int(), _:
            found, epsilon = "epsilon", setting.epsilon(sigma, batch, steps)
        case float(), None, int(), int(), _:
            found, sigma = "sigma", _least_sigma(setting, epsilon, batch, steps)
        case float(), float(), int(), None, None:
            found, steps = "steps", _most_steps(setting, epsilon, sigma, batch)
        case float(), float(), None, int(), None:
            found, batch = "batch", _largest_batch(setting, epsilon, lambda b: (sigma, b, steps))
        case float(), float(), None, None, float():
            found, batch = "batch", _largest_batch(setting, epsilon, lambda b: (sigma, b, setting.steps_of(epochs, b)))
            steps = setting.steps_of(epochs, batch)
        case _:
            raise ValueError(_what_to_give(epsilon=epsilon, sigma=sigma, batch=batch, steps=steps or epochs))
    return Plan(setting=setting, epsilon=epsilon, sigma=sigma, batch=batch, steps=steps), found


def default_delta(examples: int) -> float:
    """Return the largest power of ten that is at most a tenth of 1/N."""
    return 10.0 ** -math.ceil(math.log10(10 * examples))


def _least_sigma(setting: Setting, epsilon: float, batch: int, steps: int) -> float:
    plan = setting.mechanism(1.0, batch, steps)
    found = plan.calibrated(target_epsilon=epsilon, target_delta=setting.delta, accountant=setting.accountant)
    return found.at(0).noise_multiplier


def _most_steps(setting: Setting, epsilon: float, sigma: float, batch: int) -> int:
    guess = bisect_right(range(1, MOST_STEPS), sigma, key=lambda steps: setting.guess_sigma(epsilon, batch, steps))
    steps = setting.mechanism(sigma, batch, 1).affordable_steps(
        target_epsilon=epsilon, delta=setting.delta, limit=MOST_STEPS, accountant=setting.accountant, guess=guess
    )
    if steps == 0:
        _refuse("not one step", epsilon, setting.epsilon(sigma, batch, 1), "a smaller --batch")
    return steps


def _largest_batch(setting: Setting, epsilon: float, training: Callable[[int], tuple[float, int, int]]) -> int:
    """Return the largest batch that stays within epsilon, where ``training(batch)`` is (sigma, batch, steps)."""

    def missing_sigma(batch: int) -> float:
        sigma, _, steps = training(batch)
        return setting.guess_sigma(epsilon, batch, steps) - sigma

    sizes = range(1, setting.examples + 1)
    guess = bisect_right(sizes, 0, key=missing_sigma)
    batch = largest_within(lambda batch: setting.epsilon(*training(batch)), epsilon, len(sizes), guess=guess)
    if batch == 0:
        spent = setting.epsilon(*training(1))
        _refuse("not even a batch of one example", epsilon, spent, "fewer steps or epochs")
    return batch


def _refuse(what: str, epsilon: float, spent: float, way_out: str) -> NoReturn:
    raise ValueError(
        f"{what} stays within --epsilon {epsilon:g}: it spends {spent:.3g}. Take a larger --sigma or --epsilon, "
        f"{way_out}, or more examples."
    )


def _batch_of(setting: Setting, batch: int | None, steps: int, epochs: float) -> int:
    if batch is not None:
        raise ValueError("of --batch, --steps and --epochs two give the third: leave one of them out.")
    batch = max(1, round(epochs * setting.examples / steps))
    if batch > setting.examples:
        raise ValueError(
            f"{epochs:g} epochs cannot be had in {steps} steps: a step draws {setting.examples} examples at most. "
            "Raise --steps."
        )
    return batch


def _check_numbers(
    setting: Setting, epsilon: float | None, sigma: float | None, batch: int | None, epochs: float | None
) -> None:
    for name, value in (("epsilon", epsilon), ("epochs", epochs)):
        if value is not None:
            _check_positive(name, value)
    if sigma is not None and not 0 <= sigma < math.inf:
        raise ValueError(f"--sigma must be a finite number, at least 0, got {sigma:g}.")
    if batch is not None and batch > setting.examples:
        raise ValueError(f"--batch {batch} exceeds the {setting.examples} examples of --examples: lower it.")


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"--{name} must be a positive finite number, got {value:g}.")


def _what_to_give(**given: float | None) -> str:
    names = {name: f"--{name}" if name != "steps" else "--steps (or --epochs)" for name in given}
    missing = [name for name in given if given[name] is None]
    match missing:
        case []:
            return "nothing is asked for: leave out one of --epsilon, --sigma, --batch and --steps (or --epochs)."
        case [first, second]:
            return (
                f"give {names[first]} (the answer is then {second}) or {names[second]} (the answer is then {first})."
            )
        case _:
            flags = ", ".join(names[name] for name in missing)
            return f"too little is given: give all but one of {flags}; that one is the answer."
