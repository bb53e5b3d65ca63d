"""Lower bounds on ε and μ from the success of an attack: plain functions on anyone's numbers.

*One run* (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846): each of m canaries is in the data with probability ½,
independently; of r of them somebody guesses whether they were in, and v guesses are right. The number of guesses is
fixed beforehand. *One run, f-DP* (Mahloujifar, Melis and Chaudhuri 2024, arXiv 2410.22235) tests a stronger claim,
that the mechanism is as private as one Gaussian mechanism, and bounds more. *Clopper and Pearson* (1934) needs
independent trials, one training for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

_TOLERANCE = 1e-7  # of the bisection; bounds are its lower end


def one_run_epsilon_lower_bound(
    num_canaries: int, num_guesses: int, num_correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Return the largest ε such that (ε, δ) is refuted by one run, at this confidence.

    Args:
        num_canaries: m, those that are in and those that are not.
        num_guesses: r, fixed before the scores were seen.
        num_correct: v, of these.
        delta: δ of the claim. The bound vanishes where 2 · m · δ nears 1 - confidence.

    Raises:
        ValueError: the numbers are not 0 ≤ v ≤ r ≤ m, or δ or the confidence is not in [0, 1).

    Example::

        >>> from dp_transformers import one_run_epsilon_lower_bound
        >>> round(one_run_epsilon_lower_bound(1000, 100, 90, delta=1e-5), 3)
        1.626
    """
    _check(num_canaries, num_guesses, num_correct, delta, confidence)
    return _largest(
        lambda epsilon: one_run_p_value(num_canaries, num_guesses, num_correct, epsilon, delta) <= 1 - confidence
    )


def one_run_p_value(num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, delta: float) -> float:
    """Return the probability, under any (ε, δ)-private mechanism at most, of as many right guesses (theorem 5.2)."""
    right = 1 / (1 + math.exp(-epsilon))
    tail = binom.sf(np.arange(num_correct, -1, -1) - 1, num_guesses, right)  # P[W >= v - i] for i = 0, ..., v
    growth = (tail[1:] - tail[0]) / np.arange(1, num_correct + 1)
    return min(1.0, float(tail[0] + 2 * num_canaries * delta * growth.max(initial=0.0)))


def one_run_gdp_lower_bound(num_canaries: int, num_guesses: int, num_correct: int, confidence: float = 0.95) -> float:
    """Return the largest μ such that μ-GDP is refuted by one run, at this confidence. Arguments as in
    :func:`one_run_epsilon_lower_bound`.

    Example::

        >>> from dp_transformers import one_run_gdp_lower_bound
        >>> round(one_run_gdp_lower_bound(1000, 100, 90), 3)
        0.603
    """
    _check(num_canaries, num_guesses, num_correct, 0.0, confidence)
    return _largest(lambda mu: _refutes_gdp(num_canaries, num_guesses, num_correct, mu, 1 - confidence))


def one_run_fdp_epsilon_lower_bound(
    num_canaries: int, num_guesses: int, num_correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Return ε at δ of the most private Gaussian mechanism that one run does not refute. It bounds a mechanism that is
    as private as a Gaussian one at every δ, and not any (ε, δ)-private one. Arguments as in
    :func:`one_run_epsilon_lower_bound`; δ is above 0.

    Example::

        >>> from dp_transformers import one_run_fdp_epsilon_lower_bound
        >>> round(one_run_fdp_epsilon_lower_bound(1000, 100, 90, delta=1e-5), 3)
        2.456
    """
    import dp_accounting as dp

    _check(num_canaries, num_guesses, num_correct, delta, confidence)
    mu = one_run_gdp_lower_bound(num_canaries, num_guesses, num_correct, confidence)
    return dp.get_epsilon_gaussian(1 / mu, delta) if mu > 0 else 0.0


def _refutes_gdp(num_canaries: int, num_guesses: int, num_correct: int, mu: float, alpha: float) -> bool:
    """Return True if as many right guesses have a probability below ``alpha`` under μ-GDP (algorithm 2 of the f-DP
    paper)."""
    right, wrong = alpha * num_correct / num_canaries, alpha * (num_guesses - num_correct) / num_canaries
    for i in range(num_correct - 1, -1, -1):
        larger = max(wrong, float(ndtr(ndtri(right) - mu)))
        right = min(1.0, right + i / (num_guesses - i) * (larger - wrong))
        wrong = larger
    return right + wrong > num_guesses / num_canaries


def clopper_pearson_epsilon_lower_bound(
    true_positives: int, num_in: int, false_positives: int, num_out: int, delta: float, confidence: float = 0.95
) -> float:
    """Return the largest ε such that (ε, δ) is refuted by the rates of an attack over independent trials.

    Args:
        true_positives: Trials with the canary in which the attack says so, of ``num_in``.
        false_positives: Trials without it in which the attack says that it was in, of ``num_out``.

    Raises:
        ValueError: counts are negative or larger than the numbers of trials, or δ or the confidence is not in [0, 1).

    Example::

        >>> from dp_transformers import clopper_pearson_epsilon_lower_bound
        >>> round(clopper_pearson_epsilon_lower_bound(900, 1000, 100, 1000, delta=1e-5), 3)
        1.99
    """
    detected, alarms = _rates(true_positives, num_in, false_positives, num_out, delta, confidence)
    return max(0.0, math.log((detected - delta) / alarms)) if detected > delta else 0.0


def clopper_pearson_gdp_lower_bound(
    true_positives: int, num_in: int, false_positives: int, num_out: int, confidence: float = 0.95
) -> float:
    """Return the largest μ such that μ-GDP is refuted by the rates of an attack over independent trials. Arguments as
    in :func:`clopper_pearson_epsilon_lower_bound`. One Gaussian mechanism with noise multiplier σ is 1/σ-GDP.

    Example::

        >>> from dp_transformers import clopper_pearson_gdp_lower_bound
        >>> round(clopper_pearson_gdp_lower_bound(900, 1000, 100, 1000), 3)
        2.347
    """
    detected, alarms = _rates(true_positives, num_in, false_positives, num_out, 0.0, confidence)
    return max(0.0, float(ndtri(detected) - ndtri(alarms)))


def _rates(
    true_positives: int, num_in: int, false_positives: int, num_out: int, delta: float, confidence: float
) -> tuple[float, float]:
    """Return a lower bound on the rate of detection and an upper one on that of false alarms, which hold together."""
    _check(num_in, num_in, true_positives, delta, confidence)
    _check(num_out, num_out, false_positives, delta, confidence)
    alpha = (1 - confidence) / 2
    detected = beta.ppf(alpha, true_positives, num_in - true_positives + 1) if true_positives else 0.0
    alarms = beta.ppf(1 - alpha, false_positives + 1, num_out - false_positives) if false_positives < num_out else 1.0
    return float(detected), float(alarms)


def largest_one_run_bound(num_canaries: int, num_guesses: int, delta: float, confidence: float = 0.95) -> float:
    """Return the largest bound that :func:`one_run_epsilon_lower_bound` can show, with all guesses right.

    Example::

        >>> from dp_transformers import largest_one_run_bound
        >>> round(largest_one_run_bound(1000, 1000, delta=1e-5), 3)
        5.782
    """
    return one_run_epsilon_lower_bound(num_canaries, num_guesses, num_guesses, delta, confidence)


def _check(num_canaries: int, num_guesses: int, num_correct: int, delta: float, confidence: float) -> None:
    if not 0 <= num_correct <= num_guesses <= num_canaries or not num_canaries:
        raise ValueError(
            f"{num_correct} right of {num_guesses} guesses on {num_canaries} canaries: counts must not be negative, "
            "and each is at most the next one."
        )
    if not (0 <= delta < 1 and 0 < confidence < 1):
        raise ValueError(f"delta must be in [0, 1) and confidence between 0 and 1, got {delta} and {confidence}.")


def _largest(is_refuted: Callable[[float], bool], limit: float = 100.0) -> float:
    """Return the largest parameter that is refuted, by bisection; 0 if none is."""
    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_refuted(high) and high < limit:
        low, high = high, 2 * high
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low
