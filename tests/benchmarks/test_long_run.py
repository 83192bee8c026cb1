"""The slope of a long run, by hand."""

from argparse import Namespace

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


def test_the_page_says_how_long_a_log_is_in_the_history(long_run):
    """Of 40 logs, 1.2 kB of each."""
    samples = [
        dict.fromkeys(long_run.UNITS, 1.0) | {"step": 10 * logs, "logs": logs, "history of logs": 1.2e-3 * logs}
        for logs in range(1, 41)
    ]
    page = long_run.report(samples, Namespace(steps=400, prompts=4, megabytes=1))
    assert "40 entries at the end, 1200 bytes each" in page
    assert "| history of logs | 0.0012 MB | 0.0132 MB | 0.048 MB | 0.048 MB | +0.048 ± " in page
