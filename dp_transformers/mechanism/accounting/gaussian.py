"""ε of Poisson-sampled and full Gaussian steps, by Rényi DP and by privacy loss distributions."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .accountants import check_delta, check_rows

if TYPE_CHECKING:
    import numpy as np
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

MAX_NOISE_MULTIPLIER = 1e6  # a larger σ is accounted for as this one

# dp_accounting's own grid of orders, with two lower ones (large ε) and a denser, longer upper end (small ε).
_LARGE_ORDERS = (80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
ORDERS = (1.02, 1.05, *(1 + k / 10 for k in range(1, 100)), *range(11, 64), *_LARGE_ORDERS)
_RDP_ROUNDING = 1e-13  # per order and step: dp_accounting's float64 sums were seen 1.2e-14 too small at q = 1e-6
FLOAT_ROUNDING = 2.2e-16  # of δ, per step: tails composed by FFT were seen 7e-17 * steps too small
_NO_NOISE = 1e-6  # a smaller σ counts as 0
_MIN_RATE = 1e-9  # a smaller positive q is rounded up to this; a q this close to 1 is rounded up to 1
_NEGLIGIBLE = 1e-6  # share of δ spent on each truncation
_CELLS = (1024, 32768)  # least and largest number of grid cells for the losses of one step
_COMPOSED_CELLS = 2**18  # largest number for the losses of the run: 0.1 s and 20 MB
_MAX_STEPS = 10**6  # dp_accounting computes (cells of a step) ** steps as an exact integer when cells < 1000
_MAX_INTERVAL = 100.0  # nats; exp(interval) overflows at 709
_MAX_MECHANISMS = 64  # with more distinct mechanisms, similar ones are merged

GaussianStep = tuple[float, float]  # (σ, q)
Phase = tuple[float, float, int]  # (σ, q, steps)


def group_epsilon(phases: Iterable[Phase], rows: int, delta: float) -> float:
    """Return an upper bound of ε for adding or removing up to ``rows`` rows at once.

    A Poisson draw contains j rows of a group, j ~ Binomial(rows, q), and the sum moves by at most j clipping bounds:
    a dominating mixture of Gaussians (Ganesh 2024, arXiv:2401.10294, Theorem 3.1).

    Args:
        phases: `(noise_multiplier, sample_rate, steps)`.
        rows: Size of the group, at least 1.
        delta: The δ of (ε, δ)-DP, in (0, 1).
    """
    rows, delta = check_rows(rows), check_delta("delta", delta)
    phases = _with_limits(phases)
    if not phases:
        return 0.0
    if _are_unbounded(phases):
        return math.inf
    if rows == 1:
        return epsilon_of_phases(phases, delta, "pld")
    phases = _merge_similar(phases)
    # looser, but never infinite: as if each draw that contains any row of the group contained all
    bound = _rdp_epsilon(tuple((sigma / rows, 1 - (1 - q) ** rows, n) for sigma, q, n in phases), delta)
    return min(bound, _mixture_epsilon(phases, rows, delta))


@functools.lru_cache(maxsize=256)  # a call may take a second, and planning repeats calls
def _mixture_epsilon(phases: tuple[Phase, ...], rows: int, delta: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld

    steps = sum(n for _, _, n in phases)
    usable = delta - FLOAT_ROUNDING * (10 + steps)
    grid = _grid(phases, steps, delta, rows)
    if usable < delta / 2 or grid.interval > _MAX_INTERVAL:
        return math.inf
    parts = []
    for sigma, q, n in phases:
        one = (
            _one_step(sigma / rows, q, grid.interval, grid.log_mass)
            if q == 1
            else pld.from_mixture_gaussian_mechanism(
                sigma,
                list(range(rows + 1)),
                _taken(q, rows).tolist(),
                value_discretization_interval=grid.interval,
                log_mass_truncation_bound=grid.log_mass,
            )
        )
        parts.append(one.self_compose(n, grid.tail_mass))
    total = functools.reduce(lambda before, part: before.compose(part, grid.tail_mass), parts)
    return float(total.get_epsilon_for_delta(usable))


def _taken(q: float, rows: int) -> np.ndarray:
    """Return the (rows + 1,) probabilities that a draw contains 0, 1, ... of ``rows`` rows."""
    from scipy import stats

    chances = stats.binom.pmf(range(rows + 1), rows, q)
    return chances / chances.sum()


def epsilon_of_phases(phases: Iterable[Phase], delta: float, accountant: str = "pld", *, rows: int = 1) -> float:
    """Return an upper bound of ε for adding or removing ``rows`` rows at once."""
    if rows > 1:
        return group_epsilon(phases, rows, delta)
    phases = _with_limits(phases)  # less noise and more sampling bound ε from above, and stay within float64
    if not phases:
        return 0.0
    if _are_unbounded(phases):
        return math.inf
    phases = _merge_similar(phases)
    bound = math.inf
    if accountant == "pld":
        exact = all(q == 1 for _, q, _ in phases)
        bound = _gaussian_epsilon(phases, delta) if exact else _pld_epsilon(phases, delta)
    if bound == math.inf:  # RDP has a bound where PLD has none; where both have one, PLD's is smaller
        bound = _rdp_epsilon(phases, delta)
    return max(0.0, bound)


def _with_limits(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    return tuple(
        (min(float(sigma), MAX_NOISE_MULTIPLIER), round_rate_up(float(q)), n) for sigma, q, n in phases if q * n != 0
    )


def _are_unbounded(phases: Iterable[Phase]) -> bool:
    """Return True if a step has no noise, or its numbers are NaN."""
    return any(not (sigma >= _NO_NOISE and q <= 1) for sigma, q, _ in phases)


def round_rate_up(q: float) -> float:
    return 1.0 if q > 1 - _MIN_RATE else max(q, _MIN_RATE)


def _merge_similar(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Merge into at most `_MAX_MECHANISMS` phases that spend at least as much: round σ down and q up to the finest
    grid with so few points.

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
    return float(rdp.compute_epsilon(ORDERS, total, delta)[0])


@functools.lru_cache(maxsize=256)
def _rdp(sigma: float, q: float) -> np.ndarray:
    """Return the (orders,) RDP of one step."""
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant(ORDERS)
    with _without_excluded_order_warnings():
        accountant.compose(gaussian_event(sigma, q))
    return accountant.rdp


def gaussian_event(sigma: float, q: float) -> Any:
    """Return the event of one step."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(sigma)
    return gaussian if q == 1 else dp_accounting.PoissonSampledDpEvent(q, gaussian)


@contextlib.contextmanager
def _without_excluded_order_warnings() -> Iterator[None]:
    """Drop dp_accounting's log lines on fractional orders that it leaves out because a series converges slowly.

    Leaving them out only loosens the bound, and every call with a small σ would log them.
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
    log_mass: float  # log of the probability mass cut off the noise of one step
    tail_mass: float  # probability mass cut off a composition


def _pld_epsilon(phases: tuple[Phase, ...], delta: float) -> float:
    """Return ε by PLD; infinite if float64 or time do not allow it."""
    steps = sum(n for _, _, n in phases)
    usable = delta - FLOAT_ROUNDING * (10 + steps)
    if usable < delta / 2 or steps > _MAX_STEPS:
        return math.inf
    grid = _grid(phases, steps, delta)
    if grid.interval > _MAX_INTERVAL:
        return math.inf
    return float(_composed(phases, grid).get_epsilon_for_delta(usable))


def _gaussian_epsilon(phases: tuple[Phase, ...], delta: float) -> float:
    """Return ε of full batches, in closed form: they compose to one Gaussian mechanism (arXiv:1805.06530)."""
    import dp_accounting
    import numpy as np

    usable = delta - 10 * FLOAT_ROUNDING
    if usable < delta / 2:
        return math.inf
    with np.errstate(divide="ignore"):  # log(0), for a large σ
        return float(dp_accounting.get_epsilon_gaussian(sum(n / sigma**2 for sigma, _, n in phases) ** -0.5, usable))


def _grid(phases: tuple[Phase, ...], steps: int, delta: float, rows: int = 1) -> _Grid:
    """Choose the grid of privacy losses. Connect-the-Dots is an upper bound on any grid; its cost grows with
    1 / interval, its excess with interval².

    Rounding a loss to the grid adds at most interval² / 4 to its variance, so the interval is a sixteenth of the
    standard deviation of a step's loss (ε a few 1e-4 too large), finer if that is free, or coarser if cost or float64
    require it. Interval and cut-off change in jumps, so that the distribution of a step is reused as the run grows.
    """
    log_mass = math.log(_NEGLIGIBLE * delta) - math.log(4) * math.ceil(math.log(steps, 4))
    variance = sum(n * _loss_variance(sigma, q, rows) for sigma, q, n in phases)
    widest = max(_loss_range(sigma, q, math.sqrt(-2 * log_mass), rows) for sigma, q, _ in phases)
    composed = variance / widest + 16 * math.sqrt(variance)  # the range that dp_accounting's Chernoff bounds leave
    fewest, most = _CELLS
    interval = max(
        min(math.sqrt(variance / steps) / 16, widest / fewest),
        widest / most,
        composed / _COMPOSED_CELLS,
        3e-8 * math.sqrt(steps * widest),  # finer, and cancellation in Connect-the-Dots adds percents to the mass
    )
    return _Grid(2 ** (math.floor(4 * math.log2(interval)) / 4), log_mass, _NEGLIGIBLE * delta)


def loss_interval(phases: Iterable[Phase], delta: float) -> float:
    """Return the interval of a grid for the losses of these steps, under any neighbouring relation."""
    phases = tuple((max(sigma, 1e-3), q, n) for sigma, q, n in _with_limits(phases))
    return min(1.0, _grid(phases, sum(n for *_, n in phases), delta).interval) if phases else 1.0


def _loss_variance(sigma: float, q: float, rows: int) -> float:
    """Return the approximate variance of a step's privacy loss: χ² if losses are small, else that of separate modes,
    one for each number of rows in a draw."""
    x = sigma**-2
    if rows == 1:
        return min(q * q * math.expm1(min(x, 700.0)), q * x + q * (1 - q) * x * x / 4)
    import numpy as np

    taken, squares = _taken(q, rows), np.arange(rows + 1.0) ** 2
    small = taken @ np.expm1(np.minimum(np.sqrt(np.outer(squares, squares)) * x, 700.0)) @ taken
    mean = taken @ squares
    return float(min(small, mean * x + taken @ (squares - mean) ** 2 * x * x / 4))


def _loss_range(sigma: float, q: float, z: float, rows: int) -> float:
    """Return the range of a step's privacy loss over outcomes within z standard deviations, as if a draw that contains
    any row contained all."""
    sigma, q = sigma / rows, 1 - (1 - q) ** rows if rows > 1 else q
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


@functools.lru_cache(maxsize=8)  # every call repeats all phases but the last, which grows
def _composed(phases: tuple[Phase, ...], grid: _Grid) -> PrivacyLossDistribution:
    *earlier, (sigma, q, n) = phases
    last = _one_step(sigma, q, grid.interval, grid.log_mass).self_compose(n, grid.tail_mass)
    return _composed(tuple(earlier), grid).compose(last, grid.tail_mass) if earlier else last
