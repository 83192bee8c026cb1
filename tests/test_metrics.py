import math

import pytest
import torch

from vgr_trl.metrics import Throughput, approximate_kl


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
