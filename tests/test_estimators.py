"""Bounds of audits, beside numbers that other implementations and the papers give."""

import pytest

from dp_transformers.auditing.estimators import (
    clopper_pearson_epsilon_lower_bound,
    largest_one_run_bound,
    one_run_epsilon_lower_bound,
    one_run_fdp_epsilon_lower_bound,
    one_run_p_value,
)

P_VALUES = {  # by canaries, guesses, right ones, epsilon and delta
    (1000, 100, 90, 1, 0): 2.73581280e-5,
    (1000, 100, 90, 1, 1e-5): 8.41288561e-4,
    (1000, 100, 90, 1, 1e-3): 0.08142040,
    (100, 100, 60, 0, 0): 0.02844397,
    (1000, 1000, 600, 0.3, 1e-5): 0.05459832,
}
ONE_RUN = {  # by canaries, guesses, right ones and delta: any mechanism, and one like a Gaussian
    (100, 100, 100, 0): (3.492965, None),
    (1000, 1000, 1000, 0): (5.809068, None),
    (1000, 1000, 1000, 1e-5): (5.782283, 12.33457),
    (1000, 100, 90, 0): (1.630823, None),
    (1000, 1000, 600, 0): (0.29747, None),
    (1000, 200, 180, 1e-5): (1.79629, 2.90124),
    (1000, 100, 52, 1e-5): (0, 0),
    (1000, 100, 90, 1e-5): (1.626144, 2.456405),
    (1000, 100, 95, 1e-5): (2.165176, 3.323300),
    (1000, 100, 99, 1e-5): (3.002832, 4.726715),
    (1000, 200, 150, 1e-5): (0.819973, 1.296916),
    (1000, 1000, 600, 1e-5): (0.297227, 0.583540),
    (10000, 500, 500, 1e-5): (4.83351, 7.39363),
    (10000, 10000, 7000, 1e-6): (0.811195, 1.565601),
    (1000, 1000, 500, 1e-5): (0, 0),
}
RATES = {  # by true positives, trials with the canary, false positives, trials without it and delta
    (1000, 1000, 0, 1000, 0): 5.600588,
    (500, 1000, 0, 1000, 1e-5): 4.846141,
    (900, 1000, 100, 1000, 1e-5): 1.989695,
    (100, 1000, 10, 1000, 1e-5): 1.500257,
    (100, 100, 0, 100, 0): 3.281346,
    (50, 100, 50, 100, 0): 0,
}


def test_bounds_have_the_published_digits():
    for numbers, expected in P_VALUES.items():
        assert one_run_p_value(*numbers) == pytest.approx(expected, rel=1e-6)
    for numbers, (any_mechanism, like_a_gaussian) in ONE_RUN.items():
        assert one_run_epsilon_lower_bound(*numbers) == pytest.approx(any_mechanism, abs=6e-6)
        if like_a_gaussian is not None:
            assert one_run_fdp_epsilon_lower_bound(*numbers) == pytest.approx(like_a_gaussian, abs=6e-6)
    strict = (5000, 400, 380, 1e-6, 0.99)
    assert one_run_epsilon_lower_bound(*strict) == pytest.approx(2.41994, abs=6e-6)
    assert one_run_fdp_epsilon_lower_bound(*strict) == pytest.approx(3.51839, abs=6e-6)
    for numbers, expected in RATES.items():
        assert clopper_pearson_epsilon_lower_bound(*numbers) == pytest.approx(expected, abs=6e-7)
    assert largest_one_run_bound(1000, 1000, 1e-5) == pytest.approx(5.782283, abs=6e-6)


@pytest.mark.parametrize(
    "numbers", [(10, 20, 5, 0), (10, 5, 6, 0), (10, 5, -1, 0), (10, 5, 5, 1.0), (10, 5, 5, 0, 1), (0, 0, 0, 0)]
)
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match=r"counts must not be negative|delta must be in"):
        one_run_epsilon_lower_bound(*numbers)
