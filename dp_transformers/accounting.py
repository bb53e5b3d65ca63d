"""The ε of a DP-SGD run, and the noise that meets a target ε.

A step releases a Gaussian-noised sum over a Poisson draw: every example takes part with probability q (`sample_rate`),
and the noise has standard deviation σ (`noise_multiplier`) times the clipping bound. Neighbouring data sets differ by
adding or removing one example. All numbers come from Google's `dp_accounting`; both accountants give upper bounds:

- `"pld"`: privacy loss distributions, discretised pessimistically by Connect-the-Dots (Doroshenko et al. 2022,
  arXiv:2207.04380) and composed by FFT. Within 0.1% of the exact ε in ordinary settings; never above `"rdp"`.
- `"rdp"`: Rényi DP of the sampled Gaussian (Mironov, Talwar and Zhang 2019, arXiv:1908.10530), turned into (ε, δ) by
  Proposition 12 of Canonne, Kamath and Steinke (arXiv:2004.00010). Some 10% above PLD at ε = 8, more at either end.

`dp_accounting`, numpy and scipy are imported by the first call, not by importing this module.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from dp_accounting import DpEvent
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

ACCOUNTANTS = ("pld", "rdp")
MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 1e-3, 1e6  # what calibration searches

# dp_accounting's own grid of orders, with two lower ones (large ε) and a denser, longer upper end (small ε).
_ORDERS = (
    1.02,
    1.05,
    *tuple(1 + k / 10 for k in range(1, 100)),
    *tuple(range(11, 64)),
    80,
    96,
    112,
    128,
    160,
    192,
    256,
    320,
    384,
    512,
    768,
    1024,
    1536,
    2048,
)
_RDP_ROUNDING = 1e-13  # per order and step: dp_accounting's float64 sums were seen 1.2e-14 too small at q = 1e-6
_FLOAT_ROUNDING = 2.2e-16  # of δ, per step: tails composed by FFT were seen 7e-17 * steps too small
_NO_NOISE = 1e-6  # σ taken for 0
_MIN_RATE = 1e-9  # what a smaller positive q is taken for; one as close to 1 is taken for 1
_NEGLIGIBLE = 1e-6  # share of δ given away to each truncation
_CELLS = (1024, 32768)  # fewest and most grid cells for the losses of one step
_COMPOSED_CELLS = 2**18  # most for those of the run: 0.1 s and 20 MB
_MAX_STEPS = 10**6  # dp_accounting computes (cells of a step) ** steps as an exact integer when cells < 1000
_MAX_INTERVAL = 100.0  # nats; exp(interval) overflows at 709
_MAX_MECHANISMS = 64  # distinct ones, beyond which similar ones are merged

GaussianStep = tuple[float, float]  # (σ, q)
Phase = tuple[float, float, int]  # (σ, q, steps)


def compute_epsilon(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str = "pld"
) -> float:
    """ε spent by `steps` Poisson-subsampled Gaussian steps, at `delta`, under add/remove-one-example.

    Args:
        noise_multiplier: σ, the noise's standard deviation over the clipping bound; 0 (below 1e-6) spends ε = inf.
        sample_rate: q, the probability with which an example takes part in a step, in [0, 1].
        steps: Number of optimizer steps taken, empty draws included.
        delta: The δ of (ε, δ)-DP, in (0, 1).
        accountant: `"pld"` (tight) or `"rdp"`.

    Returns:
        An upper bound of ε, at least 0. Where PLD cannot be had in good time (σ below about 0.005, more than a million
        steps) or in float64 (δ below about 4e-16 * `steps`), `"pld"` returns the RDP bound.

    Raises:
        ValueError: An argument is out of range.

    Example::

        >>> from dp_transformers import compute_epsilon
        >>> round(compute_epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 2)
        1.83
    """
    run = PrivacyAccountant(accountant)
    run.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)
    return run.epsilon(delta)


def calibrate_noise_multiplier(
    target_epsilon: float, target_delta: float, sample_rate: float, steps: int, accountant: str = "pld", rows: int = 1
) -> float:
    """The smallest σ with which `steps` steps spend at most `target_epsilon`, found to 0.1% of ε.

    `compute_epsilon` of the value returned was evaluated, and is at most the target. It is above 0.999 times the
    target unless nothing is spent at all (`steps` or `sample_rate` 0: returns 0.0), the target is so large that
    `MIN_NOISE_MULTIPLIER` meets it, or the bound jumps across it (RDP's, down to 0, at a large δ).

    Args:
        target_epsilon: ε to stay within, positive and finite.
        target_delta: The δ it holds at, in (0, 1).
        sample_rate: q, the probability with which an example takes part in a step, in [0, 1].
        steps: Number of optimizer steps of the whole run.
        accountant: `"pld"` (less noise) or `"rdp"`.
        rows: Rows of one person: with more than one, the target is met for all of them together (`group_epsilon`).

    Raises:
        ValueError: An argument is out of range, or not even `MAX_NOISE_MULTIPLIER` meets the target.

    Example::

        >>> from dp_transformers import calibrate_noise_multiplier
        >>> round(calibrate_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.01, steps=1000), 2)
        0.96
    """
    check_accountant(accountant)
    target, delta = _check_epsilon("target_epsilon", target_epsilon), _check_delta("target_delta", target_delta)
    q, steps, rows = _check_rate(sample_rate), _check_count("steps", steps), _check_rows(rows)
    if q == 0 or steps == 0:
        return 0.0

    def epsilon_of(sigma: float) -> float:
        phases = ((sigma, q, steps),)
        return _epsilon(phases, delta, accountant) if rows == 1 else group_epsilon(phases, rows, delta)

    sigma = smallest_noise(epsilon_of, target, rows * guess_noise_multiplier(target, delta, q, steps))
    if sigma is None:
        of_a_person = f", {rows} rows of one person" if rows > 1 else ""
        raise ValueError(
            f"target_epsilon={target_epsilon} at target_delta={target_delta} is out of reach for {steps} steps at "
            f"sample_rate={q}: even noise_multiplier={MAX_NOISE_MULTIPLIER:g} spends more "
            f"(accountant={accountant!r}{of_a_person}). Choose a larger epsilon or delta, fewer steps or a smaller "
            "sample rate (a smaller expected batch size, or more data)"
            + (", fewer rows of one person" if rows > 1 else "")
            + (", or accountant='pld'." if accountant == "rdp" else ".")
        )
    return sigma


class PrivacyAccountant:
    """ε of a run whose (σ, q) may change on the way.

    Args:
        accountant: `"pld"` or `"rdp"`, see the module's docstring.
    """

    def __init__(self, accountant: str = "pld") -> None:
        self.accountant = check_accountant(accountant)
        self._counts: Counter[GaussianStep] = Counter()

    def step(self, *, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """Count `steps` steps taken with this σ and q. Composition does not depend on order: equal pairs are merged.

        Raises:
            ValueError: An argument is out of range.
        """
        mechanism = _check_noise(noise_multiplier), _check_rate(sample_rate)
        if steps := _check_count("steps", steps):
            self._counts[mechanism] += steps

    @property
    def steps(self) -> int:
        """Steps counted so far, over all phases."""
        return self._counts.total()

    @property
    def history(self) -> list[Phase]:
        """`(noise_multiplier, sample_rate, steps)` of each distinct mechanism, in order of first use."""
        return [(sigma, q, n) for (sigma, q), n in self._counts.items()]

    def epsilon(self, delta: float) -> float:
        """ε spent so far at `delta`: what `compute_epsilon` says, for all phases together.

        Cheap to repeat as steps accumulate: what the finished phases spent is kept (tens of milliseconds a call).
        With more than 64 distinct mechanisms, σ is rounded down and q up to a common grid (an upper bound still).

        Raises:
            ValueError: `delta` is not in (0, 1).
        """
        return _epsilon(self.history, _check_delta("delta", delta), self.accountant)

    def max_steps(
        self, *, target_epsilon: float, delta: float, noise_multiplier: float, sample_rate: float, limit: int
    ) -> int:
        """The largest k <= `limit` such that k more steps of (σ, q) keep `epsilon(delta)` <= `target_epsilon`.

        0 when not one more step fits, or the target is already exceeded. Nothing is counted.

        Raises:
            ValueError: An argument is out of range.
        """
        target, delta = _check_epsilon("target_epsilon", target_epsilon), _check_delta("delta", delta)
        mechanism, limit = (_check_noise(noise_multiplier), _check_rate(sample_rate)), _check_count("limit", limit)

        def fits(k: int) -> bool:
            after = self._counts + Counter({mechanism: k})
            return _epsilon([(sigma, q, n) for (sigma, q), n in after.items()], delta, self.accountant) <= target

        return most_steps(fits, limit)


def most_steps(fits: Callable[[int], bool], limit: int) -> int:
    """The largest k <= `limit` with `fits(k)`, which no larger k does once one does not; 0 if none does."""
    if fits(limit):
        return limit
    low, high = 0, limit  # low fits or is 0, high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def smallest_noise(epsilon_of: Callable[[float], float], target: float, guess: float) -> float | None:
    """The smallest σ with `epsilon_of(σ)` <= `target`, found to 0.1% of ε near `guess`; None if not even the largest
    will do."""

    def excess(sigma: float) -> float:  # log(ε / target): decreasing in σ, nearly linear in log σ
        return math.log(min(max(epsilon_of(sigma) / target, 1e-3), 1e9))

    return _decreasing_root(excess, guess)


# --- events ----------------------------------------------------------------------------------------------------------


def event_epsilon(
    event: DpEvent, delta: float, accountant: str = "pld", *, relation: str = "add_or_remove_one", rows: int = 1
) -> float:
    """ε of an event of `dp_accounting` at `delta`, for neighbours by `relation`, an upper bound.

    Poisson-sampled and full Gaussian steps under add/remove-one are accounted for by the numerics of this module, all
    other events by the accountant of `dp_accounting`.

    Args:
        rows: Size of the group that is added or removed; more than 1 for the former steps only (`group_epsilon`).

    Raises:
        ValueError: The accountant has no bound for this event.
    """
    delta, rows = _check_delta("delta", delta), _check_count("rows", rows)
    phases = _phases(event) if relation == "add_or_remove_one" else None
    if phases is not None:
        return (
            _epsilon(phases, delta, check_accountant(accountant)) if rows == 1 else group_epsilon(phases, rows, delta)
        )
    if rows > 1:
        raise ValueError(
            f"there is no bound for groups of {rows} rows (max_examples_per_person) of {type(event).__name__} under "
            f"{relation}; only Poisson sampling has one. Take PoissonSampling, or leave max_examples_per_person at 1, "
            "which protects one row."
        )
    counted = _accountant_of_events(accountant, relation)
    if why := unsupported(event, accountant, relation=relation):
        raise ValueError(
            f"{why} Choose another accountant, or an event that it bounds (Gaussian steps, Poisson-sampled or of all "
            "examples)."
        )
    return max(0.0, float(counted.compose(event).get_epsilon(delta)))


def unsupported(event: DpEvent, accountant: str, *, relation: str = "add_or_remove_one") -> str | None:
    """Why `accountant` has no bound for an event, if it has none."""
    if (relation == "add_or_remove_one" and _phases(event) is not None) or _accountant_of_events(
        accountant, relation
    ).supports(event):
        return None
    return (
        f"accountant={accountant!r} has no bound on epsilon for {event} under {relation}, so nothing is known of what "
        "it spends."
    )


def _accountant_of_events(accountant: str, relation: str) -> Any:
    import dp_accounting

    neighbours = dp_accounting.NeighboringRelation[relation.upper()]
    if check_accountant(accountant) == "pld":
        return dp_accounting.pld.PLDAccountant(neighbours)
    return dp_accounting.rdp.RdpAccountant(_ORDERS, neighbours)


def _phases(event: DpEvent) -> list[Phase] | None:
    """The phases that an event is composed of, if those are all: equal ones are one, in order of first use."""
    counts: Counter[GaussianStep] = Counter()
    for part, count in _parts(event, 1):
        if part is None:
            return None
        counts[part] += count
    return [(sigma, q, n) for (sigma, q), n in counts.items() if n]


def _parts(event: DpEvent, count: int) -> Iterator[tuple[GaussianStep | None, int]]:
    import dp_accounting as dp

    if isinstance(event, dp.ComposedDpEvent):
        for part in event.events:
            yield from _parts(part, count)
    elif isinstance(event, dp.SelfComposedDpEvent):
        yield from _parts(event.event, count * event.count)
    elif isinstance(event, dp.GaussianDpEvent):
        yield (event.noise_multiplier, 1.0), count
    elif isinstance(event, dp.PoissonSampledDpEvent) and isinstance(event.event, dp.GaussianDpEvent):
        yield (event.event.noise_multiplier, event.sampling_probability), count
    elif not isinstance(event, dp.NoOpDpEvent):
        yield None, count


def group_epsilon(phases: Iterable[Phase], rows: int, delta: float) -> float:
    """ε for adding or removing up to ``rows`` rows at once, an upper bound.

    With a group, a Poisson draw takes j of its rows with the probabilities of Binomial(rows, q), and the sum moves by
    at most j bounds: a mixture of Gaussians, which dominates (Ganesh 2024, arXiv:2401.10294, Theorem 3.1).
    ``group_epsilon(phases, 1, delta)`` is `epsilon`.

    Args:
        phases: `(noise_multiplier, sample_rate, steps)`, as `PrivacyAccountant.history`.
        rows: Size of the group, at least 1.
        delta: The δ of (ε, δ)-DP, in (0, 1).
    """
    rows = _check_rows(rows)
    phases = tuple((min(sigma, MAX_NOISE_MULTIPLIER), _round_rate_up(q), n) for sigma, q, n in phases if q * n > 0)
    if not phases:
        return 0.0
    if any(sigma < _NO_NOISE for sigma, _, _ in phases):
        return math.inf
    if rows == 1:
        return _epsilon(phases, _check_delta("delta", delta), "pld")
    phases = _merge_similar(phases)
    # the worst case of a group, as if each of its draws took all its rows, at the rate of drawing any: looser, and
    # always to be had
    bound = _rdp_epsilon(
        tuple((sigma / rows, 1 - (1 - q) ** rows, n) for sigma, q, n in phases), _check_delta("delta", delta)
    )
    return min(bound, _mixture_epsilon(phases, rows, delta))


def _mixture_epsilon(phases: tuple[Phase, ...], rows: int, delta: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld
    from scipy import stats

    steps = sum(n for _, _, n in phases)
    usable = delta - _FLOAT_ROUNDING * (10 + steps)
    alike = tuple((sigma / rows, 1 - (1 - q) ** rows, n) for sigma, q, n in phases)
    grid = _grid(alike, steps, delta)
    if usable < delta / 2 or grid.interval > _MAX_INTERVAL:
        return math.inf
    parts = []
    for sigma, q, n in phases:
        chances = stats.binom.pmf(range(rows + 1), rows, q)
        one = pld.from_mixture_gaussian_mechanism(
            sigma,
            list(range(rows + 1)),
            (chances / chances.sum()).tolist(),
            value_discretization_interval=grid.interval,
            log_mass_truncation_bound=grid.log_mass,
        )
        parts.append(one.self_compose(n, grid.tail_mass))
    total = functools.reduce(lambda before, part: before.compose(part, grid.tail_mass), parts)
    return float(total.get_epsilon_for_delta(usable))


def _epsilon(phases: Iterable[Phase], delta: float, accountant: str) -> float:
    # Less noise and more sampling bound ε from above, and spare the formulas below what float64 cannot hold.
    phases = tuple((min(sigma, MAX_NOISE_MULTIPLIER), _round_rate_up(q), n) for sigma, q, n in phases if q * n > 0)
    if not phases:
        return 0.0
    if any(sigma < _NO_NOISE for sigma, _, _ in phases):
        return math.inf
    phases = _merge_similar(phases)
    bound = _rdp_epsilon(phases, delta)
    if accountant == "pld":  # both are upper bounds, so their minimum is one
        exact = all(q == 1 for _, q, _ in phases)
        bound = min(bound, _gaussian_epsilon(phases, delta) if exact else _pld_epsilon(phases, delta))
    return max(0.0, bound)


def _round_rate_up(q: float) -> float:
    return 1.0 if q > 1 - _MIN_RATE else max(q, _MIN_RATE)


def _merge_similar(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """At most `_MAX_MECHANISMS` phases that spend no less: σ rounded down and q up, on the finest grid that will do.

    More noise and a smaller q are both post-processing (add noise; replace the output by an empty draw's at random).
    """
    merged, ratio = phases, 1.0025
    while len(merged) > _MAX_MECHANISMS:
        ratio, counts = ratio**2, Counter()
        for sigma, q, n in phases:
            q_up = min(1.0, ratio ** math.ceil(math.log(q, ratio)))
            counts[ratio ** math.floor(math.log(sigma, ratio)), q_up] += n
        merged = tuple((sigma, q, n) for (sigma, q), n in counts.items())
    return merged


# --- RDP -------------------------------------------------------------------------------------------------------------


def _rdp_epsilon(phases: tuple[Phase, ...], delta: float) -> float:
    from dp_accounting import rdp

    # an array, where dp_accounting's types want a list
    total: Any = sum(n * (_rdp(sigma, q) + _RDP_ROUNDING) for sigma, q, n in phases)
    return float(rdp.compute_epsilon(_ORDERS, total, delta)[0])


@functools.lru_cache(maxsize=256)
def _rdp(sigma: float, q: float) -> np.ndarray:
    """RDP of one step at each of `_ORDERS`."""
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant(_ORDERS)
    with _without_excluded_order_warnings():
        accountant.compose(_event(sigma, q))
    return accountant.rdp


def _event(sigma: float, q: float) -> Any:
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(sigma)
    return gaussian if q == 1 else dp_accounting.PoissonSampledDpEvent(q, gaussian)


@contextlib.contextmanager
def _without_excluded_order_warnings() -> Iterator[None]:
    """Drop the log lines of dp_accounting about fractional orders it leaves out because a series converges slowly.

    That only loosens the bound, and small σ meets it in every call.
    """
    logger = logging.getLogger("absl")  # absl's own class of logger, provided absl was imported first

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("_compute_log_a_frac failed to converge")

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


# --- PLD -------------------------------------------------------------------------------------------------------------


class _Grid(NamedTuple):
    interval: float  # of the privacy losses, in nats
    log_mass: float  # log of the probability mass cut off one step's noise
    tail_mass: float  # probability mass cut off a composition


def _pld_epsilon(phases: tuple[Phase, ...], delta: float) -> float:
    """ε by PLD, or inf where that is not to be had."""
    steps = sum(n for _, _, n in phases)
    usable = delta - _FLOAT_ROUNDING * (10 + steps)
    if usable < delta / 2 or steps > _MAX_STEPS:
        return math.inf
    grid = _grid(phases, steps, delta)
    if grid.interval > _MAX_INTERVAL:
        return math.inf
    return float(_composed(phases, grid).get_epsilon_for_delta(usable))


def _gaussian_epsilon(phases: tuple[Phase, ...], delta: float) -> float:
    """ε of full batches only, in closed form: they compose to one Gaussian mechanism (arXiv:1805.06530)."""
    import dp_accounting
    import numpy as np

    usable = delta - 10 * _FLOAT_ROUNDING
    if usable < delta / 2:
        return math.inf
    with np.errstate(divide="ignore"):  # log(0), for a large σ
        return float(dp_accounting.get_epsilon_gaussian(sum(n / sigma**2 for sigma, _, n in phases) ** -0.5, usable))


def _grid(phases: tuple[Phase, ...], steps: int, delta: float) -> _Grid:
    """Connect-the-Dots is an upper bound on any grid; its cost goes with 1 / interval, its excess with interval².

    Rounding a loss to the grid adds at most interval² / 4 to its variance, so the interval is a sixteenth of the
    standard deviation of a step's loss (ε a few 1e-4 too large), or finer where that is free, or coarser where cost or
    float64 require it. Interval and cut-off change in jumps only, so that one step's distribution is reused as the run
    grows.
    """
    log_mass = math.log(_NEGLIGIBLE * delta) - math.log(4) * math.ceil(math.log(steps, 4))
    variance = sum(n * _loss_variance(sigma, q) for sigma, q, n in phases)
    widest = max(_loss_range(sigma, q, math.sqrt(-2 * log_mass)) for sigma, q, _ in phases)
    composed = variance / widest + 16 * math.sqrt(variance)  # the range that dp_accounting's Chernoff bounds leave
    fewest, most = _CELLS
    interval = max(
        min(math.sqrt(variance / steps) / 16, widest / fewest),
        widest / most,
        composed / _COMPOSED_CELLS,
        3e-8 * math.sqrt(steps * widest),  # finer, and cancellation in Connect-the-Dots adds percents to the mass
    )
    return _Grid(2 ** (math.floor(4 * math.log2(interval)) / 4), log_mass, _NEGLIGIBLE * delta)


def _loss_variance(sigma: float, q: float) -> float:
    """Variance of one step's privacy loss, roughly: χ² where losses are small, else that of two separate modes."""
    x = sigma**-2
    return min(q * q * math.expm1(min(x, 700.0)), q * x + q * (1 - q) * x * x / 4)


def _loss_range(sigma: float, q: float, z: float) -> float:
    """Spread of one step's privacy loss over outcomes within z standard deviations."""
    unsampled = z / sigma + 0.5 / sigma**2
    upper = unsampled + math.log(q) if unsampled > 700 else math.log1p(q * math.expm1(unsampled))
    lower = -unsampled if q == 1 else math.log1p(q * math.expm1(-unsampled))
    return upper - lower


@functools.lru_cache(maxsize=2 * _MAX_MECHANISMS)
def _one_step(sigma: float, q: float, interval: float, log_mass: float) -> PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=interval, log_mass_truncation_bound=log_mass
    )


@functools.lru_cache(maxsize=8)  # the phases before the one that grows are asked for again at every call
def _composed(phases: tuple[Phase, ...], grid: _Grid) -> PrivacyLossDistribution:
    *earlier, (sigma, q, n) = phases
    last = _one_step(sigma, q, grid.interval, grid.log_mass).self_compose(n, grid.tail_mass)
    return _composed(tuple(earlier), grid).compose(last, grid.tail_mass) if earlier else last


# --- calibration -----------------------------------------------------------------------------------------------------


def guess_noise_multiplier(epsilon: float, delta: float, q: float, steps: int) -> float:
    """σ of a run whose privacy loss is normal with variance μ² = steps · log(1 + q²(e^{1/σ²} - 1)) and mean μ²/2."""
    z = math.sqrt(-2 * math.log(delta))
    mu = 2 * epsilon / (z + math.sqrt(z * z + 2 * epsilon))  # μ²/2 + z·μ = ε
    sigma = math.log1p(math.expm1(min(max(mu * mu / steps, 1e-18), 700.0)) / _round_rate_up(q) ** 2) ** -0.5
    return min(max(sigma, 2 * MIN_NOISE_MULTIPLIER), MAX_NOISE_MULTIPLIER / 2)


def _decreasing_root(excess: Callable[[float], float], guess: float) -> float | None:
    """σ with log(0.999) <= excess(σ) <= 0, or just above a jump across that, or None if excess stays positive.

    Brackets the root around `guess`, then regula falsi on log σ, aimed into the interval, bisecting every third time.
    """
    bottom, top = math.log(MIN_NOISE_MULTIPLIER), math.log(MAX_NOISE_MULTIPLIER)
    low, high, at_low, at_high = -math.inf, math.inf, math.nan, math.nan
    x, stride, count = math.log(guess), 0.1, 0
    while True:
        y = excess(math.exp(x))
        if y > 0:
            low, at_low = x, y
        else:
            high, at_high = x, y
        if math.log(0.999) <= y <= 0 or high - low < 1e-6 or high == bottom:
            return math.exp(high)
        if low == top:
            return None
        if high == math.inf:
            x, stride = min(x + stride, top), 2 * stride
        elif low == -math.inf:
            x, stride = max(x - stride, bottom), 2 * stride
        else:
            count += 1
            share = 0.5 if count % 3 == 0 else (at_low - math.log(0.9995)) / (at_low - at_high)
            x = low + min(max(share, 0.02), 0.98) * (high - low)


# --- arguments -------------------------------------------------------------------------------------------------------


def check_accountant(accountant: str) -> str:
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {ACCOUNTANTS}, got {accountant!r}.")
    return accountant


def _check_number(name: str, value: Any, valid: Callable[[float], bool], rule: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not valid(number):
        raise ValueError(f"{name} must be {rule}; got {value!r}.")
    return number


def _check_noise(value: float) -> float:
    rule = "a finite number >= 0 (noise standard deviation / clipping bound; get one from calibrate_noise_multiplier)"
    return _check_number("noise_multiplier", value, lambda x: 0 <= x < math.inf, rule)


def _check_rate(value: float) -> float:
    rule = "a probability in [0, 1] (expected batch size / number of examples)"
    return _check_number("sample_rate", value, lambda x: 0 <= x <= 1, rule)


def _check_delta(name: str, value: float) -> float:
    rule = "strictly between 0 and 1 (choose it well below 1 / number of examples)"
    return _check_number(name, value, lambda x: 0 < x < 1, rule)


def _check_epsilon(name: str, value: float) -> float:
    rule = "a finite number > 0 (for a run without privacy, set noise_multiplier=0 instead)"
    return _check_number(name, value, lambda x: 0 < x < math.inf, rule)


def _check_rows(value: int) -> int:
    try:
        rows = operator.index(value)
    except TypeError:
        rows = 0
    if rows < 1:
        raise ValueError(
            f"rows must be an int >= 1 (how many rows one person may have, max_examples_per_person); got {value!r}."
        )
    return rows


def _check_count(name: str, value: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"{name} must be an int >= 0 (a number of optimizer steps); got {value!r}.")
    return count
