"""The slope of a long run, by hand."""

import pytest


@pytest.fixture
def long_run(module):
    return module("long_run")


def test_the_slope_of_a_line_is_exact(long_run):
    samples = [{"step": 10 * number, "memory": 3 + 0.5 * 10 * number} for number in range(1, 41)]
    assert long_run.slope(samples, "memory") == pytest.approx((0.5, 0), abs=1e-9)


def test_the_error_of_the_slope_is_that_of_a_fit_through_ten_means(long_run):
    """Means 1 -1 1 -1 … at 1 to 10: slope -5/82.5; the squares left are 10 - 25/82.5; error² = left / 8 / 82.5."""
    samples = [{"step": number, "memory": 1 if number % 2 else -1} for number in range(1, 11)]
    left = 10 - 25 / 82.5
    assert long_run.slope(samples, "memory") == pytest.approx((-5 / 82.5, (left / 8 / 82.5) ** 0.5))
