"""Two real processes shape the advantages that one shapes, and log the same metrics."""

import pytest
import shaping_worker
import torch
from support.launching import results_of


@pytest.fixture(scope="module")
def results():
    """Of one process, then of each of two."""
    alone = shaping_worker.shaped(0, 1, lambda tensor: tensor)
    return [alone, *results_of(shaping_worker.shaped_in_group, processes=2)]


@pytest.mark.parametrize("weighting", shaping_worker.WEIGHTINGS)
def test_two_processes_shape_what_one_does(results, weighting):
    alone, first, second = (result[weighting] for result in results)
    together = torch.tensor(first["advantages"] + second["advantages"])
    assert torch.allclose(together, torch.tensor(alone["advantages"]), atol=1e-6)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
    assert alone["metrics"]["dynamic_scaling_max"] > 1.01
    assert alone["metrics"]["scaling_factor_mean"] == pytest.approx(1, abs=1e-6)
