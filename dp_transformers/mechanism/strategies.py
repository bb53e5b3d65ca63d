"""Strategy matrices of correlated noise, given by their coefficients. Free of torch.

Correlated noise is C⁻¹z for independent normal z, where the *strategy* C is lower triangular and Toeplitz: its entry
in row t and column s is the coefficient t - s. The sums of gradients G with this noise are a function of CG + z, so
they are as private as a Gaussian mechanism that releases CG. The prefix sums of the noise, which are what the weights
carry after so many steps, have the cumulative sums of the coefficients of C⁻¹.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Coefficients = Sequence[float] | np.ndarray


def square_root(count: int) -> np.ndarray:
    """Return the first coefficients of the square root of the prefix-sum matrix (Henzinger, Upadhyay and Upadhyay
    2022, arXiv 2202.11205): 1, 1/2, 3/8, ..."""
    k = np.arange(1, count)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


def buffered(weights: Coefficients, decays: Coefficients, count: int) -> np.ndarray:
    """Return the first coefficients of a buffered linear Toeplitz matrix (McMahan et al. 2024, arXiv 2404.16706): 1,
    and then Σ weight · decay^(k-1)."""
    later = np.asarray(decays, float)[:, None] ** np.arange(count - 1)
    return np.concatenate([[1.0], np.asarray(weights, float) @ later])


def inverse(coefficients: Coefficients, count: int) -> np.ndarray:
    """Return the first coefficients of the inverse matrix."""
    return _solved(coefficients, np.eye(1, count)[0])


def sensitivity(coefficients: Coefficients, steps: int, separation: int) -> float:
    """Return the largest norm of Σ C[:, t]·g_t over vectors of norm ≤ 1 at steps t at least ``separation`` apart.

    It is exact for nonnegative, nonincreasing coefficients, since the columns 0, b, 2b, ... are then the worst
    (Kalinin and Lampert 2024, arXiv 2405.13763, Theorem 2). Other coefficients are bounded by the smallest such
    sequence above their absolute values. It is infinite if coefficients overflow."""
    c = np.abs(np.asarray(coefficients, float)[:steps])
    majorant = np.zeros(steps)
    majorant[: len(c)] = np.maximum.accumulate(c[::-1])[::-1]
    for position in range(separation, steps):
        majorant[position] += majorant[position - separation]
    norm = float(np.linalg.norm(majorant))
    return math.inf if math.isnan(norm) else norm


def prefix_error(inverse_coefficients: Coefficients) -> float:
    """Return the root mean square over steps, one for each coefficient of C⁻¹, of the standard deviation of the noise
    in the prefix sums."""
    sums = np.cumsum(inverse_coefficients)
    return math.sqrt(np.mean(np.cumsum(sums**2)))


def optimal_bands(steps: int, bands: int) -> np.ndarray:
    """Return the coefficients of the matrix with ``bands`` bands and columns of norm 1 that has the smallest
    `prefix_error` (Choquette-Choo et al. 2023, arXiv 2306.08153)."""
    from scipy.optimize import minimize

    ones, shares = np.ones(steps), np.arange(steps, 0, -1) / steps  # weight of a step's sum in the mean

    def error_and_slope(later: np.ndarray) -> tuple[float, np.ndarray]:
        c = np.concatenate([[1.0], later])
        sums = _solved(c, ones)
        error, norm = shares @ sums**2, c @ c
        adjoint = _solved(c, (2 * shares * sums)[::-1])[::-1]
        slope = -np.array([adjoint[j:] @ sums[: steps - j] for j in range(1, bands)])
        return math.log(error * norm), slope / error + 2 * later / norm

    start = square_root(bands)[1:]
    options = {"maxiter": 10_000, "maxfun": 100_000, "ftol": 1e-15, "gtol": 1e-9}
    with np.errstate(over="ignore", invalid="ignore"):  # some steps of the search are too long
        found: Any = minimize(error_and_slope, start, jac=True, method="L-BFGS-B", options=options)
    c = np.concatenate([[1.0], found.x])
    return c / np.linalg.norm(c)


def optimal_decay(steps: int, separation: int) -> float:
    """Return the λ of C⁻¹ = (1, -λ) that minimises `sensitivity` times `prefix_error`."""
    from scipy.optimize import minimize_scalar

    def error(decay: float) -> float:
        c = decay ** np.arange(steps)
        return prefix_error(inverse(c, steps)) * sensitivity(c, steps, separation)

    found: Any = minimize_scalar(error, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-9})
    return float(found.x)


def optimal_buffers(steps: int, separation: int, buffers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and decays of `buffered` that minimise `sensitivity` times `prefix_error` locally."""
    from scipy.optimize import minimize
    from scipy.special import expit

    def error(logits: np.ndarray) -> float:
        c = buffered(*_shares_and_decays(expit(logits)), steps)
        return math.log(prefix_error(inverse(c, steps)) * sensitivity(c, steps, separation))

    start = np.concatenate([np.full(buffers, -1.0), np.linspace(0.0, math.log(steps), buffers)])
    found: Any = minimize(error, start, method="L-BFGS-B")
    return _shares_and_decays(expit(found.x))


def _shares_and_decays(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights, each a share of the remainder so that they sum to less than 1 and coefficients do not increase,
    and decays."""
    shares, decays = np.split(numbers, 2)
    return shares * np.concatenate([[1.0], np.cumprod(1 - shares)[:-1]]), decays


def _solved(coefficients: Coefficients, right: np.ndarray) -> np.ndarray:
    """Solve Cx = right."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], np.asarray(coefficients, float), right))
