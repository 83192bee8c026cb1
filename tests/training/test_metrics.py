import math

import pytest
import torch

from vgr_trl.training.step_metrics import Throughput, approximate_kl, weigh_by_tokens


def test_approximate_kl_by_hand():
    """Ratios 2 and 1/2: 2 - 1 - ln 2 = 0.306853, 1/2 - 1 + ln 2 = 0.193147; the last token does not count."""
    old = torch.tensor([[-2.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    new = old + torch.tensor([[math.log(2), -math.log(2), 5.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert approximate_kl(new, old, mask).tolist() == pytest.approx([0.5, 0.0], abs=1e-6)


def test_throughput_starts_a_new_window_after_each_reading():
    throughput = Throughput()
    throughput.add(tokens=300, samples=8)
    throughput.add(tokens=100, samples=8)
    assert throughput.rates(2.0) == {"perf/tokens_per_second": 200.0, "perf/samples_per_second": 8.0}
    assert throughput.rates(1.0) == {"perf/tokens_per_second": 0.0, "perf/samples_per_second": 0.0}


def test_every_token_counts_the_same_in_a_mean_over_micro_batches():
    """0.5 over 10 tokens and 0.2 over 30 make 0.275; the mean of the two would be 0.35."""
    metrics = {"kl": [0.5, 0.2], "entropy": [math.nan, 2.0], "loss": [1.0, 3.0], "entropy_penalty": [7.0]}
    weigh_by_tokens(metrics, ("kl", "entropy", "entropy_penalty", "perception_loss"), [10.0, 30.0])
    assert metrics == {"kl": [pytest.approx(0.275)], "entropy": [2.0], "loss": [1.0, 3.0], "entropy_penalty": [7.0]}


def test_micro_batches_without_tokens_leave_values_as_they_are():
    metrics = {"kl": [0.5, 0.2]}
    weigh_by_tokens(metrics, ("kl",), [0.0, 0.0])
    assert metrics == {"kl": [0.5, 0.2]}
