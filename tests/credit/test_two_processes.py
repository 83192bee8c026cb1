"""Two real processes shape the advantages that one shapes, and log the same metrics."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import outputs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shaping")
    worker = Path(__file__).with_name("shaping_worker.py")
    ranks = [(0, 1), (0, 2), (1, 2)]
    started = [
        subprocess.Popen([sys.executable, worker, str(rank), str(world), folder], stderr=subprocess.PIPE)
        for rank, world in ranks
    ]
    errors = [error.decode() for _, error in outputs(*started)]
    assert [process.returncode for process in started] == [0, 0, 0], errors
    return {rank: json.loads((folder / f"{rank[1]}-{rank[0]}.json").read_text()) for rank in ranks}


@pytest.mark.parametrize("weighting", ["filter", "soft", "plug-in"])
def test_two_processes_shape_what_one_does(results, weighting):
    alone, first, second = (results[rank][weighting] for rank in ((0, 1), (0, 2), (1, 2)))
    together = torch.tensor(first["advantages"] + second["advantages"])
    assert torch.allclose(together, torch.tensor(alone["advantages"]), atol=1e-6)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
    assert alone["metrics"]["dynamic_scaling_max"] > 1.01
    assert alone["metrics"]["scaling_factor_mean"] == pytest.approx(1, abs=1e-6)
