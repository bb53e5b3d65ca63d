"""Searches for the noise, and for the number of steps, that meet a target ε."""

from __future__ import annotations

import math
from collections.abc import Callable

from .accountants import Accountant, check_accountant, check_count, check_delta, check_epsilon, check_rate, check_rows
from .events import phases_epsilon
from .gaussian import MAX_NOISE_MULTIPLIER, round_rate_up

MIN_NOISE_MULTIPLIER = 1e-3  # lower end of the search


def calibrate_noise_multiplier(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str | Accountant = "pld",
    rows: int = 1,
) -> float:
    """Return the smallest σ with which `steps` steps spend at most `target_epsilon`, found to 0.1% of ε.

    `compute_epsilon` of the returned σ was evaluated, and is at most the target. It is above 0.999 times the target
    unless nothing is spent (`steps` or `sample_rate` is 0: returns 0.0), the target is so large that
    `MIN_NOISE_MULTIPLIER` meets it, or the bound jumps across it (RDP's bound does, down to 0, at a large δ).

    Args:
        target_epsilon: ε to stay within, positive and finite.
        target_delta: The δ of this ε, in (0, 1).
        sample_rate: q, the probability that a step contains a given example, in [0, 1].
        steps: Number of optimizer steps of the whole run.
        accountant: `"pld"` (less noise), `"rdp"`, or one of your own.
        rows: Number of rows of one person. The target is met for all of them together (`group_epsilon`).

    Raises:
        ValueError: An argument is out of range, or not even `MAX_NOISE_MULTIPLIER` meets the target.

    Example::

        >>> from dp_transformers import calibrate_noise_multiplier
        >>> round(calibrate_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.01, steps=1000), 2)
        0.96
    """
    name = check_accountant(accountant)
    q, steps, rows = check_rate(sample_rate), check_count("steps", steps), check_rows(rows)
    return smallest_noise(
        lambda sigma: phases_epsilon(((sigma, q, steps),), target_delta, name, rows=rows),
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=q,
        steps=steps,
        accountant=name,
        rows=rows,
    )


def smallest_noise(
    epsilon_of: Callable[[float], float],
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str,
    rows: int,
) -> float:
    """Return the smallest σ with `epsilon_of(σ)` <= `target_epsilon`, found to 0.1% of ε; 0 if nothing is spent.

    The other arguments give the start of the search, and the message if not even the largest σ is enough.
    """
    target, delta = check_epsilon("target_epsilon", target_epsilon), check_delta("target_delta", target_delta)
    if sample_rate == 0 or steps == 0:
        return 0.0

    def excess(sigma: float) -> float:  # log(ε / target): decreasing in σ, nearly linear in log σ
        return math.log(min(max(epsilon_of(sigma) / target, 1e-3), 1e9))

    sigma = _decreasing_root(excess, rows * guess_noise_multiplier(target, delta, sample_rate, steps))
    if sigma is None:
        of_a_person = f", {rows} rows of one person" if rows > 1 else ""
        raise ValueError(
            f"target_epsilon={target_epsilon} at target_delta={target_delta} is out of reach for {steps} steps at "
            f"sample_rate={sample_rate}: even noise_multiplier={MAX_NOISE_MULTIPLIER:g} spends more "
            f"(accountant={accountant!r}{of_a_person}). Choose a larger epsilon or delta, fewer steps or a smaller "
            "sample rate (a smaller expected batch size, or more data)"
            + (", fewer rows of one person (max_examples_per_person)" if rows > 1 else "")
            + (", or accountant='pld'." if accountant == "rdp" else ".")
        )
    return sigma


def largest_within(epsilon_of: Callable[[int], float], target: float, limit: int, *, guess: int | None = None) -> int:
    """Return the largest k <= `limit` with `epsilon_of(k)` <= `target`, for an increasing ε; 0 if there is none.

    The search starts at the guess, or at `limit`. log ε is nearly linear in log k, so it is regula falsi, with a
    bisection every third time.
    """
    low, high, at_low, at_high = 0, limit + 1, math.nan, math.nan
    k, count = min(max(guess or limit, 1), limit), 0
    while True:
        excess = math.log(min(max(epsilon_of(k) / target, 1e-9), 1e9))
        if excess <= 0:
            low, at_low = k, excess
        else:
            high, at_high = k, excess
        if high - low <= 1:
            return low
        count += 1
        if count % 3 == 0:
            x = math.sqrt(max(low, 1) * high)
        elif low > 0 and high <= limit:
            x = low * (high / low) ** (at_low / (at_low - at_high))
        else:  # ε grows at least as fast as the root of k, where it grows
            x = k * math.exp(-2 * excess)
        k = min(max(int(x), low + 1), high - 1)


def guess_noise_multiplier(epsilon: float, delta: float, q: float, steps: int, rows: int = 1) -> float:
    """Return σ of a run whose privacy loss is normal with variance μ² and mean μ²/2, where μ² = steps · log(1 + χ²(σ))
    and χ² is that of one step, which contains Binomial(rows, q) of the rows."""
    z = math.sqrt(-2 * math.log(delta))
    mu = 2 * epsilon / (z + math.sqrt(z * z + 2 * epsilon))  # μ²/2 + z·μ = ε
    per_step, q = min(max(mu * mu / steps, 1e-18), 700.0), round_rate_up(q)
    if rows == 1:
        sigma = math.log1p(math.expm1(per_step) / q**2) ** -0.5
        return min(max(sigma, 2 * MIN_NOISE_MULTIPLIER), MAX_NOISE_MULTIPLIER / 2)
    low, high = 2 * MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER / 2
    while high / low > 1.001:
        sigma = math.sqrt(low * high)
        low, high = (sigma, high) if _log_chi_square(sigma, q, rows) > per_step else (low, sigma)
    return high


def _log_chi_square(sigma: float, q: float, rows: int) -> float:
    """Return log(1 + χ²) = log E[exp(i·j/σ²)] of independent i, j ~ Binomial(rows, q); infinite if it overflows."""
    if rows * rows / sigma**2 > 700:
        return math.inf
    inner = (math.comb(rows, j) * q**j * (1 - q) ** (rows - j) for j in range(rows + 1))
    return math.log(sum(p * (1 - q + q * math.exp(j / sigma**2)) ** rows for j, p in enumerate(inner)))


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
