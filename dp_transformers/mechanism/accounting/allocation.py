"""The privacy loss of random allocation, in which an example takes part in one of t steps, chosen at random.

An attacker who knows everything but whether the example takes part sees, in each step, a known vector plus Gaussian
noise, plus the example's vector of norm at most 1 in step I. Without the example (Q) the likelihood ratio of all t
steps is the mean of t ratios, one for each value of I: L = (X_1 + ... + X_t) / t with X_i = exp(Z_i/σ - 1/(2σ²)) for
independent normal Z_i, for vectors of norm 1. Both directions of (ε, δ) are the mean under Q of a convex function of
L: (L - e^ε)+ to remove the example, (1 - e^ε L)+ to add it. Three facts bound them from above, for vectors chosen
adaptively and any other examples:

1. A shorter vector makes X_i smaller in convex order (an earlier stage of the same martingale), and a run that stops
   early makes L smaller (the mean of L given what was seen). From the last step to the first, each X_i may therefore
   be replaced by an independent one of norm 1, since the mean over later ones is convex in what came before.
2. Splitting the probability of a number between a smaller and a larger one such that the mean stays makes it larger in
   convex order. So X_i is rounded to neighbours on a grid, and sums are rounded again. On a geometric grid, where the
   sum of two numbers lies between neighbours depends only on how far the two are apart.
3. A number that is lowered to the end of the grid lowers no (1 - e^ε L)+, and each (L - e^ε)+ by what it is lowered by
   at most, whose mean is added to δ.

The result is a dominating pair of discrete distributions, so several of them compose as all such pairs do. If an
example has the same step in each of E passes, X_i is a product of E such factors, which is one factor with σ/√E.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

LEAST_NOISE = 0.04  # below this σ, exp(10/σ + 1/(2σ²)) overflows float64
_TAIL = 10.0  # standard deviations of the noise that the grid covers
_NEGLIGIBLE = 1e-22  # probability, or share of the mean, that is moved to an end of the grid
_CELLS_OF_DEVIATION = 16  # grid cells in a standard deviation of the loss
_FINER = 4  # factor by which grids of partial sums are finer than their deviation requires


@dataclass(frozen=True)
class RandomAllocationDpEvent(dp_accounting.DpEvent):
    """A Gaussian mechanism in which an example takes part in one of ``num_steps`` steps, chosen uniformly."""

    event: dp_accounting.GaussianDpEvent
    num_steps: int

    @property
    def interval(self) -> float:
        """Interval of the grid of privacy losses at which ε is a few 1e-4 too large."""
        return _interval(self.event.noise_multiplier, self.num_steps)


class PLDAccountant(dp_accounting.pld.PLDAccountant):
    """The PLD accountant of dp_accounting, extended to random allocation."""

    def _maybe_compose(self, event: dp_accounting.DpEvent, count: int, do_compose: bool) -> Any:
        if not isinstance(event, RandomAllocationDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if self.neighboring_relation is dp_accounting.NeighboringRelation.REPLACE_ONE:
            return self.CompositionErrorDetails(event, "replacing an example moves its own sum by two gradients")
        if do_compose and event.event.noise_multiplier < LEAST_NOISE:
            self._contains_non_dp_event = True
        elif do_compose:
            one = allocation_losses(event, self._value_discretization_interval)
            self._pld = self._pld.compose(one.self_compose(count))
        return None


@functools.lru_cache(maxsize=32)
def allocation_losses(event: RandomAllocationDpEvent, interval: float) -> PrivacyLossDistribution:
    """Return the privacy loss distribution of one allocation, for adding or removing the example."""
    steps = event.num_steps
    offset = math.log(steps) % interval  # puts a sum divided by the number of steps on a multiple of the interval
    total, _ = _sums_of(event.event.noise_multiplier, steps, interval, offset)
    lowest, without = total.lowest - math.floor(math.log(steps) / interval), total.probabilities
    ratios = np.exp(interval * (lowest + np.arange(len(without))))
    return PrivacyLossDistribution(
        pld_pmf.DensePLDPmf(interval, lowest, without * ratios, total.mean_beyond / steps, True),
        pld_pmf.DensePLDPmf(interval, 1 - lowest - len(without), without[::-1], total.at_zero, True),
    )


def _interval(sigma: float, steps: int) -> float:
    """Return a share of the approximate standard deviation of log L for ``steps`` steps."""
    x = sigma**-2
    variance = min(math.log1p(math.expm1(min(x, 700.0)) / steps), x)
    return 2 ** (math.floor(4 * math.log2(math.sqrt(variance) / _CELLS_OF_DEVIATION)) / 4)


class _Masses(NamedTuple):
    """A distribution on 0 and on exp(interval · (lowest + k) + offset) for k = 0, 1, ...

    Attributes:
        mean_beyond: Mean amount by which larger numbers were lowered to the end of the grid.
    """

    at_zero: float
    lowest: int
    probabilities: np.ndarray
    mean_beyond: float


def _sums_of(sigma: float, count: int, interval: float, offset: float) -> tuple[_Masses, _Masses]:
    """Return the distributions of the sums of ``count`` and of ``count + 1`` of the X_i. Partial sums use a coarser
    grid, since rounding errors average out."""
    if count == 1:
        one = _lognormal(sigma, interval, offset)
        return one, _trimmed(_sum(one, one, interval), interval, offset)
    times = 2 ** max(0, math.floor(math.log2(_interval(sigma, count // 2) / interval / _FINER)))
    parts = _sums_of(sigma, count // 2, times * interval, offset)
    smaller, larger = (_on_finer_grid(part, times) for part in parts)
    pairs = ((smaller, smaller), (smaller, larger)) if count % 2 == 0 else ((smaller, larger), (larger, larger))
    first, second = (_trimmed(_sum(*pair, interval), interval, offset) for pair in pairs)
    return first, second


def _on_finer_grid(x: _Masses, times: int) -> _Masses:
    probabilities = np.zeros((len(x.probabilities) - 1) * times + 1)
    probabilities[::times] = x.probabilities
    return x._replace(lowest=times * x.lowest, probabilities=probabilities)


def _lognormal(sigma: float, interval: float, offset: float) -> _Masses:
    """Return the distribution of exp(Z/σ - 1/(2σ²)) for normal Z."""
    from scipy.special import ndtr

    middle = -0.5 / sigma**2
    ends = -_TAIL, _TAIL + 1 / sigma  # where Z is; with the example its mean is 1/σ
    lowest, highest = (math.floor((middle + end / sigma - offset) / interval) for end in ends)
    logs = interval * np.arange(lowest, highest + 2) + offset
    at, points = sigma * (logs - middle), np.exp(logs)  # where Z is at these points
    mass, mean = _between(ndtr, at), _between(ndtr, at - 1 / sigma)
    upper = np.clip((mean - mass * points[:-1]) / np.diff(points), 0, mass)
    below, above = ndtr(at[0]), ndtr(-at[-1])
    raised = min(below, ndtr(at[0] - 1 / sigma) / points[0])
    probabilities = np.concatenate([[raised], upper]) + np.concatenate([mass - upper, [above]])
    mean_beyond = max(0.0, ndtr(1 / sigma - at[-1]) - above * points[-1])
    return _Masses(float(below - raised), lowest, probabilities, float(mean_beyond))


def _between(cdf: np.ufunc, at: np.ndarray) -> np.ndarray:
    """Return the normal probabilities between neighbouring points, computed from the nearer tail."""
    return np.where(at[:-1] > 0, cdf(-at[:-1]) - cdf(-at[1:]), cdf(at[1:]) - cdf(at[:-1]))


def _sum(a: _Masses, b: _Masses, interval: float) -> _Masses:
    """Return the distribution of the sum of two independent numbers."""
    lowest = min(a.lowest, b.lowest)
    highest = max(m.lowest + len(m.probabilities) for m in (a, b)) + math.ceil(math.log(2) / interval)
    result = np.zeros(highest - lowest + 1)
    for larger, smaller, least in ((a, b, 0), (b, a, 1)):
        start = larger.lowest - lowest
        _add_sums(result[start:], larger, smaller, least, interval)
        result[start : start + len(larger.probabilities)] += smaller.at_zero * larger.probabilities
    return _Masses(a.at_zero * b.at_zero, lowest, result, a.mean_beyond + b.mean_beyond)


def _add_sums(result: np.ndarray, larger: _Masses, smaller: _Masses, least: int, interval: float) -> None:
    """Add the probabilities of the sums x + y with x at least ``least`` cells above y to ``result``, which begins at
    the lowest x. With d cells between them, the sum is x · (1 + e^(-d·interval))."""
    p, q, ratio = larger.probabilities, smaller.probabilities, math.exp(interval)
    shift = larger.lowest - smaller.lowest
    far = 1 + max(0, math.ceil(-math.log(math.expm1(interval)) / interval))  # from here on in the cell above x
    for d in range(max(least, shift - len(q) + 1), min(far, shift + len(p))):
        first, last = max(0, d - shift), min(len(p), len(q) + d - shift)
        pairs = p[first:last] * q[first + shift - d : last + shift - d]
        factor = 1 + math.exp(-d * interval)
        cell = int(math.log(factor) / interval + 1e-12)
        share = min(max((factor / ratio**cell - 1) / (ratio - 1), 0.0), 1.0)
        result[first + cell : last + cell] += (1 - share) * pairs
        result[first + cell + 1 : last + cell + 1] += share * pairs
    first = max(0, far - shift)
    if first < len(p):
        nearest = np.arange(first, len(p)) + shift - far  # of the y that are so far below
        inside = np.minimum(nearest, len(q) - 1)
        mass, mean = np.cumsum(q)[inside], _decayed_sums(q, 1 / ratio)[inside]
        upper = np.minimum(mass, mean * np.exp(-interval * (nearest - inside + far)) / (ratio - 1))
        result[first : len(p)] += p[first:] * (mass - upper)
        result[first + 1 : len(p) + 1] += p[first:] * upper


def _decayed_sums(numbers: np.ndarray, decay: float) -> np.ndarray:
    """Return Σ numbers[j] · decay^(k - j) over j ≤ k, for each k."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], [1.0, -decay], numbers))


def _trimmed(x: _Masses, interval: float, offset: float) -> _Masses:
    """Cut off the ends of the grid, which carry almost no probability: split the lower end between 0 and the first
    point kept, and lower the upper end to the last."""
    p, points = x.probabilities, np.exp(interval * (x.lowest + np.arange(len(x.probabilities))) + offset)
    first = int(np.searchsorted(np.cumsum(p), _NEGLIGIBLE))
    last = len(p) - 1 - int(np.searchsorted(np.cumsum((p * points)[::-1]), _NEGLIGIBLE * float(p @ points)))
    kept = p[first : last + 1].copy()
    raised = float(p[:first] @ points[:first]) / points[first]
    kept[0] += raised
    kept[-1] += p[last + 1 :].sum()
    lowered = float(p[last + 1 :] @ (points[last + 1 :] - points[last]))
    at_zero = x.at_zero + max(0.0, float(p[:first].sum()) - raised)
    return _Masses(at_zero, x.lowest + first, kept, x.mean_beyond + lowered)
