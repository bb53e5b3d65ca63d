"""Accounting: the ε of a DP-SGD run, and the noise that meets a target ε.

A step releases a Gaussian-noised sum over a Poisson draw: every example takes part with probability q (`sample_rate`),
and the noise has standard deviation σ (`noise_multiplier`) times the clipping bound. Neighbouring data sets differ by
adding or removing one example. All numbers come from Google's `dp_accounting`, and both accountants are upper bounds:

- `"pld"`: privacy loss distributions, discretised pessimistically by Connect-the-Dots (Doroshenko et al. 2022,
  arXiv:2207.04380) and composed by FFT. Within 0.1% of the exact ε in ordinary settings; never above `"rdp"`.
- `"rdp"`: Rényi DP of the sampled Gaussian (Mironov, Talwar and Zhang 2019, arXiv:1908.10530), turned into (ε, δ) by
  Proposition 12 of Canonne, Kamath and Steinke (arXiv:2004.00010). Some 10% above PLD at ε = 8, more at either end.

An accountant of your own is an object with a name and `epsilon(event, delta, relation)` (`Accountant`). It may be
given wherever these two are.

`gaussian` holds the numerics, `events` accounts for the releases of any mechanism, and `calibration` searches for
noise and steps. `dp_accounting`, numpy and scipy are imported by the first call, not with this package.
"""

from __future__ import annotations

from .accountants import (
    ACCOUNTANTS,
    Accountant,
    check_accountant,
    check_count,
    check_delta,
    check_noise,
    check_rate,
    register_accountant,
)
from .calibration import calibrate_noise_multiplier
from .events import event_epsilon, phases_epsilon
from .gaussian import group_epsilon

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "calibrate_noise_multiplier",
    "compute_epsilon",
    "event_epsilon",
    "group_epsilon",
    "register_accountant",
]


def compute_epsilon(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str | Accountant = "pld"
) -> float:
    """Return ε at `delta` of `steps` Poisson-subsampled Gaussian steps, if one example is added or removed.

    Args:
        noise_multiplier: σ, the noise's standard deviation over the clipping bound; 0 (below 1e-6) spends ε = inf.
        sample_rate: q, the probability that a step contains a given example, in [0, 1].
        steps: Number of optimizer steps taken, empty draws included.
        delta: The δ of (ε, δ)-DP, in (0, 1).
        accountant: `"pld"` (tight), `"rdp"`, or one of your own.

    Returns:
        An upper bound of ε, at least 0. `"pld"` returns the RDP bound where PLD would take too long (σ below about
        0.005, more than a million steps) or exceed float64 (δ below about 4e-16 * `steps`).

    Raises:
        ValueError: An argument is out of range.

    Example::

        >>> from dp_transformers import compute_epsilon
        >>> round(compute_epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 2)
        1.83
    """
    name = check_accountant(accountant)
    phase = check_noise(noise_multiplier), check_rate(sample_rate), check_count("steps", steps)
    return phases_epsilon([phase] if phase[2] else [], check_delta("delta", delta), name)
