"""Strategies of correlated noise as whole matrices, and their sensitivity by going through all schedules."""

import math

import numpy as np


def matrix(coefficients, steps):
    """C itself."""
    c = np.pad(np.asarray(coefficients, float)[:steps], (0, max(0, steps - len(coefficients))))
    return np.array([[c[t - s] if t >= s else 0.0 for s in range(steps)] for t in range(steps)])


def brute_force(C, separation):
    """Over all schedules, with vectors that all point the way that adds up most: entries of |CᵀC|."""
    gram, steps = np.abs(C.T @ C), len(C)

    def schedules(first):
        yield ()
        for t in range(first, steps):
            yield from ((t, *later) for later in schedules(t + separation))

    return max(math.sqrt(gram[np.ix_(chosen, chosen)].sum()) for chosen in schedules(0))
